"""Tiles: one stretch of a trace, in so many bins, and span by span where the spans are few.

Tile ``index`` of ``level`` is `NUM` bins of ``2 ** level`` nanoseconds each, from ``index * NUM * 2 ** level`` on,
counted from the trace's base. Two tiles of one level are exactly what the tile above them covers.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tiermem.trace.events import Tier
from tiermem.trace.reader import Records
from tiermem.trace.tally import reserved
from tiermem.viewer.grid import Floats, Grid, Integers
from tiermem.viewer.index import NEAR_TIERS, TIERS, Index, shares, unit_changes

NUM = 512
MOST_SPANS = 4000
"""A tile lists its spans where they are no more than these."""

_MOST_RECORDS = 1 << 17  # records that are looked at for one tile; beyond, the grid and the blocks have to do
_DIGITS = np.frombuffer(b"0123456789abcdefghijklmnopqrstuvwxyz", np.uint8)


def top_level(extent: int) -> int:
    """The lowest level of which tile 0 covers ``extent`` nanoseconds."""
    level = 0
    while NUM << level <= extent:
        level += 1
    return level


def tile(index: Index, level: int, number: int) -> dict[str, Any]:
    """Tile ``number`` of ``level``, for JSON.

    ``busy`` has nanoseconds by row and bin, ``nbytes`` bytes by link and bin, ``tiers`` the bytes held in each tier at
    the end of a bin (``last``) and the most within it (``most``), ``units`` for each near tier and unit a text with a
    digit a bin: the part of the unit that is there, in 35ths, in base 36. ``spans`` has the columns of the spans that
    reach into the tile, None where they are too many. Rows and tiers without anything are left out.
    """
    width = 1 << level
    begin, end = number * NUM * width, (number + 1) * NUM * width
    first, last, long = index.between(begin, end)
    few = (last - first) * index.block + len(long) <= _MOST_RECORDS
    spans = None
    if few:
        records = index.records(first, last)
        reaching = _spans(index, records, long, begin, end)
        if len(reaching) <= MOST_SPANS:
            spans = _columns(index, reaching)
    if few:
        exact = Grid(index.rows, width, NUM)
        exact.add(reaching, index.base + begin)
        busy, nbytes = exact.busy, exact.nbytes
        levels, most, units = _held(index, records, first, begin, width)
    elif width >= index.grid.width:
        busy = {key: _coarser(bins, index.grid.width, begin, width) for key, bins in index.grid.busy.items()}
        nbytes = {
            key: _coarser(bins, index.grid.width, begin, width) for key, bins in index.grid.nbytes.items()
        }
        levels, most, units = index.held(begin + width * np.arange(1, NUM + 1))
    else:
        # More records in less time than the grid's bins can tell apart: each bin gets its share of the grid's.
        busy = {key: _finer(bins, index.grid.width, begin, width) for key, bins in index.grid.busy.items()}
        nbytes = {
            key: _finer(bins, index.grid.width, begin, width) for key, bins in index.grid.nbytes.items()
        }
        levels, most, units = index.held(begin + width * np.arange(1, NUM + 1))
    return {
        "level": level,
        "index": number,
        "busy": _rounded(busy),
        "nbytes": _rounded(nbytes),
        "tiers": {
            tier.name.lower(): {"last": levels[:, place].tolist(), "most": most[:, place].tolist()}
            for place, tier in enumerate(TIERS)
            if most[:, place].any()
        },
        "units": _units(index, units),
        "spans": spans,
    }


def _spans(index: Index, records: Records, long: Integers, begin: int, end: int) -> Records:
    spans = index.rows.select(records)
    start = spans["start"] - index.base
    # Long ones come by number; those that are in the blocks too are left to that list.
    spans = spans[
        (start < end) & (start + spans["duration"] >= begin) & (spans["duration"] < index.long_from)
    ]
    found: Records = np.concatenate((spans, index.rows.select(index.trace.records[long])))
    return found


def _columns(index: Index, spans: Records) -> dict[str, list[int]]:
    columns: dict[str, list[int]] = {
        name: spans[name].tolist()
        for name in ("duration", "nbytes", "unit", "page", "step", "reason", "phase")
    }
    columns["start"] = (spans["start"] - index.base).tolist()
    columns["lane"] = index.rows.lanes_of(spans).tolist()
    columns["link"] = (spans["source"].astype(np.int64) * len(Tier) + spans["target"]).tolist()
    return columns


def _held(
    index: Index, records: Records, first: int, begin: int, width: int
) -> tuple[Integers, Integers, Integers]:
    """As `Index.held` at the ends of the tile's bins, to the record."""
    tier_level, unit_level = index.held_before(first)
    moves = records[(records["event"] == 1) | (records["event"] == 2)]
    place = (moves["start"] - index.base - begin) // width
    inside = place < NUM
    moves, place = moves[inside], place[inside]
    levels, most = np.zeros((NUM, len(TIERS)), np.int64), np.zeros((NUM, len(TIERS)), np.int64)
    for number, tier in enumerate(TIERS):
        running = tier_level[number] + np.cumsum(reserved(moves, tier))
        # Before the first move in it, a bin has what the last bin ended with.
        upto = (
            np.searchsorted(np.maximum.accumulate(place), np.arange(-1, NUM), "right") if len(place) else None
        )
        padded = np.concatenate(([tier_level[number]], running))
        ends = padded[upto] if upto is not None else np.full(NUM + 1, tier_level[number])
        levels[:, number] = ends[1:]
        most[:, number] = np.maximum(ends[:-1], ends[1:])
        here = place >= 0
        np.maximum.at(most[:, number], place[here], running[here])
    units = np.zeros((NUM, len(NEAR_TIERS), index.num_units), np.int64)
    for number, tier in enumerate(NEAR_TIERS):
        start, unit, change = unit_changes(moves, tier, index.num_units)
        at = np.clip((start - index.base - begin) // width, 0, NUM - 1)
        np.add.at(units[:, number], (at, unit), change)
        units[:, number] = unit_level[number] + np.cumsum(units[:, number], axis=0)
    return levels, most, units


def _coarser(bins: Floats, have: int, begin: int, width: int) -> Floats:
    first, each = begin // have, width // have
    part = bins[first : first + NUM * each]
    part = np.pad(part, (0, NUM * each - len(part)))
    coarse: Floats = part.reshape(NUM, each).sum(axis=1)
    return coarse


def _finer(bins: Floats, have: int, begin: int, width: int) -> Floats:
    place = (begin + width * np.arange(NUM)) // have
    fine: Floats = np.where(place < len(bins), bins[np.minimum(place, len(bins) - 1)], 0.0) * (width / have)
    return fine


def _rounded(rows: Mapping[str, Floats]) -> dict[str, list[int]]:
    """Whole numbers whose sum is that of the numbers given, so that bins may be added up."""
    found = {}
    for key, bins in rows.items():
        whole = np.diff(np.rint(np.cumsum(bins)), prepend=0.0).astype(np.int64)
        if whole.any():
            found[key] = whole.tolist()
    return found


def _units(index: Index, held: Integers) -> dict[str, list[str]]:
    found = {}
    for number, tier in enumerate(NEAR_TIERS):
        here = held[:, number]
        if here.any():
            digits = _DIGITS[shares(here, index.unit_nbytes[: index.num_units])]
            found[tier.name.lower()] = [row.tobytes().decode() for row in np.ascontiguousarray(digits.T)]
    return found
