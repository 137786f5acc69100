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
from typing import Any

import torch

from tiermem.checkpoint import dtypes
from tiermem.checkpoint.contents import PARAMETERS, Key
from tiermem.checkpoint.source import Entry
from tiermem.errors import CheckpointError

METADATA = ".metadata"
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
    """The model's tensors of a DCP folder: see ``Source``. Those of an optimizer in it are left alone.

    Names lose the "model." that they begin with where a dict of model and optimizer was saved. In memory is one saved
    piece, as large as a rank's share of a tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        metadata = _read_metadata(path / METADATA)
        try:
            names = {
                name: each for name, each in metadata.state_dict_metadata.items() if hasattr(each, "chunks")
            }
            head = "model." if any(name.startswith("model.") for name in names) else ""
            chosen = {
                name.removeprefix(head): name
                for name in names
                if name.startswith(head) and not name.startswith(("optim.", "optimizer."))
            }
            self._places: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], Any]]] = {}
            entries: dict[Key, Entry] = {}
            infos = {
                (index.fqn, tuple(index.offset)): info
                for index, info in metadata.storage_data.items()
                if index.offset is not None
            }
            for name, stored in chosen.items():
                tensor = names[stored]
                size = tuple(tensor.size)
                entries[Key(PARAMETERS, name)] = Entry.of(tensor.properties.dtype, size)
                self._places[name] = [
                    (tuple(chunk.offsets), tuple(chunk.sizes), infos[stored, tuple(chunk.offsets)])
                    for chunk in tensor.chunks
                ]
        except (AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path / METADATA}: is not what DCP writes: {error!r}") from error
        self.entries: Mapping[Key, Entry] = entries
        self.tied: Mapping[str, str] = {}
        self.param_groups: list[dict[str, Any]] | None = None
        self.scalars: Mapping[str, Mapping[str, Any]] = {}
        self.attributes: Mapping[str, Any] = {}
        self._piece: tuple[str, tuple[int, ...], torch.Tensor] | None = None

    def read(self, key: Key, start: int, out: torch.Tensor) -> None:
        """See ``Source.read``."""
        entry = self.entries[key]
        values = out.view(entry.dtype)
        stop, filled = start + values.numel(), 0
        for offsets, sizes, info in self._places[key.name]:
            # Rows of the piece that lie side by side in the whole tensor: all of it, where it is cut by its first axis.
            run, outer = _rows(entry.size, sizes)
            first = _number(entry.size, offsets)
            if (
                first >= stop
                or _number(entry.size, [o + s - 1 for o, s in zip(offsets, sizes, strict=True)]) < start
            ):
                continue
            flat = self._load(key.name, offsets, sizes, info, entry.dtype).reshape(-1)
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

    def _load(
        self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], info: Any, dtype: torch.dtype
    ) -> torch.Tensor:
        if self._piece is not None and self._piece[:2] == (name, offsets):
            return self._piece[2]
        self._piece = None
        file = PurePosixPath(str(info.relative_path))
        if file.is_absolute() or ".." in file.parts:
            raise CheckpointError(
                f"{self.path / METADATA}: names {str(file)!r}, which is no file in the folder"
            )
        try:
            with open(self.path / file, "rb") as opened:
                opened.seek(int(info.offset))
                data = io.BytesIO(opened.read(int(info.length)))
            tensor = torch.load(data, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, TypeError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{self.path / file}: {name} can't be read: {error}") from error
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != sizes or tensor.dtype is not dtype:
            raise CheckpointError(f"{self.path / file}: {name} isn't what the metadata says")
        self._piece = (name, offsets, tensor.detach())
        return self._piece[2]

    def close(self) -> None:
        """See ``Source.close``."""
        self._piece = None


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
