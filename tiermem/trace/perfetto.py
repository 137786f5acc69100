"""The export of a trace as Chrome's JSON trace events, which Perfetto and chrome://tracing open.

Spans that overlap on one link are laid on lanes of their own, since Perfetto wants those of one thread to be
nested. What is held in memory is 16 bytes a span; all else is streamed.
"""

import gzip
import heapq
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TextIO

import numpy as np

from tiermem.trace.errors import TraceError
from tiermem.trace.events import REASON_WORDS, Event, Phase, Tier
from tiermem.trace.place import reason, replaceable
from tiermem.trace.reader import RECORD_DTYPE, TraceFile
from tiermem.trace.tally import having, reserved

_SPANS = (
    Event.STEP,
    Event.COMPUTE,
    Event.OPTIMIZER,
    Event.STALL,
    Event.COLLECTIVE,
    Event.LANDED,
    Event.WRITEBACK,
    Event.FAILED,
)
_INSTANTS = (Event.FAULT, Event.PREFETCH, Event.EVICT, Event.DEPARTURE)

_NAMED = (Event.FAILED, *_INSTANTS)  # those whose track alone doesn't say what they are
_EVENTS = {event.value: event.name.lower() for event in Event}
_TIERS = {tier.value: tier.name.lower() for tier in Tier}
_REASONS = {reason.value: words for reason, words in REASON_WORDS.items()}

_BATCH = 1 << 14  # spans held as Python objects at a time
_LANES_OF_TRACK = 1 << 16  # thread numbers that each track may use


class _Record(NamedTuple):
    """A record as Python numbers, many times quicker to look at than numpy's; fields as in `RECORD_DTYPE`."""

    start: int
    duration: int
    nbytes: int
    unit: int
    page: int
    step: int
    source: int
    target: int
    reason: int
    phase: int
    event: int


assert _Record._fields == RECORD_DTYPE.names


_encode = json.JSONEncoder(separators=(",", ":")).encode


def export(trace: TraceFile, path: str | os.PathLike[str]) -> int:
    """Write ``trace`` to ``path``, compressed if its name ends in ".gz"; returns the number of events.

    Times are microseconds from the trace's beginning. The file appears whole or not at all. Raises
    `TraceError` where it can't be written.
    """
    where = replaceable(Path(path))
    temporary = ""
    try:
        fd, temporary = tempfile.mkstemp(prefix=f".{where.name[:200]}.", suffix=".new", dir=where.parent)
        with os.fdopen(fd, "wb") as raw:
            if where.name.endswith(".gz"):
                with gzip.GzipFile(where.name[:-3], "wb", 6, raw) as packed, TextIOWrapper(packed) as out:
                    number = _write(trace, out)
            else:
                with TextIOWrapper(raw) as out:
                    number = _write(trace, out)
        os.replace(temporary, where)
    except OSError as error:
        raise TraceError(f"can't write {where}: {reason(error)}") from error
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
    return number


def _write(trace: TraceFile, out: TextIO) -> int:
    out.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    number = 0
    for event in _events(trace):
        out.write(",\n" if number else "")
        out.write(_encode(event))
        number += 1
    out.write("\n]}\n")
    return number


def _events(trace: TraceFile) -> Iterator[dict[str, Any]]:
    rank = trace.meta.get("rank")
    process = rank if isinstance(rank, int) else 0
    yield _name("process_name", process, 0, f"rank {process}: {trace.path.name}")
    tracks = _Tracks()
    yield from _counters(trace, process)
    yield from _instants(trace, process, tracks)
    yield from _spans(trace, process, tracks)
    for thread, name in tracks.names.items():
        yield _name("thread_name", process, thread, name)
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": process,
            "tid": thread,
            "args": {"sort_index": thread},
        }


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


