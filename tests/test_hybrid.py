"""Hybrid sharding: two sets of two ranks, each with a copy of the state in slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiermem
from tests.parity import adamw, build, same
from tests.rank_cases import CASES, Spec, batches, on_ranks, optimizer_of
from tests.ranks import once
from tests.test_ranks_shares import STEPS, train
from tiermem.page import Kind

pytestmark = pytest.mark.ranks


def spec(stage: int, **settings: Any) -> Spec:
    config = {"ranks": {"stage": stage, "timeout": 120, "shards": 2}}
    return Spec(stage=stage, host="1500KiB" if stage == 3 else "2MiB", steps=3, config=config, **settings)


CASE = CASES["gpt-tied"]
SPECS = {
    "stage 3": spec(3),
    "stage 2": spec(2),
    "stage 1": spec(1),
    "other experts on each rank": spec(3, model="experts"),
    "clipping": spec(3, clip=0.05, eps=1e-3),
}


def in_pairs(spec: Spec) -> tuple[list[Any], dict[str, Any]]:
    """One process that adds up the gradients of two batches and of two others, and then these sums."""
    case = CASES[spec.model]
    data = batches(case, spec.steps * 4)
    net = build(case)
    optimizer = optimizer_of(net, spec)
    norms: list[Any] = []
    for step in range(spec.steps):
        sums: list[list[Any]] = []
        for pair in range(2):
            for rank in (2 * pair, 2 * pair + 1):
                (case.loss(net, data[step * 4 + rank]) / 4).backward()
            sums.append([parameter.grad for parameter in net.parameters()])
            optimizer.zero_grad()
        for parameter, first, second in zip(net.parameters(), *sums, strict=True):
            present = [each for each in (first, second) if each is not None]
            parameter.grad = sum(present[1:], present[0]) if present else None
        if spec.clip is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), spec.clip))
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: value.clone() for name, value in net.state_dict().items()}


def hybrid(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """All runs, in turn."""
    found = {name: on_ranks(rank, world, folder / name, each) for name, each in SPECS.items()}
    found["bytes"] = train(rank, folder / "bytes", ranks={"stage": 3, "shards": 2})
    found |= {"durable": durable(rank, folder), "saved": saved(rank, folder)}
    found["refused"] = {str(shards): refused(rank, folder, shards) for shards in (3, 5)}
    return found


def config(rank: int, folder: Path, **sections: Any) -> dict[str, Any]:
    return {
        "disk": {"paths": [str(folder / f"pages{rank}")]},
        "host": {"budget": "1700KiB"},
        "ranks": {"shards": 2, "timeout": 120},
        **sections,
    }


def refused(rank: int, folder: Path, shards: int) -> str:
    try:
        tiermem.TieredModule(build(CASE), config(rank, folder, ranks={"shards": shards}))
    except tiermem.ConfigError as error:
        return str(error)
    return ""


def steps(model: Any, optimizer: Any, rank: int, first: int, last: int) -> None:
    case = CASE
    for data in batches(case, 4 * last)[4 * first + rank :: 4]:
        case.loss(model, data).backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: Any) -> dict[str, Any]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def durable(rank: int, folder: Path) -> list[dict[str, Any]]:
    """Four steps at once, and two and two, with an end between them."""
    settings = config(rank, folder / "durable", durability={"mode": "step"})
    found = []
    for stops in ([4], [2, 4]):
        first = 0
        for stop in stops:
            resume = "auto" if first else None
            with tiermem.TieredModule(build(CASE), settings, resume=resume) as model:
                assert model.num_steps == first
                steps(model, adamw(model), rank, first, stop)
                state, first = state_of(model), stop
        found.append(state)
    try:
        other = config(rank, folder / "durable", durability={"mode": "step"}, ranks={"timeout": 120})
        tiermem.TieredModule(build(CASE), other, resume="auto")
    except tiermem.ConfigError as error:
        found.append({"other": str(error)})
    return found


def saved(rank: int, folder: Path) -> dict[str, Any]:
    """Saved by all, and gone on from by all."""
    path = folder / "saved"
    with tiermem.TieredModule(build(CASE), config(rank, folder / "a")) as model:
        optimizer = adamw(model)
        steps(model, optimizer, rank, 0, 2)
        model.save(path, optimizer)
        saved = state_of(model)
        steps(model, optimizer, rank, 2, 3)
        went_on = state_of(model)
    with tiermem.TieredModule(build(CASE, seed=5), config(rank, folder / "b")) as model:
        optimizer = adamw(model)
        model.load(path, optimizer)
        steps(model, optimizer, rank, 2, 3)
        again = state_of(model)
    with tiermem.TieredModule(
        build(CASE, seed=5), {"host": {"budget": "64MiB"}, "ranks": {"stage": "none"}}
    ) as model:
        model.load(path)
        alone = state_of(model)
    return {"saved": saved, "alone": alone, "went on": went_on, "again": again}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return once(tmp_path_factory, 4, hybrid)


@pytest.mark.parametrize("name", SPECS)
def test_replicas_add_up_what_near_ranks_have_added_up(name: str, four: list[Any]) -> None:
    norms, expected = in_pairs(SPECS[name])
    for rank, found in enumerate(result[name] for result in four):
        for key, value in expected.items():
            if norms:
                assert (found["state"][key] - value).norm() <= 1e-6 * value.norm(), f"rank {rank}, {key}"
                assert same(found["state"][key], four[0][name]["state"][key]), f"ranks differ in {key}"
            else:
                assert same(found["state"][key], value), f"rank {rank}, {key}"
    assert all(result["stage 3"]["stats"]["nbytes_read_from_disk"] for result in four)


def test_little_goes_from_set_to_set(four: list[Any]) -> None:
    """Inside a set as with two ranks: 3 times half of the parameters at most; across, twice half of a half."""
    for result in (result["bytes"] for result in four):
        whole = STEPS * result["sizes"][Kind.GRADIENT]
        sent = result["stats"]["ranks"]["nbytes_sent"]
        assert sent["reduce"] == whole // 2
        assert sent["across"] == 2 * (whole // 2) // 2
        assert whole // 2 < result["stats"]["ranks"]["nbytes_received"]["gather"] <= 2 * (whole // 2)
        assert set(sent) == {"reduce", "across", "gather"}
        assert result["sizes"][Kind.PARAMETER_SHARD] == result["sizes"][Kind.PARAMETER] // 2


def test_durable_runs_and_checkpoints_go_on(four: list[Any]) -> None:
    for result in four:
        whole, resumed, other = result["durable"]
        assert all(same(resumed[key], value) for key, value in whole.items())
        assert "committed with ranks.shards 2, and this is left out" in other["other"]
        saved = result["saved"]
        assert all(same(saved["alone"][key], value) for key, value in saved["saved"].items())
        assert all(same(saved["again"][key], value) for key, value in saved["went on"].items())


def test_what_does_not_divide_is_refused(four: list[Any]) -> None:
    for result in four:
        assert result["refused"] == {
            str(shards): f"ranks.shards: read {shards}, with 4 ranks; allowed is what divides them: 2, 4"
            for shards in (3, 5)
        }
    for stage in (0, "none"):
        with pytest.raises(
            tiermem.ConfigError, match=r"where nothing is in slices; allowed with ranks.stage 1, 2"
        ):
            tiermem.Config(ranks={"stage": stage, "shards": 2})
