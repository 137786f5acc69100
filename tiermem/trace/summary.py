"""The figures of a trace: where the time of its steps went, what crossed the links, who waited and why.

Times are unions: two transfers at once on one link count once, so that bytes over time is the bandwidth of
the link while it was busy, and a wait within a computation is a wait and not computation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tiermem.trace.events import REASON_WORDS, Event, Phase, Reason, Tier
from tiermem.trace.reader import RECORD_DTYPE, Records, TraceFile

_Integers = npt.NDArray[np.int64]

_TRANSFERS = (Event.LANDED, Event.WRITEBACK)
_REQUESTS = (Event.PREFETCH, Event.HIT, Event.FAULT, Event.EVICT)


@dataclass(frozen=True, slots=True)
class Steps:
    """The finished steps; seconds."""

    count: int
    mean_s: float
    median_s: float


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Seconds of one phase in the whole trace."""

    compute_s: float
    optimizer_s: float
    stall_s: float


@dataclass(frozen=True, slots=True)
class Link:
    """What one link carried in one direction.

    ``bandwidth`` is in bytes per second of the time in which the link was busy, ``limit`` what the writer
    measured that it can carry, None where it didn't.
    """

    source: str
    target: str
    num_transfers: int
    nbytes: int
    busy_s: float
    bandwidth: float
    limit: float | None
    by_kind: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Requests:
    """How the requests of units for pages went.

    ``used`` prefetches had landed when their page was asked for, ``late`` ones were still on their way,
    ``wasted`` ones were evicted before anybody asked.
    """

    hits: int
    faults: int
    hit_rate: float
    prefetches: int
    used: int
    late: int
    wasted: int


@dataclass(frozen=True, slots=True)
class Stall:
    """One wait. ``at_s`` counts from the beginning of the trace; ``link`` is "" where it was for none."""

    at_s: float
    seconds: float
    step: int
    phase: str
    unit: str
    page: int
    kind: str
    link: str
    reason: str


@dataclass(frozen=True, slots=True)
class TierUse:
    """Bytes reserved in a tier, and what it may hold (None: the trace doesn't say)."""

    peak: int
    final: int
    budget: int | None


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one trace; `to_json` gives them as plain data."""

    path: str
    state: str
    damage: str | None
    num_records: int
    num_units: int
    num_pages: int
    seconds: float
    steps: Steps
    phases: Mapping[str, PhaseTime]
    compute_s: float
    optimizer_s: float
    collective_s: float
    stall_s: float
    stall_share: float
    stalls_by_reason: Mapping[str, float]
    slowest_stalls: Sequence[Stall]
    links: Sequence[Link]
    requests: Requests
    evictions: Mapping[str, int]
    tiers: Mapping[str, TierUse]
    failures: int
    departures: int
    verdict: str

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries, lists, texts and numbers: seconds, bytes, bytes per second, shares of 1."""
        return asdict(self)


def summarise(trace: TraceFile, top: int = 10) -> Summary:
    """Compute the figures of ``trace`` with its ``top`` slowest stalls.

    ``stall_share`` is the time spent waiting in finished steps over the time of those steps. All other times
    are of the whole trace, unfinished steps included.
    """
    spans = _select(trace, (Event.COMPUTE, Event.OPTIMIZER, Event.COLLECTIVE, Event.STALL, Event.STEP))
    compute, optimizer, collective, stalls, steps = (
        spans[spans["event"] == event]
        for event in (Event.COMPUTE, Event.OPTIMIZER, Event.COLLECTIVE, Event.STALL, Event.STEP)
    )
    phases = {
        phase.name.lower(): _phase_time(
            *(kind[kind["phase"] == phase] for kind in (compute, optimizer, stalls))
        )
        for phase in Phase
    }
    durations = steps["duration"] / 1e9
    finished = stalls[np.isin(stalls["step"], steps["step"])]
    step_s = float(durations.sum())
    links = _links(trace)
    stalls_by_reason = _stalls_by_reason(stalls)
    share = _union_s(finished) / step_s if step_s else 0.0
    return Summary(
        path=str(trace.path),
        state="closed" if trace.closed else "being written" if trace.live else "not closed",
        damage=trace.damage,
        num_records=len(trace.records),
        num_units=len(trace.units),
        num_pages=len(trace.pages),
        seconds=_extent_s(trace),
        steps=Steps(
            count=len(steps),
            mean_s=float(durations.mean()) if len(steps) else 0.0,
            median_s=float(np.median(durations)) if len(steps) else 0.0,
        ),
        phases=phases,
        compute_s=sum(each.compute_s for each in phases.values()),
        optimizer_s=sum(each.optimizer_s for each in phases.values()),
        collective_s=_union_s(collective),
        stall_s=_union_s(stalls),
        stall_share=share,
        stalls_by_reason=stalls_by_reason,
        slowest_stalls=_slowest(trace, stalls, top),
        links=links,
        requests=_requests(trace),
        evictions=_evictions(trace),
        tiers=_tiers(trace),
        failures=_count(trace, Event.FAILED),
        departures=_count(trace, Event.DEPARTURE),
        verdict=_verdict(len(steps), share, stalls_by_reason, _stalls_by_link(stalls), links),
    )


