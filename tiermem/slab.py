"""Slabs: large allocations, made once, that are cut into frames.

A slab never grows and never gives memory back before it is closed, so a tier can't use more than its budget
and the hot path never allocates. Frames are of any size (a multiple of the alignment), because the pages of a
model are; neighbours that are released become one hole again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator

from tiermem.page import ALIGNMENT, Frame, Page


class Slab:
    """The frames of one slab: which bytes are cut, to which page, and where the holes are.

    It keeps the books only; the memory belongs to the tier. Offsets and sizes are in bytes.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes < 0 or nbytes % ALIGNMENT:
            raise ValueError(f"a slab of {nbytes} bytes: must be a multiple of {ALIGNMENT}")
        self.nbytes = nbytes
        self.used = 0
        self.peak = 0
        self._offsets: list[int] = []  # of all frames, sorted
        self._frames: dict[int, Frame] = {}
        self._holes: list[tuple[int, int]] = [(0, nbytes)] if nbytes else []  # (offset, nbytes), sorted

    @property
    def free(self) -> int:
        """Bytes in holes, together."""
        return self.nbytes - self.used

    def __iter__(self) -> Iterator[Frame]:
        """All frames in the order of their addresses."""
        return (self._frames[offset] for offset in self._offsets)

    def reserve(self, page: Page) -> Frame | None:
        """Cut a frame for ``page`` out of the smallest hole that holds it (the lowest of equals).

        Returns None when there is no such hole.
        """
        nbytes = page.nbytes
        best = -1
        best_nbytes = 0
        for index, (_, hole) in enumerate(self._holes):
            if hole >= nbytes and (best < 0 or hole < best_nbytes):
                best, best_nbytes = index, hole
                if hole == nbytes:
                    break
        if best < 0:
            return None
        return self._cut(best, self._holes[best][0], page)

    def reserve_at(self, page: Page, offset: int) -> Frame | None:
        """Cut the frame for ``page`` that starts at ``offset``; None when any of its bytes is taken."""
        index = bisect_right(self._holes, (offset, self.nbytes)) - 1
        if index < 0 or sum(self._holes[index]) < offset + page.nbytes:
            return None
        return self._cut(index, offset, page)

    def between(self, start: int, end: int) -> list[Frame]:
        """The frames that hold any of the bytes from ``start`` to ``end``."""
        frame = self._frames.get(start)
        if frame is not None and start + frame.nbytes >= end:
            return [frame]
        first, last = bisect_right(self._offsets, start) - 1, bisect_left(self._offsets, end)
        frames = [self._frames[offset] for offset in self._offsets[max(0, first) : last]]
        if frames and frames[0].offset + frames[0].nbytes <= start:
            del frames[0]  # it ends before
        return frames

    def _cut(self, index: int, offset: int, page: Page) -> Frame:
        nbytes = page.nbytes
        start, hole = self._holes[index]
        rest = ((start, offset - start), (offset + nbytes, start + hole - offset - nbytes))
        self._holes[index : index + 1] = [piece for piece in rest if piece[1]]
        frame = Frame(offset, nbytes, page)
        self._frames[offset] = frame
        insort(self._offsets, offset)
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        return frame

    def release(self, frame: Frame) -> None:
        """Give a frame back; it joins the holes beside it."""
        if self._frames.pop(frame.offset, None) is not frame:
            raise AssertionError(f"{frame!r} is not cut from this slab")
        del self._offsets[bisect_left(self._offsets, frame.offset)]
        self.used -= frame.nbytes
        _join(self._holes, frame.offset, frame.nbytes)

    def at(self, offset: int) -> Frame | None:
        """The frame that begins at ``offset``, if one does."""
        return self._frames.get(offset)

    def frame_at(self, offset: int) -> Frame:
        """The frame that holds the byte at ``offset``; KeyError when that byte is in a hole."""
        index = bisect_right(self._offsets, offset) - 1
        if index >= 0:
            frame = self._frames[self._offsets[index]]
            if offset < frame.offset + frame.nbytes:
                return frame
        raise KeyError(offset)

    def window(self, nbytes: int, victims: Iterable[Frame]) -> list[Frame] | None:
        """The frames to release so that a hole of ``nbytes`` appears; None when no choice of victims gives one.

        ``victims`` come best first, and the answer uses as short a prefix of them as possible; of that prefix
        only what lies inside the new hole is named.
        """
        holes, chosen = list(self._holes), []
        for victim in victims:
            chosen.append(victim)
            offset, size = _join(holes, victim.offset, victim.nbytes)
            if size >= nbytes:
                end = offset + size
                inside = sorted(
                    (frame for frame in chosen if offset <= frame.offset < end),
                    key=lambda frame: frame.offset,
                )
                return _cheapest(offset, end, inside, nbytes)
        return None

    def slide(self, frame: Frame) -> int | None:
        """Move a frame down to the lowest address that a hole directly below it allows.

        Returns the old offset (the caller moves the bytes), or None when there is no hole below.
        """
        index = bisect_left(self._holes, (frame.offset, 0)) - 1
        if index < 0:
            return None
        offset, hole = self._holes[index]
        if offset + hole != frame.offset:
            return None
        old = frame.offset
        del self._frames[old]
        self._offsets[bisect_left(self._offsets, old)] = offset
        frame.offset = offset
        self._frames[offset] = frame
        del self._holes[index]
        _join(self._holes, offset + frame.nbytes, hole)
        return old

    def check(self) -> None:
        """Assert invariant 2: used + free = cut, and no two frames overlap."""
        edges = sorted([(f.offset, f.nbytes) for f in self] + self._holes)
        position = 0
        for offset, nbytes in edges:
            assert offset == position, f"slab: bytes {position} to {offset} are neither frame nor hole"
            assert nbytes > 0
            position += nbytes
        assert position == self.nbytes, f"slab: {position} bytes accounted for, {self.nbytes} cut"
        assert self.used == sum(f.nbytes for f in self)
        ends = {offset + nbytes for offset, nbytes in self._holes}
        assert all(offset not in ends for offset, _ in self._holes), "slab: two holes side by side"


def _join(holes: list[tuple[int, int]], offset: int, nbytes: int) -> tuple[int, int]:
    """Add a hole to a sorted list, merged with its neighbours; returns the merged hole."""
    index = bisect_left(holes, (offset, 0))
    if index < len(holes) and holes[index][0] == offset + nbytes:
        nbytes += holes.pop(index)[1]
    if index and sum(holes[index - 1]) == offset:
        offset, before = holes.pop(index - 1)
        nbytes += before
        index -= 1
    holes.insert(index, (offset, nbytes))
    return offset, nbytes


def _cheapest(start: int, end: int, frames: list[Frame], nbytes: int) -> list[Frame]:
    """Of the frames in a run of free and releasable bytes, the cheapest neighbours that make ``nbytes`` of room.

    The cost is the bytes given up: keep what lies beside the hole that is needed.
    """
    best: list[Frame] | None = None
    best_cost = 0
    low = 0
    for high in range(len(frames)):
        # The hole reaches from the end of the frame before `low` to the start of the frame after `high`.
        right = frames[high + 1].offset if high + 1 < len(frames) else end
        while low <= high:
            left = frames[low - 1].offset + frames[low - 1].nbytes if low else start
            if right - left < nbytes:
                break
            cost = sum(frame.nbytes for frame in frames[low : high + 1])
            if best is None or cost < best_cost:
                best, best_cost = frames[low : high + 1], cost
            low += 1
    assert best is not None
    return best
