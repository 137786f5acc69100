"""What happened to each unit and each page: requests, prefetches, evictions, bytes, and the time it took."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tiermem.trace.events import REASON_WORDS, Event, Phase, Reason, Tier
from tiermem.trace.reader import Records, TraceFile
from tiermem.trace.summary import having

MOST_PAGES = 20_000
"""Pages that are told one by one; of a trace with more, the first."""

_Integers = npt.NDArray[np.int64]
_OF_PAGES = (Event.HIT, Event.FAULT, Event.PREFETCH, Event.LANDED, Event.EVICT, Event.WRITEBACK, Event.STALL)
_OF_UNITS = (Event.COMPUTE, Event.OPTIMIZER, Event.STALL)
_FIELDS = ["start", "duration", "nbytes", "page", "event", "reason", "source", "target"]


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
    events = [piece[having(piece, _OF_PAGES)][_FIELDS] for piece in trace.pieces()]
    records = np.concatenate(events) if events else np.empty(0, trace.records.dtype)[_FIELDS]
    index = _places(numbers, records["page"])
    records, index = records[index >= 0], index[index >= 0]
    pages = _Pages(records, index, len(numbers))
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
    """Counts by page, and what they are for any set of pages together."""

    def __init__(self, records: Records, index: _Integers, num: int) -> None:
        self._num = num
        event, nbytes, duration = records["event"], records["nbytes"], records["duration"]
        transfer = having(records, (Event.LANDED, Event.WRITEBACK)) & (records["source"] != Tier.NONE)
        upward = transfer & (event == Event.LANDED)
        self.counts = {
            "hits": self._count(index, event == Event.HIT),
            "faults": self._count(index, event == Event.FAULT),
            "prefetches": self._count(index, event == Event.PREFETCH),
            "up": self._count(index, upward, nbytes),
            "down": self._count(index, transfer & ~upward, nbytes),
            "stall_ns": self._count(index, event == Event.STALL, duration),
        }
        evicted = event == Event.EVICT
        self._evictions = {
            reason: self._count(index, evicted & (records["reason"] == reason))
            for reason in np.unique(records["reason"][evicted]).tolist()
        }
        order = np.argsort(index, kind="stable")
        self._fates(records[order], index[order])

    def of(self, pages: _Integers) -> dict[str, Any]:
        """The figures of ``pages`` (by place) together."""
        found: dict[str, Any] = {name: int(counts[pages].sum()) for name, counts in self.counts.items()}
        found["evictions"] = {
            REASON_WORDS[Reason(reason)]: int(counts[pages].sum())
            for reason, counts in self._evictions.items()
            if counts[pages].any()
        }
        early = [self._early[self._bounds[page] : self._bounds[page + 1]] for page in pages]
        times = np.concatenate(early) if early else np.empty(0)
        found["early_ns"] = int(np.median(times)) if len(times) else None
        return found

    def _count(self, index: _Integers, wanted: npt.NDArray[np.bool_], weights: Any = None) -> _Integers:
        if weights is None:
            return np.bincount(index[wanted], minlength=self._num)
        sums = np.zeros(self._num, np.int64)
        np.add.at(sums, index[wanted], weights[wanted])
        return sums

    def _fates(self, records: Records, index: _Integers) -> None:
        """What came next after each prefetch, page by page in the order of recording."""
        asked = having(records, (Event.PREFETCH, Event.HIT, Event.FAULT, Event.EVICT))
        event, page = records["event"][asked], index[asked]
        after = (event[:-1] == Event.PREFETCH) & (page[:-1] == page[1:])
        for name, fate in (("used", Event.HIT), ("late", Event.FAULT), ("wasted", Event.EVICT)):
            self.counts[name] = self._count(page[:-1], after & (event[1:] == fate))
        landed = (records["event"] == Event.LANDED) & (records["reason"] == Reason.LOOKAHEAD)
        kept = landed | (records["event"] == Event.HIT)
        records, page, landed = records[kept], index[kept], landed[kept]
        used = landed[:-1] & ~landed[1:] & (page[:-1] == page[1:])
        arrived = records["start"][:-1] + records["duration"][:-1]
        self._early = np.maximum(records["start"][1:] - arrived, 0)[used]
        self._bounds = np.searchsorted(page[:-1][used], np.arange(self._num + 1))


def _units(trace: TraceFile, pages: _Pages, unit_of: _Integers) -> list[dict[str, Any]]:
    num = len(trace.units)
    spans = [piece[having(piece, _OF_UNITS) & (piece["unit"] >= 0)] for piece in trace.pieces()]
    records = np.concatenate(spans) if spans else trace.records[:0]
    order = np.argsort(unit_of, kind="stable")
    bounds = np.searchsorted(unit_of[order], np.arange(num + 1))
    found = []
    compute = {
        phase: _sums(records, (records["event"] == Event.COMPUTE) & (records["phase"] == phase), num)
        for phase in Phase
    }
    optimizer = _sums(records, records["event"] == Event.OPTIMIZER, num)
    stalls = _sums(records, records["event"] == Event.STALL, num)
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


def _sums(records: Records, wanted: npt.NDArray[np.bool_], num: int) -> _Integers:
    sums = np.zeros(num, np.int64)
    np.add.at(sums, records["unit"][wanted], records["duration"][wanted])
    return sums


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
