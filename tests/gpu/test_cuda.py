"""A model paged on CUDA trains as the same model that is wholly there: losses, parameters, moments, bit for bit.

For who has an NVIDIA GPU: the machines that run the other tests have none, and these are skipped there. Updates are
made on the CPU in both runs, since that is where tiermem makes them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from tests.parity import assert_same, refused, snapshot
from tiermem.trainer import AdamW, paged
from tiermem.trainer.gpt import GPT, GPTShape

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SHAPE = GPTShape(sequence=64, layers=4, width=128, heads=4)
STEPS = 5


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # cuBLAS takes this from the environment when it makes its first workspace.
    monkeypatch.setitem(os.environ, "CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def build(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return GPT(SHAPE).to(dtype)


def batches() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randint(0, SHAPE.vocabulary, (2, SHAPE.sequence + 1)).cuda() for _ in range(STEPS)]


def unpaged(dtype: torch.dtype, kind: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """On the GPU, with parameters of the same values on the CPU for the optimizer."""
    net = build(dtype)
    mirrors = [nn.Parameter(p.detach().clone()) for p in net.parameters()]
    net.cuda()
    optimizer = kind(mirrors, **settings)
    losses = []
    for batch in batches():
        loss = net(batch[:, :-1], batch[:, 1:])
        loss.backward()
        losses.append(loss.detach().cpu())
        with torch.no_grad():
            for mirror, p in zip(mirrors, net.parameters(), strict=True):
                assert p.grad is not None
                mirror.grad = p.grad.cpu()
            optimizer.step()
            for mirror, p in zip(mirrors, net.parameters(), strict=True):
                p.copy_(mirror)
        net.zero_grad()
    state = {name: value.cpu() for name, value in net.state_dict().items()}
    return {"losses": dict(enumerate(losses)), "state": state, "optimizer": snapshot(optimizer)}


def smallest(dtype: torch.dtype, disk: Path) -> dict[str, Any]:
    """A policy whose budgets of host and device are the smallest ones: all three tiers are in use."""
    config: dict[str, Any] = {
        "device": {"kind": "cuda", "budget": "1GiB"},
        "host": {"budget": "1GiB"},
        "disk": {"paths": [str(disk)]},
    }
    config["host"]["budget"] = refused(build(dtype), config, "host", three=False)
    config["device"]["budget"] = refused(build(dtype), config, "device", three=False)
    return config


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (AdamW, {"lr": 3e-3}),
        (AdamW, {"lr": 3e-3, "during_backward": True}),
        (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    ],
    ids=["adamw", "during-backward", "sgd"],
)
def test_three_tiers_change_no_bit(
    kind: Any, settings: dict[str, Any], dtype: torch.dtype, pinned: bool, disk: Path
) -> None:
    expected = unpaged(dtype, kind, settings)
    config = smallest(dtype, disk)
    config["host"]["pinned"] = pinned
    if kind is torch.optim.SGD:
        config["host"]["budget"] *= 2  # whole tensors at a time
    with tiermem.TieredModule(build(dtype), config) as model:
        optimizer: Any = (kind if kind is AdamW else lambda *a, **s: paged(kind, *a, **s))(
            model.parameters(), **settings
        )
        losses = []
        for batch in batches():
            loss = model(batch[:, :-1], batch[:, 1:])
            loss.backward()
            losses.append(loss.detach().cpu())
            model._runtime.check()
            optimizer.step()
            optimizer.zero_grad()
            model._runtime.check()
        stats = model.stats()
        state = {name: value.cpu() for name, value in model.state_dict().items()}
        moments = snapshot(optimizer)
    assert_same("losses", expected["losses"], dict(enumerate(losses)))
    assert_same("state", expected["state"], state)
    assert_same("optimizer", expected["optimizer"], moments)
    links = stats["links"]
    for link in ("host_to_device", "disk_to_host", "host_to_disk"):
        assert sum(links[link].values()) > 0, f"nothing went {link}"
    for tier in ("device", "host"):
        assert stats["tiers"][tier]["peak"] <= stats["tiers"][tier]["budget"]


def test_the_model_comes_back_on_the_gpu(disk: Path) -> None:
    net = build(torch.float32)
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    with tiermem.TieredModule(net, smallest(torch.float32, disk)) as model, torch.no_grad():
        model(batches()[0][:, :-1])
    assert {p.device.type for p in net.parameters()} == {"cuda"}
    assert_same("state", expected, {name: value.cpu() for name, value in net.state_dict().items()})
