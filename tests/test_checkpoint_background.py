"""Saves while training goes on, and saves that are broken off: the old checkpoint is whole until the new one is."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from tests.conftest import Wrap
from tests.models import BY_NAME
from tests.parity import adamw, assert_equal, assert_same, build, reference, snapshot, train
from tiermem.aio import FaultyQueue, open_queue
from tiermem.checkpoint.folder import PARTIAL
from tiermem.page import State

GPT = BY_NAME["gpt"]
SMALL = {"chunk_nbytes": 16384}


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of the small models here are written as large ones are, through the queue."""
    monkeypatch.setattr("tiermem.checkpoint.writer.DIRECT_NBYTES", 0)


class Gate:
    """Holds a save back at its first write, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        monkeypatch.setattr(
            "tiermem.checkpoint.saving.open_queue", lambda: FaultyQueue(open_queue(), self._stop)
        )

    def _stop(self, number: int, op: str) -> None:
        self.reached.set()
        assert self.opened.wait(60)

    @contextmanager
    def open_when_asked(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
        """Open it as soon as training waits for a page; what is given has the pages that it waited for."""
        asked: list[int] = []
        first = tiermem.checkpoint.Saving.first

        def ask(saving: Any, pages: Any) -> None:
            wanted = [page.number for page in pages if saving._group_of.get(page.number) in saving._pending]
            asked.extend(wanted)
            if wanted:
                self.opened.set()
            first(saving, pages)

        with monkeypatch.context() as patch:
            patch.setattr(tiermem.checkpoint.Saving, "first", ask)
            yield asked


def expected_after(host: Any, wrap: Wrap, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Any], Any]:
    """The state after two steps, and the outcome of two more, without any save."""
    model = wrap(build(GPT, dtype), host=host)
    optimizer = adamw(model)
    train(model, optimizer, GPT, steps=2)
    state = {**model.state_dict()}, snapshot(optimizer)
    return {"model": state[0], "optimizer": state[1]}, train(model, optimizer, GPT, steps=2, seed=5)


@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
def test_training_goes_on_and_the_checkpoint_is_of_the_moment_of_the_call(
    three: bool, disk: Path, wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.bfloat16 if three else torch.float32
    state, end = expected_after("smallest", wrap, dtype)
    model = wrap(build(GPT, dtype), host="smallest", device="smallest", three=three)
    optimizer = adamw(model)
    train(model, optimizer, GPT, steps=2)
    gate = Gate(monkeypatch)
    saving = model.save(disk / "ck", optimizer, background=True, **SMALL)
    assert gate.reached.wait(60)
    loss = GPT.loss(model, GPT.batch())  # forward and backward don't wait
    loss.backward()
    model.zero_grad()
    assert not saving.done
    assert not (disk / "ck").exists()
    with gate.open_when_asked(monkeypatch) as asked:
        assert_equal(end, train(model, optimizer, GPT, steps=2, seed=5))
    assert asked, "the optimizer came to pages that weren't saved yet"
    saving.wait()
    other = wrap(build(GPT, dtype, seed=9), host="smallest")
    second = adamw(other)
    monkeypatch.undo()
    assert other.load(disk / "ck", second).step == 2
    assert_same("model", state["model"], dict(other.state_dict()))
    assert_same("optimizer", state["optimizer"], snapshot(second))
    assert_equal(end, train(other, second, GPT, steps=2, seed=5))


@pytest.mark.parametrize("how", ["in place", "state dict", "data view", "optimizer", "load"])
def test_every_way_to_write_waits_for_the_save(
    how: str, disk: Path, wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrap(build(GPT), host="1GiB")
    optimizer = adamw(model)
    train(model, optimizer, GPT, steps=1)
    model.save(disk / "first", optimizer)
    train(model, optimizer, GPT, steps=1)
    before, moments = dict(model.state_dict()), snapshot(optimizer)
    others = {name: torch.zeros_like(value) for name, value in before.items()}
    packed = optimizer.state_dict()
    packed["state"] = {
        n: {k: v * 0 if v.ndim else v for k, v in s.items()} for n, s in packed["state"].items()
    }
    view = model.head.weight.data
    gate = Gate(monkeypatch)
    saving = model.save(disk / "ck", optimizer, background=True, **SMALL)
    assert gate.reached.wait(60)
    writes: dict[str, Callable[[], Any]] = {
        "in place": lambda: model.head.weight.detach().zero_(),
        "state dict": lambda: model.load_state_dict(others),
        "data view": view.zero_,
        "optimizer": lambda: optimizer.load_state_dict(packed),
        "load": lambda: (gate.opened.set(), model.load(disk / "first", optimizer)),
    }
    with gate.open_when_asked(monkeypatch):
        writes[how]()
        gate.opened.set()
    saving.wait()
    other = wrap(build(GPT, seed=9), host="1GiB")
    second = adamw(other)
    other.load(disk / "ck", second)
    assert_same("model", before, dict(other.state_dict()))
    assert_same("optimizer", moments, snapshot(second))


class Clamped(nn.Linear):
    """Writes its weight in its own forward, where nobody can ask first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.01, 0.01)
        return super().forward(x)


