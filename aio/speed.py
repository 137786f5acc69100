"""The speed of a folder's disk through a Queue, as a page sees it."""

import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tiermem.aio.buffer import Buffer
from tiermem.aio.file import File
from tiermem.aio.queue import Queue, open_queue


class Speed(NamedTuple):
    """Bytes per second, each way; and whether they bypassed the page cache (if not, they measure memory)."""

    read: float
    write: float
    direct: bool
    engine: str


def sweep(queue: Queue, file: File, buffer: Buffer, nbytes: int, writing: bool) -> float:
    """Seconds to read or write the file's first `nbytes` in order, with two transfers of half the buffer each
    in flight."""
    span = buffer.nbytes // 2
    begin = queue.write if writing else queue.read
    tickets: list[int] = []
    start = time.perf_counter()
    for number, offset in enumerate(range(0, nbytes, span)):
        if number >= 2:
            queue.wait(tickets[number - 2])
        tickets.append(begin(file, offset, buffer.address + number % 2 * span, min(span, nbytes - offset)))
    for ticket in tickets[-2:]:
        queue.wait(ticket)
    return time.perf_counter() - start


def measure(
    folder: str | os.PathLike[str],
    nbytes: int = 1 << 30,
    request: int = 1 << 20,
    depth: int = 32,
    engine: str = "auto",
) -> Speed:
    """Writes and reads a file of `nbytes` (a multiple of 4096) in the folder, which is removed afterwards.

    The first write, which allocates, isn't counted. Raises OSError when the folder can't take the file.
    """
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix=".tiermem-speed-") as inside,
        File(Path(inside) / "speed", nbytes, create=True) as file,
        Buffer(2 * request * depth) as buffer,
        open_queue(engine, request, depth) as queue,
    ):
        sweep(queue, file, buffer, nbytes, writing=True)
        write = sweep(queue, file, buffer, nbytes, writing=True)
        read = sweep(queue, file, buffer, nbytes, writing=False)
        return Speed(nbytes / read, nbytes / write, file.direct, queue.engine)
