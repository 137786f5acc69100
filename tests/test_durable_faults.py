"""Every write, sync and allocation of a durable run failed in turn: what was committed stays, and nothing leaks."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tiermem
from tests.killing import SECTIONS, TINY
from tests.parity import Outcome, assert_equal
from tests.resuming import Loop, from_step
from tests.test_durability import give_up
from tiermem.aio import FaultyQueue, Queue, open_queue
from tiermem.folder import COMMIT, DURABLE

CALLS = ("pwrite", "fdatasync", "posix_fallocate", "replace", "fsync", "page")
STEPS = 2
MORE = 3


@functools.cache
def uninterrupted() -> Outcome:
    return Loop(TINY).train(MORE).close()


class Failing:
    """Fails the ``at``-th of the calls that write something, of whatever kind, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = -1
        self.code = errno.EIO
        self.count = 0
        self.failed: list[str] = []
        for name in CALLS[:-1]:
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))

        def faulty(*args: Any) -> Queue:
            return FaultyQueue(open_queue(*args), self._page)

        monkeypatch.setattr("tiermem.runtime.open_queue", faulty)

    def arm(self, at: int, code: int) -> None:
        self.at, self.code, self.count = at, code, 0
        self.failed = []

    def _strikes(self, name: str) -> bool:
        self.count += 1
        if self.count - 1 == self.at:
            self.failed.append(name)
        return self.count - 1 == self.at

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._strikes(name):
                raise OSError(self.code, os.strerror(self.code))
            return call(*args, **kwargs)

        return wrapped

    def _page(self, index: int, op: str) -> Any:
        return self.code if op == "write" and self._strikes("page") else None


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Failing]:
    with monkeypatch.context() as patch:
        yield Failing(patch)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_every_call_that_writes(code: int, disk: Path, failing: Failing) -> None:
    expected = uninterrupted()
    failing.arm(-1, code)
    Loop(TINY, disk / "count", **SECTIONS).train(STEPS).model.close()
    count = failing.count
    assert count > 30
    seen = set()
    for at in range(0, count, 1 if code == errno.EIO else 4):
        folder = disk / "run"
        failing.arm(at, code)
        durable = 0
        loop, raised = None, str(folder)
        try:
            loop = Loop(TINY, folder, **SECTIONS)
            while loop.step < STEPS:
                loop.one()
                durable = loop.model.stats()["commits"]["committed_step"] or 0
        except (tiermem.TiermemError, OSError) as error:
            raised = str(error)
        assert str(folder) in raised, raised
        assert failing.failed
        seen.update(failing.failed)
        failing.arm(-1, code)
        if loop is not None:
            loop.model._runtime.check()
            with contextlib.suppress(tiermem.TransferError):
                give_up(loop)
            give_up(loop)
        resumed = Loop(TINY, folder, resume="auto", **SECTIONS)
        assert resumed.step >= durable, (at, failing.failed)
        if resumed.step:
            assert_equal(from_step(expected, resumed.step), resumed.train(MORE).close())
        else:
            resumed.model.close()
        assert len([path for path in folder.iterdir() if not path.name.startswith(DURABLE)]) == 0
        shutil.rmtree(folder)
    assert seen == set(CALLS) or code == errno.ENOSPC


def test_a_commit_that_failed_can_be_tried_again(disk: Path, failing: Failing) -> None:
    expected = uninterrupted()
    loop = Loop(TINY, disk, mode="manual", **SECTIONS).train(STEPS)
    for at in range(3):
        failing.arm(at, errno.EIO)
        with pytest.raises(tiermem.TransferError, match=str(disk)):
            loop.model.commit()
        assert failing.failed
    failing.arm(-1, 0)
    loop.model.commit()
    loop.one()
    loop.model.close()
    resumed = Loop(TINY, disk, resume="auto", mode="manual", **SECTIONS)
    assert resumed.step == STEPS
    assert_equal(from_step(expected, STEPS), resumed.train(MORE).close())


@pytest.mark.parametrize("name", ["pages.bin", "run.json", f"{COMMIT}0", f"{COMMIT}1"])
def test_a_folder_that_was_half_deleted(name: str, disk: Path) -> None:
    expected = uninterrupted()
    Loop(TINY, disk, **SECTIONS).train(STEPS).model.close()
    (folder,) = disk.iterdir()
    (folder / name).unlink()
    if not name.startswith(COMMIT):
        with pytest.raises(tiermem.ConfigError, match=folder.name):
            Loop(TINY, disk, resume="auto", **SECTIONS)
        assert {path.name for path in folder.iterdir()} >= {
            f"{COMMIT}0",
            f"{COMMIT}1",
        }  # nothing more is deleted
        return
    resumed = Loop(TINY, disk, resume="auto", **SECTIONS)
    assert resumed.step in (STEPS - 1, STEPS)
    assert_equal(from_step(expected, resumed.step), resumed.train(MORE).close())


def test_a_path_that_can_only_be_read(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = Path.mkdir

    def refuse(path: Path, *args: Any, **kwargs: Any) -> None:
        if path.name.startswith(DURABLE):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(tiermem.ConfigError, match="can't hold a run folder: Read-only file system"):
        Loop(TINY, disk, **SECTIONS)
    assert list(disk.iterdir()) == []
