"""Tilings: parameters that no budget would hold whole, cut into tiles of rows, each of which is a unit.

A tile is a module, so that whatever pages units pages tiles: it has some rows of the weight of an ``nn.Linear`` or
``nn.Embedding``, and its forward is the module's, for these rows. Who puts the results together, and shows the
parameter as the one that it is, is :mod:`tiermem.whole`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from tiermem.pageable import is_compute
from tiermem.parameter import DeferredParameter
from tiermem.products import rows_of


class Tile(nn.Module):
    """Rows ``start`` to ``stop`` of a parameter; ``name`` says of which."""

    def __init__(self, name: str, parameter: nn.Parameter, start: int, stop: int) -> None:
        super().__init__()
        self.name = f"{name}[{start}:{stop}]"
        self.start = start
        self.stop = stop
        self._of = (parameter,)  # not as an attribute of its own, which would be a parameter of the tile
        with torch._C.DisableTorchFunctionSubclass():
            values = parameter.data[start:stop]
            if isinstance(parameter, DeferredParameter):
                values = _absent(values)  # what it has in memory now it won't have for long
            self.values = nn.Parameter(values, requires_grad=parameter.requires_grad)
            if parameter.grad is not None:
                self.values.grad = parameter.grad[start:stop]

    @property
    def whole(self) -> nn.Parameter:
        """The parameter."""
        return self._of[0]

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The rows of these numbers, counted from the tile's first, or the product with them all."""
        if not x.is_floating_point():
            return F.embedding(x, self.values)
        return F.linear(x, self.values.to(x.dtype), bias)


@dataclass(eq=False)
class Tiled:
    """A parameter in tiles, and the modules whose it is."""

    name: str
    parameter: nn.Parameter
    tiles: list[Tile]
    owners: list[nn.Module]
    whole: bool = True  # has the parameter memory of its own?

    def release(self) -> None:
        """Let go of the parameter's own memory: its tiles have been taken into pages."""
        first = self.tiles[0].values
        self._set(_absent(torch.empty(0, dtype=first.dtype, device=first.device), self.parameter.shape), None)
        self.whole = False

    def restore(self) -> None:
        """Tiles have been given back: the parameter has memory of its own again, and their gradients."""
        if self.whole:
            return
        first = self.tiles[0].values
        values = torch.empty(self.parameter.shape, dtype=first.dtype, device=first.device)
        gradient = None
        if any(tile.values.grad is not None for tile in self.tiles):
            gradient = torch.zeros_like(values)
        for tile in self.tiles:
            rows = slice(tile.start, tile.stop)
            values[rows].copy_(tile.values.data)
            tile.values.data = values[rows]  # so that no more than one of them is there twice
            if gradient is not None and tile.values.grad is not None:
                gradient[rows].copy_(tile.values.grad)
                tile.values.grad = None
        self._set(values, gradient)
        self.whole = True

    def _set(self, values: torch.Tensor, gradient: torch.Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
            self.parameter.data = values
            self.parameter.grad = gradient


@dataclass
class Tiling:
    """The parameters of one model that are in tiles, by their ids."""

    tiled: dict[int, Tiled] = field(default_factory=dict)

    @property
    def units(self) -> dict[str, nn.Module]:
        """The tiles, by name, each of which is a unit."""
        return {tile.name: tile for tiled in self.tiled.values() for tile in tiled.tiles}

    def owners_of(self, tile: nn.Module) -> list[nn.Module]:
        """The modules that a tile is computed in; none for any other module."""
        return next((tiled.owners for tiled in self.tiled.values() if tile in tiled.tiles), [])


NOTHING = Tiling()
"""No parameter is in tiles."""


def tile(net: nn.Module, limit: int, dtype: torch.dtype | None) -> Tiling:
    """Cut what takes more than ``limit`` bytes, and can be cut, into tiles that take about that, or little more.

    ``dtype``: what floating-point parameters compute in (None: their own). Each tile but the last has the same number
    of rows, a multiple of what keeps the bits of products.
    """
    tiling = Tiling()
    for name, parameter, owners in _candidates(net):
        of = dtype or parameter.dtype
        rows, width = parameter.shape
        step = rows_of(of)
        each = max(1, limit // (step * width * of.itemsize)) * step
        # What would be left over for a last tile of less than a step joins the one before: kernels for few rows differ.
        count = max(1, rows // each + (rows % each >= step))
        if rows * width * of.itemsize <= limit or count == 1:
            continue
        edges = [*range(0, count * each, each), rows]
        tiles = [Tile(name, parameter, low, high) for low, high in pairwise(edges)]
        tiling.tiled[id(parameter)] = Tiled(name, parameter, tiles, owners)
    return tiling


def _candidates(net: nn.Module) -> Iterator[tuple[str, nn.Parameter, list[nn.Module]]]:
    """The parameters that are the weights of Linear and Embedding modules, and of nothing else."""
    names: dict[int, str] = {}
    owners: dict[int, list[nn.Module]] = {}
    unfit: set[int] = set()
    weights: dict[int, nn.Parameter] = {}
    for path, module in net.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            names.setdefault(id(parameter), f"{path}.{key}" if path else key)
            owners.setdefault(id(parameter), []).append(module)
            weights[id(parameter)] = parameter
            if key != "weight" or not _can_be_tiled(module, parameter):
                unfit.add(id(parameter))
    for identity, parameter in weights.items():
        if identity not in unfit:
            yield names[identity], parameter, owners[identity]


def _can_be_tiled(module: nn.Module, parameter: nn.Parameter) -> bool:
    plain = isinstance(module, nn.Linear) or (isinstance(module, nn.Embedding) and module.max_norm is None)
    return (
        plain
        and type(parameter) in (nn.Parameter, DeferredParameter)
        and parameter.ndim == 2
        and is_compute(parameter.dtype)
        and not parameter.is_inference()
        and parameter.is_contiguous()
    )


def _absent(like: torch.Tensor, size: torch.Size | None = None) -> torch.Tensor:
    """The shape without the bytes: one element, not a number, behind every index."""
    return torch.full((), float("nan"), dtype=like.dtype, device=like.device).expand(size or like.shape)
