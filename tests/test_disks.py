"""Several disks, and how much they are written: shares by rate, bytes by path, a quota by the day."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiermem
from tests.models import BY_NAME
from tests.resuming import Loop
from tiermem.aio import Queue, open_queue
from tiermem.disk import Disk, weigh
from tiermem.ledger import DAY, Ledger
from tiermem.page import ALIGNMENT, Kind, Page
from tiermem.quota import Quota


def pages(count: int) -> list[Page]:
    return [Page(number, 0, Kind.PARAMETER, torch.uint8, ALIGNMENT, True) for number in range(count)]


def disk_of(folder: Path, weights: list[float], queue: Queue) -> Disk:
    return Disk([str(folder / name) for name in "ab"], 1 << 30, queue, weights=weights)


def given(disk: Disk) -> list[int]:
    return [int(each["in_use"]) // ALIGNMENT for each in disk.stats().values()]


def test_a_slow_disk_gets_less(tmp_path: Path) -> None:
    with open_queue("threads", 4096, 2) as queue:
        disk = disk_of(tmp_path, [3.0, 1.0], queue)
        disk.provide(pages(80))
        assert given(disk) == [60, 20]
        assert [each["share"] for each in disk.stats().values()] == [0.75, 0.25]
        disk.close()


def test_a_full_disk_gets_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_queue("threads", 4096, 2) as queue:
        disk = disk_of(tmp_path, [1.0, 1.0], queue)

        def statvfs(path: Any) -> Any:
            return SimpleNamespace(f_bavail=7 if "/a/" in os.fspath(path) else 1 << 20, f_frsize=ALIGNMENT)

        monkeypatch.setattr(os, "statvfs", statvfs)
        disk.provide(pages(80))
        assert given(disk) == [7, 73]
        monkeypatch.undo()
        disk.close()


def test_rates_are_measured_once_for_each_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / name for name in ("fast", "slow", "slow2", "dead")]
    asked: list[str] = []

    def rate(folder: Path) -> float:
        asked.append(folder.name)
        if folder.name == "dead":
            raise OSError
        return {"fast": 6e9, "slow": 2e9}[folder.name]

    for folder in folders:
        folder.mkdir()
    assert weigh(folders, rate) == [1.0] * 4  # one disk
    assert asked == []
    devices = {"fast": 1, "slow": 2, "slow2": 2, "dead": 3}
    monkeypatch.setattr(os, "stat", lambda path: SimpleNamespace(st_dev=devices[path.name]))
    assert weigh(folders, rate) == [6e9, 1e9, 1e9, 2e9]
    assert asked == ["fast", "slow", "dead"]


def test_bytes_are_told_by_path(disk: Path) -> None:
    paths = {"disk": {"paths": [str(disk / "a"), str(disk / "b")]}}
    loop = Loop(BY_NAME["odd-mlp"], disk, **paths).train(2)
    stats = loop.model.stats()
    told = stats["tiers"]["disk"]["paths"]
    assert set(told) == {str(disk / "a"), str(disk / "b")}
    assert sum(each["written"] for each in told.values()) == stats["nbytes_written_to_disk"] > 0
    assert sum(each["in_use"] for each in told.values()) == stats["tiers"]["disk"]["in_use"]
    assert all(each["written"] for each in told.values())
    loop.model.close()


class Clock:
    """Seconds that pass only when somebody sleeps, or moves it."""

    def __init__(self) -> None:
        self.now = 5.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_a_quota_is_of_the_last_day(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    quota = Quota(1000, (), clock, clock.sleep)
    quota.wait()
    quota.add(600)
    clock.now += 3600
    quota.add(399)
    quota.wait()
    assert clock.slept == []
    assert caplog.text == ""
    quota.add(1)
    assert quota.used == 1000
    quota.wait()
    assert clock.slept == [DAY - 3600]
    assert "1000 B were written in the last 24 hours, and 1000 B are allowed" in caplog.text
    assert "23.0 hours" in caplog.text
    assert quota.used == 400
    clock.now += DAY
    assert quota.used == 0


class Machine:
    """A clock since the machine's start, that start's name, and a clock on the wall, each moved by itself."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.boot = "first"
        self.wall = 1e9

    def ledger(self, folder: Path) -> Ledger:
        return Ledger(folder, self.clock, lambda: self.boot, lambda: self.wall)

    def quota(self, folder: Path, limit: int = 1000) -> Quota:
        """That of a process that begins now."""
        return Quota(limit, [self.ledger(folder)], self.clock, self.clock.sleep)

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.wall += seconds

    def start_again(self, off: float) -> None:
        self.boot += "'"
        self.clock.now = 60.0
        self.wall += off


