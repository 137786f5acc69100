"""The quota: how many bytes may be written to the disks in a day, and the wait of who has written them.

Disks wear. A run that has used its quota up pauses before its next step until enough of what it wrote is a day old.
Time is that of a clock that is never set, so a change of the system's clock neither ends a pause nor begins one.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from tiermem.errors import format_bytes

DAY = 86_400.0
GRAIN = 60.0
"""Seconds that are counted together."""

log = logging.getLogger("tiermem")


class Quota:
    """``limit`` bytes in any 24 hours of this process. ``clock`` and ``sleep`` are seconds, and replaced by tests."""

    def __init__(
        self,
        limit: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.limit = limit
        self._clock = clock
        self._sleep = sleep
        self._written: deque[tuple[float, int]] = deque()  # (when, bytes), oldest first
        self._sum = 0

    def add(self, nbytes: int) -> None:
        """So many bytes are being written now."""
        now = self._clock()
        if self._written and now - self._written[-1][0] < GRAIN:
            when, before = self._written.pop()
            self._written.append((when, before + nbytes))
        else:
            self._written.append((now, nbytes))
        self._sum += nbytes

    @property
    def used(self) -> int:
        """Bytes written in the last 24 hours."""
        while self._written and self._clock() - self._written[0][0] >= DAY:
            self._sum -= self._written.popleft()[1]
        return self._sum

    def wait(self) -> None:
        """Return when less than the limit has been written in a day; says so first if that takes waiting."""
        told = False
        while self.used >= self.limit:
            left = DAY - (self._clock() - self._written[0][0])
            if not told:
                log.warning(
                    f"disk.max_written_per_day: {format_bytes(self._sum)} were written in the last 24 hours, and "
                    f"{format_bytes(self.limit)} are allowed: it pauses for {left / 3600:.1f} hours or more, until "
                    "enough of that is a day old (a host budget that keeps more in memory, or durability.mode = "
                    '"every:N", writes less)'
                )
                told = True
            self._sleep(left)
