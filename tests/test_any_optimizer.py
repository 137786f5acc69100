"""Optimizers of any class over pages: the numbers of the same class in memory, with their state paged."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from tests.conftest import Wrap
from tests.models import BY_NAME
from tests.optimizers import ELEMENTWISE, MIXING, Global, Lion, TrustRatio
from tests.parity import assert_equal, assert_same, build, snapshot, train
from tiermem.page import Kind
from tiermem.trace.reader import TraceFile
from tiermem.trace.summary import summarise
from tiermem.trainer import AdamW, paged

GPT_CASE = BY_NAME["gpt"]
MOMENTUM: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}


def momentum(model: nn.Module) -> Any:
    """SGD with momentum, over pages where there are any."""
    if isinstance(model, tiermem.TieredModule):
        return paged(torch.optim.SGD, model.parameters(), **MOMENTUM)
    return torch.optim.SGD(model.parameters(), **MOMENTUM)


@pytest.mark.parametrize("name", [*ELEMENTWISE, *MIXING])
def test_every_class_gives_its_own_bits(name: str, wrap: Wrap) -> None:
    kind, settings = {**ELEMENTWISE, **MIXING}[name]
    plain, model = build(GPT_CASE), wrap(build(GPT_CASE), host=0.6)
    optimizer = paged(kind, model.parameters(), **settings)
    expected = train(plain, kind(plain.parameters(), **settings), GPT_CASE, steps=3, accumulation=1)
    assert_equal(expected, train(model, optimizer, GPT_CASE, steps=3, accumulation=1))
    shapes = [p.shape for p in plain.parameters()]
    as_large = any(
        value.ndim and value.shape == shapes[number]
        for number, state in expected.optimizer.items()
        for value in state.values()
    )
    moved = model.stats()["links"]["host_to_disk"].get("state", 0)
    assert (moved > 0) == as_large


@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
@pytest.mark.parametrize("name", ["views", "conv-channels-last", "gpt-frozen"])
def test_every_layout(name: str, three: bool, wrap: Wrap) -> None:
    case = BY_NAME[name]
    plain, model = build(case), wrap(build(case), host=0.7, device="smallest", three=three)
    assert_equal(*(train(each, momentum(each), case, steps=3) for each in (plain, model)))


def test_half_precision_is_torch_s_own(wrap: Wrap, disk: Path) -> None:
    plain = build(GPT_CASE, torch.bfloat16)
    # Wrapping casts, and keeps what the cast loses as master weights: nobody updates those here.
    model = wrap(build(GPT_CASE), host="smallest", precision={"parameters": "bfloat16"})
    optimizer = momentum(model)
    assert_equal(*(train(a, b, GPT_CASE, steps=3) for a, b in ((plain, momentum(plain)), (model, optimizer))))
    model.save(disk / "saved", optimizer)
    again = wrap(build(GPT_CASE, seed=3))
    again.load(disk / "saved", cast=True)
    assert_same("state", {k: v.float() for k, v in plain.state_dict().items()}, dict(again.state_dict()))


def test_groups_schedulers_a_closure_and_parameters_that_are_not_paged(wrap: Wrap) -> None:
    ends = []
    for model in (build(GPT_CASE), wrap(build(GPT_CASE), host="smallest")):
        torch.manual_seed(0)
        beside = nn.Linear(67, 67)
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        groups = [
            {"params": matrices, "beta": 0.8},
            {"params": (p for p in model.parameters() if p.dim() < 2), "lr": 1e-2},
        ]
        make = (
            paged if isinstance(model, tiermem.TieredModule) else lambda kind, *args, **kw: kind(*args, **kw)
        )
        optimizer: Any = make(Lion, groups, lr=1e-3)
        optimizer.add_param_group({"params": beside.parameters(), "beta": 0.5})
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, [1e-3, 1e-2, 1e-3], total_steps=9, cycle_momentum=False
        )
        losses = []
        for _ in range(4):
            batch = GPT_CASE.batch()

            def closure(model: nn.Module = model, batch: Any = batch, beside: nn.Module = beside) -> float:
                loss = nn.functional.cross_entropy(beside(model(batch[0])).flatten(0, 1), batch[1].flatten())
                loss.backward()
                return loss.item()

            losses.append(optimizer.step(closure) if make is paged else closure())
            if make is not paged:
                optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        assert [group["count"] for group in optimizer.param_groups] == [4, 4, 4]
        values = {**model.state_dict(), **{f"beside.{k}": v.clone() for k, v in beside.state_dict().items()}}
        states = {
            number: {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
            for number, state in copy.deepcopy(optimizer.state_dict()["state"]).items()
        }
        ends.append((losses, values, states, [group["lr"] for group in optimizer.param_groups]))
    assert ends[0][0] == ends[1][0]
    assert ends[0][3] == ends[1][3]
    assert_same("values", ends[0][1], ends[1][1])
    assert_same("states", ends[0][2], ends[1][2])


def test_parameters_without_gradients_and_a_model_wrapped_later(wrap: Wrap) -> None:
    ends = []
    for later in (False, True):
        net = build(GPT_CASE)
        optimizer: Any = (
            paged(torch.optim.Adagrad, net.parameters(), lr=0.1)
            if later
            else torch.optim.Adagrad(net.parameters(), lr=0.1)
        )
        torch.manual_seed(0)
        train(net, optimizer, GPT_CASE, steps=1, clip=None)
        model = wrap(net, host=0.6) if later else net
        for step in range(3):
            net.h[1].requires_grad_(step != 0)
            GPT_CASE.loss(model, GPT_CASE.batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append((dict(model.state_dict()), snapshot(optimizer)))
    assert_same("state", ends[0][0], ends[1][0])
    assert_same("sums", ends[0][1], ends[1][1])


@pytest.mark.parametrize("name", ["SGD with momentum", "NAdam", "Adagrad", "Lion"])
def test_state_goes_over_to_a_plain_run_and_back(name: str, wrap: Wrap) -> None:
    kind, settings = ELEMENTWISE[name]
    first = wrap(build(GPT_CASE), host=0.6)
    optimizer = paged(kind, first.parameters(), **settings)
    train(first, optimizer, GPT_CASE, steps=2)
    state, moments = first.state_dict(), copy.deepcopy(optimizer.state_dict())
    ends = [train(first, optimizer, GPT_CASE, steps=2, seed=5)]
    plain, other = build(GPT_CASE, seed=3), wrap(build(GPT_CASE, seed=4), host="1GiB")
    for model, fresh in ((plain, kind(plain.parameters())), (other, paged(kind, other.parameters()))):
        model.load_state_dict(state)
        fresh.load_state_dict(copy.deepcopy(moments))
        ends.append(train(model, fresh, GPT_CASE, steps=2, seed=5))
    for end in ends[1:]:
        assert_equal(ends[0], end)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("name", ["SGD with momentum", "NAdam", "Lion", "Adafactor"])
def test_a_checkpoint_has_it(name: str, background: bool, wrap: Wrap, disk: Path) -> None:
    kind, settings = {**ELEMENTWISE, **MIXING}[name]
    first = wrap(build(GPT_CASE), host=0.6)
    optimizer = paged(kind, first.parameters(), **settings)
    train(first, optimizer, GPT_CASE, steps=2)
    saving = first.save(disk / "saved", optimizer, background=background)
    expected = train(first, optimizer, GPT_CASE, steps=2, seed=5)
    saving.wait()
    first.close(restore=False)
    second = wrap(build(GPT_CASE, seed=4), host="1GiB")
    again = paged(kind, second.parameters(), **settings)
    train(second, again, GPT_CASE, steps=1)  # what it has of its own is replaced
    second.load(disk / "saved", again)
    assert_equal(expected, train(second, again, GPT_CASE, steps=2, seed=5))
    plain = build(GPT_CASE, seed=5)
    third = wrap(plain)
    third.close()
    ordinary = kind(plain.parameters(), **settings)
    third.load(disk / "saved", ordinary)
    assert_equal(expected, train(plain, ordinary, GPT_CASE, steps=2, seed=5))


def test_what_mixes_parameters_is_refused(wrap: Wrap) -> None:
    model = wrap(build(GPT_CASE), host="smallest")
    with pytest.raises(ValueError, match=r"Global updates one parameter otherwise"):
        paged(Global, model.parameters())
    with pytest.raises(ValueError, match=r"LBFGS\.step\(\) needs a closure"):
        paged(torch.optim.LBFGS, model.parameters())
    with pytest.raises(ValueError, match="not <class"):
        paged(nn.Linear, model.parameters())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Invalid momentum value: -1"):
        paged(torch.optim.SGD, model.parameters(), momentum=-1)
    paged(TrustRatio, model.parameters())


def test_room_for_its_state_is_refused_before_it_is_needed(wrap: Wrap, disk: Path) -> None:
    case = BY_NAME["odd-mlp"]
    model = wrap(build(case), host="smallest")
    with pytest.raises(tiermem.BudgetError, match=r"the state of RMSprop.*raise host\.budget by") as caught:
        paged(torch.optim.RMSprop, model.parameters(), centered=True, momentum=0.9)
    budget = model.stats()["tiers"]["host"]["budget"] + caught.value.asked - caught.value.had
    model.close(restore=False)
    model, plain = wrap(build(case), host=budget), build(case)
    settings: dict[str, Any] = {"centered": True, "momentum": 0.9}
    optimizer = paged(torch.optim.RMSprop, model.parameters(), **settings)
    expected = train(plain, torch.optim.RMSprop(plain.parameters(), **settings), case)
    assert_equal(expected, train(model, optimizer, case))


def test_copies_and_a_closed_model_refuse(wrap: Wrap) -> None:
    model = wrap(build(GPT_CASE), host="smallest")
    optimizer = momentum(model)
    train(model, optimizer, GPT_CASE, steps=1)
    for way in (copy.copy, copy.deepcopy):
        with pytest.raises(tiermem.PagingError, match=r"state_dict\(\)"):
            way(optimizer)
    model.close()
    with pytest.raises(tiermem.PagingError, match="has been closed"):
        optimizer.step()


def test_one_unit_is_one_optimizer_s_where_there_are_masters(wrap: Wrap) -> None:
    model = wrap(build(GPT_CASE), host="smallest", precision={"parameters": "bfloat16"})
    block = dict(model.h[0].named_parameters())
    mine = paged(torch.optim.SGD, [block.pop("mlp.0.weight")], lr=0.1)
    AdamW(block.values())
    GPT_CASE.loss(model, GPT_CASE.batch()).backward()
    with pytest.raises(tiermem.PagingError, match="one unit to one optimizer"):
        mine.step()
    model._runtime.check()


def test_state_is_in_plans_and_in_the_trace(wrap: Wrap, disk: Path) -> None:
    model = wrap(build(GPT_CASE), host=0.6, trace={"file": str(disk / "run.trace")})
    train(model, momentum(model), GPT_CASE, steps=6)
    cursor = model._runtime.steps.training.cursor
    assert cursor is not None
    late = {page.number for page in model._runtime.table if page.kind is Kind.STATE}
    assert late <= {page for pages in cursor.schedule.pages for page in pages}
    assert model.stats()["departures"] == 0
    plans = model._runtime.pager.plans
    assert plans is not None
    (plan,) = plans.of(cursor.schedule).values()
    assert any(fetch.page in late for fetches in plan.fetches for fetch in fetches)
    model.close()
    with TraceFile(disk / "run.trace") as trace:
        assert {n for n, page in trace.pages.items() if page.kind == "state"} == late
        carried = [link.by_kind for link in summarise(trace).links]
    assert all(kinds["state"] > 0 for kinds in carried)
