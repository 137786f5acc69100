"""PagedTrainer: the Trainer of transformers over a paged model."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

import torch
from torch import nn

from tiermem.errors import ConfigError
from tiermem.module import Source, TieredModule
from tiermem.trainer.adam import Adam, AdamW

try:
    from transformers import Trainer
except ImportError as error:
    raise ImportError("PagedTrainer needs transformers: pip install 'tiermem[hf]'") from error


class PagedTrainer(Trainer):
    """A ``transformers.Trainer`` that pages its model by ``policy``, which is what a TieredModule takes.

    ``trainer.model`` stays the model that was given, so saving, loading and pushing are Trainer's own. It is taken over
    at the first ``train()`` or ``evaluate()``, and until then not moved anywhere; :meth:`close` (or ``with``) gives it
    back. The optimizer is :class:`tiermem.trainer.AdamW` for every ``optim`` that is an AdamW.

    Raises ConfigError for another optimizer, and where the policy computes on another device than the arguments name.
    """

    def __init__(self, *args: Any, policy: Source = None, **kwargs: Any) -> None:
        self._policy = policy
        self._paged: TieredModule | None = None
        super().__init__(*args, **kwargs)

    def close(self) -> None:
        """Stop paging: the model is an ordinary one again, with what it learned. Idempotent."""
        if self._paged is not None:
            self._paged.close()
            self.model_wrapped = self.model
            self._paged = None

    def __enter__(self) -> PagedTrainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: nn.Module | None = None) -> tuple[Any, dict[str, Any]]:
        """AdamW with the arguments' settings."""
        asked = str(getattr(args.optim, "value", args.optim))
        if not asked.startswith("adamw_torch"):
            raise ConfigError(
                f"optim = {asked} can't update a paged model: leave it out (AdamW), or give the Trainer an "
                "optimizer of tiermem's (optimizers=(AdamW(model.parameters()), None))"
            )
        settings = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2)}
        return AdamW, {**settings, "eps": args.adam_epsilon}

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """What ``bf16=True`` and the like ask for; Trainer leaves it to a preparation that a paged model hasn't."""
        return self.accelerator.autocast() if self._paged is not None else contextlib.nullcontext()

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Not as a whole: it may not fit there."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        net = model.module if isinstance(model, TieredModule) else model
        if self._paged is not None and self._paged.module is not net:
            self.close()  # model_init has made another one
        if self._paged is None:
            if training and not isinstance(self.optimizer, Adam):
                raise ConfigError(
                    f"a {type(self.optimizer).__name__} can't update a paged model: use tiermem.trainer.AdamW"
                )
            self._paged = TieredModule(net, self._policy)
            device = self._paged.device
            if device.type != self.args.device.type:
                self.close()
                raise ConfigError(
                    f"the policy computes on {device}, and the training arguments put batches on {self.args.device}: "
                    "set [device] kind, or TrainingArguments(use_cpu=True)"
                )
        return self._paged

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        assert isinstance(model, TieredModule)
        return model.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is None and isinstance(model, TieredModule):
            grad_norm = model.clip_grad_norm_(float("inf"))
        return super()._get_grad_norm(model, grad_norm)
