"""The time grid of a trace: how long each row was busy, and how much each link carried, in bins of equal width.

Times are integers, nanoseconds from the grid's base. A grid has a fixed number of bins: a trace that outgrows it
gets a new one with bins twice as wide, so its memory doesn't grow with the trace.
"""

import numpy as np
import numpy.typing as npt

from tiermem.trace.reader import Records
from tiermem.trace.tally import merge
from tiermem.viewer.rows import Rows

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

NUM_BINS = 1 << 16
_REMEMBERED = 4096  # disjoint intervals of a row that later spans are compared with


def fill(start: Integers, end: Integers, rate: Floats, width: int, num: int) -> Floats:
    """The integral, in each of ``num`` bins of ``width``, of the sum of ``rate`` over each [start, end)."""
    slope, part = np.zeros(num), np.zeros(num)
    for times, change in ((start, rate), (end, -rate)):
        clipped = np.clip(times, 0, num * width)
        index = np.minimum(clipped // width, num - 1)
        slope += np.bincount(index, change, num)
        part += np.bincount(index, change * ((index + 1) * width - clipped), num)
    # What begins or ends in a bin fills part of it, and all those behind it.
    filled: Floats = np.maximum((np.cumsum(slope) - slope) * width + part, 0.0)
    return filled


class Grid:
    """Busy nanoseconds by row, and bytes by link: arrays of ``num`` bins of ``width`` ns. Absent: nothing yet."""

    def __init__(self, rows: Rows, width: int, num: int = NUM_BINS) -> None:
        self.width = width
        self.num = num
        self.busy: dict[str, Floats] = {}
        self.nbytes: dict[str, Floats] = {}
        self._rows = rows
        self._recent: dict[str, tuple[Integers, Integers]] = {}
        self._in_row = {row.key: self._mask(row.lanes) for row in rows.rows}
        self._in_link = {name: self._mask(lanes) for name, lanes in rows.links.items()}

    @property
    def extent(self) -> int:
        """Nanoseconds that the grid covers."""
        return self.width * self.num

    def add(self, spans: Records, base: int) -> None:
        """Count ``spans`` (as `Rows.select` gives them), in any order; ``base`` is the grid's zero in the trace's time.

        A span that overlaps with one counted before counts once where it overlaps.
        """
        if len(spans) == 0:
            return
        lanes = self._rows.lanes_of(spans)
        here = np.bincount(lanes, minlength=self._rows.num_lanes + 1) > 0
        start = spans["start"] - base
        end = start + spans["duration"]
        for key, mask in self._in_row.items():
            if np.any(mask & here):
                wanted = mask[lanes]
                self._union(key, start[wanted], end[wanted])
        for name, mask in self._in_link.items():
            if np.any(mask & here):
                wanted = mask[lanes]
                first, last = start[wanted], end[wanted]
                last = np.maximum(last, first + 1)  # an instant carries its bytes too
                rate = spans["nbytes"][wanted] / (last - first)
                bins, zero = self._reach(first, last)
                carried = fill(first - zero, last - zero, rate, self.width, bins.stop - bins.start)
                self.nbytes.setdefault(name, np.zeros(self.num))[bins] += carried

    def _union(self, key: str, start: Integers, end: Integers) -> None:
        bins, zero = self._reach(start, end)
        num = bins.stop - bins.start
        empty = np.empty(0, np.int64)
        old, old_end = self._recent.get(key, (empty, empty))
        start, end = merge(np.concatenate((old, start)), np.concatenate((old_end, end)))
        # |old u new| - |old|: what of the new is not covered by the old.
        new = fill(start - zero, end - zero, np.ones(len(start)), self.width, num)
        new -= fill(old - zero, old_end - zero, np.ones(len(old)), self.width, num)
        self.busy.setdefault(key, np.zeros(self.num))[bins] += np.maximum(new, 0.0)
        self._recent[key] = start[-_REMEMBERED:], end[-_REMEMBERED:]

    def _reach(self, start: Integers, end: Integers) -> tuple[slice, int]:
        """The bins that spans reach into, and the time at which the first of them begins."""
        first = int(np.clip(start.min() // self.width, 0, self.num - 1))
        last = int(np.clip(end.max() // self.width, first, self.num - 1))
        return slice(first, last + 1), first * self.width

    def _mask(self, lanes: frozenset[int]) -> npt.NDArray[np.bool_]:
        mask = np.zeros(self._rows.num_lanes + 1, np.bool_)
        mask[list(lanes)] = True
        return mask
