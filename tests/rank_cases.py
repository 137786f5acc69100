"""What is trained on several ranks, and in one process: the same batches, and the numbers of both to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tiermem
from tests.models import BY_NAME, GPT, Block, Case
from tests.optimizers import ELEMENTWISE, MIXING
from tests.parity import adamw, build, snapshot
from tiermem.device import StandInDevice
from tiermem.trainer import AdamW, GradScaler, paged


class Experts(nn.Module):
    """One of two experts, or none, as the batch's first token says: ranks need not use the same ones."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(67, 48)
        self.experts = nn.ModuleList(Block(48) for _ in range(3))
        self.unused = nn.Linear(48, 48)
        self.last = Block(48)
        self.head = nn.Linear(48, 67)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        first = int(tokens[0, 0]) % 4
        if first < 3:
            x = self.experts[first](x)
        if first == 1:
            x = self.experts[2](x)
        return self.head(self.last(x))


CASES = {
    **BY_NAME,
    "experts": BY_NAME["gpt"]._replace(build=Experts),
    "gpt-saving": BY_NAME["gpt"]._replace(
        build=lambda: GPT(saving=True)
    ),  # without dropout: one seed for all
}


@dataclass(frozen=True)
class Spec:
    """A run: which model, and how. ``micro`` batches a step on each rank; ``host`` in bytes, as ``host.budget``."""

    model: str = "gpt-tied"
    stage: Any = 3
    host: Any = "64MiB"
    steps: int = 4
    micro: int = 1
    no_sync: bool = False
    clip: float | None = None
    dtype: torch.dtype = torch.float32
    three: bool = False
    sgd: bool = False
    scaler: bool = False  # of the loss; in the second step the last rank's gradients overflow
    other: str | None = None  # an optimizer of another class, by its name in tests.optimizers
    eps: float = 1e-8
    config: dict[str, Any] = field(default_factory=dict)
    between: Callable[[int, nn.Module, int], None] | None = None  # rank, model, step: after each step


def batches(case: Case, count: int) -> list[Sequence[Tensor]]:
    """The same at each call."""
    torch.manual_seed(7)
    return [case.batch() for _ in range(count)]


def on_ranks(rank: int, world: int, folder: Path, spec: Spec) -> dict[str, Any]:
    """One rank's part: losses of its batches, parameters, optimizer state, figures."""
    case = CASES[spec.model]
    data = batches(case, spec.steps * spec.micro * world)
    net = build(case, spec.dtype)
    config = {
        "disk": {"paths": [str(folder / f"pages{rank}")]},
        "host": {"budget": spec.host},
        "ranks": {"stage": spec.stage, "timeout": 120},
        **spec.config,
    }
    if spec.three:
        config["device"] = {"budget": spec.host}
    losses = []
    with tiermem.TieredModule(net, config, device=StandInDevice() if spec.three else None) as model:
        optimizer = optimizer_of(model, spec)
        scaler = scaler_of(spec)
        for step in range(spec.steps):
            for micro in range(spec.micro):
                quiet = model.no_sync() if spec.no_sync and micro < spec.micro - 1 else nullcontext()
                with quiet:
                    loss = case.loss(model, data[(step * spec.micro + micro) * world + rank])
                    losses.append(loss.detach().clone())
                    with overflow(model, spec, step, rank == world - 1):
                        scaler.scale(loss).backward()
                model._runtime.check()
            if spec.clip is not None:
                losses.append(model.clip_grad_norm_(spec.clip))
            scaler.step(optimizer)
            scaler.update()
            losses.append(torch.tensor(scaler.get_scale()))
            model._runtime.check()
            optimizer.zero_grad()
            model._runtime.check()
            if spec.between is not None:
                spec.between(rank, model, step)
                model._runtime.check()
        stats = model.stats()
        state = {} if spec.sgd else snapshot(optimizer)
    return {
        "losses": losses,
        "state": {name: value.clone() for name, value in net.state_dict().items()},
        "optimizer": state,
        "stats": stats,
    }


def alone(world: int, spec: Spec) -> dict[str, Any]:
    """The run of one process, not wrapped, whose loss is the mean over the ranks' batches; losses rank by rank."""
    case = CASES[spec.model]
    data = batches(case, spec.steps * spec.micro * world)
    net = build(case, spec.dtype)
    # Plain float16 parameters have no masters that could be divided in float32: those of one wrapped process have.
    model = tiermem.TieredModule(net, {"host": {"budget": "64MiB"}}) if spec.scaler else net
    optimizer, scaler = optimizer_of(model, spec), scaler_of(spec)
    losses: list[list[Tensor]] = [[] for _ in range(world)]
    for step in range(spec.steps):
        for micro in range(spec.micro):
            for rank in range(world):
                loss = case.loss(model, data[(step * spec.micro + micro) * world + rank])
                losses[rank].append(loss.detach().clone())
                with overflow(model, spec, step, rank == world - 1):
                    scaler.scale(loss / world).backward()
        if spec.clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), spec.clip)
            for each in losses:
                each.append(norm)
        scaler.step(optimizer)
        scaler.update()
        for each in losses:
            each.append(torch.tensor(scaler.get_scale()))
        optimizer.zero_grad()
        if spec.between is not None:
            spec.between(-1, net, step)
    state = {} if spec.sgd else snapshot(optimizer)
    if isinstance(model, tiermem.TieredModule):
        model.close()
    return {
        "losses": losses,
        "state": {name: value.clone() for name, value in net.state_dict().items()},
        "optimizer": state,
    }


def scaler_of(spec: Spec) -> GradScaler:
    """One that does nothing, unless the run has one."""
    return GradScaler(init_scale=2.0**10, growth_interval=2, enabled=spec.scaler)


@contextmanager
def overflow(model: nn.Module, spec: Spec, step: int, here: bool) -> Iterator[None]:
    """In the second step of a run with a scaler, one gradient of a backward isn't finite where it is ``here``."""
    if not (spec.scaler and step == 1 and here):
        yield
        return
    weight = dict(model.named_parameters())["h.1.mlp.0.weight"]
    handle = weight.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
    yield
    handle.remove()


def optimizer_of(model: nn.Module, spec: Spec) -> torch.optim.Optimizer:
    """Settings under which every term of the formula counts."""
    if spec.sgd:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if spec.other is not None:
        kind, settings = {**ELEMENTWISE, **MIXING}[spec.other]
        make = partial(paged, kind) if isinstance(model, tiermem.TieredModule) else kind
        return make(model.parameters(), **settings)
    optimizer: AdamW = adamw(model, eps=spec.eps)
    return optimizer


def every(rank: int, world: int, folder: Path, specs: dict[str, Spec]) -> dict[str, Any]:
    """All specs in turn, each in a folder of its own."""
    return {name: on_ranks(rank, world, folder / name, spec) for name, spec in specs.items()}


def halve(rank: int, model: nn.Module, step: int) -> None:
    """A change of the loop's own, on all ranks."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5 + parameter.norm().clamp(max=0.25))


def look_on_one(rank: int, model: nn.Module, step: int) -> None:
    """One rank reads parameters, and evaluates, while the others go on."""
    if rank <= 0:
        model.eval()
        with torch.no_grad():
            for _ in range(2):
                CASES["gpt"].loss(model, batches(CASES["gpt"], 1)[0])
        model.train()
        assert all(torch.isfinite(value).all() for value in model.state_dict().values())
