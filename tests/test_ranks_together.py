"""Small pages move together: fewer exchanges, and the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiermem
from tests.parity import adamw, same
from tests.ranks import Error, started
from tiermem.ranks import held, ranks, wire
from tiermem.ranks.coordinator import Decision, together
from tiermem.ranks.held import Held

UNITS, STEPS = 40, 5


class Many(nn.Module):
    """Many units of few elements, and a large one in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(UNITS))
        self.layers.insert(UNITS // 2, nn.Sequential(nn.Linear(24, 4096), nn.Linear(4096, 24)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def train(rank: int, world: int, folder: Path) -> list[dict[str, Any]]:
    """With small pages by themselves, and together; in memory, and with a budget that forces paging."""
    ranks.HOLD = 60  # a slow machine holds as long as a fast one
    found = []
    for small in (0, held.SMALL_NBYTES):
        ranks.SMALL_NBYTES = wire.SMALL_NBYTES = small
        for name, host in (("memory", "64MiB"), ("paged", "3MiB")):
            torch.manual_seed(0)
            config = {
                "disk": {"paths": [str(folder / f"{name}{small}{rank}")]},
                "host": {"budget": host},
                "policy": {"units": ["layers.*"]},
                "ranks": {"timeout": 120},
            }
            with tiermem.TieredModule(Many(), config) as model:
                optimizer = adamw(model)
                generator = torch.Generator().manual_seed(rank)
                for _ in range(STEPS):
                    model(torch.randn(4, 24, generator=generator)).pow(2).mean().backward()
                    model._runtime.check()
                    optimizer.step()
                    optimizer.zero_grad()
                figures = model.stats()
                state = {name: value.clone() for name, value in model.state_dict().items()}
            found.append({"state": state, "stats": figures})
    return found


@pytest.mark.ranks
def test_small_pages_move_together() -> None:
    with started(2, train) as processes:
        results = processes.join()
        for result in results:
            assert not isinstance(result, Error | None), f"{result}\n{processes.log()}"
    for alone, alone_paged, memory, paged in results:
        for one, other in ((alone, memory), (alone_paged, paged)):
            assert all(same(other["state"][name], value) for name, value in one["state"].items())
            before, after = (each["stats"]["ranks"] for each in (one, other))
            assert before["exchanges"]["reduce"] == STEPS * (UNITS + 1)
            assert after["exchanges"]["reduce"] < before["exchanges"]["reduce"]
            assert after["nbytes_sent"]["reduce"] == before["nbytes_sent"]["reduce"]
        assert memory["stats"]["ranks"]["exchanges"]["reduce"] < STEPS * (UNITS + 1) / 2
        assert paged["stats"]["nbytes_read_from_disk"] > 0


def reduce(page: int) -> Decision:
    return range(2), ["done", f"reduce {page} 1", page, [True, True]]


def test_neighbouring_reductions_are_decided_together() -> None:
    slices = [10, 20, 30, 1000, 40, 50]
    met: Decision = (range(2), ["done", "step 1", 9, [None, None]])
    gather: Decision = (range(2), ["gather", 0, 1, [0, 1]])
    said = [gather, reduce(2), reduce(4), met, reduce(5), reduce(3), reduce(0), reduce(1)]
    assert [message for _, message in together(said, slices, 50, 100)] == [
        gather[1],
        ["together", [said[1][1], said[2][1]]],
        met[1],
        said[4][1],
        said[5][1],
        ["together", [said[6][1], said[7][1]]],
    ]
    full = [reduce(4), reduce(5), reduce(2)]
    assert [message[0] for _, message in together(full, slices, 50, 90)] == ["together", "done"]


def test_what_is_held_is_held_for_so_many_accesses_or_bytes() -> None:
    kept = Held(100)
    assert not kept.add(["join", "a", 0], 40, 3)
    assert not kept.tick()
    assert not kept.add(["join", "b", 0], 40, 9)
    assert not kept.tick()
    assert kept.tick(), "the first has waited for three"
    assert kept.take() == [["join", "a", 0], ["join", "b", 0]]
    assert not kept.tick()
    assert not kept
    assert kept.add(["join", "c", 0], 100, 9), "as much as moves at once"
