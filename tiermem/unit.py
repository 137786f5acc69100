"""Units: what faults, computes and is evicted as one, and how its tensors lie in pages.

Which modules are units is found in :mod:`tiermem.cutting`. What is small, or belongs to no unit, is together in the
*resident* unit, which stays on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from tiermem.dtensors import Local
from tiermem.page import ALIGNMENT, Frame, Kind, Page
from tiermem.pageable import admit, is_compute, tensors_of
from tiermem.parameter import classes_of
from tiermem.partition import ALONE, Partition
from tiermem.table import PageTable
from tiermem.tier import Tier, aligned
from tiermem.tiling import NOTHING, Tile, Tiling


class Field(NamedTuple):
    """One parameter's (or buffer's) place in the pages of its group: ``offset`` and ``numel`` in elements.

    ``whole``: the parameter that it is a tile of, which it has the elements of from number ``first`` on.
    """

    name: str
    parameter: torch.Tensor
    offset: int
    numel: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    first: int = 0
    whole: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter, or of the one that it is a tile of."""
        return self.size if self.whole is None else tuple(self.whole.shape)


class Part(NamedTuple):
    """A run of a group's elements whose optimizer state is in pages of its own, so that no page of state is large.

    ``master`` is None where the parameter itself is float32. All three are float32.
    """

    start: int
    stop: int
    master: Page | None
    exp_avg: Page
    exp_avg_sq: Page

    @property
    def pages(self) -> list[Page]:
        """The pages of optimizer state of these elements."""
        return [page for page in (self.master, self.exp_avg, self.exp_avg_sq) if page is not None]


class Stretch(NamedTuple):
    """A page and the elements of its group that it holds."""

    page: Page
    start: int
    stop: int


class Group:
    """The tensors of one unit that have a page together: one dtype, all trainable or all frozen.

    The parameter page, the gradient page and the parts' pages give every element the same offset. ``landed`` says of
    which fields a gradient has arrived since the last ``zero_grad``; ``held`` which of them are in the gradient page,
    and not, reduced over the ranks, in its shard; ``used`` which of them a step has used. ``first`` is the first
    element of this rank's slice. ``states`` are the pages of an optimizer that isn't ours, by what it calls them.
    ``locals`` are those of the parameters that are parts of DTensors.
    """

    def __init__(
        self,
        unit: int,
        fields: Sequence[Field],
        numel: int,
        parameter: Page,
        gradient: Page | None,
        device: torch.device,
    ) -> None:
        self.unit = unit
        self.fields = tuple(fields)
        self.classes = [(field.parameter, *classes_of(field.parameter)) for field in fields]
        self.numel = numel
        self.parameter = parameter
        self.gradient = gradient
        self.parts: tuple[Part, ...] = ()
        self.states: dict[str, list[Stretch]] = {}
        self.locals: Sequence[Local] = ()
        self.landed = bytearray(len(fields))
        self.held = self.landed
        self.used = bytearray(len(fields))
        self.first = 0
        self.norms = (
            torch.zeros(len(fields), dtype=parameter.dtype) if gradient else torch.empty(0)
        )  # of gradients
        self.normed = bytearray(len(fields))  # which of the norms are those of the gradients as they are
        self.places: list[
            torch.Tensor
        ] = []  # of the gradients, in the frame at `places_at` of the host's slab
        self.places_at = -1
        self.wants_norms = False  # does the loop clip? then norms are taken as gradients land
        self.scale: torch.Tensor | None = (
            None  # by which clipping wants the gradients multiplied, still to be done
        )
        self.unscale = 1.0  # by which gradients are multiplied in float32 when they are read: they are scaled
        self.versions = [field.parameter._version for field in fields]  # when last seen: a user's write shows
        self.stale: set[int] = set()  # fields that a user wrote: their master weights must follow
        self.aside: Page | None = None  # gradients of earlier backwards, while one adds up its own
        self.num_open = 0  # units between enter and exit that use these parameters
        # (address of the slab, offset of the frame) that the parameters view; at first it is memory of their own.
        self._bound: tuple[int, int] | None = (0, 0)
        # One element behind every index: the shape stays, and whoever computes with it by mistake gets NaN.
        fill = float("nan") if parameter.dtype.is_floating_point else 0
        self._absent = torch.full((), fill, dtype=parameter.dtype, device=device)

    def spends(self, fields: Collection[int]) -> bool:
        """Is no gradient needed any more, once a step has used those of these fields? Others may be another's."""
        return not any(
            landed and not used and index not in fields
            for index, (landed, used) in enumerate(zip(self.landed, self.used, strict=True))
        )

    def use(self, fields: Collection[int]) -> None:
        """A step has used the gradients of these fields."""
        for index in fields:
            self.used[index] = 1

    @property
    def trainable(self) -> bool:
        """Do these parameters get gradients?"""
        return self.gradient is not None

    @property
    def state_pages(self) -> list[Page]:
        """The pages of optimizer state, of whichever optimizer."""
        pages = [page for part in self.parts for page in part.pages]
        return pages + [stretch.page for stretches in self.states.values() for stretch in stretches]

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters, and of their gradients."""
        return self.parameter.dtype

    @property
    def updated(self) -> Page:
        """The page that the optimizer updates: all parameters of the group, or this rank's slice of them."""
        return self.parameter.shard or self.parameter

    @property
    def summed(self) -> Page:
        """The page that the optimizer reads gradients from: all of them, or this rank's slice."""
        assert self.gradient is not None
        return self.gradient.shard or self.gradient

    def first_of(self, page: Page) -> int:
        """The element of the group that a parameter or gradient page of it, or a shard of one, begins with."""
        return self.first if page.kind in (Kind.PARAMETER_SHARD, Kind.GRADIENT_SHARD) else 0

    def bind(self, tier: Tier, frame: Frame) -> None:
        """Make the parameters views into ``frame``, which holds their page."""
        place = (tier.address, frame.offset)
        if self._bound == place:
            return
        # Outside inference mode: a view made in it could never be saved for backward later.
        with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
            for field in self.fields:
                field.parameter.data = tier.view(frame, self.dtype, field.offset, field.size, field.stride)
        self._bound = place

    def unbind(self) -> None:
        """Leave the parameters with their shape and without their bytes."""
        if self._bound is None:
            return
        self._bound = None
        with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
            for field in self.fields:
                field.parameter.data = self._absent.expand(field.size)


