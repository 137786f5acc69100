"""What happened to each unit and each page: requests, prefetches, evictions, bytes, and the time it took."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tiermem.trace.events import REASON_WORDS, Event, Phase, Reason, Tier
from tiermem.trace.reader import Records, TraceFile
from tiermem.trace.tally import having

MOST_PAGES = 20_000
"""Pages that are told one by one; of a trace with more, the first."""

_Integers = npt.NDArray[np.int64]
_OF_PAGES = (Event.HIT, Event.FAULT, Event.PREFETCH, Event.LANDED, Event.EVICT, Event.WRITEBACK, Event.STALL)
_AHEAD = (Reason.LOOKAHEAD, Reason.PLAN)
_OF_UNITS = (Event.COMPUTE, Event.OPTIMIZER, Event.STALL)


def figures(trace: TraceFile) -> dict[str, Any]:
    """The figures of the units and pages of ``trace``, for JSON.

    ``units`` is a list in the trace's order, ``pages`` one by number. Each has ``hits``, ``faults`` (``late`` ones
    were prefetched too late), ``prefetches``, ``used`` and ``wasted`` (as in `tiermem.trace.summary.Requests`),
    ``early_ns`` (the median time from a prefetch's landing to its use; None without one), ``evictions`` by reason,
    ``up`` and ``down`` (bytes towards the device and away from it) and ``stall_ns``. Units have ``compute_ns`` by
    phase and ``optimizer_ns`` beside that: sums of spans, waits in them included.
    """
    numbers = np.array(sorted(trace.pages), np.int64)
    place = {int(number): index for index, number in enumerate(numbers)}
    pages = _Pages(len(numbers))
    for piece in trace.pieces():
        records = piece[having(piece, _OF_PAGES)]
        index = _places(numbers, records["page"])
        pages.add(records[index >= 0], index[index >= 0])
    unit_of = np.array([trace.pages[int(number)].unit for number in numbers], np.int64)
    return {
        "units": _units(trace, pages, unit_of),
        "pages": [
            {
                "number": int(number),
                "unit": trace.pages[int(number)].unit,
                "kind": trace.pages[int(number)].kind,
                "dtype": trace.pages[int(number)].dtype,
                "nbytes": trace.pages[int(number)].nbytes,
                "names": list(trace.pages[int(number)].names[:50]),
                **pages.of(np.array([place[int(number)]])),
            }
            for number in numbers[:MOST_PAGES]
        ],
        "pages_left_out": max(0, len(numbers) - MOST_PAGES),
    }


class _Pages:
    """Counts by page, added up piece by piece, and what they are for any set of pages together."""

    _NAMES = ("hits", "faults", "prefetches", "up", "down", "stall_ns", "used", "late", "wasted")

    def __init__(self, num: int) -> None:
        self._num = num
        self._counts = {name: np.zeros(num, np.int64) for name in self._NAMES}
        self._evictions: dict[int, _Integers] = {}
        self._early: list[_Integers] = []
        self._early_of: list[_Integers] = []
        # Of each page, what was last asked of it, and when it last landed ahead of need: for the next piece.
        self._asked = np.zeros(num, np.int64)
        self._landed = np.full(num, -1, np.int64)

    def add(self, records: Records, index: _Integers) -> None:
        """Take in the next ``records``, which are about the pages at ``index``."""
        event, nbytes = records["event"], records["nbytes"]
        transfer = having(records, (Event.LANDED, Event.WRITEBACK)) & (records["source"] != Tier.NONE)
        upward = transfer & (event == Event.LANDED)
        for name, wanted, weights in (
            ("hits", event == Event.HIT, None),
            ("faults", event == Event.FAULT, None),
            ("prefetches", event == Event.PREFETCH, None),
            ("up", upward, nbytes),
            ("down", transfer & ~upward, nbytes),
            ("stall_ns", event == Event.STALL, records["duration"]),
        ):
            self._count(name, index, wanted, weights)
        evicted = event == Event.EVICT
        for reason in np.unique(records["reason"][evicted]).tolist():
            sums = self._evictions.setdefault(reason, np.zeros(self._num, np.int64))
            sums += np.bincount(index[evicted & (records["reason"] == reason)], minlength=self._num)
        order = np.argsort(index, kind="stable")
        self._fates(event[order], index[order])
        self._earliness(records[order], index[order])

    def of(self, pages: _Integers) -> dict[str, Any]:
        """The figures of ``pages`` (by place) together."""
        found: dict[str, Any] = {name: int(counts[pages].sum()) for name, counts in self._counts.items()}
        found["evictions"] = {
            REASON_WORDS[Reason(reason)]: int(counts[pages].sum())
            for reason, counts in sorted(self._evictions.items())
            if counts[pages].any()
        }
        bounds, times = self._by_page
        early = [times[bounds[page] : bounds[page + 1]] for page in pages]
        all_of_them = np.concatenate(early) if early else np.empty(0)
        found["early_ns"] = int(np.median(all_of_them)) if len(all_of_them) else None
        return found

    @cached_property
    def _by_page(self) -> tuple[_Integers, _Integers]:
        """How early prefetches were, sorted by page; and where each page's begin."""
        empty = np.empty(0, np.int64)
        pages, times = np.concatenate([empty, *self._early_of]), np.concatenate([empty, *self._early])
        order = np.argsort(pages, kind="stable")
        return np.searchsorted(pages[order], np.arange(self._num + 1)), times[order]

    def _count(self, name: str, index: _Integers, wanted: npt.NDArray[np.bool_], weights: Any = None) -> None:
        if weights is None:
            self._counts[name] += np.bincount(index[wanted], minlength=self._num)
        else:
            np.add.at(self._counts[name], index[wanted], weights[wanted])

    def _fates(self, event: npt.NDArray[Any], page: _Integers) -> None:
        """What came next after each prefetch, page by page in the order of recording."""
        wanted = np.isin(event, (Event.PREFETCH, Event.HIT, Event.FAULT, Event.EVICT))
        event, page = event[wanted], page[wanted]
        if len(event) == 0:
            return
        first = np.concatenate(([True], page[1:] != page[:-1]))
        before = np.where(first, self._asked[page], np.concatenate(([0], event[:-1])))
        for name, fate in (("used", Event.HIT), ("late", Event.FAULT), ("wasted", Event.EVICT)):
            self._count(name, page, (before == Event.PREFETCH) & (event == fate))
        self._asked[page] = event  # the last one of each page stays

    def _earliness(self, records: Records, page: _Integers) -> None:
        """From each landing ahead of need to the next time that its page was found there."""
        landed = (records["event"] == Event.LANDED) & np.isin(records["reason"], _AHEAD)
        kept = landed | (records["event"] == Event.HIT)
        records, page, landed = records[kept], page[kept], landed[kept]
        if len(page) == 0:
            return
        arrived = np.where(landed, records["start"] + records["duration"], -1)
        first = np.concatenate(([True], page[1:] != page[:-1]))
        before = np.where(first, self._landed[page], np.concatenate(([-1], arrived[:-1])))
        used = ~landed & (before >= 0)
        self._early.append(np.maximum(records["start"] - before, 0)[used])
        self._early_of.append(page[used])
        self._landed[page] = arrived


def _units(trace: TraceFile, pages: _Pages, unit_of: _Integers) -> list[dict[str, Any]]:
    num = len(trace.units)
    order = np.argsort(unit_of, kind="stable")
    bounds = np.searchsorted(unit_of[order], np.arange(num + 1))
    found = []
    compute = {phase: np.zeros(num, np.int64) for phase in Phase}
    optimizer, stalls = np.zeros(num, np.int64), np.zeros(num, np.int64)
    for piece in trace.pieces():
        records = piece[having(piece, _OF_UNITS) & (piece["unit"] >= 0)]
        for phase, sums in compute.items():
            _sum(sums, records, (records["event"] == Event.COMPUTE) & (records["phase"] == phase))
        _sum(optimizer, records, records["event"] == Event.OPTIMIZER)
        _sum(stalls, records, records["event"] == Event.STALL)
    for unit, name in enumerate(trace.units):
        figures = pages.of(order[bounds[unit] : bounds[unit + 1]])
        found.append(
            {
                "name": name,
                "num_pages": int(bounds[unit + 1] - bounds[unit]),
                **figures,
                # A unit waits for room, or for a page of another one, too.
                "stall_ns": int(stalls[unit]),
                "compute_ns": {
                    phase.name.lower(): int(compute[phase][unit]) for phase in Phase if compute[phase][unit]
                },
                "optimizer_ns": int(optimizer[unit]),
            }
        )
    for page in trace.pages.values():
        found[page.unit]["nbytes"] = found[page.unit].get("nbytes", 0) + page.nbytes
    for figures in found:
        figures.setdefault("nbytes", 0)
    return found


def _sum(sums: _Integers, records: Records, wanted: npt.NDArray[np.bool_]) -> None:
    np.add.at(sums, records["unit"][wanted], records["duration"][wanted])


def _places(numbers: _Integers, wanted: npt.NDArray[Any]) -> _Integers:
    """Where in ``numbers``, which ascend, each of ``wanted`` is; -1 where it isn't."""
    if len(numbers) == 0:
        return np.full(len(wanted), -1, np.int64)
    place = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
    return np.where(numbers[place] == wanted, place, -1)


def differences(before: dict[str, Any], after: dict[str, Any], steps: Sequence[int]) -> list[dict[str, Any]]:
    """Units of two traces side by side, by name, per step: seconds, waits, bytes. None where a trace lacks the unit."""

    def rows(figures: dict[str, Any], num: int) -> dict[str, dict[str, float]]:
        num = max(num, 1)
        return {
            unit["name"]: {
                "seconds": (sum(unit["compute_ns"].values()) + unit["optimizer_ns"]) / 1e9 / num,
                "stall_s": unit["stall_ns"] / 1e9 / num,
                "nbytes": (unit["up"] + unit["down"]) / num,
                "faults": unit["faults"] / num,
            }
            for unit in figures["units"]
        }

    left, right = rows(before, steps[0]), rows(after, steps[1])
    return [
        {"name": name, "before": left.get(name), "after": right.get(name)}
        for name in [*left, *(name for name in right if name not in left)]
    ]
