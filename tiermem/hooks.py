"""Hooks: what a wrapped model's forward and backward ask of the pager, and when.

Forward hooks enter and leave units. In backward, a unit is entered when autograd reaches the node that made its output,
and left when autograd reaches the node that made its input, or enters another unit. Tensors that autograd saves and
that look into a frame are saved as (page, offset, size, stride) and brought back when they are asked for; this is the
net under the hooks: whatever a model does, a saved weight is read from a frame that holds it.

Note: pins. A unit between enter and leave pins its pages. A tensor that was handed out (an unpacked weight, a
PagedView) pins its page until the tensor dies, which a weak reference tells. So no order of hooks, and no two units
used by one autograd node, can have a frame overwritten that somebody still reads.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter_ns as now
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tiermem.door import Door
from tiermem.errors import PagingError
from tiermem.page import Kind, Page, State
from tiermem.pager import Pager
from tiermem.parameter import disown, forget_view, make_view, own
from tiermem.policies import Access, Phase
from tiermem.steps import Steps
from tiermem.trace import Event
from tiermem.unit import Group, Unit

_Tensor = torch.Tensor


class Saved:
    """A tensor of a frame as autograd keeps it: which page, where in it, and which version of its content."""

    __slots__ = ("dtype", "page", "size", "start", "stride", "version")

    def __init__(self, page: Page, start: int, tensor: torch.Tensor) -> None:
        self.page = page
        self.start = start  # bytes into the page
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.version = page.version


class Hooks:
    """The hooks of one wrapped model, from :meth:`attach` to :meth:`detach`; owner of its parameters."""

    def __init__(self, net: nn.Module, units: Sequence[Unit], pager: Pager, steps: Steps, door: Door) -> None:
        self.net = net
        self.units = units
        self.pager = pager
        self.steps = steps
        self.door = door
        self.trace = pager.transfers.trace
        self.tier = pager.device or pager.host  # where modules compute
        self.home: dict[int, tuple[Group, int]] = {}
        for unit in units:
            for group in unit.groups:
                self.home.update((id(field.parameter), (group, i)) for i, field in enumerate(group.fields))
        tiers = [pager.host] if pager.device is None else [pager.host, pager.device]
        self._slabs = {tier.memory.untyped_storage().data_ptr(): tier for tier in tiers}
        self.copying = 0  # state_dict calls that run: what they take of parameters is copied
        self._handles: list[Any] = []
        self._entered: list[tuple[Unit, int]] = []  # forward: units entered and not left, with the time
        self._passes: list[
            tuple[bool, int, Any]
        ] = []  # forwards of the whole model that run: training?, units entered
        self._passes_saving = 0  # how many of them have their saved-tensor hooks in place
        self._open: list[tuple[Unit, list[Page], int]] = []  # backward: the same, with the pages pinned
        self._in_backward = False
        self._lent: dict[
            int, weakref.ref[torch.Tensor]
        ] = {}  # id of a handed-out tensor -> what tells its death
        self._resident_pages: list[Page] = []  # pinned while the resident unit is held
        self._enters = {unit.number: partial(self._enter_backward, unit) for unit in units}
        self._leaves = {unit.number: partial(self._leave_backward, unit) for unit in units}
        self._numbers = {unit.number: tuple(page.number for page in unit.pages) for unit in units}
        self._backward_pages = {unit.number: unit.pages + unit.gradient_pages for unit in units}

    # -- life ---------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Register all hooks, and take the parameters over. They must have been adopted into pages."""
        self._handles.append(self.net.register_forward_pre_hook(self._before_pass, prepend=True))
        self._handles.append(self.net.register_forward_hook(self._after_pass, always_call=True))
        for unit in self.units[1:]:
            module = unit.module
            self._handles.append(
                module.register_forward_pre_hook(partial(self._before_forward, unit), prepend=True)
            )
            self._handles.append(
                module.register_forward_hook(
                    partial(self._after_forward, unit), with_kwargs=True, always_call=True
                )
            )
        for unit in self.units:
            for group in unit.groups:
                for index, field in enumerate(group.fields):
                    if group.trainable:
                        landed = partial(self._landed, group, index)
                        self._handles.append(field.parameter.register_post_accumulate_grad_hook(landed))
                    own(field.parameter, self)

    def detach(self) -> None:
        """Remove all hooks and pins; parameters are ordinary again, and still look into frames."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.unwind()
        for unit in self.units:
            for group in unit.groups:
                for field in group.fields:
                    disown(field.parameter)

    def unwind(self) -> None:
        """Forget units that were entered and never left, because an error or Ctrl-C broke off the step."""
        with self.door:
            while self._passes:
                self._end_pass()
            self._close_backward()
            self._in_backward = False

    # -- forward ------------------------------------------------------------------------------------------

    def _before_pass(self, module: nn.Module, args: Any) -> None:
        """A forward of the whole model begins."""
        training = torch.is_grad_enabled()
        with self.door:
            self._unwind_backward()
            saving = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
            self._passes.append((training, len(self._entered), saving))
            if len(self._passes) == 1:
                self.steps.begin_pass(training)
            self.hold_resident(training)
            for group in self.units[0].uses:
                self._enter_group(group)
            saving.__enter__()
            self._passes_saving += 1
            self.pager.pump()

    def _after_pass(self, module: nn.Module, args: Any, output: Any) -> None:
        with self.door:
            if self._passes:
                self._end_pass()

    def _end_pass(self) -> None:
        training, depth, saving = self._passes.pop()
        while len(self._entered) > depth:
            self._leave_forward()
        if self._passes_saving > len(self._passes):
            self._passes_saving -= 1
            saving.__exit__(None, None, None)
            for group in self.units[0].uses:
                self._leave_group(group)
        if not self._passes:
            self.steps.end_pass(training)

    def abort_pass(self) -> None:
        """End the outermost forward that runs, after an exception that no hook was called for."""
        with self.door:
            while self._passes:
                self._end_pass()

    def _unwind_backward(self) -> None:
        """Close what a backward left open that an error or Ctrl-C broke off."""
        if torch._C._current_graph_task_id() == -1:
            self._close_backward()
            self._in_backward = False

    def hold_resident(self, training: bool) -> None:
        """Pin the resident unit's pages until :meth:`release_resident`."""
        unit = self.units[0]
        wanted = self._backward_pages[0] if training else unit.pages
        missing = [page for page in wanted if page not in self._resident_pages]
        if missing:
            self.pager.fault(missing, Phase.FORWARD, 0)
            self._resident_pages.extend(missing)

    def release_resident(self) -> None:
        """Let go of the resident unit's pages: the optimizer will change them, or nobody needs its gradients."""
        pages, self._resident_pages = self._resident_pages, []
        self.pager.unpin(pages)

    def _before_forward(self, unit: Unit, module: nn.Module, args: Any) -> None:
        with self.door:
            self.steps.access(Access(unit.number, Phase.FORWARD), self._numbers[unit.number])
            self.pager.fault(unit.pages, Phase.FORWARD, unit.number)
            for group in unit.uses:
                self._enter_group(group)
            self._entered.append((unit, now()))
            self.pager.pump()

    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        with self.door:
            # A fault that failed in the pre-hook ends up here too, without having entered.
            if not self._entered or self._entered[-1][0] is not unit:
                return
            self._leave_forward()
        if torch.is_grad_enabled():
            for node in _nodes(output):
                node.register_prehook(self._enters[unit.number])
            for node in _nodes((args, kwargs)):
                node.register_prehook(self._leaves[unit.number])

    def _leave_forward(self) -> None:
        unit, start = self._entered.pop()
        for group in unit.uses:
            self._leave_group(group)
        self.pager.unpin(unit.pages)
        self.trace.record(Event.COMPUTE, start, now() - start, unit.number, phase=Phase.FORWARD)

    def _enter_group(self, group: Group) -> None:
        page = group.parameter
        frame = page.device if self.pager.device is not None else page.host
        assert frame is not None
        group.bind(self.tier, frame)
        group.num_open += 1
        if group.num_open == 1:
            for field in group.fields:
                disown(field.parameter)

    def _leave_group(self, group: Group) -> None:
        group.num_open -= 1
        if group.num_open == 0:
            changed = False
            for index, field in enumerate(group.fields):
                version = field.parameter._version
                if version != group.versions[index]:
                    self._wrote(group, index, version)
                    changed = True
                own(field.parameter, self)
            if changed:
                group.parameter.version += 1

    # -- backward -----------------------------------------------------------------------------------------

    def _enter_backward(self, unit: Unit, gradients: Any) -> None:
        with self.door:
            if any(unit is other for other, _, _ in self._open):
                return
            while self._open and self._open[-1][0].number not in unit.outer:
                self._close_last()
            if not self._in_backward:
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # type: ignore[attr-defined]
                self._in_backward = True
            pages = self._backward_pages[unit.number]
            self.steps.access(Access(unit.number, Phase.BACKWARD), tuple(page.number for page in pages))
            self.pager.fault(pages, Phase.BACKWARD, unit.number)
            self._open.append((unit, pages, now()))
            self.pager.pump()

    def _leave_backward(self, unit: Unit, gradients: Any) -> None:
        with self.door:
            while any(unit is other for other, _, _ in self._open):
                self._close_last()

    def _end_backward(self) -> None:
        with self.door:
            self._close_backward()
            self._in_backward = False

    def _close_backward(self) -> None:
        while self._open:
            self._close_last()

    def _close_last(self) -> None:
        unit, pages, start = self._open.pop()
        self.pager.unpin(pages)
        self.trace.record(Event.COMPUTE, start, now() - start, unit.number, phase=Phase.BACKWARD)

    def _landed(self, group: Group, index: int, parameter: torch.Tensor) -> None:
        """A gradient is complete for this backward: into its page with it, and the temporary one goes."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            gradient = parameter.grad
            parameter.grad = None
            assert gradient is not None
            self.land(group, index, gradient)

    def land(self, group: Group, index: int, gradient: torch.Tensor) -> None:
        """Add a gradient to what the gradient page has of this parameter, or put it there if it has none."""
        if gradient.layout is not torch.strided:
            raise PagingError(
                f"the gradient of {group.fields[index].name} is sparse ({gradient.layout}): gradient pages are dense; "
                "use sparse=False"
            )
        with self.gradient_view(group, index) as view:
            if group.landed[index]:
                view.add_(gradient.to(view.device))
            else:
                view.copy_(gradient)
                group.landed[index] = 1
            group.norms[index] = torch.linalg.vector_norm(view) if group.wants_norms else None
            if self.pager.device is not None:
                self.pager.counters.device_to_host.nbytes[Kind.GRADIENT] += view.numel() * view.element_size()

    @contextmanager
    def gradient_view(self, group: Group, index: int) -> Iterator[torch.Tensor]:
        """The place of one parameter's gradient in its page, pinned, scaled as asked, and dirty afterwards."""
        page = group.gradient
        assert page is not None
        with self.door:
            if page.spent and any(group.landed):
                if page.blank:
                    raise PagingError(
                        f"the gradient of {group.fields[index].name} was given up after optimizer.step(), to make "
                        "room: call zero_grad() before the next backward, or read gradients before step()"
                    )
                page.spent = False
            self.pager.fault([page], Phase.BACKWARD, page.unit)
        try:
            self.apply_scale(group)
            field = group.fields[index]
            assert page.host is not None
            yield self.pager.host.view(page.host, group.dtype, field.offset, field.size, field.stride)
        finally:
            with self.door:
                self.pager.unpin([page], dirty=True)

    def apply_scale(self, group: Group) -> None:
        """Multiply the group's gradients by the factor that clipping left pending; the page must be resident."""
        scale, group.scale = group.scale, None
        if scale is None:
            return
        page = group.gradient
        assert page is not None
        assert page.host is not None
        for index, field in enumerate(group.fields):
            if group.landed[index]:
                self.pager.host.view(page.host, group.dtype, field.offset, field.size, field.stride).mul_(
                    scale
                )
                group.norms[index] = None

    def clip(
        self, net: nn.Module, max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> torch.Tensor:
        """See ``TieredModule.clip_grad_norm_``: the steps are those of torch's, on norms that are mostly known."""
        norms = []
        landed: dict[int, Group] = {}
        for parameter in net.parameters():
            if id(parameter) not in self.home:
                continue
            group, index = self.home[id(parameter)]
            if not group.landed[index]:
                continue
            landed[id(group)] = group
            norm = group.norms[index] if norm_type == 2.0 and group.scale is None else None
            if norm is None:
                with self.gradient_view(group, index) as view:
                    norm = torch.linalg.vector_norm(view, norm_type)
            norms.append(norm)
        if not norms:
            return torch.tensor(0.0)
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(
                f"the total norm of order {norm_type} for gradients is {total.item()}, so it cannot be clipped; "
                "to go on all the same, set error_if_nonfinite=False"
            )
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for group in landed.values():
            group.wants_norms = norm_type == 2.0
            group.scale = factor
        return total

    def forget_gradients(self, only: Container[int] | None = None) -> None:
        """No parameter has a gradient any more (``zero_grad``); ``only``: none of those with these ids."""
        with self.door:
            self.release_resident()
            for unit in self.units:
                for group in unit.groups:
                    if not group.trainable or not any(group.landed):
                        continue
                    for index, field in enumerate(group.fields):
                        if only is None or id(field.parameter) in only:
                            group.landed[index] = 0
                            group.norms[index] = None
                    if not any(group.landed):
                        self._forget_group(group)

    def _forget_group(self, group: Group) -> None:
        assert group.gradient is not None
        group.landed[:] = bytes(len(group.landed))
        group.norms[:] = [None] * len(group.norms)
        group.scale = None
        if group.gradient.pins:
            group.gradient.spent = (
                False  # somebody looks at it: it stays until the next gradient overwrites it
            )
        else:
            self.pager.discard(group.gradient)

    # -- tensors that autograd saves ------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd keeps instead of ``tensor``: where it is in its page, if it looks into a frame."""
        try:
            tier = self._slabs.get(tensor.untyped_storage().data_ptr())
        except (RuntimeError, NotImplementedError):  # no storage: a sparse or a wrapped tensor
            tier = None
        if tier is None:
            # Detached, since an output that held itself would never be freed. The version is checked by us, because
            # autograd doesn't where there are hooks.
            return tensor.detach(), tensor._version
        with self.door:
            offset = tensor.storage_offset() * tensor.element_size()
            frame = tier.slab.frame_at(offset)
            return Saved(frame.page, offset - frame.offset, tensor)

    def unpack(self, saved: Any) -> torch.Tensor:
        """The tensor again, from whichever frame its page is in now; the page stays until the tensor dies."""
        if not isinstance(saved, Saved):
            tensor: torch.Tensor = saved[0]
            if tensor._version != saved[1]:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"[{tensor.dtype} {list(tensor.shape)}] is at version {tensor._version}; expected {saved[1]}"
                )
            return tensor
        page = saved.page
        if page.version != saved.version:
            raise PagingError(
                "a parameter needed for backward has been modified since forward (by an optimizer step, by "
                "load_state_dict, or in place): run forward again, or backward before the change"
            )
        with self.door:
            self.pager.fault([page], Phase.BACKWARD, page.unit)
            frame = page.device if self.pager.device is not None else page.host
            assert frame is not None
            view = self.tier.view(
                frame, saved.dtype, saved.start // saved.dtype.itemsize, saved.size, saved.stride
            )
            self._lend(view, page)
        return view

    def _lend(self, tensor: torch.Tensor, page: Page) -> None:
        """Pass one pin of ``page`` on to ``tensor``: it is let go of when the tensor dies."""
        identity = id(tensor)

        def died(_: Any) -> None:
            with self.door:
                self._lent.pop(identity, None)
                forget_view(identity)
                page.pins -= 1

        self._lent[identity] = weakref.ref(tensor, died)

    # -- touches from outside of a unit's forward -------------------------------------------------------------

    def touch(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> Any:
        """Call ``func`` with the pages of ``tensors`` (parameters, views) resident; see ``parameter.Owner``."""
        groups = list(dict.fromkeys(self.home[id(t)][0] for t in tensors if id(t) in self.home))
        pages = [group.parameter for group in groups]
        with self.door:
            self.pager.fault(pages, Phase.FORWARD, groups[0].unit if groups else 0)
            for group in groups:
                self._enter_group(group)
        try:
            with torch._C.DisableTorchFunctionSubclass():
                versions = [tensor._version for tensor in tensors]
                with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                    result = func(*args, **kwargs)
                for tensor, version in zip(tensors, versions, strict=True):
                    if tensor._version != version and id(tensor) not in self.home:
                        self._wrote_view(tensor)
                if self.copying and func == _Tensor.detach:
                    return result.clone()
                return self._wrap(result, func)
        finally:
            with self.door:
                for group in groups:
                    self._leave_group(group)
                self.pager.unpin(pages)

    def _wrap(self, result: Any, func: Callable[..., Any]) -> Any:
        if isinstance(result, torch.Tensor):
            if id(result) in self.home or result.layout is not torch.strided:
                return result
            tier = self._slabs.get(result.untyped_storage().data_ptr())
            if tier is None:
                return result
            with self.door:
                page = tier.slab.frame_at(result.storage_offset() * result.element_size()).page
                page.pins += 1
                view = make_view(result, self)
                self._lend(view, page)
                if func == _Tensor.data.__get__:
                    self._wrote_view(view)  # an alias with a version of its own: what it does can't be seen
            return view
        if isinstance(result, tuple | list) and not isinstance(result, torch.Size):
            return (
                type(result)(*(self._wrap(item, func) for item in result))
                if hasattr(result, "_fields")
                else type(result)(self._wrap(item, func) for item in result)
            )
        return result

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The parameter's gradient as a view of its page; writing to it is seen by the optimizer."""
        group, index = self.home[id(parameter)]
        if not group.landed[index]:
            with torch._C.DisableTorchFunctionSubclass():
                return parameter.grad  # a frozen one's, if somebody set it
        with self.gradient_view(group, index) as place, self.door:
            page = group.gradient
            assert page is not None
            page.pins += 1
            view = make_view(place, self)
            self._lend(view, page)
            group.norms[index] = None
            return view

    def set_gradient(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Replace the parameter's gradient; None forgets it."""
        group, index = self.home[id(parameter)]
        if group.gradient is None:
            with torch._C.DisableTorchFunctionSubclass():
                parameter.grad = gradient
            return
        group.landed[index] = 0
        group.norms[index] = None
        if gradient is not None:
            if gradient.shape != group.fields[index].size or gradient.dtype != group.dtype:
                raise PagingError(
                    f"assigned a gradient of shape {list(gradient.shape)} and dtype {gradient.dtype} to "
                    f"{group.fields[index].name}, which has {list(group.fields[index].size)} and {group.dtype}"
                )
            with torch.no_grad():
                self.land(group, index, gradient)
        elif not any(group.landed):
            with self.door:
                if group.unit == 0:
                    self.release_resident()
                self._forget_group(group)

    def set_data(self, parameter: torch.Tensor, data: torch.Tensor) -> None:
        """Write a parameter's values; shape and dtype are the page's, and stay."""
        group, index = self.home[id(parameter)]
        field = group.fields[index]
        if tuple(data.shape) != field.size or data.dtype != group.dtype:
            raise PagingError(
                f"{field.name}.data = a tensor of shape {list(data.shape)} and dtype {data.dtype}; a paged parameter "
                f"keeps its shape {list(field.size)} and dtype {group.dtype}: close the model to change them"
            )
        with torch.no_grad():
            self.touch(_Tensor.copy_, (parameter, data), {}, [parameter])

    def _wrote(self, group: Group, index: int, version: int) -> None:
        """A user changed a parameter: the copies below, and its master weights, are stale."""
        group.versions[index] = version
        group.stale.add(index)
        page = group.parameter
        if page.device is not None and page.state is State.DEVICE:
            page.device_dirty = True
        else:
            page.dirty = True

    def _wrote_view(self, view: torch.Tensor) -> None:
        """A user wrote through a view."""
        tier = self._slabs.get(view.untyped_storage().data_ptr())
        if tier is None:
            return
        offset = view.storage_offset() * view.element_size()
        frame = tier.slab.frame_at(offset)
        page = frame.page
        page.version += 1
        for group in page.users:
            assert isinstance(group, Group)
            element = (offset - frame.offset) // group.dtype.itemsize
            index = max(i for i, field in enumerate(group.fields) if field.offset <= element)
            self._wrote(group, index, group.versions[index])
        if not page.users:
            page.dirty = True  # a gradient


def _nodes(tree: Any) -> list[Any]:
    """The autograd nodes that made the tensors in a nest of outputs or inputs, each once."""
    nodes = {
        id(leaf.grad_fn): leaf.grad_fn
        for leaf in tree_leaves(tree)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.grad_fn is not None
    }
    return list(nodes.values())
