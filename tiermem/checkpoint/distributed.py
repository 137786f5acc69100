"""Folders of ``torch.distributed.checkpoint`` (DCP), as FSDP writes them: read as a source.

The folder's ``.metadata`` is a pickle. It is read by an unpickler that knows the classes of such a file and no others,
so nothing in it can run code; the tensors beside it are read with ``weights_only``.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch

from tiermem.checkpoint import dtypes
from tiermem.checkpoint.contents import OPTIMIZER, PARAMETERS, Key
from tiermem.checkpoint.pickles import OptimizerState
from tiermem.checkpoint.source import Entry
from tiermem.errors import CheckpointError

METADATA = ".metadata"
OPTIMIZERS = ("optim.", "optimizer.")
_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", *(dtypes.name_of(each) for each in vars(torch).values() if isinstance(each, torch.dtype))),
    "collections": ("OrderedDict",),
}  # fmt: skip


class Piece(NamedTuple):
    """One saved piece of a tensor: where it begins in it, its size, and where it is stored."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    info: Any


class _Unpickler(pickle.Unpickler):
    """Makes the objects of a DCP folder's metadata, and refuses every other."""

    def find_class(self, module: str, name: str) -> Any:
        """The class of this name, if it is one of those that are expected here."""
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "PurePosixPath"):
            return PurePosixPath
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in it")
        return super().find_class(module, name)


