"""Overlap, asserted on the order of events in the trace: what is begun before what ends. No clock is compared."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiermem
from tests.conftest import Wrap
from tests.models import BY_NAME
from tests.parity import adamw, assert_equal, build, state_nbytes, train
from tiermem.trace import Event, Phase, Reason, Tier
from tiermem.trace.reader import TraceFile

CASE = BY_NAME["gpt"]
STEPS = 5


def traced(
    wrap: Wrap, disk: Path, share: float, three: bool = False, **policy: Any
) -> tuple[TraceFile, dict[str, Any]]:
    """The trace of a training run with ``share`` of the state as the host budget, and its stats."""
    net = build(CASE)
    file = disk / "run.trace"
    model = wrap(
        net, host=int(share * state_nbytes(net)), device=0.5, three=three, trace={"file": str(file)},
        policy={"units": ["h.*.mlp.*", "h.*.attention.*", "wte", "head"], **policy},
    )  # fmt: skip
    train(model, adamw(model), CASE, steps=STEPS, accumulation=1)
    stats = model.stats()
    model.close(restore=False)
    return TraceFile(file), stats


def of(records: Any, event: Event, **fields: Any) -> Any:
    """The records of one event with these fields."""
    found = records[records["event"] == event]
    for name, value in fields.items():
        found = found[found[name] == value]
    return found


@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
def test_pages_are_fetched_while_the_unit_before_computes(three: bool, wrap: Wrap, disk: Path) -> None:
    trace, _ = traced(wrap, disk, 0.3, three)
    last = trace.records[trace.records["step"] == STEPS - 2]
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        spans = np.sort(of(last, Event.COMPUTE, phase=phase), order="start")
        spans = spans[spans["unit"] > 0]
        early = late = 0
        for before, span in pairwise(spans):
            pages = [n for n, p in trace.pages.items() if p.unit == span["unit"] and p.kind == "parameter"]
            # Whether it had arrived is the disk's affair; that it was on its way is ours.
            faults = [
                r
                for r in of(last, Event.FAULT, phase=phase, reason=Reason.NOT_PREFETCHED)
                if r["page"] in pages
            ]
            early += not faults
            late += bool(faults)
            for fetched in of(last, Event.PREFETCH):
                if fetched["page"] in pages and fetched["start"] < span["start"]:
                    # begun before the unit was entered: at the latest when the one before was
                    assert (
                        fetched["start"] <= before["start"]
                        or fetched["start"] < before["start"] + before["duration"]
                    )
        assert early > 4 * late, f"{phase.name}: {early} units found their pages, {late} did not"


def test_the_optimizer_reads_ahead_of_its_arithmetic(wrap: Wrap, disk: Path) -> None:
    # A read has to wait for a place that is still being written out of, on a disk that others use too: the best of
    # three runs counts. With less memory than this, pages as large as these leave no room beside what is used.
    shares = []
    for _ in range(3):
        trace, _ = traced(wrap, disk, 0.6)
        shares.append(begun_in_time(trace))
        if shares[-1] > 0.8:
            return
    pytest.fail(f"of the parts, {shares} were begun before the arithmetic on the one before ended")


def begun_in_time(trace: TraceFile) -> float:
    """The share of the optimizer's updates whose reads had begun when the update before them ended."""
    last = trace.records[trace.records["step"] == STEPS - 2]
    updates = np.sort(of(last, Event.OPTIMIZER), order="start")
    assert len(updates) > 10
    begun = 0
    for update, after in pairwise(updates):
        pages = [
            n
            for n, p in trace.pages.items()
            if p.unit == after["unit"] and p.kind in ("exp_avg", "exp_avg_sq")
        ]
        ends = update["start"] + update["duration"]
        reads = [
            r
            for r in of(last, Event.LANDED, source=Tier.DISK)
            if r["page"] in pages and r["reason"] in (Reason.LOOKAHEAD, Reason.PLAN)
        ]
        demanded = [r for r in of(last, Event.FAULT, phase=Phase.OPTIMIZER) if r["page"] in pages]
        begun += any(r["start"] < ends for r in reads) or not demanded
    return begun / (len(updates) - 1)


def test_what_is_written_is_written_while_the_optimizer_goes_on(wrap: Wrap, disk: Path) -> None:
    trace, _ = traced(wrap, disk, 0.5)
    last = trace.records[trace.records["step"] == STEPS - 2]
    updates = of(last, Event.OPTIMIZER)
    writes = of(last, Event.WRITEBACK, target=Tier.DISK, phase=Phase.OPTIMIZER)
    first, last_one = int(updates["start"].min()), int(updates["start"].max())
    between = [r for r in writes if first < int(r["start"]) < last_one]
    assert len(between) > 5
    assert len(between) > len(writes) // 2


