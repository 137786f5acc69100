"""The size of parts: how many elements of optimizer state one page has, by the host's budget. Without torch."""

from __future__ import annotations

MIN_PART_NUMEL = 1 << 14
MAX_PART_NUMEL = 1 << 23


def part_numel(capacity: int) -> int:
    """Elements of one page of optimizer state for a host of ``capacity`` bytes.

    Small enough that several parts (three pages each) are in flight at a time, large enough for the disk's full rate.
    """
    numel = MIN_PART_NUMEL
    while numel < MAX_PART_NUMEL and numel * 2 * 4 * 96 <= capacity:
        numel *= 2
    return numel
