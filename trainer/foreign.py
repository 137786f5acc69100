"""Updates by optimizers of any class, over the pages of a wrapped model: a few tensors at a time are in their places.

The user's class never sees the whole model. For each *portion* of a page (neighbouring tensors, or this rank's slices
of them) there is an instance of its own over stand-ins, whose data, gradients and state look into frames while it
steps, and nowhere otherwise. What it leaves in its state is kept as :mod:`tiermem.trainer.state` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter_ns as now
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from tiermem.errors import PagingError
from tiermem.hooks import Hooks
from tiermem.policies import Access, Effect, Phase
from tiermem.trace import Event, Tier
from tiermem.trainer.blueprint import Blueprint
from tiermem.trainer.committed import resume, state_of
from tiermem.trainer.portion import Portion, require_room
from tiermem.trainer.state import StatefulUpdate
from tiermem.unit import Group, Unit

Settings = Sequence[Mapping[str, Any]]
"""Those of the parameter groups, by number."""


class ForeignUpdate(StatefulUpdate):
    """What an optimizer of any class keeps of one wrapped model."""

    def __init__(self, hooks: Hooks, owner: Optimizer, blueprint: Blueprint) -> None:
        super().__init__(hooks, owner)
        self._blueprint = blueprint

    def add(self, parameters: Sequence[torch.Tensor], setting: int) -> None:
        """See :meth:`Update.add`.

        Raises ValueError where the class mixes what isn't there together, BudgetError where its state has no room, and
        ConfigError where a resumed commit has the state of another class, or of other parameter groups.
        """
        settings = settings_of(self._owned().param_groups[setting])
        self._blueprint.require_separate(settings)
        groups = dict.fromkeys(self.hooks.home[id(parameter)][0] for parameter in parameters)
        if self.hooks.views.dtensors is not None:
            self._blueprint.require_elementwise(
                "tensor parallelism leaves this process parts of the parameters only: use one that does",
                settings,
            )
        if self.sliced:
            self._blueprint.require_elementwise(
                f"{self.hooks.reduction.partition.world} ranks have slices of the parameters only: use ranks.stage = "
                "0, where each rank updates all of them",
                settings,
            )
        tile = next((group.fields[0].name for group in groups if group.fields[0].whole is not None), None)
        if tile is not None:
            self._blueprint.require_elementwise(
                f"a parameter is updated a tile at a time, {tile} for one: raise host.budget until it fits whole",
                settings,
            )
        super().add(parameters, setting)
        dtypes = {
            dtype: self._blueprint.state_dtypes(settings, dtype)
            for dtype in {group.dtype for group in groups}
        }
        portions = [portion for group in groups for portion in self.portions_of(group)]
        commits = self.hooks.commits
        unclaimed = commits.unclaimed if commits is not None else ()
        require_room(self.hooks.pager, self._blueprint.name, portions, dtypes, unclaimed)
        if commits is not None:
            commits.join(self)

    def state(self) -> dict[str, Any]:
        """As commits have it: settings, see :mod:`tiermem.trainer.committed`, and what :meth:`committed` says."""
        known = state_of(self._owned(), self.names(), {}, self._blueprint.name)
        return {**known, "portions": self.committed()}

    def resume(self, states: Sequence[dict[str, Any]]) -> None:
        """Take over what :meth:`state` gave. Raises ConfigError when it is another class's, or grouped otherwise."""
        resume(self._owned(), self.names(), {}, states, self._blueprint.name)
        self.take_over([portion for state in states for portion in state.get("portions", ())])

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
        number = sum(len(self.portions_of(each)) for each in unit.groups[: unit.groups.index(group)])
        wanted = [
            (number + place, portion)
            for place, portion in enumerate(self.portions_of(group))
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
                spends = portion is wanted[-1][1] and group.spends(mine)
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
                if any(name not in portion.pages for _, name, _ in new):
                    # All of it comes to lie anew: beside pages that can't be moved, new ones might find no room.
                    with door:
                        begun = False
                        pager.unpin([gradient], dirty=scaled)
                        pager.unpin([parameter], dirty=True)
                        parameter.version += 1
                    self.put(portion, new, [gradient, parameter])
                    begun = True
                else:
                    self.put(portion, new)
                with door:
                    self._send(list(portion.pages.values()))
                    if not portion.stepped:
                        portion.stepped = True
                        self._foretell(access, portion, spends)  # its pages have just come into being
            done = True
        finally:
            if begun:
                with door:
                    pager.unpin([gradient], dirty=scaled)
                    pager.unpin([parameter], dirty=True)
                    parameter.version += 1
                    gradient.spent = done and group.spends(mine)
                    if done:
                        self._send([parameter])
        group.use(mine)
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
            stand_in.data = self.view(group, piece, group.updated, group.first_of(group.updated))
            if piece.field in mine:
                stand_in.grad = self.view(group, piece, group.summed, group.first_of(group.summed))
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
                    name: self.view(portion.group, piece, portion.pages[name], portion.start)
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
                if not self.pageable(portion, place, name, value):
                    kept[name] = value
                    continue
                paged.append(name)
                there = None
                if name in portion.paged[place]:
                    assert page is not None
                    there = self.view(portion.group, piece, page, portion.start)
                if there is None or value.data_ptr() != there.data_ptr() or value.stride() != there.stride():
                    new.append((place, name, value.detach()))
            portion.kept[place], portion.paged[place] = kept, paged
        return new

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


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a parameter group."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
