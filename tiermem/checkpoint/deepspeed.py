"""Checkpoints of DeepSpeed's ZeRO-3: every rank's share of the weights and moments, read as a source.

The layout, as ``zero_to_fp32.py`` in each of these folders has it: a parameter is cut into as many pieces as there are
ranks, each of ceil(numel / ranks) elements. A rank keeps its pieces of the trainable ones in float32, one after another
in the order of ``param_shapes``, in ``fp32_flat_groups``; moments lie likewise. Frozen ones are in
``frozen_param_fragments``, each by its name. Files are mapped, so that only the shares that are asked for are read.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tiermem.checkpoint import pickles
from tiermem.checkpoint.contents import BUFFERS, OPTIMIZER, PARAMETERS, Key
from tiermem.checkpoint.grid import order_of
from tiermem.checkpoint.source import Entry
from tiermem.errors import CheckpointError

LATEST = "latest"
MODEL = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


class _Plain:
    """What stands in for the few classes of DeepSpeed's own in these files; nothing of them is used."""

    def __init__(self, *_: Any) -> None:
        pass


KNOWN = [
    (_Plain, f"deepspeed.runtime.{name}")
    for name in (
        "zero.config.ZeroStageEnum", "fp16.loss_scaler.LossScaler", "fp16.loss_scaler.DynamicLossScaler",
    )
]  # fmt: skip


class Shares(NamedTuple):
    """A tensor in equal pieces, one on each rank: from element ``offset`` of what each rank has in a row."""

    ranks: Sequence[Sequence[torch.Tensor]]
    offset: int
    size: int


def is_deepspeed(path: Path) -> bool:
    """Is this a folder of DeepSpeed's checkpoints, or one of them?"""
    return (path / LATEST).is_file() or any(MODEL.fullmatch(each.name) for each in path.iterdir())


