"""Updates during backward: the bits of an update behind it, and gradients that never leave memory."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from tests.conftest import Wrap
from tests.models import BY_NAME
from tests.parity import adamw, assert_equal, assert_same, build, snapshot, train
from tiermem.trainer import AdamW

GPT_CASE = BY_NAME["gpt"]


@pytest.mark.parametrize(
    ("name", "dtype", "three", "host"),
    [
        ("gpt", torch.float32, False, "smallest"),
        ("gpt-tied", torch.bfloat16, True, 0.4),
        ("gpt-frozen", torch.bfloat16, False, 0.4),
        ("gpt-checkpoint", torch.float32, False, 0.4),
        ("albert", torch.float32, True, "smallest"),
        ("nested", torch.float32, False, "1GiB"),
        ("views", torch.float32, True, 0.5),
    ],
)
def test_it_changes_no_bit(name: str, dtype: torch.dtype, three: bool, host: Any, wrap: Wrap) -> None:
    case = BY_NAME[name]
    plain, model = build(case, dtype), wrap(build(case, dtype), host=host, device="smallest", three=three)
    ends = [
        train(each, adamw(each, **settings), case, steps=4, accumulation=1, clip=None)
        for each, settings in ((plain, {}), (model, {"during_backward": True}))
    ]
    assert_equal(*ends)
    assert model._runtime.steps.number == 4


def test_gradients_never_go_to_the_disk(wrap: Wrap) -> None:
    moved = []
    for settings in ({}, {"during_backward": True}):
        model = wrap(build(GPT_CASE), host=0.4)
        optimizer = adamw(model, **settings)
        train(model, optimizer, GPT_CASE, steps=3, accumulation=1, clip=None)
        before = model.stats()
        train(model, optimizer, GPT_CASE, steps=4, accumulation=1, clip=None)
        after = model.stats()
        ways = ("disk_to_host", "host_to_disk")
        kinds = {kind for way in ways for kind in after["links"][way]}
        moved.append(
            {
                kind: sum(
                    after["links"][way].get(kind, 0) - before["links"][way].get(kind, 0) for way in ways
                )
                for kind in kinds
            }
        )
        assert after["departures"] == 0
    behind, during = moved
    assert behind["gradient"] > 0
    assert during.get("gradient", 0) == 0
    assert sum(during.values()) < 0.9 * sum(behind.values())


def test_micro_batches(wrap: Wrap) -> None:
    ends = []
    for model, settings in (
        (build(GPT_CASE), {}),
        (wrap(build(GPT_CASE), host=0.4), {"during_backward": True}),
    ):
        optimizer = adamw(model, **settings)
        torch.manual_seed(0)
        for _ in range(3):
            for micro in range(3):
                if micro < 2 and isinstance(model, tiermem.TieredModule):
                    with model.no_sync():
                        GPT_CASE.loss(model, GPT_CASE.batch()).backward()
                else:
                    GPT_CASE.loss(model, GPT_CASE.batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append((dict(model.state_dict()), snapshot(optimizer)))
    assert_same("state", ends[0][0], ends[1][0])
    assert_same("moments", ends[0][1], ends[1][1])


def test_settings_are_those_at_the_backward_and_some_gradients_are_missing(wrap: Wrap) -> None:
    ends = []
    for model, settings in (
        (build(GPT_CASE), {}),
        (wrap(build(GPT_CASE), host="smallest"), {"during_backward": True}),
    ):
        groups = [
            {"params": [p for p in model.parameters() if p.dim() >= 2]},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = AdamW(groups, lr=3e-3, **settings)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        torch.manual_seed(0)
        for step in range(4):
            model.h[1].requires_grad_(step != 1)
            GPT_CASE.loss(model, GPT_CASE.batch()).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        ends.append((dict(model.state_dict()), snapshot(optimizer)))
    assert_same("state", ends[0][0], ends[1][0])
    assert_same("moments", ends[0][1], ends[1][1])


def test_what_needs_all_gradients_is_refused(wrap: Wrap) -> None:
    model = wrap(build(GPT_CASE))
    optimizer = adamw(model, during_backward=True)
    with pytest.raises(ValueError, match="another optimizer"):
        adamw(model, during_backward=True)
    GPT_CASE.loss(model, GPT_CASE.batch()).backward()
    with pytest.raises(tiermem.PagingError, match="during_backward=False"):
        model.clip_grad_norm_(1.0)
    with pytest.raises(tiermem.PagingError, match="given up"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(tiermem.PagingError, match=r"no_sync\(\) for all micro-batches but the last"):
        GPT_CASE.loss(model, GPT_CASE.batch()).backward()
    model._runtime.check()
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, GPT_CASE, steps=1, accumulation=1, clip=None)


def test_a_durable_run_goes_on_from_the_last_whole_step(wrap: Wrap, disk: Path) -> None:
    model = wrap(build(GPT_CASE), host="smallest", durability={"mode": "step"})
    optimizer = adamw(model, during_backward=True)
    train(model, optimizer, GPT_CASE, steps=2, accumulation=1, clip=None)
    expected = {name: value.clone() for name, value in model.state_dict().items()}

    def interrupt(gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt

    handle = model.h[0].attention.proj.weight.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        GPT_CASE.loss(model, GPT_CASE.batch()).backward()  # later blocks have been updated by then
    handle.remove()
    assert any(not torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    path = model.stats()["commits"]["path"]
    model.close(restore=False)
    again = tiermem.TieredModule(
        build(GPT_CASE, seed=3), {"host": {"budget": "1GiB"}, "durability": {"mode": "step"}}, resume=path
    )
    with again:
        assert again.num_steps == 2
        assert_same("state", expected, dict(again.state_dict()))


def test_an_optimizer_that_is_gone_updates_nothing(wrap: Wrap) -> None:
    model = wrap(build(GPT_CASE), host="smallest")
    optimizer = adamw(model, during_backward=True)
    gone = weakref.ref(optimizer)
    del optimizer
    assert gone() is None
    before = {name: value.clone() for name, value in model.state_dict().items()}
    GPT_CASE.loss(model, GPT_CASE.batch()).backward()
    assert_same("state", before, dict(model.state_dict()))
    model.zero_grad()
    train(model, adamw(model), GPT_CASE, steps=1)


def test_gradients_that_are_used_twice_are_refused_not_zero(wrap: Wrap) -> None:
    """Of what an ordinary step gave up, a second one without a backward in between can make nothing."""
    model: Any = wrap(build(GPT_CASE), host="smallest")
    optimizer = adamw(model)
    GPT_CASE.loss(model, GPT_CASE.batch()).backward()
    optimizer.step()
    with pytest.raises(tiermem.PagingError, match="given up"):
        optimizer.step()


def test_plain_parameters_are_updated_in_step() -> None:
    torch.manual_seed(0)
    nets = [nn.Linear(3, 3), nn.Linear(3, 3)]
    nets[1].load_state_dict(nets[0].state_dict())
    for net, settings in zip(nets, ({}, {"during_backward": True}), strict=True):
        optimizer = AdamW(net.parameters(), **settings)
        net(torch.ones(3)).sum().backward()
        optimizer.step()
    assert torch.equal(nets[0].weight, nets[1].weight)
