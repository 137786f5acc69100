"""The figures of a trace: where the time of its steps went, what crossed the links, who waited and why.

Times are unions: two transfers at once on one link count once, so that bytes over time is the bandwidth of
the link while it was busy, and a wait within a computation is a wait and not computation.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tiermem.trace.events import REASON_WORDS, Event, Phase, Reason, Tier
from tiermem.trace.reader import Records, TraceFile
from tiermem.trace.tally import Fates, Kinds, Longest, Unions, having, pieces_with_horizon, reserved

_TRANSFERS = (Event.LANDED, Event.WRITEBACK)
_SPANS = (*_TRANSFERS, Event.COMPUTE, Event.OPTIMIZER, Event.COLLECTIVE, Event.STALL)


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
    """Compute the figures of ``trace`` with its ``top`` slowest stalls, in memory that doesn't grow with the trace.

    ``stall_share`` is the time spent waiting in finished steps over the time of those steps. All other times
    are of the whole trace, unfinished steps included.
    """
    figures = _Figures(trace, top)
    stalls_by_reason = {REASON_WORDS[Reason(key[1])]: s for key, s in figures.unions.named("reason")}
    phases = {phase.name.lower(): figures.phase(phase) for phase in Phase}
    durations = figures.durations / 1e9
    step_s = float(durations.sum())
    share = figures.unions.seconds("finished") / step_s if step_s else 0.0
    links = figures.links()
    counts = figures.counts
    return Summary(
        path=str(trace.path),
        state=_state(trace),
        damage=trace.damage,
        num_records=len(trace.records),
        num_units=len(trace.units),
        num_pages=len(trace.pages),
        seconds=figures.extent / 1e9,
        steps=Steps(
            count=len(durations),
            mean_s=float(durations.mean()) if len(durations) else 0.0,
            median_s=float(np.median(durations)) if len(durations) else 0.0,
        ),
        phases=phases,
        compute_s=sum(each.compute_s for each in phases.values()),
        optimizer_s=sum(each.optimizer_s for each in phases.values()),
        collective_s=figures.unions.seconds("collective"),
        stall_s=figures.unions.seconds("stall"),
        stall_share=share,
        stalls_by_reason=stalls_by_reason,
        slowest_stalls=[_stall(trace, record) for record in figures.slowest.records],
        links=links,
        requests=figures.requests(),
        evictions={
            REASON_WORDS[Reason(reason)]: int(num) for reason, num in enumerate(figures.evictions) if num
        },
        tiers=_tiers(trace),
        failures=int(counts[Event.FAILED]),
        departures=int(counts[Event.DEPARTURE]),
        verdict=_verdict(len(durations), share, *figures.first_cause(), links),
    )


class _Figures:
    """What a pass over a trace's records gathers."""

    def __init__(self, trace: TraceFile, top: int) -> None:
        self.unions = Unions()
        self.counts = np.zeros(256, np.int64)  # of events
        self.evictions = np.zeros(256, np.int64)  # by reason
        self.durations = np.empty(0, np.int64)  # of finished steps
        self.slowest = Longest(top)
        self.extent = 0
        self._kinds = Kinds(trace)
        self._limits = trace.meta.get("limits")
        self._fates = Fates()
        # (source, target) -> transfers, and their bytes by kind
        self._carried: dict[tuple[int, int], tuple[int, npt.NDArray[np.int64]]] = {}
        finished = np.unique(
            np.concatenate(
                [np.empty(0, np.int32)] + [p["step"][p["event"] == Event.STEP] for p in trace.pieces()]
            )
        )
        begin, end = 1 << 62, 0
        for piece, horizon in pieces_with_horizon(trace, _SPANS):
            begin = min(begin, int(piece["start"].min()))
            end = max(end, int((piece["start"] + piece["duration"]).max()))
            self._add(piece, finished)
            self.unions.settle(horizon)
        self.extent = max(0, end - begin)

    def _add(self, piece: Records, finished: npt.NDArray[np.int32]) -> None:
        self.counts += np.bincount(piece["event"], minlength=256)
        self.evictions += np.bincount(piece["reason"][piece["event"] == Event.EVICT], minlength=256)
        self._fates.add(piece)
        compute, optimizer, collective, stalls, steps = (
            piece[piece["event"] == event]
            for event in (Event.COMPUTE, Event.OPTIMIZER, Event.COLLECTIVE, Event.STALL, Event.STEP)
        )
        self.durations = np.concatenate((self.durations, steps["duration"]))
        self.slowest.add(stalls)
        add = self.unions.add
        add("collective", collective)
        add("stall", stalls)
        add("finished", stalls[np.isin(stalls["step"], finished)])
        for phase in Phase:
            waits = stalls[stalls["phase"] == phase]
            add(("stall in", phase), waits)
            add(("compute or stall in", phase), compute[compute["phase"] == phase], waits)
            add(("optimizer in", phase), optimizer[optimizer["phase"] == phase])
        for reason in np.unique(stalls["reason"]):
            waits = stalls[stalls["reason"] == reason]
            add(("reason", int(reason)), waits)
            for source, target, over in _by_link(waits):
                add(("reason over", int(reason), source, target), over)
        for source, target, moves in _by_link(piece[having(piece, _TRANSFERS)]):
            add(("link", source, target), moves)
            sums = np.zeros(len(self._kinds.names) + 1, np.int64)
            np.add.at(sums, self._kinds.of(moves["page"]), moves["nbytes"])
            count, before = self._carried.get((source, target), (0, np.zeros_like(sums)))
            self._carried[source, target] = (count + len(moves), before + sums)

    def first_cause(self) -> tuple[str, str]:
        """What was waited for longest, in words, and for which link; empty where for nothing, or for none."""
        causes = self.unions.named("reason")
        if not causes:
            return "", ""
        cause = causes[0][0][1]
        over = (key[2:] for key, _ in self.unions.named("reason over") if key[1] == cause)
        return REASON_WORDS[Reason(cause)], next((_link_name(*link) for link in over), "")

    def phase(self, phase: Phase) -> PhaseTime:
        """The time of one phase."""
        stall_s = self.unions.seconds(("stall in", phase))
        return PhaseTime(
            # |A without S| = |A and S together| - |S|
            compute_s=self.unions.seconds(("compute or stall in", phase)) - stall_s,
            optimizer_s=self.unions.seconds(("optimizer in", phase)),
            stall_s=stall_s,
        )

    def links(self) -> list[Link]:
        """What each link carried. From NONE nothing crossed one: the content was made where it is."""
        found = []
        for (source, target), (count, sums) in sorted(self._carried.items()):
            nbytes, busy_s = int(sums.sum()), self.unions.seconds(("link", source, target))
            name = _link_name(source, target)
            limit = self._limits.get(name) if isinstance(self._limits, dict) else None
            names = [*self._kinds.names, "unknown"]
            found.append(
                Link(
                    source=Tier(source).name.lower(),
                    target=Tier(target).name.lower(),
                    num_transfers=count,
                    nbytes=nbytes,
                    busy_s=busy_s,
                    bandwidth=nbytes / busy_s if busy_s else 0.0,
                    limit=float(limit) if isinstance(limit, (int, float)) else None,
                    by_kind={kind: int(each) for kind, each in zip(names, sums, strict=True) if each},
                )
            )
        return found

    def requests(self) -> Requests:
        """How the requests of units for pages went."""
        hits, faults = int(self.counts[Event.HIT]), int(self.counts[Event.FAULT])
        return Requests(
            hits=hits,
            faults=faults,
            hit_rate=hits / (hits + faults) if hits + faults else 0.0,
            prefetches=int(self.counts[Event.PREFETCH]),
            used=self._fates.count(Event.HIT),
            late=self._fates.count(Event.FAULT),
            wasted=self._fates.count(Event.EVICT),
        )


