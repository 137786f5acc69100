"""One trace as the viewer holds it: the open file, its index, and its figures, brought up to date when asked."""

import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from tiermem.trace.errors import TraceError
from tiermem.trace.events import Event
from tiermem.trace.reader import TraceFile
from tiermem.trace.summary import Summary, summarise
from tiermem.viewer.advice import advice
from tiermem.viewer.grid import Floats
from tiermem.viewer.index import MOST_UNITS, Index
from tiermem.viewer.rows import Rows
from tiermem.viewer.tiles import tile, top_level
from tiermem.viewer.units import figures

MOST_STALLS = 1000
MOST_STEPS = 20_000
_SPARED = 4.0  # figures that took a second to compute are good for four


_Kind = TypeVar("_Kind")


class _Kept(Generic[_Kind]):
    """Figures that are computed again when the trace has grown; the costlier, the less often."""

    def __init__(self) -> None:
        self._figures: _Kind | None = None
        self._state: object = None
        self._good_until = 0.0

    def get(self, state: object, live: bool, compute: Callable[[], _Kind]) -> _Kind:
        """The figures for ``state``; of a ``live`` run maybe those of a while ago."""
        begun = time.monotonic()
        if self._figures is None or (state != self._state and not (live and begun < self._good_until)):
            self._figures, self._state = compute(), state
            now = time.monotonic()
            self._good_until = now + _SPARED * (now - begun)
        return self._figures


class Run:
    """An open trace. Its methods may be called from several threads; they raise `TraceError` as `TraceFile` does."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock = threading.RLock()
        self._open()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self.trace.close()

    def refresh(self) -> bool:
        """Take in what was written since; a new run's file in the place of the old one is opened instead of it.

        Returns whether anything changed.
        """
        with self._lock:
            if self._replaced():
                before = self.trace
                self._open()  # where that fails, what is open already goes on to be shown
                before.close()
                return True
            was = self.trace.closed, self.trace.damage
            new = self.trace.refresh()
            if new:
                self._changes.append((self.index.num, self.index.update()))
            return bool(new) or was != (self.trace.closed, self.trace.damage)

    def changed_since(self, seen: int, generation: int) -> int:
        """The earliest time that differs from what the run was at ``seen`` records, in ns from its base."""
        with self._lock:
            if generation != self.generation:
                return 0
            return min((time for number, time in self._changes if number >= seen), default=self.index.end)

    def tile(self, level: int, number: int) -> dict[str, Any]:
        """A tile; see `tiermem.viewer.tiles.tile`. Raises `ValueError` where there can't be such a one."""
        if not 0 <= level <= 60 or not 0 <= number <= (1 << 60) >> level:
            raise ValueError(f"there is no tile {number} of level {level}")
        with self._lock:
            self.trace.check_whole()
            return tile(self.index, level, number)

    @property
    def summary(self) -> Summary:
        """The figures of `tiermem trace summary`, with the `MOST_STALLS` slowest stalls."""
        with self._lock:
            self.trace.check_whole()
            state = (len(self.trace.records), self.trace.closed)
            return self._summary.get(state, self.trace.live, lambda: summarise(self.trace, MOST_STALLS))

    def units(self) -> dict[str, Any]:
        """The figures of units and pages; see `tiermem.viewer.units.figures`."""
        with self._lock:
            self.trace.check_whole()
            return self._units.get(len(self.trace.records), self.trace.live, lambda: figures(self.trace))

    def best_rates(self) -> dict[str, float]:
        """The best bandwidth, in bytes per second while busy, that each link had in any hundredth of the trace.

        It takes the place of a limit where the run has measured none.
        """
        with self._lock:
            grid = self.index.grid
            each = max(1, self.index.end // grid.width // 100)
            rates = {}
            for name, nbytes in grid.nbytes.items():
                busy = self._by_hundredths(grid.busy[f"link:{name}"], each)
                carried = self._by_hundredths(nbytes, each)
                # Not from a handful of transfers, whose rate says little.
                enough = busy >= max(busy.sum() / 1000, 1)
                rates[name] = float((carried[enough] / busy[enough]).max(initial=0.0)) * 1e9
            return rates

    def document(self) -> dict[str, Any]:
        """What a page is told of the run at once, for JSON; times are ns from the run's base."""
        with self._lock:
            trace, summary = self.trace, self.summary
            num_stalls, steps = self._lists.get(len(trace.records), trace.live, self._count)
            meta = {key: trace.meta.get(key) for key in ("rank", "world", "device", "policy")}
            return {
                "name": self.path.name,
                "path": str(self.path),
                "generation": self.generation,
                "num_records": self.index.num,
                "end": self.index.end,
                "top_level": top_level(self.index.end),
                "zero": trace.monotonic_ns - self.index.base,
                "live": trace.live,
                "rank": meta["rank"] if isinstance(meta["rank"], int) else None,
                "world": meta["world"] if isinstance(meta["world"], int) else None,
                "device": meta["device"] if isinstance(meta["device"], str) else None,
                "policy": meta["policy"] if isinstance(meta["policy"], str) else None,
                "summary": summary.to_json(),
                "num_stalls": num_stalls,
                "advice": advice(summary, meta["policy"]),
                "units": list(trace.units),
                "units_left_out": max(0, len(trace.units) - MOST_UNITS),
                "rows": [
                    {
                        "key": row.key,
                        "label": row.label,
                        "group": row.group,
                        "link": row.link,
                        "lanes": sorted(row.lanes),
                    }
                    for row in self.rows.rows
                    if row.key in self.index.grid.busy
                ],
                "links": [name for name in self.rows.links if f"link:{name}" in self.index.grid.busy],
                "best_rates": self.best_rates(),
                "steps": steps,
            }

    def _open(self) -> None:
        self.trace = TraceFile(self.path)
        self.rows = Rows(self.trace)
        self.index = Index(self.trace, self.rows)
        self.index.update()
        self.generation = secrets.randbelow(1 << 31)  # small enough for a number in JavaScript
        self._changes: list[tuple[int, int]] = []
        self._summary = _Kept[Summary]()
        self._units = _Kept[dict[str, Any]]()
        self._lists = _Kept[tuple[int, dict[str, list[int]]]]()

    def _replaced(self) -> bool:
        try:
            there = os.stat(self.path)
        except OSError:
            return False  # removed: what was opened goes on to be shown
        if not self.trace.is_file(there):
            return True
        try:
            self.trace.check_whole()
        except TraceError:
            return True
        return False

    @staticmethod
    def _by_hundredths(bins: Floats, each: int) -> Floats:
        whole: Floats = bins[: len(bins) // each * each].reshape(-1, each).sum(axis=1)
        return whole

    def _count(self) -> tuple[int, dict[str, list[int]]]:
        """The number of stalls; and the steps, every so many of them where they are very many."""
        stalls, parts = 0, [self.trace.records[:0]]
        for piece in self.trace.pieces():
            stalls += int(np.count_nonzero(piece["event"] == Event.STALL))
            parts.append(piece[piece["event"] == Event.STEP])
        steps = np.concatenate(parts)
        steps = steps[:: max(1, len(steps) // MOST_STEPS)]
        return stalls, {
            "start": (steps["start"] - self.index.base).tolist(),
            "duration": steps["duration"].tolist(),
            "step": steps["step"].tolist(),
        }