class Unit:
    """What faults, computes and is evicted as one.

    ``groups`` are its own tensors; ``pages`` the parameter pages it computes with, tied ones of other units included.
    ``outer`` are the numbers of the units that contain it. Unit 0 is the resident one.
    """

    def __init__(self, number: int, name: str, module: nn.Module) -> None:
        self.number = number
        self.name = name
        self.module = module
        self.groups: list[Group] = []
        self.uses: list[Group] = []
        self.outer: frozenset[int] = frozenset()

    @property
    def resident(self) -> bool:
        """Is it the one that stays on the device?"""
        return self.number == 0

    @cached_property
    def pages(self) -> list[Page]:
        """The parameter pages that it computes with."""
        return [group.parameter for group in self.uses]

    @cached_property
    def gradient_pages(self) -> list[Page]:
        """The gradient pages of its own tensors."""
        return [group.gradient for group in self.groups if group.gradient is not None]


def build_units(
    net: nn.Module,
    modules: dict[str, nn.Module],
    table: PageTable,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    part_numel: int,
    sinks: dict[Kind, bool],
    meta: bool = False,
    partition: Partition = ALONE,
    tiling: Tiling = NOTHING,
) -> list[Unit]:
    """The units of ``net`` with their groups, and their pages in ``table``; nothing is moved yet.

    ``dtype``: the compute dtype of floating-point parameters (None: their own; those of 8 bits keep theirs);
    ``device``: where they compute.
    ``part_numel``: the most elements of one page of optimizer state. ``sinks``: which kinds may go to the disk.
    ``meta``: parameters may be without data, for who only plans. ``partition``: this rank's share. ``tiling``: which
    parameters are in tiles, which are units among ``modules``.
    """
    units = [Unit(0, "(resident)", net)]
    units += [Unit(number, name, module) for number, (name, module) in enumerate(modules.items(), 1)]
    by_module = {id(unit.module): unit for unit in units[1:]}
    owner: dict[int, Unit] = {}
    names: dict[int, str] = {}
    members: dict[int, list[torch.Tensor]] = {unit.number: [] for unit in units}
    for unit, path, module in _walk(net, "", units[0], by_module, set()):
        for key, parameter in tensors_of(module, tiling.tiled):
            if id(parameter) not in owner:
                admit(parameter, f"{path}.{key}" if path else key, meta)
                owner[id(parameter)] = unit
                names[id(parameter)] = f"{path}.{key}" if path else key
                members[unit.number].append(parameter)
    for unit in units:
        if isinstance(unit.module, Tile):
            members[unit.number].append(unit.module.values)
    home: dict[int, Group] = {}
    number = 0
    for unit in units:
        batches: dict[tuple[torch.dtype, bool], list[torch.Tensor]] = {}
        for parameter in members[unit.number]:
            of = dtype if dtype is not None and is_compute(parameter.dtype) else parameter.dtype
            batches.setdefault((of, parameter.requires_grad), []).append(parameter)
        for (of, trainable), parameters in batches.items():
            fields = (
                _fields(parameters, names, of) if not isinstance(unit.module, Tile) else [_tile(unit.module)]
            )
            group = _group(unit, fields, of, trainable, device, table, part_numel, sinks, partition)
            unit.groups.append(group)
            home.update((id(parameter), group) for parameter in parameters)
            # Numbers of pages differ from rank to rank, where slices have other numbers of parts.
            group.parameter.key = number
            if group.gradient is not None:
                group.gradient.key = number
            number += 1
    for unit in units:
        uses = dict.fromkeys(unit.groups)
        if not unit.resident:
            inside = (p for m in _own_modules(unit.module, by_module) for _, p in tensors_of(m, tiling.tiled))
            uses |= dict.fromkeys(home[id(parameter)] for parameter in inside)
        unit.uses = [group for group in uses if unit.resident or group.unit != 0]
    outer: dict[int, set[int]] = {id(unit.module): set() for unit in units[1:]}
    for unit in units[1:]:
        for module in unit.module.modules():
            if module is not unit.module and id(module) in outer:
                outer[id(module)].add(unit.number)
        for owner_ in tiling.owners_of(unit.module):
            around = {each.number for each in units[1:] if owner_ in each.module.modules()}
            outer[id(unit.module)] |= around
    for unit in units[1:]:
        unit.outer = frozenset(outer[id(unit.module)])
    return units


