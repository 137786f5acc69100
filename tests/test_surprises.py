"""Steps that are not like the last: experts, dropped layers, branches, evaluation in between. Numbers don't change, and
what wasn't surprising is still fetched ahead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Wrap
from tests.parity import adamw, state_nbytes
from tiermem.trace import Event, Phase, Reason
from tiermem.trace.reader import TraceFile

WIDTH = 64
STEPS = 16


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Mixture(nn.Module):
    """8 experts, the best two for each row; noise on the router changes them in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 8)
        self.experts = nn.ModuleList(Expert() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        weights, chosen = (scores + 10 * torch.randn_like(scores)).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, which = torch.where(chosen == number)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights.softmax(-1)[rows, which, None])
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
        self.mixture = Mixture()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dense(x)
        return x + self.mixture(x)


class Experts(nn.Module):
    units = ("first", "layers.*.dense", "layers.*.mixture.experts.*", "last")

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Dropping(nn.Module):
    """LayerDrop: each layer is left out one time in four."""

    units = ("layers.*",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Expert() for _ in range(10))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or torch.rand(()) < 0.75:
                x = x + layer(x)
        return x


class Branching(nn.Module):
    """Which half runs depends on the data."""

    units = ("left.*", "right.*", "last")

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(Expert() for _ in range(3))
        self.right = nn.ModuleList(Expert() for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.left if x.sum() > 0 else self.right:
            x = x + layer(x)
        return self.last(x)


def plain_step(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def train(
    model: nn.Module, between: Callable[[nn.Module, int], object] = lambda model, number: None
) -> list[Any]:
    optimizer = adamw(model)
    torch.manual_seed(7)
    seen: list[Any] = []
    for number in range(STEPS):
        loss = plain_step(model, torch.randn(2 + number % 3, WIDTH))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach().clone())
        seen.append(between(model, number))
    return seen


def evaluate(model: nn.Module, number: int) -> Tensor | None:
    if number % 3:
        return None
    model.eval()
    with torch.no_grad():
        found = model(torch.randn(5, WIDTH))
    model.train()
    return found  # type: ignore[no-any-return]


def generate(model: nn.Module, number: int) -> Tensor | None:
    if number % 4 != 2:
        return None
    with torch.inference_mode():
        x = torch.ones(1, WIDTH)
        for _ in range(4):
            x = model(x).tanh()
    return x.clone()


CASES = {
    "experts": (Experts, None),
    "dropped layers": (Dropping, None),
    "a branch": (Branching, None),
    "evaluation": (Dropping, evaluate),
    "generation": (Experts, generate),
}


@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
@pytest.mark.parametrize("share", ["smallest", 0.5])
@pytest.mark.parametrize("name", list(CASES))
def test_surprises_change_no_number(name: str, share: Any, three: bool, wrap: Wrap) -> None:
    build, between = CASES[name]
    between = between or (lambda model, number: None)
    torch.manual_seed(0)
    net = build()
    torch.manual_seed(0)
    model = wrap(build(), host=share, device=share, three=three, policy={"units": list(build.units)})
    expected, found = train(net, between), train(model, between)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)
    for key, value in model.state_dict().items():
        assert torch.equal(value, net.state_dict()[key]), key
    model._runtime.check()


def test_what_is_no_expert_is_always_on_its_way(wrap: Wrap, disk: Path) -> None:
    torch.manual_seed(0)
    net = Experts()
    file = disk / "run.trace"
    host = int(0.6 * state_nbytes(net))
    model = wrap(net, host=host, trace={"file": str(file)}, policy={"units": list(Experts.units)})
    train(model)
    stats = model.stats()
    model.close(restore=False)
    trace = TraceFile(file)
    dense = {
        number
        for number, page in trace.pages.items()
        if "experts" not in page.names[0] and page.kind == "parameter"
    }
    needed = asked = 0
    for record in trace.records:
        # The first two steps differ, since state comes into being: what is done from then on is planned.
        if record["step"] < 2 or record["page"] not in dense or record["phase"] == Phase.OPTIMIZER:
            continue
        needed += record["event"] in (Event.HIT, Event.FAULT)
        asked += record["event"] == Event.FAULT and record["reason"] != Reason.PREFETCHED_LATE
    assert needed > 10 * (STEPS - 2)
    assert not asked, f"{asked} of {needed} had not been fetched"
    assert stats["departures"] > STEPS  # the experts did surprise


def test_a_unit_that_is_no_longer_used_leaves_the_schedule(wrap: Wrap) -> None:
    torch.manual_seed(0)
    net = Dropping()
    model = wrap(net, host=0.5, policy={"units": ["layers.*"]})
    runtime = model._runtime
    optimizer = adamw(model)

    def step() -> int:
        before = runtime.steps.departures
        plain_step(model, torch.ones(2, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return runtime.steps.departures - before

    model.eval()  # all layers
    for _ in range(4):
        step()
    assert step() == 0
    last = net.layers[9]
    net.layers[9] = nn.Identity()
    assert step() > 0
    step()
    assert step() == 0
    net.layers[9] = last
    # The longer step is known: it departs once, where it is recognised, and never again.
    before = model.stats()["recognised"]
    assert step() == 1
    assert model.stats()["recognised"] == before + 1
    assert step() == 0
