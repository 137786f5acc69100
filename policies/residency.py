"""Which pages stay between their uses: the kept ones are never loaded again, and all others have to be.

Belady's rule (see `belady`), over bytes and round the cycle that training is: the end of one step prepares the start
of the next. What is decided here is who stays; where, is `packing`'s.
"""

import heapq
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tiermem.policies.schedule import Effect, Schedule

MAX_CYCLES = 12

# As plain numbers: the flags' own operators are many times slower, and this is done for every use.
_WRITES, _SPENDS, _RENEWED = int(Effect.WRITES), int(Effect.SPENDS), int(Effect.RENEWED)
_DEAD = int(Effect.FRESH | Effect.RENEWED)


class Stay(NamedTuple):
    """One page's residence from a first use to a last one, over one or more accesses of the cycle."""

    page: int
    start: int
    """The position of its first use."""
    length: int
    """Accesses from the first use to the last, both counted; that of the whole schedule when it never leaves."""
    fresh: bool
    """Its content comes into being at its first use: there is nothing to load."""
    dirty: bool
    """It has to be written when it ends."""
    whole: bool = False
    """It never leaves."""
    kept: bool = False
    """It is still there from the page's last stay, which lay elsewhere: there is nothing to load."""


class Uses:
    """The accesses of one cycle, by page: what both the choice and the bound are made from.

    Of ``fixed`` pages nothing is said: they have places of their own. ``stuck`` ones can't leave while they hold
    something.
    """

    def __init__(
        self,
        schedule: Schedule,
        sizes: Mapping[int, int],
        fixed: Collection[int] = (),
        stuck: Collection[int] = (),
    ) -> None:
        self.length = len(schedule)
        self.sizes = sizes
        self.stuck = stuck
        self.at: list[tuple[tuple[int, int], ...]] = []  # position -> (page, which of its uses)
        self.of: dict[int, list[tuple[int, int]]] = {}  # page -> (position, effect)
        for position, (pages, effects) in enumerate(zip(schedule.pages, schedule.effects, strict=True)):
            here = []
            for page, effect in zip(pages, effects, strict=True):
                if page not in fixed:
                    uses = self.of.setdefault(page, [])
                    here.append((page, len(uses)))
                    uses.append((position, int(effect)))
            self.at.append(tuple(here))
        self.pages = [frozenset(page for page, _ in here) for here in self.at]
        self._after = {page: self._distances(uses) for page, uses in self.of.items()}

    def after(self, page: int, use: int) -> tuple[int, bool]:
        """Accesses from one use of a page to its next, and whether what it holds until then isn't needed."""
        return self._after[page][use]

    def _distances(self, uses: list[tuple[int, int]]) -> list[tuple[int, bool]]:
        return [
            ((position - before) % self.length or self.length, bool(effect & _DEAD))
            for (before, _), (position, effect) in zip(uses, uses[1:] + uses[:1], strict=True)
        ]

    def needed(self) -> npt.NDArray[np.int64]:
        """The bytes that each access needs at once."""
        return np.array([sum(self.sizes[page] for page, _ in here) for here in self.at], dtype=np.int64)


def choose(uses: Uses, capacity: int, slack: int, cycles: int = MAX_CYCLES) -> set[tuple[int, int]]:
    """The gaps over which pages stay, as (page, number of the use that begins the gap).

    At each access, up to ``slack`` bytes are kept free for pages that the last one leaves to be written, and for those
    that the next one loads, as far as there is room. Raises ValueError where an access alone needs more than
    ``capacity``.
    """
    state = _Cache(uses, capacity, slack)
    state.cycle()  # from nothing
    kept: set[tuple[int, int]] = state.cycle()
    for _ in range(cycles):
        before, kept = kept, state.cycle()
        if kept == before:
            return _filled(uses, capacity - slack, kept)
    # It goes round and round without coming back to where it was: close the last cycle.
    return _closed(uses, capacity, kept)


