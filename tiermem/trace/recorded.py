"""What a trace says of a run's step, for whoever wants to replay it: its order, its computing, its links.

The order is the schedule that the run followed last. The times are medians over the last steps that were just this.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tiermem.config import Config
from tiermem.errors import TiermemError
from tiermem.policies import Access, Phase, Schedule
from tiermem.trace.errors import TraceError
from tiermem.trace.events import Event, Tier
from tiermem.trace.reader import Records, TraceFile
from tiermem.trace.tally import having, merge

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_STEPS = 16
"""The last so many steps are looked at."""
PLACEMENT = {"parameter": "parameters", "gradient": "gradients"}


FEW_PAIRS = 400
"""Accesses that are compared with each other to find what a transfer takes."""


class Effort(NamedTuple):
    """Seconds of whoever computes that aren't arithmetic: of each update of the optimizer's, and of each transfer."""

    update: float = 0.0
    transfer: float = 0.0


@dataclass(frozen=True)
class Recorded:
    """One step of a run. Bytes, seconds, and bytes per second."""

    schedule: Schedule
    sizes: Mapping[int, int]
    kinds: Mapping[int, str]
    fixed: Mapping[str, frozenset[int]]
    """By tier: pages of the first unit, which holds what is in no other. They have places of their own there."""
    stuck: frozenset[int]
    """Pages that may not sink to the disk."""
    seconds: tuple[float, ...]
    """What each access computes, waiting and the effort of transfers left out; zeros where no step tells."""
    effort: Effort
    budgets: Mapping[str, int]
    """By tier, those of the fixed pages included."""
    moved: Mapping[str, float]
    """Bytes in a step by link, as "disk->host": means over ``num_steps`` steps."""
    rates: Mapping[str, float]
    """Bytes per second by link, of the time in which it was busy."""
    step_s: float
    """From its first access on; the median."""
    num_steps: int
    alike: bool
    """Were these steps this schedule? Otherwise what an access computes is taken from the same unit's in other steps,
    with the effort of its transfers."""
    policy: str
    """What chose the victims, as the policy file names it."""
    prefetch: bool
    """Was anything fetched before it was needed?"""
    part_numel: int = 0
    """The most elements of a part of optimizer state; 0 where the trace doesn't say."""
    beside: int = 0
    """Bytes of the host's budget that pages can't have."""


def recorded(trace: TraceFile) -> Recorded:
    """What ``trace`` says of a step. Raises `TraceError` where it doesn't have a schedule."""
    keep = (
        Event.USE, Event.HIT, Event.FAULT, Event.STALL, Event.STEP, Event.LANDED, Event.WRITEBACK,
        Event.OPTIMIZER,
    )  # fmt: skip
    parts = [piece[having(piece, keep)] for piece in trace.pieces()]
    records = np.concatenate(parts) if parts else trace.records
    uses = np.flatnonzero(records["event"] == Event.USE)
    if not len(uses):
        raise TraceError(
            f"{trace.path} has no schedule: it ended before the second step, or an older tiermem wrote it"
        )
    schedule, first = _schedule(records, uses, trace)
    # Activations move beside the plan: what is waited for them is computing to it.
    planned = {number: page for number, page in trace.pages.items() if page.kind != "activation"}
    sizes = {number: page.nbytes for number, page in planned.items()}
    kinds = {number: page.kind for number, page in planned.items()}
    records = records[first:]
    records = records[~np.isin(records["page"], sorted(trace.pages.keys() - planned.keys()))]
    return _measured(records, schedule, trace, sizes, kinds)


def _schedule(records: Records, uses: Any, trace: TraceFile) -> tuple[Schedule, int]:
    """The last schedule in the trace, and the number of the record that begins it."""
    number = records["nbytes"][uses] >> 4
    begins = np.flatnonzero(np.concatenate(([True], number[1:] < number[:-1])))
    uses, number = uses[begins[-1] :], number[begins[-1] :]
    accesses: list[Access] = []
    pages: list[list[int]] = []
    effects: list[list[int]] = []
    parts: dict[tuple[int, int], int] = {}
    last = -1
    for at, record in zip(number.tolist(), records[uses].tolist(), strict=True):
        _, _, what, unit, page, _, _, _, _, phase, _ = record
        if page not in trace.pages or phase > max(Phase):
            raise TraceError(f"{trace.path}: its schedule names page {page}, phase {phase}: there is none")
        if at != last:
            last = at
            part = parts[unit, phase] = parts.get((unit, phase), -1) + 1
            accesses.append(Access(unit, Phase(phase), part))
            pages.append([])
            effects.append([])
        pages[-1].append(page)
        effects[-1].append(what & 15)
    return Schedule(tuple(accesses), tuple(map(tuple, pages)), tuple(map(tuple, effects))), int(uses[0])


