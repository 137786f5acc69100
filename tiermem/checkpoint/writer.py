"""The writer: runs of elements in, chunk files out, past the page cache and several at a time.

What is put is copied into a *slot*, an aligned piece of memory as large as a chunk; a full slot is written while the
next one fills. So however large an array is, the memory that writing it takes is that of the slots. A run that doesn't
begin or end with a chunk, as a rank's share of an array, is written into its place in the file: the ranks that share a
chunk write it together, and one of them *seals* it when all have, with a checksum that follows from those of the parts.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tiermem.aio import Buffer, File, Queue
from tiermem.checkpoint import crc
from tiermem.checkpoint.crc import Span
from tiermem.checkpoint.document import Array
from tiermem.checkpoint.grid import Chunk
from tiermem.checkpoint.pages import clear_bytes, copy_bytes
from tiermem.errors import CheckpointError, SavingError
from tiermem.page import ALIGNMENT, padded

DIRECT_NBYTES = 1 << 20
"""Smaller files go through the page cache: making room for them on the disk costs more than it saves."""


class Slot:
    """Memory for one chunk, and the write of it that is in flight."""

    def __init__(self, nbytes: int) -> None:
        self.buffer = Buffer(padded(nbytes))
        self.memory = torch.frombuffer(self.buffer.view, dtype=torch.uint8)
        self.ticket: int | None = None
        self.file: File | None = None
        self.nbytes = 0  # of the file, when the write has landed

    def land(self, queue: Queue) -> None:
        """Wait for the write, and give the file its length. Raises OSError."""
        ticket, self.ticket = self.ticket, None
        file, self.file = self.file, None
        if file is None:
            return
        with contextlib.closing(file):
            if ticket is not None:
                queue.wait(ticket)
                os.ftruncate(file.fd, self.nbytes)  # direct writes are of whole sectors


class ChunkWriter:
    """Writes arrays one after another through ``queue``, whose owner closes it after :meth:`close`.

    ``file_nbytes``: the most bytes of any chunk's file; ``num_slots`` of them are taken, the first when one is needed.
    ``nbytes`` counts what has been put so far. ``parts`` are those of chunks that others have the rest of.
    """

    def __init__(self, queue: Queue, file_nbytes: int, num_slots: int = 4) -> None:
        self.nbytes = 0
        self.parts: list[Span] = []
        self._queue = queue
        self._file_nbytes = max(ALIGNMENT, file_nbytes)
        self._num_slots = num_slots
        self._slots: list[Slot] = []
        self._next = 0
        self._slot: Slot | None = None  # being filled
        self._chunk: Chunk | None = None  # the one that it is for
        self._start = self._stop = 0  # the elements of it that are there
        self._checksum = 0  # of these
        self._folder = Path()
        self._array: Array | None = None
        self._zarr: Any = None  # the same array, where chunks are encoded

    def begin(self, folder: Path, array: Array) -> None:
        """From now on elements of the array in ``folder``, whose document is written, are put."""
        with self._errors():
            self._finish()
        self._folder, self._array, self._zarr = folder, array, None
        if not array.raw:
            import zarr

            # A chunk of zeros has a file too: where there is none, it has been lost.
            with zarr.config.set({"array.write_empty_chunks": True}):
                self._zarr = zarr.open_array(str(folder), mode="r+")

    def put(self, element: int, data: torch.Tensor) -> None:
        """Elements from number ``element`` on, in memory order, as bytes (uint8, one dimension). Copied at once.

        Raises SavingError when a write fails, of this or of an earlier chunk.
        """
        array = self._array
        assert array is not None
        size = array.dtype.itemsize
        count = data.numel() // size
        self.nbytes += data.numel()
        with self._errors():
            while count:
                if self._chunk is None or element != self._stop or element >= self._chunk.stop:
                    self._finish()
                    self._chunk = array.grid[array.grid.number_at(element)]
                    self._start = self._stop = element
                    self._checksum = 0
                    self._slot = self._take()
                assert self._slot is not None
                took = min(count, self._chunk.stop - element)
                at = (element - self._chunk.start) * size
                copy_bytes(self._slot.memory[at : at + took * size], data[: took * size])
                if array.raw and array.checked:
                    self._checksum = crc.extended(self._checksum, data[: took * size])
                data = data[took * size :]
                count -= took
                element += took
                self._stop = element

    def flush(self) -> None:
        """Return when everything that was put is in its file. Raises SavingError."""
        with self._errors():
            self._finish()
            for slot in self._slots:
                slot.land(self._queue)

    def close(self) -> None:
        """Let what is in flight land and give the memory back, whatever became of it. Idempotent."""
        slots, self._slots, self._slot, self._chunk = self._slots, [], None, None
        for slot in slots:
            with contextlib.suppress(OSError):
                slot.land(self._queue)
            slot.memory = torch.empty(0, dtype=torch.uint8)
            with contextlib.suppress(BufferError):  # the traceback of an error looks into it: freed with that
                slot.buffer.close()

    def _take(self) -> Slot:
        if len(self._slots) < self._num_slots:
            self._slots.append(Slot(self._file_nbytes))
            return self._slots[-1]
        slot = self._slots[self._next]
        self._next = (self._next + 1) % self._num_slots
        slot.land(self._queue)
        return slot

    def _finish(self) -> None:
        """Send what is in the slot on its way."""
        chunk, slot, array = self._chunk, self._slot, self._array
        self._chunk = self._slot = None
        if chunk is None:
            return
        assert slot is not None
        assert array is not None
        size = array.dtype.itemsize
        whole = (self._start, self._stop) == (chunk.start, chunk.stop)
        if self._zarr is not None:
            if not whole:
                raise CheckpointError(
                    f"{self._folder}: elements {self._start} to {self._stop} are a part of chunk {chunk.place} "
                    f"({chunk.start} to {chunk.stop}), and a part of a chunk can't be compressed: save without "
                    "compression where several ranks share an array"
                )
            self._encode(chunk, slot)
            return
        path = self._folder / array.name_of(chunk)
        begin, end = (self._start - chunk.start) * size, (self._stop - chunk.start) * size
        if not whole:
            number = array.grid.number_at(chunk.start)
            self.parts.append(Span(str(self._folder), number, begin, end, self._checksum))
            _write_into(path, slot.memory[begin:end], begin, array.file_nbytes)
            return
        clear_bytes(slot.memory[end : padded(array.file_nbytes)])
        if array.checked:
            seal = _seal(self._checksum, array.chunk_nbytes - end)
            copy_bytes(slot.memory[array.chunk_nbytes : array.file_nbytes], seal)
        if array.file_nbytes < DIRECT_NBYTES:
            _write_into(path, slot.memory[: array.file_nbytes], 0, array.file_nbytes)
            return
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666))
        slot.file = File(path, padded(array.file_nbytes))
        slot.nbytes = array.file_nbytes
        slot.ticket = self._queue.write(slot.file, 0, slot.buffer.address, padded(array.file_nbytes))

    def _encode(self, chunk: Chunk, slot: Slot) -> None:
        assert self._array is not None
        grid = self._array.grid
        place = tuple(
            slice(i * k, min((i + 1) * k, n))
            for i, k, n in zip(chunk.place, grid.chunk, grid.shape, strict=True)
        )
        size = [part.stop - part.start for part in place]
        values = slot.memory.numpy()[: (chunk.stop - chunk.start) * self._array.dtype.itemsize]
        stored = values.view(self._zarr.dtype).reshape([size[axis] for axis in grid.order])
        axes = [grid.order.index(axis) for axis in range(len(size))]
        self._zarr[place if place else ...] = stored.transpose(axes)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        with _saving(self._folder):
            yield


def seal(said: Iterable[Iterable[Iterable[object]]], arrays: Mapping[str, Array]) -> None:
    """Put checksums behind the chunks that several have written, from what each has told of its ``parts``.

    ``arrays``: by the folders that the parts name. Raises SavingError.
    """
    for (folder, number), parts in crc.by_chunk(said).items():
        array = arrays[folder]
        chunk = array.grid[number]
        nbytes = (chunk.stop - chunk.start) * array.dtype.itemsize
        checksum = crc.of_spans(parts, nbytes)
        assert checksum is not None, f"{folder}, chunk {number}: {sorted(parts)} aren't all of {nbytes} bytes"
        with _saving(Path(folder)):
            trailer = _seal(checksum, array.chunk_nbytes - nbytes)
            _write_into(Path(folder) / array.name_of(chunk), trailer, array.chunk_nbytes, array.file_nbytes)


def _seal(checksum: int, num_zeros: int) -> torch.Tensor:
    """What is behind a chunk whose elements have this checksum, and which is filled up with zeros."""
    whole = crc.extended_by_zeros(checksum, num_zeros) if num_zeros else checksum
    return torch.frombuffer(bytearray(whole.to_bytes(crc.NBYTES, "little")), dtype=torch.uint8)


@contextlib.contextmanager
def _saving(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        path = os.fspath(error.filename or folder)
        raise SavingError(error.errno or 0, error.strerror or str(error), path) from error


def _write_into(path: Path, data: torch.Tensor, offset: int, nbytes: int) -> None:
    """Write bytes into a file at ``offset``, which is ``nbytes`` long from then on."""
    # Not through a link that somebody put there, and not emptying what another rank has written.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        if os.fstat(fd).st_size != nbytes:
            os.ftruncate(fd, nbytes)
        view = memoryview(data.numpy())  # type: ignore[arg-type]  # numpy types it as no buffer
        while view:
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written
    except OSError as error:
        error.filename = os.fspath(path)
        raise
    finally:
        os.close(fd)
