"""Every I/O of a training step failed in turn: the error is told, nothing leaks, and training goes on bit by bit."""

from __future__ import annotations

import errno
import faulthandler
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from tiermem.aio import FaultyQueue, Queue, open_queue
from tiermem.aio.threads import ThreadQueue
from tiermem.device import StandInDevice
from tiermem.errors import TransferError
from tiermem.runtime import Runtime
from tiermem.trainer import AdamW

ROOT = Path(__file__).parent.parent
WIDTH = 48


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    faulthandler.dump_traceback_later(120, exit=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # the many collections below look at what is new only
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)
    faulthandler.cancel_dump_traceback_later()


def open_things() -> tuple[set[str], set[str]]:
    """Descriptors (by what they are of) and threads of this process."""
    gc.collect()
    fds = {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.islink(f"/proc/self/fd/{fd}")
    }
    return fds, {thread.name for thread in threading.enumerate()}


@pytest.fixture(autouse=True)
def nothing_left(no_hang: None, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    before = open_things()
    yield
    fds, threads = open_things()
    assert {fd for fd in fds - before[0] if "tiermem" in fd or str(tmp_path) in fd or "anon" in fd} == set()
    assert {name for name in threads - before[1] if "tiermem" in name} == set()
    assert list(tmp_path.iterdir()) == []


class Faults:
    """What fails: the ``k``-th transfer after :meth:`arm`, or none."""

    def __init__(self) -> None:
        self.queue: FaultyQueue | None = None
        self.index = -1
        self.what: int | str = errno.EIO
        self.num_injected = 0
        self.start = 0

    def arm(self, k: int, what: int | str) -> None:
        self.start = self.queue.num_submitted if self.queue is not None else 0
        self.index, self.what = self.start + k if k >= 0 else -1, what

    def disarm(self) -> None:
        self.index = -1

    @property
    def num_since(self) -> int:
        assert self.queue is not None
        return self.queue.num_submitted - self.start

    def __call__(self, index: int, op: str) -> Any:
        if index == self.index:
            self.num_injected += 1
            return self.what
        return None


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    faults = Faults()

    def faulty(*args: Any) -> Queue:
        faults.queue = FaultyQueue(open_queue(*args), faults)
        return faults.queue

    monkeypatch.setattr("tiermem.runtime.open_queue", faulty)
    return faults


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 8))


