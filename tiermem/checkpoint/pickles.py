"""Files of ``torch.save``: their tensors mapped and not read, and nothing in them executed (``weights_only``)."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tiermem.checkpoint.contents import OPTIMIZER, PARAMETERS, Key
from tiermem.checkpoint.grid import order_of
from tiermem.checkpoint.source import Entry
from tiermem.errors import CheckpointError

OPTIMIZERS = ("optimizer", "optimizer_state_dict", "optim")
NESTED = ("model", "state_dict", "model_state_dict", "module")
INDEX = "pytorch_model.bin.index.json"
SINGLE = "pytorch_model.bin"


class TorchSource:
    """The tensors of a file of ``torch.save``, or of a folder of such files with Hugging Face's index.

    The file has a state dict, or a dict with one under "model", "state_dict", "model_state_dict" or "module"; and in
    such a dict there may be an optimizer's under "optimizer", "optimizer_state_dict" or "optim".
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors: dict[Key, torch.Tensor] = {}
        self.tied: Mapping[str, str] = {}
        self.param_groups: list[dict[str, Any]] | None = None
        self.scalars: Mapping[str, Mapping[str, Any]] = {}
        self.attributes: Mapping[str, Any] = {}
        for file in _files(path):
            loaded = load(file)
            self._tensors.update({Key(PARAMETERS, n): each for n, each in tensors_of(loaded, file).items()})
            saved = next((each for name in OPTIMIZERS if _is_optimizer(each := _under(loaded, name))), None)
            if saved is not None:
                state = OptimizerState(saved["state"], saved["param_groups"])
                self.param_groups, self.scalars = state.groups, state.scalars
                self._tensors.update(state.tensors)
        self.entries: Mapping[Key, Entry] = {
            key: _entry(key.name, tensor, path) for key, tensor in self._tensors.items()
        }

    def read(self, key: Key, start: int, out: torch.Tensor) -> None:
        """See ``Source.read``."""
        copy_run(self._tensors[key], self.entries[key].order, start, out)

    def close(self) -> None:
        """Let go of the mapped files."""
        self._tensors.clear()


class OptimizerState:
    """An optimizer's ``state_dict()`` as a source has it: ``groups`` and ``scalars`` as in ``Source``, and ``tensors``.

    Parameters have names where it knows them ("param_names", or names in the place of numbers), and numbers otherwise.
    """

    def __init__(self, state: Mapping[Any, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        self.groups: list[dict[str, Any]] = []
        self.scalars: dict[str, dict[str, Any]] = {}
        self.tensors: dict[Key, torch.Tensor] = {}
        names: dict[str, Any] = {}
        for group in groups:
            names.update(
                zip(map(str, group["params"]), group.get("param_names") or group["params"], strict=True)
            )
            settings = {key: each for key, each in group.items() if key not in ("params", "param_names")}
            self.groups.append({**settings, "parameters": [names[str(each)] for each in group["params"]]})
        for number, values in state.items():
            name = str(names.get(str(number), number))
            self.scalars[name] = {}
            for what, value in values.items():
                if isinstance(value, torch.Tensor) and value.ndim:
                    self.tensors[Key(f"{OPTIMIZER}/{what}", name)] = value
                elif value is not None:
                    self.scalars[name][what] = value.item() if isinstance(value, torch.Tensor) else value


def _under(loaded: Any, name: str) -> Any:
    return loaded.get(name) if isinstance(loaded, Mapping) else None


def _is_optimizer(each: Any) -> bool:
    return isinstance(each, Mapping) and "state" in each and "param_groups" in each


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
