"""Budgets: what a model needs at least on each tier, computed before anything moves.

The smallest workable budget is what must be there at one time: the resident unit, and then the largest of what one
unit needs in forward (its parameters), in backward (parameters and gradients, those of enclosing units included) and
in its update (parameters, gradients and one part of optimizer state). What may not sink to the disk is there always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from tiermem.aio.memory import Memory
from tiermem.errors import BudgetError, format_bytes
from tiermem.page import ALIGNMENT, Page
from tiermem.parts import MIN_PART_NUMEL, part_numel
from tiermem.table import PageTable
from tiermem.unit import Unit


@dataclass(frozen=True)
class Need:
    """The smallest workable budget of one tier in bytes, and how it came about in words."""

    nbytes: int
    arithmetic: str


def host_need(units: Sequence[Unit], pages: Iterable[Page], unified: bool) -> Need:
    """The smallest host budget; ``unified``: modules compute from host frames."""
    stuck = [page for page in pages if not page.sinks]
    resident = units[0].pages + units[0].gradient_pages if unified else units[0].gradient_pages
    # A page whose only good copy is on the device passes through the host when its frame there is wanted.
    transit = 0 if unified else max((page.nbytes for unit in units for page in unit.pages), default=0)
    best: tuple[int, str] = (0, "nothing to page")
    for unit in units:
        outer = [units[number] for number in unit.outer]
        below = [page for each in outer for page in (each.pages if unified else []) + each.gradient_pages]
        # On a device of its own, they pass through the host together. Slices: of what is changed, or summed.
        parameters = unit.pages + _shards(unit.pages)
        gradients = unit.gradient_pages + _shards(unit.gradient_pages)
        if unit.number:
            for phase, own in (("forward", parameters), ("backward", parameters + gradients)):
                best = max(
                    best, _sum(f"{phase} of {unit.name}", stuck + resident + below + own, below, own, transit)
                )
        for group in unit.groups:
            shared = [group.updated, *([group.summed] if group.gradient else [])]
            several = shared if len(group.parts) > 1 else []
            for part in group.parts:
                needed = stuck + shared + part.pages
                best = max(best, _sum(f"update of {unit.name}", needed, several, part.pages, transit))
    return Need(*best)


def _shards(pages: Iterable[Page]) -> list[Page]:
    return [page.shard for page in pages if page.shard is not None]


def device_need(units: Sequence[Unit]) -> Need:
    """The smallest device budget, where the device has memory of its own."""
    resident = units[0].pages
    best: tuple[int, str] = _sum("the resident unit", resident)
    for unit in units[1:]:
        below = [page for number in unit.outer for page in units[number].pages]
        best = max(best, _sum(f"forward of {unit.name}", resident + below + unit.pages, below, unit.pages))
    return Need(*best)


Build = Callable[[dict[str, nn.Module], int], tuple[PageTable, list[Unit]]]
"""Makes units of modules, with parts of so many elements at most."""


@dataclass(frozen=True)
class Fit:
    """A way to cut a model into units and pages, and what it needs."""

    table: PageTable
    units: list[Unit]
    host: Need
    device: Need | None
    part_numel: int


def fit(
    candidates: Iterable[dict[str, nn.Module]],
    build: Build,
    host: int,
    device: int | None,
    overheads: tuple[int, int],
) -> Fit:
    """The first of the ``candidates`` (modules that are units) that works within ``host`` and ``device`` bytes.

    ``device`` is None where the host is the device; ``overheads`` are the bytes of the host's and the device's budget
    that pages can't have. Raises BudgetError with the smallest budget that any candidate works with.
    """
    tried: list[Fit] = []
    seen = set()
    for modules in candidates:
        names = tuple(modules)
        if names in seen:
            continue
        seen.add(names)
        for numel in dict.fromkeys((part_numel(host), MIN_PART_NUMEL)):
            table, units = build(modules, numel)
            needs = host_need(units, table, device is None), None if device is None else device_need(units)
            found = Fit(table, units, *needs, numel)
            if found.host.nbytes <= host and (found.device is None or found.device.nbytes <= (device or 0)):
                return found
            tried.append(found)
    smallest = min(tried, key=lambda each: each.host.nbytes)
    require("host", host, smallest.host, smallest.host, overheads[0])
    least = min((each.device for each in tried if each.device is not None), key=lambda need: need.nbytes)
    require("device", device or 0, least, least, overheads[1])
    # Each budget would do with another way to cut the model, but not both with one.
    both = min((each for each in tried if each.host.nbytes <= host), key=lambda each: each.device.nbytes)  # type: ignore[union-attr]
    assert both.device is not None
    require("device", device or 0, both.device, both.device, overheads[1])
    raise AssertionError("a fit that was passed over")


def require(tier: str, capacity: int, need: Need, smallest: Need, overhead: int = 0) -> None:
    """Refuse a budget that can't work. ``overhead``: bytes of the budget that pages can't have (buffers)."""
    if need.nbytes > capacity:
        beside = f"{format_bytes(overhead)} of the budget are buffers: the module's, and those of exchanges with ranks"
        note = f", and {beside}" if overhead else ""
        raise BudgetError(
            need.nbytes + overhead,
            max(0, capacity + overhead),
            tier,
            smallest.nbytes + overhead,
            "this model's pages",
            need.arithmetic + note,
        )


def beyond(asked: int, taken: int, memory: Memory) -> str | None:
    """What is to be said of a host budget of ``asked`` bytes of which pages will take ``taken``; None if nothing."""
    if taken > memory.free:
        return (
            f"host.budget allows {format_bytes(asked)}, this model's pages will take {format_bytes(taken)} of it, and "
            f"{format_bytes(memory.free)} of memory are available: the system may kill the process; set a smaller one"
        )
    if asked > memory.most:
        whose = "this machine has" if memory.most == memory.total else "this process's cgroup may have"
        return (
            f"host.budget is {format_bytes(asked)}, and {whose} {format_bytes(memory.most)} of memory: nothing is "
            f"bounded by it (this model's pages will take {format_bytes(taken)})"
        )
    return None


def arena(capacity: int, total: int, need: int, share: int) -> int:
    """Bytes of a host of ``capacity`` bytes that activations get, beside pages of ``total`` bytes that need ``need``.

    That is what pages leave, or one part in ``share`` where they leave less; pages keep what they need.
    """
    return floor(max(0, min(capacity - need, max(capacity // share, capacity - total))))


def no_arena(arena: int, least: int, need: int) -> str:
    """What is to be said where no activation of ``least`` bytes fits its arena."""
    return (
        f"placement.activations: this model's pages need {format_bytes(need)} of the host's budget at the least, and "
        f"{format_bytes(arena)} are left for activations, of which none has less than {format_bytes(least)}: they stay "
        "in memory; raise host.budget, or lower placement.activation_size"
    )


def _sum(
    what: str,
    pages: Sequence[Page],
    pinned: Sequence[Page] = (),
    placed: Sequence[Page] = (),
    transit: int = 0,
) -> tuple[int, str]:
    """The bytes of ``pages``, each counted once, and the sum in words.

    While ``pinned`` ones lie wherever they happened to be brought to, ``placed`` ones must find room between them.
    With n pinned frames there are at most n + 1 gaps. If every gap were too small for a page of s bytes, less than
    (n + 1) s bytes would be free; so n times the largest page on top is always enough.
    """
    unique = list({page.number: page for page in pages}.values())
    kinds: dict[str, int] = {}
    for page in unique:
        name = page.kind.name.lower() + (" (resident unit)" if page.unit == 0 else "")
        name += "" if page.sinks else " (may not sink)"
        kinds[name] = kinds.get(name, 0) + page.nbytes
    gaps = len({page.number for page in pinned}) * max([transit, *(page.nbytes for page in placed)])
    if transit:
        kinds["in transit from the device"] = transit
    if gaps:
        kinds["for gaps between pinned pages"] = gaps
    total = sum(kinds.values())
    terms = " + ".join(f"{nbytes:,} {name}" for name, nbytes in kinds.items())
    return total, f"{what} needs {terms} = {total:,} bytes at one time"


def floor(nbytes: int) -> int:
    """``nbytes`` rounded down to what a slab can be."""
    return nbytes // ALIGNMENT * ALIGNMENT
