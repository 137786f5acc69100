"""Hooks: what a wrapped model's forward and backward ask of the pager, and when.

Forward hooks enter and leave units. In backward, a unit is entered when autograd reaches the node that made its output,
and left when autograd reaches the node that made its input, or enters another unit. Gradients land as they are
produced. What escapes the hooks is caught by :mod:`tiermem.views`.
"""

from __future__ import annotations

import sys
from collections import ChainMap
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from time import perf_counter_ns as now
from types import FrameType
from typing import Any

import torch
from torch import nn

from tiermem.calls import Calls, Entry, Pass, Stack
from tiermem.commits import Commits
from tiermem.door import Door
from tiermem.eager import eager
from tiermem.errors import PagingError
from tiermem.gradients import Gradients
from tiermem.guard import Guard
from tiermem.page import Page
from tiermem.pager import Pager
from tiermem.parameter import disown, own
from tiermem.partition import ALONE, Partition
from tiermem.policies import Access, Phase
from tiermem.reduction import Reduction
from tiermem.steps import Steps
from tiermem.tiling import Tiled
from tiermem.trace import Event
from tiermem.unit import Group, Unit
from tiermem.updater import Updater
from tiermem.uses import Uses
from tiermem.views import Views, tensors_in

_CALL_FILE = nn.Module.__call__.__code__.co_filename


