"""What a checkpoint of a model consists of: its tensors by name, in pages or not, and those of the optimizer.

Names are those of ``state_dict()``. A parameter that has several (tied weights) is there once, under its first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from tiermem.checkpoint.document import encode, jsonable
from tiermem.dtensors import is_dtensor
from tiermem.errors import CheckpointError
from tiermem.page import Kind
from tiermem.parameter import owner_of
from tiermem.partition import ALONE, Partition
from tiermem.runtime import Runtime
from tiermem.unit import Field, Group, Stretch

PARAMETERS, BUFFERS, OPTIMIZER = "parameters", "buffers", "optimizer"
STATE = {Kind.MASTER: "master", Kind.EXP_AVG: "exp_avg", Kind.EXP_AVG_SQ: "exp_avg_sq"}
"""The kinds of our optimizer's state that are in pages, by their names in ``optimizer.state_dict()``."""

What = Kind | str
"""A kind of pages, or, of an optimizer that isn't ours, the name of a tensor in its state."""


class Key(NamedTuple):
    """Which tensor: the group of the checkpoint that it is in ("parameters", "optimizer/exp_avg") and its name."""

    group: str
    name: str


def path_of(key: Key) -> str:
    """The path of a tensor's array in a checkpoint."""
    return f"{key.group}/{encode(key.name)}"


class Place(NamedTuple):
    """A tensor of one kind of a paged parameter: which field of which group."""

    group: Group
    number: int
    kind: Kind

    @property
    def field(self) -> Field:
        """The parameter's place in its pages."""
        return self.group.fields[self.number]

    @property
    def dtype(self) -> torch.dtype:
        """Of the pages that it is in."""
        return self.group.dtype if self.kind is Kind.PARAMETER else torch.float32


def kinds_of(group: Group) -> list[What]:
    """Which kinds of pages with what is saved a group may have."""
    return [Kind.PARAMETER, *STATE, *group.states]


