"""1-bit Adam: what signs are, what is on the wire, that ranks stay equal, and that it learns what Adam learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiermem
from tests.conftest import Wrap
from tests.models import GPT
from tests.parity import assert_same, snapshot
from tests.ranks import once
from tiermem.trainer import Adam, OneBitAdam
from tiermem.trainer.signs import Layout, pack, unpack

WARMUP = 20


def everything(start: int, stop: int) -> Tensor:
    return torch.ones(stop - start, dtype=torch.bool)


@pytest.mark.parametrize("numel", [1, 31, 64, 100_003])
def test_signs_and_errors_are_the_values(numel: int) -> None:
    torch.manual_seed(0)
    values = torch.randn(numel)
    row = torch.zeros(Layout(numel, 1).row, dtype=torch.uint8)
    error = values.clone()
    pack(error, everything, row)
    signs = unpack(row, 0, numel)
    scale = float(values.double().abs().mean())
    assert torch.equal(signs, torch.where(values >= 0, 1.0, -1.0) * torch.tensor(scale))
    assert torch.equal(error, values - signs)
    assert numel < 8 or torch.equal(unpack(row, 8, numel), signs[8:])


def test_what_takes_no_part_is_left() -> None:
    values = torch.tensor([1.0, -3.0, 5.0, 7.0] * 8)
    mask = torch.arange(32) % 2 == 0
    row = torch.zeros(Layout(32, 1).row, dtype=torch.uint8)
    error = values.clone()
    pack(error, lambda start, stop: mask[start:stop], row)
    assert float(row[-4:].view(torch.float32)) == 3.0
    assert torch.equal(error[~mask], values[~mask])
    assert torch.equal(error[mask], values[mask] - 3.0)


def test_a_page_has_room_for_all_that_is_exchanged() -> None:
    for numel, world in ((1, 2), (100, 3), (16384, 4), (70_001, 7)):
        layout = Layout(numel, world)
        space = layout.space(torch.zeros(layout.page_numel + 5))
        assert len(space.worker) >= numel
        assert layout.edges(world - 1)[1] == numel
        assert space.outgoing.shape == space.incoming.shape == space.shared.shape == (world, layout.row)
        places = [(each.data_ptr(), each.numel() * each.element_size()) for each in space]
        ends = [start + nbytes for start, nbytes in places]
        assert [start for start, _ in places[1:]] == ends[:-1]
        assert all(start % 4 == 0 for start, _ in places)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens that follow each other by a rule, from where each rank and step has it begin."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    first = torch.randint(61, (8, 1), generator=generator)
    tokens = (first * torch.tensor([pow(3, k, 61) for k in range(13)])) % 61
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def network(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return GPT().to(dtype)


def config_of(folder: Path, rank: int, host: str, stage: int = 0) -> dict[str, Any]:
    return {
        "disk": {"paths": [str(folder / f"pages{rank}")]},
        "host": {"budget": host},
        "ranks": {"stage": stage, "timeout": 120},
    }


def fit(
    rank: int, world: int, folder: Path, steps: int, dtype: torch.dtype, host: str, one_bit: bool, clip: float
) -> dict[str, Any]:
    """Train; returns losses, parameters, state, and what was sent in each step."""
    losses, sent = [], []
    with tiermem.TieredModule(network(dtype=dtype), config_of(folder, rank, host)) as model:
        settings: Any = {"lr": 2e-3, "weight_decay": 0.01, "decoupled_weight_decay": True}
        parameters = list(model.parameters())
        optimizer = (
            OneBitAdam(parameters, warmup_steps=WARMUP, **settings)
            if one_bit
            else Adam(parameters, **settings)
        )
        for step in range(steps):
            before = dict(model.stats()["ranks"]["nbytes_sent"])
            loss = loss_of(model, *batch(rank, step))
            loss.backward()
            if clip:
                model.clip_grad_norm_(clip)
            optimizer.step()
            optimizer.zero_grad()
            model._runtime.check()
            losses.append(loss.item())
            after = model.stats()["ranks"]["nbytes_sent"]
            sent.append({name: after[name] - before.get(name, 0) for name in after})
        rows = sum(
            Layout(part.stop - part.start, world).row
            for unit in model._runtime.units
            for group in unit.groups
            for part in group.parts
        )
        result = {"losses": losses, "sent": sent, "rows": rows, "tiers": model.stats()["tiers"]}
        result["optimizer"] = snapshot(optimizer)
        result["state"] = {name: value.clone() for name, value in model.state_dict().items()}
    return result


def on_two(rank: int, world: int, folder: Path) -> dict[str, Any]:
    args = (rank, world)
    return {
        "adam": fit(*args, folder / "adam", 44, torch.float32, "1MiB", False, 0.0),
        "one bit": fit(*args, folder / "bit", 44, torch.float32, "1MiB", True, 0.0),
        "clipped": fit(*args, folder / "clipped", WARMUP + 3, torch.bfloat16, "1MiB", True, 0.1),
        "resumed": resume(rank, folder / "resumed"),
        "refused": refuse(rank, folder / "refused"),
    }


def resume(rank: int, folder: Path) -> dict[str, Any]:
    """Train, save on the way in both forms, and go on from each."""

    def train(model: Any, optimizer: Any, steps: range) -> dict[str, Tensor]:
        for step in steps:
            loss_of(model, *batch(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in model.state_dict().items()}

    ends: dict[str, Any] = {}
    with tiermem.TieredModule(network(), config_of(folder, rank, "1MiB")) as model:
        optimizer = OneBitAdam(model.parameters(), warmup_steps=2)
        state = train(model, optimizer, range(5))
        errors = [each["error"] for each in optimizer.state_dict()["state"].values()]
        ends["errors"] = sum(int((each != 0).sum()) for each in errors)
        model.save(folder / "saved", optimizer)
        moments = optimizer.state_dict()
        ends["went on"] = train(model, optimizer, range(5, 8))
        ends["went on, state"] = snapshot(optimizer)
    with tiermem.TieredModule(network(seed=9), config_of(folder, rank, "1MiB")) as model:
        optimizer = OneBitAdam(model.parameters(), warmup_steps=2)
        model.load(folder / "saved", optimizer)
        ends["loaded"] = train(model, optimizer, range(5, 8))
        ends["loaded, state"] = snapshot(optimizer)
        # Into one that has errors of its own already.
        model.load_state_dict(state)
        optimizer.load_state_dict(moments)
        ends["state dict"] = train(model, optimizer, range(5, 8))
        model.load(folder / "saved", optimizer)
        ends["loaded again"] = train(model, optimizer, range(5, 8))
    return ends


def refuse(rank: int, folder: Path) -> dict[str, str]:
    said = {}
    for stage in (1, 2, 3):
        with tiermem.TieredModule(network(), config_of(folder, rank, "8MiB", stage)) as model:
            try:
                OneBitAdam(model.parameters(), warmup_steps=1)
            except ValueError as error:
                said[f"stage {stage}"] = str(error)
    with tiermem.TieredModule(network(), config_of(folder, rank, "8MiB")) as model:
        some, rest = list(model.parameters())[:5], list(model.parameters())[5:]
        optimizer, other = OneBitAdam(some, warmup_steps=1), Adam(rest)
        for _ in range(2):
            loss_of(model, *batch(rank, 0)).backward()
            try:
                optimizer.step()
            except tiermem.PagingError as error:
                said["parameters of others"] = str(error)
            try:
                other.step()
            except tiermem.PagingError as error:
                said["an optimizer beside it"] = str(error)
            model.zero_grad()
    return said


def on_four(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return fit(rank, world, folder, WARMUP + 3, torch.bfloat16, "64MiB", True, 0.0)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return once(tmp_path_factory, 2, on_two)


@pytest.mark.ranks
def test_it_learns_what_adam_learns(two: list[Any]) -> None:
    def end(name: str) -> float:
        return sum(sum(each[name]["losses"][-10:]) for each in two) / 20

    adam, one_bit = end("adam"), end("one bit")
    first = two[0]["adam"]["losses"][0]
    assert two[0]["adam"]["losses"][:WARMUP] == two[0]["one bit"]["losses"][:WARMUP]
    assert adam < 0.5 * first
    assert one_bit < adam + 0.1 * (first - adam)  # a tenth of what Adam has learnt, at most


@pytest.mark.ranks
def test_ranks_stay_equal(two: list[Any]) -> None:
    for name in ("one bit", "clipped"):
        assert_same(name, two[0][name]["state"], two[1][name]["state"])
        assert_same(name, two[0][name]["optimizer"], two[1][name]["optimizer"])
        tiers = two[0][name]["tiers"]["host"]
        assert tiers["peak"] <= tiers["budget"]


@pytest.mark.ranks
def test_a_run_goes_on_from_what_was_saved(two: list[Any]) -> None:
    for each in two:
        ends = each["resumed"]
        assert ends["errors"] > 0
        for name in ("loaded", "state dict", "loaded again"):
            assert_same(name, ends["went on"], ends[name])
        assert_same("state", ends["went on, state"], ends["loaded, state"])


@pytest.mark.ranks
def test_what_it_cant_be_used_for_is_refused(two: list[Any]) -> None:
    for each in two:
        said = each["refused"]
        for stage in (1, 2, 3):
            assert f"read ranks.stage = {stage}; allowed is 0" in said[f"stage {stage}"]
        assert "isn't one of this OneBitAdam's parameters" in said["parameters of others"]
        assert "a OneBitAdam whose warm-up is over" in said["an optimizer beside it"]


@pytest.mark.ranks
def test_a_thirtieth_of_the_bytes_is_on_the_wire_at_four_ranks(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    for each in once(tmp_path_factory, 4, on_four):
        before, after = each["sent"][WARMUP - 1], each["sent"][-1]
        # Each rank sends a slice to each of the three others, twice.
        assert after == {"reduce": 0, "share": 3 * each["rows"], "signs": 3 * each["rows"]}
        assert sum(before.values()) > 5 * sum(after.values())
        print(
            f"{sum(before.values()):,} bytes a step in the warm-up, {sum(after.values()):,} behind it (bfloat16)"
        )


def test_settings_are_refused(wrap: Wrap) -> None:
    with pytest.raises(ValueError, match="warmup_steps: read 0; allowed is 1 or more"):
        OneBitAdam([nn.Parameter(torch.zeros(1))], warmup_steps=0)
    model = wrap(GPT())
    with pytest.raises(ValueError, match="no other ranks share the model"):
        OneBitAdam(model.parameters(), warmup_steps=1)