def _by_link(records: Records) -> Iterator[tuple[int, int, Records]]:
    """The records of each link: source, target, and which. From NONE, or to it (other ranks), none is crossed."""
    for source in Tier:
        of_source = records[records["source"] == source]
        for target in Tier:
            here = of_source[of_source["target"] == target]
            if len(here) and source != Tier.NONE and target != Tier.NONE:
                yield int(source), int(target), here


def _link_name(source: int, target: int) -> str:
    return f"{Tier(source).name.lower()}->{Tier(target).name.lower()}"


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


def _stall(trace: TraceFile, stall: Any) -> Stall:
    return Stall(
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


def _state(trace: TraceFile) -> str:
    if trace.damage:
        return "damaged"
    return "closed" if trace.closed else "being written" if trace.live else "not closed"


def _verdict(num_steps: int, share: float, cause: str, over: str, links: Sequence[Link]) -> str:
    """One sentence: what bounds the run. ``over`` is the link that the first ``cause`` was waited for on, if any."""
    if num_steps == 0:
        return "no step was finished: there is nothing to judge yet"
    if share < 0.05 or not cause:
        return f"bound by computation: waiting takes {share:.1%} of the step time"
    if not over:
        return f"waiting takes {share:.1%} of the step time; first cause: {cause}"
    rates = [link for link in links if _link_name_of(link) == over]
    speed = f", which carried {rates[0].bandwidth / 1e6:,.0f} MB/s while busy" if rates else ""
    return f"waiting takes {share:.1%} of the step time, most of it for {over}{speed}; first cause: {cause}"


def _link_name_of(link: Link) -> str:
    return f"{link.source}->{link.target}"
