"""Runs that end badly: Ctrl-C at many moments of a step, SIGKILL in the middle of one, and forks beside one."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tiermem
from tiermem.device import StandInDevice
from tiermem.folder import PREFIX, RunFolder
from tiermem.trainer import AdamW

ROOT = Path(__file__).parent.parent
WIDTH = 32
OURS = tuple(str(Path(package.__file__ or "").parent) for package in (tiermem, torch))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)
    )


def wrap(net: nn.Module, folder: Path, separate: bool = False) -> tiermem.TieredModule:
    config: dict[str, Any] = {
        "host": {"budget": "40KiB"},
        "disk": {"paths": [str(folder)]},
        "policy": {"units": ["*"]},
    }
    if separate:
        config["device"] = {"budget": "12KiB"}
    return tiermem.TieredModule(net, config, device=StandInDevice() if separate else None)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    loss = model(x).square().sum()
    loss.backward()
    model.clip_grad_norm_(1.0)  # type: ignore[operator]
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


class Striker:
    """Sends this process SIGINT when the code of tiermem and torch in the main thread has come to its n-th line."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.lines = 0
        self.struck: str | None = None

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self.line if frame.f_code.co_filename.startswith(OURS) else None

    def line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                self.struck = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
                signal.raise_signal(signal.SIGINT)
        return self.line

    def __enter__(self) -> Striker:
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


@pytest.fixture
def quiet_collector() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


MOMENTS = 45


