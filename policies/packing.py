"""Where pages lie: offsets for stays, so that no two lie on the same bytes at the same time.

Dynamic storage allocation with all lifetimes known beforehand, round a cycle. The problem is NP-hard (M. R. Garey and
D. S. Johnson, "Computers and Intractability", 1979, problem SR2); first fit in the order of lifetime comes within a few
per cent of the bytes in use (J. Gergov, "Algorithms for compile-time memory optimization", SODA 1999, proves bounds of
that kind), and what finds no place is left to whoever carries the plan out.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tiermem.policies.residency import Stay

_Ints = npt.NDArray[np.int64]


MARGINS = ((3, 1), (2, 1), (1, 1), (1, 0))
"""Accesses before and after a stay for which its bytes are kept free, so that it can be on its way: tried in turn."""
RECENT = 3
"""For so many accesses, what was written out of a stay's bytes may still be on its way."""


def pack(stays: Sequence[Stay], sizes: Mapping[int, int], capacity: int, length: int) -> list[int | None]:
    """An offset in bytes for each stay, or None for those that found none; ``length``: accesses of the cycle.

    First every stay gets a place, as far as that goes; then those that move are moved to where as much of the `MARGINS`
    as possible is free around them.
    """
    orders: list[Callable[[int], tuple[int, ...]]] = [
        lambda index: (-stays[index].length, -sizes[stays[index].page], stays[index].start),
        lambda index: (stays[index].start, -sizes[stays[index].page]),
        lambda index: (-sizes[stays[index].page], -stays[index].length, stays[index].start),
    ]
    best: _Layout | None = None
    # First with room for one access ahead of what is fetched; without, when that leaves others without a place.
    for before, order in ((1, orders[0]), *((0, order) for order in orders)):
        layout = _Layout(stays, sizes, capacity, length)
        for index in sorted(range(len(stays)), key=order):
            early = before if not (stays[index].fresh or stays[index].whole) else 0
            if not (early and layout.put(index, early, 0)):
                layout.put(index, 0, 0)
        if best is None or layout.homeless < best.homeless:
            best = layout
        if not layout.homeless:
            break
    assert best is not None
    for index in sorted(range(len(stays)), key=lambda index: stays[index].start):
        stay = stays[index]
        if not stay.whole and (stay.dirty or not stay.fresh):
            best.spread(index)
    return [None if at < 0 else int(at) for at in best.begins]


def leads(
    stays: Sequence[Stay], offsets: Sequence[int | None], sizes: Mapping[int, int], length: int
) -> tuple[list[int], list[list[int]]]:
    """For each stay, how many accesses before its first use its bytes are free, and its page can be on its way; and
    which stays were written out of these bytes shortly before.

    0: only when the first use begins. A stay without a place can be on its way one access before.
    """
    starts, lengths, begins, ends, pages = _arrays(stays, offsets, sizes)
    dirty = np.array([stay.dirty for stay in stays], dtype=bool)
    found, behind = [], []
    for index, stay in enumerate(stays):
        before = (stay.start - starts - lengths) % length  # accesses from the other's end to this one's start
        same = pages == stay.page
        clash = same if offsets[index] is None else same | ((begins < ends[index]) & (ends > begins[index]))
        clash[index] = False
        least = int(before[clash].min()) if clash.any() else length - stay.length
        lead = max(0, min(least, length - stay.length, 1 if offsets[index] is None else length))
        found.append(lead)
        behind.append([int(other) for other in np.flatnonzero(clash & dirty & (before <= lead + RECENT))])
    return found, behind


def _arrays(
    stays: Sequence[Stay], offsets: Sequence[int | None], sizes: Mapping[int, int]
) -> tuple[_Ints, _Ints, _Ints, _Ints, _Ints]:
    starts = np.array([stay.start for stay in stays], dtype=np.int64)
    lengths = np.array([stay.length for stay in stays], dtype=np.int64)
    begins = np.array([-1 if at is None else at for at in offsets], dtype=np.int64)
    nbytes = np.array([sizes[stay.page] for stay in stays], dtype=np.int64)
    ends = np.where(begins < 0, -1, begins + nbytes)
    return starts, lengths, begins, ends, np.array([stay.page for stay in stays], dtype=np.int64)


class _Layout:
    """Who lies where and when. What has no place lies before the first byte, where it is in nobody's way."""

    def __init__(self, stays: Sequence[Stay], sizes: Mapping[int, int], capacity: int, length: int) -> None:
        self.stays = stays
        self.capacity = capacity
        self.length = length
        self.nbytes = [sizes[stay.page] for stay in stays]
        self.begins = np.full(len(stays), -1, dtype=np.int64)
        self.ends = np.full(len(stays), -1, dtype=np.int64)
        self.starts = np.zeros(len(stays), dtype=np.int64)
        self.lengths = np.zeros(len(stays), dtype=np.int64)  # 0: not placed
        self.homeless = 0  # bytes

    def put(self, index: int, before: int, after: int) -> bool:
        """Place a stay at the lowest offset that is free from ``before`` accesses before it to ``after`` after it."""
        stay = self.stays[index]
        start, span = (stay.start - before) % self.length, stay.length + before + after
        if span > self.length:
            start, span = 0, self.length
        later = (start - self.starts) % self.length < self.lengths
        earlier = (self.starts - start) % self.length < span
        clash = np.flatnonzero((later | earlier) & (self.lengths > 0))
        at = _lowest(self.begins[clash], self.ends[clash], self.nbytes[index], self.capacity)
        if at is None:
            if not before and not after:
                self.homeless += self.nbytes[index]
            return False
        self.begins[index], self.ends[index] = at, at + self.nbytes[index]
        self.starts[index], self.lengths[index] = start, span
        return True

    def spread(self, index: int) -> None:
        """Move a stay to where more is free around it, if there is such a place."""
        stay = self.stays[index]
        old = [values[index] for values in (self.begins, self.ends, self.starts, self.lengths)]
        if not old[3]:
            return
        self.lengths[index] = 0
        for before, after in MARGINS:
            if self.put(index, 0 if stay.fresh else before, after if stay.dirty else 0):
                return
        for values, value in zip((self.begins, self.ends, self.starts, self.lengths), old, strict=True):
            values[index] = value


def _lowest(begins: _Ints, ends: _Ints, nbytes: int, capacity: int) -> int | None:
    """The lowest offset of ``nbytes`` free bytes between taken pieces, which may overlap each other."""
    order = np.argsort(begins)
    # The highest end so far is where each hole begins.
    holes = (
        np.concatenate(([0], np.maximum.accumulate(ends[order])))
        if len(order)
        else np.zeros(1, dtype=np.int64)
    )
    rooms = np.concatenate((begins[order], [capacity])) - holes
    fits = np.flatnonzero(rooms >= nbytes)
    return int(holes[fits[0]]) if len(fits) else None
