"""Optimizers of other classes, as tests run them over pages: torch's, and some that a user might have written."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import Optimizer


class Lion(Optimizer):
    """Elementwise, and its state is set, not changed in place."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1  # once a step, however many parameters there are
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state.setdefault("flag", True)
                momentum = state.get("momentum", torch.zeros_like(p))
                p.sub_((momentum * group["beta"] + p.grad).sign() * group["lr"] * group["count"] ** 0.5)
                state["momentum"] = momentum * group["beta"] + p.grad * (1 - group["beta"])


class TrustRatio(Optimizer):
    """Mixes the elements of a tensor, as LARS and LAMB do, and keeps a number of its own."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    ratio = p.norm() / (p.grad.norm() + 1e-3)
                    self.state[p]["ratio"] = ratio
                    p.sub_(p.grad * ratio * group["lr"])


class Global(Optimizer):
    """Mixes parameters: clips by the norm of all that it is given."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in given]).norm()
        for p in given:
            p.sub_(p.grad / norm * self.param_groups[0]["lr"])


ELEMENTWISE: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.01}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 3e-3}),
    "AdamW": (torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.1}),
    "AdamW, fused": (torch.optim.AdamW, {"lr": 3e-3, "fused": True}),
    "Adam, amsgrad": (torch.optim.Adam, {"lr": 3e-3, "amsgrad": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "NAdam": (torch.optim.NAdam, {"lr": 3e-3}),
    "RAdam": (torch.optim.RAdam, {"lr": 3e-3}),
    "Adamax": (torch.optim.Adamax, {"lr": 3e-3}),
    "ASGD": (torch.optim.ASGD, {"lr": 1e-2}),
    "Rprop": (torch.optim.Rprop, {"lr": 1e-3}),
    "Lion": (Lion, {"lr": 1e-3}),
}
MIXING: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
    "TrustRatio": (TrustRatio, {}),
}
