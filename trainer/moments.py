"""Moments in pages: Adam over the pages of a wrapped model, part by part, while the disk reads and writes.

While the kernel works on one part, the parts ahead are read and those behind are written. The parameter page of a unit
is not read when all of it will be written (its master weights hold what is needed), and a gradient page is *spent* once
it has been used: if its frame is wanted it is dropped, and not written.

A parameter page that was to be overwritten, by an update that an error broke off, keeps what it was until the next
update writes it from the masters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter_ns as now
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer

from tiermem.errors import BudgetError
from tiermem.hooks import Hooks
from tiermem.page import Kind, Page
from tiermem.policies import Access, Effect, Phase
from tiermem.trace import Event, Tier
from tiermem.trainer.committed import resume, state_of
from tiermem.trainer.kernel import Hyper, Kernel
from tiermem.trainer.runs import Run, Runs
from tiermem.trainer.update import Update
from tiermem.unit import Group, Part, Unit

KINDS = {"exp_avg": Kind.EXP_AVG, "exp_avg_sq": Kind.EXP_AVG_SQ, "master": Kind.MASTER}


class Source(NamedTuple):
    """Where an update reads a group's gradients: ``landed`` says of which fields they are in the page.

    They are multiplied by ``scale`` and, in float32, by ``unscale`` when they are read.
    """

    page: Page
    landed: bytes
    scale: torch.Tensor | None
    unscale: float


class AdamUpdate(Update):
    """What an Adam keeps of one wrapped model: which settings each field has, and how often it was updated."""

    def __init__(self, hooks: Hooks, owner: Optimizer) -> None:
        super().__init__(hooks, owner)
        self.steps: dict[int, int] = {}  # id of a parameter -> updates it has had
        self._runs = Runs(hooks.units, self.settings, self.steps)

    def add(self, parameters: Sequence[torch.Tensor], setting: int) -> None:
        """These parameters are updated with the settings of parameter group number ``setting``.

        Raises BudgetError when the disk has no room for their state.
        """
        super().add(parameters, setting)
        groups = dict.fromkeys(self.hooks.home[id(parameter)][0] for parameter in parameters)
        for parameter in parameters:
            self.steps.setdefault(id(parameter), 0)
        self._runs.clear()
        transfers = self.hooks.pager.transfers
        if transfers.disk is not None:
            with self.hooks.door:
                transfers.provide(page for group in groups for part in group.parts for page in part.pages)
        if self.hooks.commits is not None:
            self.hooks.commits.join(self)

    beside: tuple[str, ...] = ()
    """What a parameter's state has in pages beside moments and masters: names in ``Group.states``."""

    def settle(self) -> None:
        """Make parameters and state what they are after the last step, for whoever takes them: they are."""

    def step(self, kernel: Kernel, hypers: Sequence[Hyper]) -> None:
        """Update every parameter that has a gradient; ``hypers`` are the parameter groups' settings.

        Raises TransferError, naming the page, when the disk fails; see the module about what is updated then.
        """
        self._run(lambda unit, group: self._update(unit, group, kernel, hypers))

    def early(self, unit: Unit, group: Group, kernel: Kernel, hypers: Sequence[Hyper]) -> None:
        """Update a group whose gradients are complete before the step, and give them up; raises what :meth:`step` does.

        Where there is no room for it beside what is open, nothing is changed, and it is left to the step.
        """
        runs = self._runs.of(group, bytes(group.landed))
        if not runs:
            return
        self._begin()
        count = runs[0].step
        with self._broken_off(), self.hooks.door.hold():
            try:
                self._update(unit, group, kernel, hypers)
            except BudgetError:
                if runs[0].step == count:
                    return
                raise
            self.early_groups.add(group)
            if group.spends(()):
                with self.hooks.door:
                    gradient = group.summed
                    self.hooks.pager.discard(gradient)
                    gradient.spent = True

    def _update(
        self,
        unit: Unit,
        group: Group,
        kernel: Kernel,
        hypers: Sequence[Hyper],
        taken: Source | None = None,
    ) -> None:
        """Update a group from its gradients, or from those that a step has ``taken`` of it."""
        source = taken or Source(group.summed, bytes(group.landed), group.scale, group.unscale)
        runs = self._runs.of(group, source.landed)
        if not runs:
            return
        number = sum(len(each.parts) for each in unit.groups[: unit.groups.index(group)])
        hooks, pager = self.hooks, self.hooks.pager
        gradient, parameter = source.page, group.updated
        whole = (
            group.dtype is not torch.float32
            and sum(len(run.fields) for run in runs) == len(group.fields)
            and not group.stale
            and not any(part.master.blank for part in group.parts if part.master is not None)
        )
        shared = [gradient] if whole else [gradient, parameter]
        fields = {index for run in runs for index in run.fields}
        spends = taken is not None or group.spends(fields)
        pager.announce([parameter, *(page for part in group.parts for page in part.pages)])
        begun = False
        done = False
        try:
            for index, part in enumerate(group.parts):
                spans = [
                    (low, high, run)
                    for run in runs
                    if (low := max(run.start, part.start)) < (high := min(run.stop, part.stop))
                ]
                if not spans:
                    continue
                pages = part.pages if begun else [*part.pages, *shared]
                last = index == len(group.parts) - 1
                hooks.door.checkpoint()
                with hooks.door:
                    access = Access(unit.number, Phase.OPTIMIZER, number + index)
                    expected = hooks.steps.access(
                        access,
                        [page.number for page in (*part.pages, gradient, parameter)],
                        [Effect.WRITES] * len(part.pages)
                        + [Effect.SPENDS if last and spends else Effect.NONE]
                        + [Effect.WRITES | Effect.FRESH if whole and not begun else Effect.WRITES],
                    )
                    overwrite = [parameter] if whole and not begun else []
                    pager.fault(pages, Phase.OPTIMIZER, unit.number, overwrite=overwrite, expected=expected)
                    if not begun:
                        for run in runs:
                            run.step += 1
                    begun = True
                    pager.pump()
                try:
                    start = now()
                    self._renew_masters(group, part)
                    for low, high, run in spans:
                        self._call(kernel, group, source, part, low, high, run, hypers[run.setting])
                    nbytes = sum(page.nbytes for page in part.pages) * 2
                    hooks.trace.record(
                        Event.OPTIMIZER, start, now() - start, unit.number, parameter.number, nbytes,
                        Tier.NONE, Tier.NONE, 0, Phase.OPTIMIZER,
                    )  # fmt: skip
                finally:
                    with hooks.door:
                        pager.unpin(part.pages, dirty=True)
                        self._send(part.pages)
            if not begun:  # all of it is in other ranks' slices
                for run in runs:
                    run.step += 1
            done = True
        finally:
            if begun:
                with hooks.door:
                    pager.unpin([gradient])
                    if done or not whole:
                        pager.unpin([parameter], dirty=True)
                    else:
                        pager.abandon(parameter)
                    parameter.version += 1
                    gradient.spent = done and spends
        if taken is None:
            group.use(fields)
        group.stale.clear()
        hooks.reduction.updated(group)
        with hooks.door:
            gradient.spent = spends  # where this rank's slice is empty, too
            self._send([parameter])

    def _call(
        self,
        kernel: Kernel,
        group: Group,
        source: Source,
        part: Part,
        low: int,
        high: int,
        run: Run,
        hyper: Hyper,
    ) -> None:
        size = group.dtype.itemsize
        inside = (low - part.start) * 4
        parameter, gradient = group.updated, source.page
        kernel.update(
            parameter=self._address(parameter) + (low - group.first_of(parameter)) * size,
            parameter_dtype=group.dtype,
            gradient=self._address(gradient) + (low - group.first_of(gradient)) * size,
            gradient_dtype=group.dtype,
            master=self._address(part.master) + inside if part.master is not None else 0,
            exp_avg=self._address(part.exp_avg) + inside,
            exp_avg_sq=self._address(part.exp_avg_sq) + inside,
            count=high - low,
            hyper=hyper,
            step=run.step,
            grad_scale=(1.0 if source.scale is None else float(source.scale)) * source.unscale,
            exact=source.unscale != 1.0,
        )

    def _address(self, page: Page) -> int:
        assert page.host is not None
        return self.hooks.pager.host.address_of(page.host)

    def _renew_masters(self, group: Group, part: Part) -> None:
        """Master weights begin as the parameter, and follow it where a user has written it since.

        An element whose master still rounds to the parameter keeps the digits that rounding hides; see
        ``trainer.adam``, Note: whose value counts.
        """
        page = part.master
        if page is None or not (page.blank or group.stale):
            return
        indices = range(len(group.fields)) if page.blank else group.stale
        for index in indices:
            for values, master in self._pieces(group, part, index, Kind.MASTER):
                if page.blank:
                    master.copy_(values)
                else:
                    torch.where(master.to(group.dtype) == values, master, values.float(), out=master)

    def _pieces(
        self, group: Group, part: Part, index: int, kind: Kind
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The elements of one field that lie in one part: of the parameter page and of a page of state, flat."""
        field = group.fields[index]
        low, high = max(field.offset, part.start), min(field.offset + field.numel, part.stop)
        if low >= high:
            return
        host = self.hooks.pager.host
        page = {Kind.MASTER: part.master, Kind.EXP_AVG: part.exp_avg, Kind.EXP_AVG_SQ: part.exp_avg_sq}[kind]
        assert page is not None
        assert page.host is not None
        size = (high - low,)
        values = torch.empty(0)
        if kind is Kind.MASTER and group.updated.host is not None:
            start = low - group.first_of(group.updated)
            values = host.view(group.updated.host, group.dtype, start, size, (1,))
        yield values, host.view(page.host, torch.float32, low - part.start, size, (1,))

    def updates_of(self, parameter: torch.Tensor) -> int:
        """How many updates a parameter has had."""
        self._runs.settle_all()
        return self.steps[id(parameter)]

    def set_updates(self, parameter: torch.Tensor, count: int) -> None:
        """Say how many updates the state in a parameter's pages has had."""
        self._runs.settle_all()
        self.steps[id(parameter)] = count

    # -- state, as commits have it --------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Settings and counts, see :mod:`tiermem.trainer.committed`."""
        self._runs.settle_all()
        return state_of(self._owned(), self.names(), self.steps)

    def resume(self, states: Sequence[dict[str, Any]]) -> None:
        """Take over what :meth:`state` gave. Raises ConfigError when parameters are grouped otherwise."""
        self._runs.clear()
        resume(self._owned(), self.names(), self.steps, states)

    # -- state, as state_dict has it ------------------------------------------------------------------------

    def reader(self) -> Callable[[torch.Tensor], dict[str, Any]]:
        """See :meth:`read`."""
        return self.read

    def read(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The state of one parameter as tensors of their own: step, exp_avg, exp_avg_sq, and master where it has one.

        Empty before its first update. Shapes and strides are the parameter's, dtypes float32.
        """
        self._runs.settle_all()
        self.hooks.release_resident()
        step = self.steps[id(parameter)]
        if step == 0:
            return {}
        state: dict[str, Any] = {"step": torch.tensor(float(step))}
        group, index = self.hooks.home[id(parameter)]
        field = group.fields[index]
        for name, kind in KINDS.items():
            if kind is Kind.MASTER and group.dtype is torch.float32:
                continue
            whole = torch.empty_strided(field.size, field.stride, dtype=torch.float32)
            with self.hooks.door.hold():
                self._visit(group, index, kind, whole, lambda page, own: own.copy_(page), dirty=False)
            self.hooks.reduction.complete(group, index, whole)
            state[name] = whole
        return state

    def write(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Take over the state of one parameter from what :meth:`read` or an unpaged optimizer gave."""
        self._runs.settle_all()
        self.hooks.release_resident()
        group, index = self.hooks.home[id(parameter)]
        field = group.fields[index]
        known, self.steps[id(parameter)] = self.steps[id(parameter)], int(state.get("step", 0))
        for name, kind in KINDS.items():
            if kind is Kind.MASTER and group.dtype is torch.float32:
                continue
            value = state.get(name)
            if value is None:
                if kind is Kind.MASTER:
                    group.stale.add(index)
                if kind is Kind.MASTER or not known:
                    continue
                value = torch.zeros(()).expand(field.size)  # its moments begin anew
            if tuple(value.shape) != field.size:
                raise ValueError(
                    f"{name} of {field.name} has shape {list(value.shape)}, not {list(field.size)}"
                )
            whole = torch.empty_strided(field.size, field.stride, dtype=torch.float32).copy_(value)
            with self.hooks.door.hold():
                self._visit(group, index, kind, whole, lambda page, own: page.copy_(own), dirty=True)
        if state.get("master") is not None:
            group.stale.add(index)  # the parameter may have been loaded too: whichever it is, they must agree

    def _visit(
        self,
        group: Group,
        index: int,
        kind: Kind,
        whole: torch.Tensor,
        move: Callable[[torch.Tensor, torch.Tensor], Any],
        *,
        dirty: bool,
    ) -> None:
        """``move`` between one field's pieces in pages of state and the same elements of ``whole``."""
        flat = whole.as_strided((whole.numel(),), (1,))
        field = group.fields[index]
        if dirty:
            self.hooks.pager.announce([page for part in group.parts for page in part.pages])
        for part in group.parts:
            low, high = max(field.offset, part.start), min(field.offset + field.numel, part.stop)
            if low >= high:
                continue
            page = {Kind.MASTER: part.master, Kind.EXP_AVG: part.exp_avg, Kind.EXP_AVG_SQ: part.exp_avg_sq}[
                kind
            ]
            assert page is not None
            pager = self.hooks.pager
            blank_master = kind is Kind.MASTER and page.blank
            pages = [page, group.updated] if blank_master else [page]
            with self.hooks.door:
                pager.fault(pages, Phase.OPTIMIZER, group.unit)
            try:
                if blank_master:
                    self._renew_masters(group, part)
                for _, piece in self._pieces(group, part, index, kind):
                    move(piece, flat[low - field.offset : high - field.offset])
            finally:
                with self.hooks.door:
                    pager.unpin([page], dirty=dirty or blank_master)
                    pager.unpin(pages[1:])
