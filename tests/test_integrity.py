"""Damage: what isn't as it was written is named, never used, and recovered from the commit before if there is one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import tiermem
from tests.models import BY_NAME
from tests.parity import assert_equal
from tests.resuming import Loop, from_step
from tests.test_durability import give_up, uninterrupted
from tiermem.cli import app
from tiermem.durable import DurableRun
from tiermem.folder import COMMIT, DAMAGE, PAGES
from tiermem.record import BLANK
from tiermem.trainer import AdamW

NAME = "odd-mlp"
STEPS_MADE = 3


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Run folders of a run of three steps, by how many commits it keeps."""
    known: dict[int, Path] = {}

    def make(commits: int) -> Path:
        if commits not in known:
            known[commits] = tmp_path_factory.mktemp("made")
            loop = Loop(BY_NAME[NAME], known[commits], durability={"mode": "step", "commits": commits})
            loop.train(STEPS_MADE).model.close()
        return known[commits]

    return make


@pytest.fixture
def run(made: Callable[[int], Path], disk: Path) -> Callable[[int], Path]:
    """A copy of such a run to be damaged; the folder that it is in."""

    def copy(commits: int) -> Path:
        shutil.copytree(made(commits), disk / "run")
        return disk / "run"

    return copy


def rows(folder: Path) -> list[tuple[str, int, int]]:
    """The pages of the newest commit: in words, first byte, bytes."""
    (path,) = folder.iterdir()
    opened = DurableRun.open(path)
    commit, layout = opened.commits()[0], opened.layout
    opened.let_go()
    return [
        (f"{layout['pages'][number][1]} page of unit", int(row["offset"]), layout["pages"][number][3])
        for number, row in enumerate(commit.rows)
        if row["what"] != BLANK
    ]


def page_file(folder: Path) -> Path:
    return next(folder.iterdir()) / PAGES


def change(path: Path, offset: int, data: bytes | None = None) -> None:
    """Write ``data`` there, or flip one bit."""
    with open(path, "r+b") as file:
        if data is None:
            file.seek(offset)
            data = bytes([file.read(1)[0] ^ 0x10])
        file.seek(offset)
        file.write(data)


def go_on(folder: Path, commits: int = 1, until: int = 5) -> Loop:
    loop = Loop(BY_NAME[NAME], folder, resume="auto", durability={"mode": "step", "commits": commits})
    try:
        return loop.train(until)
    except tiermem.IntegrityError:
        give_up(loop)
        raise


@pytest.mark.parametrize("kind", ["parameter", "exp_avg", "exp_avg_sq"])
def test_a_flipped_bit(kind: str, run: Callable[[int], Path], caplog: pytest.LogCaptureFixture) -> None:
    expected = uninterrupted(NAME)
    folder = run(2)
    what, offset, nbytes = next(page for page in rows(folder) if page[0].split()[0] == kind)
    change(page_file(folder), offset + nbytes - 1)  # of what pads it, even
    with pytest.raises(tiermem.IntegrityError) as info:
        go_on(folder, 2)
    text = str(info.value)
    assert what in text
    assert f"{page_file(folder)}" in text
    assert f"offset {offset:,} have checksum" in text
    assert 'the commit of step 2 has another copy: close the model, and wrap it with resume="auto"' in text
    assert info.value.path == str(page_file(folder))
    assert info.value.expected != info.value.found
    loop = go_on(folder, 2, 0)
    assert loop.step == STEPS_MADE - 1
    assert "resumes from commit 2 (step 2), because commit 3 (step 3) is damaged" in caplog.text
    assert_equal(from_step(expected, STEPS_MADE - 1), loop.train().close())
    assert step_of(folder, 2) == 6


def step_of(folder: Path, commits: int = 1) -> int:
    """The step that a resume goes on from."""
    loop = go_on(folder, commits, 0)
    give_up(loop)
    return loop.step


def test_without_another_commit_it_is_said_and_nothing_is_made_up(run: Callable[[int], Path]) -> None:
    folder = run(1)
    (path,) = folder.iterdir()
    slots = next(slots for slots in json.loads((path / "run.json").read_text())["slots"] if len(slots) == 2)
    for _, offset in slots:
        change(page_file(folder), offset)
    with pytest.raises(tiermem.IntegrityError, match="no commit is kept that has another copy"):
        go_on(folder)
    with pytest.raises(
        tiermem.ConfigError, match=r"commit 3 \(step 3\) is damaged.*(?s:.)*no whole commit is left"
    ):
        go_on(folder)
    assert page_file(folder).exists()


