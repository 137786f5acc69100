"""PagedAccelerator: accelerate's loop over paged models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tiermem.module import Source, TieredModule

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError("PagedAccelerator needs accelerate: pip install 'tiermem[hf]'") from error


class PagedAccelerator(Accelerator):
    """An ``accelerate.Accelerator`` whose ``prepare`` wraps models in :class:`tiermem.TieredModule`.

    ``policy`` is what a TieredModule takes; everything else is Accelerator's. Optimizers must be tiermem's
    (``tiermem.trainer.AdamW``), made before or after ``prepare``. ``clip_grad_norm_`` brings no gradient back.
    The models that it wrapped are closed by :meth:`free_memory` and :meth:`end_training`; after that they are ordinary
    ones with what they learned.
    """

    def __init__(self, *args: Any, policy: Source = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._policy = policy
        self._paged: list[TieredModule] = []

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Wrap a model; one that is a TieredModule already stays its owner's."""
        if not isinstance(model, TieredModule):
            model = TieredModule(model, self._policy)
            self._paged.append(model)
        return super().prepare_model(model, device_placement=False, evaluation_mode=evaluation_mode)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        """As Accelerator's; the gradients of a prepared model, all together, stay where they are."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        wanted = {id(parameter) for parameter in parameters}
        for model in self._models:
            if isinstance(model, TieredModule) and wanted >= {
                id(parameter) for parameter in model.parameters() if parameter.requires_grad
            }:
                self.unscale_gradients()
                return model.clip_grad_norm_(max_norm, norm_type)
        clipped: torch.Tensor | None = super().clip_grad_norm_(parameters, max_norm, norm_type)
        return clipped

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The module that was prepared."""
        return super().unwrap_model(
            model.module if isinstance(model, TieredModule) else model, *args, **kwargs
        )

    def free_memory(self, *objects: Any) -> Any:
        """As Accelerator's, and the models that it wrapped are closed."""
        self._close()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """As Accelerator's, and the models that it wrapped are closed."""
        self._close()
        super().end_training()

    def _close(self) -> None:
        while self._paged:
            self._paged[-1].close()
            self._paged.pop()
