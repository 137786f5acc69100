"""Every write, sync and allocation of a durable run failed in turn: what was committed stays, and nothing leaks."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
import shutil
import time
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
        self.lasting = False  # fail all those after it too, and reads
        self.code = errno.EIO
        self.count = 0
        self.failed: list[str] = []
        for name in CALLS[:-1]:
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))

        def faulty(*args: Any) -> Queue:
            return FaultyQueue(open_queue(*args), self._page)

        monkeypatch.setattr("tiermem.runtime.open_queue", faulty)

    def arm(self, at: int, code: int, lasting: bool = False) -> None:
        self.at, self.code, self.count, self.lasting = at, code, 0, lasting
        self.failed = []

    def _strikes(self, name: str) -> bool:
        self.count += 1
        strikes = self.count - 1 == self.at or self._gone
        if strikes:
            self.failed.append(name)
        return strikes

    @property
    def _gone(self) -> bool:
        return self.lasting and 0 <= self.at < self.count

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._strikes(name):
                raise OSError(self.code, os.strerror(self.code))
            return call(*args, **kwargs)

        return wrapped

    def _page(self, index: int, op: str) -> Any:
        strikes = self._strikes("page") if op == "write" else self._gone
        return self.code if strikes else None


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


@pytest.mark.parametrize("code", [errno.EIO, errno.ENODEV])
def test_a_disk_that_disappears(code: int, disk: Path, failing: Failing) -> None:
    expected = uninterrupted()
    for at in range(0, 40, 13):
        folder = disk / f"{at}"
        failing.arm(-1, code)
        loop = Loop(TINY, folder, **SECTIONS).train(1)
        failing.arm(at, code, lasting=True)
        with pytest.raises(tiermem.TransferError, match=str(folder)):
            loop.train(MORE + 5)
        assert len(failing.failed) >= 1
        durable = loop.model.stats()["commits"]["committed_step"]
        loop.model._runtime.check()
        with contextlib.suppress(tiermem.TransferError):
            give_up(loop)
        give_up(loop)  # it is still gone
        failing.arm(-1, code)  # and here again
        resumed = Loop(TINY, folder, resume="auto", **SECTIONS)
        assert resumed.step in (durable, durable + 1)
        if resumed.step < MORE:
            assert_equal(from_step(expected, resumed.step), resumed.train(MORE).close())
        else:
            resumed.model.close()


def test_a_folder_that_is_deleted_under_its_run(disk: Path) -> None:
    loop = Loop(TINY, disk, **SECTIONS).train(1)
    (folder,) = disk.iterdir()
    shutil.rmtree(folder)
    with pytest.raises(tiermem.TransferError, match=r"pages\.bin.*it was deleted while this run has it open"):
        loop.one()
    with contextlib.suppress(tiermem.TransferError):
        give_up(loop)
    give_up(loop)
    assert list(disk.iterdir()) == []


def test_a_folder_that_is_deleted_under_a_run_that_keeps_nothing(disk: Path) -> None:
    loop = Loop(TINY, disk, mode="off", **SECTIONS).train(1)
    (folder,) = disk.iterdir()
    shutil.rmtree(folder)
    assert_equal(uninterrupted(), loop.train(MORE).close())
    assert list(disk.iterdir()) == []


def test_clocks_that_jump(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = uninterrupted()
    draw = random.Random(0)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: draw.uniform(-1e9, 9e9))
        patch.setattr(time, "time_ns", lambda: int(draw.uniform(-1e18, 9e18)))
        limited = {**SECTIONS, "disk": {"max_written_per_day": "1GiB"}}
        loop = Loop(TINY, disk, **limited).train(1)
        loop.model.save(disk / "checkpoint", loop.optimizer)
        loop.train(STEPS).model.close()
        resumed = Loop(TINY, disk, resume="auto", **limited)
        assert resumed.step == STEPS
        assert_equal(from_step(expected, STEPS), resumed.train(MORE).close())
        loaded = Loop(TINY, disk / "other", mode="off", **SECTIONS)
        assert loaded.model.load(disk / "checkpoint", loaded.optimizer).step == 1
        loaded.model.close()


FILES = ("pages.bin", "run.json", f"{COMMIT}0", f"{COMMIT}1", "damage.json")


@pytest.mark.parametrize("name", FILES)
def test_links_in_a_run_folder_are_not_followed(name: str, disk: Path) -> None:
    Loop(TINY, disk / "runs", **SECTIONS).train(STEPS).model.close()
    (folder,) = (disk / "runs").iterdir()
    path, outside = folder / name, disk / "mine"
    if path.exists():
        path.rename(outside)
    else:
        outside.write_text("[]")
    before = outside.read_bytes()
    path.symlink_to(outside)
    with pytest.raises(tiermem.ConfigError, match=f"{name}: is a link, and links are not followed"):
        Loop(TINY, disk / "runs", resume="auto", **SECTIONS)
    assert path.is_symlink()
    assert outside.read_bytes() == before
    path.unlink()
    if name != "damage.json":
        outside.rename(path)
    resumed = Loop(TINY, disk / "runs", resume="auto", **SECTIONS)
    assert_equal(from_step(uninterrupted(), STEPS), resumed.train(MORE).close())


def test_a_link_where_a_file_is_made_anew_is_replaced(disk: Path) -> None:
    loop = Loop(TINY, disk / "runs", **SECTIONS)
    (folder,) = (disk / "runs").iterdir()
    (disk / "mine").write_text("mine")
    (folder / "run.json.new").symlink_to(disk / "mine")
    loop.train(STEPS)
    loop.model._runtime.run.described = 0
    loop.model._runtime.disk.grown = True  # so that it is written again
    loop.train(MORE).model.close()
    assert (disk / "mine").read_text() == "mine"
    assert not (folder / "run.json.new").exists()


@pytest.mark.parametrize("name", FILES[:4])
def test_files_of_somebody_else_are_refused(name: str, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Loop(TINY, disk, **SECTIONS).train(STEPS).model.close()
    stat = os.stat

    def stranger(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        found = stat(path, *args, **kwargs)
        return os.stat_result((*found[:4], 4711, *found[5:])) if path == name else found

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stranger)
        with pytest.raises(tiermem.ConfigError, match=f"{name}: belongs to user 4711, and this is user"):
            Loop(TINY, disk, resume="auto", **SECTIONS)
    resumed = Loop(TINY, disk, resume="auto", **SECTIONS)
    assert_equal(from_step(uninterrupted(), STEPS), resumed.train(MORE).close())
