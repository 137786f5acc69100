"""The simulator: a recorded step under other budgets, links, policies and compute speeds, on paper.

Nothing is carried out. The schedule and what each access computes are those of the trace; the moves are those of the
plan that a run would follow, or of an eviction policy without one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tiermem.errors import BudgetError
from tiermem.policies import Ahead, Plan, Schedule, bound, compile_plan, eviction
from tiermem.policies.demand import demand
from tiermem.policies.split import on_device, on_host
from tiermem.policies.timeline import Link, Timeline, play
from tiermem.recut import recut
from tiermem.trace.recorded import Recorded

ALIGNMENT = 4096
POLICIES = ("plan", "lru", "belady")
LATENCY = 5e-5
"""Seconds that each transfer takes on top of its bytes."""
COMMON_PCIE = 25e9
FITS = (1e5, 1e11)
"""Rates between which that of the recorded step is looked for."""


@dataclass(frozen=True)
class Machine:
    """What a step is simulated on. Bytes and bytes per second; ``compute`` is how many times as fast it computes."""

    host: int
    device: int | None = None
    """None: modules compute from host memory."""
    disk_read: float = 2e9
    disk_write: float = 2e9
    pcie: float = COMMON_PCIE
    compute: float = 1.0
    policy: str = "plan"
    prefetch: bool = True


@dataclass(frozen=True)
class LinkUse:
    """Bytes in a step over one link, the fewest that are possible, and the seconds it was busy."""

    read: int
    written: int
    bound: int
    busy_s: float

    @property
    def ratio(self) -> float | None:
        """Bytes moved / bound; 1 where nothing has to be moved and nothing is, None where something is all the same."""
        moved = self.read + self.written
        return moved / self.bound if self.bound else None if moved else 1.0


@dataclass(frozen=True)
class Simulated:
    """One step in the steady state. Seconds and bytes."""

    machine: Machine
    step_s: float
    compute_s: float
    stalls_s: Mapping[str, float]
    links: Mapping[str, LinkUse] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries and numbers."""
        data = asdict(self)
        for name, link in self.links.items():
            data["links"][name]["ratio"] = link.ratio
        return data


def simulate(
    recorded: Recorded, machine: Machine, *, bounds: bool = True, plans: dict[str, Plan] | None = None
) -> Simulated:
    """The step of ``recorded`` on ``machine``; without ``bounds``, quicker. ``plans`` that were made for the same
    budgets and compute speed are taken from there, and left there.

    Raises BudgetError where a budget can't hold what one access needs, with the smallest that would do.
    """
    plans = {} if plans is None else plans
    recorded = recut(recorded, machine.host)
    seconds = [each / machine.compute for each in recorded.seconds]
    effort = recorded.effort.transfer / machine.compute
    disk = Link(machine.disk_read, machine.disk_write, LATENCY, effort)
    parameters = frozenset(page for page, kind in recorded.kinds.items() if kind == "parameter")
    links: dict[str, LinkUse] = {}
    lines: list[Timeline] = []
    schedule, both = recorded.schedule, machine.host
    if machine.device is not None:
        above = on_device(schedule, parameters)
        fixed = recorded.fixed["device"]
        room = _room("device", machine.device, above, recorded, fixed)
        if "device" not in plans:
            plans["device"] = compile_plan(
                above,
                recorded.sizes,
                room,
                fixed=fixed,
                seconds=seconds,
                movable=False,
                ahead=_ahead(machine),
            )
        plan = plans["device"]
        lines.append(play(plan, recorded.sizes, seconds, Link(machine.pcie, machine.pcie, LATENCY, effort)))
        least = bound(above, recorded.sizes, room, fixed=fixed) if bounds else 0
        links["device"] = LinkUse(plan.loaded, plan.written, least, lines[0].link)
        schedule, both = on_host(schedule, parameters, plan), machine.host + machine.device
    fixed = recorded.fixed["host"]
    room = _room("host", machine.host, schedule, recorded, fixed)
    line, read, written = _on_disk(schedule, recorded, machine, room, seconds, disk, plans)
    lines.append(line)
    # With a device, what is in either of the two need not come from the disk.
    least = _least(recorded, both) if bounds else 0
    links["disk"] = LinkUse(read, written, least, line.link)
    # Each line computes the same, and has the effort of its own transfers on top.
    compute = sum(seconds) + sum(each.compute - sum(seconds) for each in lines)
    return Simulated(
        machine=machine,
        step_s=compute + sum(each.late + each.no_frame for each in lines),
        compute_s=compute,
        stalls_s={
            "for pages on their way": sum(each.late for each in lines),
            "for room that was being written": sum(each.no_frame for each in lines),
        },
        links=links,
    )


