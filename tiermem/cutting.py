"""Cutting: which modules could be units, and which weights must be in tiles, so that a model fits its budgets.

Units are found by what a model looks like (repeated blocks, embeddings, heads), or by patterns of module names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import nn

from tiermem import budget
from tiermem.errors import BudgetError, ConfigError, format_bytes
from tiermem.page import ALIGNMENT
from tiermem.pageable import nbytes_of, tensors_of
from tiermem.table import PageTable
from tiermem.tiling import Tiling, tile
from tiermem.unit import Unit


def find_units(
    net: nn.Module, patterns: Sequence[str], limit: int, but: Container[int] = ()
) -> dict[str, nn.Module]:
    """The modules that are units, by name, in the module tree's order; the root is never among them.

    With ``patterns``, those whose qualified names match one (``*`` stands for one level). Without, a module is a unit
    when it is one of several of a kind in a list, has parameters of its own, or has nothing below it, as long as its
    parameters take no more than ``limit`` bytes; a larger one is looked into. Modules so small that paging them makes
    no sense are left to the resident unit. ``but``: the ids of parameters that are in tiles, and don't count.
    """
    if patterns:
        return _matching(net, patterns)
    found: dict[str, nn.Module] = {}
    _look(net, "", limit, found, but)
    total = nbytes_of(net, but)
    # A module below 1/256 of the model isn't worth a fault, as long as all of these together stay small.
    allowance = total // 16
    for name, module in sorted(found.items(), key=lambda item: nbytes_of(item[1], but)):
        nbytes = nbytes_of(module, but)
        if nbytes * 256 > total or nbytes > allowance:
            break
        allowance -= nbytes
        del found[name]
    return {name: module for name, module in net.named_modules() if name in found}


def _matching(net: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    modules = {name: module for name, module in net.named_modules(remove_duplicate=False) if name}
    matched = {pattern: _matched(pattern, modules) for pattern in patterns}
    idle = [pattern for pattern, names in matched.items() if not names]
    if idle:
        names = ", ".join(list(modules)[:8])
        raise ConfigError(
            f"policy.units: {idle!r} match no module; there are {names}, ... (* stands for one level)"
        )
    wanted = set().union(*matched.values())
    matching = {name: module for name, module in modules.items() if name in wanted}
    first = {id(module): name for name, module in reversed(matching.items())}
    return {name: module for name, module in matching.items() if first[id(module)] == name}


def _matched(pattern: str, names: Collection[str]) -> set[str]:
    """Those of the qualified names that the pattern, level by level, matches."""
    if not any(letter in pattern for letter in "*?["):
        return {pattern} if pattern in names else set()
    levels = pattern.split(".")
    split = ((name, name.split(".")) for name in names)
    return {name for name, each in split if len(each) == len(levels) and all(map(fnmatchcase, each, levels))}


def _look(module: nn.Module, name: str, limit: int, found: dict[str, nn.Module], but: Container[int]) -> None:
    children = [(key, child) for key, child in module.named_children() if nbytes_of(child, but)]
    kinds = [type(child) for _, child in children]
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    for key, child in children:
        path = f"{name}.{key}" if name else key
        below = [inner for inner in child.children() if nbytes_of(inner, but)]
        own = next(tensors_of(child, but), None) is not None
        whole = own or not below or (is_list and kinds.count(type(child)) > 1)
        if (
            whole
            and (nbytes_of(child, but) <= limit or not below)
            and not isinstance(child, nn.ModuleList | nn.ModuleDict)
        ):
            found[path] = child
        else:
            _look(child, path, limit, found, but)


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
