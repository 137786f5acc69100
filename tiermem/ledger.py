"""The ledger of a path: how many bytes were written under it in the last day, by whichever run, in a small file there.

A process that is started again reads what those before it have written. Time is that of a clock that begins when the
machine does and is never set. Only how long ago something was that was written before the machine was started last,
the wall clock has to say; it is believed as far as it makes it older than the start, and never makes it newer.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tiermem.folder import MAX_FILE_NBYTES, TEMPORARY, check_file, lock_folder

DAY = 86_400.0
GRAIN = 60.0
"""Seconds that are counted together."""

Written = tuple[float, int]
"""When, in seconds of :func:`boot_seconds`, and how many bytes."""


def boot_seconds() -> float:
    """Seconds since the machine was started, those in which it slept included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_name() -> str:
    """What tells this start of the machine from every other."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Ledger:
    """The file of one folder, for the runs of this user. ``clock``, ``boot`` and ``wall`` are replaced by tests."""

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = boot_seconds,
        boot: Callable[[], str] = boot_name,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.path = folder / f"tiermem-written-{os.geteuid()}.json"
        self._clock = clock
        self._boot = boot()
        self._wall = wall

    def exchange(self, nbytes: int) -> list[Written]:
        """Add what was written since the last time; returns what all have written in the last day, oldest first.

        Raises OSError. A file that isn't what this writes counts as none.
        """
        now, wall = self._clock(), self._wall()
        with lock_folder(self.path.parent):
            rows = [row for row in self._read() if self._age(row, now, wall) < DAY]
            if nbytes:
                last = rows[-1] if rows and rows[-1][0] == self._boot else None
                if last is not None and 0 <= now - last[1] < GRAIN:
                    last[3] += nbytes
                else:
                    rows.append([self._boot, now, wall, nbytes])
                self._write(rows)
        return sorted((now - self._age(row, now, wall), row[3]) for row in rows)

    def _age(self, row: Sequence[Any], now: float, wall: float) -> float:
        boot, then, day, _ = row
        return float(now - then if boot == self._boot else max(now, wall - day))

    def _read(self) -> list[list[Any]]:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return []
        try:
            check_file(fd, self.path)
            with open(fd, "rb", closefd=False) as file:
                text = file.read(MAX_FILE_NBYTES)
        finally:
            os.close(fd)
        try:
            rows = [
                [str(boot), float(then), float(day), int(n)]
                for boot, then, day, n in json.loads(text)["rows"]
            ]
        except (ValueError, TypeError, KeyError):
            return []
        return rows

    def _write(self, rows: list[list[Any]]) -> None:
        # Not synchronised: what a loss of power costs is a minute's count.
        new = self.path.with_name(self.path.name + TEMPORARY)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(new, flags, 0o600), "w") as file:
            json.dump({"version": 1, "rows": rows}, file)
        os.replace(new, self.path)
