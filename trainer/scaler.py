"""Loss scaling for float16: torch's GradScaler over pages, with one verdict for all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from tiermem.errors import PagingError
from tiermem.parameter import owner_of
from tiermem.trainer.adam import Adam
from tiermem.trainer.base import PagingOptimizer


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for optimizers whose parameters are paged; arguments and use are the same.

    Gradients are looked at and unscaled one page at a time. Where several ranks share a model, an overflow on one is
    one on all: they skip the same steps, and their scales stay equal. All must call ``unscale_`` or ``step``.

    Gradients of float16 parameters, which torch's refuses, stay scaled in their pages, since the smallest would be lost
    there; tiermem's Adam and AdamW divide them in float32 when they read them, and so does ``model.clip_grad_norm_``
    for the norm. Others are unscaled in place, with the bits of torch's.
    """

    def __init__(self, device: str = "cpu", **settings: Any) -> None:
        super().__init__(device, **settings)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As torch's: unscale, if that hasn't been done, and then step, unless a gradient isn't finite."""
        if not isinstance(optimizer, PagingOptimizer):
            return super().step(optimizer, *args, **kwargs)
        with optimizer.unscaled_by_pages():
            return super().step(optimizer, *args, **kwargs)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        if not isinstance(optimizer, PagingOptimizer):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if getattr(optimizer, "during_backward", False):
            raise PagingError(
                "loss scaling needs all gradients before the first update, and this optimizer updates units during "
                "backward: make it with during_backward=False"
            )
        plain = [p for group in optimizer.param_groups for p in group["params"] if owner_of(p) is None]
        shim: Any = SimpleNamespace(param_groups=[{"params": plain}])
        found = super()._unscale_grads_(shim, inv_scale, found_inf, allow_fp16)
        here = torch.zeros((), dtype=torch.float32)
        inverse = inv_scale.to("cpu")
        masters = isinstance(optimizer, Adam)
        for hooks, parameters in optimizer.parameters_of():
            hooks.release_resident()
            hooks.reduction.unscale(parameters, inverse, here, masters)
        found_inf.add_(here.to(found_inf.device))
        return {**found, found_inf.device: found_inf}  # what super() found on that device is in it