class Run:
    """A small model under a tight budget, and its training."""

    def __init__(
        self, folder: Path, dtype: str = "float32", separate: bool = False, net: nn.Module | None = None
    ) -> None:
        self.net = net or network()
        config: dict[str, Any] = {
            "host": {"budget": "64KiB"},
            "disk": {"paths": [str(folder)]},
            "precision": {"parameters": dtype},
            "policy": {"units": ["*"]},
        }
        if separate:
            config["device"] = {"budget": "24KiB"}
        self.dtype = getattr(torch, dtype)
        self.model = tiermem.TieredModule(self.net, config, device=StandInDevice() if separate else None)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-2)
        self.data = torch.Generator().manual_seed(1)
        self.losses: list[float] = []

    @property
    def runtime(self) -> Runtime:
        return self.model._runtime

    def draw(self) -> torch.Tensor:
        return torch.randn(4, WIDTH, generator=self.data).to(self.dtype)

    def gradients(self, x: torch.Tensor) -> None:
        loss = self.model(x).float().square().sum()
        loss.backward()
        self.losses.append(loss.item())
        self.model.clip_grad_norm_(1.0)

    def step(self) -> None:
        self.gradients(self.draw())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def check(self) -> None:
        """The books balance, with no pin left of what was broken off."""
        self.runtime.check()
        self.runtime.hooks.unwind()
        with self.runtime.door:
            self.runtime.hooks.release_resident()
            self.runtime.pager.transfers.drain()
        gc.collect()
        assert [page for page in self.runtime.table if page.pins] == []
        assert not self.runtime.pager.room.held
        self.runtime.check()

    def paths(self) -> list[str]:
        disk = self.runtime.disk
        return [str(file.path) for file in disk.files] if disk is not None else []

    def close(self) -> dict[str, torch.Tensor]:
        self.model.close()
        return {name: value.clone() for name, value in self.net.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


CASES = {"float32": {}, "bfloat16": {"dtype": "bfloat16"}, "three tiers": {"separate": True}}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> dict[str, Any]:
    return CASES[request.param]


def told(error: TransferError, run: Run) -> None:
    assert error.path in run.paths()
    told_by(error)


def told_by(error: TransferError) -> None:
    """The error names the page and the path."""
    assert "page of unit" in error.page
    assert error.path is not None
    assert error.path in str(error)
    assert error.page in str(error)
    assert error.errno in (errno.EIO, errno.ENOSPC)


@pytest.mark.parametrize("what", [errno.EIO, errno.ENOSPC, "short"])
def test_every_transfer_of_a_step(
    case: dict[str, Any], what: int | str, faults: Faults, tmp_path: Path
) -> None:
    clean = Run(tmp_path, **case)
    clean.step()
    clean.step()
    faults.arm(-1, what)
    clean.step()
    count = faults.num_since
    clean.step()
    expected = clean.close()
    assert count > 10

    # A transfer's index may mean another one from run to run (polling takes them as they land), never none.
    outcomes = {"forward or backward": 0, "optimizer": 0, "later": 0}
    for k in range(0, count, 1 if what == errno.EIO else 5):
        run = Run(tmp_path, **case)
        run.step()
        run.step()
        before = faults.num_injected
        faults.arm(k, what)
        x, at = run.draw(), "later"
        try:
            at = "forward or backward"
            run.gradients(x)
            at = "optimizer"
            run.optimizer.step()
            run.optimizer.zero_grad()
            at = "later"
        except TransferError as error:
            told(error, run)
            assert run.model.stats()["failed_transfers"] == 1
        run.check()
        outcomes[at] += 1
        faults.disarm()  # this run may have had fewer
        run.optimizer.zero_grad()
        if at == "forward or backward":
            del run.losses[2:]
            run.gradients(x)
            run.optimizer.step()
            run.optimizer.zero_grad()
        y = run.draw()
        for _ in range(2):
            updating = False
            try:
                run.gradients(y)
                updating = True
                run.optimizer.step()
                break
            except TransferError as error:
                # What nobody has waited for is told at the next access: a writeback's at once, a page's that was
                # fetched ahead when it is needed, which may be in the update.
                assert at == "later"
                at = "optimizer" if updating else "later forward or backward"
                told(error, run)
                run.check()
                run.optimizer.zero_grad()
                del run.losses[3:]
        run.optimizer.zero_grad()
        assert run.model.stats()["failed_transfers"] == faults.num_injected - before
        run.check()
        final = run.close()
        if at != "optimizer":
            assert run.losses == clean.losses, (k, at)
            assert same(final, expected), (k, at)
        else:
            assert all(bool(value.isfinite().all()) for value in final.values())
    assert outcomes["forward or backward"]
    assert outcomes["optimizer"]


def test_every_transfer_of_the_wrapping(case: dict[str, Any], faults: Faults, tmp_path: Path) -> None:
    values = {name: value.clone() for name, value in network().state_dict().items()}
    Run(tmp_path, **case).close()
    faults.arm(-1, errno.EIO)
    Run(tmp_path, **case).close()
    assert faults.queue is not None
    count = faults.queue.num_submitted
    assert count >= 3
    raised = 0
    for k in range(count):
        net = network()
        net[0].weight.grad = torch.ones(WIDTH, WIDTH)
        faults.queue = None
        faults.arm(k, errno.EIO)
        before = faults.num_injected
        try:
            run = Run(tmp_path, net=net, **case)
        except TransferError as error:
            told_by(error)
            raised += not list(tmp_path.iterdir())
        else:
            # Told at the first access after it.
            faults.disarm()
            with run.runtime.door:
                run.runtime.pager.transfers.drain()
            failures = run.model.stats()["failed_transfers"]
            assert failures == faults.num_injected - before
            if failures:
                with pytest.raises(TransferError):
                    run.gradients(run.draw())
            run.check()
            run.model.close()
        faults.disarm()
        # Whatever happened: an ordinary module with its own numbers, which can be trained, and wrapped again.
        assert all(type(parameter) is nn.Parameter for parameter in net.parameters())
        dtype = next(net.parameters()).dtype
        for name, value in net.state_dict().items():
            assert torch.equal(value, values[name].to(dtype)), (k, name)
        assert net[0].weight.grad is not None
        assert bool((net[0].weight.grad == 1).all())
        assert not net._forward_pre_hooks
        net.zero_grad()
        net(torch.randn(2, WIDTH, dtype=dtype)).sum().backward()
        net.zero_grad()
        again = Run(tmp_path, net=net, **case)
        again.step()
        again.close()
    assert raised


def test_every_transfer_of_closing(case: dict[str, Any], faults: Faults, tmp_path: Path) -> None:
    clean = Run(tmp_path, **case)
    clean.step()
    clean.gradients(clean.draw())
    faults.arm(-1, errno.EIO)
    expected = clean.close()
    count = faults.num_since
    assert count >= 1  # of the pages that are given back; the rest is forgotten
    injected = 0
    for k in range(count):
        run = Run(tmp_path, **case)
        run.step()
        run.gradients(run.draw())
        faults.arm(k, errno.EIO)
        before = faults.num_injected
        try:
            run.model.close()
        except TransferError as error:
            told_by(error)
            faults.disarm()
            assert not run.runtime.closed, "parameters are lost"
            run.model.close()  # the disk works again
        # What the plan had fetched by then needs no transfer any more: this run may have had fewer than the first.
        injected += faults.num_injected - before
        faults.disarm()
        assert same(run.net.state_dict(), expected), k
    assert injected


def test_a_writeback_that_failed_before_close_loses_nothing(faults: Faults, tmp_path: Path) -> None:
    clean = Run(tmp_path)
    clean.step()
    expected = clean.close()
    run = Run(tmp_path)
    run.step()
    runtime = run.runtime
    with runtime.door:
        runtime.pager.transfers.drain()
        pages = [page for page in runtime.table if page.dirty and page.host is not None and page.extent]
        assert pages
        faults.arm(0, errno.EIO)
        runtime.pager.writeback(pages)
    assert faults.num_since
    try:
        run.model.close()
    except TransferError as error:
        told_by(error)
        assert not run.runtime.closed, "parameters are lost"
        run.model.close()
    assert same(run.net.state_dict(), expected)


def test_the_optimizer_names_the_page_and_leaves_all_readable(faults: Faults, tmp_path: Path) -> None:
    clean = Run(tmp_path)
    clean.step()
    before = {name: value.clone() for name, value in clean.model.state_dict().items()}
    clean.gradients(clean.draw())
    clean.optimizer.step()
    after = {name: value.clone() for name, value in clean.model.state_dict().items()}
    clean.model.close()
    mixed = 0
    for k in range(40):
        run = Run(tmp_path)
        run.step()
        run.gradients(run.draw())
        faults.arm(k, errno.EIO)
        try:
            run.optimizer.step()
        except TransferError as error:
            told_by(error)
        else:
            faults.disarm()
            run.model.close(restore=False)
            continue
        faults.disarm()
        run.check()
        state = run.model.state_dict()
        updated = [name for name in state if torch.equal(state[name], after[name])]
        untouched = [name for name in state if torch.equal(state[name], before[name])]
        assert len(updated) + len(untouched) == len(state)
        mixed += bool(updated) and bool(untouched)
        run.optimizer.state_dict()
        run.optimizer.zero_grad()
        run.step()
        run.close()
    assert mixed


@pytest.mark.parametrize("engine", ["threads"])
def test_interrupted_calls_are_nobodys_business(
    engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """EINTR and short transfers on the way are resumed by the engine, without a word."""
    clean = Run(tmp_path)
    clean.step()
    clean.step()
    expected = clean.close()
    calls = {"read": 0, "write": 0}

    def moody(op: str, call: Any) -> Any:
        def begin(fd: int, views: Any, offset: int) -> int:
            calls[op] += 1
            if calls[op] % 3 == 0:
                raise InterruptedError(errno.EINTR, "injected")
            if calls[op] % 3 == 1 and len(views[0]) > 4096:
                with views[0][:4096] as part:
                    return int(call(fd, [part], offset))
            return int(call(fd, views, offset))

        return begin

    def moody_queue(_: str, request: int, depth: int) -> Queue:
        return ThreadQueue(
            request, depth, preadv=moody("read", os.preadv), pwritev=moody("write", os.pwritev)
        )

    monkeypatch.setattr("tiermem.runtime.open_queue", moody_queue)
    run = Run(tmp_path)
    run.step()
    run.step()
    assert run.model.stats()["failed_transfers"] == 0
    assert same(run.close(), expected)
    assert min(calls.values()) > 20


def test_a_copy_to_the_device_that_fails(tmp_path: Path) -> None:
    clean = Run(tmp_path, separate=True)
    clean.step()
    clean.step()
    expected = clean.close()

    class Broken:
        def done(self) -> bool:
            return True

        def wait(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered (injected)")

    raised = 0
    for k in range(12):
        run = Run(tmp_path, separate=True)
        run.step()
        device = run.runtime.device
        copy, count = device.copy, iter(range(1000))

        def failing(
            target: torch.Tensor, source: torch.Tensor, copy: Any = copy, k: int = k, count: Any = count
        ) -> Any:
            if next(count) == k:
                target.fill_(0xA5)
                return Broken()
            return copy(target, source)

        device.copy = failing  # type: ignore[method-assign]
        x = run.draw()
        exact = True
        try:
            run.gradients(x)
            exact = False  # a prefetch that failed may be told in the update
            run.optimizer.step()
            exact = True
        except TransferError as error:
            raised += "illegal memory access" in str(error) and error.path is None
            run.check()
            run.optimizer.zero_grad()
            run.gradients(x)
            run.optimizer.step()
        run.optimizer.zero_grad()
        run.check()
        assert run.model.stats()["failed_transfers"] == (next(count) > k)
        final = run.close()
        if exact:
            assert same(final, expected), k
    assert raised >= 3


def test_a_view_of_a_frame_outlives_the_model(tmp_path: Path) -> None:
    """In a process of its own: memory that is gone would take this one with it."""
    code = (
        "import sys, torch, tiermem; from torch import nn\n"
        "net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])\n"
        "config = {'host': {'budget': '2MiB'}, 'disk': {'paths': [sys.argv[1]]}}\n"
        "model = tiermem.TieredModule(net, config)\n"
        "view = net[0].weight.t(); before = view.clone()\n"
        "model.close()\n"
        "assert torch.equal(view, before)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
