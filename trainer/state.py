"""State in pages: what an optimizer of any class keeps for the parameters of one wrapped model, and where.

Tensors of the parameter's shape move into pages, which are made when such a tensor is first seen; whatever else is
there (counts, flags, tensors of other shapes) stays with its portion, in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns as now
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from tiermem.checkpoint.contents import Stored
from tiermem.checkpoint.grid import order_of
from tiermem.hooks import Hooks
from tiermem.page import Kind, Page, padded
from tiermem.policies import Phase
from tiermem.trace import Event
from tiermem.trainer.portion import Piece, Portion, cut
from tiermem.trainer.scalars import decoded, encoded, packed, unpacked
from tiermem.trainer.update import Update
from tiermem.unit import Field, Group, Stretch

Facts = tuple[dict[str, torch.dtype], dict[str, Any]]
"""Of one parameter's state: the names and dtypes of what is in pages, and what isn't."""


class StatefulUpdate(Update):
    """An update whose state is in pages of its own. ``sliced``: of the parameters, this rank has slices."""

    def __init__(self, hooks: Hooks, owner: Optimizer) -> None:
        super().__init__(hooks, owner)
        # By the id of a group: all of it, or of this rank's slice of it.
        self._portions: dict[int, list[Portion]] = {}
        partition = hooks.reduction.partition
        self.sliced = partition.world > 1 and partition.stage > 0

    def portions_of(self, group: Group) -> list[Portion]:
        """All of a group, or of this rank's slice of it, in portions about as large as its parts."""
        known = self._portions.get(id(group))
        if known is None:
            known = self._portions[id(group)] = cut(group, whole=not self.sliced)
        return known

    def view(self, group: Group, piece: Piece, page: Page, first: int) -> torch.Tensor:
        """A piece in a page that is pinned on the host and begins with element ``first`` of the group."""
        assert page.host is not None
        field = group.fields[piece.field]
        size, stride = (field.size, field.stride) if piece.whole else ((piece.stop - piece.start,), (1,))
        return self.hooks.pager.host.view(page.host, page.dtype, piece.start - first, size, stride)

    def pageable(self, portion: Portion, place: int, name: str, value: Any) -> bool:
        """Does a value in the state of a piece belong into a page?"""
        piece = portion.pieces[place]
        field = portion.group.fields[piece.field]
        size = field.size if piece.whole else (piece.stop - piece.start,)
        page = portion.pages.get(name)
        return (
            isinstance(value, torch.Tensor)
            and name != "step"
            and field.numel > 1
            and tuple(value.shape) == size
            and value.layout is torch.strided
            and (page is None or page.dtype is value.dtype)
        )

    def put(
        self, portion: Portion, new: Sequence[tuple[int, str, torch.Tensor]], around: Sequence[Page] = ()
    ) -> None:
        """Copy state into its pages, which are made for names that have none.

        ``around`` is pinned with them, and stays so.
        """
        made = [self._page(portion, name, value.dtype) for _, name, value in new if name not in portion.pages]
        fresh = [page for page in made if page is not None]
        pages = [portion.pages[name] for name in dict.fromkeys(name for _, name, _ in new)]
        old = [page for page in pages if page not in fresh]
        if not pages:
            return
        pager, door = self.hooks.pager, self.hooks.door
        with door:
            pager.fault([*old, *around], Phase.OPTIMIZER, portion.group.unit, overwrite=fresh)
        try:
            for page in fresh:
                assert page.host is not None
                pager.host.bytes_of(page.host).zero_()  # between tensors, and where there is no state yet
            for place, name, value in new:
                self.view(portion.group, portion.pieces[place], portion.pages[name], portion.start).copy_(
                    value
                )
        finally:
            with door:
                pager.unpin(pages, dirty=True)
                if pager.transfers.disk is not None:
                    pager.writeback(fresh)

    def _page(self, portion: Portion, name: str, dtype: torch.dtype) -> Page | None:
        """A new page for the state of this name; None where another piece's has been made."""
        if name in portion.pages:
            return None
        group, pager, commits = portion.group, self.hooks.pager, self.hooks.commits
        numel = portion.stop - portion.start
        page = None
        if commits is not None:
            page = commits.claim(group.unit, dtype, padded(numel * dtype.itemsize))
        if page is None:
            page = pager.table.add(group.unit, Kind.STATE, dtype, numel, sinks=group.parts[0].exp_avg.sinks)
            if commits is not None:
                commits.admit(page)
            with self.hooks.door:
                if pager.transfers.disk is not None:
                    pager.transfers.provide([page])
                self.hooks.trace.record(Event.PAGE, now(), 0, group.unit, page.number, page.nbytes)
        self._bind(portion, name, page)
        return page

    def _bind(self, portion: Portion, name: str, page: Page) -> None:
        """The state of this name is in that page."""
        portion.pages[name] = page
        stretches = portion.group.states.setdefault(name, [])
        if all(stretch.page is not page for stretch in stretches):
            stretches.append(Stretch(page, portion.start, portion.stop))
            stretches.sort(key=lambda stretch: stretch.start)

    # -- state, as commits have it --------------------------------------------------------------------------

    def committed(self) -> list[dict[str, Any]]:
        """By portion: its pages' numbers by name, and of each parameter what is in them and what isn't.

        As tensors and plain data; portions without state are left out.
        """
        return [
            {
                "unit": unit.number,
                "group": number,
                "start": portion.start,
                "pages": {name: page.number for name, page in portion.pages.items()},
                "pieces": pieces,
            }
            for unit in self.hooks.units
            for number, group in enumerate(unit.groups)
            for portion in self._portions.get(id(group), ())
            if (pieces := _pieces(portion))
        ]

    def take_over(self, portions: Sequence[Mapping[str, Any]]) -> None:
        """What :meth:`committed` gave, of this optimizer's parameters and perhaps others', is their state."""
        commits = self.hooks.commits
        assert commits is not None
        names = {name: identity for identity, name in self.names().items()}
        for each in portions:
            group = self.hooks.units[each["unit"]].groups[each["group"]]
            mine = {name: piece for name, piece in each["pieces"].items() if name in names}
            if not mine:
                continue
            portion = next(one for one in self.portions_of(group) if one.start == each["start"])
            for name, number in each["pages"].items():
                commits.unclaimed.pop(number, None)
                if name not in portion.pages:
                    self._bind(portion, name, self.hooks.pager.table[number])
            for place, piece in enumerate(portion.pieces):
                found = mine.get(group.fields[piece.field].name)
                if found is not None:
                    portion.paged[place] = list(found["paged"])
                    portion.kept[place] = {name: unpacked(value) for name, value in found["kept"].items()}
            portion.optimizer = None  # its instance of the class began without this
            portion.stepped = True

    # -- state, as state_dict and checkpoints have it -------------------------------------------------------

    def facts(self) -> dict[int, Facts]:
        """By the ids of parameters with state. Where ranks have slices, all must ask: each knows of its slices only."""
        found: dict[int, Facts] = {}
        for portions in self._portions.values():
            for portion in portions:
                for piece, kept, names in zip(portion.pieces, portion.kept, portion.paged, strict=True):
                    if kept or names:
                        identity = id(portion.group.fields[piece.field].parameter)
                        found[identity] = ({name: portion.pages[name].dtype for name in names}, dict(kept))
        ranks = self.hooks.reduction.ranks
        if ranks is None or not self.sliced:
            return found
        names_of = {
            identity: group.fields[index].name for identity, (group, index) in self.hooks.home.items()
        }
        said = ranks.meet(
            "optimizer",
            {
                names_of[identity]: [
                    {name: str(dtype).removeprefix("torch.") for name, dtype in paged.items()},
                    {name: encoded(value, f"{name} of {names_of[identity]}") for name, value in kept.items()},
                ]
                for identity, (paged, kept) in found.items()
            },
            "the optimizer's state",
        )
        merged = {name: each for of_rank in reversed(said) for name, each in of_rank.items()}
        return {
            identity: (
                {key: getattr(torch, dtype) for key, dtype in merged[name][0].items()},
                {key: decoded(value) for key, value in merged[name][1].items()},
            )
            for identity, name in names_of.items()
            if name in merged
        }

    def reader(self) -> Callable[[torch.Tensor], dict[str, Any]]:
        """See :meth:`Update.reader` and :meth:`facts`."""
        self.hooks.release_resident()
        facts = self.facts()
        return lambda parameter: self._filled(parameter, *facts.get(id(parameter), ({}, {})))

    def _filled(
        self, parameter: torch.Tensor, paged: Mapping[str, torch.dtype], kept: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What :meth:`facts` says of a parameter, with the tensors that are in pages."""
        group, index = self.hooks.home[id(parameter)]
        field = group.fields[index]
        state = {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in kept.items()
        }
        for name, dtype in paged.items():
            whole = torch.empty_strided(field.size, field.stride, dtype=dtype)
            flat = whole.as_strided((field.numel,), (1,))
            for portion, piece in self._holding(group, index):
                page = portion.pages[name]
                with self.hooks.door.hold():
                    with self.hooks.door:
                        self.hooks.pager.fault([page], Phase.OPTIMIZER, group.unit)
                    try:
                        flat[piece.start - field.offset : piece.stop - field.offset].copy_(
                            self._flat(page, portion, piece)
                        )
                    finally:
                        with self.hooks.door:
                            self.hooks.pager.unpin([page])
            if self.sliced:
                self.hooks.reduction.complete(group, index, whole)
            state[name] = whole
        return state

    def write(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Take over the state of one parameter from what a reader, an unpaged optimizer or a checkpoint gave."""
        self.hooks.release_resident()
        group, index = self.hooks.home[id(parameter)]
        field = group.fields[index]
        for portion, piece in self._holding(group, index):
            place = portion.pieces.index(piece)
            portion.kept[place], portion.paged[place] = {}, []
            portion.optimizer = None  # a class may begin with state of its own, where it is given none
            new = []
            for name, value in state.items():
                if isinstance(value, Stored):
                    value = _read(value, field, piece)
                mine = value
                if isinstance(value, torch.Tensor) and tuple(value.shape) == field.size and not piece.whole:
                    dense = torch.empty_strided(field.size, field.stride, dtype=value.dtype).copy_(value)
                    flat = dense.as_strided((field.numel,), (1,))
                    mine = flat[piece.start - field.offset : piece.stop - field.offset]
                if self.pageable(portion, place, name, mine):
                    portion.paged[place].append(name)
                    new.append((place, name, mine))
                else:
                    portion.kept[place][name] = value.clone() if isinstance(value, torch.Tensor) else value
            self.hooks.pager.announce(list(portion.pages.values()))
            with self.hooks.door.hold():
                self.put(portion, new)

    def _holding(self, group: Group, index: int) -> list[tuple[Portion, Piece]]:
        """The piece of a field, with its portion; none where it is in other ranks' slices."""
        return [
            (portion, piece)
            for portion in self.portions_of(group)
            for piece in portion.pieces
            if piece.field == index
        ]

    def _flat(self, page: Page, portion: Portion, piece: Piece) -> torch.Tensor:
        assert page.host is not None
        size = (piece.stop - piece.start,)
        return self.hooks.pager.host.view(page.host, page.dtype, piece.start - portion.start, size, (1,))


def _pieces(portion: Portion) -> dict[str, dict[str, Any]]:
    """What is kept of each parameter that has state, by its name."""
    fields = portion.group.fields
    return {
        fields[piece.field].name: {
            "paged": list(names),
            "kept": {name: packed(value) for name, value in kept.items()},
        }
        for piece, kept, names in zip(portion.pieces, portion.kept, portion.paged, strict=True)
        if kept or names
    }


def _read(stored: Stored, field: Field, piece: Piece) -> torch.Tensor:
    """Of a tensor as large as the parameter, what belongs to a piece; of any other, all."""
    if stored.size != field.shape or field.numel == 1:
        return stored.whole()
    out = torch.empty(piece.stop - piece.start, dtype=stored.dtype)
    order = order_of(field.shape, field.stride)
    assert order is not None
    stored.read(field.first + piece.start - field.offset, out, order)
    return out.as_strided(field.size, field.stride) if piece.whole else out
