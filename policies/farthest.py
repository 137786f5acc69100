"""Farthest next use, found when it is asked for: the eviction beside a plan.

The same choice as `Belady`'s. Where a plan is carried out, victims are asked for only when the step departs from it, so
nothing is kept sorted in between.
"""

from collections.abc import Iterator

from tiermem.policies.lru import LRU
from tiermem.policies.schedule import NEVER, Cursor


class Farthest(LRU):
    """Evicts what the schedule needs last, by the cursor it follows; what no access needs goes first.

    Of several that are needed at the same time the least recently used goes first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cursor: Cursor | None = None

    def follow(self, cursor: Cursor | None) -> None:
        self._cursor = cursor

    def order(self) -> Iterator[int]:
        if self._cursor is None:
            return super().order()
        return iter(sorted(super().order(), key=self.next_use, reverse=True))  # stable, also in reverse

    def next_use(self, page: int) -> int:
        if self._cursor is None:
            return NEVER
        return self._cursor.schedule.next_use(page, self._cursor.position)
