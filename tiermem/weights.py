"""Weights on disk: the tensors of safetensors files, read region by region straight into memory that is there already.

The format is Hugging Face's (a length, a JSON header, the tensors' bytes), and so is a folder's layout: one
``model.safetensors``, or several files and an index that says which tensor is in which. Nothing is mapped and nothing
is kept: what a reader holds is the headers, and while a dtype is converted 8 MiB.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tiermem.errors import TiermemError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000
"""Bytes, as the reference implementation has it."""
STAGE = 8 << 20
"""Bytes that are converted at a time, where the dtype on disk isn't the one that is wanted."""

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "C64": torch.complex64,
}  # fmt: skip
"""What the header calls a dtype."""


class WeightsError(TiermemError, ValueError):
    """Weights that can't be had: no such file or tensor, a file that is not what it should be, shapes that differ."""


class Stored(NamedTuple):
    """One tensor in a file: row by row, from byte ``offset`` of file number ``file``."""

    file: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes they take in the file."""
        return self.numel * self.dtype.itemsize


class Weights(Mapping[str, Stored]):
    """The tensors of one safetensors file, or of a Hugging Face folder, by name. Open until :meth:`close`.

    Raises WeightsError where there are none, or a file is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser()
        self._files: list[tuple[Path, int]] = []
        self._tensors: dict[str, Stored] = {}
        with ExitStack() as stack:
            stack.callback(self.close)
            for file, names in _files(self.path):
                self._add(file, names)
            stack.pop_all()

    def _add(self, path: Path, names: set[str] | None) -> None:
        """Take over the tensors of a file; ``names``: those that the index expects in it."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise WeightsError(f"{path}: can't be read: {error.strerror}") from error
        self._files.append((path, fd))
        found = _header(path, fd, len(self._files) - 1)
        if names is not None and (missing := sorted(names - found.keys())):
            raise WeightsError(
                f"{path}: has no tensor {missing[0]!r} ({len(missing)} that the index names are missing)"
            )
        self._tensors |= found if names is None else {name: found[name] for name in names}

    def __getitem__(self, name: str) -> Stored:
        try:
            return self._tensors[name]
        except KeyError:
            raise WeightsError(f"{self.path}: there is no tensor {name!r} among its {len(self)}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return sum(stored.nbytes for stored in self._tensors.values())

    def read(self, name: str, target: torch.Tensor, start: int = 0) -> None:
        """Fill ``target`` with the tensor's elements from number ``start`` on, counted row by row.

        ``target``: contiguous, on the CPU, of any shape and dtype, with at most as many elements as there are from
        there; so a rank that wants a slice of a tensor reads that slice. Raises WeightsError, also where the file has
        become shorter.
        """
        stored = self[name]
        if not target.is_contiguous() or target.device.type != "cpu":
            raise WeightsError(
                f"{name}: can only be read into contiguous memory of the CPU, not of {target.device}"
            )
        if start < 0 or start + target.numel() > stored.numel:
            raise WeightsError(
                f"{name}: elements {start} to {start + target.numel()} were asked for; {list(stored.shape)} has "
                f"{stored.numel}"
            )
        flat = target.detach().view(-1)
        offset = stored.offset + start * stored.dtype.itemsize
        if flat.dtype is stored.dtype:
            self._fill(stored.file, offset, flat)
            return
        step = max(1, STAGE // stored.dtype.itemsize)
        stage = torch.empty(min(step, flat.numel()), dtype=stored.dtype)
        for low in range(0, flat.numel(), step):
            piece = stage[: min(step, flat.numel() - low)]
            self._fill(stored.file, offset + low * stored.dtype.itemsize, piece)
            flat[low : low + piece.numel()].copy_(piece)

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor in memory of its own, as it is stored."""
        stored = self[name]
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        self.read(name, tensor)
        return tensor

    def _fill(self, file: int, offset: int, flat: torch.Tensor) -> None:
        path, fd = self._files[file]
        memory = memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")
        done = 0
        while done < len(memory):
            try:
                got = os.preadv(fd, [memory[done : done + (1 << 30)]], offset + done)
            except OSError as error:
                raise WeightsError(
                    f"{path}: can't be read at byte {offset + done}: {error.strerror}"
                ) from error
            if not got:
                raise WeightsError(f"{path}: ends at byte {offset + done}, in the middle of a tensor")
            done += got

    def close(self) -> None:
        """Close the files; idempotent."""
        files, self._files = self._files, []
        for _, fd in files:
            os.close(fd)

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _files(path: Path) -> list[tuple[Path, set[str] | None]]:
    """The files that ``path`` stands for, each with the names that are looked for in it (None: all)."""
    if not path.is_dir():
        return [(path, None)]
    index = path / INDEX
    if not index.exists():
        single = path / SINGLE
        files = [single] if single.exists() else sorted(path.glob("*.safetensors"))
        if not files:
            raise WeightsError(
                f"{path}: {'holds no *.safetensors file' if path.exists() else os.strerror(errno.ENOENT)}"
            )
        return [(file, None) for file in files]
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        by_file: dict[str, set[str]] = {}
        for name, file in names.items():
            by_file.setdefault(file, set()).add(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index}: is no index of safetensors files: {error!r}") from error
    for file in by_file:
        if not isinstance(file, str) or Path(file).name != file:
            raise WeightsError(f"{index}: names {file!r}, which is no file beside it")
    return [(path / file, wanted) for file, wanted in by_file.items()]


def _header(path: Path, fd: int, number: int) -> dict[str, Stored]:
    """The tensors that a file says it has."""
    size = os.fstat(fd).st_size
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if size < 8 or length > min(MAX_HEADER, size - 8):
        raise WeightsError(
            f"{path}: is no safetensors file: {size} bytes, of which the header would take {length}"
        )
    try:
        entries: dict[str, Any] = json.loads(os.pread(fd, length, 8).decode("utf-8"))
        entries.pop("__metadata__", None)
        return {name: _stored(number, 8 + length, size, entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path}: its header is damaged: {error}") from error


def _stored(file: int, base: int, size: int, entry: Mapping[str, Any]) -> Stored:
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"a tensor's dtype is {entry['dtype']!r}; known are {', '.join(DTYPES)}")
    start, stop = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(each) is int and each >= 0 for each in (*shape, start, stop)):
        raise ValueError(f"shape {list(shape)} at bytes {start} to {stop}")
    stored = Stored(file, base + start, dtype, shape)
    if stop - start != stored.nbytes or base + stop > size:
        raise ValueError(
            f"{entry['dtype']} {list(shape)} takes {stored.nbytes} bytes; it is said to lie in bytes {start} to {stop} "
            f"of {size - base}"
        )
    return stored
