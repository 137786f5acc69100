"""The writer of a trace: one fixed-size record an event, into a shared mapping of the file.

A record is in the page cache, hence in the file for every other process, when `Trace.record` returns: a
process that is killed loses nothing of its trace. A disk that fills up stops the trace with one warning and
never the training.
"""

import errno
import fcntl
import hashlib
import json
import mmap
import os
import tempfile
import time
import warnings
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeAlias

from tiermem.trace.errors import TraceError
from tiermem.trace.events import Event, PageInfo
from tiermem.trace.layout import (
    CLOSED,
    FIRST_RECORD_ALIGNMENT,
    HEADER,
    MAGIC,
    NUM_RECORDS_OFFSET,
    OPEN,
    RECORD,
    STATE_OFFSET,
    STOPPED,
    VERSION,
    WINDOW,
)
from tiermem.trace.place import reason, replaceable

JSON: TypeAlias = bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"] | None


class Trace:
    """An open trace file. Calls of one trace must not overlap: the caller holds the pager's lock.

    ``step`` is written into every record: whoever counts the steps sets it, -1 outside of them.
    """

    __slots__ = ("__weakref__", "_end", "_fd", "_first", "_grown", "_map", "_offset", "_pack", "path", "step")

    def __init__(self, path: Path, fd: int, first: int) -> None:
        """Take over an open, locked file that has its header. `create` is the way in."""
        self.path = path
        self.step = -1
        self._fd = fd
        self._first = first
        self._grown = first  # where the next window of the file begins
        self._map: mmap.mmap | bytearray = _NOTHING
        self._pack = RECORD.pack_into
        self._offset = self._end = 0  # within the window
        self._grow()
        _OPEN_TRACES.add(self)

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        units: Sequence[str],
        pages: Sequence[PageInfo],
        budgets: Mapping[str, int],
        meta: Mapping[str, JSON] | None = None,
    ) -> "Trace":
        """Begin a trace at ``path``, in place of a file that is there already; only its owner may read it.

        ``units`` are the units' names in the order of their indices, ``budgets`` the bytes each tier may
        hold ("device", "host", "disk"), ``meta`` whatever else the reader should know. Of ``meta`` the
        reading side knows: "rank" and "world" (numbers), "limits" (bytes per second a link was measured to
        carry, as {"disk->host": 2.1e9}), "policy" (the policy file as it was read).

        Raises `TraceError` where the file can't be created: no such folder, no permission, not a regular
        file, no space.
        """
        where = Path(path)
        header, first = _header(units, pages, budgets, meta or {})
        fd = _create(where, header, first)
        try:
            return cls(where, fd, first)
        except OSError as error:
            os.close(fd)
            raise TraceError(f"can't map the trace {where}: {reason(error)}") from error

    def record(
        self,
        event: int,
        start: int,
        duration: int,
        unit: int = -1,
        page: int = -1,
        nbytes: int = 0,
        source: int = 0,
        target: int = 0,
        reason: int = 0,
        phase: int = 3,
    ) -> None:
        """Write one event; ``start`` and ``duration`` in nanoseconds of ``time.perf_counter_ns()``.

        Which fields go with which event: `tiermem.trace.events`. Does nothing once the trace is closed or
        has stopped for want of disk space.
        """
        offset = self._offset
        if offset == self._end:
            if not self._next_window():
                return
            offset = 0
        self._pack(
            self._map,
            offset,
            start,
            duration,
            nbytes,
            unit,
            page,
            self.step,
            source,
            target,
            reason,
            phase,
            event,
        )
        # Only now: a call that was interrupted half way is overwritten by the next.
        self._offset = offset + 48

    def flush(self) -> None:
        """Have the file on the disk, not only in the page cache: for a machine that may lose its power."""
        if isinstance(self._map, mmap.mmap):
            self._map.flush()
            os.fsync(self._fd)

    def close(self) -> None:
        """Cut the unused tail off, seal the header, close. A second call does nothing."""
        self._finish(CLOSED)

    def _num_records(self) -> int:
        if self._map is _NOTHING:
            return 0
        return (self._grown - WINDOW - self._first + self._offset) // RECORD.size

    def _grow(self) -> None:
        # posix_fallocate and not ftruncate: a store to a mapped hole that the disk has no room for is a
        # SIGBUS, which would kill the training; here it is an OSError.
        os.posix_fallocate(self._fd, self._grown, WINDOW)
        window = mmap.mmap(self._fd, WINDOW, mmap.MAP_SHARED, offset=self._grown)
        if isinstance(self._map, mmap.mmap):
            self._map.close()
        self._map = window
        self._grown += WINDOW
        self._offset = 0
        self._end = WINDOW

    def _next_window(self) -> bool:
        if self._fd < 0:
            return False
        try:
            self._grow()
        except OSError as error:
            number = self._num_records()
            self._finish(STOPPED)
            warnings.warn(
                f"the trace {self.path} stops after {number} records: {WINDOW} more bytes asked of the disk, "
                f"which said: {reason(error)}. Training goes on without it.",
                RuntimeWarning,
                stacklevel=3,
            )
            return False
        return True

    def _finish(self, state: int) -> None:
        if self._fd < 0:
            return
        number = self._num_records()
        self._abandon()
        fd, self._fd = self._fd, -1
        try:
            os.ftruncate(fd, self._first + number * RECORD.size)
            # The number before the state that says it is there: somebody may be reading.
            os.pwrite(fd, number.to_bytes(8, "little", signed=True), NUM_RECORDS_OFFSET)
            os.pwrite(fd, bytes([state]), STATE_OFFSET)
        except OSError as error:
            # Losing the seal costs the reader a scan; it is no reason to fail what is being closed.
            warnings.warn(f"the trace {self.path} could not be sealed: {error}", RuntimeWarning, stacklevel=3)
        finally:
            os.close(fd)

    def _abandon(self) -> None:
        if isinstance(self._map, mmap.mmap):
            self._map.close()
        self._map = _NOTHING
        self._offset = self._end = 0


