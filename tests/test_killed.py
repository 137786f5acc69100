"""Killed durable runs: at each write and sync in turn, with what wasn't synchronised lost; by SIGKILL at any line."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.killing import KILLED, TINY, go_on, kill_over_and_over, killed_at_io, killed_at_line
from tests.parity import Outcome, assert_equal
from tests.resuming import Loop, from_step
from tiermem.folder import DURABLE

STEPS = 2
MORE = 3


@functools.cache
def uninterrupted() -> Outcome:
    return Loop(TINY).train(MORE).close()


@pytest.fixture(autouse=True)
def nothing_left(disk: Path) -> Iterator[None]:
    yield
    assert [each.name for each in disk.iterdir() if not each.name.startswith(DURABLE)] == []


@pytest.mark.slow
@pytest.mark.parametrize(("commits", "stride"), [(1, 1), (2, 3)])
def test_a_loss_of_power_at_each_write_and_sync(commits: int, stride: int, disk: Path) -> None:
    expected = uninterrupted()
    sections = {"durability": {"mode": "step", "commits": commits}}
    steps_seen = set()
    for at in itertools.count(1, stride):
        folder = disk / f"{DURABLE}{at}"  # a name that the fixture lets be
        status, told = killed_at_io(folder, STEPS, at, **sections)
        if status == 0:
            break
        assert status == KILLED
        loop = go_on(folder, 0, **sections)
        steps_seen.add(loop.step)
        durable = told[-1] if told else 0
        assert loop.step in (durable, durable + 1), (
            f"I/O {at}: step {durable} was durable, {loop.step} came back"
        )
        assert_equal(from_step(expected, loop.step), loop.train(MORE).close())
        shutil.rmtree(folder)
    assert at > 30
    assert steps_seen == set(range(STEPS + 1))


def test_sigkill_over_and_over(disk: Path) -> None:
    go_on(disk, 1).model.close()
    step = max(1, kill_over_and_over(disk, 4, 100))
    expected = Loop(TINY).train(step + 2).close()
    loop = go_on(disk, 0)
    assert loop.step in (step, step + 1)
    assert_equal(from_step(expected, loop.step), loop.train(step + 2).close())


def test_a_resume_that_is_killed_loses_nothing(disk: Path) -> None:
    expected = uninterrupted()
    go_on(disk, 2).model.close()
    for at in (1, 2000, 6000, 12_000):
        status, told = killed_at_line(disk, 3, at)
        assert status == -signal.SIGKILL
        assert all(step <= 3 for step in told)
    loop = go_on(disk, 0)
    assert loop.step >= 2
    assert_equal(from_step(expected, loop.step), loop.train(MORE).close())


def test_the_number_counts_and_not_the_clock(disk: Path) -> None:
    go_on(disk, 1).model.close()
    (old,) = disk.iterdir()
    loop = Loop(TINY, disk).train(2)
    new = loop.model._runtime.run.path
    loop.model.close()
    for path, then in ((new, 1), (old, 4_000_000_000)):
        for each in (path, *path.iterdir()):
            os.utime(each, (then, then))
    resumed = go_on(disk, 0)
    assert resumed.model._runtime.run.path == new
    resumed.model.close()
