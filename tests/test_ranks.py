"""Ranks that train together compute what one process computes: bit for bit, but where sums have another order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity import same
from tests.rank_cases import Spec, alone, every, halve, look_on_one
from tests.ranks import once

pytestmark = pytest.mark.ranks

BF16 = torch.bfloat16
TIGHT = "760KiB"  # a fifth of the state at two ranks; scratch memory of the exchange takes half of it
SMALL = "1260KiB"

TWO = {
    "stage 3": Spec(host=TIGHT, micro=2),
    "stage 2": Spec(stage=2, host="900KiB", micro=2),
    "stage 1": Spec(stage=1, host="900KiB"),
    "stage 0": Spec(stage=0, host="1MiB"),
    "everything fits": Spec(model="gpt"),
    "frozen parameters": Spec(model="gpt-frozen", host=TIGHT),
    "checkpointing": Spec(model="gpt-saving", host=TIGHT, steps=2),
    "one block used thrice": Spec(model="albert", host=TIGHT, steps=2),
    "bfloat16": Spec(dtype=BF16, host=TIGHT),
    "other experts on each rank": Spec(model="experts", host=TIGHT, steps=6),
    "other experts, stage 2": Spec(model="experts", stage=2, host="1MiB", steps=6),
    "other experts, stage 0": Spec(model="experts", stage=0, host="1MiB", steps=3),
    "three tiers": Spec(model="gpt", host="1200KiB", three=True, steps=3),
    "lru": Spec(host=TIGHT, steps=2, config={"policy": {"eviction": "lru"}}),
    "changes by the loop": Spec(host=TIGHT, between=halve, steps=2),
    "momentum": Spec(host=SMALL, other="SGD with momentum", steps=3),
    "NAdam, stage 1": Spec(stage=1, host=SMALL, other="NAdam", steps=2),
    "what mixes a tensor, stage 0": Spec(stage=0, host="1MiB", other="TrustRatio", steps=2),
    "loss scaling": Spec(host=SMALL, scaler=True),
    "loss scaling, stage 1": Spec(stage=1, host=SMALL, scaler=True, steps=3),
    "one rank looks": Spec(model="gpt", host=TIGHT, between=look_on_one, steps=2),
}
# Keys' biases have a gradient that is zero but for rounding. With the usual eps Adam makes whole steps of that noise.
CLOSE = {
    "clipping": Spec(host=TIGHT, clip=0.05, eps=1e-3),
    "clipping, stage 1": Spec(stage=1, host="900KiB", clip=0.05, steps=2, eps=1e-3),
    "no_sync": Spec(host=TIGHT, micro=3, no_sync=True, steps=2, eps=1e-3),
    "torch's own SGD": Spec(model="gpt", sgd=True, steps=2),
}
HALF = Spec(dtype=torch.float16, host=SMALL, scaler=True)
FOUR = {
    "stage 3": Spec(host=SMALL),
    "stage 2": Spec(stage=2, host=SMALL, steps=2),
    "stage 1": Spec(stage=1, host=SMALL, steps=2),
    "stage 0": Spec(stage=0, host="2MiB", steps=2),
    "other experts on each rank": Spec(model="experts", host=SMALL),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return once(tmp_path_factory, 2, every, TWO | CLOSE | {"half": HALF})


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return once(tmp_path_factory, 4, every, FOUR)


def assert_equal(expected: dict[str, Any], results: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(results):
        for index, (a, b) in enumerate(zip(expected["losses"][rank], found["losses"], strict=True)):
            assert same(a, b), f"rank {rank}, loss {index}: {a.item()!r} {b.item()!r}"
        assert expected["state"].keys() == found["state"].keys()
        for name, value in expected["state"].items():
            assert same(value, found["state"][name]), f"rank {rank}, {name}"
        assert expected["optimizer"].keys() == found["optimizer"].keys()
        for number, values in expected["optimizer"].items():
            for name, value in values.items():
                assert same(value, found["optimizer"][number][name]), f"rank {rank}, {name} of {number}"


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_give_the_bits_of_one(name: str, two: list[Any]) -> None:
    assert_equal(alone(2, TWO[name]), [result[name] for result in two])


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_give_the_bits_of_one(name: str, four: list[Any]) -> None:
    assert_equal(alone(4, FOUR[name]), [result[name] for result in four])


@pytest.mark.parametrize("name", CLOSE)
def test_sums_in_another_order_are_close(name: str, two: list[Any]) -> None:
    expected, results = alone(2, CLOSE[name]), [result[name] for result in two]
    for rank, found in enumerate(results):
        for a, b in zip(expected["losses"][rank], found["losses"], strict=True):
            assert torch.allclose(a, b, rtol=1e-6), f"rank {rank}: {a.item()!r} {b.item()!r}"
        for key, value in expected["state"].items():
            assert (found["state"][key] - value).norm() <= 1e-6 * value.norm(), f"rank {rank}, {key}"
            assert same(found["state"][key], results[0]["state"][key]), f"ranks differ in {key}"


def test_float16_ranks_skip_the_same_steps(two: list[Any]) -> None:
    expected, results = alone(2, HALF), [result["half"] for result in two]
    assert [float(each) for each in results[0]["losses"][1::2]] == [1024, 512, 512, 1024]
    for rank, found in enumerate(results):
        assert torch.allclose(torch.stack(found["losses"]), torch.stack(expected["losses"][rank]), rtol=1e-3)
        for key, value in found["state"].items():
            assert same(value, results[0]["state"][key]), f"ranks differ in {key}"


def test_ranks_page(two: list[Any], four: list[Any]) -> None:
    """Otherwise the tests above say little."""
    for name in ("stage 3", "stage 2", "other experts on each rank"):
        assert all(result[name]["stats"]["nbytes_read_from_disk"] > 0 for result in two)
    assert all(result["stage 3"]["stats"]["nbytes_written_to_disk"] > 0 for result in four)
