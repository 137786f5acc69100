"""Durable runs: what was committed comes back bit for bit, whatever ended the run, and nothing else is taken for it."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tiermem
from tests.models import BY_NAME
from tests.parity import Outcome, assert_equal
from tests.resuming import STEPS, Loop, from_step, seed
from tiermem.folder import COMMIT, DURABLE, PREFIX
from tiermem.trainer import AdamW

HALF = STEPS // 2


@functools.cache
def uninterrupted(name: str, dtype: torch.dtype = torch.float32) -> Outcome:
    return Loop(BY_NAME[name], dtype=dtype).train().close()


def crash(loop: Loop, folder: Path, into: Path) -> Path:
    """What the disk has at this moment, as if the run had been killed now; the loop goes on, or is given up."""
    shutil.copytree(folder, into)
    return into


def give_up(loop: Loop) -> None:
    """End a loop without a last commit."""
    loop.model._runtime.commits._quiet = False
    loop.model.close(restore=False)


WAYS: dict[str, dict[str, Any]] = {
    "on disk": {"host": 0.3},
    "in memory": {},
    "three tiers, bfloat16": {"host": 0.5, "three": True, "dtype": torch.bfloat16},
    "host placement": {"placement": {"optimizer": "host", "parameters": "host"}},
}


def options(name: str, way: str) -> dict[str, Any]:
    chosen = dict(WAYS[way])
    if isinstance(chosen.get("host"), float):
        numel = sum(p.numel() for p in BY_NAME[name].build().parameters())
        chosen["host"] = max(600_000, int(chosen["host"] * numel * 16))
    return chosen


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(("conv", way) for way in WAYS),
        ("gpt-dropout", "three tiers, bfloat16"),
        ("gpt-tied", "on disk"),
        ("gpt-frozen", "three tiers, bfloat16"),
        ("gpt-frozen", "in memory"),
        ("views", "on disk"),
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(name: str, way: str, disk: Path) -> None:
    chosen = options(name, way)
    expected = uninterrupted(name, chosen.get("dtype", torch.float32))
    loop = Loop(BY_NAME[name], disk / "run", **chosen).train(HALF)
    loop.one()
    # The record of a step waits for its scheduler, and here that has stepped.
    left = crash(loop, disk / "run", disk / "left")
    give_up(loop)
    resumed = Loop(BY_NAME[name], left, resume="auto", **chosen)
    assert resumed.step == HALF + 1
    assert_equal(from_step(expected, HALF + 1), resumed.train().close())


def test_every_moment_of_a_loop_resumes_exactly(disk: Path) -> None:
    name, chosen = "odd-mlp", options("odd-mlp", "on disk")
    case, expected = BY_NAME[name], uninterrupted(name)
    loop = Loop(case, disk / "run", **chosen)
    copies: dict[str, int] = {}
    moment = 0

    def look(least: int) -> None:
        nonlocal moment
        crash(loop, disk / "run", disk / f"left-{moment}")
        copies[f"left-{moment}"] = least
        moment += 1

    for step in range(2):
        loss = case.loss(loop.model, loop.data.draw())
        look(step)
        noise = [random.random(), float(np.random.rand()), torch.rand(()).item()]
        (loss * (1 + sum(noise))).backward()
        look(step)
        loop.model.clip_grad_norm_(0.5)
        loop.optimizer.step()
        look(step)  # its record waits for the scheduler
        loop.scheduler.step()
        look(step + 1)
        loop.optimizer.zero_grad()
        look(step + 1)
    give_up(loop)
    for copy, least in copies.items():
        resumed = Loop(case, disk / copy, resume="auto", **chosen)
        if least == 0:
            assert resumed.step == 0
            seed(3)
        assert resumed.step == least, copy
        assert_equal(from_step(expected, least), resumed.train().close())


def test_without_a_scheduler_a_step_is_committed_when_it_returns(disk: Path) -> None:
    config = {"disk": {"paths": [str(disk / "run")]}, "durability": {"mode": "step"}}
    seed(0)
    model = tiermem.TieredModule(nn.Linear(40, 40), config)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(3, 40)).sum().backward()
    optimizer.step()
    shutil.copytree(disk / "run", disk / "left")
    values = {name: value.clone() for name, value in model.state_dict().items()}
    model.close()
    config["disk"] = {"paths": [str(disk / "left")]}
    with tiermem.TieredModule(nn.Linear(40, 40), config, resume="auto") as again:
        assert again.num_steps == 1
        for name, value in again.state_dict().items():
            assert torch.equal(value, values[name])


@pytest.mark.parametrize("commits", [1, 2])
def test_every_nth_step(commits: int, disk: Path) -> None:
    name = "odd-mlp"
    chosen = options(name, "on disk") | {
        "mode": "every:2",
        "durability": {"mode": "every:2", "commits": commits},
    }
    expected = uninterrupted(name)
    loop = Loop(BY_NAME[name], disk / "run", **chosen).train(5)
    left = crash(loop, disk / "run", disk / "left")
    loop.model.close()  # right behind a step: that is committed
    resumed = Loop(BY_NAME[name], left, resume="auto", **chosen)
    assert resumed.step == 4
    assert_equal(from_step(expected, 4), resumed.train().close())
    closed = Loop(BY_NAME[name], disk / "run", resume="auto", **chosen)
    assert closed.step == 5
    assert_equal(from_step(expected, 5), closed.train().close())


def test_commits_by_hand(disk: Path) -> None:
    name = "odd-mlp"
    expected = uninterrupted(name)
    loop = Loop(BY_NAME[name], disk / "run", mode="manual").train(2)
    loop.model.commit()
    loop.one()
    loop.case.loss(loop.model, loop.data.draw()).backward()
    with pytest.raises(tiermem.PagingError, match="gradients have landed that no step has used"):
        loop.model.commit()
    loop.model.close()
    resumed = Loop(BY_NAME[name], disk / "run", resume="auto", mode="manual")
    assert resumed.step == 2
    assert_equal(from_step(expected, 2), resumed.train().close())


def test_other_budgets_resume_the_same_run(disk: Path) -> None:
    name = "gpt-tied"
    expected = uninterrupted(name)
    loop = Loop(BY_NAME[name], disk, **options(name, "on disk")).train(2)
    loop.model.close()
    loop = Loop(BY_NAME[name], disk, resume="auto").train(4)
    loop.model.close()
    loop = Loop(BY_NAME[name], disk, resume="auto", **options(name, "on disk"))
    assert_equal(from_step(expected, 4), loop.train().close())
    assert len(list(disk.iterdir())) == 1


def test_gradients_between_several_optimizers_wait_for_the_last(disk: Path) -> None:
    def make(resume: Any) -> tuple[Any, list[AdamW]]:
        seed(0)
        net = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24))
        config = {"disk": {"paths": [str(disk)]}, "durability": {"mode": "step"}, "policy": {"units": ["*"]}}
        model = tiermem.TieredModule(net, config, resume=resume)
        return model, [AdamW(net[0].parameters(), lr=1e-2), AdamW(net[2].parameters(), lr=1e-3)]

    def step(model: Any, optimizers: list[AdamW]) -> None:
        model(torch.ones(2, 24)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()

    model, optimizers = make(None)
    step(model, optimizers)
    model(torch.ones(2, 24)).square().sum().backward()
    optimizers[0].step()
    assert model.stats()["commits"]["committed_step"] == 2  # of 3: the second one's gradients would be lost
    optimizers[1].step()
    assert model.stats()["commits"]["committed_step"] == 4
    model.zero_grad()
    step(model, optimizers)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model.close()
    model, optimizers = make("auto")
    assert model.num_steps == 6
    assert [group["lr"] for each in optimizers for group in each.param_groups] == [1e-2, 1e-3]
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    model.close()


# -- folders ------------------------------------------------------------------------------------------------


def test_a_durable_runs_folder_stays_and_is_private(disk: Path) -> None:
    Loop(BY_NAME["odd-mlp"], disk).train(1).model.close()
    (folder,) = disk.iterdir()
    assert folder.name.startswith(DURABLE)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    names = {path.name for path in folder.iterdir()}
    assert names == {"pages.bin", "run.json", f"{COMMIT}0", f"{COMMIT}1"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    Loop(BY_NAME["odd-mlp"], disk).train(2).model.close()  # resume=None: a run of its own
    assert len(list(disk.iterdir())) == 2
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    resumed = Loop(BY_NAME["odd-mlp"], disk, resume="auto")
    assert resumed.step == 2  # the newest
    resumed.model.close()
    resumed = Loop(BY_NAME["odd-mlp"], disk, resume=folder)
    assert resumed.step == 1
    resumed.model.close()


def test_a_run_that_committed_nothing_leaves_nothing(disk: Path) -> None:
    loop = Loop(BY_NAME["odd-mlp"], disk)
    crashed = crash(loop, disk, disk.parent / f"{disk.name}-left")
    try:
        loop.model.close()
        assert list(disk.iterdir()) == []
        loop = Loop(BY_NAME["odd-mlp"], crashed, resume="auto")
        assert loop.step == 0
        loop.model.close()
        assert list(crashed.iterdir()) == []
    finally:
        shutil.rmtree(crashed)


def test_a_run_in_use_is_refused(disk: Path) -> None:
    loop = Loop(BY_NAME["odd-mlp"], disk).train(1)
    path = next(disk.iterdir())
    with pytest.raises(tiermem.ConfigError, match="in use by a process that lives"):
        Loop(BY_NAME["odd-mlp"], disk, resume="auto")
    with pytest.raises(tiermem.ConfigError, match="in use by a run that lives"):
        Loop(BY_NAME["odd-mlp"], disk, resume=path)
    other = Loop(BY_NAME["gpt"], disk, resume="auto")  # of another model: nothing to do with it
    other.model.close()
    loop.model.close()
    with pytest.raises(tiermem.ConfigError, match="can't be opened as a run folder"):
        Loop(BY_NAME["odd-mlp"], disk, resume=disk / "missing")
    with pytest.raises(tiermem.ConfigError, match="is no durable run's folder"):
        Loop(BY_NAME["odd-mlp"], disk, resume=disk)


def test_another_model_is_refused_with_all_differences(disk: Path) -> None:
    def wrap(net: nn.Module, resume: Any) -> tiermem.TieredModule:
        config = {"disk": {"paths": [str(disk)]}, "durability": {"mode": "manual"}}
        return tiermem.TieredModule(net, config, resume=resume)

    model = wrap(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)), None)
    model.commit()
    model.close()
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 9), nn.Linear(8, 2, bias=False), nn.Linear(2, 2))
    net[0].weight.requires_grad_(False)
    weight = net[1].weight.detach().clone()
    with pytest.raises(tiermem.ConfigError) as info:
        wrap(net, "auto")
    text = str(info.value)
    for said in (
        "0.weight has trainable False, and True was committed",
        "1.weight has size [9, 8], and [8, 8] was committed",
        "1.bias has size [9], and [8] was committed",
        "2.bias [2] was committed, and the model doesn't have it",
        "3.weight [2, 2] is in the model, and wasn't committed",
    ):
        assert said in text
    assert torch.equal(net[1].weight, weight)
    assert len(list(disk.iterdir())) == 1


@pytest.mark.parametrize("what", ["mode", "owner", "link", "foreign file"])
def test_what_isnt_ours_alone_isnt_resumed(what: str, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Loop(BY_NAME["odd-mlp"], disk).train(1).model.close()
    (folder,) = disk.iterdir()
    if what == "mode":
        folder.chmod(0o770)
        match = "has mode 0770"
    elif what == "owner":
        match = "belongs to user"
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
    elif what == "link":
        moved = folder.rename(disk / "elsewhere")
        folder.symlink_to(moved)
        match = "links are not followed"
    else:
        (folder / "run.json").rename(disk / "run.json")
        (folder / "run.json").symlink_to(disk / "run.json")
        match = "run.json: is a link, and links are not followed"
    with pytest.raises(tiermem.ConfigError, match=match):
        Loop(BY_NAME["odd-mlp"], disk, resume=folder)


def test_a_lost_disk_is_reported_with_what_it_held(disk: Path) -> None:
    name = "odd-mlp"
    expected = uninterrupted(name)
    paths = {"disk": {"paths": [str(disk / "a"), str(disk / "b")]}}
    Loop(BY_NAME[name], disk, **paths).train(2).model.close()
    (lost,) = (disk / "b").iterdir()
    kept = lost.rename(disk / "away")
    with pytest.raises(
        tiermem.ConfigError, match=r"No such file or directory; it held [\d,]+ bytes of .* \(of "
    ):
        Loop(BY_NAME[name], disk, resume="auto", **paths)
    kept.rename(lost)
    resumed = Loop(BY_NAME[name], disk, resume="auto", **paths)
    assert_equal(from_step(expected, 2), resumed.train().close())


# -- what belongs to the state --------------------------------------------------------------------------------


def test_registered_objects_must_come_back(disk: Path) -> None:
    Loop(BY_NAME["odd-mlp"], disk).train(1).model.close()
    loop = Loop(BY_NAME["odd-mlp"], disk, resume="auto", register=False)
    with pytest.raises(tiermem.PagingError, match=r"\['data', 'scheduler'\], and nothing is registered"):
        loop.one()
    loop.model.unregister("data")
    loop.model.unregister("scheduler")
    loop.one()
    loop.model.close()


def test_what_cant_be_registered_is_refused(disk: Path) -> None:
    class Odd:
        def state_dict(self) -> Any:
            return {"path": Path("/")}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError("never")

    loop = Loop(BY_NAME["odd-mlp"], disk)
    with pytest.raises(
        tiermem.ConfigError, match=r"'n' is a int, which has no state_dict and no load_state_dict"
    ):
        loop.model.register("n", 3)
    with pytest.raises(tiermem.ConfigError, match="'data' is taken"):
        loop.model.register("data", loop.data)
    with pytest.raises(tiermem.PagingError, match="the state of 'odd' can't be committed"):
        loop.model.register("odd", Odd())
    with pytest.raises(tiermem.PagingError, match="this model's optimizer"):
        loop.model.register("optimizer", loop.optimizer)
    with pytest.raises(tiermem.ConfigError, match="there is no 'x'"):
        loop.model.unregister("x")
    before = type(loop.scheduler)
    loop.model.close()
    assert type(loop.scheduler) is before.__mro__[1] is torch.optim.lr_scheduler.CosineAnnealingLR


def test_a_loss_scaler_belongs_to_its_step(disk: Path) -> None:
    def make(resume: Any) -> tuple[Any, AdamW, torch.amp.GradScaler]:
        config = {"disk": {"paths": [str(disk)]}, "durability": {"mode": "step"}}
        model = tiermem.TieredModule(nn.Linear(8, 8), config, resume=resume)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        model.register("scaler", scaler)
        return model, AdamW(model.parameters(), lr=1e-3), scaler

    model, optimizer, scaler = make(None)
    for _ in range(3):
        scaler.scale(model(torch.ones(1, 8)).sum()).backward()
        scaler.step(optimizer)
        assert model.stats()["commits"]["committed_step"] == (model.num_steps - 1 or None)
        scaler.update()
        assert model.stats()["commits"]["committed_step"] == model.num_steps
        optimizer.zero_grad()
    model.close()
    model, optimizer, again = make("auto")
    assert again.get_scale() == scaler.get_scale() == 32.0
    model.close()


def test_other_parameter_groups_are_refused(disk: Path) -> None:
    Loop(BY_NAME["odd-mlp"], disk).train(1).model.close()
    config = {"disk": {"paths": [str(disk)]}, "durability": {"mode": "step"}}
    refused = pytest.raises(tiermem.ConfigError, match="the optimizer has a parameter group of")
    with tiermem.TieredModule(BY_NAME["odd-mlp"].build(), config, resume="auto") as model, refused:
        AdamW(model.parameters())


def test_an_optimizer_made_before_wrapping_takes_over(disk: Path) -> None:
    def run(resume: Any, steps: int) -> dict[str, torch.Tensor]:
        seed(0)
        net = nn.Linear(16, 16)
        optimizer = AdamW(net.parameters(), lr=1e-2 if resume is None else 1.0)
        config = {"disk": {"paths": [str(disk)]}, "durability": {"mode": "step"}}
        with tiermem.TieredModule(net, config, resume=resume) as model:
            while model.num_steps < steps:
                model(torch.ones(2, 16)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return {name: value.clone() for name, value in model.state_dict().items()}

    run(None, 2)
    resumed = run("auto", 5)
    expected = run(None, 5)
    assert all(torch.equal(value, expected[name]) for name, value in resumed.items())


def test_a_step_that_was_broken_off_is_never_committed(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = uninterrupted("gpt")
    loop = Loop(BY_NAME["gpt"], disk).train(2)
    calls = iter(range(99))
    update = loop.optimizer.kernel.update

    def failing(**arguments: Any) -> None:
        if next(calls) == 3:
            raise KeyboardInterrupt
        update(**arguments)

    monkeypatch.setattr(loop.optimizer.kernel, "update", failing)
    with pytest.raises(KeyboardInterrupt):
        loop.one()
    loop.optimizer.zero_grad()
    with pytest.raises(tiermem.PagingError, match="a step after step 2 was broken off half way"):
        loop.one()
    with pytest.raises(tiermem.PagingError, match="broken off"):
        loop.model.commit()
    loop.model.close()
    resumed = Loop(BY_NAME["gpt"], disk, resume="auto")
    assert resumed.step == 2
    assert_equal(from_step(expected, 2), resumed.train().close())


def test_a_frozen_page_that_a_user_writes_doesnt_touch_its_commit(disk: Path) -> None:
    loop = Loop(BY_NAME["gpt-frozen"], disk / "run", **options("gpt-frozen", "on disk")).train(2)
    values = {name: value.clone() for name, value in loop.model.state_dict().items()}
    with torch.no_grad():
        loop.model.wte.weight.add_(1.0)
    with loop.model._runtime.door:
        loop.model._runtime.pager.flush()
    left = crash(loop, disk / "run", disk / "left")
    loop.one()
    changed = loop.model.wte.weight.detach().clone()
    loop.model.close()
    resumed = Loop(BY_NAME["gpt-frozen"], left, resume="auto", **options("gpt-frozen", "on disk"))
    assert all(torch.equal(value, values[name]) for name, value in resumed.model.state_dict().items())
    resumed.model.close()
    resumed = Loop(BY_NAME["gpt-frozen"], disk / "run", resume="auto", **options("gpt-frozen", "on disk"))
    assert torch.equal(resumed.model.wte.weight, changed)
    resumed.model.close()


def test_a_resume_without_durability_is_refused(disk: Path) -> None:
    with pytest.raises(tiermem.ConfigError, match=r'durability.mode = "off"'):
        tiermem.TieredModule(nn.Linear(2, 2), {"disk": {"paths": [str(disk)]}}, resume="auto")
    with pytest.raises(tiermem.ConfigError, match=r"disk.keep: read true with durability.mode"):
        tiermem.Config.load({"disk": {"keep": True}, "durability": {"mode": "step"}})
    with (
        tiermem.TieredModule(nn.Linear(2, 2)) as model,
        pytest.raises(tiermem.PagingError, match="nothing to commit"),
    ):
        model.commit()


def test_the_space_of_commits_is_known_beforehand(disk: Path) -> None:
    def wrap(budget: int, commits: int) -> tiermem.TieredModule:
        config = {
            "disk": {"paths": [str(disk)], "budget": budget},
            "durability": {"mode": "step", "commits": commits},
        }
        return tiermem.TieredModule(nn.Linear(64, 64), config)

    smallest = []
    for commits in (1, 2, 3):
        with pytest.raises(tiermem.BudgetError) as refusal:
            wrap(4096, commits)
        smallest.append(refusal.value.smallest)
        model = wrap(refusal.value.smallest or 0, commits)
        assert model._runtime.disk is not None
        assert os.stat(model._runtime.disk.files[0].path).st_size == smallest[-1]
        model.close()
    each = smallest[1] - smallest[0]  # parameters and two moments
    assert smallest[2] - smallest[1] == each
    assert smallest[0] == 2 * each + each // 3  # and gradients, which are no part of it
    assert list(disk.iterdir()) == []


def test_what_the_folder_says_of_itself(disk: Path) -> None:
    Loop(BY_NAME["odd-mlp"], disk).train(1).model.close()
    (folder,) = disk.iterdir()
    read = json.loads((folder / "run.json").read_text())
    assert read["folders"] == [str(folder)]
    assert {each["name"] for each in read["layout"]["tensors"]} == {
        name for name, _ in BY_NAME["odd-mlp"].build().named_parameters()
    }
    assert not any(path.name.startswith(PREFIX) for path in disk.iterdir())
