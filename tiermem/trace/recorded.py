"""What a trace says of a run's step, for whoever wants to replay it: its order, its computing, its links.

The order is the schedule that the run followed last. The times are medians over the last steps that were just this.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    """What each access computes, waiting left out; zeros where no step tells."""
    budgets: Mapping[str, int]
    """By tier, those of the fixed pages included."""
    moved: Mapping[str, float]
    """Bytes in a step by link, as "disk->host": means over ``num_steps`` steps."""
    rates: Mapping[str, float]
    """Bytes per second by link, of the time in which it was busy."""
    step_s: float
    """From its first access on; the median."""
    num_steps: int
    policy: str
    """What chose the victims, as the policy file names it."""


def recorded(trace: TraceFile) -> Recorded:
    """What ``trace`` says of a step. Raises `TraceError` where it doesn't have a schedule."""
    keep = (
        Event.USE, Event.HIT, Event.FAULT, Event.STALL, Event.STEP, Event.LANDED, Event.WRITEBACK,
    )  # fmt: skip
    parts = [piece[having(piece, keep)] for piece in trace.pieces()]
    records = np.concatenate(parts) if parts else trace.records
    uses = np.flatnonzero(records["event"] == Event.USE)
    if not len(uses):
        raise TraceError(
            f"{trace.path} has no schedule: it ended before the second step, or an older tiermem wrote it"
        )
    schedule, first = _schedule(records, uses, trace)
    sizes = {number: page.nbytes for number, page in trace.pages.items()}
    kinds = {number: page.kind for number, page in trace.pages.items()}
    return _measured(records[first:], schedule, trace, sizes, kinds)


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
    # Activations move beside the plan: what is waited for them is computing to it.
    beside = [number for number, kind in kinds.items() if kind == "activation"]
    records = records[~np.isin(records["page"], beside)]
    steps = records[records["event"] == Event.STEP][-MAX_STEPS:]
    requests = records[having(records, (Event.HIT, Event.FAULT))]
    stalls = records[records["event"] == Event.STALL]
    rows, took, begin, end = [], [], 0, 0
    for step in steps:
        start, stop = int(step["start"]), int(step["start"] + step["duration"])
        here = requests[(requests["start"] >= start) & (requests["start"] < stop)]
        begins = _begins(here, schedule)
        if begins is None:
            continue
        start = begins[0]  # before its first access there is the input, which paging has no part in
        edges = np.array([*begins, stop])
        waits = stalls[(stalls["start"] >= start) & (stalls["start"] < stop)]
        waited = np.zeros(len(schedule))
        at = np.searchsorted(edges, waits["start"], "right") - 1
        np.add.at(waited, np.minimum(at, len(schedule) - 1), waits["duration"])
        rows.append(np.maximum(0.0, np.diff(edges) - waited))
        took.append(stop - start)
        begin, end = begin or start, stop
    seconds = np.zeros(len(schedule))
    if rows:
        seconds = np.median(rows, axis=0)
        # Medians of parts add up to less than the median of the whole: what is rare belongs to no part.
        whole = float(np.median(np.sum(rows, axis=1)))
        seconds *= whole / seconds.sum() if seconds.any() else 1.0
    transfers = records[having(records, (Event.LANDED, Event.WRITEBACK)) & (records["source"] != Tier.NONE)]
    steady = transfers[(transfers["start"] >= begin) & (transfers["start"] < end)]
    moved, rates = _links(steady, max(1, len(rows)))
    policy = _policy(trace)
    return Recorded(
        schedule=schedule,
        sizes=sizes,
        kinds=kinds,
        fixed=_fixed(trace),
        stuck=_stuck(policy, kinds),
        seconds=tuple((seconds / 1e9).tolist()),
        budgets=trace.budgets,
        moved=moved,
        rates=rates,
        step_s=float(np.median(took)) / 1e9 if took else 0.0,
        num_steps=len(rows),
        policy=policy.policy.eviction,
    )


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
