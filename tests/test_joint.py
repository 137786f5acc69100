"""Durable runs of several ranks: a step is committed when all have it, whoever is killed, wherever."""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermem
from tests.joint import ENDED, REFUSED, Way, assassin, folders, in_children, last_to_commit
from tests.killing import TINY
from tests.models import BY_NAME
from tests.parity import Outcome, assert_equal
from tests.resuming import Loop, from_step
from tiermem.durable import DurableRun
from tiermem.folder import COMMIT, PAGES
from tiermem.record import BLANK

pytestmark = pytest.mark.ranks

STEPS = 3
WAYS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "stage 3, paged": {"case": BY_NAME["gpt-tied"], "host": "760KiB"},
    "stage 2, bfloat16": {"case": BY_NAME["gpt"], "stage": 2, "dtype": torch.bfloat16},
    "stage 1, one path": {"stage": 1, "shared": True},
    "stage 0": {"stage": 0},
}


@functools.cache
def uninterrupted(name: str) -> list[Outcome]:
    """What each of two ranks has after all steps of a run that isn't durable, and that nobody killed."""
    folder = Path(tempfile.mkdtemp(prefix="tiermem-test-", dir="/var/tmp"))
    try:
        return [ended.result[1] for ended in Way(folder, **WAYS[name]).train(STEPS, mode="off")]
    finally:
        shutil.rmtree(folder)


def goes_on(way: Way, name: str, least: int) -> int:
    """Resume, train to the end, compare; the step that both began at, which is at least this one."""
    ended = way.train(STEPS)
    assert [each.status for each in ended] == [0, 0], [each.result for each in ended]
    (first, _), (other, _) = [each.result for each in ended]
    assert first == other >= least
    for expected, each in zip(uninterrupted(name), ended, strict=True):
        assert_equal(from_step(expected, first), each.result[1])
    return int(first)


@pytest.mark.parametrize(
    ("name", "victim"), [("stage 3", 1), *((name, n % 2) for n, name in enumerate(WAYS))]
)
def test_the_step_that_one_rank_has_not_committed_is_no_step(name: str, victim: int, disk: Path) -> None:
    way = Way(disk, **WAYS[name])
    ended = way.train(STEPS, before=last_to_commit(victim, 2))
    assert ended[victim].status == -signal.SIGKILL
    assert ended[1 - victim].status == ENDED
    assert ended[1 - victim].told[-1] == 2, "its own record is there"
    assert goes_on(way, name, 1) == 1
    assert len(folders(way)) == 2


def test_a_run_that_not_all_ranks_committed_anything_of_begins_anew(disk: Path) -> None:
    way = Way(disk)
    ended = way.train(STEPS, before=last_to_commit(1, 1))
    assert [each.status for each in ended] == [ENDED, -signal.SIGKILL]
    before = folders(way)
    assert goes_on(way, "stage 3", 0) == 0
    after = folders(way)
    assert len(after) == 2
    assert not set(before) & set(after)


def test_sigkill_at_any_line_of_any_rank(disk: Path) -> None:
    way = Way(disk)
    draw = random.Random(1)
    durable = 0
    for attempt in range(5):
        ended = way.train(STEPS, before=assassin(attempt % 2, draw.randrange(1, 40_000)))
        for each in ended:
            assert each.status in (0, ENDED, -signal.SIGKILL), each.result
            if each.told:
                assert each.told[0] >= durable, (
                    f"step {durable} was durable, and step {each.told[0]} came back"
                )
        durable = max(durable, min((each.told[-1] for each in ended if each.told), default=0))
    goes_on(way, "stage 3", durable)


def rank_folder(way: Way, rank: int) -> Path:
    (path,) = (way.folder / f"rank-{rank}").iterdir()
    return path


def tear_a_record(path: Path) -> None:
    run = DurableRun.open(path)
    generations = [record.generation or 0 for record in run.records]
    run.let_go()
    os.truncate(path / f"{COMMIT}{generations.index(max(generations))}", 700)


def flip_a_bit(path: Path) -> None:
    run = DurableRun.open(path)
    row = next(row for row in run.commits()[0].rows if row["what"] != BLANK)
    run.let_go()
    with open(path / PAGES, "r+b") as file:
        file.seek(int(row["offset"]))
        byte = file.read(1)[0]
        file.seek(int(row["offset"]))
        file.write(bytes([byte ^ 1]))


def test_what_one_rank_has_lost_both_give_up(disk: Path) -> None:
    two = {"durability": {"commits": 2}}
    way = Way(disk, **two)
    assert [each.status for each in way.train(2)] == [0, 0]
    tear_a_record(rank_folder(way, 1))
    assert goes_on(way, "stage 3", 1) == 1
    flip_a_bit(rank_folder(way, 0))
    ended = way.train(STEPS + 1)
    assert ended[0].status == REFUSED
    assert "IntegrityError" in ended[0].result
    assert ended[1].status == ENDED
    assert goes_on(way, "stage 3", STEPS - 1) == STEPS - 1  # and the last step is made and committed again


def refusal(way: Way, world: int = 2) -> list[str]:
    """What each rank is told that wants to go on."""
    ended = way.train(STEPS, world)
    assert {each.status for each in ended} <= {ENDED, REFUSED}, [each.result for each in ended]
    return [each.result for each in ended]


def test_what_can_not_be_gone_on_from_is_refused_on_all_ranks(disk: Path) -> None:
    way = Way(disk, shared=True)
    assert [each.status for each in way.train(1)] == [0, 0]
    said = refusal(Way(disk, shared=True, stage=1))
    assert all("was committed with ranks.stage 3, and this is 1" in each for each in said), said
    said = refusal(Way(disk, shared=True, case=BY_NAME["odd-mlp"]))
    assert all("is of another model" in each for each in said), said
    said = refusal(way, 3)
    assert all("2 ranks together committed it, where this is 3 ranks together" in each for each in said), said
    with pytest.raises(
        tiermem.ConfigError, match="2 ranks together committed it, where this is one process alone"
    ):
        Loop(TINY, disk / "shared", resume="auto")
    lost = next((disk / "shared").glob("*.1of2"))
    lost.rename(disk / lost.name)
    said = refusal(way)
    assert all("rank 1 has no folder of it under its disk.paths" in each for each in said), said
    (disk / lost.name).rename(lost)
    ended = way.train(2)
    assert [each.result[0] for each in ended] == [1, 1]


def test_a_commit_by_hand_is_on_all_ranks_or_says_so(disk: Path) -> None:
    way = Way(disk)

    def work(rank: int, told: Callable[[int], None]) -> Any:
        loop = way.loop(rank, resume=None, mode="manual")
        with loop.model:
            loop.train(1)
            loop.model.commit()
            loop.model.commit()
            loop.train(2)
            sync = loop.model._runtime.disk.sync
            if rank == 1:
                loop.model._runtime.disk.sync = lambda: (_ for _ in ()).throw(
                    OSError(5, "Input/output error", "its")
                )
            with pytest.raises(
                tiermem.TransferError if rank == 1 else tiermem.PagingError, match="Input/output error"
            ):
                loop.model.commit()
            told(loop.model.stats()["commits"]["committed_step"])
            loop.model._runtime.disk.sync = sync
            loop.train(3)
            loop.model.commit()
            told(loop.model.stats()["commits"]["committed_step"])
            loop.train(STEPS + 1)  # isn't committed
            return loop.outcome()

    ended = in_children(2, disk, work)
    assert [(each.status, each.told) for each in ended] == [(0, [1, 3])] * 2, [each.result for each in ended]
    assert goes_on(way, "stage 3", STEPS) == STEPS
