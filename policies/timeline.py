"""Timelines: how long a step takes when a plan is carried out, by what accesses compute and how fast the link is.

The link carries one transfer at a time, in the order in which they were begun; reads and writes share it. An access
begins when the one before it has ended and all that it needs has arrived. What waits, and for what, is counted.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tiermem.policies.plan import Plan
from tiermem.policies.residency import loads

SETTLE = 3
"""Cycles gone through before the one that is measured."""


class Link(NamedTuple):
    """Rates of a link in bytes per second, and what each transfer takes on top: seconds of the link's, and seconds in
    which nothing else is computed, because whoever computes begins and ends it."""

    read: float
    write: float
    latency: float = 0.0
    effort: float = 0.0


class Timeline(NamedTuple):
    """One step in the steady state, in seconds."""

    step: float
    compute: float
    """What accesses compute, and the effort of transfers."""
    late: float
    """Waited for pages that were on their way."""
    no_frame: float
    """Waited for writes to end whose room was needed."""
    link: float
    """What the link was busy."""


def play(plan: Plan, sizes: Mapping[int, int], seconds: Sequence[float], link: Link) -> Timeline:
    """Carry out ``plan`` on paper; ``seconds`` are those that each access computes."""
    run = _Run(plan, sizes, link)
    for _ in range(SETTLE):
        result = run.step(seconds)
    return result


class _Run:
    def __init__(self, plan: Plan, sizes: Mapping[int, int], link: Link) -> None:
        self._plan = plan
        self._sizes = sizes
        self._link = link
        self._now = 0.0
        self._free_at = 0.0  # when the link has done all that was begun
        self._begun = 0  # transfers, by the running access
        self._landed = [0.0] * len(plan.stays)
        self._written = [0.0] * len(plan.stays)
        self._waiting: set[int] = set()  # stays whose room is being written
        self._rooms: list[
            tuple[float, int]
        ] = []  # (when that is done, stay): a heap, with stays that don't wait too
        self._needs: list[list[int]] = [[] for _ in range(plan.length)]
        self._ends: list[list[int]] = [[] for _ in range(plan.length)]
        for index, stay in enumerate(plan.stays):
            if not stay.whole:
                self._needs[stay.start].append(index)
                if stay.dirty:
                    self._ends[(stay.start + stay.length) % plan.length].append(index)

    def step(self, seconds: Sequence[float]) -> Timeline:
        start, busy = self._now, 0.0
        late = no_frame = 0.0
        total = 0
        plan, link = self._plan, self._link
        for position in range(plan.length):
            self._begin(position)
            arrived = blocked = self._now
            for index in self._needs[position]:
                if index in self._waiting:
                    self._waiting.remove(index)
                    free = self._room(index)
                    blocked = max(blocked, free)
                    self._fetch(index, free)
                arrived = max(arrived, self._landed[index])
            no_frame += blocked - self._now
            late += max(0.0, arrived - blocked)
            self._now = max(arrived, blocked)
            # What waited for room is looked at again when an access has begun, as pumping does.
            while self._rooms and self._rooms[0][0] <= self._now:
                _, index = heapq.heappop(self._rooms)
                if index in self._waiting:
                    self._waiting.remove(index)
                    self._fetch(index, self._now)
            self._now += seconds[position] + self._begun * link.effort
            total, self._begun = total + self._begun, 0
        for stay in plan.stays:
            if not stay.whole:
                nbytes = self._sizes[stay.page]
                busy += nbytes / link.read + link.latency if loads(stay) else 0.0
                busy += nbytes / link.write + link.latency if stay.dirty else 0.0
        return Timeline(self._now - start, sum(seconds) + total * link.effort, late, no_frame, busy)

    def _begin(self, position: int) -> None:
        for index in self._ends[position]:
            self._written[index] = self._send(
                self._sizes[self._plan.stays[index].page] / self._link.write, self._now
            )
        for fetch in self._plan.fetches[position]:
            stay = self._plan.stays[fetch.stay]
            if stay.kept:
                self._landed[fetch.stay] = self._now
            elif not stay.whole:
                room = self._room(fetch.stay)
                if room > self._now:
                    self._waiting.add(fetch.stay)
                    heapq.heappush(self._rooms, (room, fetch.stay))
                else:
                    self._fetch(fetch.stay, self._now)

    def _room(self, index: int) -> float:
        """When the stay's bytes are free of what was written out of them."""
        return max((self._written[other] for other in self._plan.behind[index]), default=0.0)

    def _fetch(self, index: int, when: float) -> None:
        stay = self._plan.stays[index]
        seconds = 0.0 if stay.fresh else self._sizes[stay.page] / self._link.read
        self._landed[index] = when if stay.fresh else self._send(seconds, when)

    def _send(self, seconds: float, when: float) -> float:
        self._begun += 1
        self._free_at = max(self._free_at, when) + seconds + self._link.latency
        return self._free_at
