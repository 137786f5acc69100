"""Documents: the ``zarr.json`` of arrays and groups, written and read (Zarr core specification, version 3.1).

An array as it is written here has the standard codecs only: ``bytes``, before it ``transpose`` where its axes lie in
memory in another order, behind it a compressor where one was asked for, and ``crc32c``. Without a compressor a chunk's
file is the bytes that a page has, and four of their checksum, so they are written past everybody's buffers.

A document has a checksum of its own, among its attributes: a bit that flips in a number would be another number.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import torch

from tiermem.checkpoint import crc, dtypes
from tiermem.checkpoint.grid import Chunk, Grid
from tiermem.errors import CheckpointError

DOCUMENT = "zarr.json"
COMPRESSIONS = ("none", "zstd", "blosc", "gzip")
CHECKSUM = "document_crc32c"
"""The attribute with the checksum of all else that a document says."""
_RUN_NUMEL = 1 << 20


class Array(NamedTuple):
    """What is known of one array: dtype, grid, and how its chunks are encoded.

    ``raw``: chunks are the plain bytes. ``attributes``: what else it says of itself. ``checked``: behind each chunk is
    its checksum; in those that tiermem wrote before it did that, there is none.
    """

    dtype: torch.dtype
    grid: Grid
    raw: bool = True
    attributes: Mapping[str, Any] = {}
    separator: str = "."  # in the names of chunks: no folder for a single file
    checked: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.grid.numel * self.dtype.itemsize

    def name_of(self, chunk: Chunk) -> str:
        """The path of a chunk's file in the array's folder."""
        return self.separator.join(["c", *map(str, chunk.place)])

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of one chunk, uncompressed."""
        return self.grid.chunk_numel * self.dtype.itemsize

    @property
    def file_nbytes(self) -> int:
        """Bytes of one chunk's file, uncompressed."""
        return self.chunk_nbytes + (crc.NBYTES if self.checked else 0)


def array_document(array: Array, compression: str = "none") -> dict[str, Any]:
    """The document of an array, whose attributes say what its bits are: ``{"dtype": "bfloat16", ...}``."""
    data_type = dtypes.zarr_name(array.dtype)
    assert data_type is not None, array.dtype
    codecs: list[dict[str, Any]] = []
    if list(array.grid.order) != list(range(len(array.grid.order))):
        codecs.append({"name": "transpose", "configuration": {"order": list(array.grid.order)}})
    single = array.dtype.itemsize == 1
    codecs.append({"name": "bytes"} if single else {"name": "bytes", "configuration": {"endian": "little"}})
    codecs += _compressor(compression, array.dtype.itemsize)
    if array.checked:
        codecs.append({"name": "crc32c"})
    fill: Any = 0
    if data_type == "bool":
        fill = False
    elif data_type.startswith("complex"):
        fill = [0.0, 0.0]
    elif data_type.startswith("float"):
        fill = 0.0
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(array.grid.shape),
        "data_type": data_type,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(array.grid.chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": array.separator}},
        "fill_value": fill,
        "codecs": codecs,
        "attributes": {"dtype": dtypes.name_of(array.dtype), **array.attributes},
        "storage_transformers": [],
    }


def group_document(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}


def _compressor(name: str, itemsize: int) -> list[dict[str, Any]]:
    if name == "zstd":
        return [{"name": "zstd", "configuration": {"level": 1, "checksum": False}}]
    if name == "gzip":
        return [{"name": "gzip", "configuration": {"level": 1}}]
    if name == "blosc":
        # Bytes of equal weight side by side: exponents repeat, mantissas don't.
        shuffle = "shuffle" if itemsize > 1 else "noshuffle"
        setting = {"cname": "zstd", "clevel": 1, "shuffle": shuffle, "typesize": itemsize, "blocksize": 0}
        return [{"name": "blosc", "configuration": setting}]
    assert name == "none", name
    return []


def write_document(folder: Path, document: Mapping[str, Any]) -> None:
    """Write a node's document, with its checksum; its folder is made where it isn't there."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {**document, "attributes": {**document["attributes"], CHECKSUM: _checksum_of(document)}}
    (folder / DOCUMENT).write_text(json.dumps(whole, indent=1, allow_nan=False))


def _checksum_of(document: Mapping[str, Any]) -> str:
    """That of what a document says, however it is laid out."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return f"{crc.extended(0, torch.frombuffer(bytearray(text), dtype=torch.uint8)):08x}"


