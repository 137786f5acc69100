"""Bytes between files and memory, asynchronously and past the page cache.

Knows nothing of tensors or pages. An error of the disk reaches the caller that waits, with its numbers; a
short read is an error, never a success.
"""

from tiermem.aio.buffer import HUGE_NBYTES, Buffer
from tiermem.aio.checksum import Check, Checksums, checksum
from tiermem.aio.faults import FaultyQueue
from tiermem.aio.file import Alignment, File
from tiermem.aio.queue import Queue, open_queue
from tiermem.aio.speed import Speed, measure

__all__ = [
    "HUGE_NBYTES",
    "Alignment",
    "Buffer",
    "Check",
    "Checksums",
    "FaultyQueue",
    "File",
    "Queue",
    "Speed",
    "checksum",
    "measure",
    "open_queue",
]
