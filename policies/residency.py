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
            return kept
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


def traffic(found: Sequence[Stay], sizes: Mapping[int, int]) -> tuple[int, int]:
    """The bytes (loaded, written) in each cycle."""
    loaded = sum(sizes[stay.page] for stay in found if not stay.fresh and not stay.whole)
    return loaded, sum(sizes[stay.page] for stay in found if stay.dirty)


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
    chosen = set()
    for page, use in sorted(kept, key=lambda gap: (uses.after(*gap)[0], gap)):
        start = uses.of[page][use][0] + 1
        stop = start + uses.after(page, use)[0] - 1
        over = [free[start : min(stop, uses.length)], free[: max(0, stop - uses.length)]]
        if all(not piece.size or piece.min() >= uses.sizes[page] for piece in over):
            for piece in over:
                piece -= uses.sizes[page]
            chosen.add((page, use))
    return chosen