def test_a_stale_page_and_a_foreign_one(run: Callable[[int], Path]) -> None:
    folder = run(2)
    pages = rows(folder)
    (first, second) = [page for page in pages if page[2] == pages[0][2]][:2]
    whole = page_file(folder).read_bytes()
    change(page_file(folder), first[1], whole[second[1] : second[1] + second[2]])
    with pytest.raises(tiermem.IntegrityError, match=first[0]):
        go_on(folder, 2)
    shutil.rmtree(folder)
    folder = run(2)
    (path,) = folder.iterdir()
    opened = DurableRun.open(path)
    number = next(number for number, row in enumerate(opened.commits()[0].rows) if row["what"] != BLANK)
    newest, older = (int(commit.rows[number]["offset"]) for commit in opened.commits()[:2])
    opened.let_go()
    assert newest != older
    change(
        page_file(folder), newest, whole[older : older + pages[0][2]]
    )  # as if the last write had been lost
    with pytest.raises(tiermem.IntegrityError):
        go_on(folder, 2)
    assert step_of(folder, 2) == STEPS_MADE - 1


def test_a_truncated_page_file(run: Callable[[int], Path], caplog: pytest.LogCaptureFixture) -> None:
    folder = run(2)
    end = max(offset for _, offset, _ in rows(folder))
    os.truncate(page_file(folder), end)
    assert step_of(folder, 2) == STEPS_MADE - 1
    assert "the file ends before it does" in caplog.text


def test_a_page_file_that_is_gone(run: Callable[[int], Path]) -> None:
    folder = run(2)
    page_file(folder).unlink()
    with pytest.raises(tiermem.ConfigError, match="the file ends before it does"):
        go_on(folder, 2)
    (path,) = folder.iterdir()
    assert not (path / PAGES).exists()


def newest_slot(folder: Path) -> Path:
    (path,) = folder.iterdir()
    opened = DurableRun.open(path)
    generations = [record.generation or 0 for record in opened.records]
    opened.let_go()
    return path / f"{COMMIT}{generations.index(max(generations))}"


@pytest.mark.parametrize("where", ["header", "table", "state", "cut", "zeroed"])
@pytest.mark.parametrize("commits", [1, 2])
def test_a_damaged_record(where: str, commits: int, run: Callable[[int], Path], caplog: Any) -> None:
    expected = uninterrupted(NAME)
    folder = run(commits)
    slot = newest_slot(folder)
    if where == "cut":
        os.truncate(slot, 700)
    elif where == "zeroed":
        change(slot, 0, bytes(512))
    else:
        change(slot, {"header": 20, "table": 600, "state": 3000}[where])
    if commits == 2:
        loop = go_on(folder, 2, 0)
        assert loop.step == STEPS_MADE - 1
        assert str(slot) in caplog.text
        assert_equal(from_step(expected, STEPS_MADE - 1), loop.train().close())
        return
    # The record before names pages that the lost commit didn't touch: the run ended right behind it. So it is whole,
    # which is found out by reading all of it.
    loop = go_on(folder, 1, 0)
    assert loop.step == STEPS_MADE - 1
    assert_equal(from_step(expected, STEPS_MADE - 1), loop.train().close())


def test_a_lost_record_whose_forerunner_was_written_over(disk: Path) -> None:
    loop = Loop(BY_NAME[NAME], disk / "run").train(STEPS_MADE)
    loop.case.loss(loop.model, loop.data.draw()).backward()
    loop.model.clip_grad_norm_(0.5)
    loop.model._runtime.commits.end_update = lambda: None  # killed before the commit
    loop.optimizer.step()
    with loop.model._runtime.door:
        loop.model._runtime.pager.flush()
    shutil.copytree(disk / "run", disk / "left")
    give_up(loop)
    change(newest_slot(disk / "left"), 600)
    with pytest.raises(
        tiermem.ConfigError, match=r"its digest is not that of its bytes(?s:.)*commit 2 .* is damaged"
    ):
        go_on(disk / "left")


def test_a_gradient_that_comes_back_otherwise(disk: Path) -> None:
    """Pages that no commit has are checked as well, in any run."""
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    config = {"host": {"budget": "96KiB"}, "disk": {"paths": [str(disk)]}, "policy": {"units": ["*"]}}
    model = tiermem.TieredModule(net, config)
    model(torch.ones(2, 64)).sum().backward()
    runtime = model._runtime
    with runtime.door:
        runtime.pager.transfers.drain()
    page = next(
        p for p in runtime.table if p.kind.name == "GRADIENT" and p.state.name == "DISK" and not p.blank
    )
    assert page.extent is not None
    assert runtime.disk is not None
    change(Path(runtime.disk.files[0].path), page.extent[1])
    with pytest.raises(
        tiermem.IntegrityError, match=f"gradient page of unit {page.unit}, {runtime.units[page.unit].name} "
    ):
        AdamW(model.parameters()).step()
    runtime.check()
    model.close(restore=False)
    assert list(disk.iterdir()) == []


