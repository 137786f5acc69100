"""State that is saved and loaded, and optimizers that are set up in other ways than one for all."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import tiermem
from tests.conftest import Wrap
from tests.models import BY_NAME
from tests.parity import adamw, assert_equal, assert_same, build, same, snapshot, train
from tiermem.trainer import AdamW

GPT_CASE = BY_NAME["gpt"]


# -- state ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_state_goes_over_to_a_plain_run_and_back(dtype: torch.dtype, three: bool, wrap: Wrap) -> None:
    nets = {"plain": build(GPT_CASE, dtype)}
    first = wrap(build(GPT_CASE, dtype), host="smallest", device="smallest", three=three)
    optimizers = {"plain": adamw(nets["plain"]), "first": adamw(first)}
    train(nets["plain"], optimizers["plain"], GPT_CASE, steps=2)
    train(first, optimizers["first"], GPT_CASE, steps=2)
    state, moments = first.state_dict(), optimizers["first"].state_dict()
    assert_same("state", nets["plain"].state_dict(), state)
    assert {type(value) for value in state.values()} == {Tensor}
    second = build(GPT_CASE, dtype, seed=9)
    third = wrap(build(GPT_CASE, dtype, seed=8), host="smallest", device="smallest", three=three)
    ends = [train(nets["plain"], optimizers["plain"], GPT_CASE, steps=2, seed=5)]
    for model in (second, third):
        optimizer = adamw(model)
        train(model, optimizer, GPT_CASE, steps=1)
        model.load_state_dict(state)
        optimizer.load_state_dict(copy.deepcopy(moments))
        ends.append(train(model, optimizer, GPT_CASE, steps=2, seed=5))
    # the model that gave the state away goes on, and hasn't changed it
    ends.append(train(first, optimizers["first"], GPT_CASE, steps=2, seed=5))
    for end in ends[1:]:
        assert_equal(ends[0], end)
    assert not same(state["head.weight"], first.state_dict()["head.weight"])


def test_loading_in_mid_training_is_what_it_is_unwrapped(wrap: Wrap) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        other = build(GPT_CASE, dtype, seed=4).state_dict()
        ends = []
        for model in (build(GPT_CASE, dtype), wrap(build(GPT_CASE, dtype), host="smallest")):
            optimizer = adamw(model)
            train(model, optimizer, GPT_CASE, steps=2)
            model.load_state_dict(other)
            ends.append(train(model, optimizer, GPT_CASE, steps=2))
        assert_equal(*ends)


def test_an_optimizer_that_is_given_no_state_begins_anew(wrap: Wrap) -> None:
    ends = []
    for model in (build(GPT_CASE), wrap(build(GPT_CASE), host="smallest")):
        optimizer = adamw(model)
        fresh = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, GPT_CASE, steps=2)
        optimizer.load_state_dict(fresh)
        ends.append(train(model, optimizer, GPT_CASE, steps=2))
    assert_equal(*ends)


def test_loading_reports_what_does_not_fit(wrap: Wrap) -> None:
    model = wrap(build(GPT_CASE), host="smallest")
    state = model.state_dict()
    del state["head.weight"]
    with pytest.raises(RuntimeError, match=r"head\.weight"):
        model.load_state_dict(state)
    assert model.load_state_dict(state, strict=False).missing_keys == ["head.weight"]
    state["head.weight"] = torch.zeros(2, 2)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(state)
    with pytest.raises(tiermem.errors.PagingError, match="assign"):
        model.load_state_dict(state, assign=True)
    model._runtime.check()


def test_state_of_the_wrapped_module_is_a_copy_too(wrap: Wrap) -> None:
    net = build(GPT_CASE)
    model = wrap(net, host="smallest")
    before = build(GPT_CASE).state_dict()
    for state in (net.state_dict(), model.state_dict(), net.h.state_dict(prefix="h.")):
        assert_same("state", {k: v for k, v in before.items() if k in state}, dict(state))
        for value in state.values():
            value.zero_()
    assert_same("state", before, model.state_dict())
    model.close()
    assert_same("state", before, net.state_dict())


# -- optimizers ----------------------------------------------------------------------------------------------


def test_two_models_in_one_folder_and_one_optimizer(wrap: Wrap) -> None:
    conv = BY_NAME["conv"]
    plain = [build(GPT_CASE), build(conv)]
    tiered = [wrap(build(GPT_CASE), host="smallest"), wrap(build(conv), host="smallest")]
    free = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]
    free[1].load_state_dict(free[0].state_dict())
    ends = []
    for models, extra in ((plain, free[0]), (tiered, free[1])):
        optimizer = AdamW([p for m in (*models, extra) for p in m.parameters()], lr=1e-2)
        torch.manual_seed(2)
        for _ in range(3):
            loss = GPT_CASE.loss(models[0], GPT_CASE.batch()) * conv.loss(models[1], conv.batch())
            (loss + extra(torch.ones(3)).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([{k: v.clone() for k, v in m.state_dict().items()} for m in (*models, extra)])
        ends[-1].append(snapshot(optimizer))
    for a, b in zip(*ends, strict=True):
        assert_same("state", a, b)


def test_what_was_frozen_at_wrapping_gets_no_gradients_and_training_goes_on(wrap: Wrap) -> None:
    net = build(GPT_CASE)
    net.h[1].requires_grad_(False)
    model = wrap(net, host="smallest")
    optimizer = adamw(model)
    with pytest.raises(tiermem.PagingError, match="frozen when"):
        model.h[1].mlp[0].weight.requires_grad_(True)
    assert not model.h[1].mlp[0].weight.requires_grad
    train(model, optimizer, GPT_CASE, steps=1)


@pytest.mark.parametrize("host", ["smallest", "1GiB"])
def test_settings_that_split_a_unit_and_schedulers(host: str, wrap: Wrap) -> None:
    ends = []
    for model in (build(GPT_CASE), wrap(build(GPT_CASE), host=host)):
        decayed = [p for p in model.parameters() if p.dim() >= 2]
        rest = [p for p in model.parameters() if p.dim() < 2]
        optimizer = AdamW(
            [{"params": decayed, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0, "lr": 1e-2}],
            lr=3e-3,
        )
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [3])
        ends.append(train(model, optimizer, GPT_CASE, after=lambda step, s=schedule: s.step()))
    assert_equal(*ends)


def test_an_optimizer_of_some_parameters(wrap: Wrap) -> None:
    ends = []
    for model in (build(GPT_CASE), wrap(build(GPT_CASE), host="smallest")):
        optimizer = AdamW(model.h[0].parameters(), lr=1e-2)
        other = AdamW([model.head.weight], lr=1e-3)
        other.add_param_group({"params": list(model.h[1].mlp.parameters()), "lr": 1e-4})
        torch.manual_seed(0)
        for _ in range(3):
            GPT_CASE.loss(model, GPT_CASE.batch()).backward()
            optimizer.step()
            other.step()
            model.zero_grad()
        ends.append((dict(model.state_dict()), snapshot(optimizer), snapshot(other)))
    for a, b in zip(*ends, strict=True):
        assert_same("state", a, b)
