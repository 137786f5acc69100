"""Pages: the smallest thing that moves, and the seven states it can be in.

A page is the bytes of one unit's tensors of one kind and one dtype, back to back. It knows where its
copies are; only the pager changes that.
"""

from __future__ import annotations

import enum
from typing import Protocol

import torch

from tiermem.errors import RanksError, TransferError

ALIGNMENT = 4096
"""Bytes. Frames and disk extents start and end on it: enough for O_DIRECT on every disk in use."""

TENSOR_ALIGNMENT = 64
"""Bytes. Tensors inside a page start on it, as torch's own allocator gives: vendor kernels may take
another path, and round otherwise, on memory that is aligned otherwise."""


class Kind(enum.IntEnum):
    """What the bytes of a page are."""

    PARAMETER = 0
    GRADIENT = 1
    MASTER = 2
    EXP_AVG = 3
    EXP_AVG_SQ = 4
    ACTIVATION = 5
    PARAMETER_SHARD = 6
    GRADIENT_SHARD = 7
    STATE = 8
    """Of an optimizer other than ours: tensors of one name in its state."""


class State(enum.IntEnum):
    """Where a page is: three places and four journeys.

    A place names the highest tier with a valid copy. A failed journey is a step back along the same
    arrow, because a transfer's source stays valid until the transfer lands.

    =========  =========  =========  ==============================================================
    from       by way of  to         performed by
    =========  =========  =========  ==============================================================
    DISK       READING    HOST       ``Transfers.read``, landed by ``wait`` or ``poll``
    DISK                  HOST       ``settle`` (the content comes into being: nothing is read)
    HOST       WRITING    HOST       ``write``, landed: the copy on disk is good again
    HOST       WRITING    DISK       the same for a page that is leaving: its frame is released
    HOST                  DISK       ``drop`` (clean, or no longer needed)
    HOST       LOADING    DEVICE     ``load``, landed
    DEVICE                HOST/DISK  ``drop_device`` (clean; the copy below is the page)
    DEVICE     STORING    HOST       ``store``, landed
    =========  =========  =========  ==============================================================
    """

    DISK = 0
    HOST = 1
    DEVICE = 2
    READING = 3
    WRITING = 4
    LOADING = 5
    STORING = 6

    @property
    def journey(self) -> bool:
        """True while a transfer of the page is in flight."""
        return self >= State.READING


def padded(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """``nbytes`` rounded up to a multiple of ``alignment``."""
    return -(-nbytes // alignment) * alignment


class Binding(Protocol):
    """Who holds views of a page's frame, and must let go of them before the page leaves it."""

    def unbind(self) -> None:
        """Stop pointing at the frame."""


class Frame:
    """A piece of a slab that holds one page: byte offset and size."""

    __slots__ = ("nbytes", "offset", "page")

    def __init__(self, offset: int, nbytes: int, page: Page) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.page = page

    def __repr__(self) -> str:
        return f"<frame {self.offset}+{self.nbytes} of {self.page!r}>"


class Page:
    """One page: identity, size, and where its copies are.

    ``nbytes`` is padded to :data:`ALIGNMENT`. ``dirty`` says that the copy on the host is newer than the one
    on disk; ``stored`` that the disk has a copy at all. A ``blank`` page has no content yet (a moment before
    the first step, a gradient before backward): it is made of zeros when it is first needed, and never read. Of a
    gradient only the ``gaps`` between tensors are, since what lands overwrites the rest.

    Of a ``durable`` page, the bytes that a kept commit names are never written over: it has several ``slots`` on the
    disk, of which ``committed`` are named, the newest last, and a write goes to another one.

    Where several ranks share a model (see ``tiermem.partition``), ``key`` is the page's name between them, and the
    ``shard`` of a parameter or gradient page has this rank's slice of it. Parameters then have no other copy below:
    the ranks together are what they are read from.
    """

    __slots__ = (
        "blank",
        "checksum",
        "committed",
        "device",
        "device_dirty",
        "dirty",
        "dtype",
        "durable",
        "error",
        "extent",
        "gaps",
        "hollow",
        "host",
        "key",
        "kind",
        "leaving",
        "nbytes",
        "num_slots",
        "number",
        "pins",
        "prefetched",
        "prepared",
        "renewed",
        "shard",
        "sinks",
        "slots",
        "spent",
        "state",
        "target",
        "transfer",
        "unit",
        "users",
        "version",
    )

    def __init__(
        self,
        number: int,
        unit: int,
        kind: Kind,
        dtype: torch.dtype,
        numel: int,
        sinks: bool,
        alignment: int = ALIGNMENT,
    ) -> None:
        self.number = number
        self.unit = unit
        self.kind = kind
        self.dtype = dtype
        self.nbytes = padded(numel * dtype.itemsize, alignment)
        self.sinks = sinks  # may it go to the disk?
        self.state = State.DISK
        self.pins = 0
        self.host: Frame | None = None
        self.device: Frame | None = None
        self.extent: tuple[int, int] | None = None  # which page file, byte offset in it
        self.checksum: int | None = None  # of the bytes there, where it is known
        self.durable = False  # part of commits?
        self.num_slots = 1  # extents that it is to have
        self.slots: list[tuple[int, int]] = []  # those that it has
        self.committed: list[tuple[int, int] | None] = []  # what the kept commits name; None: it was blank
        self.prepared: tuple[int, int] | None = None  # what the next commit will name
        self.target: tuple[int, int] | None = None  # where it is being written to
        # What of a new frame must be made zeros, in bytes; None: all of it. A gradient overwrites the rest anyway.
        self.gaps: tuple[tuple[int, int], ...] | None = None
        self.dirty = False
        self.device_dirty = False
        self.blank = True
        self.leaving = False  # being written because its frame is wanted
        self.spent = False  # a gradient that the optimizer has used: dropped, not written
        self.hollow = False  # its frame has no content yet: whoever pinned it is about to write all of it
        self.version = 0  # of the content: an autograd graph that saved another one must not go on
        self.prefetched = False  # brought in ahead of need and not used yet
        self.transfer: object | None = None  # the tiermem.transfer.Transfer in flight
        self.error: TransferError | RanksError | None = None  # of a transfer that nobody waited for
        self.users: list[Binding] = []  # who holds views of its frame
        self.key = number
        self.shard: Page | None = None
        self.renewed = False  # changed by the optimizer since it was used last

    @property
    def gathered(self) -> bool:
        """Is it read from the ranks, each of which has a slice?"""
        return self.shard is not None and self.kind is Kind.PARAMETER

    @property
    def stuck(self) -> bool:
        """May it not leave the host? Its content is there, and [placement] keeps it above the disk."""
        return not (self.sinks or self.spent or self.blank)

    def __repr__(self) -> str:
        flags = "".join(
            letter
            for letter, on in (("d", self.dirty), ("b", self.blank), ("l", self.leaving), ("s", self.spent))
            if on
        )
        return f"<page {self.number} unit {self.unit} {self.kind.name} {self.state.name} pins={self.pins} {flags}>"