def merge(start: _Integers, end: _Integers) -> tuple[_Integers, _Integers]:
    """The union of intervals as disjoint ones, in order."""
    if len(start) == 0:
        return start, end
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate(([True], start[1:] > end[:-1]))
    last = np.concatenate((first[1:], [True]))
    return start[first], end[last]


def reserved(piece: Records, tier: Tier) -> _Integers:
    """By how many bytes each record changes what is reserved in ``tier``."""
    gained = np.where((piece["event"] == Event.RESERVE) & (piece["target"] == tier), piece["nbytes"], 0)
    lost = np.where((piece["event"] == Event.RELEASE) & (piece["source"] == tier), piece["nbytes"], 0)
    change: _Integers = gained - lost
    return change


class Kinds:
    """The kinds of a trace's pages: ``names`` in order, the number behind the last for pages it doesn't list."""

    def __init__(self, trace: TraceFile) -> None:
        self.names: Sequence[str] = sorted({page.kind for page in trace.pages.values()})
        numbers = sorted(trace.pages)
        place = {kind: index for index, kind in enumerate(self.names)}
        self._pages = np.array(numbers, np.int64)
        self._kinds = np.array([place[trace.pages[number].kind] for number in numbers], np.int64)

    def of(self, pages: npt.NDArray[Any]) -> _Integers:
        """The number of the kind of each of ``pages``."""
        index = np.full(len(pages), len(self.names), np.int64)
        if len(self._pages):
            place = np.minimum(np.searchsorted(self._pages, pages), len(self._pages) - 1)
            index = np.where(self._pages[place] == pages, self._kinds[place], len(self.names))
        return index


def having(piece: Records, events: Sequence[Event]) -> npt.NDArray[np.bool_]:
    """Which records are one of ``events``."""
    wanted = np.zeros(256, np.bool_)
    wanted[list(events)] = True
    found: npt.NDArray[np.bool_] = wanted[piece["event"]]
    return found


def _select(trace: TraceFile, events: Sequence[Event]) -> Records:
    parts = [piece[having(piece, events)] for piece in trace.pieces()]
    return np.concatenate(parts) if parts else np.empty(0, RECORD_DTYPE)


def _count(trace: TraceFile, event: Event) -> int:
    return sum(int(np.count_nonzero(piece["event"] == event)) for piece in trace.pieces())


def _union_s(*spans: Records) -> float:
    start = np.concatenate([each["start"] for each in spans])
    begin, end = merge(start, start + np.concatenate([each["duration"] for each in spans]))
    return float((end - begin).sum()) / 1e9


def _phase_time(compute: Records, optimizer: Records, stalls: Records) -> PhaseTime:
    stall_s = _union_s(stalls)
    return PhaseTime(
        # |A without S| = |A and S together| - |S|
        compute_s=_union_s(compute, stalls) - stall_s,
        optimizer_s=_union_s(optimizer),
        stall_s=stall_s,
    )


def _extent_s(trace: TraceFile) -> float:
    if len(trace.records) == 0:
        return 0.0
    begin = min(int(piece["start"].min()) for piece in trace.pieces())
    end = max(int((piece["start"] + piece["duration"]).max()) for piece in trace.pieces())
    return (end - begin) / 1e9


def _link_name(source: int, target: int) -> str:
    return f"{Tier(source).name.lower()}->{Tier(target).name.lower()}"


def _links(trace: TraceFile) -> list[Link]:
    transfers = _select(trace, _TRANSFERS)
    kinds = Kinds(trace)
    limits = trace.meta.get("limits")
    found = []
    for source in Tier:
        for target in Tier:
            here = transfers[(transfers["source"] == source) & (transfers["target"] == target)]
            # From NONE nothing crossed a link: the content was made where it is.
            if source == Tier.NONE or len(here) == 0:
                continue
            nbytes, busy_s = int(here["nbytes"].sum()), _union_s(here)
            name = _link_name(source, target)
            limit = limits.get(name) if isinstance(limits, dict) else None
            found.append(
                Link(
                    source=source.name.lower(),
                    target=target.name.lower(),
                    num_transfers=len(here),
                    nbytes=nbytes,
                    busy_s=busy_s,
                    bandwidth=nbytes / busy_s if busy_s else 0.0,
                    limit=float(limit) if isinstance(limit, (int, float)) else None,
                    by_kind=_by_kind(here, kinds),
                )
            )
    return found


