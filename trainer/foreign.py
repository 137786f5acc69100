"""Updates by optimizers of any class, over the pages of a wrapped model: a few tensors at a time are in their places.

The user's class never sees the whole model. For each *portion* of a page (neighbouring tensors, or this rank's slices
of them) there is an instance of its own over stand-ins, whose data, gradients and state look into frames while it
steps, and nowhere otherwise. Tensors of the parameter's shape that it leaves in its state move into pages; whatever
else is there (counts, flags, tensors of other shapes) stays with the portion, in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns as now
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from tiermem.errors import ConfigError, PagingError
from tiermem.hooks import Hooks
from tiermem.page import Kind, Page
from tiermem.policies import Access, Effect, Phase
from tiermem.trace import Event, Tier
from tiermem.trainer.blueprint import Blueprint
from tiermem.trainer.portion import Piece, Portion, cut, require_room
from tiermem.trainer.scalars import decoded, encoded
from tiermem.trainer.update import Update
from tiermem.unit import Group, Stretch, Unit

Settings = Sequence[Mapping[str, Any]]
"""Those of the parameter groups, by number."""

Facts = tuple[dict[str, torch.dtype], dict[str, Any]]
"""Of one parameter's state: the names and dtypes of what is in pages, and what isn't."""


class ForeignUpdate(Update):
    """What an optimizer of any class keeps of one wrapped model."""

    def __init__(self, hooks: Hooks, owner: Optimizer, blueprint: Blueprint) -> None:
        super().__init__(hooks, owner)
        if hooks.commits is not None:
            raise ConfigError(
                "durability.mode: commits have the state of tiermem's Adam and AdamW, and not that of "
                f'{blueprint.name}; set durability.mode = "off" (model.save works), or use those'
            )
        self._blueprint = blueprint
        self._portions: dict[
            int, list[Portion]
        ] = {}  # id of a group -> all of it, or of this rank's slice of it
        partition = hooks.reduction.partition
        self.sliced = partition.world > 1 and partition.stage > 0

    def add(self, parameters: Sequence[torch.Tensor], setting: int) -> None:
        """See :meth:`Update.add`.

        Raises ValueError where the class mixes what isn't there together, BudgetError where its state has no room.
        """
        settings = settings_of(self._owned().param_groups[setting])
        self._blueprint.require_separate(settings)
        if self.sliced:
            self._blueprint.require_elementwise(self.hooks.reduction.partition.world, settings)
        super().add(parameters, setting)
        groups = dict.fromkeys(self.hooks.home[id(parameter)][0] for parameter in parameters)
        dtypes = {
            dtype: self._blueprint.state_dtypes(settings, dtype)
            for dtype in {group.dtype for group in groups}
        }
        portions = [portion for group in groups for portion in self._portions_of(group)]
        require_room(self.hooks.pager, self._blueprint.name, portions, dtypes)

    # -- the step -------------------------------------------------------------------------------------------

    def step(self, settings: Settings) -> dict[int, dict[str, Any]]:
        """Update every parameter that has a gradient; returns the settings as the optimizer left them, by number.

        Raises TransferError, naming the page, when the disk fails, and BudgetError where a portion has no room.
        """
        changed: dict[int, dict[str, Any]] = {}
        self._run(lambda unit, group: self._update(unit, group, settings, changed))
        return changed

    def _update(
        self, unit: Unit, group: Group, settings: Settings, changed: dict[int, dict[str, Any]]
    ) -> None:
        mine = [
            index
            for index, field in enumerate(group.fields)
            if group.landed[index] and id(field.parameter) in self.settings
        ]
        if not mine:
            return
        self._drop_masters(group)
        number = sum(len(self._portions_of(each)) for each in unit.groups[: unit.groups.index(group)])
        wanted = [
            (number + place, portion)
            for place, portion in enumerate(self._portions_of(group))
            if any(piece.field in mine for piece in portion.pieces)
        ]
        pager, door = self.hooks.pager, self.hooks.door
        parameter, gradient = group.updated, group.summed
        pager.announce([parameter, *(page for _, portion in wanted for page in portion.pages.values())])
        begun = done = scaled = False
        try:
            for place, portion in wanted:
                door.checkpoint()
                shared = [] if begun else [gradient, parameter]
                access = Access(unit.number, Phase.OPTIMIZER, place)
                spends = portion is wanted[-1][1]
                pages = list(portion.pages.values())
                with door:
                    expected = self._foretell(access, portion, spends) if portion.stepped else True
                    pager.fault([*pages, *shared], Phase.OPTIMIZER, unit.number, expected=expected)
                    begun = True
                    pager.pump()
                try:
                    if group.scale is not None:
                        scaled = True
                        self.hooks.reduction.scale(group)
                    start = now()
                    new = self._step(portion, mine, settings, changed)
                    self.hooks.trace.record(
                        Event.OPTIMIZER, start, now() - start, unit.number, parameter.number,
                        sum(page.nbytes for page in pages) * 2, Tier.NONE, Tier.NONE, 0, Phase.OPTIMIZER,
                    )  # fmt: skip
                finally:
                    with door:
                        pager.unpin(pages, dirty=True)
                self._put(portion, new)
                if not portion.stepped:
                    portion.stepped = True
                    with door:
                        self._foretell(access, portion, spends)  # its pages have just come into being
            done = True
        finally:
            if begun:
                with door:
                    pager.unpin([gradient], dirty=scaled)
                    pager.unpin([parameter], dirty=True)
                    parameter.version += 1
                    gradient.spent = done
        group.stale.clear()
        self.hooks.reduction.updated(group)

    def _foretell(self, access: Access, portion: Portion, spends: bool) -> bool:
        group, pages = portion.group, portion.pages.values()
        return self.hooks.steps.access(
            access,
            [*(page.number for page in pages), group.summed.number, group.updated.number],
            [Effect.WRITES] * len(pages) + [Effect.SPENDS if spends else Effect.NONE, Effect.WRITES],
        )

    def _step(
        self, portion: Portion, mine: Sequence[int], settings: Settings, changed: dict[int, dict[str, Any]]
    ) -> list[tuple[int, str, torch.Tensor]]:
        """Let the class step over a portion whose pages are pinned; returns new state: (piece, name, tensor)."""
        group = portion.group
        if not portion.stand_ins:
            portion.stand_ins = [nn.Parameter(torch.empty(0, dtype=group.dtype)) for _ in portion.pieces]
        for stand_in, piece in zip(portion.stand_ins, portion.pieces, strict=True):
            stand_in.data = self._view(group, piece, group.updated, group.first_of(group.updated))
            if piece.field in mine:
                stand_in.grad = self._view(group, piece, group.summed, group.first_of(group.summed))
        try:
            optimizer = self._optimizer_of(portion, settings)
            for each, inner in zip(portion.settings, optimizer.param_groups, strict=True):
                inner.update(settings[each])
            self._enter(portion, optimizer)
            optimizer.step()
            for each, inner in zip(portion.settings, optimizer.param_groups, strict=True):
                changed.setdefault(each, settings_of(inner))
            return self._leave(portion, optimizer)
        finally:
            for stand_in in portion.stand_ins:
                stand_in.grad = None
                stand_in.data = torch.empty(0, dtype=group.dtype)
                if portion.optimizer is not None:
                    portion.optimizer.state.pop(stand_in, None)

    def _optimizer_of(self, portion: Portion, settings: Settings) -> Optimizer:
        """The portion's own optimizer; made where its parameters are, as it may begin with state like them."""
        numbers = [
            self.settings.get(id(portion.group.fields[piece.field].parameter)) for piece in portion.pieces
        ]
        used = tuple(sorted({number for number in numbers if number is not None}))
        if portion.optimizer is None or portion.settings != used:
            portion.settings = used
            portion.optimizer = self._blueprint.make(
                [
                    {
                        **settings[number],
                        "params": [
                            stand_in
                            for stand_in, of in zip(portion.stand_ins, numbers, strict=True)
                            if of == number
                        ],
                    }
                    for number in used
                ]
            )
        return portion.optimizer

    def _enter(self, portion: Portion, optimizer: Optimizer) -> None:
        """Give the optimizer the state that it left, where there is any."""
        for stand_in, piece, kept, names in zip(
            portion.stand_ins, portion.pieces, portion.kept, portion.paged, strict=True
        ):
            if kept or names:
                views = {
                    name: self._view(portion.group, piece, portion.pages[name], portion.start)
                    for name in names
                }
                optimizer.state[stand_in] = {**kept, **views}

    def _leave(self, portion: Portion, optimizer: Optimizer) -> list[tuple[int, str, torch.Tensor]]:
        """Take its state back; what is where its page has it needs no copy."""
        new = []
        for place, (stand_in, piece) in enumerate(zip(portion.stand_ins, portion.pieces, strict=True)):
            if stand_in not in optimizer.state:
                continue
            kept: dict[str, Any] = {}
            paged: list[str] = []
            for name, value in optimizer.state[stand_in].items():
                page = portion.pages.get(name)
                if not self._pageable(portion, place, name, value):
                    kept[name] = value
                    continue
                paged.append(name)
                there = None
                if name in portion.paged[place]:
                    assert page is not None
                    there = self._view(portion.group, piece, page, portion.start)
                if there is None or value.data_ptr() != there.data_ptr() or value.stride() != there.stride():
                    new.append((place, name, value.detach()))
            portion.kept[place], portion.paged[place] = kept, paged
        return new

    def _pageable(self, portion: Portion, place: int, name: str, value: Any) -> bool:
        """Does a value in the state of a piece belong into a page?"""
        piece = portion.pieces[place]
        field = portion.group.fields[piece.field]
        size = field.size if piece.whole else (piece.stop - piece.start,)
        page = portion.pages.get(name)
        return (
            isinstance(value, torch.Tensor)
            and name != "step"
            and field.numel > 1
            and tuple(value.shape) == size
            and value.layout is torch.strided
            and (page is None or page.dtype is value.dtype)
        )

    def _put(self, portion: Portion, new: Sequence[tuple[int, str, torch.Tensor]]) -> None:
        """Copy state into its pages, which are made for names that have none."""
        made = [self._page(portion, name, value.dtype) for _, name, value in new if name not in portion.pages]
        fresh = [page for page in made if page is not None]
        pages = [portion.pages[name] for name in dict.fromkeys(name for _, name, _ in new)]
        old = [page for page in pages if page not in fresh]
        if not pages:
            return
        pager, door = self.hooks.pager, self.hooks.door
        with door:
            pager.fault(old, Phase.OPTIMIZER, portion.group.unit, overwrite=fresh)
        try:
            for page in fresh:
                assert page.host is not None
                pager.host.bytes_of(page.host).zero_()  # between tensors, and where there is no state yet
            for place, name, value in new:
                self._view(portion.group, portion.pieces[place], portion.pages[name], portion.start).copy_(
                    value
                )
        finally:
            with door:
                pager.unpin(pages, dirty=True)
                if pager.transfers.disk is not None:
                    pager.writeback(fresh)

    def _page(self, portion: Portion, name: str, dtype: torch.dtype) -> Page | None:
        """A new page for the state of this name; None where another piece's has been made."""
        if name in portion.pages:
            return None
        group, pager = portion.group, self.hooks.pager
        sinks = group.parts[0].exp_avg.sinks
        page = pager.table.add(group.unit, Kind.STATE, dtype, portion.stop - portion.start, sinks=sinks)
        with self.hooks.door:
            if pager.transfers.disk is not None:
                pager.transfers.provide([page])
            self.hooks.trace.record(Event.PAGE, now(), 0, group.unit, page.number, page.nbytes)
        portion.pages[name] = page
        stretches = group.states.setdefault(name, [])
        stretches.append(Stretch(page, portion.start, portion.stop))
        stretches.sort(key=lambda stretch: stretch.start)
        return page

    # -- where things are -----------------------------------------------------------------------------------

    def _portions_of(self, group: Group) -> list[Portion]:
        """All of a group, or of this rank's slice of it, in portions about as large as its parts."""
        known = self._portions.get(id(group))
        if known is None:
            known = self._portions[id(group)] = cut(group, whole=not self.sliced)
        return known

    def _view(self, group: Group, piece: Piece, page: Page, first: int) -> torch.Tensor:
        """A piece in a page that is pinned on the host and begins with element ``first`` of the group."""
        assert page.host is not None
        field = group.fields[piece.field]
        size, stride = (field.size, field.stride) if piece.whole else ((piece.stop - piece.start,), (1,))
        return self.hooks.pager.host.view(page.host, page.dtype, piece.start - first, size, stride)

    def _drop_masters(self, group: Group) -> None:
        """Master weights are Adam's; kept as they are, they would be taken for the parameters' values one day."""
        masters = [part.master for part in group.parts if part.master is not None and not part.master.blank]
        if not masters:
            return
        others = [field.name for field in group.fields if id(field.parameter) not in self.settings]
        if others:
            raise PagingError(
                f"{others[0]} ({len(others)} in all) have master weights in the same pages as parameters of "
                f"{self._blueprint.name}, which has none: give all parameters of one unit to one optimizer"
            )
        with self.hooks.door:
            for master in masters:
                self.hooks.pager.discard(master)

    # -- state, as state_dict and checkpoints have it -------------------------------------------------------

    def facts(self) -> dict[int, Facts]:
        """By the ids of parameters with state. Where ranks have slices, all must ask: each knows of its slices only."""
        found: dict[int, Facts] = {}
        for portions in self._portions.values():
            for portion in portions:
                for piece, kept, names in zip(portion.pieces, portion.kept, portion.paged, strict=True):
                    if kept or names:
                        identity = id(portion.group.fields[piece.field].parameter)
                        found[identity] = ({name: portion.pages[name].dtype for name in names}, dict(kept))
        ranks = self.hooks.reduction.ranks
        if ranks is None or not self.sliced:
            return found
        names_of = {
            identity: group.fields[index].name for identity, (group, index) in self.hooks.home.items()
        }
        said = ranks.meet(
            "optimizer",
            {
                names_of[identity]: [
                    {name: str(dtype).removeprefix("torch.") for name, dtype in paged.items()},
                    {name: encoded(value, f"{name} of {names_of[identity]}") for name, value in kept.items()},
                ]
                for identity, (paged, kept) in found.items()
            },
            "the optimizer's state",
        )
        merged = {name: each for of_rank in reversed(said) for name, each in of_rank.items()}
        return {
            identity: (
                {key: getattr(torch, dtype) for key, dtype in merged[name][0].items()},
                {key: decoded(value) for key, value in merged[name][1].items()},
            )
            for identity, name in names_of.items()
            if name in merged
        }

    def reader(self) -> Callable[[torch.Tensor], dict[str, Any]]:
        """See :meth:`Update.reader` and :meth:`facts`."""
        self.hooks.release_resident()
        facts = self.facts()
        return lambda parameter: self._filled(parameter, *facts.get(id(parameter), ({}, {})))

    def _filled(
        self, parameter: torch.Tensor, paged: Mapping[str, torch.dtype], kept: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What :meth:`facts` says of a parameter, with the tensors that are in pages."""
        group, index = self.hooks.home[id(parameter)]
        field = group.fields[index]
        state = {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in kept.items()
        }
        for name, dtype in paged.items():
            whole = torch.empty_strided(field.size, field.stride, dtype=dtype)
            flat = whole.as_strided((field.numel,), (1,))
            for portion, piece in self._holding(group, index):
                page = portion.pages[name]
                with self.hooks.door.hold():
                    with self.hooks.door:
                        self.hooks.pager.fault([page], Phase.OPTIMIZER, group.unit)
                    try:
                        flat[piece.start - field.offset : piece.stop - field.offset].copy_(
                            self._flat(page, portion, piece)
                        )
                    finally:
                        with self.hooks.door:
                            self.hooks.pager.unpin([page])
            if self.sliced:
                self.hooks.reduction.complete(group, index, whole)
            state[name] = whole
        return state

    def write(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Take over the state of one parameter, whole, from what a reader or an unpaged optimizer gave."""
        self.hooks.release_resident()
        group, index = self.hooks.home[id(parameter)]
        field = group.fields[index]
        for portion, piece in self._holding(group, index):
            place = portion.pieces.index(piece)
            portion.kept[place], portion.paged[place] = {}, []
            portion.optimizer = None  # a class may begin with state of its own, where it is given none
            new = []
            for name, value in state.items():
                mine = value
                if isinstance(value, torch.Tensor) and tuple(value.shape) == field.size and not piece.whole:
                    dense = torch.empty_strided(field.size, field.stride, dtype=value.dtype).copy_(value)
                    flat = dense.as_strided((field.numel,), (1,))
                    mine = flat[piece.start - field.offset : piece.stop - field.offset]
                if self._pageable(portion, place, name, mine):
                    portion.paged[place].append(name)
                    new.append((place, name, mine))
                else:
                    portion.kept[place][name] = value.clone() if isinstance(value, torch.Tensor) else value
            self.hooks.pager.announce(list(portion.pages.values()))
            with self.hooks.door.hold():
                self._put(portion, new)

    def _holding(self, group: Group, index: int) -> list[tuple[Portion, Piece]]:
        """The piece of a field, with its portion; none where it is in other ranks' slices."""
        return [
            (portion, piece)
            for portion in self._portions_of(group)
            for piece in portion.pieces
            if piece.field == index
        ]

    def _flat(self, page: Page, portion: Portion, piece: Piece) -> torch.Tensor:
        assert page.host is not None
        size = (piece.stop - piece.start,)
        return self.hooks.pager.host.view(page.host, page.dtype, piece.start - portion.start, size, (1,))


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a parameter group."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
