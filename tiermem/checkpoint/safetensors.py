"""safetensors files: read as a source, and written as Hugging Face has them, run by run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tiermem.checkpoint import dtypes
from tiermem.checkpoint.contents import PARAMETERS, Key
from tiermem.checkpoint.folder import published
from tiermem.checkpoint.source import RUN_NBYTES, Entry, Source, prove, read_into
from tiermem.errors import CheckpointError, SavingError, format_bytes
from tiermem.weights import INDEX, SINGLE, Weights, WeightsError

SHARD_NBYTES = 5 * 10**9
"""Bytes of one file, as Hugging Face cuts them."""


class SafetensorsSource:
    """The tensors of a safetensors file, or of a Hugging Face folder: see ``Source``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._weights = Weights(path)
        except WeightsError as error:
            raise CheckpointError(str(error)) from error
        self.entries: Mapping[Key, Entry] = {
            Key(PARAMETERS, name): Entry.of(stored.dtype, stored.shape)
            for name, stored in self._weights.items()
        }
        self.tied: Mapping[str, str] = {}
        self.param_groups: list[dict[str, Any]] | None = None
        self.scalars: Mapping[str, Mapping[str, Any]] = {}
        self.attributes: Mapping[str, Any] = {}

    def read(self, key: Key, start: int, out: torch.Tensor) -> None:
        """See ``Source.read``."""
        try:
            self._weights.read(key.name, out.view(self.entries[key].dtype), start)
        except WeightsError as error:
            raise CheckpointError(str(error)) from error

    def close(self) -> None:
        """See ``Source.close``."""
        self._weights.close()


class Tensor(NamedTuple):
    """One tensor of an export: its name there, where it comes from, and its dtype there."""

    name: str
    key: Key
    dtype: torch.dtype

    def nbytes(self, source: Source) -> int:
        """Bytes in the file."""
        return source.entries[self.key].numel * self.dtype.itemsize


def export(
    source: Source,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_nbytes: int = SHARD_NBYTES,
    only: Callable[[str], bool] | None = None,
    rename: Callable[[str], str] | None = None,
    stem: str = SINGLE.removesuffix(".safetensors"),
    masters: bool = False,
) -> list[Path]:
    """Write the parameters and buffers of ``source`` into ``folder``, which is there whole afterwards, or not at all.

    One ``model.safetensors``, or several of at most ``shard_nbytes`` each (a larger tensor has one for itself) with an
    index, as ``transformers`` reads them. Tied tensors are there once. ``dtype`` converts floating-point tensors;
    ``masters`` takes master weights where there are some. ``only`` and ``rename`` are called with each name. In memory
    is one run of 4 MiB, or one tensor where its axes lie in another order.

    Raises CheckpointError for a tensor that the format can't have, SavingError when the disk refuses.
    """
    tensors = list(_chosen(source, dtype, only, rename, masters))
    if not tensors:
        raise CheckpointError(f"{source.path}: no tensor is left to export")
    problems = [
        f"{each.name}: safetensors has no {dtypes.name_of(each.dtype)}"
        for each in tensors
        if dtypes.safetensors_code(each.dtype) is None
    ]
    names = [each.name for each in tensors]
    problems += [
        f"{name}: two tensors would have this name" for name in sorted(set(names)) if names.count(name) > 1
    ]
    if problems:
        raise CheckpointError(*problems)
    shards = _shards(source, tensors, shard_nbytes)
    files = [
        f"{stem}.safetensors" if len(shards) == 1 else f"{stem}-{number:05}-of-{len(shards):05}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    with published(folder, overwrite=False) as partial:
        try:
            for file, shard in zip(files, shards, strict=True):
                _write(source, partial / file, shard)
            prove(source)
            if len(shards) > 1:
                index = {
                    "metadata": {"total_size": sum(each.nbytes(source) for each in tensors)},
                    "weight_map": {
                        each.name: file for file, shard in zip(files, shards, strict=True) for each in shard
                    },
                }
                (partial / INDEX.replace("model", stem, 1)).write_text(
                    json.dumps(index, indent=2, sort_keys=True)
                )
        except OSError as error:
            raise SavingError(error.errno or 0, error.strerror or str(error), error.filename) from error
    return [folder / file for file in files]


def _chosen(
    source: Source,
    dtype: torch.dtype | None,
    only: Callable[[str], bool] | None,
    rename: Callable[[str], str] | None,
    masters: bool,
) -> Iterator[Tensor]:
    for key, entry in source.entries.items():
        if key.group.startswith("optimizer") or (only is not None and not only(key.name)):
            continue
        master = Key("optimizer/master", key.name)
        if masters and master in source.entries:
            key, entry = master, source.entries[master]
        own = dtype if dtype is not None and entry.dtype.is_floating_point else entry.dtype
        yield Tensor(rename(key.name) if rename is not None else key.name, key, own)


def _shards(source: Source, tensors: list[Tensor], most: int) -> list[list[Tensor]]:
    shards: list[list[Tensor]] = [[]]
    nbytes = 0
    for each in tensors:
        size = each.nbytes(source)
        if shards[-1] and nbytes + size > most:
            shards.append([])
            nbytes = 0
        shards[-1].append(each)
        nbytes += size
    return shards


def _write(source: Source, path: Path, tensors: list[Tensor]) -> None:
    """One file: the length of the header, the header, and the tensors' bytes one after another."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for each in tensors:
        nbytes = each.nbytes(source)
        shape, code = list(source.entries[each.key].size), dtypes.safetensors_code(each.dtype)
        header[each.name] = {"dtype": code, "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    with open(path, "xb") as file:
        free = os.statvfs(path.parent)
        if offset > free.f_bavail * free.f_frsize:
            raise CheckpointError(
                f"{path.name} takes {format_bytes(offset)}, and {format_bytes(free.f_bavail * free.f_frsize)} are free"
            )
        file.write(len(text).to_bytes(8, "little") + text)
        for each in tensors:
            for run in runs(source, each.key, each.dtype):
                file.write(run.view(torch.uint8).numpy().data)


def runs(source: Source, key: Key, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The elements of a tensor row by row, in runs of at most 4 MiB (of one dimension), in ``dtype``."""
    entry = source.entries[key]
    order = tuple(range(len(entry.size)))
    step = max(1, RUN_NBYTES // max(dtype.itemsize, entry.dtype.itemsize))
    memory = torch.empty(min(step, entry.numel), dtype=dtype)
    natural = entry.order == order
    whole = None if natural else torch.empty(entry.numel, dtype=dtype)
    if whole is not None:
        read_into(source, key, 0, whole, entry.size, order)
    for start in range(0, entry.numel, step):
        size = min(step, entry.numel - start)
        if whole is not None:
            yield whole[start : start + size]
        else:
            read_into(source, key, start, memory[:size], entry.size, order)
            yield memory[:size]
