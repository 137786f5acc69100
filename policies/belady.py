"""Farthest next use: the eviction that loads the fewest pages when the order is known.

L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5 (2),
1966. With pages of equal size no choice of victims loads fewer pages. With unequal sizes, or where evicting a
dirty page costs a write, it is a good choice, and not always the best.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import count

from tiermem.policies.schedule import NEVER, Cursor


class Belady:
    """Evicts what the schedule needs last, by the cursor it follows.

    Pages that are in no access, and all of them while there is no schedule, go first, least recently used
    first. In the same way the least recently used of several pages of one access goes first.

    A page's next use changes only when the cursor passes it, so the order is kept sorted at a cost of one
    insertion for each use, and not sorted anew for each victim.
    """

    def __init__(self) -> None:
        self._cursor: Cursor | None = None
        self._clock = count()
        self._now = 0
        # (next use, counted over all steps; minus the time of the last use; page), the best victim last.
        self._order: list[tuple[int, int, int]] = []
        self._entries: dict[int, tuple[int, int, int]] = {}

    def follow(self, cursor: Cursor | None) -> None:
        self._cursor = cursor
        self._sort()

    def used(self, page: int) -> None:
        if page in self._entries:
            self.admitted(page)

    def admitted(self, page: int) -> None:
        self.removed(page)
        self._enter(page, -next(self._clock))

    def removed(self, page: int) -> None:
        entry = self._entries.pop(page, None)
        if entry is not None:
            del self._order[bisect_left(self._order, entry)]

    def order(self) -> Iterator[int]:
        self._catch_up()
        # The slice is the copy that may be read while pages come and go; most callers read a few of it.
        return (page for _, _, page in self._order[::-1])

    def next_use(self, page: int) -> int:
        if self._cursor is None:
            return NEVER
        return self._cursor.schedule.next_use(page, self._cursor.position)

    def _start(self) -> int:
        """The step's first position, counted over all steps."""
        return self._cursor.steps * len(self._cursor.schedule) if self._cursor else 0

    def _cursor_now(self) -> int:
        """The cursor's position, counted over all steps."""
        return self._start() + self._cursor.position if self._cursor else 0

    def _enter(self, page: int, recency: int) -> None:
        position = self.next_use(page)
        entry = (NEVER if position == NEVER else self._start() + position, recency, page)
        self._now = max(self._now, self._cursor_now())
        self._entries[page] = entry
        insort(self._order, entry)

    def _catch_up(self) -> None:
        """Renew the entries of pages whose next use the cursor has passed."""
        now = self._cursor_now()
        if now < self._now:
            # The cursor has taken back a jump: between here and there, every entry may have missed a use.
            self._sort()
        self._now = now
        while self._order and self._order[0][0] < now:
            _, recency, page = self._order.pop(0)
            self._enter(page, recency)

    def _sort(self) -> None:
        old = self._order
        self._order, self._entries = [], {}
        self._now = self._cursor_now()
        for _, recency, page in old:
            self._enter(page, recency)
