"""Runs of one model, wrapped and not, that are compared bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from tests.models import BY_NAME, Case
from tiermem.device import StandInDevice
from tiermem.trainer import AdamW


def wrap_in(
    net: nn.Module, disk: Path, host: Any, device: Any = "1GiB", three: bool = False, **sections: Any
) -> tiermem.TieredModule:
    """See the fixture ``wrap``; the caller closes."""
    config: dict[str, Any] = {"disk": {"paths": [str(disk)]}, "host": {"budget": host}}
    config.update({name: {**config.get(name, {}), **keys} for name, keys in sections.items()})
    itemsize = {"bfloat16": 2, "float16": 2}.get(config.get("precision", {}).get("parameters", ""))
    if three:
        config["device"] = {"budget": "1GiB"}
    if isinstance(host, float) or host == "smallest":
        smallest = refused(net, config, "host", three)
        if host != "smallest":
            smallest = max(smallest, int(host * state_nbytes(net, itemsize)))
        config["host"]["budget"] = smallest
    if three:
        config["device"]["budget"] = device
        if isinstance(device, float) or device == "smallest":
            smallest = refused(net, config, "device", three)
            if device != "smallest":
                smallest = max(smallest, int(device * sum(p.nbytes for p in net.parameters())))
            config["device"]["budget"] = smallest
    return tiermem.TieredModule(net, config, device=StandInDevice() if three else None)


def refused(net: nn.Module, config: dict[str, Any], tier: str, three: bool) -> int:
    """The smallest budget that the refusal of a tiny one names."""
    tiny = {**config, tier: {**config[tier], "budget": 4096}}
    with pytest.raises(tiermem.BudgetError) as caught:
        tiermem.TieredModule(net, tiny, device=StandInDevice() if three else None)
    assert caught.value.tier == tier
    assert caught.value.smallest is not None
    return caught.value.smallest


def state_nbytes(net: nn.Module, itemsize: int | None = None) -> int:
    """Bytes of parameters, gradients, masters and moments."""
    total = 0
    for p in net.parameters():
        size = itemsize or p.element_size()
        total += p.numel() * (size + (0 if not p.requires_grad else size + 8 + (4 if size < 4 else 0)))
    return total


def snapshot(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, torch.Tensor]]:
    """The optimizer's state by the parameter's number."""
    return {
        number: {name: torch.as_tensor(value).clone() for name, value in values.items()}
        for number, values in optimizer.state_dict()["state"].items()
    }


def adamw(model: nn.Module, **settings: Any) -> AdamW:
    """Settings under which every term of the formula counts."""
    return AdamW(model.parameters(), **{"lr": 3e-3, "weight_decay": 0.1, **settings})


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """torch.equal, dtypes and shapes included."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def assert_same(name: str, expected: dict[Any, Any], found: dict[Any, Any]) -> None:
    """Two nests of tensors are equal bit for bit."""
    assert set(expected) == set(found), name
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_same(f"{name} {key}", value, found[key])
        else:
            assert same(value, found[key]), (
                f"{name} {key}: {value.dtype}{list(value.shape)} vs {found[key].dtype}{list(found[key].shape)}, "
                f"differs by {(value.double() - found[key].double()).abs().max().item():.3g}"
            )


@dataclass
class Outcome:
    """What a training run leaves behind, all of it copies."""

    losses: list[torch.Tensor]
    norms: list[torch.Tensor]
    state: dict[str, torch.Tensor]  # parameters and buffers
    optimizer: dict[int, dict[str, torch.Tensor]]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    case: Case,
    *,
    steps: int = 5,
    accumulation: int = 2,
    clip: float | None = 0.5,
    seed: int = 1,
    after: Callable[[int], None] | None = None,
) -> Outcome:
    """Train, checking the invariants of a wrapped model after every forward, backward and step."""
    paged = isinstance(model, tiermem.TieredModule)
    check = model._runtime.check if paged else lambda: None
    torch.manual_seed(seed)
    losses, norms = [], []
    for step in range(steps):
        for _ in range(accumulation):
            loss = case.loss(model, case.batch()) / accumulation
            check()
            loss.backward()
            check()
            losses.append(loss.detach().clone())
            del loss
        if clip is not None and paged:
            norms.append(model.clip_grad_norm_(clip).clone())
        elif clip is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).clone())
        optimizer.step()
        check()
        optimizer.zero_grad()
        check()
        if after is not None:
            after(step)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    check()
    return Outcome(losses, norms, state, snapshot(optimizer))


def build(case: Case, dtype: torch.dtype | None = torch.float32, seed: int = 0) -> nn.Module:
    """The case's model, the same at each call."""
    torch.manual_seed(seed)
    net = case.build()
    return net if dtype is None else net.to(dtype)


@functools.cache
def reference(name: str, dtype: torch.dtype = torch.float32, clip: float | None = 0.5) -> Outcome:
    """The run that is not wrapped."""
    case = BY_NAME[name]
    net = build(case, dtype)
    return train(net, adamw(net), case, clip=clip)


def assert_equal(expected: Outcome, found: Outcome) -> None:
    """Losses, norms, parameters, buffers, moments and masters are equal bit for bit."""
    for what in ("losses", "norms"):
        pairs = zip(getattr(expected, what), getattr(found, what), strict=True)
        for index, (a, b) in enumerate(pairs):
            assert same(a, b), f"{what}[{index}]: {a.item()!r} {b.item()!r} ({a.dtype}, {b.dtype})"
    assert_same("state", expected.state, found.state)
    assert_same("optimizer", expected.optimizer, found.optimizer)
