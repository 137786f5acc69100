"""What ranks share is less for each: memory falls as 1/N; bytes on the wire are what theory says; exchanges overlap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tiermem
from tests.parity import adamw, refused
from tests.ranks import once, started
from tiermem.page import Kind
from tiermem.trace import Event, Phase, Reason
from tiermem.trace.reader import TraceFile

pytestmark = pytest.mark.ranks

UNITS, WIDTH, STEPS = 8, 256, 4
IN_MEMORY = {"parameters": "host", "gradients": "host", "optimizer": "host"}


class Chain(nn.Module):
    """Units of one size, of which a slice is many pages of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def train(rank: int, folder: Path, steps: int = STEPS, **sections: Any) -> dict[str, Any]:
    """Figures of a run; ``host``: a budget, or None for the smallest that works."""
    torch.manual_seed(0)
    net = Chain()
    config: dict[str, Any] = {
        "disk": {"paths": [str(folder / str(rank))]},
        "policy": {"units": ["layers.*"]},
        **sections,
    }
    if "host" not in config:
        config["host"] = {"budget": 4096}
        config["host"] = {"budget": refused(net, config, "host", False)}
    with tiermem.TieredModule(net, config) as model:
        optimizer = adamw(model)
        sizes = {
            kind: sum(page.nbytes for page in model._runtime.table if page.kind is kind) for kind in Kind
        }
        for _ in range(steps):
            model(torch.randn(4, WIDTH)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = model.stats()
    return {"stats": stats, "sizes": sizes}


def shares(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Runs of this many ranks."""
    found = {f"stage {stage}": train(rank, folder / str(stage), ranks={"stage": stage}) for stage in range(4)}
    found["in memory"] = train(rank, folder / "memory", placement=IN_MEMORY)
    lru = {"units": ["layers.*"], "eviction": "lru", "prefetch": "none"}
    found["nothing kept"] = train(rank, folder / "lru", policy=lru)
    return found


def overlapped(rank: int, world: int, folder: Path) -> None:
    """A run with a trace."""
    file = str(folder / "run.trace")
    train(rank, folder, 6, host={"budget": "2MiB"}, trace={"file": file})


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return once(tmp_path_factory, 2, shares)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return once(tmp_path_factory, 4, shares)


@pytest.fixture(params=[2, 4])
def results(request: pytest.FixtureRequest) -> list[Any]:
    return list(request.getfixturevalue({2: "two", 4: "four"}[request.param]))


def psi(result: dict[str, Any], world: int) -> int:
    """What a rank sends of one set of parameters or gradients."""
    return int(result["sizes"][Kind.GRADIENT] * (world - 1) / world)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_0_to_2_send_twice_the_parameters_a_step(stage: int, results: list[Any]) -> None:
    for result in (each[f"stage {stage}"] for each in results):
        one = STEPS * psi(result, len(results))
        assert result["stats"]["ranks"]["nbytes_sent"] == {"reduce": one, "share": one}
        assert result["stats"]["ranks"]["nbytes_received"] == {"reduce": one, "share": one}


def test_stage_3_sends_at_most_three_times_the_parameters_a_step(results: list[Any]) -> None:
    world = len(results)
    for name in ("stage 3", "nothing kept"):
        received = 0
        for result in (each[name] for each in results):
            one = STEPS * psi(result, world)
            assert result["stats"]["ranks"]["nbytes_sent"]["reduce"] == one
            gathered = result["stats"]["ranks"]["nbytes_received"]["gather"]
            # The last unit of forward is the first of backward; close() gathers everything once more, after this.
            assert one < gathered <= 2 * one
            received += gathered
        sent = sum(each[name]["stats"]["ranks"]["nbytes_sent"]["gather"] for each in results)
        # Ranks take their figures one after the other, and what the next step wants first moves meanwhile.
        assert received == pytest.approx(sent, rel=0.01)


def test_memory_falls_as_one_by_n(two: list[Any], four: list[Any], disk: Path) -> None:
    alone = train(0, disk, placement=IN_MEMORY)
    whole = alone["sizes"]
    unit = whole[Kind.PARAMETER] // UNITS
    state = sum(whole.values())
    assert alone["stats"]["tiers"]["host"]["peak"] >= state
    for results in (two, four):
        world = len(results)
        for result in (each["in memory"] for each in results):
            # What one unit computes with is there as a whole: parameters and gradients.
            peak = result["stats"]["tiers"]["host"]["peak"]
            assert state / world <= peak <= state / world + 3 * unit
            kept = sum(
                nbytes
                for kind, nbytes in result["sizes"].items()
                if kind not in (Kind.PARAMETER, Kind.GRADIENT)
            )
            assert kept == state / world


def test_exchanges_overlap_computing() -> None:
    """By order: gathers begin before their unit is used, sums before backward is over."""
    with started(2, overlapped) as ranks:
        assert ranks.join() == [None, None], ranks.log()
        traces = [TraceFile(ranks.folder / f"run.{rank}.trace") for rank in range(2)]
        for rank, trace in enumerate(traces):
            assert (trace.meta["rank"], trace.meta["world"]) == (rank, 2)
            records = trace.records
            ahead = behind = 0
            for step in (3, 4):
                step_records = records[records["step"] == step]
                spans = step_records[step_records["event"] == Event.COMPUTE]
                exchanges = step_records[step_records["event"] == Event.COLLECTIVE]
                last = spans[spans["phase"] == Phase.BACKWARD]["start"].max()
                sums = exchanges[exchanges["reason"] == Reason.REDUCE]
                behind += int(np.sum(sums["start"] < last))
                prefetches = step_records[step_records["event"] == Event.PREFETCH]
                kinds = np.array([trace.pages[number].kind for number in prefetches["page"]])
                ahead += int(np.sum(kinds == "parameter"))
            assert behind > 0, "no gradient was summed while backward ran"
            assert ahead > 0, "no gather was begun ahead of its use"
