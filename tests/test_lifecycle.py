"""Optimizers and models that outlive each other: nothing is lost in silence, nothing crashes."""

import copy
import gc
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from tiermem.aio.memory import Memory
from tiermem.device import StandInDevice
from tiermem.trainer import AdamW

CONFIG: dict[str, Any] = {"device": {"kind": "cpu"}, "host": {"budget": "1MiB"}}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_step_after_close_is_refused_and_changes_nothing() -> None:
    net = network()
    model = tiermem.TieredModule(net, CONFIG)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(2, 64)).sum().backward()
    model.close()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(tiermem.PagingError, match="closed"):
        optimizer.step()
    with pytest.raises(tiermem.PagingError, match="state_dict"):
        optimizer.state_dict()
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in net.parameters())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("steps_before", [0, 2])
def test_an_optimizer_made_before_wrapping_goes_on(steps_before: int) -> None:
    plain, net = network(), network()
    reference, optimizer = AdamW(plain.parameters(), lr=1e-2), AdamW(net.parameters(), lr=1e-2)
    for _ in range(steps_before):
        step(plain, reference)
        step(net, optimizer)
    with tiermem.TieredModule(net, CONFIG) as model:
        for _ in range(3):
            step(plain, reference)
            step(model, optimizer)
        expected, state = reference.state_dict()["state"], optimizer.state_dict()["state"]
        for number in expected:
            assert all(torch.equal(expected[number][name], state[number][name]) for name in expected[number])
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), net.parameters(), strict=True))


def test_a_wrapper_that_is_dropped_gives_the_parameters_back_and_says_so(tmp_path: Path) -> None:
    net, values = network(), network().state_dict()
    config = CONFIG | {"host": {"budget": "200KiB"}, "disk": {"paths": [str(tmp_path)]}}
    model = tiermem.TieredModule(net, config)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        del model
        gc.collect()
    assert any(warning.category is ResourceWarning for warning in said)
    assert all(torch.equal(value, values[name]) for name, value in net.state_dict().items())
    assert list(tmp_path.iterdir()) == []


def test_copies_of_the_wrapped_module_are_refused_in_words() -> None:
    net = network()
    with tiermem.TieredModule(net, CONFIG):
        with pytest.raises(tiermem.PagingError, match="copied"):
            copy.deepcopy(net)
        with pytest.raises(tiermem.PagingError, match="pickled"):
            pickle.dumps(net)
    assert torch.equal(copy.deepcopy(net)[0].weight, net[0].weight)


def test_the_disk_budget_that_a_refusal_names_is_enough(tmp_path: Path) -> None:
    def wrap(budget: int) -> None:
        config = CONFIG | {"host": {"budget": "200KiB"}, "disk": {"paths": [str(tmp_path)], "budget": budget}}
        with tiermem.TieredModule(network(), config) as model:
            step(model, AdamW(model.parameters()))

    with pytest.raises(tiermem.BudgetError) as refusal:
        wrap(4096)
    assert refusal.value.smallest is not None
    wrap(refusal.value.smallest)


@pytest.mark.parametrize("what", ["a string", torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2)])
def test_what_can_t_be_paged_is_refused(what: Any) -> None:
    if isinstance(what, nn.Linear):
        what.weight = nn.Parameter(torch.randn(2, 4)[:, ::2])
    with pytest.raises(tiermem.ConfigError):
        tiermem.TieredModule(what, CONFIG)


def test_what_a_device_of_its_own_can_t_keep_is_refused() -> None:
    config = {"placement": {"gradients": "device"}, "host": {"budget": "1MiB"}, "device": {"budget": "1MiB"}}
    with pytest.raises(tiermem.ConfigError, match=r"placement.gradients.*allowed"):
        tiermem.TieredModule(network(), config, device=StandInDevice())


def test_a_budget_beyond_the_machine_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiermem.runtime.look", lambda: Memory(2000, 1000, None, None))
    with tiermem.TieredModule(network(), CONFIG):
        pass
    assert "host.budget allows 1.00 MiB" in caplog.text
    assert "1000 B of memory are available" in caplog.text


@pytest.mark.parametrize(
    ("limit", "words"),
    [(None, "this machine has 64.00 MiB"), (48 << 20, "this process's cgroup may have 48.00 MiB")],
)
def test_a_budget_that_bounds_nothing_is_said(
    limit: int | None, words: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiermem.runtime.look", lambda: Memory(64 << 20, 40 << 20, limit, limit))
    monkeypatch.setattr("tiermem.runtime.available_nbytes", lambda: 40 << 20)
    for budget, said in (("1MiB", False), ("100%", False), ("65MiB", True)):
        caplog.clear()
        with tiermem.TieredModule(network(), CONFIG | {"host": {"budget": budget}}):
            assert bool(caplog.text) is said, caplog.text
    assert "host.budget is 65.00 MiB" in caplog.text
    assert words in caplog.text


def test_a_device_budget_without_a_device_of_its_own_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = {"device": {"budget": "20GiB"}, "host": {"budget": "1MiB"}}
    with tiermem.TieredModule(network(), config):
        pass
    assert "device.budget: 20GiB is not used: cpu is the device here" in caplog.text
    assert "host.budget, 1.00 MiB" in caplog.text
    caplog.clear()
    with tiermem.TieredModule(network(), {"device": {"kind": "auto"}, "host": {"budget": "1MiB"}}):
        pass
    with tiermem.TieredModule(
        network(), {"device": {"budget": "1MiB"}, "host": {"budget": "1MiB"}}, device=StandInDevice()
    ):
        pass
    assert caplog.text == ""
