"""A load: from a source of any format into a model's pages, one page at a time, and into what is in no page.

Names, sizes and dtypes are compared before anything is written. After that only a disk can break it off: then
the pages before have the checkpoint's content, and the one that was being filled may have a part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from tiermem.checkpoint.contents import (
    OPTIMIZER,
    STATE,
    Contents,
    Key,
    PagedOptimizer,
    StatefulPages,
    Stored,
    parameter_names,
    stretches,
)
from tiermem.checkpoint.differences import Match, optimizer_problems
from tiermem.checkpoint.grid import order_of
from tiermem.checkpoint.pages import clear_bytes
from tiermem.checkpoint.source import Source, named, read_into
from tiermem.errors import CheckpointError, TransferError
from tiermem.page import Kind, Page
from tiermem.policies import Phase
from tiermem.runtime import Runtime
from tiermem.unit import Field, Group, Stretch


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint said of itself, and what of it and of the model had no counterpart.

    ``step`` and ``extra`` are as they were given to ``save``; None and {} where the format has no such thing.
    """

    path: str
    step: int | None
    extra: Mapping[str, Any]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


class Loading:
    """One load of ``source`` into the model of ``contents``; see ``TieredModule.load``."""

    def __init__(
        self, source: Source, contents: Contents, runtime: Runtime | None, optimizer: Optimizer | None
    ) -> None:
        self._source = source
        self._contents = contents
        self._runtime = runtime
        self._optimizer = optimizer
        self._match = Match(source, contents)
        # "" for what isn't in a state dict: buffers that are not persistent
        self._names = {
            (id(place.group), place.number): name
            for name, places in contents.paged.items()
            for place in places
        }
        self._renewed: set[Group] = set()  # whose new content other ranks have been told of
        self._updates: dict[str, int] = {}  # of parameters whose state goes into pages
        self._parameters: dict[str, torch.Tensor] = {}  # these parameters
        self._beside: dict[
            str, Sequence[str]
        ] = {}  # what of their state is in pages beside moments and masters

    def check(self, *, strict: bool, cast: bool) -> None:
        """Raise CheckpointError with everything that doesn't fit."""
        problems = list(self._match.problems(strict=strict, cast=cast))
        if self._optimizer is not None:
            names = parameter_names(self._optimizer, self._contents)
            self._source = self._match.source = named(self._source, names)
            sizes = {name: target.size for name, target in self._match.targets.items()}
            problems += optimizer_problems(self._source, names, sizes)
            problems += self._count_updates(self._optimizer, names)
        if problems:
            raise CheckpointError(*problems)

    def _count_updates(self, optimizer: Optimizer, names: list[list[str]]) -> list[str]:
        problems = []
        if isinstance(optimizer, PagedOptimizer):
            for group, each in zip(optimizer.param_groups, names, strict=True):
                for name, parameter in zip(each, group["params"], strict=True):
                    if optimizer.updates_of(parameter) is not None:
                        step = int(self._source.scalars.get(name, {}).get("step", 0))
                        self._updates[name] = step
                        self._parameters[name] = parameter
                        self._beside[name] = optimizer.beside(parameter)
                        problems += [
                            f"optimizer: {name} has had {step} updates, and no {moment} is there"
                            for moment in ("exp_avg", "exp_avg_sq")
                            if step and Key(f"{OPTIMIZER}/{moment}", name) not in self._source.entries
                        ]
        return problems

    def run(self) -> Loaded:
        """Load. Raises CheckpointError for a damaged file, TransferError when the run's own disk fails."""
        try:
            return self._run()
        except (CheckpointError, TransferError):
            # Ranks count the versions of what they gather: those to which nothing happened have come to the end of
            # theirs, and another checkpoint may be loaded.
            if self._runtime is not None:
                for group in self._contents.groups().values():
                    if group not in self._renewed and self._found_of(group):
                        self._renew(self._runtime, group)
            raise

    def _run(self) -> Loaded:
        if self._optimizer is not None:
            self._load_optimizer(self._optimizer)
        if self._runtime is not None and self._contents.paged:
            self._runtime.hooks.release_resident()
            for group in self._contents.groups().values():
                self._load_group(self._runtime, group)
        with torch.no_grad():
            for key, tensor in self._contents.plain.items():
                found = self._match.found.get(key.name)
                if found is not None:
                    self._load_plain(found, tensor)
                    torch.autograd.graph.increment_version(tensor)
        attributes = self._source.attributes
        return Loaded(
            str(self._source.path),
            attributes.get("step"),
            attributes.get("extra", {}),
            tuple(self._match.missing),
            tuple(self._match.unexpected),
        )

    # -- pages ----------------------------------------------------------------------------------------------

    def _names_of(self, group: Group) -> list[str]:
        return [self._names.get((id(group), index), "") for index in range(len(group.fields))]

    def _found_of(self, group: Group) -> dict[int, Key]:
        """What the checkpoint has of a group's fields."""
        names = enumerate(self._names_of(group))
        return {index: self._match.found[name] for index, name in names if name in self._match.found}

    def _load_group(self, runtime: Runtime, group: Group) -> None:
        names, found = self._names_of(group), self._found_of(group)
        if not found:
            return
        if group.dtype is torch.float32:
            # Where the checkpoint's parameters are half-precision, its masters are what they stand for.
            found = {index: self._match.master_of(names[index]) or key for index, key in found.items()}
        for stretch in stretches(group, Kind.PARAMETER):
            self._fill(runtime, group, stretch, found, zeros=())
        self._renew(runtime, group)
        masters = {index: key for index in found if (key := self._match.master_of(names[index])) is not None}
        for stretch in stretches(group, Kind.MASTER):
            self._load_masters(runtime, group, stretch, found, masters)
        updates = {index: self._updates[name] for index, name in enumerate(names) if name in self._updates}
        for kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ):
            state = {
                index: Key(f"{OPTIMIZER}/{STATE[kind]}", names[index]) for index, n in updates.items() if n
            }
            zeros = [index for index, n in updates.items() if not n]
            for stretch in stretches(group, kind) if updates else ():
                self._fill(runtime, group, stretch, state, zeros)
        for name in dict.fromkeys(name for index in updates for name in self._beside[names[index]]):
            keys = {index: Key(f"{OPTIMIZER}/{name}", names[index]) for index in updates}
            state = {index: key for index, key in keys.items() if key in self._source.entries}
            pages = stretches(group, name)
            if state or not all(stretch.page.blank for stretch in pages):
                zeros = [index for index in updates if index not in state]
                for stretch in pages:
                    self._fill(runtime, group, stretch, state, zeros)

    def _renew(self, runtime: Runtime, group: Group) -> None:
        """Other ranks gather what this one has read from here on, and it what they have."""
        self._renewed.add(group)
        page = group.parameter
        if runtime.ranks is not None and page.gathered:
            with runtime.door.hold(), runtime.door:
                runtime.pager.renew(page)
            runtime.ranks.offer([(page.key, page.version)])

    def _load_masters(
        self, runtime: Runtime, group: Group, stretch: Stretch, found: dict[int, Key], masters: dict[int, Key]
    ) -> None:
        """Masters are the checkpoint's, or what was loaded into the parameter: one that is blank already says that."""
        blank = stretch.page.blank
        inside = [index for index, field in enumerate(group.fields) if _overlap(field, stretch)]
        if blank and not any(index in masters for index in inside):
            return
        rest = [index for index in inside if index not in masters and (blank or index in found)]
        pager, parameter = runtime.pager, group.updated
        if rest:
            with runtime.door.hold():
                with runtime.door:
                    pager.fault([stretch.page, parameter], Phase.OPTIMIZER, group.unit)
                try:
                    assert parameter.host is not None
                    for index in rest:
                        low, high = _span(group.fields[index], stretch)
                        start = low - group.first_of(parameter)
                        values = pager.host.view(parameter.host, group.dtype, start, (high - low,), (1,))
                        _place(runtime, stretch, low, high).copy_(values)
                finally:
                    with runtime.door:
                        pager.unpin([stretch.page], dirty=True)
                        pager.unpin([parameter])
        self._fill(runtime, group, stretch, masters, zeros=())

    def _fill(
        self, runtime: Runtime, group: Group, stretch: Stretch, keys: Mapping[int, Key], zeros: Any
    ) -> None:
        """Write fields of a group, as far as they lie in this page: those of ``keys`` from the source."""
        inside = [index for index, field in enumerate(group.fields) if _overlap(field, stretch)]
        written = [index for index in inside if index in keys or index in zeros]
        if not written:
            return
        page, pager = stretch.page, runtime.pager
        whole = len(written) == len(inside)
        with runtime.door.hold():
            with runtime.door:
                if runtime.disk is not None:
                    pager.transfers.provide([page])
                if whole:
                    pager.fault([], Phase.OPTIMIZER, group.unit, overwrite=[page])
                else:
                    pager.fault([page], Phase.OPTIMIZER, group.unit)
            done = False
            try:
                if whole:
                    self._clear(runtime, page)  # what lies between tensors is zeros in every page
                for index in written:
                    low, high = _span(group.fields[index], stretch)
                    place = _place(runtime, stretch, low, high)
                    if index in keys:
                        field = group.fields[index]
                        order = order_of(field.shape, field.stride)
                        assert order is not None
                        first = field.first + low - field.offset
                        read_into(self._source, keys[index], first, place, field.shape, order)
                    else:
                        place.zero_()
                done = True
            finally:
                with runtime.door:
                    page.version += 1
                    if done or not whole:
                        pager.unpin([page], dirty=True)
                    else:
                        pager.abandon(page)
                    if runtime.disk is not None:
                        pager.writeback([page])

    def _clear(self, runtime: Runtime, page: Page) -> None:
        assert page.host is not None
        clear_bytes(runtime.pager.host.bytes_of(page.host))

    # -- everything else ------------------------------------------------------------------------------------

    def _load_plain(self, key: Key, tensor: torch.Tensor) -> None:
        order = order_of(tensor.shape, tensor.stride())
        if order is None:
            dense = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._load_plain(key, dense)
            tensor.copy_(dense)
            return
        flat = tensor.permute(order).reshape(-1)  # a view: the tensor is dense in this order
        read_into(self._source, key, 0, flat, tuple(tensor.shape), order)

    def _load_optimizer(self, optimizer: Optimizer) -> None:
        assert self._source.param_groups is not None
        packed, states = [], {}
        numbers: dict[str, int] = {}
        names = parameter_names(optimizer, self._contents)
        for group, saved, each in zip(optimizer.param_groups, self._source.param_groups, names, strict=True):
            for name in each:
                numbers[name] = len(numbers)
            settings = {
                key: _like(group.get(key), value) for key, value in saved.items() if key != "parameters"
            }
            packed.append({**settings, "params": [numbers[name] for name in each]})
        parameters = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        in_pages = {
            name: parameters[identity]
            for identity, name in self._contents.names.items()
            if name in self._contents.paged
            and identity in parameters
            and isinstance(optimizer, StatefulPages)
        }
        for name, number in numbers.items():
            if name not in self._updates and name not in in_pages:
                states[number] = self._plain_state(name)
        if isinstance(optimizer, PagedOptimizer):
            for name in self._updates:
                # Their moments come with the pages: an optimizer that is given none would make zeros of them.
                optimizer.set_updates(self._parameters[name], 0)
        states = {number: state for number, state in states.items() if state}
        optimizer.load_state_dict({"state": states, "param_groups": packed})
        if isinstance(optimizer, PagedOptimizer):
            for name, count in self._updates.items():
                optimizer.set_updates(self._parameters[name], count)
        if isinstance(optimizer, StatefulPages):
            for name, parameter in in_pages.items():
                optimizer.set_state(parameter, self._stored_state(name))

    def _plain_state(self, name: str) -> dict[str, Any]:
        state = self._stored_state(name)
        return {key: value.whole() if isinstance(value, Stored) else value for key, value in state.items()}

    def _stored_state(self, name: str) -> dict[str, Any]:
        state: dict[str, Any] = dict(self._source.scalars.get(name, {}))
        if "step" in state:
            state["step"] = torch.tensor(float(state["step"]), dtype=torch.float32)
        for key, entry in self._source.entries.items():
            if key.name == name and key.group.startswith(f"{OPTIMIZER}/"):
                read = partial(self._read, key)
                state[key.group.removeprefix(f"{OPTIMIZER}/")] = Stored(entry.dtype, entry.size, read)
        return state

    def _read(self, key: Key, start: int, out: torch.Tensor, order: tuple[int, ...]) -> None:
        read_into(self._source, key, start, out, self._source.entries[key].size, order)


def _like(now: Any, saved: Any) -> Any:
    """A setting as JSON kept it, in the type that the optimizer has it in."""
    return tuple(saved) if isinstance(now, tuple) and isinstance(saved, list) else saved


def _overlap(field: Field, stretch: Stretch) -> bool:
    low, high = _span(field, stretch)
    return low < high


def _span(field: Field, stretch: Stretch) -> tuple[int, int]:
    """The elements of the group that are in both."""
    return max(field.offset, stretch.start), min(field.offset + field.numel, stretch.stop)


def _place(runtime: Runtime, stretch: Stretch, low: int, high: int) -> torch.Tensor:
    """Elements ``low`` to ``high`` of a group in a page of it that is pinned on the host."""
    frame = stretch.page.host
    assert frame is not None
    return runtime.pager.host.view(frame, stretch.page.dtype, low - stretch.start, (high - low,), (1,))