@pytest.mark.parametrize("eviction", ["lru", "belady", "plan"])
def test_a_steady_step_departs_from_nothing(eviction: str, wrap: Wrap, disk: Path) -> None:
    # What finds no place in time, because a slow disk still writes out of it, is left to need: the best of three.
    found = []
    for _ in range(3):
        trace, stats = traced(wrap, disk, 0.8, eviction=eviction)
        assert stats["departures"] == 0
        assert len(of(trace.records, Event.DEPARTURE)) == 0
        found.append(steadiness(trace))
        ahead, unwasted = found[-1]
        if ahead > 0.9 and unwasted >= 0.9:
            return
    pytest.fail(f"requests that were foreseen, and prefetches that were used, as shares: {found}")


def steadiness(trace: TraceFile) -> tuple[float, float]:
    """In the planned steps: the share of requests that were on their way, or there; of prefetches not wasted."""
    steady = trace.records[(trace.records["step"] >= 2) & (trace.records["step"] < STEPS)]
    ahead = len(of(steady, Event.HIT)) + len(of(steady, Event.FAULT, reason=Reason.PREFETCHED_LATE))
    on_demand = len(of(steady, Event.FAULT, reason=Reason.NOT_PREFETCHED))
    begun, wasted, unused = 0, 0, set()
    for record in steady:
        page = int(record["page"])
        if record["event"] == Event.PREFETCH:
            begun += 1
            unused.add(page)
        elif record["event"] in (Event.HIT, Event.FAULT):
            unused.discard(page)
        elif record["event"] == Event.EVICT and page in unused:
            wasted += 1
            unused.discard(page)
    assert begun > 10
    return ahead / (ahead + on_demand), 1 - wasted / begun


def test_without_prefetch_everything_is_on_demand(wrap: Wrap, disk: Path) -> None:
    trace, stats = traced(wrap, disk, 0.3, prefetch="none")
    assert len(of(trace.records, Event.PREFETCH)) == 0
    assert stats["prefetches"]["begun"] == 0
    assert len(of(trace.records, Event.FAULT, reason=Reason.NOT_PREFETCHED)) > 20


def test_belady_moves_no_more_than_lru(wrap: Wrap, disk: Path) -> None:
    moved = {}
    for eviction in ("lru", "belady"):
        _, stats = traced(wrap, disk, 0.5, eviction=eviction, prefetch="none")
        moved[eviction] = stats["nbytes_read_from_disk"] + stats["nbytes_written_to_disk"]
        (disk / "run.trace").unlink()
    assert moved["belady"] < moved["lru"], moved


def test_where_everything_fits_nothing_moves(wrap: Wrap, disk: Path) -> None:
    _, stats = traced(wrap, disk, 2.0)
    assert stats["nbytes_read_from_disk"] == stats["nbytes_written_to_disk"] == 0
    assert stats["stall_seconds"] < 1
    assert sum(stats["links"]["disk_to_host"].values()) == 0


class Branching(torch.nn.Module):
    """Runs the blocks that ``path`` names."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build(CASE)
        self.path = [0, 1, 2]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.net.wte(tokens)
        for index in self.path:
            x = self.net.h[index](x)
        return self.net.head(x)


def test_a_departure_is_counted_and_costs_itself(wrap: Wrap) -> None:
    paths = [[0, 1, 2], [0, 1, 2], [0, 2, 1], [0, 1, 2], [0, 2], [2, 1, 0, 0], [1], [0, 1, 2], [0, 1, 2]]
    ends = []
    departures = []
    for wrapped in (False, True):
        net = Branching()
        model = wrap(net, host="smallest") if wrapped else net
        optimizer = adamw(model)

        def turn(step: int, net: Branching = net, model: Any = model) -> None:
            if isinstance(model, tiermem.TieredModule):
                departures.append(model.stats()["departures"])
            net.path = paths[min(step + 1, len(paths) - 1)]

        ends.append(train(model, optimizer, CASE, steps=len(paths), accumulation=1, after=turn))
    assert_equal(*ends)
    assert departures[1] == 0
    assert departures[2] > 0
    assert departures[-1] == departures[-2], "the schedule has learnt the path again"
