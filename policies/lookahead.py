"""Prefetch by lookahead: what the schedule needs next, up to a limit, past the end of the step into the
next."""

from collections.abc import Callable, Iterator

from tiermem.policies.schedule import Cursor, Phase


class Lookahead:
    """Wants the pages of the accesses ahead of the cursor.

    The window ends after `accesses` accesses, before the page with which its pages would come to more than
    `nbytes` bytes (`size` gives a page's), or where all of a step's accesses have been seen, whichever is
    first. Raises ValueError for `nbytes` without `size` and for limits below 1.
    """

    def __init__(
        self,
        accesses: int | None = None,
        nbytes: int | None = None,
        size: Callable[[int], int] | None = None,
    ) -> None:
        for name, limit in (("accesses", accesses), ("nbytes", nbytes)):
            if limit is not None and limit < 1:
                raise ValueError(f"{name}: {limit} is below 1")
        if nbytes is not None and size is None:
            raise ValueError(f"a limit of {nbytes} bytes needs the sizes of pages")
        self._accesses = accesses
        self._nbytes = nbytes
        self._size = size
        self._cursor: Cursor | None = None

    def follow(self, cursor: Cursor | None) -> None:
        self._cursor = cursor

    def wanted(self) -> Iterator[tuple[int, int]]:
        if self._cursor is None:
            return
        schedule, start = self._cursor.schedule, self._cursor.position
        end = start + len(schedule)
        if self._accesses is not None:
            end = min(end, start + self._accesses)
        seen: set[int] = set()
        nbytes = 0
        for position in range(start, end):
            for page in schedule.pages[position % len(schedule)]:
                if page in seen:
                    continue
                if self._nbytes is not None and self._size is not None:
                    nbytes += self._size(page)
                    if nbytes > self._nbytes:
                        return
                seen.add(page)
                yield position, page

    def phase(self, position: int) -> Phase:
        assert self._cursor is not None, "there is no position without a schedule"
        return self._cursor.schedule.phase(position)
