"""Farthest next use, found when it is asked for: the eviction beside a plan.

The same choice as `Belady`'s. Where a plan is carried out, victims are asked for only when the step departs from it, so
nothing is kept sorted in between.
"""

from collections.abc import Iterator

from tiermem.policies.schedule import NEVER, Cursor


class Farthest:
    """Evicts what the schedule needs last, by the cursor it follows; what no access needs goes first."""

    def __init__(self) -> None:
        self._cursor: Cursor | None = None
        self._resident: dict[int, None] = {}  # in the order of their last use, the latest last

    def follow(self, cursor: Cursor | None) -> None:
        self._cursor = cursor

    def used(self, page: int) -> None:
        if page in self._resident:
            self.admitted(page)

    def admitted(self, page: int) -> None:
        self._resident.pop(page, None)
        self._resident[page] = None

    def removed(self, page: int) -> None:
        self._resident.pop(page, None)

    def order(self) -> Iterator[int]:
        # Stable, so of several that are needed at the same time the least recently used goes first.
        return iter(sorted(self._resident, key=self.next_use, reverse=True))

    def next_use(self, page: int) -> int:
        if self._cursor is None:
            return NEVER
        return self._cursor.schedule.next_use(page, self._cursor.position)
