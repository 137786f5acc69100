"""Steps without a plan, on paper: pages are fetched by need and by looking ahead, victims chosen by an eviction policy.

What `timeline` is for plans, for "lru" and "belady": the same link, the same steady state, the same figures.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from tiermem.policies.base import Eviction
from tiermem.policies.compiler import Ahead
from tiermem.policies.schedule import NEVER, Cursor, Effect, Schedule
from tiermem.policies.timeline import SETTLE, Link, Timeline

_WRITES, _SPENDS, _FRESH = int(Effect.WRITES), int(Effect.SPENDS), int(Effect.FRESH)
_RENEWED = int(Effect.RENEWED)


class Demand(NamedTuple):
    """One step in the steady state: its times, and the bytes that it loaded and wrote."""

    timeline: Timeline
    loaded: int
    written: int


def demand(
    schedule: Schedule,
    sizes: Mapping[int, int],
    capacity: int,
    eviction: Eviction,
    *,
    seconds: Sequence[float],
    link: Link,
    ahead: Ahead,
    fixed: Collection[int] = (),
    stuck: Collection[int] = (),
) -> Demand:
    """Go through ``schedule`` with a new ``eviction`` until it is steady; arguments as for `compile_plan`.

    Raises ValueError where what an access needs, or what is stuck, exceeds the capacity.
    """
    run = _Run(schedule, sizes, capacity, eviction, link, ahead, frozenset(fixed), frozenset(stuck))
    for _ in range(SETTLE):
        result = run.step(seconds)
    return result


class _Run:
    def __init__(
        self,
        schedule: Schedule,
        sizes: Mapping[int, int],
        capacity: int,
        eviction: Eviction,
        link: Link,
        ahead: Ahead,
        fixed: frozenset[int],
        stuck: frozenset[int],
    ) -> None:
        self._schedule, self._sizes, self._capacity = schedule, sizes, capacity
        self._eviction, self._link, self._ahead, self._stuck = eviction, link, ahead, stuck
        self._at = [
            [(page, int(effect)) for page, effect in zip(pages, effects, strict=True) if page not in fixed]
            for pages, effects in zip(schedule.pages, schedule.effects, strict=True)
        ]
        self._effect = {(at, page): effect for at, uses in enumerate(self._at) for page, effect in uses}
        self._cursor = Cursor(schedule)
        eviction.follow(self._cursor)
        self._now = self._free_at = 0.0
        self._used = 0
        self._landed: dict[int, float] = {}  # resident page -> when it had arrived
        self._early: set[int] = set()  # fetched ahead of need and not used yet
        self._dirty: set[int] = set()
        self._dead: set[int] = set()  # their content isn't needed any more
        self._known: set[int] = set()  # pages that have content
        self._leaving: deque[tuple[float, int]] = deque()  # (when it is written, bytes), in order
        self._leaving_nbytes = 0
        self._victims: Iterator[int] | None = None  # in the policy's order, as of the running access
        # Of each access and those before it, over two cycles, the bytes of all pages; and the access, counted over all
        # steps, up to which all that is wanted ahead is there.
        nbytes = [sum(sizes[page] for page, _ in uses) for uses in self._at]
        self._total = [0, *accumulate(nbytes * 2)]
        self._ready = 0
        self._begun = 0  # accesses of steps that are over
        self._sent = 0  # transfers that the running access has begun

    def step(self, seconds: Sequence[float]) -> Demand:
        start = self._now
        self._loaded = self._written = 0
        self._busy = late = no_frame = missed = 0.0
        total = 0
        for position, uses in enumerate(self._at):
            self._cursor.advance(self._schedule.accesses[position])
            self._settle()
            self._victims = None
            needed = {page for page, _ in uses}
            for page in needed:
                self._eviction.used(page)
            blocked = self._now
            for page, effect in uses:
                if page in self._landed and not effect & _RENEWED:
                    continue
                if page in self._landed:
                    self._drop(page)
                blocked = max(blocked, self._room(self._sizes[page], needed))
                self._fetch(page, effect, blocked)
            soon = max((self._landed[page] for page in needed & self._early), default=blocked)
            arrived = max((self._landed[page] for page in needed), default=blocked)
            no_frame += blocked - self._now
            late += max(0.0, min(soon, arrived) - blocked)
            missed += max(0.0, arrived - max(soon, blocked))
            self._now = max(blocked, arrived)
            self._early -= needed
            self._settle()
            self._look_ahead(position, needed)
            self._now += seconds[position] + self._sent * self._link.effort
            total, self._sent = total + self._sent, 0
            for page, effect in uses:
                self._known.add(page)
                self._dead.discard(page)
                if effect & _WRITES:
                    self._dirty.add(page)
                if effect & _SPENDS:
                    self._dirty.discard(page)
                    self._dead.add(page)
        self._cursor.restart()
        self._begun += len(self._at)
        compute = sum(seconds) + total * self._link.effort
        line = Timeline(self._now - start, compute, late + missed, no_frame, self._busy)
        return Demand(line, self._loaded, self._written)

    def _settle(self) -> None:
        """What has been written by now takes no room any more."""
        while self._leaving and self._leaving[0][0] <= self._now:
            self._left()

    def _left(self) -> float:
        """The first of what is being written is; when."""
        when, nbytes = self._leaving.popleft()
        self._used -= nbytes
        self._leaving_nbytes -= nbytes
        return when

    def _order(self) -> Iterator[int]:
        """Victims that this access hasn't passed over yet."""
        if self._victims is None:
            self._victims = self._eviction.order()
        return self._victims

    def _room(self, nbytes: int, needed: Collection[int]) -> float:
        """Make room by need, whoever has to leave; when it is there."""
        when = self._now
        while self._used - self._leaving_nbytes + nbytes > self._capacity:
            page = next(self._order(), None)
            if page is None:
                break
            if (
                page in self._landed
                and page not in needed
                and not (page in self._stuck and page in self._dirty)
            ):
                self._evict(page)
        while self._used + nbytes > self._capacity:
            if not self._leaving:
                raise ValueError(f"{nbytes} bytes more are needed at once, of {self._capacity} in all")
            when = self._left()
        return max(when, self._now)

    def _evict(self, page: int) -> None:
        nbytes = self._sizes[page]
        if page in self._dirty and not self._needless(page):
            self._written += nbytes
            self._leaving.append((self._send(nbytes / self._link.write, self._now), nbytes))
            self._leaving_nbytes += nbytes
        else:
            self._used -= nbytes
        self._forget(page)

    def _needless(self, page: int) -> bool:
        """Is the next use one that doesn't need what is there?"""
        at = self._schedule.next_use(page, self._cursor.position)
        return bool(self._effect.get((at % len(self._schedule), page), 0) & _FRESH)

    def _drop(self, page: int) -> None:
        self._used -= self._sizes[page]
        self._forget(page)

    def _forget(self, page: int) -> None:
        del self._landed[page]
        self._early.discard(page)
        self._ready = min(
            self._ready, self._begun + self._schedule.next_use(page, self._cursor.position)
        )  # wanted again
        self._dirty.discard(page)
        self._eviction.removed(page)

    def _fetch(self, page: int, effect: int, when: float) -> None:
        nbytes = self._sizes[page]
        self._used += nbytes
        self._eviction.admitted(page)
        if effect & _FRESH or page not in self._known:
            self._landed[page] = when
            return
        self._loaded += nbytes
        self._landed[page] = self._send(nbytes / self._link.read, when)

    def _send(self, seconds: float, when: float) -> float:
        self._sent += 1
        self._busy += seconds + self._link.latency
        self._free_at = max(self._free_at, when) + seconds + self._link.latency
        return self._free_at

    def _look_ahead(self, position: int, needed: Collection[int]) -> None:
        """Fetch what is needed next, in its order, over pages that are needed later; stop where none is."""
        length, here = len(self._at), self._begun + position
        farthest = length - 1 if self._ahead.accesses is None else min(self._ahead.accesses, length - 1)
        first = max(here + 1, self._ready)
        total = self._total[position + first - here] - self._total[position + 1]
        for at in range(first, here + farthest + 1):
            for page, effect in self._at[at % length]:
                nbytes = self._sizes[page]
                total += nbytes
                if self._ahead.nbytes is not None and total > self._ahead.nbytes:
                    return
                if page in self._landed or effect & (_FRESH | _RENEWED) or page in needed:
                    continue
                if not self._ahead_room(nbytes, position + at - here, needed):
                    return
                self._early.add(page)
                self._fetch(page, effect, self._now)
            self._ready = at + 1

    def _ahead_room(self, nbytes: int, position: int, needed: Collection[int]) -> bool:
        if self._used + nbytes <= self._capacity:
            return True
        missing = self._used - self._leaving_nbytes + nbytes - self._capacity
        while missing > 0:
            page = next(self._order(), None)
            if page is None:
                break
            if (
                page not in self._landed
                or page in needed
                or page in self._early
                or (page in self._stuck and page in self._dirty)
            ):
                continue
            after = self._schedule.next_use(page, self._cursor.position)
            if after != NEVER and after <= position and page not in self._dead:
                continue
            missing -= self._sizes[page]
            self._evict(page)
        return self._used + nbytes <= self._capacity
