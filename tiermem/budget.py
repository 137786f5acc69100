"""Budgets: what a model needs at least on each tier, computed before anything moves.

The smallest workable budget is what must be there at one time: the resident unit, and then the largest of what one
unit needs in forward (its parameters), in backward (parameters and gradients, those of enclosing units included) and
in its update (parameters, gradients and one part of optimizer state). What may not sink to the disk is there always.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tiermem.errors import BudgetError, format_bytes
from tiermem.page import ALIGNMENT, Page
from tiermem.unit import Unit

MIN_PART_NUMEL = 1 << 14
MAX_PART_NUMEL = 1 << 23


@dataclass(frozen=True)
class Need:
    """The smallest workable budget of one tier in bytes, and how it came about in words."""

    nbytes: int
    arithmetic: str


def part_numel(capacity: int) -> int:
    """Elements of one page of optimizer state for a host of ``capacity`` bytes.

    Small enough that several parts (three pages each) are in flight at a time, large enough for the disk's full rate.
    """
    numel = MIN_PART_NUMEL
    while numel < MAX_PART_NUMEL and numel * 2 * 4 * 48 <= capacity:
        numel *= 2
    return numel


def host_need(units: Sequence[Unit], pages: Iterable[Page], unified: bool) -> Need:
    """The smallest host budget; ``unified``: modules compute from host frames."""
    stuck = [page for page in pages if not page.sinks]
    resident = units[0].pages + units[0].gradient_pages if unified else units[0].gradient_pages
    best: tuple[int, str] = (0, "nothing to page")
    for unit in units:
        outer = [units[number] for number in unit.outer]
        chain = [unit, *outer]
        parameters = [page for each in chain for page in each.pages] if unified else []
        gradients = [page for each in chain for page in each.gradient_pages]
        if unit.number:
            for phase, needed in (("forward", parameters), ("backward", parameters + gradients)):
                best = max(best, _sum(f"{phase} of {unit.name}", stuck + resident + needed))
        if not unified:
            for page in unit.pages:  # a stop on its way to the device
                best = max(best, _sum(f"loading {unit.name}", [*stuck, *resident, page]))
        for group in unit.groups:
            for part in group.parts:
                pages_of = [group.parameter, *([group.gradient] if group.gradient else []), *part.pages]
                best = max(best, _sum(f"update of {unit.name}", stuck + pages_of))
    return Need(*best)


def device_need(units: Sequence[Unit]) -> Need:
    """The smallest device budget, where the device has memory of its own."""
    best: tuple[int, str] = _sum("the resident unit", units[0].pages)
    for unit in units[1:]:
        chain = [unit, *(units[number] for number in unit.outer)]
        best = max(
            best, _sum(f"forward of {unit.name}", units[0].pages + [p for each in chain for p in each.pages])
        )
    return Need(*best)


def require(tier: str, capacity: int, need: Need, smallest: Need, overhead: int = 0) -> None:
    """Refuse a budget that can't work. ``overhead``: bytes of the budget that pages can't have (buffers)."""
    if need.nbytes > capacity:
        note = f", and {format_bytes(overhead)} of the budget are the module's buffers" if overhead else ""
        raise BudgetError(
            need.nbytes + overhead,
            max(0, capacity + overhead),
            tier,
            smallest.nbytes + overhead,
            "this model's pages",
            need.arithmetic + note,
        )


def _sum(what: str, pages: Sequence[Page]) -> tuple[int, str]:
    unique = list({page.number: page for page in pages}.values())
    total = sum(page.nbytes for page in unique)
    kinds: dict[str, int] = {}
    for page in unique:
        name = page.kind.name.lower() + (" (resident unit)" if page.unit == 0 else "")
        name += "" if page.sinks else " (may not sink)"
        kinds[name] = kinds.get(name, 0) + page.nbytes
    terms = " + ".join(f"{nbytes:,} {name}" for name, nbytes in kinds.items())
    return total, f"{what} needs {terms} = {total:,} bytes at one time"


def floor(nbytes: int) -> int:
    """``nbytes`` rounded down to what a slab can be."""
    return nbytes // ALIGNMENT * ALIGNMENT
