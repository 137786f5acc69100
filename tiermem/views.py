"""Views: every tensor that looks into a frame, and what keeps its page there.

Parameters are bound to frames while a unit is open. Tensors that autograd saves are kept as (page, offset, size,
stride) and brought back when they are asked for; this is the net under the hooks: whatever a model does, a saved weight
is read from a frame that holds it.

Note: pins. A unit between enter and leave pins its pages. A tensor that was handed out (an unpacked weight, a
PagedView) pins its page until the tensor dies, which a weak reference tells. So no order of hooks, and no two units
used by one autograd node, can have a frame overwritten that somebody still reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from tiermem.activation import Slice
from tiermem.activations import Activations
from tiermem.door import Door
from tiermem.dtensors import DTensors, is_dtensor, take_apart
from tiermem.errors import PagingError
from tiermem.page import Frame, Page, State
from tiermem.pager import Pager
from tiermem.parameter import Owner, PagedView
from tiermem.policies import Phase
from tiermem.tier import Tier
from tiermem.unit import Group

_Tensor: Any = torch.Tensor
_GET_DATA = _Tensor.data.__get__


class Saved:
    """A tensor of a frame as autograd keeps it: which page, where in it, and which version of its content."""

    __slots__ = ("dtype", "page", "size", "start", "stride", "version")

    def __init__(
        self, page: Page, start: int, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]
    ) -> None:
        self.page = page
        self.start = start  # bytes into the page
        self.dtype = dtype
        self.size = size
        self.stride = stride
        self.version = page.version

    @staticmethod
    def of(group: Group, index: int) -> Saved:
        """One parameter of a group, as it is now."""
        field = group.fields[index]
        return Saved(
            group.parameter, field.offset * group.dtype.itemsize, group.dtype, field.size, field.stride
        )


class SavedDTensor(NamedTuple):
    """A DTensor as autograd keeps it: what is kept of its local part, and what makes it again."""

    local: Any
    remake: Callable[[torch.Tensor], torch.Tensor]


class StandIn(torch.Tensor):
    """What a saved-tensor hook of somebody else is given for a tensor of a frame: its shape, and where it is.

    Checkpointing and offloading hooks keep or copy what they are given. A copy of this one has the values; kept as it
    is (or detached), it becomes the tensor of whichever frame has its page by then.
    """

    saved: Saved
    views: Views

    @staticmethod
    def of(saved: Saved, views: Views, tensor: torch.Tensor) -> StandIn:
        """A stand-in for ``tensor``, which is saved as ``saved``."""
        make: Any = torch.Tensor._make_wrapper_subclass
        stand_in: StandIn = make(
            StandIn, tensor.size(), strides=tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        stand_in.saved = saved
        stand_in.views = views
        return stand_in

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it as a plain callable
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return StandIn.of(args[0].saved, args[0].views, args[0])
        args, kwargs = tree_map_only(
            StandIn, lambda each: each.views.unpack(each.saved), (args, kwargs or {})
        )
        return func(*args, **kwargs)


class Copied(torch.autograd.Function):
    """A copy with the same strides, so that whoever computes with it takes the same path."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        reach = (
            sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)) + 1
        )
        return tensor.as_strided((reach,), (1,)).clone().as_strided(tensor.size(), tensor.stride())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def tensors_in(tree: Any) -> Iterable[torch.Tensor]:
    """The tensors in a nest of arguments or results; at once where it is one tensor, or a tuple of them."""
    if isinstance(tree, torch.Tensor):
        return (tree,)
    if type(tree) is tuple and all(isinstance(each, torch.Tensor) for each in tree):
        return tree
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Foreign:
    """Our saved-tensor hooks on top of somebody else's: theirs see ordinary tensors, and stand-ins for frames."""

    def __init__(self, views: Views, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        self.views = views
        self.theirs = pack
        self._unpack = unpack

    def pack(self, tensor: torch.Tensor) -> Any:
        """What they keep of the tensor."""
        saved = self.views.locate(tensor)
        if saved is not None:
            return self.theirs(StandIn.of(saved, self.views, tensor))
        if is_dtensor(tensor):
            local, remake = take_apart(tensor)
            saved = self.views.locate(local)
            if saved is not None:
                return self.theirs(remake(StandIn.of(saved, self.views, local)))
        return self.theirs(tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        """The tensor that they give back, or the one that they kept a stand-in for."""
        tensor: torch.Tensor = self._unpack(packed)
        if isinstance(tensor, StandIn):
            return tensor.views.unpack(tensor.saved)
        if is_dtensor(tensor):
            local, remake = take_apart(tensor)
            if isinstance(local, StandIn):
                return remake(local.views.unpack(local.saved))
        return tensor


class Views:
    """The tensors of one wrapped model that look into frames. ``home``: id of a parameter -> its group and field."""

    def __init__(self, pager: Pager, door: Door, home: dict[int, tuple[Group, int]], owner: Owner) -> None:
        self.pager = pager
        self.door = door
        self.home = home
        self.tier = pager.device or pager.host  # where modules compute
        self._place = State.HOST if pager.device is None else State.DEVICE
        self.copying = 0  # state_dict calls that run: what they take of parameters is copied
        self.copies: dict[int, torch.Tensor] = {}  # by them, by the parameter's id: tied ones stay one tensor
        self.owner = owner
        tiers = [pager.host] if pager.device is None else [pager.host, pager.device]
        self._slabs = {tier.memory.untyped_storage().data_ptr(): tier for tier in tiers}
        self._hooks = self.pack, self.unpack  # the same two each time: compiled code is made for them
        self.closed = False
        self.activations: Activations | None = None  # who pages what is saved of other tensors
        self.dtensors: DTensors | None = None  # the parameters that are parts of some

    # -- parameters ---------------------------------------------------------------------------------------

    def open(self, group: Group) -> None:
        """The group's parameters look into the frame of their page, which is pinned, and are ordinary ones."""
        group.bind(self.tier, self._frame(group.parameter))
        group.num_open += 1
        if group.num_open == 1:
            for parameter, ordinary, _ in group.classes:
                parameter.__class__ = ordinary
            for local in group.locals:
                local.show()

    def close(self, group: Group) -> None:
        """Undo one :meth:`open`, before the page is unpinned; notices what was written meanwhile."""
        group.num_open -= 1
        if group.num_open:
            return
        for local in group.locals:
            local.hide()
        changed = False
        for index, (parameter, _, paged) in enumerate(group.classes):
            version = parameter._version
            if version != group.versions[index]:
                self._wrote(group, index, version)
                changed = True
            parameter.__class__ = paged
        if changed:
            self.pager.commit(group.parameter)

    def check_open(self) -> None:
        """Raise PagingError when the model has been closed."""
        if self.closed:
            raise PagingError(
                "the model of this tensor or graph has been closed: its pages are gone (call backward before close)"
            )

    def _frame(self, page: Page) -> Frame:
        frame = page.device if self.pager.device is not None else page.host
        assert frame is not None
        return frame

    # -- tensors that autograd saves ------------------------------------------------------------------------

    def tier_of(self, tensor: torch.Tensor) -> Tier | None:
        """The tier whose slab a tensor looks into; None for every other tensor."""
        try:
            return self._slabs.get(tensor.untyped_storage().data_ptr())
        except (RuntimeError, NotImplementedError):  # no storage: sparse, or a wrapper of tensors
            return None

    def saving(self) -> Any:
        """A context in which autograd saves through us; None where it does already.

        Hooks of somebody else that are in place (checkpointing, offloading, another wrapped model that calls this one)
        go on seeing what is saved.
        """
        get_top: Any = torch._C._autograd._top_saved_tensors_default_hooks
        top = get_top(False)
        if top is None:
            return torch.autograd.graph.saved_tensors_hooks(*self._hooks)
        pack, unpack = top
        whose = getattr(pack, "__self__", None)
        if whose is self or (isinstance(whose, Foreign) and whose.views is self):
            return None
        foreign = Foreign(self, pack, unpack)
        return torch.autograd.graph.saved_tensors_hooks(foreign.pack, foreign.unpack)

    def check_transforms(self) -> None:
        """Raise PagingError inside of a transform that autograd can't save through us in."""
        autograd: Any = torch._C._autograd
        if (why := autograd._saved_tensors_hooks_get_disabled_error_message()) is not None:
            raise PagingError(
                "a paged model can't be called inside a transform of torch.func (grad, vjp, ...), where the weights "
                "that backward needs can't be followed: use backward() or torch.autograd.grad, or close() the model. "
                f"torch says: {why}"
            )

    def stop_saving(self, left: Sequence[Any]) -> None:
        """End contexts that :meth:`saving` gave, Nones among them, and no others.

        They need not be the last that were begun: what a Ctrl-C broke off ends when somebody comes by, maybe inside a
        context of theirs. And when a context around ours was broken off as well, its exit, which only counts, took ours
        off and left its own: then that one goes.
        """
        ended = [context for context in left if context is not None]
        if not ended:
            return
        mine = [context.pack_hook for context in ended]
        mine += [pack.__self__.theirs for pack in mine if isinstance(pack.__self__, Foreign)]
        get_top: Any = torch._C._autograd._top_saved_tensors_default_hooks
        above = []
        num_left = len(ended)
        while num_left and (top := get_top(False)) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            if top[0] in mine:
                num_left -= 1
            else:
                above.append(top)
        for pack, unpack in reversed(above):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)

    def locate(self, tensor: torch.Tensor) -> Saved | None:
        """Where in its page a tensor is; None when it doesn't look into a frame."""
        tier = self.tier_of(tensor)
        if tier is None:
            return None
        with self.door:
            offset = int(tensor.storage_offset()) * tensor.element_size()
            frame = tier.slab.frame_at(offset)
            return Saved(frame.page, offset - frame.offset, tensor.dtype, tensor.size(), tensor.stride())

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd keeps instead of ``tensor``: where it is in its page, if it looks into a frame."""
        # Detached, since an output that held itself would never be freed. The version is checked by us, because
        # autograd doesn't where there are hooks.
        saved: Any = self.locate(tensor)
        if saved is None and is_dtensor(tensor):
            local, remake = take_apart(tensor)
            if type(local) is torch.Tensor:  # and not one that is still on its way
                return SavedDTensor(self.pack(local), remake)
        if saved is None and self.activations is not None:
            saved = self.activations.save(tensor)
        return saved or (tensor.detach(), tensor._version)

    def unpack(self, saved: Any) -> torch.Tensor:
        """The tensor again, from whichever frame its page is in now; the page stays until the tensor dies."""
        if isinstance(saved, SavedDTensor):
            return saved.remake(self.unpack(saved.local))
        if isinstance(saved, Slice):
            self.check_open()
            assert self.activations is not None
            return self.activations.restore(saved)
        if not isinstance(saved, Saved):
            tensor: torch.Tensor = saved[0]
            if tensor._version != saved[1]:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"[{tensor.dtype} {list(tensor.shape)}] is at version {tensor._version}; expected {saved[1]}"
                )
            return tensor
        page = saved.page
        self.check_open()
        if page.version != saved.version:
            raise PagingError(
                "a parameter needed for backward has been modified since forward (by an optimizer step, by "
                "load_state_dict, or in place): run forward again, or backward before the change"
            )
        with self.door:
            if page.pins and page.state is self._place:
                page.pins += 1  # its unit is open, as it nearly always is
            else:
                self.pager.fault([page], Phase.BACKWARD, page.unit)
            start = saved.start // saved.dtype.itemsize
            view = self.tier.view(self._frame(page), saved.dtype, start, saved.size, saved.stride)
            if torch.is_grad_enabled():
                # A backward that is differentiated saves what it uses, past our hooks: it gets a copy.
                view = view.clone()
                page.pins -= 1
            else:
                self.lend(view, page)
        return view

    def lend(self, tensor: torch.Tensor, page: Page) -> torch.Tensor:
        """Pass one pin of ``page`` on to ``tensor``: it is let go of when the tensor dies."""
        self.pager.room.loans.lend(tensor, page, self.owner)
        return tensor

    def keep(self, output: Any) -> Any:
        """What a unit returns: no tensor in it looks into a frame that may be another page's by then. Under the door.

        One with a gradient is an activation, and a copy; nobody could write to the weight through it. Another one is a
        view that pins the page.
        """
        if all(self._tier_behind(leaf) is None for leaf in tensors_in(output)):
            return output
        return tree_map_only(torch.Tensor, self._keep, output)

    def _tier_behind(self, tensor: torch.Tensor) -> Tier | None:
        """As :meth:`tier_of`, and of a DTensor's local part."""
        return self.tier_of(take_apart(tensor)[0] if is_dtensor(tensor) else tensor)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._tier_behind(tensor) is None or id(tensor) in self.home:
            return tensor
        if is_dtensor(tensor):
            return tensor.clone()
        with torch._C.DisableTorchFunctionSubclass():
            if tensor.requires_grad and tensor.numel():
                copy: torch.Tensor = Copied.apply(tensor)  # type: ignore[no-untyped-call]
                return copy
            view: torch.Tensor = self._wrap(tensor, None)
            return view

    # -- touches from outside of a unit's forward -------------------------------------------------------------

    def touch(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> Any:
        """Call ``func`` with the pages of ``tensors`` (parameters, views) resident; see ``parameter.Owner``."""
        self.check_transforms()
        groups = list(dict.fromkeys(self.home[id(t)][0] for t in tensors if id(t) in self.home))
        pages = [group.parameter for group in groups]
        if self.pager.watcher is not None:
            self.pager.announce(pages + self._seen_by(tensors))
        with self.door.hold():
            return self._touch(func, args, kwargs, tensors, groups, pages)

    def _seen_by(self, tensors: list[torch.Tensor]) -> list[Page]:
        """The pages that views among these tensors look into."""
        with self.door, torch._C.DisableTorchFunctionSubclass():
            saved = [self.locate(each) for each in tensors if type(each) is PagedView]
        return [each.page for each in saved if each is not None]

    def _touch(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        groups: list[Group],
        pages: list[Page],
    ) -> Any:
        with self.door:
            self.pager.fault(pages, Phase.FORWARD, groups[0].unit if groups else 0)
            for group in groups:
                self.open(group)
        if func == _GET_DATA and any(page.gathered for page in pages):
            func = _Tensor.detach  # which shows what is written through it
        try:
            if self.dtensors is not None:
                args, kwargs = self.dtensors.shown(args, kwargs)
            with torch._C.DisableTorchFunctionSubclass():
                versions = [tensor._version for tensor in tensors]
                with self.saving() or nullcontext():
                    result = func(*args, **kwargs)
                for tensor, version in zip(tensors, versions, strict=True):
                    if tensor._version != version and id(tensor) not in self.home:
                        self._wrote_view(tensor)
                if self.copying and func is _Tensor.detach:
                    return self.copies.setdefault(id(args[0]), result.clone())
                return self._wrap(result, func)
        finally:
            with self.door:
                for group in groups:
                    self.close(group)
                self.pager.unpin(pages)

    def set_data(self, parameter: torch.Tensor, data: torch.Tensor) -> None:
        """Write a parameter's values; shape and dtype are the page's, and stay."""
        group, index = self.home[id(parameter)]
        field = group.fields[index]
        if tuple(data.shape) != field.size or data.dtype != group.dtype:
            raise PagingError(
                f"{field.name}.data = a tensor of shape {list(data.shape)} and dtype {data.dtype}; a paged parameter "
                f"keeps its shape {list(field.size)} and dtype {group.dtype}: close the model to change them"
            )
        with self.door.hold(), torch.no_grad():  # outside, an interrupt could leave gradients off for good
            self.touch(_Tensor.copy_, (parameter, data), {}, [parameter])

    def _wrap(self, result: Any, func: Callable[..., Any] | None) -> Any:
        """Results that look into a frame become views that pin it."""
        if isinstance(result, torch.Tensor):
            if id(result) in self.home:
                return result
            tier = self.tier_of(result)
            if tier is None:
                return self._keep(result) if is_dtensor(result) else result
            with self.door:
                page = tier.slab.frame_at(int(result.storage_offset()) * result.element_size()).page
                page.pins += 1
                view = self.lend(result.as_subclass(PagedView), page)
                if func == _GET_DATA:
                    self._wrote_view(view)  # an alias with a version of its own: what it does can't be seen
            return view
        if isinstance(result, tuple | list) and not isinstance(result, torch.Size):
            items = [self._wrap(item, func) for item in result]
            return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
        return result

    def _wrote(self, group: Group, index: int, version: int) -> None:
        """A user changed a parameter: the copies below, and its master weights, are stale."""
        group.versions[index] = version
        group.stale.add(index)
        page = group.parameter
        page.version += 1
        if self.pager.watcher is not None:
            self.pager.watcher.spoiled(page, group.fields[index].name)
        if page.state is State.DEVICE:
            page.device_dirty = True
        else:
            page.dirty = True

    def _wrote_view(self, view: torch.Tensor) -> None:
        """A user wrote through a view."""
        tier = self.tier_of(view)
        if tier is None:
            return
        offset = int(view.storage_offset()) * view.element_size()
        frame = tier.slab.frame_at(offset)
        page = frame.page
        if not page.users:
            page.dirty = True  # a gradient
        for group in page.users:
            assert isinstance(group, Group)
            element = (offset - frame.offset) // group.dtype.itemsize
            index = max(i for i, field in enumerate(group.fields) if field.offset <= element)
            self._wrote(group, index, group.fields[index].parameter._version)
            self.pager.commit(page)
