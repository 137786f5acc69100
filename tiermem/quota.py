"""The quota: how many bytes may be written to the disks in a day, and the wait of who has written them.

Disks wear. A run whose paths have been written so often pauses before its next step, until enough of that is a day old.
What was written is remembered in a file in each path (see :mod:`tiermem.ledger`), so that a run which is started again
doesn't begin at zero; and it counts whoever wrote it, another run in the same path or another rank of this one.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from tiermem.errors import format_bytes
from tiermem.ledger import DAY, Ledger, boot_seconds

EVERY = 1.0
"""Seconds between two looks at the ledgers: what a process that is killed leaves uncounted."""

log = logging.getLogger("tiermem")


class Quota:
    """``limit`` bytes in any 24 hours, in all paths together, each of which has one of ``ledgers``.

    ``clock`` and ``sleep`` are seconds, and replaced by tests.
    """

    def __init__(
        self,
        limit: int,
        ledgers: Sequence[Ledger] = (),
        clock: Callable[[], float] = boot_seconds,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.limit = limit
        self._ledgers = ledgers
        self._clock = clock
        self._sleep = sleep
        self._written: deque[tuple[float, int]] = deque()  # (when, bytes), oldest first
        self._sum = 0
        self._new = [0] * len(ledgers)  # bytes that the ledgers haven't been told of
        self._looked = clock()
        self._warned = False
        self._look()

    def add(self, nbytes: int, path: int = 0) -> None:
        """So many bytes are being written now, in the path of this number."""
        now = self._clock()
        self._sum += nbytes
        if self._written and now - self._written[-1][0] < EVERY:
            when, before = self._written.pop()
            self._written.append((when, before + nbytes))
        else:
            self._written.append((now, nbytes))
        if self._ledgers:
            self._new[path] += nbytes
            if now - self._looked >= EVERY:
                self._look()

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
            self._look()

    def close(self) -> None:
        """Have the ledgers know all that was written. Idempotent."""
        self._look()

    def _look(self) -> None:
        """Tell the ledgers what is new, and hear what others have written."""
        self._looked = self._clock()
        if not self._ledgers:
            return
        found = []
        for number, ledger in enumerate(self._ledgers):
            try:
                found += ledger.exchange(self._new[number])
            except OSError as error:
                if not self._warned:
                    log.warning(
                        f"disk.max_written_per_day: {ledger.path} can't be used, so what was written before this "
                        f"process, and beside it, isn't counted: {error.strerror or error}"
                    )
                self._warned = True
                return
            self._new[number] = 0
        self._written = deque(sorted(found))
        self._sum = sum(nbytes for _, nbytes in found)
