"""The simulator: what a trace tells of a step, replayed under what it was recorded with and under other things."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import tiermem
from tests.test_policies_plan import reads, schedule
from tiermem.cli import app
from tiermem.cli.simulate import _smallest
from tiermem.errors import BudgetError
from tiermem.picture import draw
from tiermem.policies import LRU, Ahead, Belady, Effect, Schedule
from tiermem.policies.demand import demand
from tiermem.policies.simulate import simulate as count
from tiermem.policies.timeline import Link
from tiermem.recut import recut
from tiermem.simulator import POLICIES, LinkUse, Machine, as_recorded, moved, simulate
from tiermem.trace.errors import TraceError
from tiermem.trace.reader import TraceFile
from tiermem.trace.recorded import Recorded, recorded
from tiermem.trainer import AdamW

STEPS = 7


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Schedule, dict[str, float]]:
    """The trace of a small run out of core, the schedule that it followed, and the bytes of its last step."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(128, 128) for _ in range(8)])
    policy = {
        "device": {"kind": "cpu"},
        "host": {"budget": "512KiB"},
        "disk": {"paths": [folder]},
        "trace": {"file": folder / "run.trace"},
    }
    with tiermem.TieredModule(net, policy) as model:
        optimizer = AdamW(model.parameters(), lr=1e-3)
        links: dict[str, float] = {}
        for _ in range(STEPS):
            before = model.stats()
            model(torch.randn(4, 128)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            after = model.stats()
            links = {
                name: after[name] - before[name]
                for name in ("nbytes_read_from_disk", "nbytes_written_to_disk")
            }
        assert model._runtime is not None
        cursor = model._runtime.steps.training.cursor
        assert cursor is not None
        followed = cursor.schedule
    return folder / "run.trace", followed, links


@pytest.fixture
def step(run: tuple[Path, Schedule, dict[str, float]]) -> Recorded:
    with TraceFile(run[0]) as trace:
        return recorded(trace)


def test_a_trace_tells_the_schedule_that_was_followed(
    run: tuple[Path, Schedule, dict[str, float]], step: Recorded
) -> None:
    followed = run[1]
    assert step.schedule.pages == followed.pages
    assert step.schedule.effects == followed.effects
    assert [a[:2] for a in step.schedule.accesses] == [a[:2] for a in followed.accesses]
    assert 0 < step.num_steps < STEPS
    assert all(seconds >= 0 for seconds in step.seconds)
    assert sum(step.seconds) <= step.step_s * 1.5


def test_what_a_run_moved_is_not_below_the_bound(
    run: tuple[Path, Schedule, dict[str, float]], step: Recorded
) -> None:
    link = moved(step)
    assert link is not None
    assert link.ratio is not None
    assert link.ratio >= 1
    read, written = run[2]["nbytes_read_from_disk"], run[2]["nbytes_written_to_disk"]
    assert link.read + link.written == pytest.approx(read + written, rel=0.25)


@pytest.mark.parametrize("policy", POLICIES)
def test_more_memory_moves_less_and_a_faster_disk_waits_less(step: Recorded, policy: str) -> None:
    machine = replace(as_recorded(step), policy=policy)
    tight = simulate(step, machine)
    assert (tight.links["disk"].ratio or 0) >= 1
    assert tight.step_s >= tight.compute_s
    everything = simulate(step, replace(machine, host=1 << 30))
    assert everything.links["disk"].read == everything.links["disk"].written == 0
    assert everything.step_s == pytest.approx(everything.compute_s)
    slow = simulate(step, replace(machine, disk_read=1e7, disk_write=1e7))
    assert slow.step_s > tight.step_s
    assert simulate(step, replace(machine, compute=2.0)).compute_s == pytest.approx(tight.compute_s / 2)


def test_a_device_has_a_link_of_its_own(step: Recorded) -> None:
    found = simulate(step, replace(as_recorded(step), device=256 << 10))
    assert (found.links["device"].ratio or 0) >= 1
    assert found.links["device"].read > 0


def test_a_budget_that_holds_no_access_is_refused(step: Recorded) -> None:
    with pytest.raises(BudgetError) as error:
        simulate(step, replace(as_recorded(step), host=8192))
    assert error.value.smallest is not None
    simulate(step, replace(as_recorded(step), host=error.value.smallest))


def test_the_commands(run: tuple[Path, Schedule, dict[str, float]], tmp_path: Path) -> None:
    runner, file = CliRunner(), str(run[0])
    result = runner.invoke(app, ["simulate", file, "--host", "600KiB", "--disk-read", "3GB/s", "--json"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["machine"]["host"] == 600 << 10
    assert figures["machine"]["disk_read"] == 3e9
    assert set(figures["links"]["disk"]) == {"read", "written", "bound", "ratio", "busy_s"}
    assert "moved / bound" in runner.invoke(app, ["simulate", file]).stdout
    summary = json.loads(runner.invoke(app, ["trace", "summary", file, "--json"]).stdout)
    assert summary["step_on_disk_link"]["ratio"] >= 1
    assert "moved / bound" in runner.invoke(app, ["trace", "summary", file]).stdout.replace("\n", " ")
    picture = tmp_path / "sweep.svg"
    swept = runner.invoke(
        app, ["simulate", file, "--sweep", "host", "--out", str(picture), "--measured", file, "--json"]
    )
    assert swept.exit_code == 0, swept.output
    assert len(json.loads(swept.stdout)["measured"]) == 1
    text = picture.read_text()
    assert text.startswith("<svg")
    assert text.count("<circle") == 2  # the point, and the one that explains it
    assert runner.invoke(app, ["simulate", file, "--pcie", "fast"]).exit_code != 0
    assert runner.invoke(app, ["simulate", file, "--out", str(picture)]).exit_code != 0
    for options, message in (
        (["--pcie", "5GB/s"], "no device with memory of its own"),
        (["--sweep", "host", "--host", "1MiB"], "leave --host out"),
        (["--sweep", "host", "--out", str(tmp_path / "s.png")], "has to end in .svg"),
    ):
        refused = runner.invoke(app, ["simulate", file, *options])
        assert refused.exit_code == 2
        assert message in refused.stderr.replace("\n", " ")


def test_a_step_is_cut_again_as_another_budget_cuts_it(tmp_path: Path) -> None:
    cut = {}
    for budget in (10 << 20, 16 << 20):
        torch.manual_seed(0)
        file = tmp_path / f"{budget}.trace"
        policy = {
            "device": {"kind": "cpu"}, "host": {"budget": budget}, "disk": {"paths": [tmp_path]},
            "trace": {"file": file}, "policy": {"units": ["*"]},
        }  # fmt: skip
        with tiermem.TieredModule(nn.Sequential(*[nn.Linear(384, 384) for _ in range(16)]), policy) as model:
            optimizer = AdamW(model.parameters(), lr=1e-3)
            for _ in range(4):
                model(torch.randn(4, 384)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        with TraceFile(file) as trace:
            cut[budget] = recorded(trace)
    fine, coarse = cut.values()
    assert fine.part_numel < coarse.part_numel
    assert recut(fine, 10 << 20) is fine
    for known, other in ((fine, coarse), (coarse, fine)):
        found = recut(known, other.budgets["host"])
        assert _uses(found) == _uses(other)
        assert sum(found.sizes.values()) == sum(other.sizes.values())
        changed = len(found.schedule) - len(known.schedule)
        assert sum(found.seconds) == pytest.approx(
            sum(known.seconds) + changed * known.effort.update, rel=0.2
        )


def test_the_least_budget_of_a_sweep_is_one_for_its_own_parts(
    step: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(recorded: Recorded, machine: Machine, *, bounds: bool) -> None:
        needed = (
            100 if machine.host < 100 else 120
        )  # what works with the parts that less has, doesn't with its own
        if machine.host < needed:
            raise BudgetError(needed, machine.host, "host", needed, "an access")

    monkeypatch.setattr("tiermem.simulator.simulate", run)
    assert _smallest(step, Machine(1)) == 120


def _uses(step: Recorded) -> list[tuple[object, ...]]:
    """Each access, with kinds and sizes in the place of pages' numbers."""
    schedule = step.schedule
    return [
        (
            access,
            *[
                (step.kinds[page], step.sizes[page], int(effect))
                for page, effect in zip(pages, each, strict=True)
            ],
        )
        for access, pages, each in zip(schedule.accesses, schedule.pages, schedule.effects, strict=True)
    ]


def test_steps_that_were_never_the_schedule_still_say_what_accesses_compute(tmp_path: Path) -> None:
    # One batch and two in turns: each step is recognised, and none is followed by its like.
    file = tmp_path / "t.trace"
    policy = {
        "device": {"kind": "cpu"}, "host": {"budget": 1 << 20}, "disk": {"paths": [tmp_path]},
        "trace": {"file": file}, "policy": {"units": ["*"]},
    }  # fmt: skip
    layers = [nn.Linear(128, 128) for _ in range(8)]
    with tiermem.TieredModule(nn.Sequential(*layers), policy) as model:
        optimizer = AdamW(model.parameters(), lr=1e-3)
        for number in range(6):
            order = torch.randperm(8, generator=torch.Generator().manual_seed(number)).tolist()
            x = torch.randn(256, 128)
            for index in order:
                x = model.module[index](x)
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    with TraceFile(file) as trace:
        step = recorded(trace)
    assert not step.alike
    assert step.num_steps > 0
    assert moved(step) is None
    assert all(each > 0 for each in step.seconds)
    found = simulate(step, as_recorded(step))
    assert 0.3 * step.step_s < found.step_s < 3 * step.step_s
    result = CliRunner().invoke(app, ["simulate", str(file)])
    assert result.exit_code == 0, result.output
    assert "no recorded step was wholly the schedule" in result.stderr


def test_bytes_that_nothing_demands_have_no_ratio() -> None:
    assert LinkUse(0, 0, 0, 0.0).ratio == 1
    assert LinkUse(1, 0, 0, 0.0).ratio is None
    assert LinkUse(2, 4, 3, 0.0).ratio == 2


def test_a_trace_without_a_schedule_is_refused(tmp_path: Path) -> None:
    trace = tiermem.trace.Trace.create(tmp_path / "t", units=[], pages=[], budgets={"host": 1})
    trace.close()
    with TraceFile(tmp_path / "t") as file, pytest.raises(TraceError, match="no schedule"):
        recorded(file)


@pytest.mark.parametrize("policy", [LRU, Belady])
def test_demand_loads_what_counting_counts(policy: type[LRU] | type[Belady]) -> None:
    steps = reads(*[[page] for page in (*range(8), *reversed(range(8)))])
    sizes = dict.fromkeys(range(8), 4096)
    link = Link(1e9, 1e9)
    found = demand(steps, sizes, 5 * 4096, policy(), seconds=[0.0] * 16, link=link, ahead=Ahead(0, 0))
    counts = [count(steps, sizes, 5 * 4096, policy(), n).nbytes for n in (2, 3)]
    assert (found.loaded, found.written) == (counts[1] - counts[0], 0)
    assert found.timeline.step == pytest.approx(found.loaded / link.read)


def test_demand_writes_what_is_dirty_and_needed() -> None:
    writes, fresh, spent = Effect.WRITES, Effect.FRESH | Effect.WRITES, Effect.SPENDS
    sizes = dict.fromkeys(range(3), 4096)
    scan = schedule([(0, writes)], [(1, writes)], [(2, writes)])
    ahead = Ahead(0, 0)
    found = demand(scan, sizes, 4096, LRU(), seconds=[0.0] * 3, link=Link(1e9, 1e9), ahead=ahead)
    assert (found.loaded, found.written) == (3 * 4096, 3 * 4096)
    gone = schedule([(0, fresh)], [(0, spent)], [(1, fresh)], [(1, spent)])
    found = demand(gone, sizes, 4096, LRU(), seconds=[0.0] * 4, link=Link(1e9, 1e9), ahead=ahead)
    assert (found.loaded, found.written) == (0, 0)


def test_a_picture_needs_a_point() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw("none", [])
    assert "<polyline" in draw("one", [(1.0, 2.0)])
