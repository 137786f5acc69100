"""The speed of a folder's disk through a Queue, as a page sees it."""

import os
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

from tiermem.aio.buffer import Buffer
from tiermem.aio.file import File
from tiermem.aio.queue import Queue, open_queue

NUM_TRANSFERS: Final = 8


class Speed(NamedTuple):
    """Bytes per second, each way; and whether they bypassed the page cache (if not, they measure memory)."""

    read: float
    write: float
    direct: bool
    engine: str


def window(request: int, depth: int) -> int:
    """Bytes of a buffer for `sweep` that keeps the queue full: two depths of requests in whole transfers."""
    return NUM_TRANSFERS * request * -(-2 * depth // NUM_TRANSFERS)


def fill(buffer: Buffer) -> None:
    """Makes the buffer resident, full of random bytes: zeros are cheaper to some disks."""
    buffer.touch()
    noise = os.urandom(min(buffer.nbytes, 1 << 20))
    for at in range(0, buffer.nbytes, len(noise)):
        piece = buffer.view[at : at + len(noise)]
        piece[:] = noise[: len(piece)]


def sweep(queue: Queue, file: File, buffer: Buffer, nbytes: int, writing: bool) -> float:
    """Seconds to read or write the file's first `nbytes` in order, in eight transfers at a time that share the
    buffer."""
    span = buffer.nbytes // NUM_TRANSFERS
    begin = queue.write if writing else queue.read
    tickets: list[int] = []
    start = time.perf_counter()
    for number, offset in enumerate(range(0, nbytes, span)):
        if number >= NUM_TRANSFERS:
            queue.wait(tickets[number - NUM_TRANSFERS])
        address = buffer.address + number % NUM_TRANSFERS * span
        tickets.append(begin(file, offset, address, min(span, nbytes - offset)))
    for ticket in tickets[-NUM_TRANSFERS:]:
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
        Buffer(window(request, depth)) as buffer,
        open_queue(engine, request, depth) as queue,
    ):
        fill(buffer)
        sweep(queue, file, buffer, nbytes, writing=True)
        write = sweep(queue, file, buffer, nbytes, writing=True)
        read = sweep(queue, file, buffer, nbytes, writing=False)
        return Speed(nbytes / read, nbytes / write, file.direct, queue.engine)