def moved(recorded: Recorded) -> LinkUse | None:
    """What the recorded run itself moved over its disk's link in a step; None where no step is known whole."""
    if not recorded.alike:
        return None
    up, down = (round(recorded.moved.get(name, 0.0)) for name in ("disk->host", "host->disk"))
    both = recorded.budgets["host"] + recorded.budgets.get("device", 0)
    return LinkUse(up, down, _least(recorded, both), 0.0)


def _least(recorded: Recorded, budget: int) -> int:
    schedule, fixed = recorded.schedule, recorded.fixed["host"]
    room = _room("host", budget, schedule, recorded, fixed)
    return bound(schedule, recorded.sizes, room, fixed=fixed, stuck=recorded.stuck)


def _on_disk(
    schedule: Schedule,
    recorded: Recorded,
    machine: Machine,
    room: int,
    seconds: Sequence[float],
    disk: Link,
    plans: dict[str, Plan],
) -> tuple[Timeline, int, int]:
    fixed, stuck = recorded.fixed["host"], recorded.stuck
    if machine.policy == "plan":
        if "host" not in plans:  # as a run makes it, which doesn't know the link either
            plans["host"] = compile_plan(
                schedule,
                recorded.sizes,
                room,
                fixed=fixed,
                stuck=stuck,
                seconds=seconds,
                ahead=_ahead(machine),
            )
        plan = plans["host"]
        return play(plan, recorded.sizes, seconds, disk), plan.loaded, plan.written
    found = demand(
        schedule,
        recorded.sizes,
        room,
        eviction(machine.policy),
        seconds=seconds,
        link=disk,
        ahead=Ahead(64, machine.host // 2) if machine.prefetch else Ahead(0, 0),
        fixed=fixed,
        stuck=stuck,
    )
    return found.timeline, found.loaded, found.written


def _ahead(machine: Machine) -> Ahead:
    """How far ahead a plan fetches."""
    return Ahead() if machine.prefetch else Ahead(accesses=0)


def _room(tier: str, budget: int, schedule: Schedule, recorded: Recorded, fixed: frozenset[int]) -> int:
    """What of a budget is for pages that move."""
    sizes = recorded.sizes
    held = sum(sizes[page] for page in fixed)
    total = sum(sizes.values())
    room = min(budget // ALIGNMENT * ALIGNMENT, total) - held
    needed = max(
        (sum(sizes[page] for page in pages if page not in fixed) for pages in schedule.pages), default=0
    )
    if room < needed:
        raise BudgetError(
            needed + held, budget, tier, needed + held, "what an access of this step needs at once"
        )
    return room


def as_recorded(recorded: Recorded) -> Machine:
    """The machine that the trace was recorded on: its budgets, and the disk's rate that explains its step.

    How long a transfer seems to take in a trace includes the time until somebody looked, so the rate is not taken from
    there: it is the one, for reads and writes, at which the simulated step takes as long as the recorded one did. Where
    the step waited for nothing, it is the fastest that was looked for, and says little.
    """
    device = recorded.budgets.get("device")
    policy = recorded.policy if recorded.policy in POLICIES else "plan"
    pcie = recorded.rates.get("host->device", COMMON_PCIE)
    machine = Machine(recorded.budgets["host"], device, pcie=pcie, policy=policy, prefetch=recorded.prefetch)
    rate = fitted_rate(recorded, machine)
    return replace(machine, disk_read=rate, disk_write=rate)


def fitted_rate(recorded: Recorded, machine: Machine) -> float:
    """The disk's bytes per second at which the step on ``machine`` takes what the recorded one took."""
    low, high = FITS
    plans: dict[str, Plan] = {}
    for _ in range(24):
        middle = (low * high) ** 0.5
        at = replace(machine, disk_read=middle, disk_write=middle)
        if simulate(recorded, at, bounds=False, plans=plans).step_s > recorded.step_s:
            low = middle
        else:
            high = middle
    return high
