"""Adoption: a module's own tensors go into pages when it is wrapped, and come back as tensors of its own at the end.

If adoption is broken off (the disk fails, Ctrl-C), what was adopted is given back: wrapping a module never costs it its
parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tiermem.deferral import Deferral, deferral_of
from tiermem.device import Device, available_nbytes
from tiermem.disk import Disk
from tiermem.door import Door
from tiermem.errors import format_bytes
from tiermem.page import Page
from tiermem.pager import Pager
from tiermem.policies import Phase
from tiermem.spill import flat
from tiermem.tier import trim_memory
from tiermem.tiling import NOTHING, Tiling
from tiermem.unit import Field, Group, Part, Unit


class Adoption:
    """Moves the parameters of ``units`` between the module's own memory and pages."""

    def __init__(
        self,
        units: Sequence[Unit],
        pager: Pager,
        disk: Disk | None,
        device: Device,
        door: Door,
        tiling: Tiling = NOTHING,
    ) -> None:
        self._groups = [group for unit in units for group in unit.groups]
        self._pager = pager
        self._disk = disk
        self._device = device
        self._door = door
        self._own: list[
            tuple[Group, list[torch.dtype]]
        ] = []  # taken, and of which dtypes the parameters were
        self._tiled = list(tiling.tiled.values())
        self._deferred: dict[int, Deferral] = {}  # id of a parameter that is deferred -> by whom
        for group in self._groups:
            for field in group.fields:
                if (deferral := deferral_of(_origin(field))) is not None:
                    self._deferred[id(_origin(field))] = deferral
        self._gradients = list(self._groups)  # still to be given back

    # -- into pages ---------------------------------------------------------------------------------------

    def take(self) -> None:
        """Copy all parameters into their pages, unit by unit, and let go of the module's own memory.

        A parameter of another dtype than its page is cast; of a trainable one, the master weights keep what that loses.
        """
        for group in self._groups:
            with self._door, torch.no_grad():
                dtypes = [field.parameter.dtype for field in group.fields]
                self._take(group)
                group.unbind()
                self._own.append((group, dtypes))
            if self._deferred:
                trim_memory()  # what was converted lies between what is kept, and would be kept too
        for deferral in set(self._deferred.values()):
            deferral.cool()
        for tiled in self._tiled:
            tiled.release()

    def settle(self) -> None:
        """The parameters are taken for good: those that were deferred need not be made again."""
        while self._deferred:
            identity, deferral = self._deferred.popitem()
            deferral.forget(identity)

    def resume(self) -> None:
        """The pages are on the disk already: let go of the module's own memory, whose values nobody wants."""
        for group in self._groups:
            with self._door:
                dtypes = [field.parameter.dtype for field in group.fields]
                group.unbind()
                if group.parameter.gathered:
                    group.parameter.blank = False  # its slices are there
                self._own.append((group, dtypes))

    def undo(self) -> None:
        """Give the parameters back as they were, after a wrap that was broken off."""
        with self._door, torch.no_grad():
            while self._own:
                group, dtypes = self._own[-1]
                self._give_back(group, dtypes)
                self._own.pop()
            for tiled in self._tiled:
                if id(tiled.parameter) not in self._deferred:
                    tiled.restore()
            for group in self._groups:
                for field in group.fields:
                    if (deferral := self._deferred.get(id(_origin(field)))) is not None:
                        deferral.take_back(_origin(field))

    def _take(self, group: Group) -> None:
        pager, host, page = self._pager, self._pager.host, group.parameter
        # Masters first: once the parameters' page is there, its eviction would take their own memory from them.
        if group.trainable and any(field.parameter.dtype is not group.dtype for field in group.fields):
            self._take_masters(group)
        if page.gathered:
            self._take_slice(group)
            return
        pager.fault([page], Phase.FORWARD, group.unit, on_host=True)
        try:
            assert page.host is not None
            for field in group.fields:
                place = host.view(page.host, group.dtype, field.offset, field.size, field.stride)
                deferral = self._deferred.get(id(_origin(field)))
                if deferral is None:
                    place.copy_(field.parameter)
                elif field.whole is not None:
                    place.copy_(elements(field, 0, field.numel).view(field.size))
                else:
                    deferral.fill(field.parameter, place)
        finally:
            pager.unpin([page], dirty=True)
        self._send([page])

    def _take_slice(self, group: Group) -> None:
        """What of the group's parameters is in this rank's slice."""
        page, shard, ranks = group.parameter, group.updated, self._pager.transfers.shelf.ranks
        assert ranks is not None
        self._pager.fault([shard], Phase.FORWARD, group.unit, on_host=True)
        try:
            assert shard.host is not None
            place = self._pager.host.bytes_of(shard.host).view(group.dtype)
            first = ranks.place * place.numel()
            for field in group.fields:
                low, high = max(field.offset, first), min(field.offset + field.numel, first + place.numel())
                if low < high:
                    own = elements(field, low - field.offset, high - field.offset)
                    place[low - first : high - first].copy_(own)
        finally:
            self._pager.unpin([shard], dirty=True)
        page.blank = False
        self._send([shard])

    def _take_masters(self, group: Group) -> None:
        for part in group.parts:
            if part.master is not None:
                if self._disk is not None:
                    self._pager.transfers.provide([part.master])
                self._with_master(group, part, part.master, lambda place, own: place.copy_(own), dirty=True)
                self._send([part.master])

    def _with_master(
        self,
        group: Group,
        part: Part,
        master: Page,
        move: Callable[[torch.Tensor, torch.Tensor], Any],
        *,
        dirty: bool,
    ) -> None:
        """``move`` for each field: its elements in a page of master weights, and the same of the parameter itself."""
        self._pager.fault([master], Phase.FORWARD, group.unit, on_host=True)
        try:
            assert master.host is not None
            for field in group.fields:
                if not dirty and id(_origin(field)) in self._deferred:
                    continue  # it is made again, and not given back
                low, high = max(field.offset, part.start), min(field.offset + field.numel, part.stop)
                if low < high:
                    place = self._pager.host.view(
                        master.host, torch.float32, low - part.start, (high - low,), (1,)
                    )
                    move(place, elements(field, low - field.offset, high - field.offset))
        finally:
            self._pager.unpin([master], dirty=dirty)

    def _send(self, pages: Sequence[Page]) -> None:
        """Begin to write, so that the next units find room: wrapping goes at the disk's speed."""
        if self._disk is not None:
            self._pager.writeback(pages)

    # -- and back -----------------------------------------------------------------------------------------

    def give_back(self) -> None:
        """Parameters, and gradients that are there, become ordinary tensors on the device; pages become blank.

        Where they don't fit the memory that is available, they are left without values, with a warning. If an error
        breaks it off, nothing is lost, and it can be called again.
        """
        needed = sum(group.parameter.nbytes for group, _ in self._own)
        available = available_nbytes()
        with self._door, torch.no_grad():
            for group in self._groups:
                for page in group.state_pages:
                    self._pager.discard(page)  # so that nothing is written to make room for what goes anyway
            if self._device.torch_device.type == "cpu" and needed > available:
                warnings.warn(
                    f"the parameters take {format_bytes(needed)} and {format_bytes(available)} of memory are "
                    "available: they are not given back (NaN is in their place). Save state_dict() before close, "
                    "or call close(restore=False)",
                    RuntimeWarning,
                    stacklevel=5,
                )
                for group in self._groups:
                    group.unbind()
                return
            while self._gradients:
                self._give_back_gradients(self._gradients[-1])
                self._gradients.pop()
            while self._own:
                group, _ = self._own[-1]
                self._give_back(group, [group.dtype] * len(group.fields))
                self._own.pop()
            for tiled in self._tiled:
                tiled.restore()

    def _give_back(self, group: Group, dtypes: Sequence[torch.dtype]) -> None:
        page, host = group.parameter, self._pager.host
        group.unbind()  # now, or the page's eviction would do it to the restored parameters
        if all(id(_origin(field)) in self._deferred for field in group.fields):
            return  # they are made again
        self._pager.fault([page], Phase.FORWARD, group.unit, on_host=True)
        try:
            assert page.host is not None
            with torch.inference_mode(False):
                for field, dtype in zip(group.fields, dtypes, strict=True):
                    if id(_origin(field)) in self._deferred:
                        continue
                    view = host.view(page.host, group.dtype, field.offset, field.size, field.stride)
                    field.parameter.data = view.to(self._device.torch_device, dtype, copy=True)
        finally:
            self._pager.unpin([page])
        if any(dtype is not group.dtype for dtype in dtypes) and self._pager.transfers.shelf.ranks is None:
            for part in group.parts:
                if part.master is not None and not part.master.blank:
                    # What the cast to the page's dtype lost.
                    self._with_master(
                        group, part, part.master, lambda place, own: own.copy_(place), dirty=False
                    )
        self._pager.room.loans.collect()
        if not page.pins:
            self._pager.discard(page)

    def _give_back_gradients(self, group: Group) -> None:
        page = group.gradient
        if page is None or not any(group.landed) or (page.spent and page.blank):
            return
        self._pager.fault([page], Phase.BACKWARD, group.unit)
        try:
            assert page.host is not None
            for index, field in enumerate(group.fields):
                if group.landed[index]:
                    view = self._pager.host.view(
                        page.host, group.dtype, field.offset, field.size, field.stride
                    )
                    if group.scale is not None:
                        view.mul_(group.scale)
                    if group.unscale != 1.0:
                        view.mul_(group.unscale)
                    field.parameter.grad = view.to(self._device.torch_device, copy=True)
            group.scale = None
        finally:
            self._pager.unpin([page])
        if not page.pins:
            self._pager.discard(page)


def _origin(field: Field) -> torch.Tensor:
    """The parameter, or the one that it is a tile of."""
    return field.parameter if field.whole is None else field.whole


def elements(field: Field, low: int, high: int) -> torch.Tensor:
    """A parameter's own elements in the order in which its page has them (one dimension)."""
    deferral = deferral_of(_origin(field))
    if deferral is not None:
        return deferral.elements(_origin(field), field.first + low, field.first + high)
    with torch._C.DisableTorchFunctionSubclass():
        tensor = field.parameter.data
    if tuple(tensor.stride()) != field.stride:
        tensor = torch.empty_strided(field.size, field.stride, dtype=tensor.dtype).copy_(tensor)
    return flat(tensor)[low:high]
