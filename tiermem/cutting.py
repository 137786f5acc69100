"""Cutting: which modules could be units, and which weights must be in tiles, so that a model fits its budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import nn

from tiermem import budget
from tiermem.errors import BudgetError, format_bytes
from tiermem.page import ALIGNMENT
from tiermem.pageable import nbytes_of
from tiermem.table import PageTable
from tiermem.tiling import Tiling, tile
from tiermem.unit import Unit, find_units


def ways_to_cut(net: nn.Module, patterns: Sequence[str], limit: int) -> Iterator[dict[str, nn.Module]]:
    """Which modules could be units, with ``limit`` as the most bytes of one first, then with less, then with more."""
    if patterns:
        yield find_units(net, patterns, limit)
        return
    limits = [1 << power for power in range(12, nbytes_of(net).bit_length() + 1)]
    for each in [limit, *(x for x in reversed(limits) if x < limit), *(x for x in limits if x > limit)]:
        yield find_units(net, patterns, each)


def cut_in_tiles(
    net: nn.Module,
    patterns: Sequence[str],
    dtype: torch.dtype | None,
    refused: BudgetError,
    build: Callable[[dict[str, nn.Module], int, Tiling], tuple[PageTable, list[Unit]]],
    host: int,
    device: int | None,
    overheads: tuple[int, int],
) -> tuple[Tiling, budget.Fit]:
    """A way to cut the model with large weights in tiles, as large as they may be.

    ``refused`` is what was said of the model without, and is raised where tiles don't help, with what they would need.
    The rest is what :func:`tiermem.budget.fit` is given.
    """
    least: BudgetError | None = None
    largest = (host if device is None else min(host, device)) // 3
    limits = [1 << power for power in reversed(range(16, largest.bit_length()))]
    for limit in [*limits, ALIGNMENT]:
        tiling = tile(net, limit, dtype)
        if not tiling.tiled:
            continue
        units = find_units(net, patterns, limit, tiling.tiled) | tiling.units
        try:
            return tiling, budget.fit([units], partial(_built, build, tiling), host, device, overheads)
        except BudgetError as error:
            if least is None or (error.smallest or 0) < (least.smallest or 0):
                least = error
    if least is not None:
        refused.arithmetic += (
            f"; with weights of Linear and Embedding modules in tiles, {least.arithmetic}, so a {least.tier} budget of "
            f"{format_bytes(least.smallest or 0)} would do"
        )
    raise refused


def _built(
    build: Callable[[dict[str, nn.Module], int, Tiling], tuple[PageTable, list[Unit]]],
    tiling: Tiling,
    modules: dict[str, nn.Module],
    part_numel: int,
) -> tuple[PageTable, list[Unit]]:
    return build(modules, part_numel, tiling)


def describe_tiles(tiling: Tiling, refused: BudgetError, had: int) -> Iterator[str]:
    """What is to be said of parameters in tiles. ``refused``: what was said without; ``had``: that tier's budget."""
    for tiled in tiling.tiled.values():
        yield (
            f"{tiled.name}, a parameter of shape {list(tiled.parameter.shape)}, is computed in {len(tiled.tiles)} "
            f"tiles, since with it in one piece this model needs a {refused.tier} budget of "
            f"{format_bytes(refused.smallest or 0)}, and has {format_bytes(had)}"
        )
