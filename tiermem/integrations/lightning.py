"""PagedStrategy: the Trainer of PyTorch Lightning over a paged module."""

from __future__ import annotations

from typing import Any

import torch

from tiermem.errors import PagingError
from tiermem.module import Source, TieredModule

try:
    from pytorch_lightning.strategies import SingleDeviceStrategy
except ImportError as error:
    raise ImportError("PagedStrategy needs pytorch-lightning: pip install 'tiermem[lightning]'") from error


class PagedStrategy(SingleDeviceStrategy):
    """A strategy that pages the LightningModule by ``policy`` from the trainer's set-up to its end.

    ``Trainer(strategy=PagedStrategy("policy.toml"))``; the module's ``configure_optimizers`` returns an optimizer of
    tiermem's. ``device`` is where batches go. After ``fit`` the module is an ordinary one again, with what it learned;
    its optimizer's state went with the pages, so save checkpoints during training (``ModelCheckpoint``).
    """

    strategy_name = "tiermem"

    def __init__(self, policy: Source = None, device: str | torch.device = "cpu", **kwargs: Any) -> None:
        super().__init__(device=device, **kwargs)
        self._policy = policy
        self._paged: TieredModule | None = None

    def model_to_device(self) -> None:
        """Take the module over, which moves it where the policy says."""
        assert self.model is not None
        self._paged = TieredModule(self.model, self._policy)
        if self._paged.device.type != self.root_device.type:
            found = self._paged.device
            self._close()
            raise PagingError(
                f"the policy computes on {found}, and the strategy puts batches on {self.root_device}: "
                f'use PagedStrategy(policy, device="{found}"), or set [device] kind'
            )

    def setup_precision_plugin(self) -> None:
        """As usual; clipping leaves the gradients where they are."""
        super().setup_precision_plugin()
        plugin: Any = self.precision_plugin
        plugin.clip_grad_by_norm = self._clip_by_norm
        plugin.clip_grad_by_value = self._clip_by_value

    def teardown(self) -> None:
        """Give the module back; also after an error."""
        self._close()
        plugin: Any = self.precision_plugin
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            vars(plugin).pop(name, None)
        super().teardown()

    def _close(self) -> None:
        if self._paged is not None:
            self._paged.close()
            self._paged = None

    def _clip_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        assert self._paged is not None
        self._paged.clip_grad_norm_(clip_val)

    def _clip_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.clamp_(-clip_val, clip_val)  # one at a time: all of them may not fit