def stays(uses: Uses, kept: Collection[tuple[int, int]]) -> list[Stay]:
    """What each page's kept gaps make of its uses."""
    found = []
    for page, each in uses.of.items():
        count = len(each)
        ends = [use for use in range(count) if (page, use) not in kept]
        if not ends:
            found.append(Stay(page, each[0][0], uses.length, False, False, True))
            continue
        for index, end in enumerate(ends):
            first = (ends[index - 1] + 1) % count
            within = [(first + step) % count for step in range((end - first) % count + 1)]
            start, effect = each[first]
            written = False
            for use in within:
                written = (written or bool(each[use][1] & _WRITES)) and not each[use][1] & _SPENDS
            length = (each[end][0] - start) % uses.length + 1
            dead = uses.after(page, end)[1]
            found.append(Stay(page, start, length, bool(effect & Effect.FRESH), written and not dead))
    return found


def join(
    uses: Uses, found: Sequence[Stay], offsets: Sequence[int | None], leads: Sequence[int], movable: bool
) -> list[Stay]:
    """The stays, of which those are ``kept`` whose place is free as soon as the page's last stay has ended.

    Where pages aren't ``movable``, only if that was the same place.
    """
    of: dict[int, list[int]] = {}
    for index in sorted(range(len(found)), key=lambda index: found[index].start):
        of.setdefault(found[index].page, []).append(index)
    joined = list(found)
    for page, indices in of.items():
        effects = dict(uses.of[page])
        before = {here: indices[number - 1] for number, here in enumerate(indices)}
        for here in indices if len(indices) > 1 else ():
            stay, last = found[here], found[before[here]]
            gap = (stay.start - last.start - last.length) % uses.length
            there = offsets[here] is not None and (movable or offsets[here] == offsets[before[here]])
            if there and leads[here] >= gap and not effects[stay.start] & _DEAD:
                joined[here] = stay._replace(kept=True)
        if not any(joined[here].kept for here in indices):
            continue
        # What is written goes on to the stay that keeps it: once round from one that doesn't, if there is one.
        first = next((n for n, here in enumerate(indices) if not joined[here].kept), 0)
        order = indices[first:] + indices[:first]
        dirty = False
        for here, after in zip(order, order[1:] + order[:1], strict=True):
            stay = joined[here]
            dirty = _written(effects, stay, uses.length, dirty and stay.kept)
            needed = not joined[after].kept and not effects[joined[after].start] & _DEAD
            joined[here] = stay._replace(dirty=dirty and needed)
    return joined


def _written(effects: Mapping[int, int], stay: Stay, length: int, written: bool) -> bool:
    """Is the page newer than the copy below at the end of a stay, which it begins as ``written``?"""
    for step in range(stay.length):
        effect = effects.get((stay.start + step) % length, 0)
        written = (written or bool(effect & _WRITES)) and not effect & _SPENDS
    return written


def traffic(found: Sequence[Stay], sizes: Mapping[int, int]) -> tuple[int, int]:
    """The bytes (loaded, written) in each cycle."""
    loaded = sum(sizes[stay.page] for stay in found if loads(stay))
    return loaded, sum(sizes[stay.page] for stay in found if stay.dirty)


def loads(stay: Stay) -> bool:
    """Is something loaded when it begins?"""
    return not (stay.fresh or stay.whole or stay.kept)