class DeepSpeedSource:
    """One checkpoint of ZeRO-3, saved by any number of ranks: see ``Source``.

    ``path``: its folder, or the one above, whose file ``latest`` names it. Parameters are float32, as the optimizer had
    them. Raises CheckpointError for other stages, for tensor parallelism, and where a rank's file is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path = _tagged(path)
        models, optims = _by_rank(path, MODEL), _by_rank(path, OPTIM)
        states = [pickles.load(file, KNOWN) for file in models]
        trained = [pickles.load(file, KNOWN)["optimizer_state_dict"] for file in optims]
        self.attributes: Mapping[str, Any] = {"step": states[0].get("global_steps")}
        try:
            if "fp32_flat_groups" not in trained[0]:
                raise CheckpointError(
                    f"{path}: was saved by another stage of ZeRO than 3, which can't be read"
                )
            ranks = int(trained[0]["partition_count"])
            if not ranks == len(models) == len(optims):
                raise CheckpointError(
                    f"{path}: was saved by {ranks} ranks, and there are {len(models)} files of model states and "
                    f"{len(optims)} of optimizer states: all of them are needed"
                )
            self._read_layout(states, trained, ranks)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise CheckpointError(f"{path}: is not laid out as DeepSpeed does it: {error!r}") from error

    def _read_layout(self, states: list[Any], trained: list[Any], ranks: int) -> None:
        first = states[0]
        shapes = {
            name: tuple(int(n) for n in shape)
            for group in first["param_shapes"]
            for name, shape in group.items()
        }
        self.tied: Mapping[str, str] = dict(first.get("shared_params") or {})
        self._shares: dict[Key, Shares] = {}
        self._tensors: dict[Key, torch.Tensor] = {}
        entries: dict[Key, Entry] = {}
        kinds = {PARAMETERS: [state["fp32_flat_groups"] for state in trained]}
        kinds |= _moments(trained)
        offset = 0
        for name, shape in shapes.items():
            numel = 1
            for n in shape:
                numel *= n
            size = -(-numel // ranks)
            for kind, tensors in kinds.items():
                self._shares[Key(kind, name)] = Shares(tensors, offset, size)
                entries[Key(kind, name)] = Entry.of(torch.float32, shape)
            offset += size
        for name, shape in (first.get("frozen_param_shapes") or {}).items():
            pieces = [[state["frozen_param_fragments"][name].detach()] for state in states]
            self._shares[Key(PARAMETERS, name)] = Shares(pieces, 0, pieces[0][0].numel())
            entries[Key(PARAMETERS, name)] = Entry.of(pieces[0][0].dtype, tuple(int(n) for n in shape))
        for name in first["buffer_names"]:
            if name in first["module"]:
                tensor = first["module"][name]
                self._tensors[Key(BUFFERS, name)] = tensor
                order = order_of(tensor.shape, tensor.stride()) or tuple(range(tensor.ndim))
                entries[Key(BUFFERS, name)] = Entry(tensor.dtype, tuple(tensor.shape), order)
        self.entries: Mapping[Key, Entry] = entries
        self.param_groups: list[dict[str, Any]] | None = None
        self.scalars: Mapping[str, Mapping[str, Any]] = {}
        if len(kinds) > 1:
            inner = trained[0]["optimizer_state_dict"]
            self.param_groups = [
                {**{key: value for key, value in group.items() if key != "params"}, "parameters": list(names)}
                for group, names in zip(inner["param_groups"], first["param_shapes"], strict=True)
            ]
            step = float(next(iter(inner["state"].values()))["step"])
            self.scalars = {name: {"step": step} for name in shapes}

    def read(self, key: Key, start: int, out: torch.Tensor) -> None:
        """See ``Source.read``."""
        entry = self.entries[key]
        if key in self._tensors:
            pickles.copy_run(self._tensors[key], entry.order, start, out)
            return
        values, shares = out.view(entry.dtype), self._shares[key]
        done = 0
        while done < values.numel():
            rank, inside = divmod(start + done, shares.size)
            count = min(values.numel() - done, shares.size - inside)
            _copy(
                shares.ranks[rank],
                shares.offset + inside,
                values[done : done + count],
                f"{self.path}: {key.name}",
            )
            done += count

    def close(self) -> None:
        """Let go of the mapped files."""
        self._shares.clear()
        self._tensors.clear()


def _moments(trained: list[Any]) -> dict[str, list[list[torch.Tensor]]]:
    """The moments of each rank, laid out as the flat groups are; nothing where they aren't one for each of those."""
    found: dict[str, list[list[torch.Tensor]]] = {}
    for moment in ("exp_avg", "exp_avg_sq"):
        ranks = []
        for state in trained:
            inner = (state.get("optimizer_state_dict") or {}).get("state") or {}
            tensors = [inner[number][moment] for number in sorted(inner) if moment in inner[number]]
            groups = state["fp32_flat_groups"]
            if [each.numel() for each in tensors] != [each.numel() for each in groups]:
                return {}
            ranks.append(tensors)
        found[f"{OPTIMIZER}/{moment}"] = ranks
    return found


def _copy(tensors: Sequence[torch.Tensor], start: int, out: torch.Tensor, what: str) -> None:
    """Elements from ``start`` on of tensors that lie one after another."""
    ends = list(accumulate(each.numel() for each in tensors))
    done = 0
    while done < out.numel():
        number = bisect_right(ends, start + done)
        if number == len(ends):
            raise CheckpointError(
                f"{what} ends {out.numel() - done} elements early: a file is shorter than it should be"
            )
        at = start + done - (ends[number] - tensors[number].numel())
        count = min(out.numel() - done, tensors[number].numel() - at)
        out[done : done + count] = tensors[number].detach().reshape(-1)[at : at + count]
        done += count


def _tagged(path: Path) -> Path:
    latest = path / LATEST
    if not latest.is_file():
        return path
    tag = latest.read_text(errors="replace").strip()
    if not tag or Path(tag).name != tag or not (path / tag).is_dir():
        raise CheckpointError(f"{latest}: names {tag!r}, which is no folder beside it")
    return path / tag


def _by_rank(path: Path, pattern: re.Pattern[str]) -> list[Path]:
    files: dict[int, Path] = {}
    for each in sorted(path.iterdir()):
        match = pattern.fullmatch(each.name)
        if match is not None and int(match[2]):
            raise CheckpointError(f"{each}: was saved with tensor parallelism, which can't be read")
        if match is not None:
            files[int(match[1])] = each
    if not files or sorted(files) != list(range(len(files))):
        raise CheckpointError(f"{path}: has the files of ranks {sorted(files)}: some are missing")
    return [files[rank] for rank in sorted(files)]
