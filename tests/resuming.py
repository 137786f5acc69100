"""A training loop with all that a resume has to bring back, on a wrapped model and on one that isn't."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import tiermem
from tests.models import Case
from tests.parity import Outcome, build, snapshot
from tiermem.device import StandInDevice
from tiermem.trainer import AdamW, paged

STEPS = 6


class Data:
    """Batches of one case, drawn from a generator of its own: the position is its state. Ranks have others."""

    def __init__(self, case: Case, rank: int = 0) -> None:
        self.case = case
        self.rank = rank
        self.position = 0

    def draw(self) -> Any:
        """The next batch; the global generators stay as they are."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 + 500 * self.rank + self.position)
            self.position += 1
            return self.case.batch()

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Loop:
    """Model, optimizer of two groups, scheduler, data; ``model`` is wrapped when there is a ``folder``.

    ``kind``: an optimizer's class and settings; without, AdamW.
    """

    def __init__(
        self,
        case: Case,
        folder: Path | None = None,
        *,
        resume: Any = None,
        host: Any = "64MiB",
        three: bool = False,
        dtype: torch.dtype = torch.float32,
        mode: str = "step",
        register: bool = True,
        rank: int = 0,
        kind: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        **sections: Any,
    ) -> None:
        self.net = build(case, dtype)
        self.model: Any = self.net
        self.case = case
        self.losses: list[torch.Tensor] = []
        self.noise: list[float] = []
        seed(3 if resume is None else 99)  # a resume doesn't count on the same seed
        if folder is not None:
            config: dict[str, Any] = {
                "host": {"budget": host},
                "disk": {"paths": [str(folder)]},
                "durability": {"mode": mode},
            }
            config.update({name: {**config.get(name, {}), **keys} for name, keys in sections.items()})
            if three:
                config["device"] = {"budget": "64MiB"}
            self.model = tiermem.TieredModule(
                self.net, config, device=StandInDevice() if three else None, resume=resume
            )
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        groups = [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2], "lr": 1e-3}]
        self.optimizer: Any
        if kind is None:
            self.optimizer = AdamW(groups, lr=3e-3)
        elif self.model is self.net:
            self.optimizer = kind[0](groups, **kind[1])
        else:
            self.optimizer = paged(kind[0], groups, **kind[1])
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 2 * STEPS)
        self.data = Data(case, rank)
        if folder is not None and register:
            self.model.register("scheduler", self.scheduler)
            self.model.register("data", self.data)

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return self.model.num_steps if self.model is not self.net else len(self.losses)

    def one(self) -> None:
        """One step, that draws from every generator."""
        loss = self.case.loss(self.model, self.data.draw())
        self.noise = [random.random(), float(np.random.rand()), torch.rand(()).item()]
        (loss * (1 + sum(self.noise))).backward()
        if self.model is self.net:
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        else:
            self.model.clip_grad_norm_(0.5)
        self.losses.append(loss.detach().clone())
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        if self.model is not self.net:
            self.model._runtime.check()

    def train(self, until: int = STEPS, after: Callable[[int], None] | None = None) -> Loop:
        """Go on until so many steps are made."""
        while self.step < until:
            self.one()
            if after is not None:
                after(self.step)
        return self

    def outcome(self) -> Outcome:
        """Copies of all that there is."""
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        found = Outcome(self.losses, [torch.tensor(self.noise)], state, snapshot(self.optimizer))
        lrs = [group["lr"] for group in self.optimizer.param_groups]
        found.state["lrs"] = torch.tensor(lrs, dtype=torch.float64)
        found.state["next"] = torch.tensor([random.random(), float(np.random.rand()), torch.rand(()).item()])
        return found

    def close(self) -> Outcome:
        """The outcome; a wrapped model is closed."""
        found = self.outcome()
        if self.model is not self.net:
            self.model.close()
        return found


def seed(number: int) -> None:
    """Every generator."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def from_step(whole: Outcome, step: int) -> Outcome:
    """What a run has to show that went on after ``step`` steps of another; none of its own has no noise."""
    norms = whole.norms if step < len(whole.losses) else [torch.tensor([])]
    return Outcome(whole.losses[step:], norms, whole.state, whole.optimizer)
