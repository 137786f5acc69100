"""The compiler: a schedule becomes a plan.

How much of a tier is kept free for pages on their way is a trade: with more of it less is waited for, and more has to
be moved. So a few amounts are tried on paper, and the plan whose step is the shortest is taken.
"""

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from tiermem.policies import lanes, packing, residency
from tiermem.policies.plan import Plan
from tiermem.policies.residency import Stay, Uses
from tiermem.policies.schedule import Schedule
from tiermem.policies.timeline import Link, play

SLACKS = (128, 64, 32, 16, 8, 4)
"""Parts of the capacity that are tried: a 128th, a 64th, ..."""
MAX_TRIED = 20_000
"""Uses of pages up to which all of them are tried; of larger schedules one is, and places are found in one sweep, so
that compiling stays short."""
FEW = 2
"""Cycles that are gone through for such a schedule, after the first two, until what is kept repeats."""
PRICE = 1.0
"""What more bytes have to buy: a plan that moves 5 % more than another must be 5 % faster on paper. There they take
the link's time alone; in a run they also take the memory's from whoever computes, and wear the disk."""
LINK = Link(2e9, 2e9, 5e-5)
"""A common NVMe disk, where nobody has measured."""
WHOLE_LEAD = 8
"""Accesses ahead of its first use at which a page that never leaves is fetched, if it isn't there."""


class Ahead(NamedTuple):
    """How far ahead of its need a page may be fetched: so many accesses, and so many bytes of fetches. None: any."""

    accesses: int | None = None
    nbytes: int | None = None


def compile_plan(
    schedule: Schedule,
    sizes: Mapping[int, int],
    capacity: int,
    *,
    fixed: Collection[int] = (),
    stuck: Collection[int] = (),
    ahead: Ahead | None = None,
    seconds: Sequence[float] = (),
    link: Link = LINK,
    movable: bool = True,
) -> Plan:
    """The plan of one tier of ``capacity`` bytes for a step that is repeated.

    ``fixed`` pages have places of their own outside of the capacity; ``stuck`` ones stay as long as they have content,
    because there is nowhere to write them. No page is fetched further ahead than ``ahead`` says. ``seconds`` are
    what each access computes, if that is known. ``movable`` says whether pages can move within the tier. Raises
    ValueError where what an access needs, or what is stuck, exceeds the capacity.
    """
    uses = Uses(schedule, sizes, fixed, stuck)
    many = sum(map(len, uses.at)) > MAX_TRIED
    computing = seconds if len(seconds) == uses.length else [0.0] * uses.length
    best, least, seen = None, 0.0, set()
    for part in (32,) if many else SLACKS:
        found = tuple(
            residency.stays(
                uses,
                residency.choose(uses, capacity, capacity // part, FEW if many else residency.MAX_CYCLES),
            )
        )
        if hash(found) not in seen:
            seen.add(hash(found))
            plan = _placed(found, uses, capacity, ahead or Ahead(), movable, many)
            cost = play(plan, sizes, computing, link).step * (1 + plan.nbytes) ** PRICE
            if best is None or cost < least:
                best, least = plan, cost
    assert best is not None
    return best


def _placed(
    found: Sequence[Stay], uses: Uses, capacity: int, ahead: Ahead, movable: bool, many: bool
) -> Plan:
    places = lanes if many else packing
    offsets = places.pack(found, uses.sizes, capacity, uses.length)
    leads, behind = places.leads(found, offsets, uses.sizes, uses.length)
    leads = [
        min(WHOLE_LEAD, uses.length - 1) if stay.whole else lead
        for stay, lead in zip(found, leads, strict=True)
    ]
    leads = _limit(found, leads, uses, ahead)
    joined = residency.join(uses, found, offsets, leads, movable)
    return Plan(uses.length, joined, offsets, leads, behind, uses.sizes)


def _limit(found: Sequence[Stay], leads: Sequence[int], uses: Uses, ahead: Ahead) -> list[int]:
    limited = [lead if ahead.accesses is None else min(lead, ahead.accesses) for lead in leads]
    if ahead.nbytes is None:
        return limited
    fetched = [0] * uses.length
    for stay in found:
        fetched[stay.start] += 0 if stay.fresh or stay.whole else uses.sizes[stay.page]
    total = [0, *accumulate(fetched * 2)]  # of the accesses before each one, over two cycles
    for index, stay in enumerate(found):
        need = stay.start + uses.length
        first = bisect_left(total, total[need] - ahead.nbytes, 0, need)
        limited[index] = min(limited[index], max(1, need - first))
    return limited