@pytest.mark.parametrize("separate", [False, True])
def test_ctrl_c_at_many_moments_of_a_step(separate: bool, tmp_path: Path, quiet_collector: None) -> None:
    x = torch.randn(4, WIDTH)
    net = network()
    model = wrap(net, tmp_path, separate)
    runtime = model._runtime
    optimizer = AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, x)
    train(model, optimizer, x)
    with Striker(-1) as whole:
        train(model, optimizer, x)
    assert whole.lines > 1000
    struck = set()
    for n in range(MOMENTS):
        striker = Striker(1 + n * whole.lines // MOMENTS + n % 7)
        try:
            with striker:
                train(model, optimizer, x)
        except KeyboardInterrupt:
            struck.add(striker.struck)
        else:
            # A step has fewer lines when pages are where they are wanted; but nothing swallows a strike.
            assert striker.struck is None, striker.struck
        runtime.check()
        runtime.hooks.unwind()
        with runtime.door:
            runtime.hooks.release_resident()
        optimizer.zero_grad()
        gc.collect()
        assert [page for page in runtime.table if page.pins] == [], striker.struck
        assert torch.is_grad_enabled(), striker.struck
        runtime.check()
        loss = train(model, optimizer, x)
        assert loss == loss
        assert torch._C._autograd._saved_tensors_hooks_is_enabled()
    assert len(struck) > MOMENTS // 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model.close()
    assert list(tmp_path.iterdir()) == []
    for name, value in net.state_dict().items():
        assert torch.equal(value, expected[name])
    # Ordinary again: no hook of ours is left in the way of another module.
    assert not any("tiermem" in thread.name for thread in threading.enumerate())
    net(x).sum().backward()


def test_ctrl_c_in_forward_costs_nothing(tmp_path: Path, quiet_collector: None) -> None:
    x = torch.randn(4, WIDTH)
    plain, net = network(), network()
    model = wrap(net, tmp_path)
    ours, theirs = AdamW(model.parameters(), lr=1e-3), AdamW(plain.parameters(), lr=1e-3)
    with Striker(-1) as whole:
        model(x)
    struck = 0
    for n in range(12):
        try:
            with Striker(1 + n * whole.lines // 12):
                model(x)
        except KeyboardInterrupt:
            struck += 1
        model._runtime.check()
        loss, expected = model(x).square().sum(), plain(x).square().sum()
        assert torch.equal(loss, expected)
        for optimizer, each in ((ours, loss), (theirs, expected)):
            each.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert struck > 4
    model.close()
    for mine, yours in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, yours)


def by_itself(net: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = net(x)
    return y


def by_hand(net: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    for module in net:
        x = module(x)
    return x


def offloaded(net: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """In a context for autograd's saved tensors of the user's own."""
    with torch.autograd.graph.save_on_cpu():
        y: torch.Tensor = net(x)
        return y


@pytest.mark.parametrize("then", [by_itself, offloaded, by_hand])
@pytest.mark.parametrize("call", [by_itself, offloaded, by_hand])
def test_what_ctrl_c_left_of_the_modules_own_call_is_undone_by_the_next(
    call: Any, then: Any, tmp_path: Path, quiet_collector: None
) -> None:
    x = torch.randn(4, WIDTH)
    plain, net = network(), network()
    model = wrap(net, tmp_path)
    hooks = model._runtime.hooks
    ours, theirs = AdamW(model.parameters(), lr=1e-3), AdamW(plain.parameters(), lr=1e-3)
    with Striker(-1) as whole:
        call(net, x)
    struck = 0
    for n in range(10):
        try:
            with Striker(1 + n * whole.lines // 10):
                call(net, x)
        except KeyboardInterrupt:
            struck += 1
        model._runtime.check()
        loss, expected = then(net, x).square().sum(), plain(x).square().sum()
        assert torch.equal(loss, expected)
        assert not hooks._calls.mine
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        for optimizer, each in ((ours, loss), (theirs, expected)):
            each.backward()
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        model._runtime.check()
        assert [page for page in model._runtime.table if page.pins] == []
    assert struck > 5
    model.close()
    for mine, yours in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, yours)


def test_what_ctrl_c_left_is_undone_by_zero_grad_too(tmp_path: Path) -> None:
    net = network()
    model = wrap(net, tmp_path)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = net[2].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        net(torch.randn(4, WIDTH))
    assert any(page.pins for page in model._runtime.table)
    model.zero_grad()
    assert [page for page in model._runtime.table if page.pins] == []
    handle.remove()
    model.close()


def test_ctrl_c_while_wrapping_costs_no_parameter(tmp_path: Path, quiet_collector: None) -> None:
    values = network().state_dict()
    with Striker(-1) as whole:
        model = wrap(network(), tmp_path)
    model.close()
    struck = 0
    for n in range(25):
        net = network()
        try:
            with Striker(1 + n * whole.lines // 25):
                model = wrap(net, tmp_path)
        except KeyboardInterrupt:
            struck += 1
        else:
            model.close()
        gc.collect()
        if all(type(parameter) is nn.Parameter for parameter in net.parameters()):
            for name, value in net.state_dict().items():
                assert torch.equal(value, values[name]), (n, name)
        else:
            raise AssertionError(f"a wrap that was broken off at moment {n} left paged parameters")
    assert struck > 10
    for folder in tmp_path.iterdir():  # a folder may be left only unlocked: the next run takes it away
        assert folder.name.startswith(PREFIX)
    RunFolder(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_closing_costs_no_parameter(tmp_path: Path, quiet_collector: None) -> None:
    x = torch.randn(4, WIDTH)
    struck = 0
    for n in range(20):
        net = network()
        model = wrap(net, tmp_path)
        train(model, AdamW(model.parameters(), lr=1e-3), x)
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        try:
            with Striker(20 + n * 50):
                model.close()
        except KeyboardInterrupt:
            struck += 1
            model.close()
        for name, value in net.state_dict().items():
            assert torch.equal(value, expected[name]), (n, name)
        assert all(type(parameter) is nn.Parameter for parameter in net.parameters())
        assert list(tmp_path.iterdir()) == []
    assert struck > 5


CHILD = """
import sys, torch
sys.path.insert(0, {root!r})
from tests.test_crash import network, train, wrap
from tiermem.trainer import AdamW
from pathlib import Path
model = wrap(network(), Path(sys.argv[1]))
optimizer = AdamW(model.parameters(), lr=1e-3)
train(model, optimizer, torch.randn(4, 32))
{then}
"""


def child(folder: Path, then: str) -> subprocess.CompletedProcess[str]:
    code = CHILD.format(root=str(ROOT), then=then)
    return subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_a_killed_runs_folder_is_taken_away_by_the_next(tmp_path: Path) -> None:
    kill = (
        "import os\n"
        "model.module[2].register_forward_hook(lambda *_: os.kill(os.getpid(), 9))\n"
        "model(torch.randn(4, 32))\n"
    )
    ended = child(tmp_path, kill)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(PREFIX)
    model = wrap(network(), tmp_path)
    assert not left.exists()
    assert any(f"removed {left.name}" in note for note in model._runtime.notes)
    model.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("then", ["", "raise SystemExit(0)", "del model, optimizer; import gc; gc.collect()"])
def test_a_process_that_just_ends_leaves_nothing(tmp_path: Path, then: str) -> None:
    ended = child(tmp_path, then)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_a_childs_end_leaves_its_parents_run(tmp_path: Path) -> None:
    then = (
        "import os\n"
        "pid = os.fork()\n"
        "if pid == 0: sys.exit(0)\n"  # its exit functions run
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "assert len(list(Path(sys.argv[1]).iterdir())) == 1\n"
        "train(model, optimizer, torch.randn(4, 32))\n"
        "model.close()\n"
    )
    ended = child(tmp_path, then)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_data_loaders_workers_beside_training(tmp_path: Path) -> None:
    inputs = torch.randn(24, WIDTH)
    model, plain = wrap(network(), tmp_path), network()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    other = AdamW(plain.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(inputs), batch_size=4, num_workers=2, multiprocessing_context="fork")
    for (x,) in loader:
        loss = train(model, optimizer, x)
        expected = plain(x).square().sum()
        expected.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        other.step()
        other.zero_grad()
        assert loss == expected.item()
    model._runtime.check()
    model.close()
    assert list(tmp_path.iterdir()) == []


DEADLOCK = """
import faulthandler, gc, os, sys, threading
faulthandler.dump_traceback_later(10, exit=True)
import torch, tiermem, tiermem.runtime
from torch import nn
from tiermem.aio.threads import ThreadQueue

armed = False

def preadv(fd, views, offset):
    global armed
    if armed:
        armed = False
        gc.collect()  # as any allocation may
    return os.preadv(fd, views, offset)

gc.disable()
tiermem.runtime.open_queue = lambda engine, request, depth: ThreadQueue(request, depth, preadv=preadv)
net = nn.Sequential(*[nn.Linear(128, 128) for _ in range(6)])
policy = {"units": ["*"], "prefetch": "none"}
config = {"host": {"budget": "352KiB"}, "disk": {"paths": [sys.argv[1]]}, "policy": policy}
model = tiermem.TieredModule(net, config)
x = torch.randn(2, 128)
model(x)
cycle = [net[0].weight.t()]
cycle.append(cycle)
del cycle
armed = True
model(x)
model(x)
assert not armed
model.close()
"""


def test_a_view_may_die_in_a_thread_that_the_door_waits_for(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", DEADLOCK, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
