"""Products: a matrix product whose terms come a tile at a time, with the bits of the product made at once.

Libraries add the terms of a product in steps of a fixed number, each step's sum to what there is. Whoever adds in the
same steps, in the same order, rounds as they do. How long a step is no library tells, so it is found out by trying.
"""

from __future__ import annotations

import functools

import torch

ROWS = 192
"""The rows that tiles are cut at multiples of, where no step is found."""

_CANDIDATES = (192, 256, 384, 320, 240, 336, 448, 512, 160, 128, 96, 64)
_SIZES = ((33, 2600, 40), (7, 1300, 72))  # a step is to hold for both


@functools.cache
def step_of(dtype: torch.dtype) -> int | None:
    """How many terms of a product of this dtype are added at a time on the CPU; None where no step gives its bits.

    Half-precision sums are rounded once, at the end, so there is no step for them.
    """
    if dtype not in (torch.float32, torch.float64):
        return None
    generator = torch.Generator().manual_seed(0)
    samples = []
    for height, terms, width in _SIZES:
        left = torch.randn(height, terms, dtype=dtype, generator=generator)
        samples.append((left, torch.randn(terms, width, dtype=dtype, generator=generator)))
    for step in _CANDIDATES:
        if all(torch.equal(_in_tiles(left, right, step), left @ right) for left, right in samples):
            return step
    return None


def rows_of(dtype: torch.dtype) -> int:
    """Tiles have a multiple of this many rows, so that a step never lies in two of them."""
    return step_of(dtype) or ROWS


def accumulate(total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``total`` (None: nothing yet) + ``left @ right``, the terms of the next tile; ``total`` is written.

    Half-precision terms are added up in float32: cast the end's result.
    """
    step = step_of(left.dtype) if left.device.type == "cpu" else None
    if step is None:
        terms = left @ right
        if total is None:
            return terms.float() if terms.dtype.itemsize < 4 else terms
        return total.add_(terms)
    return _add(total, left, right, step)


def _add(total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor, step: int) -> torch.Tensor:
    for low in range(0, len(right), step):
        terms = left[:, low : low + step], right[low : low + step]
        total = terms[0] @ terms[1] if total is None else total.addmm_(*terms)
    assert total is not None
    return total


def _in_tiles(left: torch.Tensor, right: torch.Tensor, step: int) -> torch.Tensor:
    total = None
    for low in range(0, len(right), 2 * step):
        total = _add(total, left[:, low : low + 2 * step], right[low : low + 2 * step], step)
    assert total is not None
    return total
