"""A recorded step as another host budget would have cut it: the parts of optimizer state are larger in a larger one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import ceil

from tiermem.parts import part_numel
from tiermem.policies import Access, Effect, Phase, Recorder, Schedule
from tiermem.trace.recorded import Recorded

STATE = ("master", "exp_avg", "exp_avg_sq")
ALIGNMENT = 4096
"""Of pages, in bytes."""
ITEMSIZE, HALF = 4, 2
"""Bytes of an element of optimizer state, and of a parameter that has master weights."""
STEP = 64
"""Parts are a multiple of so many elements, but for the last."""


def recut(recorded: Recorded, host: int) -> Recorded:
    """The step with parts as a run under ``host`` bytes has them.

    What it computes stays, shared out by elements; what each update takes besides (``recorded.effort``), each takes. A
    step whose parts don't follow from its budget, or of which the trace doesn't tell, is left as it is.
    """
    was = part_numel(recorded.budgets["host"] - recorded.beside)
    numel = part_numel(max(0, host - recorded.beside))
    if recorded.part_numel != was or numel == was:
        return recorded
    new = _Cut(recorded)
    for positions in _groups(recorded):
        if len(positions) == 1 and not _state(recorded, positions[0]):
            new.copy(positions[0])
        else:
            new.update(positions, numel)
    return new.finish()


def _groups(recorded: Recorded) -> Iterator[list[int]]:
    """The positions of each access, those of an update's parts together."""
    schedule, group, whose = recorded.schedule, [], None  # type: ignore[var-annotated]
    for position, (access, pages) in enumerate(zip(schedule.accesses, schedule.pages, strict=True)):
        own = set(_state(recorded, position)) if access.phase is Phase.OPTIMIZER else set()
        here = (access.unit, tuple(page for page in pages if page not in own)) if own else None
        if group and (here is None or here != whose):
            yield group
            group = []
        group.append(position)
        whose = here
    if group:
        yield group


def _state(recorded: Recorded, position: int) -> list[int]:
    return [page for page in recorded.schedule.pages[position] if recorded.kinds[page] in STATE]


class _Cut:
    """The step that is being made."""

    def __init__(self, recorded: Recorded) -> None:
        self._old = recorded
        self._recorder = Recorder()
        self._seconds: list[float] = []
        self._sizes = dict(recorded.sizes)
        self._kinds = dict(recorded.kinds)
        self._next = max(recorded.sizes, default=0) + 1
        self._parts: dict[int, int] = {}  # unit -> its updates so far

    def copy(self, position: int) -> None:
        """An access as it was."""
        schedule = self._old.schedule
        self._add(
            schedule.accesses[position],
            list(schedule.pages[position]),
            list(schedule.effects[position]),
            self._old.seconds[position],
        )

    def update(self, positions: list[int], numel: int) -> None:
        """The accesses of one update, in parts of ``numel`` elements at most."""
        old, schedule = self._old, self._old.schedule
        first, last = positions[0], positions[-1]
        kinds = [old.kinds[page] for page in _state(old, first)]
        others = [page for page in schedule.pages[first] if old.kinds[page] not in STATE]
        # Of what is updated there is one page: padding, of each part, isn't counted with it.
        itemsize = HALF if "master" in kinds else ITEMSIZE
        total = max(old.sizes[page] for page in others) // itemsize
        computing = sum(max(0.0, old.seconds[position] - old.effort.update) for position in positions)
        for position in positions:
            for page in _state(old, position):
                del self._sizes[page], self._kinds[page]
        of = {at: dict(zip(schedule.pages[at], schedule.effects[at], strict=True)) for at in (first, last)}
        count = -(-total // numel)
        size = ceil(total / count / STEP) * STEP
        edges = [*range(0, total, size), total]
        for index, (start, stop) in enumerate(pairwise(edges)):
            pages = []
            for kind in kinds:
                self._sizes[self._next] = ceil((stop - start) * ITEMSIZE / ALIGNMENT) * ALIGNMENT
                self._kinds[self._next] = kind
                pages.append(self._next)
                self._next += 1
            effects = [int(Effect.WRITES)] * len(pages)
            for page in others:
                begins, ends = of[first][page], of[last][page]
                effect = begins & ~Effect.SPENDS if index == 0 else begins & ~(Effect.SPENDS | Effect.FRESH)
                effects.append(effect | (ends & Effect.SPENDS if index == len(edges) - 2 else 0))
            share = computing * (stop - start) / total
            self._add(schedule.accesses[first], [*pages, *others], effects, share + old.effort.update)

    def _add(self, access: Access, pages: list[int], effects: list[int], seconds: float) -> None:
        if access.phase is Phase.OPTIMIZER:
            access = Access(access.unit, access.phase, self._parts.get(access.unit, 0))
            self._parts[access.unit] = access.part + 1
        self._recorder.record(access, pages, effects)
        self._seconds.append(seconds)

    def finish(self) -> Recorded:
        """What it has become."""
        schedule: Schedule = self._recorder.finish()
        stuck = {self._old.kinds[page] for page in self._old.stuck}
        return replace(
            self._old,
            schedule=schedule,
            seconds=tuple(self._seconds),
            sizes=self._sizes,
            kinds=self._kinds,
            stuck=frozenset(page for page, kind in self._kinds.items() if kind in stuck),
        )
