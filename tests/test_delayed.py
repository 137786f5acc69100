"""Updates delayed by one step: the bits of one that is told to wait, and what makes a pending one first."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from tests.conftest import Wrap
from tests.models import BY_NAME, Case
from tests.parity import Outcome, adamw, assert_equal, assert_same, build, snapshot
from tiermem.device import StandInDevice
from tiermem.trace import Event, Phase
from tiermem.trace.reader import TraceFile
from tiermem.trainer import AdamW, GradScaler

GPT_CASE = BY_NAME["gpt"]
STEPS, UNDELAYED = 6, 2


class ByHand:
    """The delay in plain PyTorch: ``step`` makes the update of the gradients that it was called with before."""

    def __init__(self, optimizer: torch.optim.Optimizer, undelayed: int = UNDELAYED) -> None:
        self.optimizer = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.undelayed = undelayed
        self.number = 0
        self.pending: tuple[list[Any], list[float]] | None = None

    def step(self) -> None:
        taken = [p.grad for p in self.parameters], [group["lr"] for group in self.optimizer.param_groups]
        self.settle()
        self.pending = taken
        if self.number < self.undelayed:
            self.settle()
        self.number += 1

    def settle(self) -> None:
        if self.pending is None:
            return
        gradients, rates = self.pending
        self.pending = None
        now = [group["lr"] for group in self.optimizer.param_groups]
        self._set(gradients, rates)
        self.optimizer.step()
        self._set([None] * len(gradients), now)

    def _set(self, gradients: list[Any], rates: list[float]) -> None:
        for p, gradient in zip(self.parameters, gradients, strict=True):
            p.grad = gradient
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def run(
    model: Any,
    optimizer: torch.optim.Optimizer,
    case: Case,
    *,
    micro: int = 2,
    clip: float | None = 0.5,
    steps: int = STEPS,
) -> Outcome:
    """Train with a schedule of the rate, then settle."""
    paged = isinstance(model, tiermem.TieredModule)
    stepper: Any = optimizer if paged else ByHand(optimizer)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.3, total_iters=STEPS)
    check = model._runtime.check if paged else lambda: None
    torch.manual_seed(1)
    losses, norms = [], []
    for _ in range(steps):
        for number in range(micro):
            with model.no_sync() if paged and number < micro - 1 else nullcontext():
                loss = case.loss(model, case.batch()) / micro
                check()
                loss.backward()
                check()
                losses.append(loss.detach().clone())
        if clip is not None:
            clipped = (
                model.clip_grad_norm_
                if paged
                else (lambda most: nn.utils.clip_grad_norm_(model.parameters(), most))
            )
            norms.append(clipped(clip).clone())
        stepper.step()
        check()
        optimizer.zero_grad()
        schedule.step()
    stepper.settle()
    check()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return Outcome(losses, norms, state, snapshot(optimizer))


def delayed(model: nn.Module, **settings: Any) -> AdamW:
    return adamw(model, delayed=True, undelayed_steps=UNDELAYED, **settings)


@pytest.mark.parametrize(
    ("name", "dtype", "three", "host", "micro"),
    [
        ("gpt", torch.float32, False, "smallest", 2),
        ("gpt-tied", torch.bfloat16, True, 0.4, 1),
        ("gpt-frozen", torch.bfloat16, False, 0.4, 2),
        ("gpt-checkpoint", torch.float32, False, 0.4, 1),
        ("albert", torch.float32, True, "smallest", 1),
        ("nested", torch.float32, False, "1GiB", 1),
        ("views", torch.float32, True, 0.5, 1),
        ("structured", torch.bfloat16, False, "smallest", 1),
    ],
)
def test_the_bits_are_those_of_an_optimizer_told_to_wait(
    name: str, dtype: torch.dtype, three: bool, host: Any, micro: int, wrap: Wrap
) -> None:
    case = BY_NAME[name]
    plain, model = build(case, dtype), wrap(build(case, dtype), host=host, device="smallest", three=three)
    expected = run(plain, adamw(plain), case, micro=micro)
    found = run(model, delayed(model), case, micro=micro)
    assert_equal(expected, found)


def test_torchs_own_told_to_wait_gives_the_same_up_to_rounding(wrap: Wrap) -> None:
    plain, model = build(GPT_CASE), wrap(build(GPT_CASE), host=0.4)
    by_hand = torch.optim.AdamW(plain.parameters(), lr=3e-3, weight_decay=0.1, eps=1e-5)
    expected = run(plain, by_hand, GPT_CASE, micro=1)
    found = run(model, delayed(model, eps=1e-5), GPT_CASE, micro=1)
    for name, value in expected.state.items():
        torch.testing.assert_close(found.state[name], value, rtol=1e-5, atol=1e-6)


def test_it_isnt_what_an_update_at_once_gives(wrap: Wrap) -> None:
    model = wrap(build(GPT_CASE))
    losses = run(model, delayed(model), GPT_CASE, micro=1).losses
    other = wrap(build(GPT_CASE))
    at_once = run(other, adamw(other), GPT_CASE, micro=1).losses
    same = [torch.equal(a, b) for a, b in zip(losses, at_once, strict=True)]
    # The third step's update is the first that waits, and so the fourth loss the first that it is missing in.
    assert same == [True, True, True, False, False, False]


def test_updates_are_made_while_backward_runs(wrap: Wrap, disk: Path) -> None:
    file = disk / "run.trace"
    model = wrap(build(GPT_CASE), host=0.4, trace={"file": str(file)})
    optimizer = delayed(model)
    departures = []
    for _ in range(9):
        GPT_CASE.loss(model, GPT_CASE.batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
        departures.append(model.stats()["departures"])
    assert departures[-1] == departures[-3]  # the schedule knows of them
    blocks = {number for number, name in enumerate(model.units) if name.startswith("h.")}
    model.close(restore=False)
    records = TraceFile(file).records
    last = records[records["step"] == 8]
    backward = last[(last["event"] == Event.COMPUTE) & (last["phase"] == Phase.BACKWARD)]
    updates = last[last["event"] == Event.OPTIMIZER]
    for unit in blocks:
        left = max(r["start"] + r["duration"] for r in backward if r["unit"] == unit)
        made = [r["start"] for r in updates if r["unit"] == unit]
        assert made
        assert min(made) >= left
        if unit != min(blocks):
            assert max(made) < max(r["start"] for r in backward)  # a unit before it is still to come


def test_what_makes_a_pending_update(wrap: Wrap, disk: Path) -> None:
    def pending() -> tuple[Any, Any, dict[str, torch.Tensor]]:
        model = wrap(build(GPT_CASE), host=0.4)
        optimizer = delayed(model)
        before = {}
        torch.manual_seed(1)
        for step in range(4):
            GPT_CASE.loss(model, GPT_CASE.batch()).backward()
            optimizer.step()
            for p in model.parameters():
                assert step < UNDELAYED or p.grad is None
                p.grad = None
            model.zero_grad()
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
        return model, optimizer, before

    model, optimizer, before = pending()
    assert_same("nothing has", before, {name: p.detach().clone() for name, p in model.named_parameters()})
    optimizer.settle()
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert all(not torch.equal(value, before[name]) for name, value in expected.items())
    moments = snapshot(optimizer)
    assert {float(each["step"]) for each in moments.values()} == {4.0}

    model, optimizer, _ = pending()
    assert_same("state_dict()", expected, dict(model.state_dict()))
    model, optimizer, _ = pending()
    assert_same("optimizer.state_dict()", moments, snapshot(optimizer))
    model, optimizer, _ = pending()
    model.save(disk / "saved", optimizer)
    again = wrap(build(GPT_CASE, seed=3))
    fresh = adamw(again)
    again.load(disk / "saved", fresh)
    assert_same("save()", expected, dict(again.state_dict()))
    assert_same("save()", moments, snapshot(fresh))
    model, optimizer, _ = pending()
    model.close()
    assert_same("close()", expected, dict(model.state_dict()))
    model, optimizer, _ = pending()
    model.load_state_dict(build(GPT_CASE, seed=3).state_dict())
    optimizer.settle()
    assert_same("load_state_dict()", dict(build(GPT_CASE, seed=3).state_dict()), dict(model.state_dict()))
    model, optimizer, _ = pending()
    gone = weakref.ref(optimizer)
    del optimizer
    assert gone() is not None  # what is pending is its own
    assert_same("without the optimizer", expected, dict(model.state_dict()))


def test_a_step_that_is_skipped(wrap: Wrap) -> None:
    """What an overflow does: its gradients count for nothing, and what was pending is made all the same."""
    ends = []
    for model in (build(GPT_CASE), wrap(build(GPT_CASE), host=0.4)):
        paged = isinstance(model, tiermem.TieredModule)
        optimizer = delayed(model) if paged else adamw(model)
        by_hand = None if paged else ByHand(optimizer)
        scaler = GradScaler(init_scale=4.0) if paged else torch.amp.GradScaler("cpu", init_scale=4.0)
        torch.manual_seed(1)
        for step in range(6):
            loss = GPT_CASE.loss(model, GPT_CASE.batch())
            if step == 4:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if by_hand is None:
                scaler.step(optimizer)
            elif step == 4:
                by_hand.settle()
            else:
                for p in by_hand.parameters:
                    p.grad.mul_(1 / 4.0)
                by_hand.step()
            if paged:
                scaler.update(4.0)
            optimizer.zero_grad()
        if by_hand is not None:
            by_hand.settle()
        ends.append((dict(model.state_dict()), snapshot(optimizer)))
    assert_same("state", ends[0][0], ends[1][0])
    assert_same("moments", ends[0][1], ends[1][1])


def test_a_resumed_run_delays_at_once(wrap: Wrap) -> None:
    model = wrap(build(GPT_CASE))
    optimizer = delayed(model)
    run(model, optimizer, GPT_CASE, micro=1, clip=None, steps=3)
    other = wrap(build(GPT_CASE))
    other.load_state_dict(model.state_dict())
    again = delayed(other)
    again.load_state_dict(optimizer.state_dict())
    GPT_CASE.loss(other, GPT_CASE.batch()).backward()
    before = [p.detach().clone() for p in other.parameters()]
    again.step()
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
    again.settle()
    assert not any(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))


def test_a_backward_that_fails(wrap: Wrap) -> None:
    model = wrap(build(GPT_CASE), host="smallest")
    optimizer = delayed(model)
    run(model, optimizer, GPT_CASE, micro=1, clip=None, steps=3)
    GPT_CASE.loss(model, GPT_CASE.batch()).backward()
    optimizer.step()
    expected = wrap(build(GPT_CASE), host="smallest")
    expected.load_state_dict({name: p.detach().clone() for name, p in model.named_parameters()})

    def interrupt(gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt

    handle = model.h[0].attention.proj.weight.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        GPT_CASE.loss(model, GPT_CASE.batch()).backward()  # later blocks have been updated by then
    handle.remove()
    with pytest.raises(tiermem.PagingError, match=r"no_sync\(\) for all micro-batches but the last"):
        GPT_CASE.loss(model, GPT_CASE.batch())
    model.zero_grad()
    model._runtime.check()
    GPT_CASE.loss(model, GPT_CASE.batch()).backward()
    optimizer.step()
    optimizer.settle()
    assert {float(each["step"]) for each in snapshot(optimizer).values()} == {5.0}


def test_another_optimizer_has_the_rest_of_a_unit(wrap: Wrap) -> None:
    ends = []
    for model in (build(GPT_CASE), wrap(build(GPT_CASE), host=0.4)):
        paged = isinstance(model, tiermem.TieredModule)
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        late: Any = (
            AdamW(matrices, 3e-3, delayed=True, undelayed_steps=0)
            if paged
            else ByHand(AdamW(matrices, 3e-3), 0)
        )
        soon = AdamW(vectors, 3e-3)
        torch.manual_seed(1)
        for _ in range(4):
            GPT_CASE.loss(model, GPT_CASE.batch()).backward()
            late.step()
            soon.step()
            model.zero_grad()
        late.settle()
        ends.append(dict(model.state_dict()))
    assert_same("state", *ends)


def test_what_cant_be_delayed_is_refused(wrap: Wrap, disk: Path) -> None:
    with pytest.raises(ValueError, match="during_backward=True say different things"):
        AdamW([nn.Parameter(torch.zeros(1))], delayed=True, during_backward=True)
    with pytest.raises(ValueError, match="undelayed_steps: read -1"):
        AdamW([nn.Parameter(torch.zeros(1))], delayed=True, undelayed_steps=-1)
    model = wrap(build(GPT_CASE))
    optimizer = delayed(model, lr=1e-3)
    with pytest.raises(ValueError, match="another optimizer"):
        delayed(model)
    GPT_CASE.loss(model, GPT_CASE.batch()).backward()
    optimizer.step()
    durable = wrap(build(GPT_CASE), host="smallest", durability={"mode": "step"})
    with pytest.raises(ValueError, match=r"durability\.mode"):
        delayed(durable)


def test_settling_in_the_middle_is_refused(wrap: Wrap) -> None:
    model = wrap(build(GPT_CASE))
    optimizer = adamw(model, delayed=True, undelayed_steps=0)
    GPT_CASE.loss(model, GPT_CASE.batch()).backward()
    optimizer.step()
    handle = model.h[0].register_forward_hook(lambda *_: model.state_dict())
    with pytest.raises(tiermem.PagingError, match="in the middle of a forward or backward"):
        GPT_CASE.loss(model, GPT_CASE.batch())
    handle.remove()
    GPT_CASE.loss(model, GPT_CASE.batch()).backward()
    optimizer.step()


def test_held_gradients_without_a_disk_need_room() -> None:
    net = build(GPT_CASE)
    config = {"host": {"budget": "1GiB"}, "device": {"budget": "1GiB"}}
    with (
        tiermem.TieredModule(net, config, device=StandInDevice()) as model,
        pytest.raises(tiermem.BudgetError, match="lower it so that there is a disk tier"),
    ):
        adamw(model, delayed=True)


def test_plain_parameters_are_updated_at_once() -> None:
    torch.manual_seed(0)
    nets = [nn.Linear(3, 3), nn.Linear(3, 3)]
    nets[1].load_state_dict(nets[0].state_dict())
    for net, settings in zip(nets, ({}, {"delayed": True, "undelayed_steps": 0}), strict=True):
        optimizer = AdamW(net.parameters(), **settings)
        net(torch.ones(3)).sum().backward()
        optimizer.step()
        optimizer.settle()
    assert torch.equal(nets[0].weight, nets[1].weight)
