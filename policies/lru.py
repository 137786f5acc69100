"""Least recently used: the eviction that needs no schedule.

On a cyclic scan of more pages than fit, it evicts each page shortly before it is needed and reuses none; it
is for what no schedule predicts, and to compare with.
"""

from collections.abc import Iterator
from itertools import chain, islice

from tiermem.policies.schedule import NEVER, Cursor

FEW = 64
"""Pages of an order that are looked up when it is asked for. The rest is when they are all read, which is rare."""


class LRU:
    """Evicts what was used or admitted longest ago. It predicts nothing."""

    def __init__(self) -> None:
        self._resident: dict[int, int] = {}  # page -> when it was used last, in this order
        self._clock = 0

    def follow(self, cursor: Cursor | None) -> None:
        """Does nothing: what has been used is all that counts."""

    def used(self, page: int) -> None:
        if page in self._resident:
            self.admitted(page)

    def admitted(self, page: int) -> None:
        self._resident.pop(page, None)
        self._clock = clock = self._clock + 1
        self._resident[page] = clock

    def removed(self, page: int) -> None:
        self._resident.pop(page, None)

    def order(self) -> Iterator[int]:
        first = list(islice(self._resident, FEW))
        return chain(first, self._rest(frozenset(first), self._clock)) if len(first) == FEW else iter(first)

    def _rest(self, first: frozenset[int], clock: int) -> Iterator[int]:
        for page, used in list(self._resident.items()):
            if used <= clock and page not in first:
                yield page

    def next_use(self, page: int) -> int:
        return NEVER
