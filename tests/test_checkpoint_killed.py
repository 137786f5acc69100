"""Saves and exports that are killed: what was there before is whole, or what was to come; the rest is cleared away."""

from __future__ import annotations

import errno
import io
import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import tiermem
import tiermem.checkpoint.folder as folders
import tiermem.checkpoint.saving as saving
import tiermem.checkpoint.writer as writer
from tests.killing import Assassin, in_child
from tests.parity import assert_same
from tiermem.aio import FaultyQueue, open_queue
from tiermem.checkpoint.folder import PARTIAL
from tiermem.checkpoint.formats import open_source
from tiermem.checkpoint.safetensors import export
from tiermem.cli import app

CALLS = ("pwrite", "ftruncate", "fsync", "rename", "mkdir", "rmdir")


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40), nn.Linear(40, 40))


def save(path: Path, seed: int) -> dict[str, torch.Tensor]:
    """A checkpoint of a network of this seed; what it has."""
    with tiermem.TieredModule(
        network(seed), {"device": {"kind": "cpu"}, "host": {"budget": "64MiB"}}
    ) as model:
        model.save(path, overwrite=True, chunk_nbytes=4096)
        return {name: value.clone() for name, value in model.state_dict().items()}


def loaded(path: Path) -> dict[str, torch.Tensor]:
    """What a checkpoint has."""
    with tiermem.TieredModule(network(9), {"device": {"kind": "cpu"}, "host": {"budget": "64MiB"}}) as model:
        model.load(path)
        return {name: value.clone() for name, value in model.state_dict().items()}


class Killer:
    """SIGKILL before the ``at``-th call that writes, syncs, makes, renames or removes anything, of whatever kind."""

    def __init__(self, at: int) -> None:
        self.at = at

    def event(self, *_: Any) -> None:
        self.at -= 1
        if not self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.event()
            return call(*args, **kwargs)

        return wrapped

    def install(self) -> None:
        """In a process of its own."""
        for name in CALLS:
            setattr(os, name, self.before(getattr(os, name)))
        for name in ("_exchange", "_sync_filesystem"):
            setattr(folders, name, self.before(getattr(folders, name)))
        Path.write_text = self.before(Path.write_text)  # type: ignore[method-assign]
        writer.DIRECT_NBYTES = 0
        saving.open_queue = lambda: FaultyQueue(open_queue(), self.event)  # type: ignore[attr-defined]


@pytest.mark.parametrize("replacing", [True, False])
def test_a_save_that_is_killed_at_each_of_its_writes(replacing: bool, disk: Path) -> None:
    folder = disk / "checkpoints"
    path = folder / "ck"
    old = save(path, 1) if replacing else None
    expected = save(disk / "new", 2)
    seen = set()
    for at in itertools.count(1, 1 if replacing else 4):

        def work(told: Callable[[int], None], at: int = at) -> None:
            Killer(at).install()
            save(path, 2)

        status, _ = in_child(work)
        if status == 0:
            break
        assert status == -signal.SIGKILL
        found = loaded(path) if path.exists() else None
        is_new = found is not None and torch.equal(found["0.weight"], expected["0.weight"])
        seen.add(is_new)
        if is_new:
            assert found is not None
            assert_same("new", expected, found)
            save(path, 1)
            if not replacing:
                break
        elif old is not None:
            assert found is not None
            assert_same("old", old, found)
        else:
            assert found is None
        left = [name for name in os.listdir(folder) if name != "ck"] if folder.exists() else []
        assert len(left) <= 1
        assert all(name.startswith(PARTIAL) for name in left)
    assert at > 30
    assert seen == {False, True} or not replacing
    save(path, 2)
    assert os.listdir(folder) == ["ck"], "the next save removes what was left"
    assert_same("whole", expected, loaded(path))


def test_an_export_that_is_killed(disk: Path) -> None:
    expected = save(disk / "ck", 1)
    out = disk / "exports" / "out"

    def work(at: int) -> Callable[[Callable[[int], None]], None]:
        def inner(told: Callable[[int], None]) -> None:
            assassin = Assassin(at)
            sys.settrace(assassin)
            export(open_source(disk / "ck"), out, shard_nbytes=8000)
            sys.settrace(None)
            told(min(255, assassin.lines // 10))

        return inner

    status, (tens,) = in_child(work(-1))
    assert status == 0
    for file in out.iterdir():
        file.unlink()
    out.rmdir()
    killed = 0
    for at in range(1, 10 * tens, max(1, 10 * tens // 20)):
        status, _ = in_child(work(at))
        assert status == -signal.SIGKILL
        killed += 1
        assert not out.exists()
        assert len(os.listdir(out.parent) if out.parent.exists() else []) <= 1
    assert killed >= 15
    status, _ = in_child(work(-1))
    assert status == 0
    assert os.listdir(out.parent) == ["out"]
    tensors = {name: value for file in out.glob("*.safetensors") for name, value in load_file(file).items()}
    assert_same("exported", expected, tensors)


class FullFile(io.FileIO):
    """A file whose ``at``-th write, of all files', fails."""

    at = -1
    code = errno.ENOSPC
    count = 0

    def write(self, data: Any) -> int:
        FullFile.count += 1
        if FullFile.count - 1 == FullFile.at:
            raise OSError(FullFile.code, os.strerror(FullFile.code), self.name)
        return super().write(data)


def test_an_export_whose_disk_fails_leaves_nothing(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(disk / "ck", 1)
    monkeypatch.setattr("tiermem.checkpoint.safetensors.open", FullFile, raising=False)
    monkeypatch.setattr(FullFile, "count", 0)
    export(open_source(disk / "ck"), disk / "out", shard_nbytes=8000)
    count = FullFile.count
    assert count > 8
    for at in range(count):
        code = (errno.ENOSPC, errno.EIO)[at % 2]
        for name, value in (("at", at), ("count", 0), ("code", code)):
            monkeypatch.setattr(FullFile, name, value)
        with pytest.raises(tiermem.SavingError, match=rf"Errno {code}.*\.safetensors"):
            export(open_source(disk / "ck"), disk / "another", shard_nbytes=8000)
        assert sorted(os.listdir(disk)) == ["ck", "out"]


def test_the_doctor_clears_what_was_left(disk: Path) -> None:
    def work(told: Callable[[int], None]) -> None:
        Killer(20).install()
        save(disk / "ck", 1)

    status, _ = in_child(work)
    assert status == -signal.SIGKILL
    (left,) = os.listdir(disk)
    assert left.startswith(PARTIAL)
    (disk / f"{PARTIAL}link").symlink_to(disk)

    def doctor(*options: str) -> str:
        arguments = ["doctor", "--no-speed", "--json", "--path", str(disk), *options]
        return CliRunner().invoke(app, arguments).stdout

    assert "a checkpoint that was never finished" in doctor()
    assert left in os.listdir(disk)
    assert left in doctor("--clear")
    assert os.listdir(disk) == [f"{PARTIAL}link"]