def _walk(
    module: nn.Module, path: str, unit: Unit, by_module: dict[int, Unit], seen: set[int]
) -> Iterator[tuple[Unit, str, nn.Module]]:
    """Every module once, with the innermost unit that it is in."""
    if id(module) in seen:
        return
    seen.add(id(module))
    unit = by_module.get(id(module), unit)
    yield unit, path, module
    for key, child in module.named_children():
        yield from _walk(child, f"{path}.{key}" if path else key, unit, by_module, seen)


def _own_modules(module: nn.Module, by_module: dict[int, Unit]) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if id(child) not in by_module:
            yield from _own_modules(child, by_module)


def _fields(parameters: Sequence[torch.Tensor], names: dict[int, str], dtype: torch.dtype) -> list[Field]:
    fields = []
    offset = 0
    for parameter in parameters:
        numel = parameter.numel()
        size = tuple(parameter.shape)
        stride = tuple(parameter.stride())
        fields.append(Field(names[id(parameter)], parameter, offset, numel, size, stride))
        offset += aligned(numel, dtype)
    return fields


def _tile(tile: Tile) -> Field:
    rows, width = tile.values.shape
    return Field(
        tile.name, tile.values, 0, rows * width, (rows, width), (width, 1), tile.start * width, tile.whole
    )


def _group(
    unit: Unit,
    fields: Sequence[Field],
    dtype: torch.dtype,
    trainable: bool,
    device: torch.device,
    table: PageTable,
    part_numel: int,
    sinks: dict[Kind, bool],
    partition: Partition,
) -> Group:
    offset = fields[-1].offset + aligned(fields[-1].numel, dtype)

    def page(kind: Kind, of: torch.dtype, numel: int, alignment: int = ALIGNMENT) -> Page:
        return table.add(unit.number, kind, of, numel, sinks=sinks[kind], alignment=alignment)

    def sliced(kind: Kind, shard: Kind | None) -> Page:
        whole = page(kind, dtype, offset, partition.alignment)
        if shard is not None:
            whole.shard = page(shard, dtype, partition.slice_numel(offset, dtype))
        return whole

    gradient = None
    if trainable:
        gradient = sliced(Kind.GRADIENT, Kind.GRADIENT_SHARD if partition.shards_gradients else None)
        gradient.sinks |= (
            partition.shards_gradients
        )  # whole, it is on its way; what [placement] says is for slices
    values = sliced(Kind.PARAMETER, Kind.PARAMETER_SHARD if partition.shards_parameters else None)
    if values.gathered:
        values.sinks = True  # it is dropped, whatever becomes of its shard
    group = Group(unit.number, fields, offset, values, gradient, device)
    group.parameter.users.append(group)
    if partition.shards_gradients:
        group.held = bytearray(len(fields))
    if gradient is not None:
        ends = [(field.offset + field.numel) * dtype.itemsize for field in fields]
        starts = [field.offset * dtype.itemsize for field in fields[1:]] + [gradient.nbytes]
        gradient.gaps = tuple((end, start) for end, start in zip(ends, starts, strict=True) if end < start)
        if fields[0].whole is not None:
            gradient.gaps = None  # it may be all zeros: rows that nobody looked up
    group.first, last = partition.own(offset, dtype)
    if trainable and group.first < last:
        # Parts of equal size, so that the frames of one are as good for another's pages.
        numel = last - group.first
        count = -(-numel // part_numel)
        size_of = aligned(-(-numel // count), torch.uint8)
        edges = [*range(group.first, last, size_of), last]
        group.parts = tuple(
            Part(
                start,
                stop,
                page(Kind.MASTER, torch.float32, stop - start) if dtype is not torch.float32 else None,
                page(Kind.EXP_AVG, torch.float32, stop - start),
                page(Kind.EXP_AVG_SQ, torch.float32, stop - start),
            )
            for start, stop in pairwise(edges)
        )
    return group
