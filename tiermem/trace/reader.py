"""The reader of a trace file: of one that is complete, still being written, cut short or damaged.

What can be trusted is opened; what can't is described in `TraceFile.damage`. Nothing in a file is believed
before it was checked, and names are handed on as they are: whoever shows them has to escape them.
"""

import fcntl
import json
import mmap
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tiermem.trace.errors import TraceError
from tiermem.trace.events import Event, PageInfo, Phase, Reason, Tier
from tiermem.trace.layout import CLOSED, HEADER, MAGIC, OPEN, RECORD, STOPPED, VERSION
from tiermem.trace.place import reason

RECORD_DTYPE = np.dtype(
    {
        "names": [
            "start",
            "duration",
            "nbytes",
            "unit",
            "page",
            "step",
            "source",
            "target",
            "reason",
            "phase",
            "event",
        ],
        "formats": ["<i8", "<i8", "<i8", "<i4", "<i4", "<i4", "u1", "u1", "u1", "u1", "u1"],
        "offsets": [0, 8, 16, 24, 28, 32, 36, 37, 38, 39, 47],
        "itemsize": RECORD.size,
    }
)
"""One record as numpy sees it; the fields are those of `tiermem.trace.Trace.record`."""

Records: TypeAlias = npt.NDArray[np.void]

_SCAN = 1 << 18  # records read at a time while looking for the end or for damage: 12 MiB
_MAX_NS = 1 << 60  # 36 years: a time beyond this is damage, and the sum of two below it fits 64 bits
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # not to wait on a pipe that is given as a trace

_KNOWN_EVENT = np.isin(np.arange(256), [event.value for event in Event])
_KNOWN_REASON = np.isin(np.arange(256), [reason.value for reason in Reason])


