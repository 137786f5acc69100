"""Updates from momenta that ranks exchange as signs: what 1-bit Adam makes of a wrapped model's pages.

A part at a time: its moments, its errors and what is exchanged of it are in pages that are pinned together, so all of
it is within the budget. Every rank makes the same update of all parameters, from the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns as now
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from tiermem.errors import BudgetError, PagingError, RanksError
from tiermem.hooks import Hooks
from tiermem.page import Kind, Page
from tiermem.policies import Access, Effect, Phase
from tiermem.ranks import Ranks, Request, Term
from tiermem.trace import Event, Reason, Tier
from tiermem.trainer.kernel import Hyper, Kernel
from tiermem.trainer.moments import AdamUpdate
from tiermem.trainer.momentum import (
    Piece,
    Tensors,
    active_of,
    add_momentum,
    add_up,
    shifted,
    take_over,
    update,
)
from tiermem.trainer.signs import Layout, pack
from tiermem.unit import Group, Part, Stretch, Unit

ERROR = "error"
"""The name of errors in a parameter's state."""


class CompressedUpdate(AdamUpdate):
    """What 1-bit Adam keeps of one wrapped model: an Adam's, and a page of errors for each part."""

    beside = (ERROR,)

    def __init__(self, hooks: Hooks, owner: Optimizer, warmup_steps: int) -> None:
        super().__init__(hooks, owner)
        self._warmup_steps = warmup_steps
        self._pages: dict[Page, Page] = {}  # of a part's exp_avg -> of its errors
        self._folds = 0

    @property
    def _ranks(self) -> Ranks:
        ranks = self.hooks.reduction.ranks
        assert ranks is not None
        return ranks

    @property
    def _frozen(self) -> bool:
        return self.hooks.reduction.local is self

    def add(self, parameters: Sequence[torch.Tensor], setting: int) -> None:
        """See :meth:`AdamUpdate.add`. Raises BudgetError where errors have no room."""
        super().add(parameters, setting)
        pager, world = self.hooks.pager, self._ranks.world
        for group in dict.fromkeys(self.hooks.home[id(parameter)][0] for parameter in parameters):
            if ERROR in group.states:
                continue
            stretches = group.states[ERROR] = []
            for part in group.parts:
                numel = Layout(part.stop - part.start, world).page_numel
                page = pager.table.add(group.unit, Kind.STATE, torch.float32, numel, sinks=part.exp_avg.sinks)
                with self.hooks.door:
                    if pager.transfers.disk is not None:
                        pager.transfers.provide([page])
                    self.hooks.trace.record(Event.PAGE, now(), 0, group.unit, page.number, page.nbytes)
                self._pages[part.exp_avg] = page
                stretches.append(Stretch(page, part.start, part.stop))
        self._require_room()

    def _require_room(self) -> None:
        pager = self.hooks.pager
        capacity = pager.host.slab.nbytes
        stuck = sum(page.nbytes for page in pager.table if not page.sinks)
        largest = 0
        for unit in self.hooks.units:
            for group in unit.groups:
                for part in group.parts if group.gradient is not None else ():
                    pages = [*part.pages, self._pages.get(part.exp_avg), group.updated, group.summed]
                    largest = max(largest, sum(page.nbytes for page in pages if page and page.sinks))
        if stuck + largest > capacity:
            raise BudgetError(
                stuck + largest,
                capacity,
                "host",
                None,
                "the errors of OneBitAdam",
                f"the update of a part needs {largest:,} bytes at one time beside {stuck:,} that may not sink; raise "
                f"host.budget by {stuck + largest - capacity:,} bytes, or, where the model fits it without errors, "
                "lower it so that there is a disk tier",
            )

    # -- the step -------------------------------------------------------------------------------------------

    def step(self, kernel: Kernel, hypers: Sequence[Hyper]) -> None:
        """An Adam step in the warm-up; then one from signs. All ranks must call it.

        Raises as :meth:`AdamUpdate.step`, and PagingError where another optimizer has parameters of the model.
        """
        if self._frozen:
            self._run(lambda unit, group: self._exchange(unit, group, hypers))
        else:
            super().step(kernel, hypers)
            self._look()

    def _look(self) -> None:
        """From the end of the warm-up on, gradients stay where they are."""
        self._runs.settle_all()
        frozen = max(self.steps.values(), default=0) >= self._warmup_steps
        self.hooks.reduction.local = self if frozen else None

    def _exchange(self, unit: Unit, group: Group, hypers: Sequence[Hyper]) -> None:
        others = [
            field.name
            for index, field in enumerate(group.fields)
            if group.landed[index] and id(field.parameter) not in self.settings
        ]
        if others:
            raise PagingError(
                f"{others[0]} has a gradient and isn't one of this OneBitAdam's parameters: after its warm-up nobody "
                "else gets the mean of the ranks' gradients; give it all parameters that are trained"
            )
        runs = self._runs.of(group, bytes(group.landed))
        hooks, pager = self.hooks, self.hooks.pager
        number = sum(len(each.parts) for each in unit.groups[: unit.groups.index(group)])
        gradient, parameter = group.summed, group.updated
        pager.announce([parameter, *group.state_pages])
        begun = done = False
        try:
            for index, part in enumerate(group.parts):
                pieces = [
                    Piece(low - part.start, high - part.start, run, hypers[run.setting])
                    for run in runs
                    if (low := max(run.start, part.start)) < (high := min(run.stop, part.stop))
                ]
                if not pieces:
                    continue
                error = self._pages[part.exp_avg]
                written = [page for page in (*part.pages, error) if page is not part.exp_avg_sq]
                pages = [*written, part.exp_avg_sq]
                shared = [] if begun else [gradient, parameter]
                spent = Effect.SPENDS if part is group.parts[-1] else Effect.NONE
                hooks.door.checkpoint()
                with hooks.door:
                    expected = hooks.steps.access(
                        Access(unit.number, Phase.OPTIMIZER, number + index),
                        [page.number for page in (*pages, gradient, parameter)],
                        [Effect.WRITES] * len(written) + [Effect.NONE, spent, Effect.WRITES],
                    )
                    pager.fault([*pages, *shared], Phase.OPTIMIZER, unit.number, expected=expected)
                    if not begun:
                        for run in runs:
                            run.step += 1
                    begun = True
                    pager.pump()
                try:
                    start = now()
                    self._renew_masters(group, part)
                    self._exchange_part(group, part, pieces, error)
                    nbytes = sum(page.nbytes for page in pages) * 2
                    hooks.trace.record(
                        Event.OPTIMIZER, start, now() - start, unit.number, parameter.number, nbytes,
                        Tier.NONE, Tier.NONE, 0, Phase.OPTIMIZER,
                    )  # fmt: skip
                finally:
                    with hooks.door:
                        pager.unpin(written, dirty=True)
                        pager.unpin([part.exp_avg_sq])
            done = True
        finally:
            if begun:
                with hooks.door:
                    pager.unpin([gradient])
                    pager.unpin([parameter], dirty=True)
                    parameter.version += 1
                    gradient.spent = done
        group.use({index for run in runs for index in run.fields})
        group.stale.clear()

    def _exchange_part(self, group: Group, part: Part, pieces: Sequence[Piece], error: Page) -> None:
        ranks = self._ranks
        layout = Layout(part.stop - part.start, ranks.world)
        space = layout.space(self._floats(error))
        tensors = self._tensors(group, part)
        active = active_of(tensors.exp_avg_sq, pieces)
        factor = (1.0 if group.scale is None else float(group.scale)) * group.unscale
        for piece in pieces:
            add_momentum(tensors, space.worker, piece, active, factor)
        for rank in range(ranks.world):
            low, high = layout.edges(rank)
            pack(space.worker[low:high], shifted(active, low), space.outgoing[rank])
        request = ranks.scatter("signs", space.outgoing, space.incoming)
        self._wait(error, Reason.REDUCE, request)
        low, high = layout.edges(ranks.rank)
        add_up(space, high - low, shifted(active, low))
        pack(space.server[: high - low], shifted(active, low), space.shared[ranks.rank])
        own = ranks.rank * layout.row, (ranks.rank + 1) * layout.row
        request = ranks.share("signs of all", space.shared.view(-1), own)
        self._wait(error, Reason.GATHER, request)
        for rank in range(ranks.world):
            low, high = layout.edges(rank)
            take_over(tensors.exp_avg[low:high], space.shared[rank], shifted(active, low))
        for piece in pieces:
            update(tensors, piece, active, self._warmup_steps)

    def _wait(self, page: Page, what: Reason, request: Request) -> None:
        self._ranks.wait(request, "optimizer.step()")
        with self.hooks.door:
            self.hooks.pager.transfers.log.collective(page, what, request)

    def _tensors(self, group: Group, part: Part) -> Tensors:
        host = self.hooks.pager.host

        def view(page: Page, first: int) -> torch.Tensor:
            assert page.host is not None
            return host.view(page.host, page.dtype, part.start - first, (part.stop - part.start,), (1,))

        parameter = view(group.updated, group.first_of(group.updated))
        return Tensors(
            parameter,
            view(group.summed, group.first_of(group.summed)),
            parameter if part.master is None else view(part.master, part.start),
            view(part.exp_avg, part.start),
            view(part.exp_avg_sq, part.start),
        )

    def _floats(self, page: Page) -> torch.Tensor:
        assert page.host is not None
        return self.hooks.pager.host.bytes_of(page.host).view(torch.float32)

    # -- errors, as state_dict and checkpoints have them ------------------------------------------------------

    def settle(self) -> None:
        """Make errors the same on all ranks: their mean, with those of the sums. All must call it.

        What the ranks add up to next is what it would have been.
        """
        ranks, hooks = self._ranks, self.hooks
        hooks.release_resident()
        for group, part, page in self._errors():
            layout = Layout(part.stop - part.start, ranks.world)
            own = ranks.rank * layout.size, (ranks.rank + 1) * layout.size
            with hooks.door.hold():
                with hooks.door:
                    hooks.pager.fault([page], Phase.OPTIMIZER, group.unit)
                try:
                    space = layout.space(self._floats(page))
                    self._folds += 1
                    # No page of gradients has such a key.
                    request = ranks.reduce(
                        -1, self._folds, Term(space.worker, space.worker[slice(*own)], True)
                    )
                    ranks.wait(request, "the optimizer's errors")
                    if request.returned:
                        raise RanksError("not all ranks ask for the optimizer's state: all of them must")
                    space.worker[slice(*own)].add_(space.server)
                    ranks.wait(ranks.share("errors", space.worker, own), "the optimizer's errors")
                    space.server.zero_()
                finally:
                    with hooks.door:
                        hooks.pager.unpin([page], dirty=True)

    def _errors(self) -> list[tuple[Group, Part, Page]]:
        """The pages with errors in them; the same ones on all ranks."""
        groups = [group for unit in self.hooks.units for group in unit.groups]
        pages = [(group, part, self._pages.get(part.exp_avg)) for group in groups for part in group.parts]
        return [(group, part, page) for group, part, page in pages if page is not None and not page.blank]

    def _has_errors(self, group: Group) -> bool:
        return any(not self._pages[part.exp_avg].blank for part in group.parts)

    def reader(self) -> Callable[[torch.Tensor], dict[str, Any]]:
        """See :meth:`Update.reader`; all ranks must ask."""
        self.settle()
        return self.read

    def read(self, parameter: torch.Tensor) -> dict[str, Any]:
        """See :meth:`AdamUpdate.read`; with ``error`` after the warm-up, as :meth:`settle` left it."""
        state = super().read(parameter)
        group, index = self.hooks.home[id(parameter)]
        if state and self._has_errors(group):
            field = group.fields[index]
            whole = torch.zeros(field.numel)
            self._visit_errors(group, index, lambda own, low, high: whole[low:high].copy_(own), dirty=False)
            state[ERROR] = whole.as_strided(field.size, field.stride)
        return state

    def write(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """See :meth:`AdamUpdate.write`; without ``error``, there is none."""
        super().write(parameter, state)
        group, index = self.hooks.home[id(parameter)]
        field = group.fields[index]
        error = state.get(ERROR)
        flat = torch.zeros(field.numel)
        if error is not None:
            dense = torch.empty_strided(field.size, field.stride, dtype=torch.float32).copy_(error)
            flat = dense.as_strided((field.numel,), (1,))
        if error is not None or self._has_errors(group):
            self._visit_errors(group, index, lambda own, low, high: own.copy_(flat[low:high]), dirty=True)
        self._look()

    def set_updates(self, parameter: torch.Tensor, count: int) -> None:
        """See :meth:`AdamUpdate.set_updates`; somebody else writes the errors of all ranks."""
        super().set_updates(parameter, count)
        group, index = self.hooks.home[id(parameter)]
        if self._has_errors(group):
            self._visit_errors(group, index, lambda own, low, high: None, dirty=True)
        self._look()

    def _visit_errors(
        self, group: Group, index: int, move: Callable[[torch.Tensor, int, int], Any], *, dirty: bool
    ) -> None:
        """``move`` is given one field's errors in each page, and which of its elements these are.

        Where it is to change them (``dirty``), there are none of the sums any more.
        """
        field, pager = group.fields[index], self.hooks.pager
        for part in group.parts:
            low, high = max(field.offset, part.start), min(field.offset + field.numel, part.stop)
            page = self._pages[part.exp_avg]
            if low >= high:
                continue
            with self.hooks.door.hold():
                with self.hooks.door:
                    pager.fault([page], Phase.OPTIMIZER, group.unit)
                try:
                    layout = Layout(part.stop - part.start, self._ranks.world)
                    space = layout.space(self._floats(page))
                    if dirty:
                        space.server.zero_()
                    move(
                        space.worker[low - part.start : high - part.start],
                        low - field.offset,
                        high - field.offset,
                    )
                finally:
                    with self.hooks.door:
                        pager.unpin([page], dirty=dirty)
