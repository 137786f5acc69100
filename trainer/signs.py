"""Signs: vectors as one bit for each element and one scale, with what that leaves out kept as errors.

``sign(x) * mean(|x|)`` is what a vector becomes; the error is carried into the next one (Seide et al., "1-Bit
Stochastic Gradient Descent", Interspeech 2014). Work is done in spans, so that temporaries stay small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

SPAN = 1 << 16
"""Elements that are worked on at a time."""

_GRAIN = 32
"""Slices are multiples of so many elements: their bits fill whole words, and a scale behind them is aligned."""

Active = Callable[[int, int], torch.Tensor]
"""Which of the elements from one to another take part (bool); the others are left as they are."""


class Space(NamedTuple):
    """The memory in which one part's momentum is exchanged.

    ``worker`` has this rank's errors of all elements (padded to ``world`` slices), ``server`` those of its slice of the
    sum. ``outgoing``, ``incoming`` and ``shared`` are rows of bytes, one for each rank: what goes to it, what has come
    from it, and what it made of its slice.
    """

    worker: torch.Tensor
    server: torch.Tensor
    outgoing: torch.Tensor
    incoming: torch.Tensor
    shared: torch.Tensor


class Layout(NamedTuple):
    """How ``numel`` elements are cut into slices for ``world`` ranks, and a page that has room for their exchange."""

    numel: int
    world: int

    @property
    def size(self) -> int:
        """Elements of a slice; the last ones may lie behind the end."""
        return -(-self.numel // (self.world * _GRAIN)) * _GRAIN

    @property
    def row(self) -> int:
        """Bytes of a slice on its way: bits, and the scale."""
        return self.size // 8 + 4

    @property
    def page_numel(self) -> int:
        """Elements (float32) of the page."""
        return (self.world + 1) * self.size + 3 * self.world * self.row // 4

    def edges(self, rank: int) -> tuple[int, int]:
        """The first element of a rank's slice, and the one after its last."""
        return min(rank * self.size, self.numel), min((rank + 1) * self.size, self.numel)

    def space(self, page: torch.Tensor) -> Space:
        """The page's memory (float32, one dimension), cut up."""
        worker, server = self.world * self.size, self.size
        rows = page[worker + server : self.page_numel].view(torch.uint8).view(3, self.world, self.row)
        return Space(page[:worker], page[worker : worker + server], rows[0], rows[1], rows[2])


def pack(values: torch.Tensor, active: Active, row: torch.Tensor) -> None:
    """Put the signs and the scale of ``values`` (float32) into ``row``, and leave what they aren't in ``values``."""
    total, count = 0.0, 0
    for start, stop in spans(0, values.numel()):
        mask = active(start, stop)
        total += float((values[start:stop].abs() * mask).sum(dtype=torch.float64))
        count += int(mask.sum())
    scale = row[-4:].view(torch.float32)
    scale.fill_(total / count if count else 0.0)
    for start, stop in spans(0, values.numel()):
        piece = values[start:stop]
        bits = np.packbits((piece >= 0).numpy())
        row[start // 8 : start // 8 + len(bits)].copy_(torch.from_numpy(bits))
        torch.where(active(start, stop), piece - unpack(row, start, stop), piece, out=piece)


def unpack(row: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """The elements ``start`` (a multiple of 8) to ``stop`` of what was packed into ``row``."""
    bits = np.unpackbits(row[start // 8 : -(-stop // 8)].numpy(), count=stop - start)
    scale = float(row[-4:].view(torch.float32))
    return torch.from_numpy(bits).to(torch.float32).mul_(2 * scale).sub_(scale)


def spans(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """What lies between, in pieces."""
    for first in range(start, stop, SPAN):
        yield first, min(first + SPAN, stop)