class Hooks:
    """The hooks of one wrapped model, from :meth:`attach` to :meth:`detach`; the owner of its parameters."""

    def __init__(
        self,
        net: nn.Module,
        units: Sequence[Unit],
        pager: Pager,
        steps: Steps,
        door: Door,
        partition: Partition = ALONE,
    ) -> None:
        self.net = net
        self.units = units
        self.pager = pager
        self.steps = steps
        self.door = door
        self.trace = pager.transfers.log.trace
        self.commits: Commits | None = None  # where the run is durable
        self.updater: Updater | None = None  # of an optimizer that doesn't wait for its step
        self.home: dict[int, tuple[Group, int]] = {}
        for unit in units:
            for group in unit.groups:
                self.home.update((id(field.parameter), (group, i)) for i, field in enumerate(group.fields))
        self.views = Views(pager, door, self.home, self)
        self.reduction = Reduction(units, pager, door, partition)
        self.tiled: dict[int, Tiled] = {}  # by the id of a parameter that is in tiles
        self.gradients = Gradients(units, pager, door, self.views, self.reduction, self.tiled)
        self._handles: list[Any] = []
        self._calls = Calls()  # forwards that run
        pager.room.relieve = self._relieve
        self._guard = Guard(net, ChainMap[int, Any](self.home, self.tiled))
        self._open: list[tuple[Unit, list[Page], int]] = []  # backward: the same, with the pages pinned
        self._in_backward = False
        self._resident_pages: list[Page] = []  # pinned while the resident unit is held
        self._enters = {unit.number: partial(self._enter_backward, unit) for unit in units}
        self._leaves = {unit.number: partial(self._leave_backward, unit) for unit in units}
        self._backward_pages = {unit.number: unit.pages + unit.gradient_pages for unit in units}
        self._uses = Uses(units, partition)

    # -- life ---------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Register all hooks, and take the parameters over. They must have been adopted into pages."""
        keep = self._handles.append
        keep(self.net.register_forward_pre_hook(self._before_pass, prepend=True))
        keep(self.net.register_forward_hook(self._after_pass, always_call=True))
        for unit in self.units[1:]:
            before, after = partial(self._before_forward, unit), partial(self._after_forward, unit)
            keep(unit.module.register_forward_pre_hook(before, prepend=True))
            keep(unit.module.register_forward_hook(after, with_kwargs=True, always_call=True))
        for unit in self.units:
            for group in unit.groups:
                for index, field in enumerate(group.fields):
                    if group.trainable:
                        register: Any = field.parameter.register_post_accumulate_grad_hook
                        keep(register(partial(self._landed, group, index)))
                    own(field.parameter, self)
        self._guard.attach()

    def keep(self, handle: Any) -> None:
        """Have something else removed with the hooks, by its ``remove()``."""
        self._handles.append(handle)

    def detach(self) -> None:
        """Remove all hooks and pins; parameters are ordinary again, and still look into frames."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._guard.detach()
        self.unwind()
        self.release_resident()
        for group, index in self.home.values():
            disown(group.fields[index].parameter)
        for tiled in self.tiled.values():
            disown(tiled.parameter)
        self.views.closed = True

    def unwind(self) -> None:
        """Leave every unit that was entered and not left, whoever runs."""
        with self.door:
            self.abort_pass()
            self._end_backward()

    def _leave_broken(self) -> None:
        """Leave what was entered and will not be left, because an error or Ctrl-C broke it off. Under the door.

        Python calls no forward hook for a KeyboardInterrupt, and no hook of backward's for any error; so this is for
        whoever comes next. A forward whose call is still on a stack is one around the caller, or another thread's.
        """
        if torch._C._current_graph_task_id() == -1:  # not in a backward
            self._close_backward()
            self._in_backward = False
        mine = self._calls.mine
        left, mine.saving = mine.saving, []
        self._leave_dead(mine, left)
        self.views.stop_saving(left)
        for other in self._calls.others():
            self._leave_dead(other, other.saving)

    def _leave_dead(self, stack: Stack, left: list[Any]) -> None:
        """Leave a thread's forwards whose calls are over; adds what ``Views.stop_saving`` is to be told there."""
        while (last := stack.last) is not None and not last.runs:
            if isinstance(last, Entry):
                left.append(self._leave_forward(stack))
            else:
                left += self._end_pass(stack)

    @property
    def running(self) -> bool:
        """Is a forward of the whole model, or a backward, under way in this thread?"""
        return bool(self._calls.mine.passes) or torch._C._current_graph_task_id() != -1

    def settle(self) -> None:
        """Have updates made that are pending: parameters and state are those after the last step."""
        if self.updater is not None:
            self.updater.settle()

    def begin_copying(self, *_: Any) -> None:
        """A ``state_dict`` call begins: what it takes of parameters is copied."""
        if not self.views.copying:
            self.settle()
        self.views.copying += 1

    def end_copying(self, *_: Any) -> None:
        """It is over."""
        self.views.copying -= 1
        if not self.views.copying:
            self.views.copies.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> Hooks:
        raise PagingError(
            "a module that is paged can't be copied: copy it before wrapping, or use state_dict()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PagingError(
            "a module that is paged can't be pickled: save its state_dict(), or close() it first"
        )

    # -- the whole model ----------------------------------------------------------------------------------

    @eager
    def _before_pass(self, module: nn.Module, args: Any) -> None:
        self._begin_forward(_caller())

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Within it, what is computed is a forward of the whole model, though nobody calls that."""
        self._begin_forward(sys._getframe(2))  # whose frame has the context
        try:
            yield
        finally:
            with self.door:
                stack = self._calls.mine
                if stack.passes:
                    self.views.stop_saving(self._end_pass(stack))

    def _begin_forward(self, caller: FrameType) -> None:
        self.views.check_transforms()
        training = torch.is_grad_enabled()
        if training and not self._calls.mine.passes:
            self._begin_step()
        while not self._begin_pass(training, caller):
            self._calls.wait()  # one thread's forward at a time: the budget is for one, and so is the schedule

    def _begin_step(self) -> None:
        """Outside of the door: what may take long, or wait for hours."""
        if self.updater is not None and not self.running:
            self.updater.begin_forward()
        if self.commits is not None:
            self.commits.begin_forward()
        disk = self.pager.transfers.disk
        if disk is not None and disk.quota is not None:
            disk.quota.wait()

    def _begin_pass(self, training: bool, caller: FrameType) -> bool:
        """False where another thread's forward of the whole model runs."""
        with self.door:
            self._leave_broken()
            if self._calls.taken:
                return False
            stack = self._calls.mine
            if not stack.passes:
                self.steps.begin_pass(training)
                if self.views.activations is not None:
                    self.views.activations.exempt(self.net.buffers())
            stack.passes.append(Pass(training, len(stack.entered), self.views, caller))
            self.hold_resident(training)
            stack.passes[-1].begin(self.units[0].uses)
            self.pager.pump()
            return True

    @eager
    def _after_pass(self, module: nn.Module, args: Any, output: Any) -> Any:
        with self.door:
            stack = self._calls.mine
            if stack.passes:
                output = self.views.keep(output)
                self.views.stop_saving(self._end_pass(stack))
        return output

    def _end_pass(self, stack: Stack) -> list[Any]:
        """Returns what :meth:`Views.stop_saving` is to be told."""
        ended = stack.passes.pop()
        left = []
        while len(stack.entered) > ended.depth:
            left.append(self._leave_forward(stack))
        left.append(ended.end())
        if not stack.passes:
            self.steps.end_pass(ended.training)
            self._calls.passed()
        return left

    def abort_pass(self) -> None:
        """End this thread's forwards that run, after an exception that no hook was called for."""
        with self.door:
            stack = self._calls.mine
            left = []
            while stack.passes:
                left += self._end_pass(stack)
            self.views.stop_saving(left)

    def hold_resident(self, training: bool) -> None:
        """Pin the resident unit's pages until :meth:`release_resident`."""
        # Where gradients go to other ranks as soon as backward is over, theirs aren't held from one to the next.
        held = training and not self.reduction.partition.shards_gradients
        wanted = self._backward_pages[0] if held else self.units[0].pages
        missing = [page for page in wanted if page not in self._resident_pages]
        if missing:
            self.pager.fault(missing, Phase.FORWARD, 0)
            self._resident_pages.extend(missing)

    def release_resident(self) -> None:
        """Let go of the resident unit's pages: the optimizer will change them, or nobody needs its gradients."""
        with self.door:
            self._leave_broken()
            pages, self._resident_pages = self._resident_pages, []
            self.pager.unpin(pages)

    # -- forward ------------------------------------------------------------------------------------------

    @eager
    def _before_forward(self, unit: Unit, module: nn.Module, args: Any) -> None:
        self.views.check_transforms()
        with self.door:
            self._leave_broken()
            expected = self.steps.access(
                Access(unit.number, Phase.FORWARD),
                self._uses.forward[unit.number],
                self._uses.effects_of_forward(unit),
            )
            self.pager.fault(unit.pages, Phase.FORWARD, unit.number, expected=expected)
            for group in unit.uses:
                self.views.open(group)
            # The whole model's forward has done this, unless this unit is used outside of it, or checkpointed.
            saving = self.views.saving()
            if saving is not None:
                saving.__enter__()
            self._calls.mine.entered.append(Entry(unit, now(), saving, _caller()))
            self.pager.pump()

    @eager
    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        with self.door:
            # A fault that failed in the pre-hook ends up here too, without having entered.
            stack = self._calls.mine
            if not stack.entered or stack.entered[-1].unit is not unit:
                return output
            output = self.views.keep(output)
            self.views.stop_saving([self._leave_forward(stack)])
        if torch.is_grad_enabled():
            for node in _nodes(output):
                node.register_prehook(self._enters[unit.number])
            for node in _nodes((args, kwargs) if kwargs else args):
                node.register_prehook(self._leaves[unit.number])
        return output

    def _leave_forward(self, stack: Stack) -> Any:
        """Returns what :meth:`Views.stop_saving` is to be told."""
        unit, start, saving, _ = stack.entered.pop()
        for group in unit.uses:
            self.views.close(group)
        self.pager.unpin(unit.pages)
        self.trace.record(Event.COMPUTE, start, now() - start, unit.number, phase=Phase.FORWARD)
        self.pager.nudge()
        return saving

    # -- backward -----------------------------------------------------------------------------------------

    def _enter_backward(self, unit: Unit, gradients: Any) -> None:
        self.views.check_open()
        if self.updater is not None:
            self._update_left(unit, self.updater)
        with self.door:
            if not self._close_before(unit):
                return
            if not self._in_backward:
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._end_backward)
                self._in_backward = True
            pages = self._backward_pages[unit.number]
            numbers = self._uses.backward[unit.number]
            effects = self._uses.effects[unit.number][any(page.blank for page in unit.gradient_pages)]
            expected = self.steps.access(Access(unit.number, Phase.BACKWARD), numbers, effects)
            self.pager.fault(pages, Phase.BACKWARD, unit.number, expected=expected)
            self._open.append((unit, pages, now()))
            self.pager.pump()

    def _close_before(self, unit: Unit) -> bool:
        """Leave the units that this one isn't in, unless it is open itself. Under the door."""
        if any(unit is other for other, _, _ in self._open):
            return False
        while self._open and self._open[-1][0].number not in unit.outer:
            self._close_last()
        return True

    def _update_left(self, unit: Unit, updater: Updater) -> None:
        """Before a unit takes room: those that are left have their updates."""
        if not self._in_backward:
            updater.begin()
        with self.door:
            self._close_before(unit)
        updater.run()
        updater.enter(unit)

    @contextmanager
    def backward_of(self, unit: Unit) -> Iterator[None]:
        """Within it, this unit's pages are there for a part of backward that no hook announces."""
        self._enter_backward(unit, None)
        try:
            yield
        finally:
            self._leave_backward(unit, None)

    def _leave_backward(self, unit: Unit, gradients: Any) -> None:
        with self.door:
            while any(unit is other for other, _, _ in self._open):
                self._close_last()

    def _end_backward(self) -> None:
        with self.door:
            self._close_backward()
            if self._in_backward and self.reduction.ranks is not None:
                self.reduction.end_backward()
            ended, self._in_backward = self._in_backward, False
        if ended and self.updater is not None:
            self.updater.run()

    def leave_backward(self) -> None:
        """Leave the units that are open in backward."""
        with self.door:
            self._close_backward()

    def _close_backward(self) -> None:
        while self._open:
            self._close_last()

    def _close_last(self) -> None:
        unit = self._let_go()
        if self.reduction.ranks is not None:
            self.reduction.unit_closed(unit)
        self.pager.nudge()

    def _let_go(self) -> Unit:
        unit, pages, start = self._open.pop()
        self.pager.unpin(pages)
        self.trace.record(Event.COMPUTE, start, now() - start, unit.number, phase=Phase.BACKWARD)
        return unit

    def _relieve(self) -> bool:
        """Let go of the units open in backward: what is still to be read or written of them comes back by itself.

        So a forward that runs again inside backward (checkpointing) finds room where there is room for one unit.
        """
        had = bool(self._open)
        while self._open:
            self._let_go()
        return had

    def _landed(self, group: Group, index: int, parameter: torch.Tensor) -> None:
        if self.updater is not None:
            self.updater.landing(group)
        with self.door.hold(), torch._C.DisableTorchFunctionSubclass():
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            # A context only where it is needed, in a backward that is differentiated: this runs for every tensor.
            with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
                self.gradients.land(group, index, gradient)
        if self.updater is not None:
            self.updater.landed(group, index)

    # -- the owner of the parameters, see parameter.Owner -------------------------------------------------------

    def touch(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> Any:
        """Call ``func`` with the pages of ``tensors`` resident."""
        return self.views.touch(func, args, kwargs, tensors)

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The parameter's gradient as a view of its page, or None."""
        if self.reduction.ranks is not None:
            self.release_resident()
        return self.gradients.get(parameter)

    def set_gradient(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Replace the parameter's gradient; None forgets it."""
        group, _ = self.home[id(parameter)]
        if gradient is None and group.unit == 0:
            self.release_resident()
        if self.updater is not None:
            self.updater.landing(group)
        self.gradients.set(parameter, gradient)

    def set_data(self, parameter: torch.Tensor, data: torch.Tensor) -> None:
        """Write the parameter's values."""
        self.views.set_data(parameter, data)

    def zero_gradients(self, only: Container[int] | None = None) -> None:
        """All gradients that are there become zeros; ``only``: those of parameters with these ids."""
        self.release_resident()
        self.gradients.zero(only)

    def check_trainable(self, parameter: torch.Tensor) -> None:
        """Raise PagingError for a parameter that was frozen when the model was wrapped."""
        group, index = self.home[id(parameter)]
        if not group.trainable:
            raise PagingError(
                f"{group.fields[index].name} was frozen when its model was wrapped, so it has no pages for gradient "
                "and state: set requires_grad before wrapping, or close() the model and wrap it again"
            )

    def layout(self, parameter: torch.Tensor) -> torch.Tensor:
        """A tensor without memory that has the parameter's size and strides."""
        group, index = self.home[id(parameter)]
        field = group.fields[index]
        return torch.empty_strided(field.size, field.stride, dtype=group.dtype, device="meta")

    def forget_gradients(self, only: Container[int] | None = None) -> None:
        """No parameter has a gradient any more (``zero_grad``); ``only``: none of those with these ids."""
        self.release_resident()
        self.gradients.forget(only)


def _caller() -> FrameType:
    """The call of a module whose hook runs: torch's own, past what keeps compilers out of hooks."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != _CALL_FILE:
        frame = frame.f_back
    assert frame is not None
    return frame


def _nodes(tree: Any) -> list[Any]:
    """The autograd nodes that made the tensors in a nest of outputs or inputs, each once."""
    nodes = {
        id(leaf.grad_fn): leaf.grad_fn
        for leaf in tensors_in(tree)
        if leaf.requires_grad and leaf.grad_fn is not None
    }
    return list(nodes.values())
