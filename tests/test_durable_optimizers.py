"""Durable runs with optimizers of other classes: the pages of their state are part of commits, and come back."""

from __future__ import annotations

import functools
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tiermem
from tests.joint import ENDED, Way, last_to_commit
from tests.models import BY_NAME
from tests.optimizers import ELEMENTWISE, MIXING
from tests.parity import Outcome, assert_equal
from tests.resuming import Loop, from_step, seed
from tests.test_durability import crash, give_up, options
from tests.test_integrity import change, page_file
from tiermem.cli import app
from tiermem.durable import DurableRun
from tiermem.folder import COMMIT
from tiermem.layout import pages_of
from tiermem.page import Kind
from tiermem.record import BLANK

CLASSES: dict[str, Any] = {**ELEMENTWISE, **MIXING}
NAME = "gpt-tied"
UNTIL = 5


@functools.cache
def uninterrupted(kind: str) -> Outcome:
    return Loop(BY_NAME[NAME], kind=CLASSES[kind]).train(UNTIL).close()


def state_pages(loop: Loop) -> list[int]:
    return [page.number for page in loop.model._runtime.table if page.kind is Kind.STATE]


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("SGD with momentum", "on disk"),
        ("SGD with momentum", "host placement"),
        ("NAdam", "in memory"),
        ("Lion", "on disk"),
        ("Adafactor", "on disk"),
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(kind: str, way: str, disk: Path) -> None:
    expected = uninterrupted(kind)
    chosen = {**options(NAME, way), "kind": CLASSES[kind]}
    loop = Loop(BY_NAME[NAME], disk / "run", **chosen)
    for step in range(1, 4):
        loop.train(step)
        crash(loop, disk / "run", disk / f"left-{step}")
    number = len(state_pages(loop))
    give_up(loop)
    for step in (1, 3):
        resumed = Loop(BY_NAME[NAME], disk / f"left-{step}", resume="auto", **chosen)
        assert resumed.step == step
        assert len(state_pages(resumed)) == number
        resumed.train(step + 1).model.close()
        again = Loop(BY_NAME[NAME], disk / f"left-{step}", resume="auto", **chosen)
        assert again.step == step + 1
        assert_equal(from_step(expected, step + 1), again.train(UNTIL).close())


def test_a_step_that_is_lost_makes_its_pages_again(disk: Path) -> None:
    expected = uninterrupted("SGD with momentum")
    chosen = {**options(NAME, "on disk"), "kind": CLASSES["SGD with momentum"]}
    loop = Loop(BY_NAME[NAME], disk / "run", mode="manual", **chosen)
    loop.model.commit()  # before there is any state
    number_before = len(state_pages(loop))
    loop.one()
    loop.model.commit()
    number = len(state_pages(loop))
    assert number_before == 0 < number
    left = crash(loop, disk / "run", disk / "left")
    give_up(loop)
    (folder,) = left.iterdir()
    run = DurableRun.open(folder)
    newest = run.commits()[0].generation
    records = [record.generation for record in run.records]
    run.let_go()
    # As if the run had been killed before the record was written: what is said of the pages is there already.
    (folder / f"{COMMIT}{records.index(newest)}").write_bytes(b"")
    resumed = Loop(BY_NAME[NAME], left, resume="auto", mode="manual", **chosen)
    assert resumed.step == 0
    seed(3)
    resumed.train(UNTIL)
    assert len(state_pages(resumed)) == number, "the places that were given to them are used"
    resumed.model.commit()
    assert_equal(expected, resumed.close())


def test_damage_in_its_state_is_named_and_the_commit_before_is_there(disk: Path) -> None:
    expected = uninterrupted("SGD with momentum")
    chosen: dict[str, Any] = {
        "kind": CLASSES["SGD with momentum"],
        "durability": {"mode": "step", "commits": 2},
    }
    loop = Loop(BY_NAME[NAME], disk / "run", **chosen).train(3)
    loop.close()
    (path,) = (disk / "run").iterdir()
    run = DurableRun.open(path)
    commit, pages = run.commits()[0], pages_of(run.layout)
    run.let_go()
    number, row = next(
        (n, row) for n, row in enumerate(commit.rows) if pages[n][1] == "state" and row["what"] != BLANK
    )
    change(page_file(disk / "run"), int(row["offset"]) + 9)
    result = CliRunner().invoke(app, ["verify", str(disk / "run"), "--mark"])
    assert result.exit_code == 1
    assert f"the state page of unit {pages[number][0]}" in result.stdout
    resumed = Loop(BY_NAME[NAME], disk / "run", resume="auto", **chosen)
    assert resumed.step == 2
    assert_equal(from_step(expected, 2), resumed.train(UNTIL).close())


def test_another_class_is_refused(disk: Path) -> None:
    sgd, lion = CLASSES["SGD with momentum"], CLASSES["Lion"]
    for first, second, words in (
        (sgd, lion, "has the state of SGD, and this is Lion"),
        (sgd, None, "has the state of SGD, and this is tiermem's Adam or AdamW"),
        (None, sgd, "has the state of tiermem's Adam or AdamW, and this is SGD"),
    ):
        Loop(BY_NAME[NAME], disk / "run", kind=first, register=False).train(1).model.close()
        with pytest.raises(tiermem.ConfigError, match=words):
            Loop(BY_NAME[NAME], disk / "run", kind=second, register=False, resume="auto")
        shutil.rmtree(disk / "run")


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "stage"), [("SGD with momentum", 3), ("Adafactor", 0)])
def test_several_ranks(kind: str, stage: int, disk: Path) -> None:
    def way(name: str) -> Way:
        return Way(disk / name, stage=stage, kind=CLASSES[kind])

    whole = way("whole")
    whole.folder.mkdir()
    expected = [ended.result[1] for ended in whole.train(3, mode="off")]
    durable = way("durable")
    durable.folder.mkdir()
    ended = durable.train(3, before=last_to_commit(1, 2))
    assert ended[1].status == -signal.SIGKILL
    assert ended[0].status == ENDED
    ended = durable.train(3)
    assert [each.status for each in ended] == [0, 0], [each.result for each in ended]
    for before, each in zip(expected, ended, strict=True):
        first, outcome = each.result
        assert first == 1
        assert_equal(from_step(before, first), outcome)