def test_without_checksums_nothing_is_known_of_them(disk: Path) -> None:
    sections = {"integrity": {"checksums": False}}
    Loop(BY_NAME[NAME], disk, **sections).train(2).model.close()
    resumed = Loop(BY_NAME[NAME], disk, resume="auto", **sections)
    assert {page.checksum for page in resumed.model._runtime.table} == {None}
    resumed.train(3).model.close()
    result = verify("--json", disk)
    assert json.loads(result.stdout)[0]["damaged"] is False


# -- the command --------------------------------------------------------------------------------------------


def verify(*arguments: Any) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["verify", *map(str, arguments)])


def test_verify_finds_all_damage_and_changes_nothing(run: Callable[[int], Path]) -> None:
    expected = uninterrupted(NAME)
    folder = run(2)
    (path,) = folder.iterdir()
    before = {each.name: each.read_bytes() for each in path.iterdir()}
    result = verify(path)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("whole") == 2
    assert {each.name: each.read_bytes() for each in path.iterdir()} == before
    pages = rows(folder)
    for number in (1, 4):
        change(page_file(folder), pages[number][1] + 5)
    result = verify(folder, "--json")
    assert result.exit_code == 1
    (report,) = json.loads(result.stdout)
    assert [row["damaged_pages"] for row in report["commits"]] == [2, 0, None]
    assert [row["step"] for row in report["commits"]] == [3, 2, 1]
    for number, problem in zip((1, 4), report["problems"], strict=True):
        assert pages[number][0] in problem
        assert f"at byte {pages[number][1]:,} of {page_file(folder)}" in problem
    assert not (path / DAMAGE).exists()
    assert verify(folder, "--mark").exit_code == 1
    assert (path / DAMAGE).exists()
    loop = go_on(folder, 2, 0)
    assert loop.step == STEPS_MADE - 1  # at once, and not when a page turns up
    assert_equal(from_step(expected, STEPS_MADE - 1), loop.train().close())


def test_verify_of_a_run_in_use_and_of_nothing(disk: Path) -> None:
    loop = Loop(BY_NAME[NAME], disk).train(1)
    result = verify(disk)
    assert "is in use by a run that lives" in result.stdout.replace("\n", " ")
    loop.model.close()
    (disk / "empty").mkdir()
    result = verify(disk / "empty")
    assert result.exit_code == 2
    assert "there is no durable run and no checkpoint in" in result.stderr
    assert verify(disk / "missing").exit_code == 2


def test_the_doctor_lists_runs_and_clears_dead_ones(disk: Path, run: Callable[[int], Path]) -> None:
    folder = run(1)
    living = Loop(BY_NAME["gpt"], folder)
    shutil.copytree(living.model._runtime.run.path, folder / "tiermem-durable-000009-00000000")
    dead = folder / "tiermem-run-1-dead"
    dead.mkdir()
    (dead / PAGES).write_bytes(bytes(8192))
    foreign = folder / "tiermem-run-2-foreign"
    foreign.mkdir()
    (foreign / "notes").write_text("mine")

    def doctor(*options: str) -> dict[str, Any]:
        arguments = ["doctor", "--no-speed", "--json", "--path", str(folder), *options]
        result = CliRunner().invoke(app, arguments)
        return next(f for f in json.loads(result.stdout)["findings"] if f["name"] == "runs")

    found = doctor()
    states = {each["name"]: each["state"] for each in found["figures"]["runs"]}
    assert sorted(states.values()) == ["alive", "dead", "dead", "dead", "durable"]
    assert found["verdict"] == "slower"
    assert dead.exists()
    found = doctor("--clear")
    assert sorted(found["figures"]["removed"]) == ["tiermem-durable-000009-00000000", "tiermem-run-1-dead"]
    left = {each["name"]: each["state"] for each in found["figures"]["runs"]}
    assert sorted(left.values()) == ["alive", "dead", "durable"]  # what has a foreign file in it stays
    assert (foreign / "notes").exists()
    living.model.close()
    assert step_of(folder) == STEPS_MADE
