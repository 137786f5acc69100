"""Sources: what tensors can be loaded from, whatever the format of the files."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from tiermem.checkpoint import crc
from tiermem.checkpoint.contents import BUFFERS, OPTIMIZER, PARAMETERS, Key, path_of
from tiermem.checkpoint.crc import Span
from tiermem.checkpoint.document import DOCUMENT, Array, decode, parse_array, read_document
from tiermem.checkpoint.grid import alike, strides_in
from tiermem.checkpoint.reader import ArrayReader
from tiermem.errors import CheckpointError

RUN_NBYTES = 4 << 20


class Entry(NamedTuple):
    """One tensor of a source: its dtype and size, and its axes as its elements are counted, slowest first."""

    dtype: torch.dtype
    size: tuple[int, ...]
    order: tuple[int, ...]

    @staticmethod
    def of(dtype: torch.dtype, size: tuple[int, ...]) -> Entry:
        """The entry of a tensor whose last axis is the fastest."""
        return Entry(dtype, size, tuple(range(len(size))))

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.size)


class Source(Protocol):
    """Tensors that are read in runs of elements, none of them as a whole unless the format leaves no choice.

    ``path``: for messages. ``entries``: what there is; formats that don't tell buffers from parameters have all in
    "parameters". ``tied``: other names of tensors. ``param_groups`` and ``scalars``: of the optimizer, see
    ``OptimizerContents``; None where there is none. Where its parameters have numbers and no names, these are in both
    (see :func:`named`). ``attributes``: what else the checkpoint says of itself.
    """

    path: Path
    entries: Mapping[Key, Entry]
    tied: Mapping[str, str]
    param_groups: list[dict[str, Any]] | None
    scalars: Mapping[str, Mapping[str, Any]]
    attributes: Mapping[str, Any]

    def read(self, key: Key, start: int, out: torch.Tensor) -> None:
        """Fill ``out`` (uint8, one dimension) with the elements of a tensor from number ``start`` on.

        Raises CheckpointError when that can't be done.
        """

    def close(self) -> None:
        """Close what is open. Idempotent."""


class ZarrSource:
    """A checkpoint of tiermem's: see :class:`Source`.

    What has been read of chunks is compared with their checksums as soon as all of one has been. Who reads parts of
    chunks only has to end with :meth:`prove`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        root = read_document(path)["attributes"]
        if not isinstance(root.get("tiermem"), dict):
            raise CheckpointError(f"{path} is a group of Zarr's, and no checkpoint of tiermem's")
        if root["tiermem"].get("format") != 1:
            raise CheckpointError(
                f"{path} has format {root['tiermem'].get('format')!r}; this tiermem reads format 1: use a newer one"
            )
        self.attributes: Mapping[str, Any] = root
        self.tied: Mapping[str, str] = root.get("tied", {})
        self.arrays: dict[Key, Array] = {}
        self.param_groups: list[dict[str, Any]] | None = None
        self.scalars: Mapping[str, Mapping[str, Any]] = {}
        for group in (PARAMETERS, BUFFERS):
            self._look(group)
        if (path / OPTIMIZER / DOCUMENT).is_file():
            attributes = read_document(path / OPTIMIZER)["attributes"]
            self.param_groups, self.scalars = attributes.get("param_groups"), attributes.get("state", {})
            for each in sorted((path / OPTIMIZER).iterdir()):
                if each.is_dir():
                    self._look(f"{OPTIMIZER}/{each.name}")
        self.entries: Mapping[Key, Entry] = {
            key: Entry(array.dtype, array.grid.shape, array.grid.order) for key, array in self.arrays.items()
        }
        self._open: tuple[Key, ArrayReader] | None = None
        self._spans: list[Span] = []  # parts of chunks, not compared yet

    def _look(self, group: str) -> None:
        folder = self.path / group
        for each in sorted(folder.iterdir()) if folder.is_dir() else ():
            if each.is_dir():
                self.arrays[Key(group, decode(each.name))] = parse_array(read_document(each), each)

    def folder_of(self, key: Key) -> Path:
        """Where an array is."""
        return self.path / path_of(key)

    def read(self, key: Key, start: int, out: torch.Tensor) -> None:
        """See :meth:`Source.read`."""
        if self._open is None or self._open[0] != key:
            self.close()
            self._open = (key, self.reader(key))
        self._open[1].read(start, out)

    def reader(self, key: Key) -> ArrayReader:
        """Of one array; closed by the caller."""
        return ArrayReader(self.folder_of(key), self.arrays[key], path_of(key))

    def unproven(self) -> list[Span]:
        """The parts of chunks that have been read since this was asked last, for :meth:`prove` of all who read some."""
        self.close()
        spans, self._spans = self._spans, []
        return spans

    def prove(self, said: Sequence[Iterable[Iterable[object]]], rank: int = 0) -> None:
        """Compare what several have read of chunks, each rank :meth:`unproven`, with the chunks' checksums.

        A chunk is looked at by the first rank that has read of it. Raises CheckpointError when one isn't what was
        written.
        """
        keys = {path_of(key): key for key in self.arrays}
        first: dict[tuple[str, int], int] = {}
        for number, one in enumerate(said):
            for place in crc.by_chunk([one]):
                first.setdefault(place, number)
        for (name, chunk), spans in crc.by_chunk(said).items():
            if first[name, chunk] == rank:
                with contextlib.closing(self.reader(keys[name])) as reader:
                    reader.prove(chunk, spans)

    def close(self) -> None:
        """See :meth:`Source.close`."""
        opened, self._open = self._open, None
        if opened is not None:
            opened[1].close()
            self._spans += opened[1].spans


