"""Saved by N ranks and loaded by M: the same bits, each rank reading its own slices."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint_ranks import fail, run
from tests.parity import assert_same
from tests.ranks import Error, started

pytestmark = pytest.mark.ranks


def on(world: int, *args: Any) -> list[dict[str, Any]]:
    if world == 1:
        return [run(0, 1, Path(args[-2] or args[-3]).parent, *args)]
    with started(world, run, *args) as ranks:
        results = ranks.join()
        for result in results:
            assert not isinstance(result, Error | None), f"{result}\n{ranks.log()}"
    return results


@pytest.mark.parametrize(
    ("worlds", "stage", "dtype", "kind"),
    [
        ((1, 2, 4, 1), 3, torch.float32, None),
        ((3, 2), 1, torch.bfloat16, None),
        ((1, 2, 1), 3, torch.float32, "SGD with momentum"),
        ((2, 1), 0, torch.float32, "Adafactor"),
    ],
    ids=["1-2-4-1-stage-3", "3-2-stage-1-bf16", "1-2-1-stage-3-sgd", "2-1-stage-0-adafactor"],
)
def test_each_number_of_ranks_goes_on_where_another_stopped(
    worlds: tuple[int, ...], stage: int, dtype: torch.dtype, kind: str | None, disk: Path
) -> None:
    before: dict[str, Any] | None = None
    path: str | None = None
    for number, world in enumerate(worlds):
        save = str(disk / f"by-{number}")
        results = on(world, stage, dtype, path, save, kind)
        if before is not None:
            for result in results:
                assert (
                    result["step"] == number or kind
                )  # others' optimizers don't tell how often they have stepped
                assert_same("loaded", before["state"], result["loaded"])
                assert_same("optimizer", before["optimizer"], result["loaded optimizer"])
            whole = sum(
                value.nbytes for each in before["optimizer"].values() for value in each.values() if value.ndim
            )
            own = max(result["read"] for result in results)
            if world > 1 and stage:
                parameters = sum(value.nbytes for value in before["state"].values())
                if stage == 3:
                    parameters //= world  # below, every rank has all of them
                assert own <= 1.1 * (whole / world + parameters), "a rank reads its own slices"
        for result in results[1:]:
            assert_same("ranks", results[0]["state"], result["state"])
        before, path = results[0], save
    assert [name for name in os.listdir(disk) if name.startswith(".tiermem")] == []


def test_one_rank_that_can_not_write_ends_the_save_on_all(disk: Path) -> None:
    path = disk / "checkpoints/ck"
    with started(2, fail, str(path)) as ranks:
        results = ranks.join()
    assert "No space left on device" in results[1]
    assert results[1].startswith("SavingError")
    assert "rank 1 could not do its part: SavingError" in results[0]
    assert os.listdir(disk / "checkpoints") == []
