"""Portions: what of a page is updated at one time by an optimizer that isn't ours, and whether there is room for that.

A portion is neighbouring tensors of a group, or this rank's slices of them, none of them cut further: so that a class
that mixes the elements of a tensor is right where tensors are whole, and so that bits, which may depend on where a
vector loop ends, are those of whole tensors.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from tiermem.errors import BudgetError
from tiermem.page import Kind, Page, padded
from tiermem.pager import Pager
from tiermem.unit import Group

_OF_ADAM = (Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ)


class Piece(NamedTuple):
    """The field of this number, or the part of it that is in this rank's slice: elements ``start`` to ``stop``."""

    field: int
    start: int
    stop: int
    whole: bool


class Portion:
    """Neighbouring pieces of a group, with a page for each name in their state.

    Between steps ``kept`` has by piece what of its state isn't in pages, and ``paged`` the names of what is.
    ``settings`` are the numbers of the parameter groups that its ``optimizer`` has.
    """

    def __init__(self, group: Group, pieces: Sequence[Piece]) -> None:
        self.group = group
        self.pieces = tuple(pieces)
        self.start, self.stop = pieces[0].start, pieces[-1].stop
        self.pages: dict[str, Page] = {}
        self.kept: list[dict[str, Any]] = [{} for _ in pieces]
        self.paged: list[list[str]] = [[] for _ in pieces]
        self.stepped = False
        self.optimizer: Optimizer | None = None
        self.settings: tuple[int, ...] = ()
        self.stand_ins: list[nn.Parameter] = []


def cut(group: Group, *, whole: bool) -> list[Portion]:
    """What this rank updates of a group, in portions about as large as its parts."""
    if not group.parts:
        return []
    first, last = group.parts[0].start, group.parts[-1].stop
    # Without a disk nothing is gained by small pages, and each is padded.
    most = max(part.stop - part.start for part in group.parts) if group.parts[0].exp_avg.sinks else last
    portions: list[Portion] = []
    pieces: list[Piece] = []
    for index, field in enumerate(group.fields):
        low, high = max(first, field.offset), min(last, field.offset + field.numel)
        if low >= high:
            continue
        if pieces and high - pieces[0].start > most:
            portions.append(Portion(group, pieces))
            pieces = []
        pieces.append(Piece(index, low, high, whole))
    return [*portions, Portion(group, pieces)] if pieces else portions


def require_room(
    pager: Pager,
    name: str,
    portions: Sequence[Portion],
    dtypes: Mapping[torch.dtype, Sequence[torch.dtype]],
    unclaimed: Container[int] = (),
) -> None:
    """Raise BudgetError where one portion's update doesn't fit the host, or all state, if that may not sink.

    ``dtypes``: those of the tensors that are kept for a parameter of that dtype. ``unclaimed`` pages of a resumed run
    are this state, or will be.
    """
    capacity = pager.host.slab.nbytes
    own = {page.number for portion in portions for page in portion.pages.values()}
    stuck = sum(
        page.nbytes
        for page in pager.table
        if not page.sinks
        and page.kind not in _OF_ADAM
        and page.number not in own
        and page.number not in unclaimed
    )
    state = [
        sum(padded((each.stop - each.start) * dtype.itemsize) for dtype in dtypes[each.group.dtype])
        for each in portions
    ]
    sinks = [each.group.parts[0].exp_avg.sinks for each in portions]
    stuck += sum(nbytes for nbytes, sinking in zip(state, sinks, strict=True) if not sinking)
    worst = (stuck, f"what may not sink takes {stuck:,} bytes, its state included")
    for portion, nbytes, sinking in zip(portions, state, sinks, strict=True):
        group, numel = portion.group, portion.stop - portion.start
        shared = [page for page in (group.updated, group.summed) if page.sinks]
        # They stay where they are while pages of the next portion's state find room beside or between them.
        several = sum(each.group is group for each in portions) > 1
        largest = max((padded(numel * each.itemsize) for each in dtypes[group.dtype]), default=0)
        gaps = len(shared) * largest if several else 0
        needed = stuck + sum(page.nbytes for page in shared) + (nbytes if sinking else 0) + gaps
        names = (
            f"{group.fields[portion.pieces[0].field].name} to {group.fields[portion.pieces[-1].field].name}"
        )
        worst = max(
            worst,
            (
                needed,
                f"the update of {names} needs {sum(page.nbytes for page in shared):,} parameters and gradients + "
                f"{nbytes if sinking else 0:,} state + {gaps:,} for gaps between them + {stuck:,} that may not sink = "
                f"{needed:,} bytes at one time",
            ),
        )
    if worst[0] > capacity:
        raise BudgetError(
            worst[0],
            capacity,
            "host",
            None,
            f"the state of {name}",
            f"{worst[1]}; raise host.budget by {worst[0] - capacity:,} bytes, or, where the model fits it without this "
            "state, lower it so that there is a disk tier",
        )
