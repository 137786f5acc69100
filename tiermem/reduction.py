"""Reduction: the gradients of all ranks become one, and what all of them have to agree on before the optimizer.

From stage 2 on a gradient page is given to the ranks as soon as its unit's backward is over; what comes back is this
rank's slice of the mean, in a page of its own. What not all ranks gave (an expert that only one of them used, a branch
that one didn't take) waits for :meth:`Reduction.settle`, where all of them are: who has nothing then gives nothing, and
gets its slice all the same. At stages 0 and 1 that is so for every page.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from tiermem.door import Door
from tiermem.errors import PagingError
from tiermem.page import Page, State
from tiermem.pager import Pager
from tiermem.parallel import ALONE, Parallel, combined
from tiermem.partition import Partition
from tiermem.policies import Phase
from tiermem.ranks import Ranks, Request, Term
from tiermem.ranks.coordinator import SETTLE, STEP
from tiermem.summed import SummedGradient
from tiermem.trace import Reason
from tiermem.unit import Group, Unit

PATIENCE = 8
"""Accesses for which small gradients wait for others to go with."""


class Reduction:
    """What one rank does with its gradients, and with everybody's. Without other ranks, nothing."""

    def __init__(self, units: Sequence[Unit], pager: Pager, door: Door, partition: Partition) -> None:
        self.partition = partition
        self.parallel: Parallel = ALONE
        self.quiet = False  # gradients are kept here for now, see TieredModule.no_sync
        self._groups = [group for unit in units for group in unit.groups if group.trainable]
        self._units = units
        self._pager = pager
        self._door = door
        self._arrived: dict[Group, set[int]] = {}  # fields whose gradient came in this backward
        self._flying: dict[Group, bytes] = {}  # given and not landed -> the fields that were in it
        self._given: dict[Group, int] = dict.fromkeys(self._groups, 0)
        self._reduced: set[Group] = set()  # of stages 0 and 1: nothing has come since
        self._changes: dict[Group, int] = dict.fromkeys(self._groups, 0)  # of what the gradients are
        self._norms: dict[Group, list[float]] = {}  # of the fields' parts in this rank's slice
        self._wants_norms = False
        # Who exchanges momenta, so that each rank's gradients stay its own (see tiermem.trainer.compressed).
        self.local: object | None = None
        self._unsettled = False  # has a backward been since all ranks met?

    @property
    def ranks(self) -> Ranks | None:
        """The other ranks; None where this one is alone."""
        return self._pager.transfers.shelf.ranks

    # -- while backward runs ------------------------------------------------------------------------------

    def arrived(self, group: Group, index: int) -> None:
        """The gradient of one field has landed in its page. Under the door."""
        if group in self._reduced:
            if self.partition.stage == 1:
                raise PagingError(
                    f"the gradient of {group.fields[index].name} has been summed over the ranks already, and each has "
                    "its slice only: call zero_grad() before the next backward, or use ranks.stage 0, 2 or 3"
                )
            self._reduced.discard(group)
        self._arrived.setdefault(group, set()).add(index)
        self._changes[group] += 1
        self._norms.pop(group, None)
        self._unsettled = True

    def unit_closed(self, unit: Unit) -> None:
        """Backward has left a unit: what is complete of its gradients is given to the ranks. Under the door."""
        for group in unit.groups:
            if len(self._arrived.get(group, ())) == len(group.fields):
                self._give(group)

    def end_backward(self) -> None:
        """Backward is over: the rest is given too. Under the door."""
        self._unsettled = True
        for group in list(self._arrived):
            self._give(group)
        self._arrived.clear()
        if self.ranks is not None:
            self.ranks.flush()

    def _give(self, group: Group) -> None:
        page = group.gradient
        assert page is not None
        self._pager.room.loans.collect()
        if self.quiet or not self.partition.shards_gradients or page.pins or group in self._flying:
            return
        self._arrived.pop(group, None)
        if any(group.held):
            self._send(group)

    def _send(self, group: Group) -> None:
        """Give what is in the gradient page to the ranks; it lands like any transfer."""
        page, ranks = group.gradient, self.ranks
        assert page is not None
        assert ranks is not None
        shard = self._open(group, [page])
        held = bytes(group.held)
        self._fill(group, held)
        target = self._typed(shard)
        self._given[group] += 1
        term = Term(self._typed(page), target, shard.blank)
        request = ranks.reduce(page.key, self._given[group], term, PATIENCE)
        self._flying[group] = held
        group.held[:] = bytes(len(held))
        self._pager.unpin([page], dirty=True)

        def ended(returned: bool) -> None:
            del self._flying[group]
            if returned:
                self._given[group] -= 1
                group.held[:] = held
            self._landed(group, shard, changed=not returned)

        self._pager.transfers.give(page, request, ended)

    def _open(self, group: Group, pages: list[Page]) -> Page:
        """Pin the page for this rank's slice of the sum, with ``pages``."""
        shard = group.summed
        if shard.spent:
            if shard.blank:
                raise PagingError(
                    f"the gradients of unit {group.unit} were given up after optimizer.step(), to make room: call "
                    "zero_grad() before the next backward"
                )
            shard.spent = False
        self._pager.fault([*pages, shard], Phase.BACKWARD, group.unit)
        return shard

    def _landed(self, group: Group, shard: Page, changed: bool) -> None:
        if changed and self._wants_norms and shard.state is State.HOST:
            self._norms[group] = self._slice_norms(group, range(len(group.fields)), 2.0)
        self._pager.unpin([shard], dirty=changed)

    def _fill(self, group: Group, here: bytes) -> None:
        """Fields whose gradient isn't ``here`` are zero in the page."""
        page = group.gradient
        assert page is not None
        whole = self._typed(page)
        if page.blank:
            whole.zero_()
            return
        for index, field in enumerate(group.fields):
            if not here[index]:
                whole[field.offset : field.offset + field.numel].zero_()

    def _slice(self, whole: torch.Tensor) -> tuple[int, int]:
        """Which elements of a whole page are this rank's."""
        size = whole.numel() // self.partition.world
        return self.partition.rank * size, (self.partition.rank + 1) * size

    def _typed(self, page: Page) -> torch.Tensor:
        assert page.host is not None
        return self._pager.host.bytes_of(page.host).view(page.dtype)

    # -- where all ranks meet -----------------------------------------------------------------------------

    def settle(self, reason: str) -> None:
        """Have every gradient summed over all ranks that have one; ``landed`` then is the same on all of them.

        All ranks must call it. ``reason`` is what for, in words.
        """
        ranks = self.ranks
        if ranks is None:
            return
        with self._door:
            self._unsettled = False
            self._arrived.clear()
            report = [
                [bytes(group.landed).hex(), self._given[group], self._has(group)] for group in self._groups
            ]
        said = ranks.meet(SETTLE, report, reason)
        with self._door.hold():
            self._land()
            for index, group in enumerate(self._groups):
                rows = [each[index] for each in said]
                decided = min(row[1] for row in rows)
                for row in rows:
                    for field, landed in enumerate(bytes.fromhex(row[0])):
                        group.landed[field] |= landed
                if any(row[2] or row[1] > decided for row in rows):
                    with self._door:
                        self._finish(group, ranks, bytes.fromhex(rows[ranks.rank][0]), reason)
            self._land()

    def settle_backward(self, reason: str) -> None:
        """:meth:`settle`, unless no backward has been since the last time."""
        if self._unsettled:
            self.settle(reason)

    def _has(self, group: Group) -> bool:
        return any(group.held) and group not in self._reduced

    def _land(self) -> None:
        for group in list(self._flying):
            with self._door:
                if group in self._flying:
                    assert group.gradient is not None
                    self._pager.transfers.wait(group.gradient)
        with self._door:
            self._pager.transfers.raise_error()

    def _finish(self, group: Group, ranks: Ranks, mine: bytes, reason: str) -> None:
        """One page of which not all is summed yet, on all ranks at once; ``mine``: fields that came on this one."""
        page = group.gradient
        assert page is not None
        if self.partition.shards_gradients:
            if any(group.held):
                self._send(group)
                return
            shard = self._open(group, [])
            try:
                self._given[group] += 1
                term = Term(None, self._typed(shard), shard.blank)
                request = ranks.reduce(page.key, self._given[group], term)
                self._wait(page, Reason.REDUCE, request, reason)
            finally:
                self._landed(group, shard, changed=True)
            return
        if self.local is not None and mine == bytes(group.landed):
            self._reduced.add(group)
            return
        self._pager.fault([page], Phase.BACKWARD, group.unit)
        try:
            self._fill(group, mine)
            if self.local is not None:
                self._reduced.add(group)
                return
            whole = self._typed(page)
            own = self._slice(whole)
            self._given[group] += 1
            term = Term(whole, whole[slice(*own)], True)
            request = ranks.reduce(page.key, self._given[group], term)
            self._wait(page, Reason.REDUCE, request, reason)
            if self.partition.stage == 0:
                self._wait(page, Reason.GATHER, ranks.share(f"gradient {page.key}", whole, own), reason)
            self._reduced.add(group)
            group.normed[:] = bytes(len(group.fields))
        finally:
            self._pager.unpin([page], dirty=True)

    def _wait(self, page: Page, what: Reason, request: Request, reason: str) -> None:
        ranks = self.ranks
        assert ranks is not None
        ranks.wait(request, reason)
        self._pager.transfers.log.collective(page, what, request)

    # -- loss scaling -------------------------------------------------------------------------------------

    def unscale(
        self, only: Container[int], inverse: torch.Tensor, found: torch.Tensor, masters: bool
    ) -> None:
        """Multiply the gradients of the parameters with these ids by ``inverse``; all ranks must ask.

        ``found`` becomes above 0 where one isn't finite, on whichever rank. With ``masters``, those of float16 stay as
        they are, and the optimizer is told to do it. Raises ValueError for those of float16 otherwise.
        """
        self.settle("GradScaler.unscale_()")
        for group in self._groups:
            wanted = [
                index
                for index, field in enumerate(group.fields)
                if group.landed[index] and id(field.parameter) in only
            ]
            if not wanted:
                continue
            half = group.dtype is torch.float16
            if half and (not masters or len(wanted) != sum(group.landed)):
                raise ValueError(
                    f"the gradient of {group.fields[wanted[0]].name} is float16, and unscaled in float16 it would lose "
                    "its smallest values: give all parameters of its unit to tiermem's Adam or AdamW, which have "
                    "float32 masters"
                )
            with self._summed(group, dirty=not half or group.scale is not None):
                self.scale(group)
                for piece in self._pieces(group, wanted):
                    if half:
                        found += ~torch.linalg.vector_norm(piece, math.inf).isfinite()
                    else:
                        torch._amp_foreach_non_finite_check_and_unscale_([piece], found, inverse)
                if half:
                    group.unscale *= float(inverse)
                group.normed[:] = bytes(len(group.normed))
                self._norms.pop(group, None)
        ranks, here = self.ranks, float(found)
        if ranks is not None:
            here = max(ranks.meet("overflow", here, "GradScaler.unscale_()"))
        found.fill_(self.parallel.largest(here))

    def _pieces(self, group: Group, indices: Iterable[int]) -> Iterator[torch.Tensor]:
        """The elements of these fields whose sum this rank has; the page is resident."""
        page = group.summed
        whole, first = self._typed(page), group.first_of(page)
        low, high = self.partition.own(group.numel, group.dtype)
        for index in indices:
            field = group.fields[index]
            start, stop = max(low, field.offset), min(high, field.offset + field.numel)
            if start < stop:
                yield whole[start - first : stop - first]

    # -- norms --------------------------------------------------------------------------------------------

    def norm(self, wanted: dict[Group, list[int]], norm_type: float) -> float:
        """The norm of the gradients of these fields, over all that have parts of the model; few numbers travel.

        Gradients must be settled.
        """
        self._wants_norms = norm_type == 2.0
        parts: list[list[float]] = [[] for _ in self.parallel.kinds]
        for group, indices in wanted.items():
            kinds = [self.parallel.kind_of(group.fields[index].parameter) for index in indices]
            known = self._norms.get(group) if norm_type == 2.0 and group.scale is None else None
            if known is not None:
                norms = [known[index] for index in indices]
            else:
                with self._summed(group):
                    self.scale(group)
                    norms = self._slice_norms(group, indices, norm_type)
            for kind, norm in zip(kinds, norms, strict=True):
                parts[kind].append(norm * group.unscale)
        mine = [combined(each, norm_type) for each in parts]
        if self.ranks is not None:
            said = self.ranks.meet("norm", [norm.hex() for norm in mine], "clip_grad_norm_()")
            rows = zip(*(said[rank] for rank in self.ranks.near), strict=True)
            mine = [combined([float.fromhex(each) for each in row], norm_type) for row in rows]
        return self.parallel.norm(mine, norm_type)

    @contextmanager
    def _summed(self, group: Group, dirty: bool = True) -> Iterator[Page]:
        page = group.summed
        with self._door.hold():
            with self._door:
                if page.spent:
                    if page.blank:
                        raise PagingError(
                            f"the gradients of unit {group.unit} were given up after optimizer.step(), to make room: "
                            "read them before step()"
                        )
                    page.spent = False
                self._pager.fault([page], Phase.BACKWARD, group.unit)
            try:
                yield page
            finally:
                with self._door:
                    self._pager.unpin([page], dirty=dirty)

    def scale(self, group: Group) -> None:
        """Apply what clipping has asked for to what the optimizer reads; its page is resident."""
        if group.scale is not None:
            scale, group.scale = group.scale, None
            self._typed(group.summed).mul_(scale)
            self._norms.pop(group, None)
            group.normed[:] = bytes(len(group.normed))

    def _slice_norms(self, group: Group, indices: Iterable[int], norm_type: float) -> list[float]:
        """The norm of each field's elements within this rank's slice; its page is resident."""
        page = group.summed
        whole = self._typed(page)
        first = group.first_of(page)
        size = self.partition.slice_numel(group.numel, group.dtype)
        low, high = self.partition.rank * size, (self.partition.rank + 1) * size
        norms = []
        for index in indices:
            field = group.fields[index]
            start, stop = max(low, field.offset), min(high, field.offset + field.numel)
            if start < stop:
                piece = whole[start - first : stop - first]
                norms.append(float(torch.linalg.vector_norm(piece, norm_type, dtype=torch.float32)))
            else:
                norms.append(0.0)
        return norms

    # -- the optimizer's step -----------------------------------------------------------------------------

    def begin_step(self, fact: Any = None) -> list[Any]:
        """All ranks are here, with their gradients summed: nobody needs the parameters as they were any more.

        ``fact`` is what this rank has to tell the others (JSON); returns what each told, by rank.
        """
        ranks = self.ranks
        if ranks is None:
            return [fact]
        self.settle("optimizer.step()")
        with self._door.hold(), self._door:
            # What is on its way for this rank ends first: its slices are with the others as they were.
            self._pager.transfers.land_gathers()
        return ranks.meet(STEP, fact, "optimizer.step()")

    def updated(self, group: Group) -> None:
        """This rank has updated its slice of a group's parameters."""
        ranks = self.ranks
        if ranks is None or self.partition.stage == 0:
            return
        page = group.parameter
        if page.gathered:
            with self._door:
                self._pager.renew(page)
            ranks.offer([(page.key, page.version)])
            return
        with self._door.hold(), self._door:
            self._pager.fault([page], Phase.OPTIMIZER, group.unit)
            try:
                whole = self._typed(page)
                own = self._slice(whole)
                request = ranks.share(f"parameters {page.key}", whole, own)
                self._wait(page, Reason.GATHER, request, "optimizer.step()")
            finally:
                self._pager.unpin([page], dirty=True)

    def end_step(self) -> None:
        """This rank has updated all it has: others can have any of it. Under the door."""
        ranks = self.ranks
        if ranks is not None:
            ranks.stepping = False
            pages = (group.parameter for unit in self._units for group in unit.groups)
            ranks.offer((page.key, page.version) for page in pages if page.gathered)

    def complete(self, group: Group, index: int, whole: torch.Tensor) -> None:
        """Fill in what other ranks have of a field's optimizer state. All ranks must ask."""
        ranks, field = self.ranks, group.fields[index]
        if ranks is None or self.partition.stage == 0:
            return
        flat = whole.as_strided((whole.numel(),), (1,))
        ranks.wait(
            ranks.share("state", flat, self._own(group, index)), f"the optimizer's state of {field.name}"
        )

    def _own(self, group: Group, index: int) -> tuple[int, int]:
        """Which of a field's elements are in this rank's slice."""
        field = group.fields[index]
        size = self.partition.slice_numel(group.numel, group.dtype)
        low = max(self.partition.rank * size, field.offset)
        high = min((self.partition.rank + 1) * size, field.offset + field.numel)
        return (low - field.offset, high - field.offset) if low < high else (0, 0)

    # -- the whole gradient of one parameter --------------------------------------------------------------

    def whole(self, group: Group, index: int) -> torch.Tensor:
        """One parameter's gradient, of which each rank has a part, as a tensor of its own. All ranks must ask."""
        ranks, field = self.ranks, group.fields[index]
        assert ranks is not None
        flat = torch.empty(field.numel, dtype=group.dtype)
        own = self._own(group, index)
        with self._summed(group) as page:
            self.scale(group)
            start = field.offset - group.first_of(page)
            flat[slice(*own)].copy_(self._typed(page)[start + own[0] : start + own[1]])
        ranks.wait(ranks.share("grad", flat, own), f"the gradient of {field.name}")
        whole = flat.as_strided(field.size, field.stride)
        return SummedGradient.of(whole, partial(self._put, group, index, self._changes[group]))

    def _put(self, group: Group, index: int, changes: int, whole: torch.Tensor) -> None:
        """A whole gradient has been written to: take this rank's slice of it over. Every rank has written the same."""
        field = group.fields[index]
        if changes != self._changes[group]:
            raise PagingError(
                f"a gradient of {field.name} was written to that has changed since it was read: read .grad anew"
            )
        own = self._own(group, index)
        with self._summed(group) as page:
            start = field.offset - group.first_of(page)
            place = self._typed(page)[start + own[0] : start + own[1]]
            place.copy_(whole.as_strided((field.numel,), (1,))[slice(*own)])
        self._norms.pop(group, None)
        group.normed[index] = 0

    def forget(self, group: Group) -> None:
        """Nobody needs the group's gradients any more. Under the door; the gradient page has been discarded."""
        self._reduced.discard(group)
        self._norms.pop(group, None)
        self._changes[group] += 1
        shard = group.gradient.shard if group.gradient is not None else None
        if shard is not None:
            group.held[:] = bytes(len(group.held))
            self._pager.discard(shard)
