"""Aligned anonymous memory for direct I/O.

A Buffer starts on a 2 MiB boundary and asks the kernel for huge pages, which carry more than twice the
bandwidth of ordinary ones: a request into them is a few long segments, not hundreds of 4 KiB ones. It holds
no memory until it is touched, and then exactly what was touched.
"""

import ctypes
import errno
import mmap
import resource
from types import TracebackType
from typing import Final

HUGE_NBYTES: Final = 2 << 20
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; Python's mmap has no name for it


def _shortage() -> str:
    """What there was to have, in words, for the message of a refusal."""
    facts = []
    try:
        with open("/proc/meminfo") as lines:
            free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
        facts.append(f"{free} bytes are available")
    except (OSError, StopIteration):
        pass
    for name, limit in (("RLIMIT_DATA", resource.RLIMIT_DATA), ("RLIMIT_AS", resource.RLIMIT_AS)):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            facts.append(f"{name} is {soft} bytes")
    return ", ".join(facts) or "the system doesn't say how much there is"


class Buffer:
    """`nbytes` of private zeroed memory. Raises MemoryError when the mapping is refused.

    Attributes:
        address: of the first byte, a multiple of 2 MiB (of the page size for a Buffer smaller than that).
        nbytes: the usable length.
        view: a writable memoryview of exactly those bytes.
        huge: whether the kernel took the advice to back it with huge pages.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes <= 0:
            raise ValueError(f"a Buffer needs a positive number of bytes, not {nbytes}")
        # Only whole huge pages are advised, so that the rest doesn't hold 2 MiB for its few bytes.
        huge_nbytes = nbytes - nbytes % HUGE_NBYTES
        slack = HUGE_NBYTES if huge_nbytes else 0
        try:
            self._map = mmap.mmap(-1, nbytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"no memory for a Buffer of {nbytes} bytes: {error}; {_shortage()}") from error
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        skip = -start % HUGE_NBYTES if slack else 0
        self._skip = skip
        self.address = start + skip
        self.nbytes = nbytes
        self.view = self._cut()
        self.huge = False
        if huge_nbytes and hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE, skip, huge_nbytes)
                self.huge = True
            except OSError:
                pass  # a kernel built without them: the memory is good all the same

    def _cut(self) -> memoryview:
        with memoryview(self._map) as whole:
            return whole[self._skip : self._skip + self.nbytes]

    def touch(self) -> None:
        """Makes all of it resident now, its bytes unchanged, so that no later use waits for the kernel.

        Do it before a file is written from fresh memory: the kernel would back that with its shared page of
        zeros, and some kernels can't make a huge page of it any more. Raises MemoryError when there isn't
        enough.
        """
        try:
            self._map.madvise(_MADV_POPULATE_WRITE, self._skip, self.nbytes)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise MemoryError(
                    f"no memory to fill a Buffer of {self.nbytes} bytes: {_shortage()}"
                ) from error
            with self.view[:: mmap.PAGESIZE] as every:
                every[:] = bytes(every)

    def close(self) -> None:
        """Gives the memory back. Raises BufferError, and stays open, while arrays or views of it live."""
        try:
            self.view.release()
            self._map.close()
        except BufferError as error:
            self.view = self._cut()
            message = f"a Buffer of {self.nbytes} bytes can't close while views of it live: {error}"
            raise BufferError(message) from error

    def __enter__(self) -> "Buffer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