def read_document(folder: Path) -> dict[str, Any]:
    """A node's document, without its checksum. Raises CheckpointError for what isn't one, or was changed."""
    path = folder / DOCUMENT
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: this is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("zarr_format") != 3:
        raise CheckpointError(f"{path}: this is not a document of Zarr version 3")
    attributes = document.setdefault("attributes", {})
    if not isinstance(attributes, dict):
        raise CheckpointError(f"{path}: attributes: read {type(attributes).__name__}, allowed is an object")
    written = attributes.pop(CHECKSUM, None)
    if written is not None and written != (found := _checksum_of(document)):
        raise CheckpointError(
            f"{path} is damaged, or was edited: the checksum of what it says is {found}, and {written} was written in "
            "it"
        )
    return document


def parse_array(document: Mapping[str, Any], where: Path) -> Array:
    """The array that a document describes, whoever wrote it."""
    try:
        shape = tuple(int(n) for n in document["shape"])
        chunk = tuple(int(n) for n in document["chunk_grid"]["configuration"]["chunk_shape"])
        names = [codec["name"] for codec in document["codecs"]]
        attributes = document["attributes"]
        told = attributes.get("dtype")
        dtype = dtypes.of_name(told) if isinstance(told, str) else dtypes.of_zarr(str(document["data_type"]))
        if dtype is None or dtypes.zarr_name(dtype) != document["data_type"]:
            raise CheckpointError(
                f"{where}: the data type is {document['data_type']!r} and the attribute dtype {told!r}, which is no "
                "pair that torch has"
            )
        order: tuple[int, ...] = tuple(range(len(shape)))
        if names and names[0] == "transpose":
            order = tuple(int(axis) for axis in document["codecs"][0]["configuration"]["order"])
            names.pop(0)
        checked = names[-1:] == ["crc32c"]
        if checked:
            names.pop()
        endian = next(
            (
                codec.get("configuration", {}).get("endian", "little")
                for codec in document["codecs"]
                if codec["name"] == "bytes"
            ),
            "little",
        )
        separator = document["chunk_key_encoding"].get("configuration", {}).get("separator", "/")
        regular = (
            document["chunk_grid"]["name"] == "regular" and len(chunk) == len(shape) and min((1, *chunk)) > 0
        )
        if not regular or sorted(order) != list(range(len(shape))):
            raise ValueError("chunk_grid, codecs")
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{where / DOCUMENT}: this is not an array of Zarr version 3: {error!r}"
        ) from error
    grid = Grid(shape, order, chunk)
    if not grid.contiguous:
        # Read in runs of our own choice: zarr finds out which chunks they are in.
        cut = Grid.cut_to(shape, range(len(shape)), _RUN_NUMEL)
        return Array(dtype, cut, False, attributes, checked=False)
    raw = (
        names == ["bytes"]
        and endian == sys.byteorder
        and document["chunk_key_encoding"]["name"] == "default"
        and separator in ("/", ".")
    )
    return Array(dtype, grid, raw, attributes, separator, checked)


def encode(name: str) -> str:
    """A tensor's name as the name of a folder: what a path or Zarr would read otherwise is percent-encoded."""
    path = quote(name, safe="._-")
    if path.startswith("__") or not path.strip(".") or path in (DOCUMENT, "c"):
        path = "".join(f"%{byte:02X}" for byte in path[:1].encode()) + path[1:]
    return path


def decode(path: str) -> str:
    """The name that :func:`encode` was given."""
    return unquote(path)


def jsonable(value: Any, where: str) -> Any:
    """``value`` with tensors of one element as numbers; raises CheckpointError for what JSON has no form for."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): jsonable(each, f"{where}.{key}") for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(each, f"{where}[{number}]") for number, each in enumerate(value)]
    if isinstance(value, float) and value not in (float("inf"), float("-inf")) and value == value:
        return value
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise CheckpointError(f"{where}: a {type(value).__name__} ({value!r}) can't be written as JSON")