class _Cache:
    """A tier's content while the cycle is gone through again and again: bytes, and no places."""

    def __init__(self, uses: Uses, capacity: int, slack: int) -> None:
        self._uses = uses
        self._capacity = capacity
        self._slack = slack
        self._now = 0
        self._used = 0
        self._leaving: list[int] = []  # bytes of the pages that have just been evicted and have to be written
        self._resident: dict[int, tuple[int, int]] = {}  # page -> (when it was used last, which use that was)
        self._dirty: set[int] = set()
        self._heap: list[tuple[int, int, int]] = []  # (minus the next use, page, when it was used last)

    def cycle(self) -> set[tuple[int, int]]:
        """Go through all accesses once; the gaps that ended in it with the page still there."""
        uses, kept = self._uses, set()
        for position, here in enumerate(uses.at):
            self._make_room(uses.pages[position], uses.pages[position + 1 - uses.length])
            for page, use in here:
                effect = uses.of[page][use][1]
                if page not in self._resident:
                    self._used += uses.sizes[page]
                elif not effect & _RENEWED:
                    kept.add((page, self._resident[page][1]))
                if effect & _WRITES:
                    self._dirty.add(page)
                if effect & _SPENDS:
                    self._dirty.discard(page)
                distance, dead = uses.after(page, use)
                self._resident[page] = (self._now, use)
                if dead or page not in uses.stuck:
                    heapq.heappush(
                        self._heap, (-(1 << 62) if dead else -self._now - distance, page, self._now)
                    )
            self._now += 1
        return kept

    def _make_room(self, needed: frozenset[int], soon: frozenset[int]) -> None:
        sizes, resident = self._uses.sizes, self._resident
        missing = sum(sizes[page] for page in needed if page not in resident)
        free = 0
        for nbytes in (
            *self._leaving,
            *(sizes[page] for page in soon if page not in resident and page not in needed),
        ):
            if free + nbytes <= self._slack:
                free += nbytes
        self._leaving.clear()
        passed_over = []
        while self._heap and self._used + missing + free > self._capacity:
            entry = heapq.heappop(self._heap)
            _, page, used = entry
            if page not in resident or resident[page][0] != used:
                continue
            if page in needed or (page in soon and self._used + missing <= self._capacity):
                passed_over.append(entry)
                continue
            _, dead = self._uses.after(page, resident.pop(page)[1])
            self._used -= sizes[page]
            if page in self._dirty:
                self._dirty.discard(page)
                if not dead:
                    self._leaving.append(sizes[page])
        for entry in passed_over:
            heapq.heappush(self._heap, entry)
        if self._used + missing > self._capacity:
            raise ValueError(
                f"an access needs {sum(sizes[page] for page in needed)} bytes at once, of {self._capacity}"
            )


def _closed(uses: Uses, capacity: int, kept: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """As many of the ``kept`` gaps as fit together when all of them come back in each cycle, the shortest first."""
    free = capacity - uses.needed()
    return {gap for gap in sorted(kept, key=lambda gap: (uses.after(*gap)[0], gap)) if _take(uses, free, gap)}


def _filled(uses: Uses, capacity: int, kept: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """The ``kept`` gaps, and what fits besides: victims are whole pages, and leave more room than was wanted."""
    free = capacity - uses.needed()
    for gap in kept:
        for piece in _over(uses, free, gap):
            piece -= uses.sizes[gap[0]]
    others = [
        (uses.after(page, use)[0], page, use)
        for page, each in uses.of.items()
        for use in range(len(each))
        if (page, use) not in kept and not uses.after(page, use)[1]
    ]
    return kept | {(page, use) for _, page, use in sorted(others) if _take(uses, free, (page, use))}


def _over(uses: Uses, free: npt.NDArray[np.int64], gap: tuple[int, int]) -> list[npt.NDArray[np.int64]]:
    """What is free at the accesses between the two uses that a gap lies between."""
    start = uses.of[gap[0]][gap[1]][0] + 1
    stop = start + uses.after(*gap)[0] - 1
    return [free[start : min(stop, uses.length)], free[: max(0, stop - uses.length)]]


def _take(uses: Uses, free: npt.NDArray[np.int64], gap: tuple[int, int]) -> bool:
    """Keep the page over the gap if there is room for it; whether there was."""
    over, nbytes = _over(uses, free, gap), uses.sizes[gap[0]]
    if not all(not piece.size or piece.min() >= nbytes for piece in over):
        return False
    for piece in over:
        piece -= nbytes
    return True
