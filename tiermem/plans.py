"""Plans of a run: for each schedule that is followed, one for each tier of memory, compiled when it is first needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns as now

from tiermem.page import Kind
from tiermem.policies import Ahead, Plan, Schedule, compile_plan
from tiermem.policies.split import on_device, on_host
from tiermem.table import PageTable
from tiermem.tier import Tier

MAX_KEPT = 8
"""Schedules whose plans are kept: a run that alternates between a few steps doesn't compile them anew."""


@dataclass(frozen=True)
class Area:
    """What a plan may use of a tier: the first ``capacity`` bytes; ``fixed`` pages have places beyond them."""

    tier: Tier
    capacity: int
    fixed: frozenset[int]


class Plans:
    """Compiles and keeps plans. ``device`` is None where modules compute from host frames.

    ``ahead`` bounds how far ahead they fetch.
    """

    def __init__(self, table: PageTable, host: Area, device: Area | None, ahead: Ahead) -> None:
        self.host = host
        self.device = device
        self.compiled = 0
        self.compile_ns = 0
        self._table = table
        self._ahead = ahead
        self._kept: dict[
            int, tuple[Schedule, dict[Tier, Plan]]
        ] = {}  # id of the schedule, which is kept with it

    def of(self, schedule: Schedule, seconds: Sequence[float] = ()) -> Mapping[Tier, Plan]:
        """A plan for each tier; none for a tier that it doesn't fit, or for a schedule without accesses.

        ``seconds`` is how long each access computed, as far as that is known.
        """
        kept = self._kept.get(id(schedule))
        if kept is None:
            start = now()
            kept = self._kept[id(schedule)] = (schedule, self._compile(schedule, seconds))
            if len(self._kept) > MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            self.compiled += 1
            self.compile_ns += now() - start
        return kept[1]

    def _compile(self, schedule: Schedule, seconds: Sequence[float]) -> dict[Tier, Plan]:
        plans: dict[Tier, Plan] = {}
        if not len(schedule):
            return plans
        below = schedule
        parameters = frozenset(page.number for page in self._table if page.kind is Kind.PARAMETER)
        try:
            if self.device is not None:
                above = on_device(schedule, parameters)
                plans[self.device.tier] = plan = self._plan(above, self.device, seconds)
                below = on_host(schedule, parameters, plan)
            plans[self.host.tier] = self._plan(below, self.host, seconds)
        except ValueError:
            # Pages that may not sink, or tensors that somebody holds, can leave less than a plan needs.
            plans.clear()
        return plans

    def _plan(self, schedule: Schedule, area: Area, seconds: Sequence[float]) -> Plan:
        # As they are now: an optimizer's state may have got pages since the last plan.
        sizes = {page.number: page.nbytes for page in self._table}
        stuck = frozenset(page.number for page in self._table if not page.sinks)
        return compile_plan(
            schedule,
            sizes,
            area.capacity,
            fixed=area.fixed,
            stuck=stuck if area is self.host else frozenset(),
            ahead=self._ahead,
            seconds=seconds,
            movable=area is self.host,
        )
