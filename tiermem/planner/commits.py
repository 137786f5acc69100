"""Commits on paper: the space that they take on the disk, and what they write there beside a step's plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tiermem.page import Page
from tiermem.policies import Plan
from tiermem.unit import Unit


def changing(units: Sequence[Unit]) -> Iterator[Page]:
    """The pages that a commit has and a step changes: parameters that are trained, and their optimizer state."""
    for unit in units:
        for group in unit.groups:
            if group.trainable:
                yield group.updated
                for part in group.parts:
                    yield from part.pages


def space(table: Iterable[Page], units: Sequence[Unit], commits: int) -> int:
    """Bytes of page files: ``commits`` places more than one for what changes; 0 commits for a run that has none."""
    return sum(page.nbytes for page in table) + commits * sum(page.nbytes for page in changing(units))


def added(units: Sequence[Unit], plan: Plan | None) -> int:
    """Bytes that a commit writes and the step's plan for the host (None: nothing is paged) doesn't."""
    written = {stay.page for stay in plan.stays if stay.dirty} if plan is not None else set()
    return sum(page.nbytes for page in changing(units) if page.number not in written)
