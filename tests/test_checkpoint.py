"""Checkpoints: what they hold, that others can read it, and that a run goes on from one bit for bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from torch import nn

import tiermem
from tests.conftest import Wrap
from tests.models import BY_NAME
from tests.parity import adamw, assert_equal, assert_same, build, same, snapshot, train
from tiermem.checkpoint.document import read_document, write_document
from tiermem.trainer import AdamW

GPT = BY_NAME["gpt"]
SMALL = {"chunk_nbytes": 16384}


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of the small models here are written as large ones are, past the page cache."""
    monkeypatch.setattr("tiermem.checkpoint.writer.DIRECT_NBYTES", 0)


def array(path: Path, name: str) -> Any:
    return zarr.open_group(str(path), mode="r")[name]


def tensor_of(node: Any) -> torch.Tensor:
    """What a person with zarr and torch, and without tiermem, makes of an array."""
    values = torch.from_numpy(np.ascontiguousarray(node[...])).reshape(node.shape)
    return values.view(getattr(torch, node.attrs["dtype"]))


# -- what is in it -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_zarr_reads_everything_without_tiermem(dtype: torch.dtype, disk: Path, wrap: Wrap) -> None:
    model = wrap(build(GPT, dtype), host="smallest")
    optimizer = adamw(model)
    train(model, optimizer, GPT, steps=2)
    model.save(disk / "ck", optimizer, extra={"epoch": 3, "schedule": {"last_lr": [1e-3]}}, **SMALL)
    model._runtime.check()
    root = zarr.open_group(str(disk / "ck"), mode="r")
    state = dict(model.state_dict())
    assert {name for name, _ in root["parameters"].arrays()} == set(state)
    for name, value in state.items():
        assert same(tensor_of(root[f"parameters/{name}"]), value), name
    moments = optimizer.state_dict()["state"]
    for number, (name, _) in enumerate(model.named_parameters()):
        for kind in ("exp_avg", "exp_avg_sq", *(["master"] if dtype is torch.bfloat16 else [])):
            assert same(tensor_of(root[f"optimizer/{kind}/{name}"]), moments[number][kind]), (kind, name)
    assert root.attrs["step"] == 2
    assert root.attrs["extra"] == {"epoch": 3, "schedule": {"last_lr": [1e-3]}}
    assert "budget" in root.attrs["policy"]
    (group,) = root["optimizer"].attrs["param_groups"]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (3e-3, [0.9, 0.999], 0.1)
    assert group["parameters"] == [name for name, _ in model.named_parameters()]
    assert root["parameters/head.weight"].dtype == ("float32" if dtype is torch.float32 else "uint16")


def test_numpy_reads_a_chunk_as_it_is(disk: Path, wrap: Wrap) -> None:
    model = wrap(build(GPT), host="smallest")
    model.save(disk / "ck")
    weight = model.state_dict()["head.weight"]
    (file,) = (disk / "ck/parameters/head.weight").glob("c.*")
    values = np.fromfile(file, "<f4", count=weight.numel())
    assert np.array_equal(values.reshape(weight.shape), weight.numpy())
    assert file.stat().st_size == values.nbytes + 4, "behind it is a checksum"


