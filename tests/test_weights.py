"""Safetensors files and folders, read region by region."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tiermem.weights import DTYPES, INDEX, SINGLE, Weights, WeightsError

NAMES = {dtype: name for name, dtype in DTYPES.items()}


def save(path: Path, tensors: Mapping[str, torch.Tensor], **metadata: str) -> None:
    """Write a safetensors file, by the format's description."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": NAMES[tensor.dtype], "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }  # fmt: skip
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def save_folder(folder: Path, tensors: Mapping[str, torch.Tensor], shards: int) -> None:
    """Write several files and their index."""
    names = list(tensors)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number:05}.safetensors"
        of = names[number::shards]
        save(folder / file, {name: tensors[name] for name in of}, format="pt")
        weight_map |= dict.fromkeys(of, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).view(2, 3)
    save(
        tmp_path / "one.safetensors",
        {"a": torch.ones(3), "b": tensor, "empty": torch.empty(0, 4), "c": torch.tensor(7)},
    )
    with Weights(tmp_path / "one.safetensors") as weights:
        assert list(weights) == ["a", "b", "empty", "c"]
        found = weights.tensor("b")
        assert (found.dtype, found.shape) == (dtype, (2, 3))
        assert torch.equal(found.view(-1).view(torch.uint8), raw)
        assert weights.tensor("empty").shape == (0, 4)
        assert weights.tensor("c").item() == 7


def test_a_region_is_read_alone_and_converted_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiermem.weights.STAGE", 12)
    tensor = torch.randn(5, 7)
    save(tmp_path / SINGLE, {"w": tensor})
    with Weights(tmp_path) as weights:
        for start, stop in ((0, 35), (3, 4), (11, 29), (35, 35)):
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                target = torch.full((stop - start,), 9.0, dtype=dtype)
                weights.read("w", target, start)
                assert torch.equal(target, tensor.view(-1)[start:stop].to(dtype))
        with pytest.raises(WeightsError, match=r"elements 30 to 36 .* has 35"):
            weights.read("w", torch.empty(6), 30)
        with pytest.raises(WeightsError, match="contiguous"):
            weights.read("w", torch.empty(7, 5).t())
        with pytest.raises(WeightsError, match="no tensor 'v' among its 1"):
            weights["v"]


def test_a_folder_of_several_files(tmp_path: Path) -> None:
    tensors = {f"h.{n}.weight": torch.randn(3, n + 1) for n in range(7)}
    save_folder(tmp_path, tensors, 3)
    with Weights(tmp_path) as weights:
        assert set(weights) == set(tensors)
        assert weights.nbytes == sum(tensor.nbytes for tensor in tensors.values())
        for name, tensor in tensors.items():
            assert torch.equal(weights.tensor(name), tensor)


def damaged(change: str, folder: Path) -> None:
    """A folder that something is wrong with."""
    tensors = {"a": torch.ones(4), "b": torch.ones(4)}
    save_folder(folder, tensors, 2)
    index = json.loads((folder / INDEX).read_text())
    first = folder / index["weight_map"]["a"]
    data = first.read_bytes()
    if change == "index":
        (folder / INDEX).write_text("{}")
    elif change == "outside":
        index["weight_map"]["a"] = "../a.safetensors"
        (folder / INDEX).write_text(json.dumps(index))
    elif change == "missing file":
        first.unlink()
    elif change == "missing tensor":
        save(first, {"x": torch.ones(4)})
    elif change == "cut":
        first.write_bytes(data[:-1])
    elif change == "short":
        first.write_bytes(data[:5])
    elif change == "length":
        first.write_bytes(b"\xff" * 8 + data[8:])
    elif change == "dtype":
        first.write_bytes(data.replace(b'"F32"', b'"F33"'))
    elif change == "shape":
        first.write_bytes(data.replace(b"[4]", b"[5]"))
    elif change == "negative":
        first.write_bytes(data.replace(b"[4]", b"-4 "))
    else:
        for path in folder.iterdir():
            path.unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("index", "is no index"), ("outside", "no file beside it"), ("missing file", "can't be read"),
        ("missing tensor", "has no tensor 'a'"), ("cut", "said to lie"), ("short", "is no safetensors file"),
        ("length", "is no safetensors file"), ("dtype", "F33"), ("shape", "takes 20 bytes"), ("negative", "damaged"),
        ("all", "holds no"),
    ],
)  # fmt: skip
def test_what_is_damaged_is_refused_with_the_file_and_the_reason(
    change: str, message: str, tmp_path: Path
) -> None:
    damaged(change, tmp_path)
    with pytest.raises(WeightsError, match=message) as caught:
        Weights(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_a_file_that_is_cut_while_it_is_open(tmp_path: Path) -> None:
    save(tmp_path / SINGLE, {"a": torch.ones(400)})
    with Weights(tmp_path) as weights:
        (tmp_path / SINGLE).open("r+b").truncate(500)
        with pytest.raises(WeightsError, match="ends at byte 500"):
            weights.tensor("a")
