"""The libaio engine: requests to the kernel from a C thread that needs no GIL.

It keeps `depth` requests in flight however long Python is busy elsewhere, at a few percent of a core.
"""

import errno
import os
from typing import Any

from tiermem.aio._queue import ffi, lib
from tiermem.aio.engine import EngineQueue, Failure
from tiermem.aio.file import File

# Python runs signal handlers (KeyboardInterrupt) between waits of this length.
_WAIT_MILLISECONDS = 100


def _system_number(name: str) -> str:
    try:
        with open(f"/proc/sys/fs/{name}") as text:
            return text.read().strip()
    except OSError:
        return "unknown"


def _refusal(code: int, depth: int) -> OSError:
    """The kernel's refusal of a context, with its likely cause in words."""
    if code == errno.EAGAIN:
        cause = (
            f"the system's limit is used up (fs.aio-nr {_system_number('aio-nr')} of fs.aio-max-nr "
            f"{_system_number('aio-max-nr')}): lower the depth or raise the limit"
        )
    elif code in (errno.ENOSYS, errno.EPERM):
        cause = "this kernel or sandbox has no asynchronous I/O"
    else:
        cause = os.strerror(code)
    return OSError(code, f"io_setup for {depth} requests was refused: {cause}")


class LibaioQueue(EngineQueue[Any]):
    """A Queue over libaio. Raises OSError when the kernel refuses a context."""

    engine = "libaio"

    def __init__(self, request: int = 1 << 20, depth: int = 32) -> None:
        super().__init__(request, depth, "libaio, served by a thread of its own")
        queue = lib.queue_open(depth, request)
        if queue == ffi.NULL:
            raise _refusal(ffi.errno, depth)
        # The memory of queue and records lives as long as this object, so tickets survive close.
        self._queue = ffi.gc(queue, lib.queue_free)

    def _start(self, writing: bool, file: File, offset: int, address: int, nbytes: int) -> Any:
        record = lib.queue_submit(
            self._queue, writing, file.fd, offset, address, nbytes, file.alignment.offset
        )
        if record == ffi.NULL:
            if ffi.errno == errno.ESHUTDOWN:
                raise ValueError("the libaio queue was closed by another thread")
            raise MemoryError("no memory for the record of another transfer")
        return record

    def _landed(self, record: Any) -> bool:
        return bool(record.landed)

    def _await(self, record: Any) -> None:
        while not lib.queue_wait(self._queue, record, _WAIT_MILLISECONDS):
            pass

    def _settle(self, record: Any) -> Failure | None:
        failure = None
        if record.error:
            failure = Failure(
                record.error, record.at, record.asked, record.came, record.moved, bool(record.ended)
            )
        lib.queue_forget(self._queue, record)
        return failure

    def _stop(self) -> None:
        lib.queue_stop(self._queue)

    @property
    def nbytes_read(self) -> int:
        return lib.queue_moved(self._queue, False)

    @property
    def nbytes_written(self) -> int:
        return lib.queue_moved(self._queue, True)
