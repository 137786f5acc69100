"""Gradients: out of autograd's hands into gradient pages, as they are produced, and what the loop asks of them.

A gradient that is complete for this backward *lands*: it is copied (or added) into its page, and autograd's own tensor
goes. Clipping needs no gradient back: norms are taken while gradients land, and the factor stays pending until the
optimizer, or whoever looks, reads the page.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype
from torch.utils._pytree import tree_leaves

from tiermem.door import Door
from tiermem.errors import PagingError
from tiermem.page import Kind, Page
from tiermem.pager import Pager
from tiermem.parameter import METADATA, PagedView
from tiermem.policies import Phase
from tiermem.reduction import Reduction
from tiermem.tiling import Tiled
from tiermem.unit import Group, Unit
from tiermem.views import Views


class Spent(torch.Tensor):
    """A gradient that the optimizer has used and whose bytes are given up: it is there, and can't be read.

    Loops ask whether there is a gradient before they forget it (``torch.nn.Module.zero_grad``).
    """

    field: str

    @staticmethod
    def of(group: Group, index: int) -> Spent:
        """What ``.grad`` of that parameter is."""
        field = group.fields[index]
        empty = torch.empty_strided(field.size, field.stride, dtype=group.dtype, device="meta")
        spent: Spent = empty.as_subclass(Spent)
        spent.field = field.name
        return spent

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise given_up(next(each.field for each in tree_leaves((args, kwargs)) if isinstance(each, Spent)))


def given_up(name: str) -> PagingError:
    """What is raised for a gradient of this parameter that isn't there any more."""
    return PagingError(
        f"the gradient of {name} was given up once the optimizer had used it (in step(), or in backward with "
        "during_backward=True), to make room: call zero_grad() before the next backward, be in model.no_sync() for all "
        "micro-batches but the last, or read gradients before"
    )


