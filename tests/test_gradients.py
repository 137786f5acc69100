"""What users see of gradients, and do to them: reading, writing, forgetting, second backwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiermem
from tests.conftest import Wrap
from tests.models import BY_NAME, GPT
from tests.parity import adamw, assert_same, build, snapshot, train
from tiermem.gradients import Spent
from tiermem.trainer import AdamW, paged

GPT_CASE = BY_NAME["gpt"]


def test_gradients_can_be_read_and_torch_clips_them(wrap: Wrap) -> None:
    plain, model = build(GPT_CASE), wrap(build(GPT_CASE), host="smallest")
    for each in (plain, model):
        torch.manual_seed(3)
        GPT_CASE.loss(each, GPT_CASE.batch()).backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert q.grad is not None
        assert q.grad.shape == p.grad.shape
        assert torch.equal(p.grad, q.grad), name
        assert q.grad.abs().sum().item() == p.grad.abs().sum().item()
    with pytest.raises(tiermem.errors.BudgetError, match="let go"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # it holds them all at one time
    model._runtime.check()
    roomy = wrap(build(GPT_CASE))
    torch.manual_seed(3)
    GPT_CASE.loss(roomy, GPT_CASE.batch()).backward()
    norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (plain, roomy)]
    assert torch.equal(*norms)
    for p, q in zip(plain.parameters(), roomy.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def _edit(model: nn.Module, step: int) -> None:
    """What people do to gradients between backward and step."""
    for index, p in enumerate(model.parameters()):
        if p.grad is None:
            continue
        if index % 5 == 0:
            p.grad = None
        elif index % 5 == 1:
            p.grad.mul_(0.5)
        elif index % 5 == 2:
            p.grad = torch.full_like(p.grad, 0.01 * step) if step % 2 else p.grad * 2
        elif index % 5 == 3:
            p.grad.data.clamp_(-0.01, 0.01)


@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
@pytest.mark.parametrize("clip", [False, True])
def test_gradients_can_be_written(clip: bool, three: bool, wrap: Wrap) -> None:
    ends = []
    for model in (build(GPT_CASE), wrap(build(GPT_CASE), host="smallest", device="smallest", three=three)):
        optimizer = adamw(model)
        torch.manual_seed(0)
        for step in range(4):
            GPT_CASE.loss(model, GPT_CASE.batch()).backward()
            if clip and isinstance(model, tiermem.TieredModule):
                model.clip_grad_norm_(0.1)
            elif clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            _edit(model, step)
            optimizer.step()
            optimizer.zero_grad()
        ends.append((dict(model.state_dict()), snapshot(optimizer)))
    assert_same("state", ends[0][0], ends[1][0])
    assert_same("moments", ends[0][1], ends[1][1])


@pytest.mark.parametrize("how", ["model", "optimizer", "zeros", "optimizer zeros", "none", "never"])
def test_ways_to_forget_gradients(how: str, wrap: Wrap) -> None:
    def forget(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if how == "model":
            model.zero_grad()
        elif how == "optimizer":
            optimizer.zero_grad()
        elif how == "zeros":
            model.zero_grad(set_to_none=False)
        elif how == "optimizer zeros":
            optimizer.zero_grad(set_to_none=False)
        elif how == "none":
            for p in model.parameters():
                p.grad = None

    ends = []
    host = "1GiB" if how == "never" else "smallest"
    for model in (build(GPT_CASE), wrap(build(GPT_CASE), host=host)):
        optimizer = adamw(model)
        torch.manual_seed(0)
        forget(model, optimizer)
        for _ in range(3):
            GPT_CASE.loss(model, GPT_CASE.batch()).backward()
            optimizer.step()
            forget(model, optimizer)
        assert all((p.grad is None) == (how in ("model", "optimizer", "none")) for p in model.parameters())
        ends.append((dict(model.state_dict()), snapshot(optimizer)))
    assert_same("state", ends[0][0], ends[1][0])
    assert_same("moments", ends[0][1], ends[1][1])


def test_steps_in_which_some_or_all_gradients_are_missing(wrap: Wrap) -> None:
    class Partial(GPT):
        used = 3

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.wte(tokens)
            for block in self.h[: self.used]:
                x = block(x)
            return self.head(x)

    torch.manual_seed(0)
    base = Partial()
    ends = []
    for net in (copy.deepcopy(base), copy.deepcopy(base)):
        model = wrap(net, host="smallest") if ends else net
        optimizer = adamw(model)
        torch.manual_seed(0)
        optimizer.step()
        for used in (3, 1, 0, 2, 3):
            net.used = used
            GPT_CASE.loss(model, GPT_CASE.batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.step()
        ends.append((dict(model.state_dict()), snapshot(optimizer)))
    assert_same("state", ends[0][0], ends[1][0])
    assert_same("moments", ends[0][1], ends[1][1])


def test_a_second_backward_through_the_same_graph(wrap: Wrap) -> None:
    ends = []
    for model in (build(GPT_CASE), wrap(build(GPT_CASE), host="smallest")):
        torch.manual_seed(0)
        loss = GPT_CASE.loss(model, GPT_CASE.batch())
        loss.backward(retain_graph=True)
        loss.backward()
        one, two = (GPT_CASE.loss(model, GPT_CASE.batch()) for _ in range(2))
        (one * two).backward()
        three, four = (GPT_CASE.loss(model, GPT_CASE.batch()) for _ in range(2))
        three.backward()
        four.backward()
        ends.append({n: p.grad.clone().as_subclass(Tensor) for n, p in model.named_parameters()})
    assert_same("gradients", *ends)


def test_autograd_grad_and_a_gradient_penalty(wrap: Wrap) -> None:
    case = BY_NAME["odd-mlp"]
    ends = []
    for model in (build(case), wrap(build(case), host="smallest")):
        torch.manual_seed(0)
        x = torch.randn(5, 37, requires_grad=True)
        y = model(x).tanh().sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        (y + slope.pow(2).sum()).backward()
        del y, slope
        single = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        ends.append({n: p.grad.clone().as_subclass(Tensor) for n, p in model.named_parameters()})
        ends[-1].update({str(i): g.clone() for i, g in enumerate(single)})
    assert_same("gradients", *ends)


def test_backward_after_the_weights_changed_is_refused(wrap: Wrap) -> None:
    model = wrap(build(GPT_CASE), host="smallest")
    optimizer = adamw(model)
    loss = GPT_CASE.loss(model, GPT_CASE.batch())
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()
    model.zero_grad()
    model._runtime.check()


def test_requires_grad_can_be_turned_off_and_on(wrap: Wrap) -> None:
    ends = []
    for model in (build(GPT_CASE), wrap(build(GPT_CASE), host="smallest")):
        optimizer = adamw(model)
        torch.manual_seed(0)
        for step in range(4):
            model.h[1].requires_grad_(step % 2 == 0)
            model.wte.weight.requires_grad = step != 1
            GPT_CASE.loss(model, GPT_CASE.batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append((dict(model.state_dict()), snapshot(optimizer)))
    assert_same("state", ends[0][0], ends[1][0])
    assert_same("moments", ends[0][1], ends[1][1])


@pytest.mark.parametrize("of", ["the wrapper", "the module", "its parts"])
def test_a_gradient_that_was_given_up_is_there_and_cannot_be_read(of: str, wrap: Wrap) -> None:
    model = wrap(build(GPT_CASE), host="smallest")
    optimizer = adamw(model)
    GPT_CASE.loss(model, GPT_CASE.batch()).backward()
    optimizer.step()
    given_up = [p for p in model.parameters() if isinstance(p.grad, Spent)]
    assert given_up
    for p in given_up:
        gradient = p.grad
        assert (gradient.shape, gradient.dtype) == (p.shape, p.dtype)
        with pytest.raises(tiermem.PagingError, match=r"given up.*zero_grad"):
            gradient.sum()
        with pytest.raises(tiermem.PagingError, match="given up"):
            torch.stack([gradient, gradient])
    parts = {"the wrapper": [model], "the module": [model.module], "its parts": model.module.children()}
    for each in parts[of]:
        each.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    train(model, optimizer, GPT_CASE, steps=1)


def test_a_sparse_gradient_is_refused_by_name(wrap: Wrap) -> None:
    net = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 2))
    model = wrap(net)
    with pytest.raises(tiermem.errors.PagingError, match=r"0\.weight is sparse"):
        model(torch.tensor([1, 2])).sum().backward()
    model._runtime.check()


def _chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])


def _states(optimizers: list[torch.optim.Optimizer]) -> list[Tensor]:
    return [
        value
        for optimizer in optimizers
        for state in optimizer.state_dict()["state"].values()
        for value in state.values()
    ]


@pytest.mark.parametrize("kind", ["adamw", "momentum"])
@pytest.mark.parametrize("host", ["smallest", 0.5, "1GiB"])
@pytest.mark.parametrize("way", ["kinds", "middle of a unit"])
def test_two_optimizers_may_share_a_unit(way: str, host: Any, kind: str, wrap: Wrap) -> None:
    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        parameters = list(model.named_parameters())
        parts = [parameters[:5], parameters[5:]]
        if way == "kinds":
            parts = [[pair for pair in parameters if end in pair[0]] for end in ("weight", "bias")]
        lists = [[parameter for _, parameter in part] for part in parts]
        if kind == "adamw":
            return [AdamW(each, lr=1e-2) for each in lists]
        if isinstance(model, tiermem.TieredModule):
            return [paged(torch.optim.SGD, each, lr=1e-2, momentum=0.9) for each in lists]
        return [torch.optim.SGD(each, lr=1e-2, momentum=0.9) for each in lists]

    plain, x = _chain(), torch.randn(2, 64)
    host = 2 * 81920 if (host, kind) == ("smallest", "momentum") else host  # paged() steps whole tensors
    model = wrap(_chain(), host=host)
    pairs = [(each, optimizers(each)) for each in (plain, model)]
    for step in range(4):
        for each, both in pairs:
            each(x).square().sum().backward()
            for optimizer in both if step % 2 else reversed(both):
                optimizer.step()
            for optimizer in both:
                optimizer.zero_grad()
        for p, q in zip(plain.state_dict().values(), model.state_dict().values(), strict=True):
            assert torch.equal(p, q)
    for p, q in zip(*(_states(both) for _, both in pairs), strict=True):
        assert torch.equal(p, q)


def test_what_was_frozen_when_it_was_wrapped_stays_so(wrap: Wrap) -> None:
    net = _chain()
    net[1].requires_grad_(False)
    model = wrap(net, host="smallest")
    for thaw in (lambda: net[1].requires_grad_(True), lambda: setattr(net[1].weight, "requires_grad", True)):
        with pytest.raises(tiermem.PagingError, match=r"1\.weight was frozen when its model was wrapped"):
            thaw()
    net[2].requires_grad_(False)
    net[2].requires_grad_(True)
    net[1].requires_grad_(False)
    assert not net[1].weight.requires_grad
    model.close()
    net[1].requires_grad_(True)


class Odd(nn.Module):
    """Parameters of several dtypes, and some without an element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        kinds = [torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.bfloat16]
        self.layers = nn.ModuleList(nn.Linear(17, 17).to(kind) for kind in kinds)
        self.empty = nn.ParameterList([nn.Parameter(torch.empty(0, 5)), nn.Parameter(torch.empty(3, 0))])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x.float().sum() + sum(each.sum() for each in self.empty)


@pytest.mark.parametrize("norm_type", [2.0, 1.0])
def test_the_total_norm_is_torchs_with_empty_parameters_and_mixed_dtypes(
    norm_type: float, wrap: Wrap
) -> None:
    plain, model = Odd(), wrap(Odd())
    for step in range(12):
        torch.manual_seed(step)
        x = torch.randn(4, 17)
        norms = []
        for each in (plain, model):
            each.zero_grad()
            each(x * (step + 1)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type))
        norms.append(model.clip_grad_norm_(0.1, norm_type))
        assert torch.equal(*norms), step
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
