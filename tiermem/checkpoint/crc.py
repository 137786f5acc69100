"""Checksums of chunks: CRC-32C of runs of bytes, and of runs that were taken apart and belong together.

The standard's ``crc32c`` codec puts it behind a chunk's bytes. A CRC is linear, so that of two runs one after another
follows from those of each and the length of the second: that is how ranks that write or read parts of one chunk have
its checksum without any of them seeing all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import google_crc32c
import torch

NBYTES = 4
"""Of a checksum, little-endian, at the end of a chunk's file."""

PIECE_NBYTES = 1 << 20
"""Bytes that are taken at a time: they are still in the cache, and other threads come to their turn between two."""

_ALL = 0xFFFFFFFF
_POLYNOMIAL = 0x82F63B78  # Castagnoli's, its highest power in the lowest bit
_ONE = 0x80000000


class Span(NamedTuple):
    """A run of a chunk's bytes, and their checksum. ``array`` is whatever names the array to all who speak of it."""

    array: str
    chunk: int
    start: int
    stop: int
    checksum: int


def extended(checksum: int, data: torch.Tensor) -> int:
    """That of bytes with checksum ``checksum`` (0: of none) and then ``data`` (uint8, on the CPU)."""
    view = data.numpy()
    for start in range(0, len(view), PIECE_NBYTES):
        checksum = google_crc32c.extend(checksum, view[start : start + PIECE_NBYTES])
    return checksum


def extended_by_zeros(checksum: int, nbytes: int) -> int:
    """That of bytes with checksum ``checksum`` and ``nbytes`` zeros behind them."""
    return _times(checksum ^ _ALL, _power(nbytes)) ^ _ALL


def joined(first: int, second: int, nbytes: int) -> int:
    """That of two runs one after another, from those of each; the second has ``nbytes``."""
    return _times(first, _power(nbytes)) ^ second


def of_spans(spans: Iterable[Span], nbytes: int) -> int | None:
    """That of ``nbytes`` which ``spans`` of one chunk cover without gap or overlap; None if they don't."""
    end = checksum = 0
    for span in sorted(set(spans), key=lambda each: each.start):
        if span.start != end:
            return None
        checksum = joined(checksum, span.checksum, span.stop - span.start)
        end = span.stop
    return checksum if end == nbytes else None


def by_chunk(said: Iterable[Iterable[Iterable[object]]]) -> Mapping[tuple[str, int], list[Span]]:
    """The spans that all ranks have told of (as JSON has them), by array and chunk."""
    found: dict[tuple[str, int], list[Span]] = {}
    for one in said:
        for each in one:
            span = Span(*each)  # type: ignore[arg-type]
            found.setdefault((span.array, span.chunk), []).append(span)
    return found


def _power(nbytes: int) -> int:
    """The polynomial that ``nbytes`` zero bytes multiply by: x to the power of 8 for each, modulo the CRC's own."""
    result, factor = _ONE, _ONE >> 8
    while nbytes:
        if nbytes & 1:
            result = _times(result, factor)
        factor = _times(factor, factor)
        nbytes >>= 1
    return result


def _times(a: int, b: int) -> int:
    """The product of two polynomials over the field of two elements, modulo the CRC's own."""
    result = 0
    while a:
        if a & _ONE:
            result ^= b
        a = a << 1 & _ALL
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return result
