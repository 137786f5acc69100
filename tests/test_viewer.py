"""The viewer's model: what it draws and adds up is what the summary says, to the nanosecond and the byte."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.viewer_traces import MS, NBYTES, Writer
from tiermem.trace import Event, Phase, Reason, Tier
from tiermem.trace.errors import TraceError
from tiermem.trace.reader import TraceFile
from tiermem.viewer import index as index_module
from tiermem.viewer import tiles as tiles_module
from tiermem.viewer.index import Index
from tiermem.viewer.now import now
from tiermem.viewer.rows import Rows
from tiermem.viewer.run import Run
from tiermem.viewer.session import pyramid
from tiermem.viewer.tiles import NUM, tile, top_level


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Writer(tmp_path / "run.trace", seed=1, rank=0).write(20).close()


@pytest.fixture
def run(path: Path):
    run = Run(path)
    yield run
    run.close()


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few records are many, so that small traces take the ways of large ones."""
    monkeypatch.setattr(tiles_module, "MOST_SPANS", 100)
    monkeypatch.setattr(tiles_module, "_MOST_RECORDS", 600)
    monkeypatch.setattr(index_module, "SMALLEST_BLOCK", 16)


def level_of(run: Run, number: int) -> list[dict]:
    """All tiles of a level that reach into the run."""
    width = NUM << number
    return [run.tile(number, index) for index in range(run.index.end // width + 1)]


def sums(tiles: list[dict], what: str) -> dict[str, int]:
    keys = {key for each in tiles for key in each[what]}
    return {key: sum(sum(each[what].get(key, [])) for each in tiles) for key in keys}


def check_against_summary(busy: dict[str, int], nbytes: dict[str, int], figures) -> None:
    assert busy.get("stall", 0) / 1e9 == pytest.approx(figures.stall_s, abs=1e-9)
    for phase, times in figures.phases.items():
        compute = busy.get(f"compute+stall:{phase}", 0) - busy.get(f"stall:{phase}", 0)
        assert compute / 1e9 == pytest.approx(times.compute_s, abs=1e-9)
        assert busy.get(f"stall:{phase}", 0) / 1e9 == pytest.approx(times.stall_s, abs=1e-9)
    for link in figures.links:
        name = f"{link.source}->{link.target}"
        assert nbytes[name] == pytest.approx(link.nbytes, abs=2)
        assert busy[f"link:{name}"] / 1e9 == pytest.approx(link.busy_s, abs=1e-9)
        kinds = {key.split(":")[1] for key in busy if key.startswith(name)}
        assert kinds == set(link.by_kind)


@pytest.mark.parametrize("down", [0, 1, 2, 4])
def test_the_tiles_of_every_level_add_up_to_the_summary(run: Run, down: int) -> None:
    tiles = level_of(run, top_level(run.index.end) - down)
    check_against_summary(sums(tiles, "busy"), sums(tiles, "nbytes"), run.summary)


@pytest.mark.parametrize("down", [0, 1, 3, 5])
def test_so_do_those_that_come_from_the_grid(path: Path, coarse: None, down: int) -> None:
    run = Run(path)
    tiles = level_of(run, top_level(run.index.end) - down)
    assert (tiles[0]["spans"] is None) == (down < 4)
    check_against_summary(sums(tiles, "busy"), sums(tiles, "nbytes"), run.summary)


def test_spans_that_overlap_count_once_however_they_were_added(path: Path) -> None:
    with TraceFile(path) as trace:
        whole = Index(trace, Rows(trace))
        whole.update()
        parts = Index(trace, Rows(trace))
        records = trace.records
        parts.base, parts.end = whole.base, whole.end
        parts._restart(len(records))
        for begin in range(0, len(records), 37):
            parts._add(records[begin : begin + 37])
    assert parts.grid.width == whole.grid.width
    for key, busy in whole.grid.busy.items():
        np.testing.assert_allclose(parts.grid.busy[key], busy, atol=1e-3)
    for name, nbytes in whole.grid.nbytes.items():
        np.testing.assert_allclose(parts.grid.nbytes[name], nbytes, rtol=1e-9, atol=1e-3)


def held_at(trace: TraceFile, time: int) -> tuple[dict[str, int], np.ndarray]:
    """What is held at a time, record by record: bytes by tier, and in the host by unit."""
    tiers = dict.fromkeys(("device", "host", "disk"), 0)
    units = np.zeros(len(trace.units), np.int64)
    for record in trace.records:
        if record["start"] >= time:
            continue
        if record["event"] == Event.RESERVE:
            tier, sign = Tier(record["target"]), 1
        elif record["event"] == Event.RELEASE:
            tier, sign = Tier(record["source"]), -1
        else:
            continue
        tiers[tier.name.lower()] += sign * int(record["nbytes"])
        if tier == Tier.HOST:
            units[record["unit"]] += sign * int(record["nbytes"])
    return tiers, units


@pytest.mark.parametrize("down", [0, 2, 5])
def test_what_is_held_is_right_at_the_end_of_every_bin(run: Run, down: int) -> None:
    level = top_level(run.index.end) - down
    number = (run.index.end // 2) // (NUM << level)
    found = run.tile(level, number)
    for bin_ in range(0, NUM, 61):
        time = run.index.base + ((number * NUM + bin_ + 1) << level)
        tiers, units = held_at(run.trace, time)
        assert found["tiers"]["host"]["last"][bin_] == tiers["host"]
        assert found["tiers"]["host"]["most"][bin_] >= tiers["host"]
        shares = [int(row[bin_], 36) for row in found["units"]["host"]]
        assert shares == pytest.approx(35 * units / (3 * NBYTES), abs=1)


def test_the_peak_is_drawn_and_so_is_what_is_held_now(path: Path, coarse: None) -> None:
    run = Run(path)
    figures = run.summary.tiers["host"]
    found = run.tile(top_level(run.index.end), 0)["tiers"]["host"]
    assert max(found["most"]) == figures.peak
    assert found["last"][-1] == figures.final


def test_a_tile_between_two_records_holds_what_was_held_before(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.trace")
    writer.write(1)
    writer.now += 10**12  # a quarter of an hour without a record
    run = Run(writer.write(1).close())
    middle = run.index.end // 2
    found = run.tile(20, middle // (NUM << 20))
    assert set(found["tiers"]["host"]["last"]) == {held_at(run.trace, run.index.base + middle)[0]["host"]}
    assert found["busy"] == {}


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_trace_in_any_order_adds_up(tmp_path: Path, data: st.DataObject) -> None:
    writer = Writer(tmp_path / "any.trace", units=2)
    for _ in range(data.draw(st.integers(0, 60))):
        event = data.draw(
            st.sampled_from([Event.STALL, Event.COMPUTE, Event.LANDED, Event.WRITEBACK, Event.OPTIMIZER])
        )
        source, target = (Tier.DISK, Tier.HOST) if event == Event.LANDED else (Tier.HOST, Tier.DISK)
        writer.record(
            event,
            writer.now + data.draw(st.integers(0, 5000)),
            data.draw(st.sampled_from([0, 1, 50, 3000])),
            data.draw(st.integers(-1, 1)),
            data.draw(st.integers(-1, 7)),
            source=source,
            target=target,
            phase=data.draw(st.sampled_from([Phase.FORWARD, Phase.BACKWARD])),
        )
    run = Run(writer.close())
    tiles = level_of(run, max(0, top_level(run.index.end) - 2))
    busy, nbytes = sums(tiles, "busy"), sums(tiles, "nbytes")
    carried = {f"{link.source}->{link.target}": link.nbytes for link in run.summary.links}
    assert busy.get("stall", 0) / 1e9 == pytest.approx(run.summary.stall_s, abs=1e-9)
    assert nbytes == pytest.approx({name: number for name, number in carried.items() if number}, abs=2)
    run.close()


@pytest.mark.parametrize("piece", [1 << 18, 7])
def test_units_and_pages_have_the_figures_of_the_summary(
    run: Run, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = run.trace.pieces
    monkeypatch.setattr(run.trace, "pieces", lambda: pieces(piece))
    units, requests = run.units(), run.summary.requests
    for what in ("units", "pages"):
        for name in ("hits", "faults", "prefetches", "used", "late", "wasted"):
            assert sum(each[name] for each in units[what]) == getattr(requests, name)
        evictions: dict[str, int] = {}
        for each in units[what]:
            for reason, number in each["evictions"].items():
                evictions[reason] = evictions.get(reason, 0) + number
        assert evictions == run.summary.evictions
        moved = {"up": 0, "down": 0}
        for link in run.summary.links:
            moved["up" if link.target == "host" else "down"] += link.nbytes
        assert {name: sum(each[name] for each in units[what]) for name in moved} == moved
    early = [unit["early_ns"] for unit in units["units"]]
    assert all(time is not None and 0 <= time <= 8 * MS for time in early)


def test_what_a_plan_fetched_ahead_was_early_too(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.trace")
    writer.ahead = Reason.PLAN
    run = Run(writer.write(4).close())
    assert all(unit["early_ns"] is not None for unit in run.units()["units"])


def test_what_is_written_later_is_taken_in(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.trace").write(2)
    run = Run(writer.path)
    before = run.document()
    assert before["live"]
    assert not run.refresh()
    writer.write(40)
    assert run.refresh()
    assert run.changed_since(before["num_records"], before["generation"]) <= before["end"]
    writer.close()
    assert run.refresh()
    whole = Run(writer.path)
    level = top_level(whole.index.end)
    for key in ("busy", "nbytes"):
        found, wanted = sums([run.tile(level, 0)], key), sums([whole.tile(level, 0)], key)
        assert found == pytest.approx(wanted, abs=2)
    assert run.document()["summary"]["state"] == "closed"


def test_a_run_begun_anew_at_the_same_place_is_shown(tmp_path: Path) -> None:
    run = Run(Writer(tmp_path / "run.trace").write(3).close())
    generation = run.generation
    Writer(tmp_path / "run.trace").write(1).close()
    assert run.refresh()
    assert run.summary.steps.count == 1
    assert run.changed_since(10**6, generation) == 0


def test_a_trace_that_is_cut_short_while_it_is_open_is_told_and_kills_nobody(tmp_path: Path) -> None:
    path = Writer(tmp_path / "run.trace").write(12).close()
    run = Run(path)
    run.document()
    whole, size = path.read_bytes(), path.stat().st_size
    os.truncate(path, size // 2)
    for ask in (run.document, run.units, lambda: run.tile(0, 0)):
        with pytest.raises(TraceError, match=f"{size // 2:,} of {size:,} bytes are left"):
            ask()
    assert run.refresh()
    assert run.document()["summary"]["damage"]
    path.write_bytes(whole)
    assert run.refresh()
    assert run.document()["summary"]["state"] == "closed"


def test_a_header_with_numbers_that_json_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="NaN"):
        Writer(tmp_path / "run.trace", limits={"disk->host": float("nan")})  # which reads what it has written


def test_an_empty_trace_is_shown_as_one(tmp_path: Path) -> None:
    run = Run(Writer(tmp_path / "run.trace", units=0, names=[]).close())
    document = run.document()
    assert (document["num_records"], document["rows"], document["advice"]) == (0, [], "")
    assert run.tile(0, 0)["spans"]["start"] == []
    assert run.units() == {"units": [], "pages": [], "pages_left_out": 0}
    assert now(run).stalls == []


@pytest.mark.parametrize("kept", [1, 0.7])
def test_a_damaged_trace_is_shown_up_to_the_damage(path: Path, kept: float) -> None:
    whole = path.read_bytes()
    if kept == 1:
        at = 65536 + 48 * 500
        path.write_bytes(whole[:at] + b"\xff" * 48 + whole[at + 48 :])
    else:
        path.write_bytes(whole[: int(kept * len(whole))])
    run = Run(path)
    document = run.document()
    assert document["summary"]["damage"]
    assert document["num_records"] == run.summary.num_records > 100
    check_against_summary(
        sums([run.tile(document["top_level"], 0)], "busy"),
        sums([run.tile(document["top_level"], 0)], "nbytes"),
        run.summary,
    )


def test_times_that_can_not_be_do_no_harm(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.trace")
    writer.write(1)
    writer.record(Event.STALL, 5, (1 << 60) - 10, 0, 0, phase=Phase.FORWARD)
    run = Run(writer.close())
    assert len(list(pyramid(run))) < 200
    json.dumps(run.document())


def test_impossible_tiles_are_refused(run: Run) -> None:
    for level, number in ((-1, 0), (61, 0), (3, -1), (3, 1 << 58)):
        with pytest.raises(ValueError, match="no tile"):
            run.tile(level, number)


def test_the_pyramid_ends_where_every_span_is_told(path: Path, coarse: None) -> None:
    run = Run(path)
    spans = {}
    for _, _, found in pyramid(run):
        if found["spans"]:
            columns = found["spans"]
            for row in zip(*columns.values(), strict=True):
                spans[row] = dict(zip(columns, row, strict=True))
    with TraceFile(path) as trace:
        assert len(spans) == len(run.rows.select(trace.records))


def test_now_is_the_end_of_the_trace(run: Run) -> None:
    found = now(run)
    assert found.seconds == pytest.approx(min(5.0, run.index.end / 1e9))
    stalls = [record for record in run.trace.records if record["event"] == Event.STALL]
    assert [stall.seconds for stall in found.stalls] == [
        int(each["duration"]) / 1e9 for each in stalls[:-9:-1]
    ]
    if run.index.end < 5 * 10**9:
        for link in run.summary.links:
            carried = found.rates[f"{link.source}->{link.target}"] * found.seconds
            assert carried == pytest.approx(link.nbytes, rel=1e-6)


def test_a_tile_is_what_the_trace_says_in_its_bins(run: Run) -> None:
    found = tile(run.index, 20, 0)
    assert found["spans"] is not None
    for start, duration, lane in zip(
        found["spans"]["start"], found["spans"]["duration"], found["spans"]["lane"], strict=True
    ):
        assert start < NUM << 20
        assert start + duration >= 0
        assert any(lane in row.lanes for row in run.rows.rows)
