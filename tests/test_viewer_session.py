"""Several runs in one viewer: ranks on one clock, two runs compared; and what a run is advised to change."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from tests.viewer_traces import MS, Writer
from tiermem.trace import REASON_WORDS, Event, Phase, Reason, TraceError
from tiermem.trace.reader import TraceFile
from tiermem.trace.summary import summarise
from tiermem.viewer.advice import advice
from tiermem.viewer.session import Mode, Session


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Writer(tmp_path / "run.trace", seed=1, rank=0).write(5).close()


def ranks(tmp_path: Path, domains: list[str], apart: int) -> Session:
    paths = []
    for rank, domain in enumerate(domains):
        writer = Writer(tmp_path / f"rank{rank}.trace", rank=rank, world=len(domains))
        writer.write(2)
        paths.append(writer.close())
        raw = paths[-1].read_bytes()
        with TraceFile(paths[-1]) as trace:
            was = trace.clock_domain
        paths[-1].write_bytes(repaired(raw.replace(was.encode(), domain.encode())))
    session = Session(paths, Mode.RANKS)
    if apart:
        session.runs[1].trace.wall_ns = session.runs[0].trace.wall_ns + apart
    return session


def repaired(raw: bytes) -> bytes:
    """With the checksum of its document put right."""
    length = int.from_bytes(raw[16:20], "little")
    return raw[:20] + zlib.crc32(raw[32 : 32 + length]).to_bytes(4, "little") + raw[24:]


def test_ranks_of_one_machine_are_laid_on_its_clock(tmp_path: Path) -> None:
    session = ranks(tmp_path, ["a" * 16, "a" * 16], apart=10**12)
    document = session.document()
    first, second = (run.trace for run in session.runs)
    shifts = [run["shift"] for run in document["runs"]]
    base = [run.index.base for run in session.runs]
    assert shifts == [base[0] - first.monotonic_ns, base[1] - first.monotonic_ns]
    assert [run["label"] for run in document["runs"]] == ["rank 0", "rank 1"]
    assert "one machine" in document["clocks"]
    assert second.monotonic_ns != first.monotonic_ns


def test_ranks_of_several_machines_are_laid_together_by_the_time_of_day(tmp_path: Path) -> None:
    session = ranks(tmp_path, ["a" * 16, "b" * 16], apart=5 * 10**9)
    document = session.document()
    second = session.runs[1]
    assert document["runs"][1]["shift"] == 5 * 10**9 + second.index.base - second.trace.monotonic_ns
    assert "several machines" in document["clocks"]


def test_two_runs_that_are_compared_begin_their_first_step_together(tmp_path: Path) -> None:
    before = Writer(tmp_path / "a.trace", seed=1).write(4).close()
    late = Writer(tmp_path / "b.trace", seed=2)
    late.now += 10**9
    late.record(Event.COMPUTE, late.now - 10**9, MS, 0, phase=Phase.NONE)
    session = Session([before, late.write(6).close()], Mode.COMPARE)
    for run in session.document()["runs"]:
        assert run["shift"] + run["steps"]["start"][0] == 0
    comparison = session.comparison()
    assert comparison["steps"] == [4, 6]
    for side, run in zip(("before", "after"), session.runs, strict=True):
        moved = sum(unit[side]["nbytes"] for unit in comparison["units"]) * run.summary.steps.count
        assert moved == pytest.approx(sum(link.nbytes for link in run.summary.links))


def test_units_that_one_run_lacks_are_told_as_such(tmp_path: Path) -> None:
    before = Writer(tmp_path / "a.trace", names=["a", "b"]).write(1).close()
    after = Writer(tmp_path / "b.trace", names=["b", "c"]).write(1).close()
    units = Session([before, after], Mode.COMPARE).comparison()["units"]
    assert [unit["name"] for unit in units] == ["a", "b", "c"]
    assert [(unit["before"] is None, unit["after"] is None) for unit in units] == [
        (False, True),
        (False, False),
        (True, False),
    ]


def test_a_trace_that_is_none_is_told_and_the_others_are_shown(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("hello")
    assert Session([path, other], Mode.RANKS).document()["errors"] == [
        f"{other} is not a tiermem trace: it begins with b'hello'"
    ]
    for mode, paths in ((Mode.SINGLE, [other]), (Mode.COMPARE, [path, other])):
        with pytest.raises(TraceError, match="not a tiermem trace"):
            Session(paths, mode)


CAUSES = {
    Reason.NOT_PREFETCHED: "lookahead",
    Reason.PREFETCHED_LATE: "budget",
    Reason.NO_FRAME: "[host] budget",
    Reason.DISK_BUSY: "gradients",
    Reason.UPDATE: "threads",
    Reason.COLLECTIVE: "slowest",
}


@pytest.mark.parametrize(("cause", "told"), CAUSES.items(), ids=lambda each: getattr(each, "name", ""))
def test_what_to_change_follows_from_the_first_cause(tmp_path: Path, cause: Reason, told: str) -> None:
    writer = Writer(tmp_path / "run.trace", names=["a"])
    writer.write(1)
    writer.record(Event.STALL, writer.now, 10**9, 0, 0, reason=cause, phase=Phase.FORWARD)
    writer.now += 10**9
    writer.write(1)
    writer.record(Event.STEP, writer.now - 10**9, 10**9)
    with TraceFile(writer.close()) as trace:
        figures = summarise(trace)
    assert next(iter(figures.stalls_by_reason)) == REASON_WORDS[cause]
    assert figures.stall_share > 0.05
    assert told in advice(figures, None)
    if cause in (Reason.COLLECTIVE, Reason.UPDATE):
        # The made-up steps wait for the disk too, which a first cause without a link has nothing to do with.
        assert "disk" not in figures.verdict


def test_what_to_change_looks_at_the_policy(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.trace", names=["a"])
    writer.record(Event.STALL, writer.now, 10**9, 0, 0, reason=Reason.NOT_PREFETCHED, phase=Phase.FORWARD)
    writer.record(Event.STEP, writer.now, 2 * 10**9)
    with TraceFile(writer.close()) as trace:
        figures = summarise(trace)
    assert 'prefetch = "lookahead"' in advice(figures, '[policy]\nprefetch = "none"\n')
    assert 'prefetch = "lookahead"' not in advice(figures, "[policy")