def _measured(
    records: Records,
    schedule: Schedule,
    trace: TraceFile,
    sizes: Mapping[int, int],
    kinds: Mapping[int, str],
) -> Recorded:
    steps = records[records["event"] == Event.STEP][-MAX_STEPS:]
    requests = records[having(records, (Event.HIT, Event.FAULT))]
    stalls = records[records["event"] == Event.STALL]
    updates = records[records["event"] == Event.OPTIMIZER]
    transfers = records[having(records, (Event.LANDED, Event.WRITEBACK)) & (records["source"] != Tier.NONE)]
    rows, arithmetic, moves, took, begin, end = [], [], [], [], 0, 0
    for step in steps:
        start, stop = int(step["start"]), int(step["start"] + step["duration"])
        here = requests[(requests["start"] >= start) & (requests["start"] < stop)]
        begins = _begins(here, schedule)
        if begins is None:
            continue
        start = begins[0]  # before its first access there is the input, which paging has no part in
        edges = np.array([*begins, stop])
        waited = _shared(edges, stalls["start"], stalls["duration"])
        rows.append(np.maximum(0.0, np.diff(edges) - waited))
        arithmetic.append(_shared(edges, updates["start"], updates["duration"]))
        ends = transfers["start"] + transfers["duration"]
        # Each is begun in one access and ended in one.
        moves.append((_shared(edges, transfers["start"]) + _shared(edges, ends)) / 2)
        took.append(stop - start)
        begin, end = begin or start, stop
    if not len(steps):
        raise TraceError(
            f"{trace.path} has a schedule and no step after it, so nothing says how long accesses take: record one more"
        )
    effort, alike = Effort(), bool(rows)
    if alike:
        seconds, counts = np.median(rows, axis=0), np.median(moves, axis=0)
        effort = _effort(seconds - np.median(arithmetic, axis=0), counts, schedule)
        seconds = np.maximum(0.0, seconds - counts * effort.transfer)
        # Medians of parts add up to less than the median of the whole: what is rare belongs to no part.
        whole = float(np.median(np.sum(rows, axis=1) - np.sum(moves, axis=1) * effort.transfer))
        seconds *= max(0.0, whole) / seconds.sum() if seconds.any() else 1.0
    else:
        seconds = _nearly(steps, requests, stalls, schedule)
        begin, end = int(steps["start"][0]), int(steps["start"][-1] + steps["duration"][-1])
        took = steps["duration"].tolist()
    steady = transfers[(transfers["start"] >= begin) & (transfers["start"] < end)]
    moved, rates = _links(steady, len(took))
    policy = _policy(trace)
    part_numel, unused = _cut(trace)
    return Recorded(
        schedule=schedule,
        sizes=sizes,
        kinds=kinds,
        fixed=_fixed(trace),
        stuck=_stuck(policy, kinds),
        seconds=tuple((seconds / 1e9).tolist()),
        effort=Effort(*(each / 1e9 for each in effort)),
        budgets=trace.budgets,
        moved=moved,
        rates=rates,
        step_s=float(np.median(took)) / 1e9,
        num_steps=len(took),
        alike=alike,
        policy=policy.policy.eviction,
        prefetch=policy.policy.prefetch != "none",
        part_numel=part_numel,
        beside=unused,
    )


def _nearly(steps: Records, requests: Records, stalls: Records, schedule: Schedule) -> Any:
    """Nanoseconds that each access computes, where no step was the schedule: medians over accesses that were the same.

    The same are those of one unit and phase in the same turn; of an access that no step had, any of its unit and phase.
    """
    turns: dict[tuple[int, int], list[int]] = {}  # the positions of one unit's accesses of a phase
    for position, access in enumerate(schedule.accesses):
        turns.setdefault((access.unit, access.phase.value), []).append(position)
    sets = [frozenset(pages) for pages in schedule.pages]
    found: list[list[float]] = [[] for _ in sets]
    for step in steps:
        start, stop = int(step["start"]), int(step["start"] + step["duration"])
        begins: list[int] = []
        positions: list[int | None] = []
        used: dict[tuple[int, int], int] = {}
        last: tuple[int, int] | None = None
        seen: set[int] = set()
        here = requests[(requests["start"] >= start) & (requests["start"] < stop)]
        for at, _, _, unit, page, _, _, _, _, phase, _ in here.tolist():
            key, now = (unit, phase), positions[-1] if positions else None
            if key == last and page not in seen and (now is None or page in sets[now]):
                seen.add(page)
                continue
            last, seen = key, {page}
            turn = used[key] = used.get(key, -1) + 1
            known = turns.get(key, [])
            begins.append(at)
            positions.append(known[turn] if turn < len(known) and page in sets[known[turn]] else None)
        edges = np.array([*begins, stop])
        computed = np.maximum(0.0, np.diff(edges) - _shared(edges, stalls["start"], stalls["duration"]))
        for place, each in zip(positions, computed.tolist(), strict=True):
            if place is not None:
                found[place].append(each)
    seconds = np.zeros(len(sets))
    for known in turns.values():
        some = [each for place in known for each in found[place]]
        for place in known:
            seconds[place] = np.median(found[place] or some or [0.0])
    return seconds


