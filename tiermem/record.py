"""The commit record: which bytes on the disk are the state of a run after one of its steps, and what else that was.

It has a header of 512 bytes (which a disk writes whole or not at all), a table with a row for each page, and the state
that isn't in pages, as :func:`torch.save` writes it. A digest over all of it tells a record that was written whole
from one that was not; the header has one of its own, so that a torn record still says which generation it was to be.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAGIC = b"tiermem\x01"
HEADER_NBYTES = 512
_FIELDS = struct.Struct(
    "<8sQQQQ16s16s"
)  # magic, generation, step, bytes of table, of state, fingerprint, digest
_DIGEST_NBYTES = 16

EMPTY = "it is empty"
"""Why a slot that nothing was ever written to has no record."""

BLANK = 0
STORED = 1
CHECKED = 2

ROW = np.dtype([("offset", "<u8"), ("checksum", "<u8"), ("file", "<u2"), ("what", "<u2")])
"""One page: where its bytes are and what their checksum is. ``what``: BLANK pages have no bytes, of STORED ones no
checksum is known, CHECKED ones have one."""


@dataclass(frozen=True)
class Commit:
    """What a record says. ``generation`` counts the commits of a run, ``step`` its optimizer steps.

    ``fingerprint`` is that of the layout (see :mod:`tiermem.layout`) that ``rows`` goes with: dtype :data:`ROW`, one
    for each page.
    """

    generation: int
    step: int
    fingerprint: bytes
    rows: npt.NDArray[np.void]
    state: bytes

    def encode(self) -> bytes:
        """The record's bytes."""
        table = self.rows.tobytes()
        fields = (MAGIC, self.generation, self.step, len(table), len(self.state), self.fingerprint)
        whole = _digest(_FIELDS.pack(*fields, b""), table, self.state)
        head = _FIELDS.pack(*fields, whole)
        head += _digest(head)
        return head.ljust(HEADER_NBYTES, b"\0") + table + self.state


@dataclass(frozen=True)
class Unreadable:
    """What is no whole record: ``reason`` in words, and the ``generation`` it was to be where that is known."""

    reason: str
    generation: int | None = None


def decode(data: bytes) -> Commit | Unreadable:
    """What the bytes of a record say, or why they are none."""
    if not data.strip(b"\0"):
        return Unreadable(EMPTY)
    head = data[: _FIELDS.size]
    if len(data) < HEADER_NBYTES or head[:8] != MAGIC:
        return Unreadable("it doesn't begin as a commit record does")
    if data[_FIELDS.size :][:_DIGEST_NBYTES] != _digest(head):
        return Unreadable("its header is damaged")
    magic, generation, step, table_nbytes, state_nbytes, fingerprint, whole = _FIELDS.unpack(head)
    end = HEADER_NBYTES + table_nbytes + state_nbytes
    if len(data) < end:
        return Unreadable(f"it ends after {len(data):,} of {end:,} bytes", generation)
    table, state = data[HEADER_NBYTES:][:table_nbytes], data[end - state_nbytes : end]
    bare = _FIELDS.pack(magic, generation, step, table_nbytes, state_nbytes, fingerprint, b"")
    if _digest(bare, table, state) != whole:
        return Unreadable("its digest is not that of its bytes", generation)
    return Commit(generation, step, fingerprint, np.frombuffer(table, dtype=ROW), state)


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_NBYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()
