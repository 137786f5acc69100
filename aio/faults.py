"""A Queue that fails on demand, for tests of what stands on one: "fail the k-th transfer, for every k"."""

import ctypes
import errno
import itertools
import os
from collections.abc import Callable
from types import TracebackType
from typing import Literal

from tiermem.aio.file import File
from tiermem.aio.queue import Queue

Op = Literal["read", "write"]
Fail = Callable[[int, Op], int | Literal["short"] | None]


class FaultyQueue:
    """Wraps a queue and fails those of its transfers that `fail` picks; the error is raised at `wait`.

    Args:
        queue: the queue that does the work; closed with this one.
        fail: called once for each transfer, in order of submission, with its index (from 0) and "read" or
            "write". None lets it be; an errno fails it with nothing moved, but fills a read's memory with
            0xA5, as nothing may be believed of it; "short" moves its first half and fails with EIO.
    """

    def __init__(self, queue: Queue, fail: Fail) -> None:
        self.engine = queue.engine
        self.note = f"faulty: {queue.note}"
        self.num_submitted = 0
        self._queue = queue
        self._fail = fail
        self._numbers = itertools.count(1)
        self._tickets: dict[int, tuple[int | None, OSError | None]] = {}

    def read(self, file: File, offset: int, address: int, nbytes: int) -> int:
        return self._submit("read", file, offset, address, nbytes)

    def write(self, file: File, offset: int, address: int, nbytes: int) -> int:
        return self._submit("write", file, offset, address, nbytes)

    def _submit(self, op: Op, file: File, offset: int, address: int, nbytes: int) -> int:
        file.check(offset, address, nbytes)
        fault = self._fail(self.num_submitted, op)
        self.num_submitted += 1
        begin = self._queue.read if op == "read" else self._queue.write
        inner: int | None = None
        error: OSError | None = None
        if fault is None:
            inner = begin(file, offset, address, nbytes)
        elif fault == "short":
            half = nbytes // 2 - nbytes // 2 % file.alignment.offset
            if half:
                inner = begin(file, offset, address, half)
            text = f"{op} of {nbytes} bytes at offset {offset}: a short {op}: {half} came (injected)"
            error = OSError(errno.EIO, text, file.path)
        else:
            if op == "read":
                ctypes.memset(address, 0xA5, nbytes)
            text = f"{op} of {nbytes} bytes at offset {offset}: {os.strerror(fault)}: 0 came (injected)"
            error = OSError(fault, text, file.path)
        ticket = next(self._numbers)
        self._tickets[ticket] = (inner, error)
        return ticket

    def done(self, ticket: int) -> bool:
        inner, _ = self._entry(ticket)
        return inner is None or self._queue.done(inner)

    def wait(self, ticket: int) -> None:
        inner, error = self._entry(ticket)
        try:
            if inner is not None:
                self._queue.wait(inner)
        except OSError:
            del self._tickets[ticket]
            raise
        del self._tickets[ticket]
        if error is not None:
            raise error

    def _entry(self, ticket: int) -> tuple[int | None, OSError | None]:
        try:
            return self._tickets[ticket]
        except KeyError:
            raise ValueError(f"ticket {ticket} is unknown: never given, or already waited for") from None

    def close(self) -> None:
        self._queue.close()

    @property
    def nbytes_read(self) -> int:
        return self._queue.nbytes_read

    @property
    def nbytes_written(self) -> int:
        return self._queue.nbytes_written

    def __enter__(self) -> "FaultyQueue":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