def test_a_process_that_is_started_again_goes_on_counting(tmp_path: Path) -> None:
    machine = Machine()
    first = machine.quota(tmp_path)
    first.add(600)
    machine.pass_time(2)
    first.add(100)  # more than a second after the last: the file has it
    first.add(50)  # and then it is killed
    again = machine.quota(tmp_path)
    assert again.used == 700
    beside = machine.quota(tmp_path)
    beside.add(200)
    beside.close()
    machine.pass_time(2)
    again.add(100)
    assert again.used == 1000, "whoever wrote it"
    again.wait()
    assert machine.clock.slept == [DAY - 2]
    assert again.used == 0, "what was counted in one minute with the oldest ends with it"
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("jump", [-1e8, -DAY, DAY, 1e8])
def test_a_clock_that_jumps_changes_no_quota(jump: float, tmp_path: Path) -> None:
    machine = Machine()
    quota = machine.quota(tmp_path)
    quota.add(600)
    quota.close()
    machine.wall += jump
    assert machine.quota(tmp_path).used == 600
    machine.pass_time(DAY - 1)
    assert machine.quota(tmp_path).used == 600
    machine.pass_time(1)
    assert machine.quota(tmp_path).used == 0


def test_what_was_written_before_the_machine_started_ages_while_it_is_off(tmp_path: Path) -> None:
    machine = Machine()
    quota = machine.quota(tmp_path)
    quota.add(600)
    quota.close()
    machine.start_again(off=DAY / 2)
    assert machine.quota(tmp_path).used == 600
    machine.start_again(off=DAY / 2)
    assert machine.quota(tmp_path).used == 0
    quota = machine.quota(tmp_path)
    quota.add(500)
    quota.close()
    machine.start_again(off=-1e8)  # a clock that has lost the time
    machine.pass_time(DAY - 61)
    assert machine.quota(tmp_path).used == 500
    machine.pass_time(1)
    assert machine.quota(tmp_path).used == 0, "it is older than the machine's start at least"


@pytest.mark.parametrize("what", ["link", "folder", "text"])
def test_a_ledger_that_is_none_is_not_used(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine()
    path = machine.ledger(tmp_path / "run").path
    path.parent.mkdir()
    (tmp_path / "mine").write_text("{}")
    if what == "link":
        path.symlink_to(tmp_path / "mine")
    elif what == "folder":
        path.mkdir()
    else:
        path.write_text("[[1, 2]")
    quota = machine.quota(tmp_path / "run")
    quota.add(600)
    quota.close()
    assert quota.used == 600, "this process's own counts all the same"
    assert ("can't be used" in caplog.text) == (what != "text")
    assert (tmp_path / "mine").read_text() == "{}"


def test_a_run_that_is_started_again_goes_on_counting(disk: Path) -> None:
    limited = {"disk": {"paths": [str(disk)], "max_written_per_day": "1GiB"}}
    loop = Loop(BY_NAME["odd-mlp"], disk, **limited).train(2)
    loop.model.close()
    written = sum(loop.model._runtime.disk.nbytes_written)
    loop = Loop(BY_NAME["odd-mlp"], disk, resume="auto", **limited)
    assert loop.model._runtime.disk.quota.used == written > 0
    loop.model.close()


def test_training_pauses_before_the_step(disk: Path) -> None:
    loop = Loop(BY_NAME["odd-mlp"], disk, disk={"paths": [str(disk)], "max_written_per_day": "1MiB"})
    assert loop.model._runtime.disk.quota.limit == 1 << 20
    clock = Clock()
    loop.model._runtime.disk.quota = Quota(1, (), clock, clock.sleep)
    loop.train(3)
    assert clock.slept == [DAY, DAY]  # before the second step, and before the third
    loop.model.close()


def test_a_quota_is_no_percentage() -> None:
    with pytest.raises(tiermem.ConfigError, match='max_written_per_day: read "50%", but it is a percentage'):
        tiermem.Config.load({"disk": {"max_written_per_day": "50%"}})
