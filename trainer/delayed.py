"""Updates delayed by one step: those of step k are made while backward of step k+1 runs.

It is the one-step delayed parameter update of ZeRO-Offload (Ren et al., "ZeRO-Offload: Democratizing Billion-Scale
Model Training", USENIX ATC 2021, section 5.2): forward and backward of step k+1 compute with the parameters that step
k-1 made. ``step()`` *takes* the gradients, and makes nothing of them yet. Before the next backward puts others into a
unit's gradient page, what was taken is copied to a page of its own (it is *held*); when that backward has left the
unit, and nobody needs the old parameters any more, its update is made from there, and the held page is given up. What
backward doesn't complete (the resident unit, parameters that got no gradient, a unit that has no room for its state
beside what is open) the next ``step()`` makes first. All gradients are there before the first update of them is made,
so they can be clipped and scaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns as now
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from tiermem.errors import BudgetError, PagingError
from tiermem.hooks import Hooks
from tiermem.page import Kind, Page
from tiermem.policies import Access, Effect, Phase
from tiermem.trace import Event
from tiermem.trainer.during import DuringBackward, Owner
from tiermem.trainer.kernel import Hyper, Kernel
from tiermem.trainer.moments import AdamUpdate, Source
from tiermem.unit import Group, Unit


class DelayedUpdate(AdamUpdate):
    """What an Adam keeps of one wrapped model, with the gradients of its last step where they aren't used yet.

    The first ``undelayed_steps`` updates of the parameters are made at once.
    """

    def __init__(self, hooks: Hooks, owner: Optimizer, undelayed_steps: int) -> None:
        super().__init__(hooks, owner)
        self.begun = (
            False  # has a backward made some of what is pending, so that parameters are of two steps?
        )
        self._undelayed_steps = undelayed_steps
        self._delays = False
        self._taken: dict[Group, tuple[Source, Sequence[Hyper]]] = {}
        self._pages: dict[Group, Page] = {}
        self._keeps: Optimizer | None = None  # it must not go before what is pending is made

    def add(self, parameters: Sequence[torch.Tensor], setting: int) -> None:
        """See :meth:`AdamUpdate.add`. Raises BudgetError where held gradients have no room."""
        super().add(parameters, setting)
        groups = dict.fromkeys(self.hooks.home[id(parameter)][0] for parameter in parameters)
        new = [group for group in groups if group not in self._pages]
        self._require_room(new)
        pager = self.hooks.pager
        for group in new:
            assert group.gradient is not None
            page = pager.table.add(
                group.unit, Kind.GRADIENT, group.dtype, group.numel, sinks=group.gradient.sinks
            )
            with self.hooks.door:
                if pager.transfers.disk is not None and page.sinks:
                    pager.transfers.provide([page])
                self.hooks.trace.record(Event.PAGE, now(), 0, group.unit, page.number, page.nbytes)
            self._pages[group] = page

    def _require_room(self, groups: Sequence[Group]) -> None:
        pager = self.hooks.pager
        stuck = [group.gradient.nbytes for group in groups if group.gradient and not group.gradient.sinks]
        there = sum(page.nbytes for page in pager.table if not page.sinks)
        needed, capacity = there + sum(stuck), pager.host.slab.nbytes
        if stuck and needed > capacity:
            raise BudgetError(
                needed,
                capacity,
                "host",
                None,
                "the gradients that delayed=True holds",
                f"they take {sum(stuck):,} bytes beside {there:,} of pages that may not sink; raise host.budget by "
                f"{needed - capacity:,} bytes, or lower it so that there is a disk tier",
            )

    # -- steps ----------------------------------------------------------------------------------------------

    def step(self, kernel: Kernel, hypers: Sequence[Hyper]) -> None:
        """Make what is left of the last step's update, and take the gradients of this one.

        ``hypers`` are those of this step, whenever its update is made. Raises as :meth:`AdamUpdate.step`.
        """
        self._finish()
        if not self._delays:
            self._runs.settle_all()
            self._delays = max(self.steps.values(), default=0) >= self._undelayed_steps
        if self._delays:
            self._run(lambda unit, group: self._take(unit, group, hypers))
        else:
            super().step(kernel, hypers)

    def settle(self) -> None:
        """Make what is pending, between two steps. Raises PagingError in a forward or backward."""
        if not self._taken:
            self.begun = False
            return
        if self.hooks.running:
            raise PagingError(
                "state_dict(), save(), load(), close() and optimizer.settle() make the update that is pending "
                "(delayed=True), which can't be done in the middle of a forward or backward: call them between steps"
            )
        self._finish()

    def _finish(self) -> None:
        if self._taken:
            self.hooks.release_resident()
            with self._broken_off():
                for unit in self.hooks.units:
                    for group in unit.groups:
                        if group in self._taken:
                            with self.hooks.door.hold():
                                self._make(unit, group)
        self.begun = False
        self._keeps = None

    def early(self, unit: Unit, group: Group, kernel: Kernel, hypers: Sequence[Hyper]) -> None:
        """Make the update that is pending of a group which backward has left.

        Where there is no room for it beside what is open, nothing is changed, and it is left to the step.
        """
        if group not in self._taken:
            return
        with self._broken_off(), self.hooks.door.hold():
            try:
                self._make(unit, group)
            except BudgetError:
                if group not in self._taken:
                    raise
                return
            self.begun = True

    def _make(self, unit: Unit, group: Group) -> None:
        owner: object = self._owned()
        assert isinstance(owner, Owner)
        kernel, _ = owner.with_what()
        # Out first: an update that an error broke off isn't to be made again.
        source, hypers = pending = self._taken.pop(group)
        runs = self._runs.of(group, source.landed)
        before = runs[0].step
        try:
            self._update(unit, group, kernel, hypers, source)
        except BudgetError:
            if runs[0].step == before:
                self._taken[group] = pending
            raise
        self._give_up(source.page)

    # -- gradients ------------------------------------------------------------------------------------------

    def any_landed(self) -> bool:
        """Is there a gradient of these parameters that no step has taken?"""
        homes = (self.hooks.home[identity] for identity in self.settings)
        return any(group.landed[index] for group, index in homes)

    def _take(self, unit: Unit, group: Group, hypers: Sequence[Hyper]) -> None:
        """This step's gradients of a group are the optimizer's from now on: nobody else sees them."""
        mine = bytearray(len(group.fields))
        for index, field in enumerate(group.fields):
            if group.landed[index] and id(field.parameter) in self.settings:
                mine[index], group.landed[index] = 1, 0
        if not any(mine):
            return
        page = group.gradient
        assert page is not None
        self._taken[group] = Source(page, bytes(mine), group.scale, group.unscale), hypers
        self._keeps = self._owned()
        others = any(group.landed)
        if unit.resident or others:
            self._hold(group)  # its page is pinned all through the next backward, or is another's too
        if not others:
            group.scale, group.unscale = None, 1.0

    def keep_from(self, group: Group) -> None:
        """What was taken of a group is not to be written over."""
        taken = self._taken.get(group)
        if taken is not None and taken[0].page is group.gradient:
            self._hold(group)

    def _hold(self, group: Group) -> None:
        """Copy what was taken to a page of its own."""
        hooks, pager = self.hooks, self.hooks.pager
        (source, hypers), held = self._taken[group], self._pages[group]
        unit, gradient = hooks.units[group.unit], source.page
        others = any(group.landed)
        place = sum(len(each.parts) for each in unit.groups) + unit.groups.index(group)
        effects = [Effect.NONE if others else Effect.SPENDS, Effect.WRITES | Effect.FRESH]
        with hooks.door.hold():
            with hooks.door:
                access = Access(unit.number, Phase.OPTIMIZER, place)
                expected = hooks.steps.access(access, [gradient.number, held.number], effects)
                pager.fault([gradient], Phase.OPTIMIZER, unit.number, overwrite=[held], expected=expected)
            done = False
            try:
                assert held.host is not None
                assert gradient.host is not None
                pager.host.bytes_of(held.host).copy_(pager.host.bytes_of(gradient.host))
                done = True
            finally:
                with hooks.door:
                    pager.unpin([gradient])
                    if done:
                        pager.unpin([held], dirty=True)
                    else:
                        pager.abandon(held)
            self._taken[group] = source._replace(page=held), hypers
            if not others:
                self._give_up(gradient)

    def _give_up(self, page: Page) -> None:
        with self.hooks.door:
            self.hooks.pager.room.loans.collect()
            if not page.pins:
                self.hooks.pager.discard(page)

    # -- state ----------------------------------------------------------------------------------------------

    def read(self, parameter: torch.Tensor) -> dict[str, Any]:
        """See :meth:`AdamUpdate.read`; what is pending is made first."""
        self.settle()
        return super().read(parameter)

    def write(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """See :meth:`AdamUpdate.write`; what is pending is made first."""
        self.settle()
        self._delays = False
        super().write(parameter, state)

    def updates_of(self, parameter: torch.Tensor) -> int:
        """See :meth:`AdamUpdate.updates_of`; what is pending is made first."""
        self.settle()
        return super().updates_of(parameter)

    def set_updates(self, parameter: torch.Tensor, count: int) -> None:
        """See :meth:`AdamUpdate.set_updates`."""
        self._delays = False
        super().set_updates(parameter, count)


class Delayed(DuringBackward):
    """What ``Hooks`` tells while the update of the step before is pending."""

    clips = True

    def __init__(self, update: DelayedUpdate) -> None:
        super().__init__(update)
        self._delayed = update

    def begin_forward(self) -> None:
        """Refuse a forward with parameters of two steps; make what a skipped step left."""
        if not self._delayed.begun:
            return
        if self._delayed.any_landed():
            raise PagingError(
                "a forward after a backward, with no step() in between: with delayed=True that backward has made the "
                "update of the step before, so this one would compute with other parameters. Be in model.no_sync() for "
                "all micro-batches but the last; after a backward that failed, call zero_grad()"
            )
        self._delayed.settle()

    def settle(self) -> None:
        """Make what is pending."""
        self._delayed.settle()

    def enter(self, unit: Unit) -> None:
        """Before the unit takes room for its backward, what was taken of it finds its own."""
        for group in unit.groups:
            self._delayed.keep_from(group)

    def landing(self, group: Group) -> None:
        """The same for what no unit's backward was entered for."""
        self._delayed.keep_from(group)


def require_delayable(hooks: Hooks) -> None:
    """Raise ValueError for a model whose updates can't be a step late."""
    if hooks.commits is not None:
        raise ValueError(
            "delayed=True: a commit has what steps have made, and these are made a step later: leave it out, or "
            'set durability.mode = "off" (model.save makes what is pending first)'
        )
    tiled = next(iter(hooks.tiled.values()), None)
    if tiled is not None:
        raise ValueError(
            f"delayed=True: {tiled.name} is in {len(tiled.tiles)} tiles, whose gradients are added up in their pages, "
            "and can't be held there: raise host.budget so that it fits in one piece, or leave it out"
        )