class TraceFile:
    """An open trace.

    ``records`` are in the order of recording: an instant where it happened, a span at its end. ``units`` are
    names, ``pages`` what is known of each page by its number (of one that came into being after the writer
    began, its unit and size), ``budgets`` bytes by tier, ``meta`` what the writer was given. ``damage`` is
    None, or says what is wrong from ``len(records)`` on.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the trace at ``path``. Raises `TraceError` where it is none or its header can't be trusted."""
        self.path = Path(path)
        try:
            self._fd = os.open(self.path, _OPEN_FLAGS)
        except OSError as error:
            raise TraceError(f"can't open the trace {path}: {reason(error)}") from error
        try:
            self._read_header()
            self.damage: str | None = None
            self.records: Records = np.empty(0, RECORD_DTYPE)
            self.refresh()
        except OSError as error:
            os.close(self._fd)
            if isinstance(error, TraceError):
                raise
            raise TraceError(f"can't read the trace {path}: {reason(error)}") from error
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        """Close the file. ``records`` stay valid until they are dropped."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "TraceFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether the writer has sealed the file; if not, it is `live` or died."""
        return bool(self._state == CLOSED)

    @property
    def live(self) -> bool:
        """Whether a process is still writing this file: it holds the file's lock until it ends."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return False

    def check_whole(self) -> None:
        """Raise `TraceError` where the file has lost records that are mapped here: to read them would be a SIGBUS."""
        size, end = os.fstat(self._fd).st_size, self._first + len(self.records) * RECORD.size
        if size < end and len(self.records):
            raise TraceError(
                f"{self.path} was cut short while it was open here: {size:,} of {end:,} bytes are left; open it again"
            )

    def is_file(self, there: os.stat_result) -> bool:
        """Whether ``there`` is the file that is open here, and not one that took its place."""
        here = os.fstat(self._fd)
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)

    def refresh(self) -> int:
        """Take in what was written since; returns the number of new records."""
        old = len(self.records)
        head = os.pread(self._fd, HEADER.size, 0)
        if len(head) < HEADER.size:
            raise TraceError(f"{self.path}: its header was cut off while it was open here")
        _, _, state, _, _, _, _, number = HEADER.unpack(head)
        count, damage = self._scan(old)
        if state != OPEN and damage is None and count != number:
            damage = f"{number} records were written, the file holds {count}: it was cut short or added to"
        if state == STOPPED and damage is None:
            damage = f"the disk was full after {count} records: what happened later was not recorded"
        self._state = state
        self.damage = damage
        if count > old:
            # Mapped to the last record and no further: the writer cuts off what lies behind it at close, and
            # a load from there would be a SIGBUS.
            end = self._first + count * RECORD.size
            mapped = mmap.mmap(self._fd, end, mmap.MAP_SHARED, mmap.PROT_READ)
            self.records = np.frombuffer(mapped, RECORD_DTYPE, count, self._first)
            new = self.records[old:]
            self._add_pages(new[new["event"] == Event.PAGE])
        return count - old

    def pieces(self, size: int = _SCAN) -> Iterator[Records]:
        """The records in pieces of at most ``size``, so that what is computed from them stays small."""
        for begin in range(0, len(self.records), size):
            yield self.records[begin : begin + size]

    def unit_name(self, unit: int) -> str:
        """The name of a unit; "" for none."""
        return self.units[unit] if 0 <= unit < len(self.units) else ""

    def kind_of(self, page: int) -> str:
        """The kind of a page; "" for none, "unknown" for a page that the header doesn't list."""
        if page < 0:
            return ""
        info = self.pages.get(page)
        return info.kind if info else "unknown"

    def _read_header(self) -> None:
        size = os.fstat(self._fd).st_size
        head = os.pread(self._fd, HEADER.size, 0)
        if head[: len(MAGIC)] != MAGIC:
            raise TraceError(f"{self.path} is not a tiermem trace: it begins with {head[: len(MAGIC)]!r}")
        if len(head) < HEADER.size:
            raise TraceError(f"{self.path}: cut short in its header, {size} of {HEADER.size} bytes are there")
        _, version, _, record_nbytes, first, json_nbytes, checksum, _ = HEADER.unpack(head)
        if version != VERSION:
            raise TraceError(
                f"{self.path} is a trace of version {version}; this tiermem reads version {VERSION}"
            )
        if record_nbytes != RECORD.size or first < HEADER.size + json_nbytes:
            raise TraceError(
                f"{self.path}: its header is damaged: records of {record_nbytes} bytes from byte {first} on"
            )
        if size < HEADER.size + json_nbytes:
            raise TraceError(
                f"{self.path}: cut short in its header, {size} of {HEADER.size + json_nbytes} bytes are there"
            )
        body = os.pread(self._fd, json_nbytes, HEADER.size)
        if zlib.crc32(body) != checksum:
            raise TraceError(
                f"{self.path}: its header is damaged: the names and sizes don't match their checksum"
            )
        self._first = first
        try:
            self._read_document(json.loads(body, parse_constant=_no_constant))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise TraceError(f"{self.path}: its header is not what a trace has: {error!r}") from error

    def _read_document(self, document: Mapping[str, Any]) -> None:
        self.units: Sequence[str] = tuple(_text(name) for name in document["units"])
        pages = [
            PageInfo(
                number=_number(page["number"], 1 << 31),
                unit=_number(page["unit"], len(self.units)),
                kind=_text(page["kind"]),
                dtype=_text(page["dtype"]),
                nbytes=_number(page["nbytes"], 1 << 62),
                names=tuple(_text(name) for name in page["names"]),
            )
            for page in document["pages"]
        ]
        self.pages: Mapping[int, PageInfo] = MappingProxyType({page.number: page for page in pages})
        budgets = {_text(tier): _number(nbytes, 1 << 62) for tier, nbytes in document["budgets"].items()}
        self.budgets: Mapping[str, int] = MappingProxyType(budgets)
        self.meta: Mapping[str, Any] = MappingProxyType(dict(document["meta"]))
        self.pid = _number(document["pid"], 1 << 31)
        clock = document["clock"]
        self.monotonic_ns = _number(clock["monotonic_ns"], _MAX_NS)
        self.wall_ns = _number(clock["wall_ns"], 1 << 63)
        self.clock_domain = _text(clock["domain"])

    def _add_pages(self, records: Records) -> None:
        """Take in pages that the header doesn't list."""
        if len(records):
            late = {
                int(each["page"]): PageInfo(
                    int(each["page"]), int(each["unit"]), "state", "", int(each["nbytes"]), ()
                )
                for each in records
                if each["page"] >= 0 and each["unit"] >= 0
            }
            self.pages = MappingProxyType({**late, **self.pages})

    def _scan(self, begin: int) -> tuple[int, str | None]:
        """Find how many records there are, reading on from number ``begin``; and what is wrong behind them.

        Reads the file and does not map it, since a writer that closes shortens it at the same time.
        """
        position = begin
        retried = -1
        while True:
            offset = self._first + position * RECORD.size
            raw = os.pread(self._fd, _SCAN * RECORD.size, offset)
            num, rest = divmod(len(raw), RECORD.size)
            piece = np.frombuffer(raw, RECORD_DTYPE, num)
            bad = np.flatnonzero(~self._plausible(piece))
            if len(bad) == 0:
                position += num
                if num == _SCAN:
                    continue
                if rest and raw[-rest:].strip(b"\0"):
                    return position, f"the file ends within record {position}, at byte {offset + len(raw)}"
                return position, None
            position += int(bad[0])
            remaining = piece[bad[0] :]
            if remaining["event"][0]:
                return position, f"record {position} is damaged: {self._why(remaining[0])}"
            later = self._written_after(position, remaining)
            if not later:
                return position, None
            # A record written while it was read here shows as a hole before the next: look again, once.
            if retried == position:
                return position, f"record {position} is missing, though {later} were written after it"
            retried = position

    def _written_after(self, position: int, remaining: Records) -> int:
        """How many records follow the empty one at ``position``: none, unless the file has a hole."""
        later = int(np.count_nonzero(remaining["event"]))
        position += len(remaining)
        while True:
            raw = os.pread(self._fd, _SCAN * RECORD.size, self._first + position * RECORD.size)
            num = len(raw) // RECORD.size
            later += int(np.count_nonzero(np.frombuffer(raw, RECORD_DTYPE, num)["event"]))
            if num < _SCAN:
                return later
            position += num

    def _plausible(self, piece: Records) -> npt.NDArray[np.bool_]:
        good: npt.NDArray[np.bool_] = (
            _KNOWN_EVENT[piece["event"]]
            & _KNOWN_REASON[piece["reason"]]
            & (piece["source"] <= max(Tier))
            & (piece["target"] <= max(Tier))
            & (piece["phase"] <= max(Phase))
            & (piece["start"] >= 0)
            & (piece["start"] < _MAX_NS)
            & (piece["duration"] >= 0)
            & (piece["duration"] < _MAX_NS)
            & (piece["nbytes"] >= 0)
            & (piece["nbytes"] < 1 << 62)
            & (piece["unit"] >= -1)
            & (piece["unit"] < len(self.units))
            & (piece["page"] >= -1)
            & (piece["step"] >= -1)
        )
        return good

    def _why(self, record: Any) -> str:
        """Which field of a damaged record is out of its range."""
        for name, known in (("event", _KNOWN_EVENT), ("reason", _KNOWN_REASON)):
            if not known[record[name]]:
                return f"there is no {name} {record[name]}"
        for name, highest in (("source", max(Tier)), ("target", max(Tier)), ("phase", max(Phase))):
            if record[name] > highest:
                return f"there is no {name} {record[name]}"
        if not -1 <= record["unit"] < len(self.units):
            return f"there is no unit {record['unit']} among {len(self.units)}"
        return "a time, size or number is out of range"


def _no_constant(name: str) -> None:
    raise ValueError(f"{name}, which JSON doesn't have")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, found {value!r:.80}")
    return value


def _number(value: object, below: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < below:
        raise ValueError(f"expected a number below {below}, found {value!r:.80}")
    return value
