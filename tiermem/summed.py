"""Summed gradients: what ``.grad`` is where the sum over the ranks is in slices.

It is a whole tensor of its own. What is written to it (scaling, clipping, by pipelines and loops that know nothing of
slices) goes to this rank's slice as well, so that it counts. All ranks have the same whole, and have to write the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only


class SummedGradient(torch.Tensor):
    """``whole`` has the numbers; ``write`` takes what they have become."""

    whole: torch.Tensor
    write: Callable[[torch.Tensor], None]

    @staticmethod
    def of(whole: torch.Tensor, write: Callable[[torch.Tensor], None]) -> SummedGradient:
        """``whole`` itself, as a gradient whose changes ``write`` is told of."""
        gradient = whole.as_subclass(SummedGradient)
        gradient.whole, gradient.write = whole, write
        return gradient

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        mine = [each for each in tree_leaves((args, kwargs)) if isinstance(each, SummedGradient)]
        with torch._C.DisableTorchFunctionSubclass():
            before = [each._version for each in mine]
            result = func(*args, **kwargs)
            changed = {
                id(each.whole): each
                for each, version in zip(mine, before, strict=True)
                if each._version != version
            }
            for each in changed.values():
                each.write(each.whole)
            if isinstance(result, SummedGradient):
                return result  # the operation was in place
            sources = {each.untyped_storage().data_ptr(): each for each in mine}
            return tree_map_only(torch.Tensor, lambda each: _view(each, sources), result)


def _view(result: torch.Tensor, sources: dict[int, SummedGradient]) -> torch.Tensor:
    """A result that looks into a gradient is one too."""
    source = sources.get(result.untyped_storage().data_ptr()) if result.layout is torch.strided else None
    if source is None or isinstance(result, SummedGradient):
        return result
    view = result.as_subclass(SummedGradient)
    view.whole, view.write = source.whole, source.write
    return view
