"""The index of a trace: where in it a stretch of time is, and what was held in each tier on the way.

Records are in the order of recording, an instant where it happened and a span at its end, so a stretch of time lies in
a few neighbouring *blocks* of records. Only long spans reach farther back; they are listed one by one. What is held
is known at the beginning of each block, and added up from there.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tiermem.trace.events import Event, Tier
from tiermem.trace.reader import Records, TraceFile
from tiermem.trace.tally import having, reserved
from tiermem.viewer.grid import NUM_BINS, Floats, Grid, Integers
from tiermem.viewer.rows import Rows

TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK)
NEAR_TIERS = (Tier.DEVICE, Tier.HOST)
"""Those whose frames are told unit by unit; what is in neither is on the disk."""

MOST_UNITS = 2000
"""Units whose frames are told; in a trace with more, those of the first of them."""

SMALLEST_BLOCK = 1024
_MOST_LEVELS = 1 << 22  # numbers kept of what units held: 32 MiB
_LONG = 4096  # a span longer than the grid's extent over this is a long one
_PIECE = 1 << 18


class Index:
    """The index of ``trace`` up to the records it had at the last `update`. Times count from ``base``, in ns.

    ``unit_nbytes`` are the bytes of each unit's pages, ``long_from`` the ns from which on a span is a long one.
    """

    def __init__(self, trace: TraceFile, rows: Rows) -> None:
        self.trace = trace
        self.rows = rows
        self.base = 0
        self.end = 0
        self.num_units = min(len(trace.units), MOST_UNITS)
        self.unit_nbytes = np.zeros(len(trace.units), np.int64)
        for page in trace.pages.values():
            self.unit_nbytes[page.unit] += page.nbytes
        self._restart(0)

    def update(self) -> int:
        """Take in the trace's new records; returns the earliest time that they change."""
        if len(self.trace.records) == self.num:
            return self.end
        if self.num == 0:
            self.base = min(int(piece["start"].min()) for piece in self.trace.pieces())
        changed = self.end
        for piece in self._pieces(self.num):
            changed = min(changed, int(piece["start"].min()) - self.base)
            self.end = max(self.end, int((piece["start"] + piece["duration"]).max()) - self.base)
        if self.end >= self.grid.extent or len(self.trace.records) > self._room:
            self._restart(len(self.trace.records))
        for piece in self._pieces(self.num):
            self._add(piece)
        return max(changed, 0)

    def between(self, begin: int, end: int) -> tuple[int, int, Integers]:
        """What may reach into [begin, end): blocks ``first`` to ``last`` (exclusive), and long spans by number."""
        blocks = np.flatnonzero(
            (self._block_end[: self.blocks] >= begin) & (self._block_start[: self.blocks] < end)
        )
        long = self._long_numbers
        if len(long):
            spans = self.trace.records[long]
            start = spans["start"] - self.base
            long = long[(start < end) & (start + spans["duration"] > begin)]
        if len(blocks) == 0:
            # Between two blocks, before the first or behind the last: what was held is that of the next.
            behind = np.maximum.accumulate(self._block_end[: self.blocks])
            gap = int(np.searchsorted(behind, begin, "left"))
            return gap, gap, long
        return int(blocks[0]), int(blocks[-1]) + 1, long

    def records(self, first: int, last: int) -> Records:
        """The records of some blocks."""
        return self.trace.records[first * self.block : min(last * self.block, self.num)]

    def held(self, times: Integers) -> tuple[Integers, Integers, Integers]:
        """What is held at each of ``times``, which ascend: to the block before, which is near enough from far away.

        Returns bytes by tier ``[times, tiers]``, the most since the time before ``[times, tiers]``, and bytes by unit
        ``[times, near tiers, units]``.
        """
        if self.blocks == 0:
            shape = (len(times), len(TIERS))
            return (
                np.zeros(shape, np.int64),
                np.zeros(shape, np.int64),
                np.zeros((len(times), len(NEAR_TIERS), self.num_units), np.int64),
            )
        # The state at a block's beginning holds from the end of the block before it.
        known = np.concatenate(([-1], np.maximum.accumulate(self._block_end[: self.blocks])))
        place = np.maximum(np.searchsorted(known, times, "right") - 1, 0)
        most = np.empty((len(times), len(TIERS)), np.int64)
        before = np.concatenate((place[:1], place[:-1]))
        for row, (a, b) in enumerate(zip(before.tolist(), place.tolist(), strict=True)):
            peaks = self._tier_peak[a:b]
            most[row] = peaks.max(axis=0, initial=0) if len(peaks) else 0
        levels = self._tier_level[place]
        return levels, np.maximum(most, levels), self._unit_level[place]

    def held_before(self, block: int) -> tuple[Integers, Integers]:
        """Bytes held by tier, and by near tier and unit, when the first record of ``block`` was written."""
        return self._tier_level[block], self._unit_level[block]

    def _pieces(self, begin: int) -> Iterator[Records]:
        for at in range(begin, len(self.trace.records), _PIECE):
            yield self.trace.records[at : at + _PIECE]

    def _restart(self, num: int) -> None:
        """Begin anew, with room for about twice what is there."""
        width = 1
        while width * NUM_BINS <= 2 * self.end:
            width *= 2
        self.grid = Grid(self.rows, width)
        self.long_from = max(1, self.grid.extent // _LONG)
        self._room = max(2 * num, 1 << 16)
        self.block = SMALLEST_BLOCK
        units = self.num_units
        while self._room // self.block * units * len(NEAR_TIERS) > _MOST_LEVELS:
            self.block *= 2
        room = self._room // self.block + 2
        self.num = self.blocks = 0
        self._block_start, self._block_end = np.zeros(room, np.int64), np.zeros(room, np.int64)
        self._tier_level = np.zeros((room, len(TIERS)), np.int64)
        self._tier_peak = np.zeros((room, len(TIERS)), np.int64)
        self._unit_level = np.zeros((room, len(NEAR_TIERS), units), np.int64)
        self._long_numbers: Integers = np.empty(0, np.int64)

    def _add(self, piece: Records) -> None:
        """Take in ``piece``, which begins at record number ``self.num``."""
        self.grid.add(self.rows.select(piece), self.base)
        start = piece["start"] - self.base
        end = start + piece["duration"]
        long = piece["duration"] >= self.long_from
        self._long_numbers = np.concatenate((self._long_numbers, np.flatnonzero(long) + self.num))
        # A long span counts in its block as the instant at which it was recorded.
        start = np.where(long, end, start)
        changes = [reserved(piece, tier) for tier in TIERS]
        at = 0
        while at < len(piece):
            into = self.num % self.block
            upto = min(len(piece), at + self.block - into)
            block, part = self.num // self.block, slice(at, upto)
            if into == 0:
                self._block_start[block], self._block_end[block] = start[at], end[at]
                self._tier_level[block + 1], self._unit_level[block + 1] = (
                    self._tier_level[block],
                    self._unit_level[block],
                )
                self._tier_peak[block] = self._tier_level[block]
                self.blocks = block + 1
            self._block_start[block] = min(self._block_start[block], start[part].min())
            self._block_end[block] = max(self._block_end[block], end[part].max())
            for number, change in enumerate(changes):
                levels = self._tier_level[block + 1, number] + np.cumsum(change[part])
                self._tier_peak[block, number] = max(self._tier_peak[block, number], levels.max())
                self._tier_level[block + 1, number] = levels[-1]
            for number, tier in enumerate(NEAR_TIERS):
                change = changes[TIERS.index(tier)][part]
                moved = np.flatnonzero(change)
                units = piece["unit"][part][moved]
                known = (units >= 0) & (units < self.num_units)
                np.add.at(self._unit_level[block + 1, number], units[known], change[moved][known])
            self.num += upto - at
            at = upto


def unit_changes(records: Records, tier: Tier, num_units: int) -> tuple[Integers, Integers, Integers]:
    """The records that change what the first units hold in ``tier``: their times, units and bytes."""
    told = (records["unit"] >= 0) & (records["unit"] < num_units)
    moves = records[having(records, (Event.RESERVE, Event.RELEASE)) & told]
    change = reserved(moves, tier)
    kept = change != 0
    return moves["start"][kept], moves["unit"][kept].astype(np.int64), change[kept]


def shares(held: Integers, total: Integers) -> npt.NDArray[np.uint8]:
    """Bytes as parts of ``total`` (by unit), in 35ths, rounded so that only nothing is 0 and only all is 35."""
    with np.errstate(divide="ignore", invalid="ignore"):
        share: Floats = np.where(total > 0, held / np.maximum(total, 1), 0.0)
    rounded = np.clip(np.rint(share * 35), 0, 35)
    rounded = np.where((share > 0) & (rounded == 0), 1, rounded)
    return np.where((share < 1) & (rounded == 35), 34, rounded).astype(np.uint8)