class Gradients:
    """The gradients of one wrapped model's parameters."""

    def __init__(
        self,
        units: Sequence[Unit],
        pager: Pager,
        door: Door,
        views: Views,
        reduction: Reduction,
        tiled: Mapping[int, Tiled],
    ) -> None:
        self._units = units
        self._pager = pager
        self._door = door
        self._views = views
        self._reduction = reduction
        self._home = views.home
        self._tiled = tiled

    # -- landing ------------------------------------------------------------------------------------------

    def land(self, group: Group, index: int, gradient: torch.Tensor) -> None:
        """Add a gradient to what the page has of this parameter, or put it there if it has none."""
        if gradient.layout is not torch.strided:
            raise PagingError(
                f"the gradient of {group.fields[index].name} is sparse ({gradient.layout}): gradient pages are dense; "
                "use sparse=False"
            )
        page = _page(group)
        with self._door:
            if page.pins and page.host is not None and not page.spent and group.scale is None:
                # The unit is open in backward, as it nearly always is: nothing to bring, nothing to pin.
                self._put(group, index, gradient)
                page.dirty = True
                page.blank = False
                return
        with self.resident(group, index), self._door:
            self._put(group, index, gradient)

    def _put(self, group: Group, index: int, gradient: torch.Tensor) -> None:
        place = self._place(group, index)
        group.used[index] = 0
        if group.held[index]:
            place.add_(gradient.to(place.device))
        else:
            place.copy_(gradient)
            group.held[index] = group.landed[index] = 1
        if self._reduction.ranks is not None:
            self._reduction.arrived(group, index)
            return
        group.normed[index] = group.wants_norms
        if group.wants_norms:
            # Into memory of its own: a small tensor for each would lie between the large ones and hold the heap apart.
            torch.linalg.vector_norm(place, out=group.norms[index])
        if self._pager.device is not None:
            self._pager.counters.device_to_host.nbytes[Kind.GRADIENT] += place.numel() * place.element_size()

    def land_zeros(self, group: Group, index: int) -> None:
        """A gradient that is all zeros, added to what there is: nothing is brought, and nothing written."""
        if group.landed[index]:
            return
        page = _page(group)
        if page.blank:
            assert page.gaps is None, "a blank page's frame isn't zeros"
            with self._door:
                group.landed[index] = group.held[index] = 1
                group.used[index] = group.normed[index] = 0
                page.spent = False
            return
        with self.resident(group, index) as place, self._door:
            self._put(group, index, torch.zeros_like(place))

    @contextmanager
    def resident(self, group: Group, index: int) -> Iterator[torch.Tensor]:
        """The place of one parameter's gradient in its page: pinned, scaled as clipping asked, dirty afterwards."""
        with self._door.hold():
            yield from self._resident(group, index)

    def _resident(self, group: Group, index: int) -> Iterator[torch.Tensor]:
        page = _page(group)
        with self._door:
            if page.spent and any(group.landed):
                if page.blank:
                    raise given_up(group.fields[index].name)
                page.spent = False
            self._pager.fault([page], Phase.BACKWARD, page.unit)
        try:
            if group.scale is not None:
                self._apply_scale(group)
            yield self._place(group, index)
        finally:
            with self._door:
                self._pager.unpin([page], dirty=True)

    def _place(self, group: Group, index: int) -> torch.Tensor:
        frame = _page(group).host
        assert frame is not None
        if group.places_at != frame.offset:
            host = self._pager.host
            group.places = [host.view(frame, group.dtype, f.offset, f.size, f.stride) for f in group.fields]
            group.places_at = frame.offset
        return group.places[index]

    def _apply_scale(self, group: Group) -> None:
        """Multiply the group's gradients by the pending factor; the page is resident."""
        scale, group.scale = group.scale, None
        assert scale is not None
        for index, landed in enumerate(group.landed):
            if landed:
                self._place(group, index).mul_(scale)
                group.normed[index] = 0

    # -- clipping -----------------------------------------------------------------------------------------

    def clip(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> torch.Tensor:
        """See ``TieredModule.clip_grad_norm_``. The operations are torch's, in its order, so the bits are."""
        together = self._reduction.ranks is not None and self._reduction.local is None
        if together or self._reduction.parallel:
            return self._clip_all(parameters, max_norm, norm_type, error_if_nonfinite)
        found: dict[torch.dtype, list[torch.Tensor]] = {}  # norms by the gradients' dtype
        groups: dict[int, Group] = {}
        for parameter in parameters:
            group, index = self._home.get(id(parameter), (None, 0))
            if group is None:
                tiled = self._tiled.get(id(parameter))
                for tile in tiled.tiles if tiled is not None else ():
                    group = self._home[id(tile.values)][0]
                    groups[id(group)] = group
                if (
                    parameter.grad is not None
                ):  # an empty one, which has no page; it counts in torch's sum of norms. Or all tiles of one
                    norm = torch.linalg.vector_norm(parameter.grad, norm_type)
                    found.setdefault(parameter.grad.dtype, []).append(norm)
                continue
            if not group.landed[index]:
                continue
            groups[id(group)] = group
            norms = found.setdefault(group.dtype, [])
            if norm_type == 2.0 and group.scale is None and group.normed[index] and group.unscale == 1.0:
                norms.append(group.norms[index])
            elif group.unscale != 1.0:
                with self.resident(group, index) as place:
                    norm = torch.linalg.vector_norm(place, norm_type, dtype=torch.float32)
                    norms.append(norm * group.unscale)
            else:
                with self.resident(group, index) as place:
                    norms.append(torch.linalg.vector_norm(place, norm_type))
        if not found:
            return torch.tensor(0.0)
        norms = [norm for dtype in _in_torchs_order(found) for norm in found[dtype]]
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        factor = _factor(total, max_norm, norm_type, error_if_nonfinite)
        for group in groups.values():
            group.wants_norms = norm_type == 2.0
            group.scale = factor
        return total

    def _clip_all(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> torch.Tensor:
        """The same over all that have slices or parts of the model: equal up to rounding, in sums of another order."""
        if norm_type <= 0:
            raise PagingError(
                f"norm_type: read {norm_type}; across ranks, allowed is a number above 0, or inf"
            )
        self._reduction.settle("clip_grad_norm_()")
        wanted: dict[Group, list[int]] = {}
        for parameter in parameters:
            group, index = self._home.get(id(parameter), (None, 0))
            if group is not None and group.landed[index]:
                wanted.setdefault(group, []).append(index)
        total = torch.tensor(self._reduction.norm(wanted, norm_type), dtype=torch.float32)
        factor = _factor(total, max_norm, norm_type, error_if_nonfinite)
        for group in wanted:
            group.scale = factor
        return total

    # -- what a parameter's .grad is --------------------------------------------------------------------------

    def get(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The parameter's gradient as a view of its page (on the host); the optimizer sees what is written to it."""
        group, index = self._home[id(parameter)]
        if group.trainable and self._reduction.ranks is not None:
            self._reduction.settle_backward("reading a gradient")
            if group.landed[index] and self._reduction.partition.stage:
                return self._reduction.whole(group, index)
        if not group.trainable or not group.landed[index]:
            with torch._C.DisableTorchFunctionSubclass():
                return parameter.grad  # of a frozen parameter, if somebody set it
        page = _page(group)
        if page.spent and page.blank:
            return Spent.of(group, index)
        with self.resident(group, index) as place, self._door:
            page.pins += 1
            view = self._views.lend(place.as_subclass(PagedView), page)
            group.normed[index] = 0
            return view

    def set(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Replace the parameter's gradient; None forgets it."""
        group, index = self._home[id(parameter)]
        if not group.trainable:
            with torch._C.DisableTorchFunctionSubclass():
                parameter.grad = gradient
            return
        field = group.fields[index]
        if gradient is not None and self._reduction.ranks is not None:
            raise PagingError(
                f"{field.name}.grad can't be set where several ranks share the model: scale the loss instead"
            )
        if gradient is not None and (tuple(gradient.shape) != field.size or gradient.dtype != group.dtype):
            raise PagingError(
                f"assigned a gradient of shape {list(gradient.shape)} and dtype {gradient.dtype} to {field.name}, "
                f"which has {list(field.size)} and {group.dtype}"
            )
        group.landed[index] = group.normed[index] = 0
        if gradient is not None:
            with self._door.hold(), torch.no_grad():
                self.land(group, index, gradient)
        elif not any(group.landed):
            self._forget(group)

    def forget(self, only: Container[int] | None = None) -> None:
        """No parameter has a gradient any more (``zero_grad``); ``only``: none of those with these ids."""
        self._reduction.settle_backward("zero_grad()")
        for unit in self._units:
            for group in unit.groups:
                if not group.trainable or not (any(group.landed) or group.aside is not None):
                    continue
                for index, field in enumerate(group.fields):
                    if only is None or id(field.parameter) in only:
                        group.landed[index] = group.held[index] = 0
                        group.normed[index] = group.used[index] = 0
                if not any(group.landed):
                    self._forget(group)

    def zero(self, only: Container[int] | None = None) -> None:
        """All gradients that are there become zeros; ``only``: those of parameters with these ids."""
        if self._reduction.ranks is not None:
            raise PagingError("zero_grad(set_to_none=False) can't be had across ranks: leave set_to_none out")
        for unit in self._units:
            for group in unit.groups:
                wanted = [
                    index
                    for index, field in enumerate(group.fields)
                    if group.landed[index] and (only is None or id(field.parameter) in only)
                ]
                if wanted and len(wanted) == sum(group.landed):
                    self._forget(group)  # not to be brought back for this
                for index in wanted:
                    with self.resident(group, index) as place:
                        place.zero_()
                    group.normed[index] = 0

    def _forget(self, group: Group) -> None:
        group.scale, group.unscale = None, 1.0
        page = _page(group)
        aside, group.aside = group.aside, None
        with self._door:
            if aside is not None:
                self._pager.discard(aside)
            self._pager.room.loans.collect()
            if page.pins:
                page.spent = False  # somebody looks at it: it stays until the next gradient overwrites it
            else:
                self._pager.discard(page)
            self._reduction.forget(group)


def _in_torchs_order(dtypes: Collection[torch.dtype]) -> Sequence[torch.dtype]:
    """In which order torch's clipping adds up the norms of gradients of several dtypes: sums depend on it."""
    if len(dtypes) == 1:
        return list(dtypes)
    stand_ins = [torch.empty(0, dtype=dtype) for dtype in dtypes]
    return [dtype for _, dtype in _group_tensors_by_device_and_dtype([stand_ins])]  # type: ignore[list-item]


def _factor(total: torch.Tensor, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
    """By what clipping multiplies gradients whose norm is ``total``."""
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"the total norm of order {norm_type} for gradients is {total.item()}, so it cannot be clipped; "
            "to go on all the same, set error_if_nonfinite=False"
        )
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)


def _page(group: Group) -> Page:
    page = group.gradient
    assert page is not None
    return page
