"""Least recently used: the eviction that needs no schedule.

On a cyclic scan of more pages than fit, it evicts each page shortly before it is needed and reuses none; it
is for what no schedule predicts, and to compare with.
"""

from collections.abc import Iterator

from tiermem.policies.schedule import NEVER, Cursor


class LRU:
    """Evicts what was used or admitted longest ago. It predicts nothing."""

    def __init__(self) -> None:
        self._resident: dict[int, None] = {}  # in the order of their last use, the latest last

    def follow(self, cursor: Cursor | None) -> None:
        """Does nothing: what has been used is all that counts."""

    def used(self, page: int) -> None:
        if page in self._resident:
            self.admitted(page)

    def admitted(self, page: int) -> None:
        self._resident.pop(page, None)
        self._resident[page] = None

    def removed(self, page: int) -> None:
        self._resident.pop(page, None)

    def order(self) -> Iterator[int]:
        return iter(list(self._resident))

    def next_use(self, page: int) -> int:
        return NEVER
