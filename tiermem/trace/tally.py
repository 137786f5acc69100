"""Tallies: figures gathered from a trace's records piece by piece, in memory that doesn't grow with the trace.

Unions of spans are exact all the same. Spans are recorded at their ends, so one may begin before others that were
recorded long before it; but once no later record begins before a moment, what ends by then is a number and is kept as
one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tiermem.trace.events import Event, Tier
from tiermem.trace.reader import RECORD_DTYPE, Records, TraceFile

Integers = npt.NDArray[np.int64]

_NOTHING: Integers = np.empty(0, np.int64)


def merge(start: Integers, end: Integers) -> tuple[Integers, Integers]:
    """The union of intervals as disjoint ones, in order."""
    if len(start) == 0:
        return start, end
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate(([True], start[1:] > end[:-1]))
    last = np.concatenate((first[1:], [True]))
    return start[first], end[last]


def reserved(piece: Records, tier: Tier) -> Integers:
    """By how many bytes each record changes what is reserved in ``tier``."""
    gained = np.where((piece["event"] == Event.RESERVE) & (piece["target"] == tier), piece["nbytes"], 0)
    lost = np.where((piece["event"] == Event.RELEASE) & (piece["source"] == tier), piece["nbytes"], 0)
    change: Integers = gained - lost
    return change


def having(piece: Records, events: Sequence[Event]) -> npt.NDArray[np.bool_]:
    """Which records are one of ``events``."""
    wanted = np.zeros(256, np.bool_)
    wanted[list(events)] = True
    found: npt.NDArray[np.bool_] = wanted[piece["event"]]
    return found


class Kinds:
    """The kinds of a trace's pages: ``names`` in order, the number behind the last for pages it doesn't list."""

    def __init__(self, trace: TraceFile) -> None:
        self.names: Sequence[str] = sorted({page.kind for page in trace.pages.values()})
        numbers = sorted(trace.pages)
        place = {kind: index for index, kind in enumerate(self.names)}
        self._pages = np.array(numbers, np.int64)
        self._kinds = np.array([place[trace.pages[number].kind] for number in numbers], np.int64)

    def of(self, pages: npt.NDArray[Any]) -> Integers:
        """The number of the kind of each of ``pages``."""
        index = np.full(len(pages), len(self.names), np.int64)
        if len(self._pages):
            place = np.minimum(np.searchsorted(self._pages, pages), len(self._pages) - 1)
            index = np.where(self._pages[place] == pages, self._kinds[place], len(self.names))
        return index


class Union:
    """The length of a union of spans that come in any number of pieces. Nanoseconds."""

    def __init__(self) -> None:
        self._settled = 0
        self._start, self._end = _NOTHING, _NOTHING

    def add(self, spans: Records) -> None:
        """Add the time from each record's ``start`` on, for its ``duration``."""
        if len(spans):
            start = np.concatenate((self._start, spans["start"]))
            end = np.concatenate((self._end, spans["start"] + spans["duration"]))
            self._start, self._end = merge(start, end)

    def settle(self, before: int) -> None:
        """No span that is still to come begins before this moment."""
        done = int(np.searchsorted(self._end, before))  # the ends of disjoint intervals are in order too
        self._settled += int((self._end[:done] - self._start[:done]).sum())
        self._start, self._end = self._start[done:], self._end[done:]

    @property
    def seconds(self) -> float:
        """Seconds that at least one of the spans covers."""
        return (self._settled + int((self._end - self._start).sum())) / 1e9


class Unions:
    """Unions by key. A key that was never added to has zero seconds."""

    def __init__(self) -> None:
        self._by_key: defaultdict[Any, Union] = defaultdict(Union)

    def add(self, key: Any, *spans: Records) -> None:
        """Add spans to the union of ``key``; no record makes no key."""
        for each in spans:
            if len(each):
                self._by_key[key].add(each)

    def settle(self, before: int) -> None:
        """See :meth:`Union.settle`."""
        for union in self._by_key.values():
            union.settle(before)

    def seconds(self, key: Any) -> float:
        """Seconds of the union of ``key``."""
        return self._by_key[key].seconds if key in self._by_key else 0.0

    def named(self, name: str) -> list[tuple[Any, float]]:
        """The unions of keys that are tuples and begin with ``name``, the longest first: key and seconds."""
        found = [(key, union.seconds) for key, union in self._by_key.items() if key[0] == name]
        return sorted(found, key=lambda item: -item[1])


class Fates:
    """What came next to each page after it was prefetched, counted by event.

    A page on its way over two links is prefetched twice in a row; what became of it counts once.
    """

    _EVENTS = (Event.PREFETCH, Event.HIT, Event.FAULT, Event.EVICT)

    def __init__(self) -> None:
        self._counts = np.zeros(256, np.int64)
        self._prefetched = np.empty(0, np.int64)  # numbers of the pages whose last event so far is a prefetch

    def add(self, piece: Records) -> None:
        """Go on with the next records."""
        events = piece[having(piece, self._EVENTS)]
        page = np.concatenate((self._prefetched, events["page"]))
        event = np.concatenate((np.full(len(self._prefetched), int(Event.PREFETCH)), events["event"]))
        order = np.argsort(page, kind="stable")
        page, event = page[order], event[order]
        last = np.concatenate((page[1:] != page[:-1], [True])) if len(page) else np.empty(0, np.bool_)
        followed = np.flatnonzero(~last)
        self._counts += np.bincount(
            event[followed + 1][event[followed] == Event.PREFETCH], minlength=len(self._counts)
        )
        self._prefetched = page[last & (event == Event.PREFETCH)]

    def count(self, event: Event) -> int:
        """How many prefetches ``event`` came next to."""
        return int(self._counts[event])


class Longest:
    """The records of longest duration, the first of equals first."""

    def __init__(self, count: int) -> None:
        self._count = max(count, 0)
        self.records: Records = np.empty(0, RECORD_DTYPE)

    def add(self, spans: Records) -> None:
        """Take those of ``spans`` in that are among the longest so far."""
        both = np.concatenate((self.records, spans))
        self.records = both[np.argsort(-both["duration"], kind="stable")[: self._count]]


def pieces_with_horizon(trace: TraceFile, events: Sequence[Event]) -> Iterator[tuple[Records, int]]:
    """The trace's pieces in order, each with the moment before which none of ``events`` in a later piece begins."""
    firsts = [_first(piece, events) for piece in trace.pieces()]
    horizon = _LATEST
    horizons = []
    for first in reversed(firsts):
        horizons.append(horizon)
        horizon = min(horizon, first)
    yield from zip(trace.pieces(), reversed(horizons), strict=True)


_LATEST = 1 << 62


def _first(piece: Records, events: Sequence[Event]) -> int:
    starts = piece["start"][having(piece, events)]
    return int(starts.min()) if len(starts) else _LATEST