def prove(source: Source) -> None:
    """All that was wanted of a source has been read: what can be compared with checksums, and wasn't yet, is.

    Raises CheckpointError.
    """
    if isinstance(source, ZarrSource):
        source.prove([source.unproven()])


def read_into(
    source: Source, key: Key, start: int, out: torch.Tensor, size: tuple[int, ...], order: tuple[int, ...]
) -> None:
    """Fill ``out``, one dimension of any dtype, with elements of a tensor as ``order`` counts them, from ``start`` on.

    Where the source has them in that order, they are read in runs, and otherwise as a whole tensor.
    """
    entry = source.entries[key]
    if not alike(size, order, entry.order):
        whole = torch.empty(entry.numel, dtype=entry.dtype)
        source.read(key, 0, whole.view(torch.uint8))
        placed = whole.as_strided(size, strides_in(size, entry.order)).permute(order).reshape(-1)
        out.copy_(placed[start : start + out.numel()])
    elif entry.dtype == out.dtype and out.device.type == "cpu":
        source.read(key, start, out.view(torch.uint8))
    else:
        step = max(1, RUN_NBYTES // entry.dtype.itemsize)
        run = torch.empty(min(step, out.numel()), dtype=entry.dtype)
        for first in range(0, out.numel(), step):
            piece = run[: min(step, out.numel() - first)]
            source.read(key, start + first, piece.view(torch.uint8))
            out[first : first + piece.numel()].copy_(piece)


class _Named:
    """A source whose optimizer's parameters have numbers, by their names."""

    def __init__(self, source: Source, names: Mapping[Any, str]) -> None:
        self.path = source.path
        self.tied = source.tied
        self.attributes = source.attributes
        self.param_groups: list[dict[str, Any]] | None = [
            {**group, "parameters": [names[number] for number in group["parameters"]]}
            for group in source.param_groups or ()
        ]
        by_text = {str(number): name for number, name in names.items()}
        self.scalars: Mapping[str, Mapping[str, Any]] = {
            by_text[number]: each for number, each in source.scalars.items() if number in by_text
        }
        self._keys = {
            key._replace(name=by_text.get(key.name, key.name))
            if key.group.startswith(OPTIMIZER)
            else key: key
            for key in source.entries
        }
        self.entries: Mapping[Key, Entry] = {
            key: source.entries[theirs] for key, theirs in self._keys.items()
        }
        self._source = source

    def read(self, key: Key, start: int, out: torch.Tensor) -> None:
        """See :meth:`Source.read`."""
        self._source.read(self._keys[key], start, out)

    def close(self) -> None:
        """See :meth:`Source.close`."""
        self._source.close()


def named(source: Source, names: list[list[str]]) -> Source:
    """The source, with ``names`` of the parameters of each group where it only numbers them, as torch's optimizers do.

    Raises CheckpointError when the groups aren't as long, so that it isn't known which number is whose.
    """
    groups = [list(group.get("parameters", ())) for group in source.param_groups or ()]
    if all(isinstance(each, str) for group in groups for each in group):
        return source
    if [len(group) for group in groups] != [len(each) for each in names]:
        raise CheckpointError(
            f"optimizer: the checkpoint has numbers for its parameters, in groups of {[len(each) for each in groups]}, "
            f"and the optimizer has groups of {[len(each) for each in names]}: make it with the same groups, in the "
            "same order"
        )
    return _Named(
        source,
        {
            number: name
            for group, each in zip(groups, names, strict=True)
            for number, name in zip(group, each, strict=True)
        },
    )