class DistributedSource:
    """The tensors of a DCP folder: see ``Source``. Those of an optimizer are there where its groups can be told.

    Names lose the "model." that they begin with where a dict of model and optimizer was saved; the optimizer's is
    looked for under "optim" and "optimizer". In memory is one saved piece, as large as a rank's share of a tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        metadata = _read_metadata(path / METADATA)
        self.entries: Mapping[Key, Entry] = {}
        self.tied: Mapping[str, str] = {}
        self.param_groups: list[dict[str, Any]] | None = None
        self.scalars: Mapping[str, Mapping[str, Any]] = {}
        self.attributes: Mapping[str, Any] = {}
        self._pieces: dict[Key, list[Piece]] = {}
        self._piece: tuple[Key, tuple[int, ...], torch.Tensor] | None = None
        try:
            saved = metadata.state_dict_metadata
            self._infos = {
                (index.fqn, None if index.offset is None else tuple(index.offset)): info
                for index, info in metadata.storage_data.items()
            }
            tensors = {name: each for name, each in saved.items() if hasattr(each, "chunks")}
            head = "model." if any(name.startswith("model.") for name in tensors) else ""
            entries = {}
            for stored, tensor in tensors.items():
                if stored.startswith(head) and not stored.startswith(OPTIMIZERS):
                    key = Key(PARAMETERS, stored.removeprefix(head))
                    entries[key] = self._add(key, stored, tensor)
            entries |= self._optimizer(saved, metadata.planner_data or {})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path / METADATA}: is not what DCP writes: {error!r}") from error
        self.entries = entries

    def _add(self, key: Key, stored: str, tensor: Any) -> Entry:
        self._pieces[key] = [
            Piece(tuple(chunk.offsets), tuple(chunk.sizes), self._infos[stored, tuple(chunk.offsets)])
            for chunk in tensor.chunks
        ]
        return Entry.of(tensor.properties.dtype, tuple(tensor.size))

    def _optimizer(self, saved: Mapping[str, Any], paths: Mapping[str, Any]) -> dict[Key, Entry]:
        """The optimizer's tensors; its groups, and its numbers, are read at once.

        Each leaf is named by its path: "optim.state.<parameter>.exp_avg", "optim.param_groups.0.lr", or, where torch
        was told to flatten the optimizer's dict, "optim.param_groups.<parameter>.lr".
        """
        entries: dict[Key, Entry] = {}
        groups: dict[str, dict[str, Any]] = {}
        scalars: dict[str, dict[str, Any]] = {}
        flat = False
        for stored, each in saved.items():
            head = next((head for head in OPTIMIZERS if stored.startswith(head)), None)
            if head is None:
                continue
            what, _, rest = stored.removeprefix(head).partition(".")
            name, _, leaf = rest.rpartition(".")
            if what == "state" and hasattr(each, "chunks") and len(each.size):
                key = Key(f"{OPTIMIZER}/{leaf}", name)
                entries[key] = self._add(key, stored, each)
            elif what == "state":
                scalars.setdefault(name, {})[leaf] = self._leaf(stored)
            elif what == "param_groups":
                flat = flat or len(paths.get(stored, ())) == 2
                groups.setdefault(name, {})[leaf] = self._leaf(stored)
        if groups and flat:
            self.param_groups = _grouped(groups)
        elif groups:
            in_order = [groups[number] for number in sorted(groups, key=int)]
            self.param_groups = OptimizerState({}, in_order).groups
        self.scalars = scalars if groups else {}
        return entries if groups else {}

    def _leaf(self, stored: str) -> Any:
        """A value that isn't a tensor, or is one number."""
        info = next(info for (name, _), info in self._infos.items() if name == stored)
        value = self._read(info, stored)
        return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value

    def read(self, key: Key, start: int, out: torch.Tensor) -> None:
        """See ``Source.read``."""
        entry = self.entries[key]
        values = out.view(entry.dtype)
        stop, filled = start + values.numel(), 0
        for piece in self._pieces[key]:
            offsets, sizes, _ = piece
            # Rows of the piece that lie side by side in the whole tensor: all of it, where it is cut by its first axis.
            run, outer = _rows(entry.size, sizes)
            first = _number(entry.size, offsets)
            if (
                first >= stop
                or _number(entry.size, [o + s - 1 for o, s in zip(offsets, sizes, strict=True)]) < start
            ):
                continue
            flat = self._load(key, piece, entry.dtype).reshape(-1)
            for row, place in enumerate(itertools.product(*map(range, sizes[:outer]))):
                at = _number(entry.size, [*(o + p for o, p in zip(offsets, place)), *offsets[outer:]])  # noqa: B905
                low, high = max(start, at), min(stop, at + run)
                if low < high:
                    values[low - start : high - start] = flat[row * run + low - at : row * run + high - at]
                    filled += high - low
        if filled != values.numel():
            raise CheckpointError(
                f"{self.path}: of elements {start} to {stop} of {key.name}, {filled} are in the files: some are missing"
            )

    def _load(self, key: Key, piece: Piece, dtype: torch.dtype) -> torch.Tensor:
        if self._piece is not None and self._piece[:2] == (key, piece.offsets):
            return self._piece[2]
        self._piece = None
        tensor = self._read(piece.info, key.name)
        if (
            not isinstance(tensor, torch.Tensor)
            or tuple(tensor.shape) != piece.sizes
            or tensor.dtype is not dtype
        ):
            raise CheckpointError(
                f"{self.path / str(piece.info.relative_path)}: {key.name} isn't what the metadata says"
            )
        self._piece = (key, piece.offsets, tensor.detach())
        return self._piece[2]

    def _read(self, info: Any, name: str) -> Any:
        file = PurePosixPath(str(info.relative_path))
        if file.is_absolute() or ".." in file.parts:
            raise CheckpointError(
                f"{self.path / METADATA}: names {str(file)!r}, which is no file in the folder"
            )
        try:
            with open(self.path / file, "rb") as opened:
                opened.seek(int(info.offset))
                data = io.BytesIO(opened.read(int(info.length)))
            return torch.load(data, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, TypeError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{self.path / file}: {name} can't be read: {error}") from error

    def close(self) -> None:
        """See ``Source.close``."""
        self._piece = None


def _grouped(settings: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups of parameters' own settings: those with the same ones, next to each other, are one group."""
    groups: list[dict[str, Any]] = []
    for name, each in settings.items():
        if groups and {key: value for key, value in groups[-1].items() if key != "parameters"} == each:
            groups[-1]["parameters"].append(name)
        else:
            groups.append({**each, "parameters": [name]})
    return groups


def _read_metadata(path: Path) -> Any:
    import torch.distributed.checkpoint  # noqa: F401  # the classes that the unpickler looks up

    try:
        with open(path, "rb") as file:
            return _Unpickler(file).load()
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}") from error
    except Exception as error:  # whatever bytes that are no pickle make of an unpickler
        raise CheckpointError(f"{path}: is refused: {error}") from error


def _number(size: tuple[int, ...], place: Any) -> int:
    """The number of the element at ``place``, counted row by row."""
    number = 0
    for n, p in zip(size, place, strict=True):
        number = number * n + p
    return number


def _rows(size: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, int]:
    """How many elements of a piece lie side by side in the tensor, and how many axes count such runs."""
    outer = len(size)
    while outer and sizes[outer:] == size[outer:]:
        outer -= 1
    # The axis at `outer` may be cut: what is behind it is whole.
    return math.prod(sizes[outer:]), outer
