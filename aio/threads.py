"""The threads engine: the same Queue over preadv and pwritev in a pool of Python threads.

The oracle in tests, and the fallback where the kernel refuses asynchronous I/O. It gives the same bytes and
the same errors; it needs the GIL between requests, so it is slower while Python is busy.
"""

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tiermem.aio.engine import EngineQueue, Failure
from tiermem.aio.file import File

VectorCall = Callable[[int, Sequence[memoryview], int], int]


class _Record:
    """A transfer's progress. Guarded by `lock`; `landed` is set last."""

    __slots__ = (
        "active",
        "address",
        "failure",
        "fd",
        "grain",
        "issued",
        "landed",
        "lock",
        "moved",
        "nbytes",
        "offset",
        "writing",
    )

    def __init__(self, writing: bool, fd: int, offset: int, address: int, nbytes: int, grain: int) -> None:
        self.writing = writing
        self.fd = fd
        self.offset = offset
        self.address = address
        self.nbytes = nbytes
        self.grain = grain
        self.lock = threading.Lock()
        self.issued = 0
        self.active = 0
        self.moved = 0
        self.failure: Failure | None = None
        self.landed = threading.Event()


class ThreadQueue(EngineQueue[_Record]):
    """A Queue over threads. `preadv` and `pwritev` can be replaced by tests."""

    engine = "threads"

    def __init__(
        self,
        request: int = 1 << 20,
        depth: int = 32,
        note: str = "threads, as asked",
        preadv: VectorCall = os.preadv,
        pwritev: VectorCall = os.pwritev,
    ) -> None:
        super().__init__(request, depth, note)
        self._calls = (preadv, pwritev)
        self._moved = [0, 0]
        self._pool = ThreadPoolExecutor(depth, thread_name_prefix="tiermem-aio")

    def _start(self, writing: bool, file: File, offset: int, address: int, nbytes: int) -> _Record:
        record = _Record(writing, file.fd, offset, address, nbytes, file.alignment.offset)
        try:
            for _ in range(min(self.depth, -(-nbytes // self.request))):
                self._pool.submit(self._serve, record)
        except RuntimeError as error:  # how the pool says that it was shut down
            raise ValueError("the threads queue was closed by another thread") from error
        return record

    def _serve(self, record: _Record) -> None:
        """Moves one request after another until none is left to begin."""
        while True:
            with record.lock:
                if record.failure or record.issued == record.nbytes:
                    return
                begin = record.issued
                length = min(self.request, record.nbytes - begin)
                record.issued += length
                record.active += 1
            came, failure = self._move(record, begin, length)
            with record.lock:
                record.active -= 1
                record.moved += came
                record.failure = record.failure or failure
                ended = not record.active and (record.failure or record.issued == record.nbytes)
            with self._lock:
                self._moved[record.writing] += came
            if ended:
                record.landed.set()

    def _move(self, record: _Record, begin: int, length: int) -> tuple[int, Failure | None]:
        """One request, resumed when it comes short: the bytes that came, and why not all of them."""
        call = self._calls[record.writing]
        came = 0
        while came < length:
            memory = (ctypes.c_char * (length - came)).from_address(record.address + begin + came)
            at = record.offset + begin + came
            try:
                with memoryview(memory) as view:
                    result = call(record.fd, [view], at)
            except InterruptedError:
                continue
            except OSError as error:
                return came, Failure(error.errno or errno.EIO, at, length - came, 0, 0, False)
            came += result
            if came < length and (result == 0 or result % record.grain):
                return came, Failure(errno.EIO, at, length - came + result, result, 0, True)
        return came, None

    def _landed(self, record: _Record) -> bool:
        return record.landed.is_set()

    def _await(self, record: _Record) -> None:
        record.landed.wait()

    def _settle(self, record: _Record) -> Failure | None:
        return record.failure and record.failure._replace(moved=record.moved)

    def _stop(self) -> None:
        self._pool.shutdown(wait=True)

    @property
    def nbytes_read(self) -> int:
        return self._moved[False]

    @property
    def nbytes_written(self) -> int:
        return self._moved[True]
