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
from tiermem.page import ALIGNMENT, Kind, Page
from tiermem.quota import DAY, Quota


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
    quota = Quota(1000, clock, clock.sleep)
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


def test_training_pauses_before_the_step(disk: Path) -> None:
    loop = Loop(BY_NAME["odd-mlp"], disk, disk={"paths": [str(disk)], "max_written_per_day": "1MiB"})
    assert loop.model._runtime.disk.quota.limit == 1 << 20
    clock = Clock()
    loop.model._runtime.disk.quota = Quota(1, clock, clock.sleep)
    loop.train(3)
    assert clock.slept == [DAY, DAY]  # before the second step, and before the third
    loop.model.close()


def test_a_quota_is_no_percentage() -> None:
    with pytest.raises(tiermem.ConfigError, match='max_written_per_day: read "50%", but it is a percentage'):
        tiermem.Config.load({"disk": {"max_written_per_day": "50%"}})