def _by_kind(transfers: Records, kinds: Kinds) -> dict[str, int]:
    sums = np.zeros(len(kinds.names) + 1, np.int64)
    np.add.at(sums, kinds.of(transfers["page"]), transfers["nbytes"])
    names = [*kinds.names, "unknown"]
    return {kind: int(nbytes) for kind, nbytes in zip(names, sums, strict=True) if nbytes}


def _requests(trace: TraceFile) -> Requests:
    events = _select(trace, _REQUESTS)[["page", "event"]]
    counts = np.bincount(events["event"], minlength=256)
    hits, faults = int(counts[Event.HIT]), int(counts[Event.FAULT])
    # Page by page, in the order of recording: what came next after a prefetch. A page on its way over two
    # links is prefetched twice in a row; what became of it counts once.
    events = events[np.argsort(events["page"], kind="stable")]
    before, after = events[:-1], events[1:]
    fate = after["event"][(before["event"] == Event.PREFETCH) & (before["page"] == after["page"])]
    return Requests(
        hits=hits,
        faults=faults,
        hit_rate=hits / (hits + faults) if hits + faults else 0.0,
        prefetches=int(counts[Event.PREFETCH]),
        used=int(np.count_nonzero(fate == Event.HIT)),
        late=int(np.count_nonzero(fate == Event.FAULT)),
        wasted=int(np.count_nonzero(fate == Event.EVICT)),
    )


def _evictions(trace: TraceFile) -> dict[str, int]:
    reasons = np.bincount(_select(trace, (Event.EVICT,))["reason"])
    return {REASON_WORDS[Reason(reason)]: int(num) for reason, num in enumerate(reasons) if num}


def _tiers(trace: TraceFile) -> dict[str, TierUse]:
    found = {}
    for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK):
        now = peak = 0
        for piece in trace.pieces():
            levels = now + np.cumsum(reserved(piece, tier))
            now, peak = int(levels[-1]), max(peak, int(levels.max()))
        budget = trace.budgets.get(tier.name.lower())
        if peak or budget is not None:
            found[tier.name.lower()] = TierUse(peak=peak, final=now, budget=budget)
    return found


def _stalls_by_reason(stalls: Records) -> dict[str, float]:
    sums = {
        REASON_WORDS[reason]: _union_s(stalls[stalls["reason"] == reason])
        for reason in Reason
        if np.any(stalls["reason"] == reason)
    }
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _stalls_by_link(stalls: Records) -> dict[str, float]:
    links = stalls[(stalls["source"] != Tier.NONE) & (stalls["target"] != Tier.NONE)]
    pairs = {(int(source), int(target)) for source, target in np.unique(links[["source", "target"]])}
    return {
        _link_name(*pair): _union_s(links[(links["source"] == pair[0]) & (links["target"] == pair[1])])
        for pair in pairs
    }


def _slowest(trace: TraceFile, stalls: Records, top: int) -> list[Stall]:
    order = np.argsort(-stalls["duration"], kind="stable")[: max(top, 0)]
    return [
        Stall(
            at_s=(int(stall["start"]) - trace.monotonic_ns) / 1e9,
            seconds=int(stall["duration"]) / 1e9,
            step=int(stall["step"]),
            phase=Phase(stall["phase"]).name.lower(),
            unit=trace.unit_name(int(stall["unit"])),
            page=int(stall["page"]),
            kind=trace.kind_of(int(stall["page"])),
            link=_link_name(stall["source"], stall["target"]) if stall["source"] and stall["target"] else "",
            reason=REASON_WORDS[Reason(stall["reason"])],
        )
        for stall in stalls[order]
    ]


def _verdict(
    num_steps: int,
    share: float,
    reasons: Mapping[str, float],
    stalls_by_link: Mapping[str, float],
    links: Sequence[Link],
) -> str:
    """One sentence: what bounds the run."""
    if num_steps == 0:
        return "no step was finished: there is nothing to judge yet"
    if share < 0.05 or not reasons:
        return f"bound by computation: waiting takes {share:.1%} of the step time"
    cause = next(iter(reasons))
    if not stalls_by_link:
        return f"waiting takes {share:.1%} of the step time, most of it: {cause}"
    worst = max(stalls_by_link, key=lambda name: stalls_by_link[name])
    rates = [link for link in links if _link_name_of(link) == worst]
    speed = f", which carried {rates[0].bandwidth / 1e6:,.0f} MB/s while busy" if rates else ""
    return f"waiting takes {share:.1%} of the step time, most of it for {worst}{speed}; first cause: {cause}"


def _link_name_of(link: Link) -> str:
    return f"{link.source}->{link.target}"
