"""Plans: all moves of a step in one tier, computed from its schedule before it runs.

A plan says which pages stay between their uses, where each lies, what is fetched when and what is written when. It is
for the steady state: the same step again and again. Whoever carries it out is free not to, page by page: a plan that
has become wrong costs time, and nothing else.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tiermem.policies import residency
from tiermem.policies.residency import Stay


class Fetch(NamedTuple):
    """Begin to bring a page in: it is needed ``lead`` accesses later."""

    page: int
    offset: int | None
    lead: int
    fresh: bool
    """There is nothing to load; only its room is wanted."""
    stay: int
    """Which of the plan's stays it begins."""


class Plan:
    """One tier's plan. Positions are those of the schedule; sizes and offsets are in bytes.

    ``fetches[p]`` and ``writes[p]`` may begin once access p has begun: what had to be used before has been.
    """

    def __init__(
        self,
        length: int,
        stays: Sequence[Stay],
        offsets: Sequence[int | None],
        leads: Sequence[int],
        behind: Sequence[Sequence[int]],
        sizes: Mapping[int, int],
    ) -> None:
        self.length = length
        self.stays = stays
        self.offsets = offsets
        self.leads = leads
        self.behind = behind
        self.loaded, self.written = residency.traffic(stays, sizes)
        self.fetches: list[list[Fetch]] = [[] for _ in range(length)]
        self.writes: list[list[int]] = [[] for _ in range(length)]
        # page -> the starts of its stays, in their order, and which they are
        self._of: dict[int, tuple[list[int], list[int]]] = {}
        for index, stay in sorted(enumerate(stays), key=lambda item: item[1].start):
            starts, indices = self._of.setdefault(stay.page, ([], []))
            starts.append(stay.start)
            indices.append(index)
            fetch = Fetch(stay.page, offsets[index], leads[index], stay.fresh, index)
            self.fetches[(stay.start - leads[index]) % length].append(fetch)
            if stay.dirty:
                self.writes[(stay.start + stay.length) % length].append(stay.page)
        for fetches in self.fetches:
            fetches.sort(key=lambda fetch: fetch.lead)

    @property
    def nbytes(self) -> int:
        """Bytes loaded and written in each step."""
        return self.loaded + self.written

    def stay(self, page: int, position: int) -> int | None:
        """Which stay the page is in, or on its way to, while access ``position`` runs; None for none."""
        found = self._of.get(page)
        if found is None:
            return None
        starts, indices = found
        later = bisect_right(starts, position)
        for index in (indices[later - 1], indices[later % len(indices)]):
            stay = self.stays[index]
            early = (position - stay.start + self.leads[index]) % self.length
            if early < self.leads[index] + stay.length:
                return index
        return None

    def place(self, page: int, position: int) -> int | None:
        """The offset at which the page lies, or is to lie, while access ``position`` runs; None for no such place."""
        index = self.stay(page, position)
        return None if index is None else self.offsets[index]
