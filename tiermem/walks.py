"""Walks: ``F.linear`` and ``F.embedding`` over the tiles of a parameter, one after another, forward and backward.

Each tile is there while it is computed with, and not longer. Its gradient lands as soon as it is made; autograd, which
would hold those of all tiles until the last came, gets none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from tiermem.hooks import Hooks
from tiermem.products import accumulate
from tiermem.tiling import Tile
from tiermem.unit import Group
from tiermem.views import Saved


class Walked(Protocol):
    """The parameter: its tiles, each with its pages."""

    hooks: Hooks
    tiles: Sequence[Tile]
    groups: Sequence[Group]

    def begin(self, group: Group) -> None:
        """A use of the parameter is about to contribute to a tile's gradient."""

    def land(self, group: Group, gradient: torch.Tensor) -> None:
        """It contributes this."""


class Linear(torch.autograd.Function):
    """``F.linear``, a tile at a time. What it is given of the parameter itself is there to ask for a gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, parameter: torch.Tensor, whole: Walked
    ) -> torch.Tensor:
        """See :meth:`tiermem.whole.Whole.linear`."""
        ctx.whole, ctx.saved = whole, [Saved.of(group, 0) for group in whole.groups]
        ctx.save_for_backward(x)
        result: torch.Tensor | None = None
        for tile in whole.tiles:
            rows = slice(tile.start, tile.stop)
            part = tile(x, None if bias is None else bias[rows])
            if result is None:
                result = part.new_empty((*part.shape[:-1], whole.tiles[-1].stop))
            result[..., rows] = part
        assert result is not None
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """The tiles' gradients land here, and the parameter itself gets none."""
        whole: Walked = ctx.whole
        (x,) = ctx.saved_tensors
        flat, inputs = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        total: torch.Tensor | None = None
        for tile, group, saved in zip(whole.tiles, whole.groups, ctx.saved, strict=True):
            part = flat[:, tile.start : tile.stop]
            if ctx.needs_input_grad[2]:
                whole.begin(group)
            with whole.hooks.backward_of(whole.hooks.units[group.unit]):
                if ctx.needs_input_grad[0]:
                    weight = whole.hooks.views.unpack(saved).to(part.dtype)
                    total = accumulate(total, part, weight)
                    del weight
                if ctx.needs_input_grad[2]:
                    whole.land(group, (part.t() @ inputs).to(group.dtype))
        wanted = None if total is None else total.to(x.dtype).reshape(x.shape)
        of_bias = flat.sum(0) if ctx.needs_input_grad[1] else None
        return wanted, of_bias, None, None


class Embedding(torch.autograd.Function):
    """``F.embedding``, from those tiles that have the rows."""

    @staticmethod
    def forward(
        ctx: Any,
        numbers: torch.Tensor,
        parameter: torch.Tensor,
        whole: Walked,
        padding: int,
        by_frequency: bool,
    ) -> torch.Tensor:
        """See :meth:`tiermem.whole.Whole.embedding`."""
        flat = numbers.reshape(-1)
        starts = torch.tensor([tile.start for tile in whole.tiles[1:]], device=flat.device, dtype=flat.dtype)
        where = torch.bucketize(flat, starts, right=True)
        ctx.whole, ctx.padding, ctx.by_frequency = whole, padding, by_frequency
        ctx.save_for_backward(flat, where)
        result: torch.Tensor | None = None
        for place in torch.unique(where).tolist() or [0]:
            tile, here = whole.tiles[place], where == place
            rows = tile(flat[here] - tile.start)
            if result is None:
                result = rows.new_empty((len(flat), rows.shape[-1]))
            result[here] = rows
        assert result is not None
        return result.reshape(*numbers.shape, result.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Rows that nobody looked up have gradients of zero, which take no memory."""
        whole: Walked = ctx.whole
        flat, where = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        looked_up = set(torch.unique(where).tolist())
        for place, (tile, group) in enumerate(zip(whole.tiles, whole.groups, strict=True)):
            if place not in looked_up:
                whole.hooks.gradients.land_zeros(group, 0)
                continue
            here = where == place
            padding = ctx.padding - tile.start if tile.start <= ctx.padding < tile.stop else -1
            part = torch.ops.aten.embedding_dense_backward(
                rows[here], flat[here] - tile.start, tile.stop - tile.start, padding, ctx.by_frequency
            )
            whole.begin(group)
            whole.land(group, part)
        return None, None, None, None, None
