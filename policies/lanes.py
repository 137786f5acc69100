"""Places for very many stays: one sweep through the cycle, where `packing` compares each stay with all others.

A stay gets the next hole round the tier that is large enough, so that what was freed longest ago is used first, and
what was written out of a place has had the most time. It is less tight than `packing`; what finds no place is left to
whoever carries the plan out.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tiermem.policies.packing import RECENT
from tiermem.policies.residency import Stay


def pack(stays: Sequence[Stay], sizes: Mapping[int, int], capacity: int, length: int) -> list[int | None]:
    """An offset in bytes for each stay, or None; as `packing.pack`."""
    offsets: list[int | None] = [None] * len(stays)
    order = sorted(range(len(stays)), key=lambda index: (stays[index].start, -sizes[stays[index].page]))
    # What is there when the cycle begins lies side by side, what never leaves first.
    there = [
        index for index in order if stays[index].whole or stays[index].start + stays[index].length > length
    ]
    there.sort(key=lambda index: (not stays[index].whole, -sizes[stays[index].page], stays[index].start))
    top, ending = 0, []
    for index in there:
        nbytes = sizes[stays[index].page]
        if top + nbytes <= capacity:
            offsets[index] = top
            top += nbytes
            if not stays[index].whole:
                ending.append((stays[index].start + stays[index].length - length, index))
    kept = [index for index in there if offsets[index] is not None]
    begins = np.array([offsets[index] for index in kept], dtype=np.int64)
    ends = begins + np.array([sizes[stays[index].page] for index in kept], dtype=np.int64)
    needed_at = np.array([stays[index].start for index in kept], dtype=np.int64)
    soonest = int(needed_at[[not stays[index].whole for index in kept]].min(initial=length))
    holes = _Holes()
    holes.free(top, capacity)
    ending.sort(reverse=True)
    later: list[list[int]] = [
        [] for _ in range(length + 1)
    ]  # by position: stays whose places are free from there
    for end, index in ending:
        later[end].append(index)
    done = 0
    for index in order:
        stay = stays[index]
        if stay.whole or stay.start + stay.length > length:
            continue
        while done <= stay.start:
            for gone in later[done]:
                at = offsets[gone]
                assert at is not None
                holes.free(at, at + sizes[stays[gone].page])
            done += 1
        nbytes, end = sizes[stay.page], stay.start + stay.length
        for at, stop in holes.fitting(nbytes):
            while end > soonest and at + nbytes <= stop:
                # Whoever was there at the beginning wants its place back for the next cycle.
                clash = (begins < at + nbytes) & (ends > at) & (needed_at < end)
                if not clash.any():
                    break
                at = int(ends[clash].max())
            if at + nbytes <= stop:
                holes.take(at, at + nbytes)
                offsets[index] = at
                later[end].append(index)
                break
    return offsets


def leads(
    stays: Sequence[Stay], offsets: Sequence[int | None], sizes: Mapping[int, int], length: int
) -> tuple[list[int], list[list[int]]]:
    """As `packing.leads`, of those alone that lay there just before."""
    found, behind = [0] * len(stays), [[] for _ in stays]  # type: tuple[list[int], list[list[int]]]
    starts: list[int] = [0]  # of pieces of the tier, each with who lay there last and until when
    owners: list[tuple[int, int]] = [(-length, -1)]
    last: dict[int, int] = {}  # page -> when its last stay ended
    order = sorted(range(len(stays)), key=lambda index: stays[index].start)
    for cycle in (0, 1):
        for index in order:
            stay, at = stays[index], offsets[index]
            start = stay.start + cycle * length
            end, limit = start + stay.length, length - stay.length
            lead = min(limit, start - last.get(stay.page, -length))
            last[stay.page] = end
            if at is None:
                found[index] = max(0, min(lead, 1))
                continue
            stop = at + sizes[stay.page]
            low = bisect_right(starts, at) - 1
            high = bisect_left(starts, stop)
            over = owners[low:high]
            tail = owners[high - 1]
            lead = max(0, min([lead, *(start - until for until, _ in over)]))
            found[index] = lead
            behind[index] = [
                other
                for until, other in dict.fromkeys(over)
                if other >= 0 and other != index and stays[other].dirty and start - until <= lead + RECENT
            ]
            pieces, whose = [at], [(end, index)]
            if starts[low] < at:
                pieces.insert(0, starts[low])
                whose.insert(0, owners[low])
            if high == len(starts) or starts[high] > stop:
                pieces.append(stop)
                whose.append(tail)
            starts[low:high], owners[low:high] = pieces, whose
    return found, behind


class _Holes:
    """Free bytes, as pieces side by side that are joined, and a place from which the next one is looked for."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._next = 0

    def free(self, begin: int, end: int) -> None:
        if begin == end:
            return
        index = bisect_left(self._begins, begin)
        if index and self._ends[index - 1] == begin:
            index -= 1
            self._ends[index] = end
        else:
            self._begins.insert(index, begin)
            self._ends.insert(index, end)
        if index + 1 < len(self._begins) and self._begins[index + 1] == end:
            self._ends[index] = self._ends.pop(index + 1)
            del self._begins[index + 1]

    def fitting(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Holes that are large enough, as (begin, end), from the next one round. They may be taken from at the end."""
        count = len(self._begins)
        first = bisect_left(self._begins, self._next)
        if first and self._ends[first - 1] - self._next >= nbytes:
            yield self._next, self._ends[first - 1]
        for step in range(count):
            index = (first + step) % count
            if self._ends[index] - self._begins[index] >= nbytes:
                yield self._begins[index], self._ends[index]

    def take(self, begin: int, end: int) -> None:
        index = bisect_right(self._begins, begin) - 1
        start, stop = self._begins[index], self._ends[index]
        assert start <= begin
        assert end <= stop
        pieces = [piece for piece in ((start, begin), (end, stop)) if piece[0] < piece[1]]
        self._begins[index : index + 1] = [piece[0] for piece in pieces]
        self._ends[index : index + 1] = [piece[1] for piece in pieces]
        self._next = end
