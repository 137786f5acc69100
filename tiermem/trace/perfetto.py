"""The export of a trace as Chrome's JSON trace events, which Perfetto and chrome://tracing open.

Spans that overlap on one link are laid on lanes of their own, since Perfetto wants those of one thread to be
nested. What is held in memory is 16 bytes a span; all else is streamed.
"""

import gzip
import heapq
import json
import os
import tempfile
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any, ClassVar, TextIO

import numpy as np

from tiermem.trace.errors import TraceError
from tiermem.trace.events import REASON_WORDS, Event, Phase, Reason, Tier
from tiermem.trace.place import reason, replaceable
from tiermem.trace.reader import TraceFile
from tiermem.trace.summary import reserved

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

_LANES_OF_TRACK = 1 << 16  # thread numbers that each track may use

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
        *(f"{a.name.lower()}->{b.name.lower()}" for a in Tier for b in Tier if a != b),
        "requests",
        "evictions",
    )
    _FIXED: ClassVar = {
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
        self._busy: dict[int, list[tuple[int, int]]] = {}

    def of(self, record: Any) -> int:
        """The number of the track's first thread."""
        event = Event(record["event"])
        name = self._FIXED.get(event)
        if event == Event.COMPUTE:
            phase = Phase(record["phase"])
            name = "compute" if phase == Phase.NONE else phase.name.lower()
        elif name is None:
            source, target = Tier(record["source"]), Tier(record["target"])
            name = f"{source.name.lower()}->{target.name.lower()}" if source != target else "evictions"
        track = (1 + self._ORDER.index(name)) * _LANES_OF_TRACK
        self.names.setdefault(track, name)
        return track

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
            for index in np.flatnonzero(change):
                now += int(change[index])
                yield {
                    "ph": "C",
                    "name": f"{tier.name.lower()} bytes",
                    "pid": process,
                    "ts": _us(int(piece["start"][index]) - trace.monotonic_ns),
                    "args": {"bytes": now},
                }


def _instants(trace: TraceFile, process: int, tracks: _Tracks) -> Iterator[dict[str, Any]]:
    for piece in trace.pieces():
        for record in piece[np.isin(piece["event"], _INSTANTS)]:
            yield {
                "ph": "i",
                "s": "t",
                "name": _title(trace, record),
                "cat": Event(record["event"]).name.lower(),
                "pid": process,
                "tid": tracks.of(record),
                "ts": _us(int(record["start"]) - trace.monotonic_ns),
                "args": _arguments(record),
            }


def _spans(trace: TraceFile, process: int, tracks: _Tracks) -> Iterator[dict[str, Any]]:
    starts, places, before = [], [], 0
    for piece in trace.pieces():
        place = np.flatnonzero(np.isin(piece["event"], _SPANS))
        starts.append(piece["start"][place])
        places.append(place + before)
        before += len(piece)
    if not starts:
        return
    order = np.concatenate(places)[np.argsort(np.concatenate(starts), kind="stable")]
    for index in order:
        record = trace.records[index]
        start, duration = int(record["start"]), int(record["duration"])
        yield {
            "ph": "X",
            "name": _title(trace, record),
            "cat": Event(record["event"]).name.lower(),
            "pid": process,
            "tid": tracks.lane(tracks.of(record), start, start + duration),
            "ts": _us(start - trace.monotonic_ns),
            "dur": _us(duration),
            "args": _arguments(record),
        }


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1000


def _title(trace: TraceFile, record: Any) -> str:
    event = Event(record["event"])
    if event == Event.STEP:
        return f"step {record['step']}"
    unit, kind = trace.unit_name(int(record["unit"])), trace.kind_of(int(record["page"]))
    name = " ".join(part for part in (unit, kind) if part) or event.name.lower()
    if event == Event.STALL:
        return f"{name}: {REASON_WORDS[Reason(record['reason'])]}"
    if event in (Event.FAILED, *_INSTANTS):
        return f"{event.name.lower()} {name}"
    return name


def _arguments(record: Any) -> dict[str, Any]:
    return {
        "page": int(record["page"]),
        "nbytes": int(record["nbytes"]),
        "step": int(record["step"]),
        "from": Tier(record["source"]).name.lower(),
        "to": Tier(record["target"]).name.lower(),
        "reason": REASON_WORDS[Reason(record["reason"])],
    }
