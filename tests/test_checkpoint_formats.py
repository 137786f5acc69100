"""Checkpoints of others, read into pages; and ours, written as others have them."""

from __future__ import annotations

import io
import json
import pickle
import sys
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from typer.testing import CliRunner

import tiermem
from tests.conftest import Wrap
from tests.models import BY_NAME
from tests.parity import adamw, assert_equal, assert_same, build, snapshot, train
from tiermem.checkpoint.formats import open_source
from tiermem.checkpoint.source import read_into
from tiermem.cli import app
from tiermem.trainer import AdamW

GPT = BY_NAME["gpt"]


def run(*words: str) -> Any:
    """What a command prints, as JSON."""
    done = CliRunner().invoke(app, ["checkpoint", *words, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def contents(path: Path) -> dict[str, torch.Tensor]:
    """All parameters and buffers of a source, by name."""
    source = open_source(path)
    found = {}
    for key, entry in source.entries.items():
        if not key.group.startswith("optimizer"):
            flat = torch.empty(entry.numel, dtype=entry.dtype)
            read_into(source, key, 0, flat, entry.size, tuple(range(len(entry.size))))
            found[key.name] = flat.view(entry.size)
    source.close()
    return found


# -- safetensors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", ["5GB", "10KB"])
def test_export_is_what_the_reference_library_reads(shard: str, disk: Path, wrap: Wrap) -> None:
    case = BY_NAME["conv-channels-last"]
    model = wrap(build(case, torch.bfloat16), host="smallest")
    model.save(disk / "ck", adamw(model))
    files = run("export", str(disk / "ck"), str(disk / "out"), "--shard", shard)["files"]
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found |= load_file(file)
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert_same("state", dict(model.state_dict()), found)
    if shard == "10KB":
        assert len(files) > 1
        index = json.loads((disk / "out/model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in found.values())
        for name, file in index["weight_map"].items():
            assert name in load_file(disk / "out" / file)
    other = wrap(build(case, torch.bfloat16, seed=4), host="smallest")
    other.load(disk / "out")
    assert_same("state", dict(model.state_dict()), dict(other.state_dict()))


def test_export_takes_masters_and_converts(disk: Path, wrap: Wrap) -> None:
    model = wrap(build(GPT), host="smallest", precision={"parameters": "bfloat16"})
    optimizer = adamw(model)
    train(model, optimizer, GPT, steps=1)
    model.save(disk / "ck", optimizer)
    masters = {
        name: optimizer.state_dict()["state"][number]["master"]
        for number, (name, _) in enumerate(model.named_parameters())
    }
    run("export", str(disk / "ck"), str(disk / "full"), "--masters")
    assert_same("masters", masters, load_file(disk / "full/model.safetensors"))
    run("export", str(disk / "ck"), str(disk / "half"), "--masters", "--dtype", "float16")
    half = {name: value.to(torch.float16) for name, value in masters.items()}
    assert_same("half", half, load_file(disk / "half/model.safetensors"))


def test_export_refuses_what_it_can_not_do(disk: Path, wrap: Wrap) -> None:
    model = wrap(nn.ParameterDict({"a": nn.Parameter(torch.ones(2, dtype=torch.float64))}), host="1GiB")
    model.register_buffer("z", torch.ones(2, dtype=torch.complex128))
    model.module.register_buffer("z", torch.ones(2, dtype=torch.complex128))
    model.save(disk / "ck")
    for words, text in (
        ((), "z: safetensors has no complex128"),
        (("--adapter", "default"), "no tensor is left to export"),
        (("--shard", "much"), "--shard"),
    ):
        done = CliRunner().invoke(app, ["checkpoint", "export", str(disk / "ck"), str(disk / "out"), *words])
        assert done.exit_code == 2
        assert text in done.output
        assert not (disk / "out").exists()


class LoRA(nn.Module):
    """A linear layer with an adapter, under the names that PEFT gives."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 4)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2), "other": nn.Linear(4, 2)})
        self.lora_embedding_A = nn.ParameterDict({"default": nn.Parameter(torch.randn(2, 4))})
        self.modules_to_save = nn.ModuleDict({"default": nn.Linear(2, 2)})


def test_adapters_alone(disk: Path, wrap: Wrap) -> None:
    torch.manual_seed(0)
    model = wrap(nn.ModuleDict({"layer": LoRA()}), host="1GiB")
    model.save(disk / "ck", only=lambda name: "lora_" in name or "modules_to_save" in name)
    (file,) = run("export", str(disk / "ck"), str(disk / "out"), "--adapter", "default")["files"]
    assert Path(file).name == "adapter_model.safetensors"
    state = model.state_dict()
    expected = {
        "layer.lora_A.weight": state["layer.lora_A.default.weight"],
        "layer.lora_A.bias": state["layer.lora_A.default.bias"],
        "layer.lora_embedding_A": state["layer.lora_embedding_A.default"],
        "layer.weight": state["layer.modules_to_save.default.weight"],
        "layer.bias": state["layer.modules_to_save.default.bias"],
    }
    assert_same("adapter", expected, load_file(file))


def test_a_damaged_file_is_named(disk: Path, wrap: Wrap) -> None:
    model = wrap(build(GPT), host="smallest")
    file = disk / "model.safetensors"
    save_file(dict(model.state_dict()), file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(tiermem.CheckpointError, match=r"model\.safetensors"):
        model.load(file)


# -- torch.save ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [None, "model", "state_dict", "module"])
def test_files_of_torch_save(nested: str | None, disk: Path, wrap: Wrap) -> None:
    case = BY_NAME["gpt-tied"]
    state = build(case).state_dict()  # both names of the tied weight are in it
    torch.save(state if nested is None else {nested: state, "epoch": 3}, disk / "file.pt")
    model = wrap(build(case, seed=3), host="smallest")
    model.load(disk / "file.pt")
    assert_same("state", dict(state), dict(model.state_dict()))
    run("import", str(disk / "file.pt"), str(disk / "ck"))
    assert_same("import", dict(state), contents(disk / "ck"))


def trained(case: Any, steps: int = 2) -> tuple[nn.Module, torch.optim.AdamW]:
    """A plain network and torch's optimizer, of two groups, that has made some steps."""
    net = build(case)
    optimizer = torch.optim.AdamW(groups_of(net), lr=1e-3)
    for _ in range(steps):
        case.loss(net, case.batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def groups_of(net: nn.Module) -> list[dict[str, Any]]:
    named = list(net.named_parameters())
    return [{"params": named[::2], "weight_decay": 0.3}, {"params": named[1::2], "lr": 2e-3}]


def plain_groups_of(net: nn.Module) -> list[dict[str, Any]]:
    return [{**group, "params": [p for _, p in group["params"]]} for group in groups_of(net)]


def assert_goes_on(source: Path, model: Any, net: nn.Module, theirs: torch.optim.Optimizer) -> None:
    """The state of a plain run has come into the pages, settings included."""
    ours = AdamW(plain_groups_of(model))
    model.load(source, ours)
    assert_same("state", dict(net.state_dict()), dict(model.state_dict()))
    assert_same("optimizer", snapshot(theirs), snapshot(ours))
    for group, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        for key in ("lr", "betas", "eps", "weight_decay"):
            assert group[key] == other[key]
    model._runtime.check()


@pytest.mark.parametrize("names", [False, True])
def test_an_optimizer_in_a_file_of_torch_save(names: bool, disk: Path, wrap: Wrap) -> None:
    case = BY_NAME["gpt-tied"]
    net, optimizer = trained(case)
    saved = optimizer.state_dict()
    if not names:
        for group in saved["param_groups"]:
            group.pop("param_names", None)
    torch.save({"model": net.state_dict(), "optimizer": saved}, disk / "file.pt")
    model = wrap(build(case, seed=3), host="smallest")
    assert_goes_on(disk / "file.pt", model, net, optimizer)
    other = AdamW(model.parameters())
    with pytest.raises(tiermem.CheckpointError, match=r"optimizer.*group"):
        model.load(disk / "file.pt", other)
    run("import", str(disk / "file.pt"), str(disk / "ck"))
    assert_goes_on(disk / "ck", wrap(build(case, seed=4), host="smallest"), net, optimizer)


def test_what_a_paged_run_saved_with_torch_save_comes_back(disk: Path, wrap: Wrap) -> None:
    model = wrap(build(GPT, torch.bfloat16), host="smallest")
    optimizer = adamw(model)
    train(model, optimizer, GPT, steps=2)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, disk / "file.pt")
    state, moments = dict(model.state_dict()), snapshot(optimizer)
    other = wrap(build(GPT, torch.bfloat16, seed=3), host="smallest")
    second = adamw(other)
    other.load(disk / "file.pt", second)
    assert_same("state", state, dict(other.state_dict()))
    assert_same("optimizer, masters included", moments, snapshot(second))


def test_a_folder_of_such_files(disk: Path, wrap: Wrap) -> None:
    state = dict(build(GPT).state_dict())
    halves = [dict(list(state.items())[::2]), dict(list(state.items())[1::2])]
    names = [f"pytorch_model-{n:05}-of-00002.bin" for n in (1, 2)]
    for name, half in zip(names, halves, strict=True):
        torch.save(half, disk / name)
    index = {"weight_map": {key: name for name, half in zip(names, halves, strict=True) for key in half}}
    (disk / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    model = wrap(build(GPT, seed=3), host="smallest")
    model.load(disk)
    assert_same("state", state, dict(model.state_dict()))
    index["weight_map"]["x"] = "../elsewhere.bin"
    (disk / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(tiermem.CheckpointError, match="is no index of files"):
        model.load(disk)


class Evil:
    """What runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path(self.path),))

    def __init__(self, path: str) -> None:
        self.path = path


def test_nothing_in_a_file_is_executed(disk: Path, wrap: Wrap) -> None:
    model = wrap(build(GPT), host="smallest")
    mark = disk / "executed"
    torch.save({"model": model.state_dict(), "x": Evil(str(mark))}, disk / "evil.pt")
    folder = disk / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(str(mark))))
    tag = disk / "ds"
    tag.mkdir()
    for kind in ("model", "optim"):
        torch.save({"x": Evil(str(mark))}, tag / f"zero_pp_rank_0_mp_rank_00_{kind}_states.pt")
    for path, words in (
        (disk / "evil.pt", "could run code"),
        (folder, "has no place in it"),
        (tag, "could run code"),
    ):
        with pytest.raises(tiermem.CheckpointError, match=words):
            model.load(path)
    assert not mark.exists()
    (disk / "list.pt").write_bytes(b"nothing of torch's")
    with pytest.raises(tiermem.CheckpointError, match=r"list\.pt"):
        model.load(disk / "list.pt")
    torch.save({"a": 1, "b": [2]}, disk / "plain.pt")
    with pytest.raises(
        tiermem.CheckpointError, match=r"holds a dict with \['a', 'b'\]; looked for is a state dict"
    ):
        model.load(disk / "plain.pt")


# -- torch.distributed.checkpoint ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_dcp_saved(disk: Path, wrap: Wrap) -> None:
    net = build(GPT)
    state = dict(net.state_dict())
    optimizer = torch.optim.AdamW(net.parameters())
    GPT.loss(net, GPT.batch()).backward()
    optimizer.step()
    state = {name: value.clone() for name, value in net.state_dict().items()}
    dcp.save({"model": net.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=disk / "both")
    dcp.save(dict(net.state_dict()), checkpoint_id=disk / "model")
    for name in ("both", "model"):
        model = wrap(build(GPT, seed=3), host="smallest")
        model.load(disk / name)
        assert_same("state", state, dict(model.state_dict()))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("how", ["numbers", "names", "flat"])
def test_an_optimizer_that_dcp_saved(how: str, disk: Path, wrap: Wrap) -> None:
    net, optimizer = trained(GPT)
    saved: Any = optimizer.state_dict()
    if how == "numbers":
        for group in saved["param_groups"]:
            group.pop("param_names", None)
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=how == "flat")
        saved = get_optimizer_state_dict(net, optimizer, options=options)
    dcp.save({"model": net.state_dict(), "optim": saved}, checkpoint_id=disk / "dcp")
    assert_goes_on(disk / "dcp", wrap(build(GPT, seed=3), host="smallest"), net, optimizer)


@pytest.mark.parametrize(
    "cuts", [((0, 6),), ((0, 2, 6), (0, 5)), ((0, 4, 6), (0, 2, 5)), ((0, 1, 6), (0, 5), (0, 3, 4))]
)
def test_pieces_of_any_ranks_are_put_together(cuts: tuple[tuple[int, ...], ...], disk: Path) -> None:
    """As FSDP (rows) and tensor parallelism (columns) cut tensors."""
    size = tuple(cut[-1] for cut in cuts)
    whole = torch.randn(size)
    pieces: list[Any] = [()]
    for cut in cuts:
        pieces = [(*piece, (a, b)) for piece in pieces for a, b in pairwise(cut)]
    chunks, infos, data = [], {}, io.BytesIO()
    for piece in pieces:
        offsets = torch.Size(a for a, _ in piece)
        chunks.append(ChunkStorageMetadata(offsets, torch.Size(b - a for a, b in piece)))
        start = data.tell()
        torch.save(whole[tuple(slice(a, b) for a, b in piece)].clone(), data)
        infos[MetadataIndex("w", offsets)] = _StorageInfo("__0_0.distcp", start, data.tell() - start)
    metadata = Metadata(
        {"w": TensorStorageMetadata(TensorProperties(), torch.Size(size), chunks)}, None, infos
    )
    (disk / ".metadata").write_bytes(pickle.dumps(metadata))
    (disk / "__0_0.distcp").write_bytes(data.getvalue())
    source = open_source(disk)
    (key,) = source.entries
    for start in range(whole.numel()):
        for stop in (start + 1, min(start + 7, whole.numel()), whole.numel()):
            out = torch.empty(stop - start)
            source.read(key, start, out.view(torch.uint8))
            assert torch.equal(out, whole.flatten()[start:stop])


# -- DeepSpeed -----------------------------------------------------------------------------------------------


def write_zero3(
    folder: Path, net: nn.Module, optimizer: torch.optim.Optimizer, ranks: int, subgroups: bool
) -> None:
    """A checkpoint as DeepSpeed 0.19 writes it; what is checked by its zero_to_fp32.py is laid out the same."""
    names = {id(p): name for name, p in net.named_parameters()}
    shapes = [{names[id(p)]: p.shape for p in group["params"]} for group in optimizer.param_groups]

    def shares(values: list[torch.Tensor], rank: int) -> torch.Tensor:
        cut = []
        for value in values:
            size = -(-value.numel() // ranks)
            padded = torch.zeros(size * ranks)
            padded[: value.numel()] = value.detach().flatten()
            cut.append(padded[rank * size : (rank + 1) * size])
        return torch.cat(cut)

    enum = types.ModuleType("deepspeed.runtime.zero.config")
    scaler = types.ModuleType("deepspeed.runtime.fp16.loss_scaler")
    enum.ZeroStageEnum = type("ZeroStageEnum", (int,), {"__module__": enum.__name__})  # type: ignore[attr-defined]
    scaler.LossScaler = type("LossScaler", (), {"__module__": scaler.__name__})  # type: ignore[attr-defined]
    scaler.LossScaler.__init__ = lambda self: setattr(self, "cur_scale", 1.0)  # type: ignore[attr-defined]
    packages = {
        "deepspeed": None,
        "deepspeed.runtime": None,
        "deepspeed.runtime.zero": None,
        "deepspeed.runtime.fp16": None,
    }
    modules = {name: types.ModuleType(name) for name in packages} | {
        enum.__name__: enum,
        scaler.__name__: scaler,
    }
    sys.modules.update(modules)
    tag = folder / "global_step2"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step2")
    try:
        for rank in range(ranks):
            groups = [group["params"] for group in optimizer.param_groups]
            if subgroups:
                groups = [[p] for group in groups for p in group]
            state = {
                number: {
                    "step": torch.tensor(2.0),
                    **{
                        moment: shares([optimizer.state[p][moment] for p in group], rank)
                        for moment in ("exp_avg", "exp_avg_sq")
                    },
                }
                for number, group in enumerate(groups)
            }
            inner = {
                "state": state,
                "param_groups": [
                    {**{k: v for k, v in group.items() if k != "params"}, "params": [number]}
                    for number, group in enumerate(optimizer.param_groups)
                ],
            }
            flat = [shares(group, rank).requires_grad_() for group in groups]
            torch.save(
                {
                    "optimizer_state_dict": {
                        "zero_stage": enum.ZeroStageEnum(3),  # type: ignore[attr-defined]
                        "loss_scaler": scaler.LossScaler(),  # type: ignore[attr-defined]
                        "partition_count": ranks,
                        "optimizer_state_dict": inner,
                        "fp32_flat_groups": flat,
                    },
                    "ds_version": "0.19.8",
                },
                tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            )
            frozen = {name: p for name, p in net.named_parameters() if not p.requires_grad}
            torch.save(
                {
                    "module": {
                        **{name: torch.empty(0) for name, _ in net.named_parameters()},
                        **dict(net.named_buffers()),
                    },
                    "buffer_names": [name for name, _ in net.named_buffers()],
                    "param_shapes": shapes,
                    "frozen_param_shapes": {name: p.shape for name, p in frozen.items()},
                    "frozen_param_fragments": {name: shares([p], rank) for name, p in frozen.items()},
                    "shared_params": {},
                    "global_steps": 2,
                    "ds_version": "0.19.8",
                },
                tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
            )
    finally:
        for name in modules:
            del sys.modules[name]


class Mixed(nn.Module):
    """Odd sizes, a frozen layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.frozen = nn.Linear(7, 5), nn.Linear(5, 9), nn.Linear(9, 3)
        self.frozen.requires_grad_(False)
        self.register_buffer("mean", torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.frozen(self.b(self.a(x))) + self.mean[:3]
        return y


def mixed(seed: int) -> tuple[nn.Module, list[dict[str, Any]]]:
    torch.manual_seed(seed)
    net = Mixed()
    trained = [p for p in net.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    return net, groups


@pytest.mark.parametrize("subgroups", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_deepspeed_run_goes_on_here(ranks: int, subgroups: bool, disk: Path, wrap: Wrap) -> None:
    net, groups = mixed(0)
    theirs = torch.optim.AdamW(groups, lr=1e-2, fused=True)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step(net, theirs)
    write_zero3(disk / "ds", net, theirs, ranks, subgroups)
    other, groups = mixed(5)
    model = wrap(other, host="1GiB")
    ours = tiermem.trainer.AdamW(groups, lr=9.0)
    loaded = model.load(disk / "ds", ours)
    assert loaded.step == 2
    assert_same("state", dict(net.state_dict()), dict(model.state_dict()))
    assert [group["lr"] for group in ours.param_groups] == [1e-2, 1e-2]
    reference = mixed(0)[0]
    reference.load_state_dict(net.state_dict())
    plain = tiermem.trainer.AdamW(
        [
            {"params": [p for p in reference.parameters() if p.requires_grad and (p.ndim > 1) == big]}
            for big in (True, False)
        ]
    )
    plain.load_state_dict(theirs.state_dict())
    step(reference, plain)
    step(model, ours)
    assert_same("after", dict(reference.state_dict()), dict(model.state_dict()))
    run("import", str(disk / "ds"), str(disk / "ck"))
    assert_same("import", dict(net.state_dict()), contents(disk / "ck"))
    assert run("show", str(disk / "ck"))["step"] == 2


def test_a_deepspeed_checkpoint_that_is_not_whole(disk: Path, wrap: Wrap) -> None:
    net, groups = mixed(0)
    theirs = torch.optim.AdamW(groups, lr=1e-2)
    net(torch.ones(2, 7)).sum().backward()
    theirs.step()
    write_zero3(disk / "ds", net, theirs, 3, False)
    tag = disk / "ds/global_step2"
    model = wrap(mixed(1)[0], host="1GiB")
    (tag / "zero_pp_rank_2_mp_rank_00_model_states.pt").rename(disk / "kept")
    with pytest.raises(
        tiermem.CheckpointError, match="was saved by 3 ranks, and there are 2 files of model states"
    ):
        model.load(tag)
    (tag / "zero_pp_rank_1_mp_rank_00_model_states.pt").rename(
        tag / "zero_pp_rank_2_mp_rank_00_model_states.pt"
    )
    with pytest.raises(tiermem.CheckpointError, match=r"files of ranks \[0, 2\]: some are missing"):
        model.load(tag)
    (disk / "kept").rename(tag / "zero_pp_rank_0_mp_rank_01_model_states.pt")
    with pytest.raises(tiermem.CheckpointError, match="tensor parallelism"):
        model.load(tag)
    (disk / "ds/latest").write_text("../elsewhere")
    with pytest.raises(
        tiermem.CheckpointError, match=r"names '\.\./elsewhere', which is no folder beside it"
    ):
        model.load(disk / "ds")


# -- between runs of ours ------------------------------------------------------------------------------------


def test_import_of_our_own_is_a_copy(disk: Path, wrap: Wrap) -> None:
    model = wrap(build(GPT, torch.bfloat16), host="smallest")
    optimizer = adamw(model)
    train(model, optimizer, GPT, steps=2)
    model.save(disk / "ck", optimizer, extra={"a": 1})
    run("import", str(disk / "ck"), str(disk / "small"), "--compression", "zstd")
    other = wrap(build(GPT, torch.bfloat16, seed=4), host="smallest")
    second = adamw(other)
    loaded = other.load(disk / "small", second)
    assert (loaded.step, loaded.extra) == (2, {"a": 1})
    assert_same("optimizer", snapshot(optimizer), snapshot(second))
    assert_equal(train(model, optimizer, GPT, steps=1), train(other, second, GPT, steps=1))
    shown = run("show", str(disk / "small"))
    assert shown["optimizer"]
    assert shown["nbytes"] == sum(row["nbytes"] for row in shown["tensors"])
    text = CliRunner().invoke(app, ["checkpoint", "show", str(disk / "small")]).output
    assert "head.weight" in text
    assert "of step 2" in text


def test_a_series_keeps_what_it_should(disk: Path, wrap: Wrap) -> None:
    model = wrap(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), host="1GiB")
    series = tiermem.Checkpoints(disk / "run", keep_last=2, keep_every=10)
    assert series.latest() is None
    for step in (5, 10, 15, 20, 25, 30):
        saving = series.save(model, step=step, background=step == 30)
        saving.wait()
    assert series.steps() == [10, 20, 25, 30]
    assert series.latest() == disk / "run/step-00000030"
    (disk / "run/step-7").mkdir()  # no checkpoint
    (disk / "run/mine").write_text("")
    series.save(model, step=30)
    assert run("prune", str(disk / "run"), "--keep-last", "1", "--dry-run") == {
        "removed": [],
        "would_remove": [10, 20, 25],
        "kept": [30],
    }
    assert run("prune", str(disk / "run"), "--keep-last", "1", "--keep-every", "20")["removed"] == [10, 25]
    assert series.steps() == [20, 30]
    assert (disk / "run/mine").exists()
    assert (disk / "run/step-7").exists()
    with pytest.raises(tiermem.CheckpointError, match="keep_last: read 0"):
        tiermem.Checkpoints(disk, keep_last=0)