class Odd(nn.Module):
    """Names, shapes and strides that a checkpoint has to get right."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a/b": nn.Linear(3, 4), "__x": nn.Linear(4, 3), "%": nn.Linear(3, 3)})
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(6, 5).t())
        self.single = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.empty(0, 7))
        self.halves = nn.Parameter(torch.randn(5).to(torch.float16))
        self.norm = nn.BatchNorm1d(3)
        self.packed = nn.Parameter(torch.randint(0, 255, (9,), dtype=torch.uint8), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.layers["__x"](self.layers["a/b"](self.layers["%"](x))))
        y = y.sum() + self.turned.sum() * self.single + self.halves.float().sum()
        total: torch.Tensor = y + self.conv(torch.ones(1, 3, 4, 4)).square().sum()
        return total


@pytest.mark.parametrize("compression", ["none", "zstd", "blosc", "gzip"])
def test_odd_names_shapes_strides_and_buffers_come_back(compression: str, disk: Path, wrap: Wrap) -> None:
    torch.manual_seed(0)
    model = wrap(Odd(), host="1GiB")
    optimizer = adamw(model)
    for _ in range(2):
        model(torch.randn(5, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save(disk / "ck", optimizer, compression=compression, chunk_nbytes=64)
    state = dict(model.state_dict())
    root = zarr.open_group(str(disk / "ck"), mode="r")
    names = {node.attrs.get("name", path): node for path, node in root["parameters"].arrays()}
    assert len(names) + len(list(root["buffers"].arrays())) == len(state)
    assert "buffers/scratch" not in root
    assert same(tensor_of(root["parameters/conv.weight"]), state["conv.weight"])
    assert same(tensor_of(root["parameters/turned"]), state["turned"])
    assert root["parameters/layers.a%2Fb.weight"].shape == (4, 3)
    assert same(tensor_of(root["buffers/norm.running_mean"]), state["norm.running_mean"])
    torch.manual_seed(1)
    other = wrap(Odd(), host="1GiB")
    second = adamw(other)
    other.load(disk / "ck", second)
    assert_same("state", state, dict(other.state_dict()))
    assert_same("optimizer", snapshot(optimizer), snapshot(second))
    assert other.conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_another_order_of_axes_is_no_difference(disk: Path, wrap: Wrap) -> None:
    last, plain = BY_NAME["conv-channels-last"], BY_NAME["conv"]
    model = wrap(build(last), host="smallest")
    optimizer = adamw(model)
    train(model, optimizer, last, steps=1)
    model.save(disk / "ck", optimizer)
    other = wrap(build(plain, seed=3), host="smallest")
    second = adamw(other)
    other.load(disk / "ck", second)
    assert_same("state", dict(model.state_dict()), dict(other.state_dict()))
    assert_same("optimizer", snapshot(optimizer), snapshot(second))


def test_tied_weights_are_there_once(disk: Path, wrap: Wrap) -> None:
    case = BY_NAME["gpt-tied"]
    model = wrap(build(case), host="smallest")
    model.save(disk / "ck")
    root = zarr.open_group(str(disk / "ck"), mode="r")
    (alias,) = root.attrs["tied"]
    assert f"parameters/{alias}" not in root
    state = dict(model.state_dict())
    other = wrap(build(case, seed=3), host="smallest")
    other.load(disk / "ck")
    assert_same("state", state, dict(other.state_dict()))


# -- a run goes on from it -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize(
    ("dtype", "three"), [(torch.float32, False), (torch.bfloat16, True)], ids=["fp32-cpu", "bf16-three-tiers"]
)
def test_a_run_goes_on_bit_for_bit_with_another_budget(
    dtype: torch.dtype, three: bool, disk: Path, wrap: Wrap
) -> None:
    first = wrap(build(GPT, dtype), host="smallest", device="smallest", three=three)
    optimizer = adamw(first)
    train(first, optimizer, GPT, steps=2)
    first.save(disk / "ck", optimizer, **SMALL)
    expected = train(first, optimizer, GPT, steps=2, seed=5)
    for host, tiers, units in ((0.6, not three, ("h.*", "head")), ("1GiB", three, ())):
        other = wrap(build(GPT, dtype, seed=9), host=host, three=tiers, policy={"units": units})
        second = adamw(other, lr=9.0)
        train(other, second, GPT, steps=1)
        loaded = other.load(disk / "ck", second)
        assert (loaded.step, loaded.missing, loaded.unexpected) == (2, (), ())
        assert second.param_groups[0]["lr"] == 3e-3
        assert second.param_groups[0]["betas"] == (0.9, 0.999)
        assert_equal(expected, train(other, second, GPT, steps=2, seed=5))


def test_saving_moves_nothing(disk: Path, wrap: Wrap) -> None:
    model = wrap(build(GPT), host="smallest")
    optimizer = adamw(model)
    train(model, optimizer, GPT, steps=3)
    before = {page.number: (page.state, page.host, page.dirty) for page in model._runtime.table}
    figures = model.stats()
    model.save(disk / "ck", optimizer)
    assert {page.number: (page.state, page.host, page.dirty) for page in model._runtime.table} == before
    assert model.stats() == figures


def test_master_weights_are_saved_before_the_first_update(disk: Path, wrap: Wrap) -> None:
    half = {"precision": {"parameters": "bfloat16"}}
    model = wrap(build(GPT), host="smallest", **half)
    model.save(disk / "ck")
    master = tensor_of(array(disk / "ck", "optimizer/master/head.weight"))
    assert same(master, build(GPT).state_dict()["head.weight"])
    other = wrap(build(GPT, seed=7), host="smallest", **half)
    other.load(disk / "ck")
    ends = [train(each, adamw(each), GPT, steps=2) for each in (model, other)]
    assert_equal(*ends)


def test_casting_keeps_what_rounding_loses(disk: Path, wrap: Wrap) -> None:
    half = {"precision": {"parameters": "bfloat16"}}
    model = wrap(build(GPT), host="smallest", **half)
    optimizer = adamw(model)
    train(model, optimizer, GPT, steps=2)
    model.save(disk / "half", optimizer)
    masters = {
        name: optimizer.state_dict()["state"][n]["master"]
        for n, (name, _) in enumerate(model.named_parameters())
    }
    full = wrap(build(GPT, seed=5), host="smallest")
    full.load(disk / "half")  # to float32: the masters are what it has
    assert_same("state", masters, {name: p.detach().clone() for name, p in full.named_parameters()})
    full.save(disk / "full")
    other = wrap(build(GPT, seed=6), host="smallest", **half)
    with pytest.raises(tiermem.CheckpointError, match="cast=True converts"):
        other.load(disk / "full")
    other.load(disk / "full", cast=True)
    second = adamw(other)
    other.load(disk / "half", second)
    other.load(disk / "full", cast=True)
    assert_equal(train(model, optimizer, GPT, steps=2), train(other, second, GPT, steps=2))


def test_parts_of_an_optimizer_and_state_in_no_page(disk: Path, wrap: Wrap) -> None:
    ends = []
    for turn in range(2):
        model = wrap(build(GPT, seed=turn), host="1GiB")
        adam = AdamW(model.h[0].parameters(), lr=1e-2)
        adam.add_param_group({"params": list(model.head.parameters()), "lr": 1e-4})
        momentum = torch.optim.SGD(model.h[1].parameters(), lr=1e-2, momentum=0.9)
        for number in range(4):
            if number == 2 and turn == 0:
                model.save(disk / "adam", adam)
                model.save(disk / "momentum", momentum)
            if number == 2 and turn == 1:
                model.load(disk / "adam", adam)
                model.load(disk / "momentum", momentum)
            torch.manual_seed(number)
            GPT.loss(model, GPT.batch()).backward()
            adam.step()
            momentum.step()
            model.zero_grad()
        ends.append(dict(model.state_dict()) | {f"adam {k}": v for k, v in snapshot(adam)[0].items()})
    assert_same("end", *ends)


def test_after_close_the_parameters_can_be_saved_and_loaded(disk: Path, wrap: Wrap) -> None:
    net = build(GPT)
    model = wrap(net, host="smallest")
    optimizer = adamw(model)
    train(model, optimizer, GPT, steps=1)
    state = dict(model.state_dict())
    model.close()
    model.save(disk / "ck")
    with pytest.raises(tiermem.PagingError, match="has been closed"):
        model.save(disk / "other", optimizer)
    with pytest.raises(tiermem.CheckpointError, match="background=True: the model has been closed"):
        model.save(disk / "other", background=True)
    other = wrap(build(GPT, seed=2), host="smallest")
    other.load(disk / "ck")
    assert_same("state", state, dict(other.state_dict()))
    for parameter in net.parameters():
        parameter.data.zero_()
    model.load(disk / "ck")
    assert_same("state", state, dict(net.state_dict()))
    assert sorted(os.listdir(disk)) == sorted(
        {"ck", *(name for name in os.listdir(disk) if name.startswith("tiermem-run-"))}
    )


def test_a_graph_made_before_loading_is_refused(disk: Path, wrap: Wrap) -> None:
    model = wrap(build(GPT), host="smallest")
    model.save(disk / "ck")
    loss = GPT.loss(model, GPT.batch())
    model.load(disk / "ck")
    with pytest.raises(tiermem.PagingError, match="modified since forward"):
        loss.backward()


def test_only_some_tensors(disk: Path, wrap: Wrap) -> None:
    model = wrap(build(GPT), host="smallest")
    optimizer = adamw(model)
    train(model, optimizer, GPT, steps=1)
    model.save(disk / "ck", optimizer, only=lambda name: name.startswith("h.1."))
    root = zarr.open_group(str(disk / "ck"), mode="r")
    names = {name for name, _ in model.named_parameters() if name.startswith("h.1.")}
    assert {name for name, _ in root["parameters"].arrays()} == names
    assert {name for name, _ in root["optimizer/exp_avg"].arrays()} == names
    state = dict(model.state_dict())
    other = wrap(build(GPT, seed=4), host="smallest")
    mine = dict(other.state_dict())
    with pytest.raises(tiermem.CheckpointError, match=r"missing: the model has head\.weight"):
        other.load(disk / "ck")
    loaded = other.load(disk / "ck", strict=False)
    assert set(loaded.missing) == set(state) - names
    assert_same("state", {**mine, **{name: state[name] for name in names}}, dict(other.state_dict()))


# -- frozen parameters are not written again -----------------------------------------------------------------


def inodes(path: Path) -> dict[str, int]:
    return {
        str(file.relative_to(path)): file.stat().st_ino
        for file in (path / "parameters").rglob("c*")
        if file.is_file()
    }


def test_unchanged_parameters_share_their_files(disk: Path, wrap: Wrap) -> None:
    case = BY_NAME["gpt-frozen"]
    model = wrap(build(case), host="smallest")
    optimizer = adamw(model)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen
    first = model.save(disk / "1", optimizer)
    assert first.nbytes_linked == 0
    train(model, optimizer, case, steps=1)
    second = model.save(disk / "2", optimizer)
    one, two = inodes(disk / "1"), inodes(disk / "2")
    shared = {file.split("/")[1] for file in one if one[file] == two[file]}
    assert shared == frozen
    nbytes = sum(p.numel() * 4 for name, p in model.named_parameters() if name in frozen)
    assert second.nbytes_linked == nbytes
    with torch.no_grad():
        dict(model.named_parameters())[min(frozen)].add_(
            1
        )  # a user changes one of them: its page is saved again
    model.save(disk / "3", optimizer)
    assert inodes(disk / "3")[f"parameters/{min(frozen)}/c.0"] != two[f"parameters/{min(frozen)}/c.0"]
    other = wrap(build(case, seed=3), host="smallest")
    for path in ("2", "3"):
        other.load(disk / path)
        again = other.save(disk / f"again-{path}")  # what was loaded is what the pages have
        assert again.nbytes_linked == again.nbytes
    assert_same("state", dict(model.state_dict()), dict(other.state_dict()))


def test_a_checkpoint_that_is_gone_or_cut_otherwise_is_not_linked_to(disk: Path, wrap: Wrap) -> None:
    case = BY_NAME["gpt-frozen"]
    model = wrap(build(case), host="smallest")
    model.save(disk / "1")
    assert model.save(disk / "2", **SMALL).nbytes_linked < model.save(disk / "3", **SMALL).nbytes_linked
    os.rename(disk / "3", disk / "4")
    os.mkdir(disk / "3")
    assert model.save(disk / "5", **SMALL).nbytes_linked == 0
    assert model.save(disk / "5", overwrite=True, **SMALL).nbytes_linked > 0
    other = wrap(build(case, seed=3), host="smallest")
    other.load(disk / "5")
    assert_same("state", dict(model.state_dict()), dict(other.state_dict()))


# -- what doesn't fit, or isn't whole ------------------------------------------------------------------------


def test_every_difference_is_told_at_once_and_nothing_is_changed(disk: Path, wrap: Wrap) -> None:
    torch.manual_seed(0)
    one = nn.ModuleDict(
        {"a": nn.Linear(3, 4), "b": nn.Linear(4, 4), "d": nn.Linear(2, 2, dtype=torch.float64)}
    )
    two = nn.ModuleDict({"a": nn.Linear(3, 5), "c": nn.Linear(4, 4), "d": nn.Linear(2, 2)})
    model = wrap(one, host="1GiB")
    model.save(disk / "ck")
    other = wrap(two, host="1GiB")
    before = dict(other.state_dict())
    optimizer = adamw(other)
    with pytest.raises(tiermem.CheckpointError) as caught:
        other.load(disk / "ck", optimizer)
    text = str(caught.value)
    for words in (
        "missing: the model has c.weight and the checkpoint doesn't",
        "missing: the model has c.bias",
        "unexpected: the checkpoint has b.weight and the model doesn't",
        "unexpected: the checkpoint has b.bias",
        "shape: a.weight is [4, 3] in the checkpoint and [5, 3] in the model",
        "shape: a.bias is [4] in the checkpoint and [5] in the model",
        "dtype: d.weight, d.bias are float64 in the checkpoint and float32 in the model; cast=True converts them",
        "optimizer: the checkpoint has no optimizer state",
    ):
        assert words in text
    assert text.startswith("8 problems\n")
    assert_same("state", before, dict(other.state_dict()))


def test_names_that_begin_otherwise_are_pointed_out(disk: Path, wrap: Wrap) -> None:
    model = wrap(nn.ModuleDict({"module": nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))}), host="1GiB")
    model.save(disk / "ck")
    other = wrap(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)), host="1GiB")
    with pytest.raises(tiermem.CheckpointError, match=r"names of the checkpoint begin with 'module\.'"):
        other.load(disk / "ck")


def test_other_parameter_groups_are_refused(disk: Path, wrap: Wrap) -> None:
    model = wrap(build(GPT), host="smallest")
    names = [name for name, _ in model.named_parameters()]
    model.save(disk / "ck", adamw(model))
    two = AdamW([{"params": [p]} for p in model.parameters()])
    with pytest.raises(
        tiermem.CheckpointError, match=f"has 1 parameter groups and the optimizer {len(names)}"
    ):
        model.load(disk / "ck", two)
    fewer = AdamW(list(model.parameters())[1:])
    with pytest.raises(
        tiermem.CheckpointError, match=f"group 0 of the checkpoint has {names[0]}, that of the"
    ):
        model.load(disk / "ck", fewer)
    foreign = AdamW([*model.parameters(), nn.Parameter(torch.zeros(3))])
    with pytest.raises(tiermem.CheckpointError, match=r"of shape \[3\], is none of this model's"):
        model.save(disk / "other", foreign)


def damage(path: Path, how: str) -> None:
    file = next((path / "parameters/head.weight").glob("c.*"))
    if how == "truncated":
        os.truncate(file, 100)
    elif how == "a chunk gone":
        file.unlink()
    elif how == "no JSON":
        (path / "parameters/head.weight/zarr.json").write_text("{")
    elif how == "another version":
        document = read_document(path)
        document["attributes"]["tiermem"]["format"] = 99
        write_document(path, document)
    elif how == "somebody else's":
        zarr.create_group(str(path), overwrite=True)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("truncated", "is damaged: it is 100 bytes long, and a chunk of this array has"),
        ("a chunk gone", "is missing"),
        ("no JSON", "head.weight/zarr.json: this is not JSON"),
        ("another version", "has format 99; this tiermem reads format 1"),
        ("somebody else's", "no checkpoint of tiermem's"),
    ],
)
def test_damage_is_named(how: str, words: str, disk: Path, wrap: Wrap) -> None:
    model = wrap(build(GPT), host="smallest")
    model.save(disk / "ck")
    damage(disk / "ck", how)
    with pytest.raises(tiermem.CheckpointError, match=words):
        model.load(disk / "ck")
    model._runtime.check()


def test_what_is_there_is_not_overwritten_by_mistake(disk: Path, wrap: Wrap) -> None:
    model = wrap(build(GPT), host="smallest")
    model.save(disk / "ck")
    with pytest.raises(tiermem.CheckpointError, match="is there already: name another path"):
        model.save(disk / "ck")
    (disk / "file").write_text("mine")
    (disk / "folder").mkdir()
    (disk / "folder/file").write_text("mine")
    os.symlink(disk / "ck", disk / "link")
    for name in ("file", "folder", "link"):
        with pytest.raises(tiermem.CheckpointError, match="is no checkpoint: it is not overwritten"):
            model.save(disk / name, overwrite=True)
    assert (disk / "folder/file").read_text() == "mine"
    with pytest.raises(tiermem.CheckpointError, match="there is nothing"):
        model.load(disk / "nowhere")
    with pytest.raises(tiermem.CheckpointError, match="of no format that is known"):
        model.load(disk / "folder")
    with pytest.raises(tiermem.CheckpointError, match="compression: read 'lz'"):
        model.save(disk / "x", compression="lz")
    with pytest.raises(tiermem.CheckpointError, match=r"extra\.what: a object"):
        model.save(disk / "x", extra={"what": object()})


class Packed(nn.Module):
    """Weights in 4 bits as a buffer, large enough for a page, and a scratch one that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(0, 256, (128, 256), dtype=torch.uint8))
        self.register_buffer(
            "scratch", torch.randint(0, 256, (128, 256), dtype=torch.uint8), persistent=False
        )
        self.bias = nn.Parameter(torch.randn(128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight & 15).float().t() + self.bias


def test_packed_weights_in_buffers(disk: Path, wrap: Wrap) -> None:
    torch.manual_seed(0)
    model = wrap(nn.Sequential(Packed(), nn.Linear(128, 256), Packed()), host="smallest")
    optimizer = adamw(model)
    model(torch.ones(2, 256)).sum().backward()
    optimizer.step()
    model.save(disk / "ck", optimizer)
    state = dict(model.state_dict())
    assert same(tensor_of(array(disk / "ck", "buffers/0.weight")), state["0.weight"])
    other = wrap(nn.Sequential(Packed(), nn.Linear(128, 256), Packed()), host="smallest")
    scratch = other.get_buffer("0.scratch").clone()
    second = adamw(other)
    other.load(disk / "ck", second)
    assert_same("state", state, dict(other.state_dict()))
    assert_same("optimizer", snapshot(optimizer), snapshot(second))
    assert same(other.get_buffer("0.scratch").clone(), scratch)
