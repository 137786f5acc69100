"""Ranks beside tensor parallelism and pipelines: on four of them, the run of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel_cases import MICRO, STEPS, alone, everything
from tests.ranks import once

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return once(tmp_path_factory, 4, everything)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).norm() <= 1e-6 * expected.norm())


@pytest.mark.parametrize(("name", "clip"), [("tp", None), ("tp, stage 1, clipped", 0.05)])
def test_data_and_tensor_parallel(name: str, clip: float | None, four: list[Any]) -> None:
    expected = alone(clip=clip)
    for rank, result in enumerate(result[name] for result in four):
        # Two halves of a sum that one process makes at once: 1e-6.
        for found, loss in zip(result["losses"], expected["losses"][rank // 2 :: 2], strict=True):
            assert torch.allclose(found, loss, rtol=1e-6)
        assert result["state"].keys() == expected["state"].keys()
        assert all(close(result["state"][key], value) for key, value in expected["state"].items())
        assert torch.allclose(
            torch.stack([*result["norms"], loss]), torch.stack([*expected["norms"], loss]), rtol=1e-5
        )
        for key, value in result["state"].items():
            assert torch.equal(value, four[0][name]["state"][key]), f"ranks differ in {key}"
    if clip is None:
        # And the bits of the same tensor parallelism that isn't paged.
        assert all(result[name]["same"] for result in four)
        assert all(result[name]["read"] for result in four)


@pytest.mark.parametrize("name", ["1F1B", "GPipe, stage 2"])
def test_data_parallel_pipelines_give_the_bits_of_one_process(name: str, four: list[Any]) -> None:
    expected = alone(MICRO)
    for rank, result in enumerate(result[name] for result in four):
        losses = expected["losses"][rank % 2 :: 2] if rank >= 2 else []
        assert len(losses) == (STEPS * MICRO if rank >= 2 else 0)
        assert all(torch.equal(a, b) for a, b in zip(result["losses"], losses, strict=True))
        assert all(torch.equal(value, expected["state"][key]) for key, value in result["state"].items())
        assert result["state"]
    assert {key for result in four for key in result[name]["state"]} == expected["state"].keys()
    assert all(result["1F1B"]["read"] for result in four)


def test_a_pipeline_is_clipped_by_the_norm_of_all_stages(four: list[Any]) -> None:
    expected = alone(MICRO, clip=0.05)
    for result in (result["no_sync, clipped"] for result in four):
        assert torch.allclose(torch.stack(result["norms"]), torch.stack(expected["norms"]), rtol=1e-6)
        assert all(close(value, expected["state"][key]) for key, value in result["state"].items())


def test_checkpoints_of_parts(four: list[Any]) -> None:
    for result in (result["saved"] for result in four):
        assert result["goes on"]
        assert result["whole tensors"]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("optimizer made before", "make the optimizer of model.parameters(), after wrapping"),
        ("not wrapped", "wrap its module in a TieredModule"),
        ("one folder", "2 processes have different parts of the model"),
        ("another's part", "load the folder that the same part was saved to"),
        ("mixes", "tensor parallelism leaves this process parts of the parameters only"),
        ("closed", "save it while it is paged"),
        ("no group", 'name those that have the same: group=mesh["dp"]'),
        ("wrong group", "is cut as well"),
        ("durable", 'set durability.mode = "off"'),
        ("two dimensions", "a DeviceMesh of 2 dimensions ('dp', 'tp')"),
    ],
)
def test_what_is_refused(what: str, words: str, four: list[Any]) -> None:
    for result in four:
        assert words in result["saved"][what]