class _Tracks:
    """The threads of the export: which track a record belongs on, and a free lane of it."""

    _ORDER = (
        "steps",
        "forward",
        "backward",
        "optimizer",
        "compute",
        "stalls",
        "collectives",
        *(f"{a.name.lower()}->{b.name.lower()}" for a in Tier for b in Tier),
        "requests",
        "evictions",
    )
    _FIXED: ClassVar[Mapping[Event, str]] = {
        Event.STEP: "steps",
        Event.OPTIMIZER: "optimizer",
        Event.STALL: "stalls",
        Event.COLLECTIVE: "collectives",
        Event.FAULT: "requests",
        Event.PREFETCH: "requests",
        Event.DEPARTURE: "requests",
        Event.EVICT: "evictions",
    }

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self._known: dict[tuple[int, int, int, int], int] = {}
        self._busy: dict[int, list[tuple[int, int]]] = {}

    def of(self, record: _Record) -> int:
        """The number of the track's first thread."""
        key = (record.event, record.phase, record.source, record.target)
        track = self._known.get(key)
        if track is None:
            name = self._name_of(Event(record.event), Phase(record.phase), record)
            track = self._known[key] = (1 + self._ORDER.index(name)) * _LANES_OF_TRACK
            self.names.setdefault(track, name)
        return track

    def _name_of(self, event: Event, phase: Phase, record: _Record) -> str:
        if event == Event.COMPUTE:
            return "compute" if phase == Phase.NONE else phase.name.lower()
        if event in self._FIXED:
            return self._FIXED[event]
        return f"{_TIERS[record.source]}->{_TIERS[record.target]}"

    def lane(self, track: int, start: int, end: int) -> int:
        """A thread of the track that is free from ``start`` on; calls come in the order of ``start``."""
        busy = self._busy.setdefault(track, [])
        if busy and busy[0][0] <= start:
            thread = busy[0][1]
            heapq.heapreplace(busy, (end, thread))
            return thread
        thread = track + len(busy)
        heapq.heappush(busy, (end, thread))
        if thread != track:
            self.names.setdefault(thread, f"{self.names[track]} {thread - track + 1}")
        return thread


def _counters(trace: TraceFile, process: int) -> Iterator[dict[str, Any]]:
    for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK):
        now = 0
        for piece in trace.pieces():
            change = reserved(piece, tier)
            moves = np.flatnonzero(change)
            for start, nbytes in zip(piece["start"][moves].tolist(), change[moves].tolist(), strict=True):
                now += nbytes
                yield {
                    "ph": "C",
                    "name": f"{tier.name.lower()} bytes",
                    "pid": process,
                    "ts": (start - trace.monotonic_ns) / 1000,
                    "args": {"bytes": now},
                }


def _instants(trace: TraceFile, process: int, tracks: _Tracks) -> Iterator[dict[str, Any]]:
    for piece in trace.pieces():
        for values in piece[having(piece, _INSTANTS)].tolist():
            record = _Record(*values)
            yield {
                "ph": "i",
                "s": "t",
                "name": _title(trace, record),
                "cat": _EVENTS[record.event],
                "pid": process,
                "tid": tracks.of(record),
                "ts": (record.start - trace.monotonic_ns) / 1000,
                "args": _arguments(record),
            }


def _spans(trace: TraceFile, process: int, tracks: _Tracks) -> Iterator[dict[str, Any]]:
    starts, places, before = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
    for piece in trace.pieces():
        place = np.flatnonzero(having(piece, _SPANS))
        starts.append(piece["start"][place])
        places.append(place + before)
        before += len(piece)
    order = np.concatenate(places)[np.argsort(np.concatenate(starts), kind="stable")]
    for begin in range(0, len(order), _BATCH):
        for values in trace.records[order[begin : begin + _BATCH]].tolist():
            record = _Record(*values)
            start, duration = record.start, record.duration
            yield {
                "ph": "X",
                "name": _title(trace, record),
                "cat": _EVENTS[record.event],
                "pid": process,
                "tid": tracks.lane(tracks.of(record), start, start + duration),
                "ts": (start - trace.monotonic_ns) / 1000,
                "dur": duration / 1000,
                "args": _arguments(record),
            }


def _title(trace: TraceFile, record: _Record) -> str:
    event = record.event
    if event == Event.STEP:
        return f"step {record.step}"
    unit, kind = trace.unit_name(record.unit), trace.kind_of(record.page)
    name = f"{unit} {kind}".strip() or _EVENTS[event]
    if event == Event.STALL:
        return f"{name}: {_REASONS[record.reason]}"
    if event in _NAMED:
        return f"{_EVENTS[event]} {name}"
    return name


def _arguments(record: _Record) -> dict[str, Any]:
    return {
        "page": record.page,
        "nbytes": record.nbytes,
        "step": record.step,
        "from": _TIERS[record.source],
        "to": _TIERS[record.target],
        "reason": _REASONS[record.reason],
    }
