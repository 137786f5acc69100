"""Ranks that can't go on: one dies, leaves, or does something else than the others. All end, with one clear error."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from tests.models import BY_NAME
from tests.parity import adamw, build
from tests.rank_cases import batches
from tests.ranks import Error, started

pytestmark = pytest.mark.ranks

CASE = BY_NAME["gpt"]


def wrapped(folder: Path, rank: int, seed: int = 0, **ranks: Any) -> tiermem.TieredModule:
    config = {
        "disk": {"paths": [str(folder / str(rank))]},
        "host": {"budget": "760KiB"},
        "ranks": {"timeout": 60, **ranks},
    }
    return tiermem.TieredModule(build(CASE, seed=seed), config)


def backward(model: nn.Module) -> None:
    CASE.loss(model, batches(CASE, 1)[0]).backward()


def die_in_backward(rank: int, world: int, folder: Path) -> None:
    with wrapped(folder, rank) as model:
        optimizer = adamw(model)
        for step in range(4):
            if step == 2 and rank == 1:
                model.h[1].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            backward(model)
            optimizer.step()
            optimizer.zero_grad()


def test_a_rank_that_is_killed_in_mid_step_ends_the_others() -> None:
    with started(3, die_in_backward) as ranks:
        results = ranks.join()
        assert ranks.processes[1].exitcode == -signal.SIGKILL
        assert results[1] is None
        for rank in (0, 2):
            assert isinstance(results[rank], Error), ranks.log()
            assert results[rank].startswith("RanksError: rank 1"), results[rank]


def stop_early(rank: int, model: nn.Module) -> None:
    backward(model)
    if rank == 0:
        adamw(model).step()


def clip_on_one(rank: int, model: nn.Module) -> None:
    backward(model)
    if rank == 1:
        model.clip_grad_norm_(1.0)
    adamw(model).step()


def change_on_one(rank: int, model: nn.Module) -> None:
    if rank == 1:
        with torch.no_grad():
            model.head.weight.zero_()
    backward(model)
    adamw(model).step()


def fail_on_one(rank: int, model: nn.Module) -> None:
    backward(model)
    if rank == 1:
        raise ZeroDivisionError("of the loop's own")
    adamw(model).step()


MISUSES = {each.__name__: each for each in (stop_early, clip_on_one, change_on_one, fail_on_one)}


def end_of(folder: Path, rank: int, run: Any, **keys: Any) -> str:
    """What a run ends with on this rank."""
    try:
        with wrapped(folder, rank, **keys) as model:
            run(rank, model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def misuse(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """What each misuse ends with; and whether sums are made in float32."""
    warnings.simplefilter("ignore")  # parameters that can't be given back
    ends: dict[str, Any] = {name: end_of(folder / name, rank, run) for name, run in MISUSES.items()}
    for name, keys in (("seed", {"seed": rank}), ("stage", {"stage": rank + 2})):
        ends[name] = end_of(folder / name, rank, backward, **keys)
    with wrapped(folder / "float32", rank, reduce="float32") as model:
        exchange = model._runtime.ranks.exchange
        terms = [
            torch.randn(4096, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(world)
        ]
        target = torch.zeros(2048, dtype=torch.bfloat16)
        exchange.reduce(terms[rank], target, True, [True] * world, 1 << 19)
        mean = sum(term.float() for term in terms) / world
        ends["float32"] = torch.equal(target, mean.bfloat16()[rank * 2048 : (rank + 1) * 2048])
    if rank == 0:
        ends["alone"] = end_of(folder / "alone", rank, backward, timeout=2)
    return ends


@pytest.fixture(scope="module")
def ends() -> list[dict[str, Any]]:
    with started(2, misuse) as ranks:
        results = ranks.join()
        assert not any(isinstance(result, Error | None) for result in results), ranks.log()
    return results


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "clip_on_one",
            ("rank 0 waits in optimizer.step() for rank 1", "rank 1 waits in clip_grad_norm_() for rank 0"),
        ),
        ("change_on_one", ("rank 1 waits in a change of the parameters of unit", "rank 0 waits in")),
        ("seed", ("the ranks differ in their parameters' values",)),
        ("stage", ("the ranks differ in what ranks.stage is", "rank 0 has 2, rank 1 has 3")),
    ],
)
def test_what_ranks_do_differently_is_named_alike_on_all(
    name: str, says: tuple[str, ...], ends: list[dict[str, Any]]
) -> None:
    assert ends[0][name] == ends[1][name]
    assert ends[0][name].startswith("RanksError"), ends[0][name]
    for each in says:
        assert each in ends[0][name]


def test_a_rank_that_leaves_ends_those_that_wait_for_it(ends: list[dict[str, Any]]) -> None:
    assert ends[0]["stop_early"].startswith("RanksError"), ends[0]
    assert "rank 1 waits in close()" in ends[0]["stop_early"]
    assert ends[1]["fail_on_one"] == "ZeroDivisionError: of the loop's own"
    assert "rank 1: its training ended: ZeroDivisionError: of the loop's own" in ends[0]["fail_on_one"]


def test_who_wraps_a_model_alone_is_told(ends: list[dict[str, Any]]) -> None:
    assert ends[0]["alone"].startswith(
        "RanksError: rank 1 has not wrapped the model as rank 0 has, within the 2 seconds"
    )


def test_sums_in_float32_round_once(ends: list[dict[str, Any]]) -> None:
    assert all(end["float32"] for end in ends)
