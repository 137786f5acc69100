"""Plans of a run: for each schedule that is followed, one for each tier of memory, compiled when it is first needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns as now

from tiermem.page import Kind
from tiermem.policies import Ahead, Effect, Phase, Plan, Schedule, compile_plan
from tiermem.table import PageTable
from tiermem.tier import Tier

MAX_KEPT = 8
"""Schedules whose plans are kept: a run that alternates between a few steps doesn't compile them anew."""

HOST_LEAD = 2
"""Accesses before the device needs a page, by which it has to be on the host."""


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
        self._sizes = {page.number: page.nbytes for page in table}
        self._stuck = frozenset(page.number for page in table if not page.sinks)
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
        on_host = schedule
        try:
            if self.device is not None:
                above = self._on_device(schedule)
                plans[self.device.tier] = plan = self._plan(above, self.device, seconds)
                on_host = self._on_host(schedule, plan)
            plans[self.host.tier] = self._plan(on_host, self.host, seconds)
        except ValueError:
            # Pages that may not sink, or tensors that somebody holds, can leave less than a plan needs.
            plans.clear()
        return plans

    def _plan(self, schedule: Schedule, area: Area, seconds: Sequence[float]) -> Plan:
        return compile_plan(
            schedule,
            self._sizes,
            area.capacity,
            fixed=area.fixed,
            stuck=self._stuck if area is self.host else frozenset(),
            ahead=self._ahead,
            seconds=seconds,
        )

    def _on_device(self, schedule: Schedule) -> Schedule:
        """What of a step happens on the device: parameters, in forward and backward."""
        changed: set[int] = set()
        pages: list[tuple[int, ...]] = []
        effects: list[tuple[int, ...]] = []
        # Twice, because what the end of a step changed is renewed for the beginning of the next.
        for access, each in 2 * list(zip(schedule.accesses, schedule.pages, strict=True)):
            own: dict[int, int] = {}
            for page in each:
                if self._table[page].kind is not Kind.PARAMETER:
                    continue
                if access.phase is Phase.OPTIMIZER:
                    changed.add(page)
                else:
                    own[page] = Effect.RENEWED if page in changed else Effect.NONE
                    changed.discard(page)
            pages.append(tuple(own))
            effects.append(tuple(own.values()))
        half = len(schedule)
        return Schedule(schedule.accesses, tuple(pages[half:]), tuple(effects[half:]))

    def _on_host(self, schedule: Schedule, above: Plan) -> Schedule:
        """What of a step happens on the host: all else, and parameters on their way up, shortly before the
        device needs them."""
        uses: list[dict[int, int]] = []
        for access, pages, effects in zip(schedule.accesses, schedule.pages, schedule.effects, strict=True):
            on_device = access.phase is not Phase.OPTIMIZER
            uses.append(
                {
                    page: effect
                    for page, effect in zip(pages, effects, strict=True)
                    if not (on_device and self._table[page].kind is Kind.PARAMETER)
                }
            )
        for index, stay in enumerate(above.stays):
            if not stay.whole:
                before = (stay.start - min(HOST_LEAD, above.leads[index])) % len(schedule)
                uses[before].setdefault(stay.page, Effect.NONE)
        return Schedule(
            schedule.accesses, tuple(tuple(use) for use in uses), tuple(tuple(use.values()) for use in uses)
        )
