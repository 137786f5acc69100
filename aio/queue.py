"""The Queue, which moves bytes between files and memory while its caller does other work.

A transfer of any size is one ticket; the queue splits it into requests. Completions are polled with `done`,
errors are raised where someone waits. Transfers of overlapping ranges in flight at the same time are not
ordered among themselves.

Note: fork. A queue's threads stay in the process that opened it: in a child, submitting and waiting raise
RuntimeError. Fork while no read is in flight: memory that is being filled may otherwise be copied half full.
"""

from types import TracebackType
from typing import Protocol

from tiermem.aio.file import File
from tiermem.aio.threads import ThreadQueue


class Queue(Protocol):
    """What every engine promises. All methods may be called from any thread."""

    engine: str
    """"libaio" or "threads"."""
    note: str
    """In plain words, why it is that engine."""

    def read(self, file: File, offset: int, address: int, nbytes: int) -> int:
        """Begins to fill `nbytes` of memory at `address` from `offset` in the file; returns a ticket at once.

        The memory must stay there, untouched, and the file open until the transfer has ended. Raises
        ValueError, with the numbers, for what the file's alignment forbids and after close.
        """
        ...

    def write(self, file: File, offset: int, address: int, nbytes: int) -> int:
        """Begins to write `nbytes` of memory at `address` to `offset` in the file; otherwise as `read`."""
        ...

    def done(self, ticket: int) -> bool:
        """Whether the transfer has ended, well or badly. Never blocks and costs no system call."""
        ...

    def wait(self, ticket: int) -> None:
        """Blocks, the GIL released, until the transfer has ended; then the ticket is forgotten.

        Raises OSError (errno, text, path) if it failed; no part of it is in flight then, and how much of the
        memory or file has changed isn't known. Raises ValueError for a ticket unknown or waited for already.
        A wait that is broken off by another exception can be repeated.
        """
        ...

    def close(self) -> None:
        """Lets what is in flight land, then frees the queue. Idempotent; tickets can still be waited for."""
        ...

    @property
    def nbytes_read(self) -> int:
        """Bytes read since the queue was opened."""
        ...

    @property
    def nbytes_written(self) -> int:
        """Bytes written since the queue was opened."""
        ...

    def __enter__(self) -> "Queue": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_queue(engine: str = "auto", request: int = 1 << 20, depth: int = 32) -> Queue:
    """Opens a queue.

    Args:
        engine: "libaio", "threads", or "auto": libaio where the kernel gives it, else threads; the queue's
            `note` says why.
        request: the most bytes of one request, a multiple of 4096, at most 1 GiB.
        depth: the most requests in flight, 1 to 4096.

    Raises OSError when "libaio" is asked for and refused, ValueError for another engine.
    """
    if engine == "threads":
        return ThreadQueue(request, depth)
    if engine not in ("auto", "libaio"):
        raise ValueError(f'engine must be "auto", "libaio" or "threads", not {engine!r}')
    try:
        # Here, since the import fails where the extension's libaio.so.1 isn't installed.
        from tiermem.aio.libaio import LibaioQueue

        return LibaioQueue(request, depth)
    except (ImportError, OSError) as error:
        if engine == "libaio":
            raise
        reason = error.strerror if isinstance(error, OSError) else f"libaio can't be loaded: {error}"
        return ThreadQueue(request, depth, note=f"threads instead of libaio: {reason}")
