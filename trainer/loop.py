"""The training loop: batches in, one report per step out.

It is the loop that anybody writes in PyTorch, and the same for a paged model and a plain one; what differs is read
from ``model.stats()`` where there is such a thing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.optim.optimizer import Optimizer

from tiermem.errors import TiermemError
from tiermem.module import TieredModule
from tiermem.trainer.adam import AdamW


class DivergedError(TiermemError, ArithmeticError):
    """The loss is no longer a number; ``step`` counts from 1."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(step, loss)
        self.step = step
        self.loss = loss

    def __str__(self) -> str:
        return f"the loss is {self.loss} at step {self.step}: lower the learning rate, or clip gradients"


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step: ``number`` counts from 1, ``loss`` is the mean over its batches in nats per token, before the update.

    ``norm`` is the gradients' before clipping (None without clipping), ``seconds`` the step's wall clock,
    ``stall_seconds`` what of it was spent waiting for pages, ``nbytes_paged`` the bytes moved to and from the disk and
    the device.
    """

    number: int
    loss: float
    lr: float
    norm: float | None
    num_tokens: int
    seconds: float
    stall_seconds: float
    nbytes_paged: int


def train(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterator[tuple[Tensor, Tensor]],
    steps: int,
    *,
    scheduler: LRScheduler | None = None,
    clip: float | None = None,
    accumulate: int = 1,
) -> Iterator[StepReport]:
    """Train for ``steps`` optimizer steps, each over ``accumulate`` batches; yields after each one.

    ``model(tokens, targets)`` must give a mean loss; ``clip`` is the largest norm of all gradients together. Raises
    DivergedError at a loss that is not finite, before that step's update.
    """
    device = next(model.parameters()).device
    stall, nbytes = _paging(model)
    for number in range(1, steps + 1):
        start = time.perf_counter()
        total, num_tokens = 0.0, 0
        for _ in range(accumulate):
            tokens, targets = next(batches)
            loss = model(tokens.to(device), targets.to(device))
            (loss / accumulate).backward()
            total += loss.item()
            num_tokens += targets.numel()
        if not math.isfinite(total):
            raise DivergedError(number, total)
        norm = None
        if clip is not None:
            norm = float(
                model.clip_grad_norm_(clip)
                if isinstance(model, TieredModule)
                else nn.utils.clip_grad_norm_(model.parameters(), clip)
            )
        lr = float(optimizer.param_groups[0]["lr"])
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        seconds = time.perf_counter() - start
        (stall_before, nbytes_before), (stall, nbytes) = (stall, nbytes), _paging(model)
        yield StepReport(
            number,
            total / accumulate,
            lr,
            norm,
            num_tokens,
            seconds,
            stall - stall_before,
            nbytes - nbytes_before,
        )


def adamw(model: nn.Module, lr: float, weight_decay: float = 0.1) -> AdamW:
    """AdamW as GPTs are trained with: weight decay on matrices, none on biases and norms."""
    parameters = list(model.parameters())
    return AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=lr,
        betas=(0.9, 0.95),
    )


def warmup_cosine(
    optimizer: Optimizer, steps: int, warmup: int | None = None, floor: float = 0.1
) -> LRScheduler:
    """The learning rate rises for ``warmup`` steps (a tenth by default), then falls as a cosine to ``floor`` of it."""
    rise = max(1, steps // 10 if warmup is None else warmup)

    def factor(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        done = min(1.0, (step - rise) / max(1, steps - 1 - rise))
        return floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2

    return LambdaLR(optimizer, factor)


def _paging(model: nn.Module) -> tuple[float, int]:
    """Seconds stalled and bytes moved between tiers so far; nothing for a plain module."""
    if not isinstance(model, TieredModule):
        return 0.0, 0
    stats: dict[str, Any] = model.stats()
    return stats["stall_seconds"], sum(sum(kinds.values()) for kinds in stats["links"].values())