def stretches(group: Group, kind: What) -> list[Stretch]:
    """The pages of one kind of a group, in the order of their elements; empty where it has none of that kind.

    Of a model that ranks share, those of this rank: its slice of what is in slices.
    """
    if kind is Kind.PARAMETER:
        page = group.updated
        first = group.first_of(page)
        last = min(first + page.nbytes // page.dtype.itemsize, group.numel)
        return [Stretch(page, first, last)] if first < last else []
    if isinstance(kind, str):
        return group.states.get(kind, [])
    result: list[Stretch] = []
    for part in group.parts:
        state = {Kind.MASTER: part.master, Kind.EXP_AVG: part.exp_avg, Kind.EXP_AVG_SQ: part.exp_avg_sq}[kind]
        if state is not None:
            result.append(Stretch(state, part.start, part.stop))
    return result


def share_of(partition: Partition, group: Group) -> tuple[int, int]:
    """The elements of a group that this rank writes into a checkpoint: its slice, which one rank of several writes."""
    if partition.replica:
        return 0, 0
    if partition.world == 1:
        return 0, group.numel
    size = partition.slice_numel(group.numel, group.dtype)
    return min(partition.rank * size, group.numel), min((partition.rank + 1) * size, group.numel)


def has_master(place: Place, updates: int) -> bool:
    """Has a parameter master weights of its own here? Before the first update, only where wrapping has cast it."""
    field = place.field
    masters = [
        part.master
        for part in place.group.parts
        if part.master is not None
        and max(field.offset, part.start) < min(field.offset + field.numel, part.stop)
    ]
    return bool(masters) and (updates > 0 or not any(master.blank for master in masters))


@runtime_checkable
class PagedOptimizer(Protocol):
    """An optimizer whose state of paged parameters is in their pages, as tiermem's own is."""

    def updates_of(self, parameter: torch.Tensor) -> int | None:
        """How many updates a parameter has had whose state is in pages; None for any other."""

    def set_updates(self, parameter: torch.Tensor, count: int) -> None:
        """Say how many updates the state has had that was written into the pages."""

    def beside(self, parameter: torch.Tensor) -> Sequence[str]:
        """What its state has in pages (float32) beside moments and masters: names in ``Group.states``."""

    def settle(self) -> None:
        """Make parameters and state what they are after the last step. All ranks must call it."""


class Stored(NamedTuple):
    """A tensor of a checkpoint that isn't read yet: its dtype and size.

    ``read(start, out, order)`` fills ``out`` (one dimension, of any dtype) with its elements from number ``start`` on,
    as ``order`` of the axes counts them, slowest first.
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    read: Callable[[int, torch.Tensor, tuple[int, ...]], None]

    def whole(self) -> torch.Tensor:
        """All of it."""
        out = torch.empty(math.prod(self.size), dtype=self.dtype)
        self.read(0, out, tuple(range(len(self.size))))
        return out.view(self.size)


@runtime_checkable
class StatefulPages(Protocol):
    """An optimizer of another class whose state of paged parameters is in pages: ``tiermem.trainer.paged``."""

    def facts(self) -> dict[int, tuple[dict[str, torch.dtype], dict[str, Any]]]:
        """By the id of a paged parameter: what of its state is in pages, with dtypes, and what isn't."""

    def set_state(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Take over the state of a paged parameter, with tensors as :class:`Stored`: what is needed of them is read."""


class Contents:
    """The tensors of ``net``, whose paged parameters ``runtime`` has (None: none are paged).

    ``paged``: parameters and packed buffers in pages, by name, each in one place, or one for each tile; ``buffers``:
    which of these are buffers; ``plain``: tensors that are in no page, most buffers among them; ``tied``: the other
    names of a tensor and its first.
    """

    def __init__(self, net: nn.Module, runtime: Runtime | None) -> None:
        self.paged: dict[str, list[Place]] = {}
        self.buffers: set[str] = set()
        self.plain: dict[Key, torch.Tensor] = {}
        self.tied: dict[str, str] = {}
        self.names: dict[int, str] = {}  # id of a parameter -> its first name
        self.partition = runtime.partition if runtime is not None and not runtime.closed else ALONE
        home = runtime.hooks.home if runtime is not None and not runtime.closed else {}
        tiled = runtime.hooks.tiled if runtime is not None and not runtime.closed else {}
        for name, parameter in net.named_parameters(remove_duplicate=False):
            if id(parameter) in self.names:
                self.tied[name] = self.names[id(parameter)]
                continue
            self.names[id(parameter)] = name
            if id(parameter) in home:
                self.paged[name] = [Place(*home[id(parameter)], Kind.PARAMETER)]
            elif id(parameter) in tiled:
                homes = [home[id(tile.values)] for tile in tiled[id(parameter)].tiles]
                self.paged[name] = [Place(*each, Kind.PARAMETER) for each in homes]
            elif owner_of(parameter) is not None:
                raise CheckpointError(
                    f"{name} is paged by another TieredModule than the one that is saved or loaded: use that one"
                )
            elif is_dtensor(parameter):
                raise CheckpointError(
                    f"{name} is a DTensor, of which this process has a part: save it while it is paged, before close()"
                )
            else:
                self.plain[Key(PARAMETERS, name)] = parameter.detach()
        first: dict[int, str] = {}
        for name, buffer in _persistent(net):
            if id(buffer) in first:
                self.tied[name] = first[id(buffer)]
            else:
                first[id(buffer)] = name
                if id(buffer) in home:
                    self.paged[name] = [Place(*home[id(buffer)], Kind.PARAMETER)]
                    self.buffers.add(name)
                else:
                    self.plain[Key(BUFFERS, name)] = buffer.detach()

    def keep(self, only: Callable[[str], bool]) -> None:
        """Leave out every tensor whose name ``only`` refuses."""
        self.paged = {name: places for name, places in self.paged.items() if only(name)}
        self.plain = {key: tensor for key, tensor in self.plain.items() if only(key.name)}
        self.tied = {alias: name for alias, name in self.tied.items() if only(name)}

    def groups(self) -> dict[int, Group]:
        """The groups of all paged parameters, in the order of the units, by their ids."""
        return {id(place.group): place.group for places in self.paged.values() for place in places}


def _persistent(net: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in net.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield (f"{path}.{name}" if path else name), buffer


class OptimizerContents:
    """The state of ``optimizer`` for the parameters of ``contents``.

    ``updates``: of parameters with our state in pages, how many they have had; ``states``: the names and dtypes of what
    is in pages beside that, or of another optimizer's; ``plain``: state tensors that are in no page; ``scalars``:
    numbers, by name of the parameter and of the state; ``groups``: the parameter groups, as JSON has them, with
    ``parameters`` as names.

    Raises CheckpointError for parameters that the model doesn't have, and for settings that JSON has no form for.
    """

    def __init__(self, optimizer: Optimizer, contents: Contents) -> None:
        self.updates: dict[str, int] = {}
        self.states: dict[str, dict[str, torch.dtype]] = {}
        self.plain: dict[Key, torch.Tensor] = {}
        self.scalars: dict[str, dict[str, float]] = {}
        self.groups: list[dict[str, Any]] = []
        names = parameter_names(optimizer, contents)
        if isinstance(optimizer, PagedOptimizer):
            optimizer.settle()
        facts = optimizer.facts() if isinstance(optimizer, StatefulPages) else {}
        for number, group in enumerate(optimizer.param_groups):
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            self.groups.append(jsonable(settings, f"param_groups[{number}]"))
            self.groups[-1]["parameters"] = names[number]
            for name, parameter in zip(names[number], group["params"], strict=True):
                updates = optimizer.updates_of(parameter) if isinstance(optimizer, PagedOptimizer) else None
                if updates is not None:
                    assert isinstance(optimizer, PagedOptimizer)
                    self.updates[name] = updates
                    self.scalars[name] = {"step": float(updates)} if updates else {}
                    self.states[name] = {
                        key: torch.float32
                        for key in optimizer.beside(parameter)
                        if not any(
                            each.page.blank
                            for place in contents.paged[name]
                            for each in place.group.states[key]
                        )
                    }
                elif id(parameter) in facts:
                    self.states[name], kept = facts[id(parameter)]
                    self._add(name, kept)
                else:
                    self._add(name, optimizer.state.get(parameter, {}))

    def _add(self, name: str, state: Mapping[str, Any]) -> None:
        self.scalars[name] = {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and not (key == "step" and value.ndim == 0):
                self.plain[Key(f"{OPTIMIZER}/{key}", name)] = value.detach()
            elif value is not None:
                self.scalars[name][key] = jsonable(value, f"the optimizer's {key} of {name}")


def parameter_names(optimizer: Optimizer, contents: Contents) -> list[list[str]]:
    """The names of the parameters of each parameter group. Raises CheckpointError for those of another model."""
    foreign = [
        f"parameter {place} of parameter group {number} of the optimizer, of shape {list(parameter.shape)}, is none of "
        "this model's: save it with what it belongs to"
        for number, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
        if id(parameter) not in contents.names
    ]
    if foreign:
        raise CheckpointError(*foreign)
    return [[contents.names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
