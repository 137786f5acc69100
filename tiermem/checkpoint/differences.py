"""Differences between a checkpoint and the model that is to take it: names, sizes, dtypes, all of them at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from tiermem.checkpoint import dtypes
from tiermem.checkpoint.contents import BUFFERS, OPTIMIZER, PARAMETERS, Contents, Key
from tiermem.checkpoint.source import Source
from tiermem.page import Kind

SHOWN = 4


class Target(NamedTuple):
    """What the model has under a name."""

    size: tuple[int, ...]
    dtype: torch.dtype


class Match:
    """Which tensor of ``source`` goes where in the model.

    ``found``: name in the model -> key in the source; ``missing`` names the source doesn't have; ``unexpected`` ones
    that the model doesn't have.
    """

    def __init__(self, source: Source, contents: Contents) -> None:
        self.source = source
        self.targets = targets(contents)
        self.found: dict[str, Key] = {}
        self.missing: list[str] = []
        aliases: dict[str, list[str]] = {}
        for alias, name in contents.tied.items():
            aliases.setdefault(name, []).append(alias)
        known = set(contents.tied)
        for name in self.targets:
            names = [name, *aliases.get(name, ())]
            key = next((key for each in names for key in self._keys(each) if key in source.entries), None)
            if key is None:
                self.missing.append(name)
            else:
                self.found[name] = key
                known.add(key.name)
        self.unexpected = [
            key.name for key in source.entries if key.group in (PARAMETERS, BUFFERS) and key.name not in known
        ]

    def _keys(self, name: str) -> Iterator[Key]:
        for each in (name, self.source.tied.get(name, name)):
            yield Key(PARAMETERS, each)
            yield Key(BUFFERS, each)

    def master_of(self, name: str) -> Key | None:
        """Where the source has a parameter in float32: its master weights, or itself."""
        key = self.found.get(name)
        if key is None:
            return None
        master = Key(f"{OPTIMIZER}/master", key.name)
        for each in (master, key):
            if each in self.source.entries and self.source.entries[each].dtype is torch.float32:
                return each
        return None

    def problems(self, *, strict: bool, cast: bool) -> Iterator[str]:
        """What keeps the model from taking the source, in sentences."""
        if strict:
            yield from (f"missing: the model has {name} and the checkpoint doesn't" for name in self.missing)
            yield from (
                f"unexpected: the checkpoint has {name} and the model doesn't" for name in self.unexpected
            )
        casts: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
        for name, key in self.found.items():
            entry, target = self.source.entries[key], self.targets[name]
            if tuple(entry.size) != target.size:
                yield f"shape: {name} is {list(entry.size)} in the checkpoint and {list(target.size)} in the model"
            exact = target.dtype is torch.float32 and self.master_of(name) is not None
            if entry.dtype is not target.dtype and not exact:
                casts.setdefault((entry.dtype, target.dtype), []).append(name)
        for (theirs, ours), names in casts.items():
            numbers = theirs.is_floating_point and ours.is_floating_point
            if not (cast and numbers):
                yield (
                    f"dtype: {_some(names)} {'is' if len(names) == 1 else 'are'} {dtypes.name_of(theirs)} in the "
                    f"checkpoint and {dtypes.name_of(ours)} in the model"
                    + ("; cast=True converts them" if numbers else "")
                )
        if strict and self.missing and self.unexpected:
            yield from self._prefixes()

    def _prefixes(self) -> Iterator[str]:
        """A word on names that differ only in how they begin."""
        ours, theirs = sorted(self.missing), sorted(self.unexpected)
        for longer, shorter, whose in ((theirs, ours, "checkpoint"), (ours, theirs, "model")):
            head = longer[0].removesuffix(shorter[0]) if longer[0].endswith(shorter[0]) else ""
            if head and {name.removeprefix(head) for name in longer} == set(shorter):
                yield f"the names of the {whose} begin with {head!r}, and are the same otherwise"


def optimizer_problems(
    source: Source, groups: list[list[str]], sizes: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    """What keeps an optimizer with these parameter groups, of names, from taking the state of a source."""
    if source.param_groups is None:
        yield "optimizer: the checkpoint has no optimizer state; load it without optimizer="
        return
    theirs = [list(group.get("parameters", ())) for group in source.param_groups]
    if len(theirs) != len(groups):
        yield f"optimizer: the checkpoint has {len(theirs)} parameter groups and the optimizer {len(groups)}"
        return
    for number, (ours, saved) in enumerate(zip(groups, theirs, strict=True)):
        gone, new = sorted(set(saved) - set(ours)), sorted(set(ours) - set(saved))
        if gone:
            yield f"optimizer: parameter group {number} of the checkpoint has {_some(gone)}, that of the optimizer not"
        if new:
            yield f"optimizer: parameter group {number} of the optimizer has {_some(new)}, that of the checkpoint not"
    for key, entry in source.entries.items():
        size = sizes.get(key.name)
        if key.group in (f"{OPTIMIZER}/exp_avg", f"{OPTIMIZER}/exp_avg_sq") and size not in (
            None,
            tuple(entry.size),
        ):
            yield (
                f"optimizer: {key.group.removeprefix('optimizer/')} of {key.name} is {list(entry.size)} in the "
                f"checkpoint and {list(size or ())} in the model"
            )


def targets(contents: Contents) -> dict[str, Target]:
    """Every tensor of a model by name, tied ones once."""
    result = {
        name: Target(places[0].field.shape, places[0]._replace(kind=Kind.PARAMETER).dtype)
        for name, places in contents.paged.items()
    }
    for key, tensor in contents.plain.items():
        result[key.name] = Target(tuple(tensor.shape), tensor.dtype)
    return result


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"
