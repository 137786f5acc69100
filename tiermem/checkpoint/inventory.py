"""The inventory of a checkpoint: its arrays, where each one's elements come from, and the documents beside them."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tiermem.checkpoint import dtypes
from tiermem.checkpoint.contents import (
    BUFFERS,
    OPTIMIZER,
    PARAMETERS,
    STATE,
    Contents,
    Key,
    OptimizerContents,
    Place,
    What,
    path_of,
)
from tiermem.checkpoint.document import Array, array_document, group_document, read_document, write_document
from tiermem.checkpoint.grid import Grid, order_of
from tiermem.errors import CheckpointError, SavingError
from tiermem.page import Kind
from tiermem.unit import Group

FORMAT = 1
CHUNK_NBYTES = 16 << 20


class Settings(NamedTuple):
    """How to save: see ``TieredModule.save``."""

    overwrite: bool = False
    compression: str = "none"
    chunk_nbytes: int = CHUNK_NBYTES


class Published(NamedTuple):
    """A checkpoint that was published, and which versions of the parameter pages it has."""

    path: Path
    identity: tuple[int, int]  # device and inode of its folder: another one may be there by now
    versions: Mapping[int, int]  # page number -> version

    def holds(self) -> bool:
        """Is it still there?"""
        try:
            info = os.lstat(self.path)
        except OSError:
            return False
        return (info.st_dev, info.st_ino) == self.identity


class Inventory:
    """What one save writes.

    ``arrays``: all of them; ``places``: (id of a group, kind) -> its fields that are saved, by index; ``plain``: the
    tensors that are in no page; ``linked``: parameters that are what they were in ``base``, whose files will do.
    ``masters``: the parameters, by name, that have master weights on any rank.

    Raises CheckpointError, naming every tensor that can't be saved.
    """

    def __init__(
        self,
        contents: Contents,
        optimizer: OptimizerContents | None,
        attributes: Mapping[str, Any],
        settings: Settings,
        base: Published | None,
        masters: Container[str],
    ) -> None:
        self.settings = settings
        self.partition = contents.partition
        self._masters = masters
        self.groups: dict[int, Group] = contents.groups()
        self.arrays: dict[Key, Array] = {}
        self.places: dict[tuple[int, What], dict[int, Key]] = {}
        names = {*contents.paged, *(key.name for key in contents.plain)}
        of_optimizer = optimizer.plain if optimizer is not None else {}
        self.plain = {
            **contents.plain,
            **{key: each for key, each in of_optimizer.items() if key.name in names},
        }
        self.base = base if base is not None and base.holds() else None
        self._documents: dict[str, Mapping[str, Any]] = {
            "": {"tiermem": {"format": FORMAT}, **attributes, "tied": contents.tied},
            PARAMETERS: {},
            BUFFERS: {},
        }
        if optimizer is not None:
            self._documents[OPTIMIZER] = {"param_groups": optimizer.groups, "state": optimizer.scalars}
        problems = []
        for name, places in contents.paged.items():
            for place in places:
                self._add_place(
                    name,
                    BUFFERS if name in contents.buffers else PARAMETERS,
                    place,
                    optimizer.updates.get(name, 0) if optimizer is not None else 0,
                    optimizer.states.get(name, {}) if optimizer is not None else {},
                )
            if len(places) > 1 and settings.compression != "none":
                problems.append(
                    f"{name} is in tiles, whose edges aren't those of compressed chunks: save without compression="
                )
        problems += [
            problem for key, tensor in self.plain.items() if (problem := self._add_plain(key, tensor))
        ]
        if problems:
            raise CheckpointError(*problems)
        for group in {key.group for key in self.arrays}:
            for depth in range(1, group.count("/") + 2):
                self._documents.setdefault("/".join(group.split("/")[:depth]), {})
        self.linked = set() if self.base is None else set(self._unchanged(self.base))

    def _add_place(
        self, name: str, where: str, place: Place, updates: int, states: Mapping[str, torch.dtype]
    ) -> None:
        dtypes_of: dict[What, torch.dtype] = {Kind.PARAMETER: place.dtype}
        dtypes_of.update(states)
        if name in self._masters:
            dtypes_of[Kind.MASTER] = torch.float32
        if updates:
            dtypes_of |= dict.fromkeys((Kind.EXP_AVG, Kind.EXP_AVG_SQ), torch.float32)
        for kind, dtype in dtypes_of.items():
            state = kind if isinstance(kind, str) else STATE.get(kind)
            key = Key(where if state is None else f"{OPTIMIZER}/{state}", name)
            self.places.setdefault((id(place.group), kind), {})[place.number] = key
            order = order_of(place.field.shape, place.field.stride)
            assert order is not None, "adoption refuses parameters with gaps"
            self.arrays[key] = self._array(dtype, place.field.shape, order)

    def _add_plain(self, key: Key, tensor: torch.Tensor) -> str | None:
        if (
            tensor.layout is not torch.strided
            or tensor.is_quantized
            or dtypes.zarr_name(tensor.dtype) is None
        ):
            return (
                f"{key.group}/{key.name}: a tensor of layout {tensor.layout} and dtype {tensor.dtype} can't be saved "
                "as an array of Zarr: save it yourself, and take it out of the module meanwhile"
            )
        order = order_of(tensor.shape, tensor.stride()) or tuple(range(tensor.ndim))
        self.arrays[key] = self._array(tensor.dtype, tuple(tensor.shape), order)
        return None

    def _array(self, dtype: torch.dtype, size: tuple[int, ...], order: tuple[int, ...]) -> Array:
        most = max(1, self.settings.chunk_nbytes // dtype.itemsize)
        return Array(dtype, Grid.cut_to(size, order, most), self.settings.compression == "none")

    def _unchanged(self, base: Published) -> list[Key]:
        found = []
        for key, group in self.groups.items():
            page = group.parameter
            if base.versions.get(page.number) != page.version or group.fields[0].whole is not None:
                continue  # an array that several groups write to is none to share
            for each in self.places[key, Kind.PARAMETER].values():
                ours = array_document(self.arrays[each], self.settings.compression)
                try:
                    theirs = read_document(base.path / path_of(each))
                except CheckpointError:
                    continue
                if theirs == ours:
                    found.append(each)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, before compression."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def nbytes_linked(self) -> int:
        """Bytes of those that are not written again."""
        return sum(self.arrays[key].nbytes for key in self.linked)

    def write_documents(self, folder: Path) -> None:
        """Write the documents of all groups and arrays. Raises SavingError."""
        try:
            for group, attributes in self._documents.items():
                write_document(folder / group, group_document(attributes))
            for key, array in self.arrays.items():
                write_document(folder / path_of(key), array_document(array, self.settings.compression))
        except OSError as error:
            raise SavingError(error.errno or 0, error.strerror or str(error), error.filename) from error

    def link(self, key: Key, folder: Path) -> bool:
        """Give the files of an unchanged array a second name in ``folder``; False where that can't be had."""
        assert self.base is not None
        array = self.arrays[key]
        source, target = self.base.path / path_of(key), folder / path_of(key)
        for number in range(array.grid.num_chunks):
            name = array.name_of(array.grid[number])
            try:
                os.link(source / name, target / name, follow_symlinks=False)
            except OSError:
                return False
        return True