def test_a_write_in_forward_ends_the_save_and_says_so(
    disk: Path, wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = wrap(
        nn.Sequential(nn.Linear(8, 8), Clamped(8, 8), nn.Linear(8, 8)), host="1GiB", policy={"units": ("*",)}
    )
    gate = Gate(monkeypatch)
    saving = model.save(disk / "ck", background=True)
    assert gate.reached.wait(60)
    model(torch.ones(2, 8))
    gate.opened.set()
    with pytest.raises(tiermem.CheckpointError, match=r"1\.weight was written inside its module's forward"):
        saving.wait()
    assert not (disk / "ck").exists()
    model.save(disk / "ck")  # told already, so not raised again


def test_buffers_are_those_of_the_call(disk: Path, wrap: Wrap, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrap(BY_NAME["conv"].build(), host="1GiB")
    model(*BY_NAME["conv"].batch()[:1])
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    gate = Gate(monkeypatch)
    saving = model.save(disk / "ck", background=True)
    assert gate.reached.wait(60)
    model(*BY_NAME["conv"].batch()[:1])
    assert any(not torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    gate.opened.set()
    saving.wait()
    other = wrap(BY_NAME["conv"].build(), host="1GiB")
    other.load(disk / "ck")
    assert_same("buffers", before, dict(other.named_buffers()))


# -- what goes wrong -----------------------------------------------------------------------------------------


def network(seed: int) -> nn.Sequential:
    """One with few and equal layers."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(3, 64)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def fail_at(monkeypatch: pytest.MonkeyPatch, k: int, what: Any) -> list[int]:
    """The k-th write of saves from now on fails; what is given counts them."""
    count = [0]

    def fail(number: int, op: str) -> Any:
        count[0] += 1
        return what if count[0] == k + 1 else None

    monkeypatch.setattr("tiermem.checkpoint.saving.open_queue", lambda: FaultyQueue(open_queue(), fail))
    return count


def test_whichever_write_fails_the_old_checkpoint_stays(
    disk: Path, wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrap(network(0), host="smallest")
    optimizer = adamw(model)
    folder = disk / "checkpoints"
    step(model, optimizer)
    state = dict(model.state_dict())
    count = fail_at(monkeypatch, -1, None)
    model.save(folder / "ck", optimizer, **SMALL)
    num_writes = count[0]
    assert num_writes == 24, "each of 8 tensors, and its two moments"
    step(model, optimizer)
    now, moments = dict(model.state_dict()), snapshot(optimizer)
    for k in range(num_writes):
        fail_at(monkeypatch, k, [errno.ENOSPC, errno.EIO, "short"][k % 3])
        with pytest.raises(tiermem.SavingError, match=r"saving failed: \[Errno (5|28)\]") as caught:
            model.save(folder / "ck", optimizer, overwrite=True, background=bool(k % 2), **SMALL).wait()
        assert caught.value.filename is not None
        assert os.listdir(folder) == ["ck"], "nothing half written is left"
        model._runtime.check()
    monkeypatch.undo()
    assert_same("model", now, dict(model.state_dict()))
    assert_same("optimizer", moments, snapshot(optimizer))
    other = wrap(network(3), host="smallest")
    other.load(folder / "ck")
    assert_same("model", state, dict(other.state_dict()))


def test_a_page_that_can_not_be_read_is_named(disk: Path, wrap: Wrap) -> None:
    model = wrap(build(GPT), host="smallest")
    optimizer = adamw(model)
    train(model, optimizer, GPT, steps=1)
    disk_tier = model._runtime.disk
    queue = disk_tier.queue
    faulty = FaultyQueue(queue, lambda number, op: errno.EIO if op == "read" else None)
    disk_tier.queue = model._runtime.queue = faulty
    with pytest.raises(tiermem.SavingError, match=r"reading the .* page of unit \d+ \(page \d+\)"):
        model.save(disk / "ck", optimizer)
    disk_tier.queue = model._runtime.queue = queue
    assert not (disk / "ck").exists()
    model.save(disk / "ck", optimizer)


def test_a_page_that_somebody_changed_is_not_saved(disk: Path, wrap: Wrap) -> None:
    model = wrap(build(GPT), host="smallest")
    optimizer = adamw(model)
    train(model, optimizer, GPT, steps=1)
    page = next(
        p for p in model._runtime.table if p.state is State.DISK and not p.blank and p.checksum is not None
    )
    assert page.extent is not None
    with open(model._runtime.disk.path_of(page), "r+b") as file:
        file.seek(page.extent[1] + 64)
        byte = file.read(1)[0]
        file.seek(page.extent[1] + 64)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(tiermem.TransferError, match="the disk, or somebody, has changed them"):
        model.save(disk / "ck", optimizer)
    assert not (disk / "ck").exists()


def test_what_failed_in_the_background_is_told_once(
    disk: Path, wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrap(build(GPT), host="smallest")
    fail_at(monkeypatch, 0, errno.EIO)
    model.save(disk / "ck", background=True)
    with pytest.raises(tiermem.SavingError):
        model.save(disk / "ck")  # nobody had asked how the last one ended
    fail_at(monkeypatch, 0, errno.EIO)
    model.save(disk / "ck", background=True)
    with pytest.warns(RuntimeWarning, match="a save in the background failed: saving failed"):
        model.close()


def test_close_lets_a_save_come_to_its_end(disk: Path, wrap: Wrap, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrap(build(GPT), host="smallest")
    state = dict(model.state_dict())
    gate = Gate(monkeypatch)
    saving = model.save(disk / "ck", background=True)
    assert gate.reached.wait(60)
    threading.Thread(target=gate.opened.set).start()
    model.close()
    assert saving.done
    other = wrap(build(GPT, seed=3), host="smallest")
    other.load(disk / "ck")
    assert_same("model", state, dict(other.state_dict()))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tiermem-save")]


def test_ctrl_c_leaves_nothing(disk: Path, wrap: Wrap, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrap(network(0), host="smallest")
    optimizer = adamw(model)
    step(model, optimizer)

    def interrupt(number: int, op: str) -> None:
        if number == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr("tiermem.checkpoint.saving.open_queue", lambda: FaultyQueue(open_queue(), interrupt))
    folder = disk / "checkpoints"
    with pytest.raises(KeyboardInterrupt):
        model.save(folder / "ck", optimizer, **SMALL)
    assert os.listdir(folder) == []
    monkeypatch.undo()
    model._runtime.check()
    model.save(folder / "ck", optimizer)


def test_what_does_not_fit_the_disk_is_refused_before_anything_is_written(
    disk: Path, wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrap(build(GPT), host="smallest")
    monkeypatch.setattr("tiermem.checkpoint.saving.free_nbytes", lambda folder: 1000)
    with pytest.raises(tiermem.SavingError, match="and the filesystem has 1000 B free") as caught:
        model.save(disk / "checkpoints/ck")
    assert caught.value.errno == errno.ENOSPC
    assert not (disk / "checkpoints").exists()


KILLED = """
import os, signal, sys, torch
from tiermem.aio import FaultyQueue, open_queue
import tiermem.checkpoint.saving as saving, tiermem.checkpoint.writer as writer
import tiermem
path, k = sys.argv[1], int(sys.argv[2])
writer.DIRECT_NBYTES = 0
torch.manual_seed(1)
net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
model = tiermem.TieredModule(net, {"device": {"kind": "cpu"}, "host": {"budget": "64MiB"}})
kill = lambda number, op: os.kill(os.getpid(), signal.SIGKILL) if number == k else None
saving.open_queue = lambda: FaultyQueue(open_queue(), kill)
model.save(path, overwrite=True, chunk_nbytes=16384)
"""


def test_a_killed_save_leaves_the_old_checkpoint_and_the_next_one_cleans_up(disk: Path, wrap: Wrap) -> None:
    model = wrap(network(0), host="smallest")
    folder = disk / "checkpoints"
    model.save(folder / "ck")
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder / "ck"), "3"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = [name for name in os.listdir(folder) if name.startswith(PARTIAL)]
    assert len(left) == 1
    state = dict(model.state_dict())
    other = wrap(network(3), host="smallest")
    other.load(folder / "ck")
    assert_same("model", state, dict(other.state_dict()))
    (folder / f"{PARTIAL}of-mine").symlink_to(folder / "ck")
    other.save(folder / "next")
    assert sorted(os.listdir(folder)) == sorted(["ck", "next", f"{PARTIAL}of-mine"])


def test_the_reference_run_is_what_a_saved_run_is(disk: Path, wrap: Wrap) -> None:
    model = wrap(build(GPT), host="smallest")
    optimizer = adamw(model)
    outcome = train(
        model,
        optimizer,
        GPT,
        after=lambda step: model.save(disk / "ck", optimizer, overwrite=True, background=bool(step % 2)),
    )
    assert_equal(reference("gpt"), outcome)