def _shared(edges: Any, at: Any, amounts: Any = None) -> Any:
    """What falls between each two ``edges``: the sum of its amounts, or how many there are."""
    where = np.searchsorted(edges, at, "right") - 1
    inside = (where >= 0) & (where < len(edges) - 1)
    weights = None if amounts is None else amounts[inside]
    return np.bincount(where[inside], weights, len(edges) - 1).astype(np.float64)


def _effort(rest: Any, counts: Any, schedule: Schedule) -> Effort:
    """From the optimizer's accesses, whose arithmetic is in the trace; ``rest`` is what else they took.

    The median slope between any two of them (P. K. Sen, "Estimates of the regression coefficient based on Kendall's
    tau", JASA 63, 1968), which a few that took long don't change.
    """
    updates = np.array([access.phase is Phase.OPTIMIZER for access in schedule.accesses])
    rest, counts = rest[updates], counts[updates]
    every = max(1, len(rest) // FEW_PAIRS)
    some, many = rest[::every], counts[::every]
    more = many[None, :] - many[:, None]
    slopes = (some[None, :] - some[:, None])[more >= 1] / more[more >= 1]
    transfer = max(0.0, float(np.median(slopes))) if len(slopes) else 0.0
    update = max(0.0, float(np.median(rest - counts * transfer))) if len(rest) else 0.0
    return Effort(update, transfer)


def _cut(trace: TraceFile) -> tuple[int, int]:
    """How the run cut its parts, as far as the trace, which is anybody's, says so."""
    cut = trace.meta.get("cut")
    found = [cut.get(name, 0) if isinstance(cut, dict) else 0 for name in ("part_numel", "beside")]
    return (found[0], found[1]) if all(isinstance(each, int) and each >= 0 for each in found) else (0, 0)


def _begins(requests: Records, schedule: Schedule) -> list[int] | None:
    """When each access began, by what units asked for; None where the step wasn't this schedule."""
    begins: list[int] = []
    keys = [(access.unit, access.phase.value) for access in schedule.accesses]
    sets = [frozenset(pages) for pages in schedule.pages]
    seen: set[int] = set()
    for start, _, _, unit, page, _, _, _, _, phase, _ in requests.tolist():
        at = len(begins) - 1
        if at >= 0 and keys[at] == (unit, phase) and page in sets[at] and page not in seen:
            seen.add(page)
        elif at + 1 < len(keys) and keys[at + 1] == (unit, phase) and page in sets[at + 1]:
            begins.append(start)
            seen = {page}
    return begins if len(begins) == len(keys) else None


def _links(transfers: Records, num_steps: int) -> tuple[dict[str, float], dict[str, float]]:
    moved, rates = {}, {}
    for source in Tier:
        for target in Tier:
            here = transfers[(transfers["source"] == source) & (transfers["target"] == target)]
            if len(here):
                name = f"{source.name.lower()}->{target.name.lower()}"
                begin, end = merge(here["start"], here["start"] + here["duration"])
                moved[name] = int(here["nbytes"].sum()) / num_steps
                rates[name] = int(here["nbytes"].sum()) / max(1e-9, float((end - begin).sum()) / 1e9)
    return moved, rates


def _fixed(trace: TraceFile) -> dict[str, frozenset[int]]:
    unified = "device" not in trace.budgets
    kinds = {"host": ("parameter", "gradient") if unified else ("gradient",), "device": ("parameter",)}
    return {
        tier: frozenset(n for n, page in trace.pages.items() if page.unit == 0 and page.kind in kinds[tier])
        for tier in kinds
    }


def _policy(trace: TraceFile) -> Config:
    """The run's policy file; the defaults where the trace, which is anybody's, has none that can be read."""
    try:
        return Config.load(tomllib.loads(str(trace.meta["policy"])))
    except (KeyError, ValueError, TiermemError):
        return Config()


def _stuck(policy: Config, kinds: Mapping[int, str]) -> frozenset[int]:
    """Pages that were kept from the disk."""
    return frozenset(
        page
        for page, kind in kinds.items()
        if getattr(policy.placement, PLACEMENT.get(kind, "optimizer")).value != "disk"
    )
