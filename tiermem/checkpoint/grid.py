"""Grids: how an array is cut into chunks, each of them one run of the bytes that a page has.

The elements of an array are numbered as they lie in memory, from its slowest axis to its fastest. Chunks are cut so
that each holds neighbouring numbers only: one large write, with nothing to gather.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple


class Chunk(NamedTuple):
    """One chunk: its place among the chunks, by logical axis, and its elements, from ``start`` to ``stop``."""

    place: tuple[int, ...]
    start: int
    stop: int


class Grid:
    """The chunks of an array of ``shape``, whose axes lie in memory in ``order``, slowest first.

    ``chunk`` is the shape of a chunk by logical axis. ``numel`` counts the elements of the array, ``chunk_numel`` those
    of one chunk, which at an axis' end is filled up behind its last element.
    """

    def __init__(self, shape: Sequence[int], order: Sequence[int], chunk: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.order = tuple(order)
        self.chunk = tuple(chunk)
        self.numel = math.prod(self.shape)
        self.chunk_numel = math.prod(self.chunk)
        stored = [self.shape[axis] for axis in self.order]
        cut = [self.chunk[axis] for axis in self.order]
        # The axis that is cut: those before it have one element a chunk, those behind it all they have.
        self._axis = next((i for i, (n, k) in enumerate(zip(stored, cut, strict=True)) if k != 1), len(cut))
        if self._axis == len(cut) and cut:
            self._axis -= 1
        self._outer = stored[: self._axis]
        self._inner = math.prod(cut[self._axis + 1 :])
        self._rows = stored[self._axis] if cut else 1
        self._cut = cut[self._axis] if cut else 1
        self._per_row = -(-self._rows // self._cut) if self.numel else 0
        self.num_chunks = math.prod(self._outer) * self._per_row if self.numel else 0

    @staticmethod
    def cut_to(shape: Sequence[int], order: Sequence[int], most: int) -> Grid:
        """The grid with the fewest chunks of at most ``most`` elements each (at least one)."""
        stored = [shape[axis] for axis in order]
        cut = [max(1, n) for n in stored]
        inner, axis = 1, len(stored)
        while axis and inner * cut[axis - 1] <= most:
            axis -= 1
            inner *= cut[axis]
        if axis:
            rows = cut[axis - 1]
            # Evenly, so that the last chunk is nearly as full as the others.
            cut[axis - 1] = -(-rows // -(-rows // max(1, most // inner)))
            cut[: axis - 1] = [1] * (axis - 1)
        chunk = [0] * len(stored)
        for place, axis in enumerate(order):
            chunk[axis] = cut[place]
        return Grid(shape, order, chunk)

    @property
    def contiguous(self) -> bool:
        """Is every chunk one run of elements, as :meth:`cut_to` makes them?"""
        stored = [self.shape[axis] for axis in self.order]
        cut = [self.chunk[axis] for axis in self.order]
        behind = slice(self._axis + 1, None)
        return all(k == max(1, n) for n, k in zip(stored[behind], cut[behind], strict=True)) and all(
            k == 1 for k in cut[: self._axis]
        )

    def number_at(self, element: int) -> int:
        """The number of the chunk that holds an element."""
        outer, rest = divmod(element, self._rows * self._inner)
        return outer * self._per_row + rest // (self._cut * self._inner)

    def __getitem__(self, number: int) -> Chunk:
        """Chunk ``number``, counted in memory order."""
        outer, place = divmod(number, self._per_row)
        start = (outer * self._rows + place * self._cut) * self._inner
        stop = (outer * self._rows + min(self._rows, (place + 1) * self._cut)) * self._inner
        stored = [0] * len(self.shape)
        if stored:
            stored[self._axis] = place
        for axis in reversed(range(self._axis)):
            outer, stored[axis] = divmod(outer, self._outer[axis])
        index = [0] * len(stored)
        for position, axis in enumerate(self.order):
            index[axis] = stored[position]
        return Chunk(tuple(index), start, stop)

    def covering(self, start: int, stop: int) -> Iterator[Chunk]:
        """The chunks that hold any of the elements from ``start`` to ``stop``, in order."""
        if start < stop:
            for number in range(self.number_at(start), self.number_at(stop - 1) + 1):
                yield self[number]


def order_of(size: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    """The axes of a dense tensor as they lie in memory, slowest first; None for one with gaps or overlaps."""
    natural = range(len(size))
    for order in (natural, sorted(natural, key=lambda axis: (-stride[axis], axis))):
        # Where there is only one element, the stride means nothing.
        axes = [axis for axis in order if size[axis] != 1]
        steps = [stride[axis] for axis in axes]
        dense = not axes or (
            steps[-1] == 1
            and all(
                step == below * size[axis]
                for (step, below), axis in zip(pairwise(steps), axes[1:], strict=True)
            )
        )
        if dense:
            return tuple(order)
    return tuple(natural) if 0 in size else None


def strides_in(size: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor whose axes lie in memory in ``order``."""
    stride = [1] * len(size)
    step = 1
    for axis in reversed(order):
        stride[axis] = step
        step *= max(1, size[axis])
    return tuple(stride)


def alike(size: Sequence[int], order: Sequence[int], other: Sequence[int]) -> bool:
    """Do two orders put the elements of this shape in the same places?"""
    return [a for a in order if size[a] != 1] == [a for a in other if size[a] != 1]
