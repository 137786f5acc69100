"""Files of ``torch.save``: their tensors mapped and not read, and nothing in them executed (``weights_only``)."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tiermem.checkpoint.contents import PARAMETERS, Key
from tiermem.checkpoint.grid import order_of
from tiermem.checkpoint.source import Entry
from tiermem.errors import CheckpointError

NESTED = ("model", "state_dict", "model_state_dict", "module")
INDEX = "pytorch_model.bin.index.json"
SINGLE = "pytorch_model.bin"


class TorchSource:
    """The tensors of a file of ``torch.save``, or of a folder of such files with Hugging Face's index.

    The file has a state dict, or a dict with one under "model", "state_dict", "model_state_dict" or "module".
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors: dict[str, torch.Tensor] = {}
        for file in _files(path):
            self._tensors.update(tensors_of(load(file), file))
        self.entries: Mapping[Key, Entry] = {
            Key(PARAMETERS, name): _entry(name, tensor, path) for name, tensor in self._tensors.items()
        }
        self.tied: Mapping[str, str] = {}
        self.param_groups: list[dict[str, Any]] | None = None
        self.scalars: Mapping[str, Mapping[str, Any]] = {}
        self.attributes: Mapping[str, Any] = {}

    def read(self, key: Key, start: int, out: torch.Tensor) -> None:
        """See ``Source.read``."""
        copy_run(self._tensors[key.name], self.entries[key].order, start, out)

    def close(self) -> None:
        """Let go of the mapped files."""
        self._tensors.clear()


def load(path: Path, known: Sequence[tuple[type, str]] = ()) -> Any:
    """What a file of ``torch.save`` holds, its tensors mapped.

    ``known``: classes that may be in it, by their names there, and what stands in for them. Raises CheckpointError for
    anything else that isn't a tensor or a plain value.
    """
    try:
        with torch.serialization.safe_globals(list(known)):
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
                # The format before torch 1.6 can't be mapped: it is read as a whole.
                return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: has more in it than tensors and plain values, and loading that could run code that the file "
            f"brings along: it is refused ({str(error).splitlines()[0]})"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path}: can't be read as a file of torch.save: {error}") from error


def tensors_of(loaded: Any, path: Path) -> dict[str, torch.Tensor]:
    """The state dict in what a file held."""
    if isinstance(loaded, Mapping):
        for name in NESTED:
            inner = loaded.get(name)
            if isinstance(inner, Mapping) and any(
                isinstance(value, torch.Tensor) for value in inner.values()
            ):
                loaded = inner
                break
        found = {str(name): value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
        if found:
            return found
    keys = f"a dict with {list(loaded)[:8]}" if isinstance(loaded, Mapping) else f"a {type(loaded).__name__}"
    raise CheckpointError(
        f"{path}: holds {keys}; looked for is a state dict, by itself or under one of {', '.join(NESTED)}"
    )


def copy_run(tensor: torch.Tensor, order: tuple[int, ...], start: int, out: torch.Tensor) -> None:
    """Fill ``out`` (bytes) with elements of a tensor from number ``start`` on, as ``order`` counts them."""
    flat = (
        tensor.detach().permute(order).reshape(-1)
    )  # a view: the order is the one in which it lies in memory
    values = out.view(tensor.dtype)
    values.copy_(flat[start : start + values.numel()])


def _entry(name: str, tensor: torch.Tensor, path: Path) -> Entry:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise CheckpointError(
            f"{path}: {name} is a tensor of layout {tensor.layout}, and dense ones can be loaded"
        )
    order = order_of(tensor.shape, tensor.stride()) or tuple(range(tensor.ndim))
    return Entry(tensor.dtype, tuple(tensor.shape), order)


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
    elif (path / INDEX).is_file():
        try:
            names = sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values()))
            if any(Path(name).name != name for name in names):
                raise ValueError(f"names {names}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path / INDEX}: is no index of files: {error!r}") from error
        yield from (path / name for name in names)
    else:
        yield path / SINGLE