class NullTrace:
    """The same face where no trace is wanted: every call does nothing."""

    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step = -1

    def record(
        self,
        event: int,
        start: int,
        duration: int,
        unit: int = -1,
        page: int = -1,
        nbytes: int = 0,
        source: int = 0,
        target: int = 0,
        reason: int = 0,
        phase: int = 3,
    ) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


AnyTrace: TypeAlias = Trace | NullTrace
"""What a caller holds: a trace that writes, or one that does not."""

_NOTHING = bytearray()  # in the place of a mapping: no window yet, or no longer
_OPEN_TRACES: "weakref.WeakSet[Trace]" = weakref.WeakSet()


def _forget_in_child() -> None:
    # A forked child (a data loader's worker) shares the mapping and the offset: what it recorded or cut off
    # would be its parent's. Closing the descriptor here leaves the parent's lock in place.
    for trace in list(_OPEN_TRACES):
        trace._abandon()
        if trace._fd >= 0:
            os.close(trace._fd)
            trace._fd = -1


os.register_at_fork(after_in_child=_forget_in_child)


def _header(
    units: Sequence[str], pages: Sequence[PageInfo], budgets: Mapping[str, int], meta: Mapping[str, JSON]
) -> tuple[bytes, int]:
    numbers = {page.number for page in pages}
    if len(numbers) != len(pages) or any(number < 0 for number in numbers):
        raise ValueError(
            f"page numbers must be unique and not negative: {len(pages)} pages, {len(numbers)} numbers"
        )
    outside = [page.number for page in pages if not 0 <= page.unit < len(units)]
    if outside:
        raise ValueError(f"pages {outside[:5]} name a unit that is not among the {len(units)} given")
    document = {
        "units": list(units),
        "pages": [asdict(page) for page in pages],
        "budgets": dict(budgets),
        "meta": dict(meta),
        "pid": os.getpid(),
        "clock": _clock(),
        "events": {str(event.value): event.name for event in Event},
    }
    body = json.dumps(document, separators=(",", ":")).encode()
    first = -(-(HEADER.size + len(body)) // FIRST_RECORD_ALIGNMENT) * FIRST_RECORD_ALIGNMENT
    head = HEADER.pack(MAGIC, VERSION, OPEN, RECORD.size, first, len(body), zlib.crc32(body), -1)
    return (head + body).ljust(first, b"\0"), first


def _clock() -> dict[str, JSON]:
    """Both clocks read together, and which machine's monotonic clock it is.

    Traces with the same ``domain`` share the monotonic clock; others are laid side by side by the wall clock.
    """
    before = time.perf_counter_ns()
    wall = time.time_ns()
    after = time.perf_counter_ns()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        boot = b""
    domain = hashlib.sha256(b"tiermem trace clock" + boot).hexdigest()[:16] if boot else ""
    return {"monotonic_ns": (before + after) // 2, "wall_ns": wall, "domain": domain}


def _create(path: Path, header: bytes, first: int) -> int:
    """Write the header to a file beside ``path`` and move it there; return its locked descriptor."""
    path = replaceable(path)
    temporary = ""
    fd = -1
    try:
        fd, temporary = tempfile.mkstemp(prefix=f".{path.name[:200]}.", suffix=".new", dir=path.parent)
        # The lock is how a reader tells a trace still being written from one whose writer died: it ends
        # with the process, however that ends.
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.posix_fallocate(fd, 0, first + WINDOW)
        written = os.pwrite(fd, header, 0)
        if written != len(header):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.replace(temporary, path)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise TraceError(f"can't create the trace {path}: {reason(error)}") from error
    return fd
