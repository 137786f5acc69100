"""The reader: any run of an array's elements, from the bytes of the chunks that hold it and from no others.

Note: parts of chunks. A chunk has one checksum, and who needs a part of it shall not have to read the rest. So the
reader takes the checksum of what it gives out, as it reads: where that comes to a whole chunk, it is compared at once.
What is a part is kept in ``spans``, which whoever ends a load has proved (:meth:`ArrayReader.prove`): the parts that
several ranks have read come to a whole chunk as a rule, and only where they don't is the chunk read again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from tiermem.checkpoint import crc
from tiermem.checkpoint.crc import Span
from tiermem.checkpoint.document import DOCUMENT, Array, decode
from tiermem.checkpoint.grid import Chunk
from tiermem.errors import CheckpointError


class ArrayReader:
    """Reads one array, by elements in memory order; closed by its owner. ``nbytes`` counts what was read of files.

    ``spans`` are parts of chunks that have been given out and not been proved, until they are taken from there; the
    array is ``name`` in them.
    """

    def __init__(self, folder: Path, array: Array, name: str = "") -> None:
        self.folder = folder
        self.array = array
        self.nbytes = 0
        self.spans: list[Span] = []
        self.name = name
        self._span: Span | None = None  # that may go on
        self._fd = -1
        self._name: str | None = None
        self._zarr: Any = None
        self._decoded: tuple[tuple[int, ...], torch.Tensor] | None = None

    def read(self, start: int, out: torch.Tensor) -> None:
        """Fill ``out`` (uint8, one dimension) with the elements from ``start`` on.

        Raises CheckpointError, with the file's path, when a chunk isn't there, is too short, can't be read, or has been
        read to its end and isn't what was written.
        """
        size = self.array.dtype.itemsize
        stop = start + out.numel() // size
        for chunk in self.array.grid.covering(start, stop):
            low, high = max(start, chunk.start), min(stop, chunk.stop)
            piece = out[(low - start) * size : (high - start) * size]
            if self.array.raw and self.array.checked:
                self._read_checked(chunk, (low - chunk.start) * size, piece)
            elif self.array.raw:
                self._read_raw(chunk, (low - chunk.start) * size, piece)
            else:
                decoded = self._decode(chunk)
                piece.copy_(decoded[(low - chunk.start) * size : (high - chunk.start) * size])

    def close(self) -> None:
        """Close the file that is open. Idempotent."""
        fd, self._fd, self._name = self._fd, -1, None
        self._decoded = None
        self._pause()
        if fd >= 0:
            os.close(fd)

    def prove(self, number: int, spans: Sequence[Span]) -> None:
        """Compare parts of chunk ``number`` with its checksum; what they leave out of it, or have twice, is read.

        Raises CheckpointError when the chunk isn't what was written.
        """
        chunk = self.array.grid[number]
        nbytes = self._nbytes_of(chunk)
        checksum = crc.of_spans(spans, nbytes)
        if checksum is None:
            checksum = self._read_again(chunk, spans)
        self._compare(chunk, checksum)

    def check(self, number: int) -> None:
        """Read a whole chunk, to see that it is what was written. Raises CheckpointError."""
        chunk = self.array.grid[number]
        size = self.array.dtype.itemsize
        step = max(1, crc.PIECE_NBYTES // size)
        out = torch.empty(min(step, chunk.stop - chunk.start) * size, dtype=torch.uint8)
        for start in range(chunk.start, chunk.stop, step):
            self.read(start, out[: min(step, chunk.stop - start) * size])

    # -- plain chunks ---------------------------------------------------------------------------------------

    def _nbytes_of(self, chunk: Chunk) -> int:
        """Bytes of a chunk's elements, without what fills it up."""
        return (chunk.stop - chunk.start) * self.array.dtype.itemsize

    def _read_checked(self, chunk: Chunk, offset: int, piece: torch.Tensor) -> None:
        number = self.array.grid.number_at(chunk.start)
        span = self._span
        if span is None or (span.chunk, span.stop) != (number, offset):
            self._pause()
            span = Span(self.name, number, offset, offset, 0)
        checksum = span.checksum
        for start in range(0, piece.numel(), crc.PIECE_NBYTES):
            part = piece[start : start + crc.PIECE_NBYTES]
            self._read_raw(chunk, offset + start, part)
            checksum = crc.extended(checksum, part)
        self._span = span._replace(stop=offset + piece.numel(), checksum=checksum)
        if (self._span.start, self._span.stop) == (0, self._nbytes_of(chunk)):
            self._span = None
            self._compare(chunk, checksum)

    def _pause(self) -> None:
        span, self._span = self._span, None
        if span is not None:
            self.spans.append(span)

    def _read_again(self, chunk: Chunk, spans: Sequence[Span]) -> int:
        """The checksum of a chunk's elements, as they are in the file; in which each span must have had its own."""
        nbytes = self._nbytes_of(chunk)
        edges = sorted({0, nbytes, *(span.start for span in spans), *(span.stop for span in spans)})
        sums = {start: self._checksum_of(chunk, start, stop) for start, stop in pairwise(edges)}

        def over(first: int, last: int) -> int:
            checksum = 0
            for start, stop in pairwise(edges):
                if first <= start < last:
                    checksum = crc.joined(checksum, sums[start], stop - start)
            return checksum

        for span in spans:
            if span.checksum != (checksum := over(span.start, span.stop)):
                raise self._damaged(chunk, span.checksum, checksum, span)
        return over(0, nbytes)

    def _checksum_of(self, chunk: Chunk, start: int, stop: int, checksum: int = 0) -> int:
        """That of bytes of a chunk's file, behind those with checksum ``checksum``."""
        memory = torch.empty(min(crc.PIECE_NBYTES, stop - start), dtype=torch.uint8)
        for offset in range(start, stop, crc.PIECE_NBYTES):
            piece = memory[: min(crc.PIECE_NBYTES, stop - offset)]
            self._read_raw(chunk, offset, piece)
            checksum = crc.extended(checksum, piece)
        return checksum

    def _compare(self, chunk: Chunk, checksum: int) -> None:
        """Raise CheckpointError if this isn't the checksum of a chunk's elements; zeros behind them are read, too."""
        nbytes, end = self._nbytes_of(chunk), self.array.chunk_nbytes
        checksum = self._checksum_of(chunk, nbytes, end, checksum)
        stored = torch.empty(crc.NBYTES, dtype=torch.uint8)
        self._read_raw(chunk, end, stored)
        written = int.from_bytes(stored.numpy().tobytes(), "little")
        if checksum != written:
            raise self._damaged(chunk, checksum, written, Span("", 0, 0, nbytes, 0))

    def _damaged(self, chunk: Chunk, found: int, written: int, span: Span) -> CheckpointError:
        size, path = self.array.dtype.itemsize, self.folder / self.array.name_of(chunk)
        return CheckpointError(
            f"{path} is damaged: its bytes {span.start:,} to {span.stop:,}, which are elements "
            f"{chunk.start + span.start // size:,} to {chunk.start + span.stop // size:,} of "
            f"{self.folder.parent.name}/{decode(self.folder.name)}, have checksum {found:08x}, and {written:08x} was "
            "written: the disk, or somebody, has changed them. Load another checkpoint; tiermem verify says what "
            "else of this one is damaged"
        )

    def _read_raw(self, chunk: Chunk, offset: int, piece: torch.Tensor) -> None:
        name = self.array.name_of(chunk)
        path = self.folder / name
        try:
            if self._name != name:
                self.close()
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._name = name
                nbytes = os.fstat(self._fd).st_size
                if nbytes != self.array.file_nbytes:
                    raise CheckpointError(
                        f"{path} is damaged: it is {nbytes} bytes long, and a chunk of this array has "
                        f"{self.array.file_nbytes}"
                    )
            view = memoryview(piece.numpy())  # type: ignore[arg-type]  # numpy types it as no buffer
            while view:
                came = os.preadv(self._fd, [view], offset)
                if not came:
                    raise CheckpointError(
                        f"{path} is damaged: it ends at byte {offset}, {len(view)} before its end"
                    )
                self.nbytes += came
                view, offset = view[came:], offset + came
        except OSError as error:
            what = (
                "is missing" if isinstance(error, FileNotFoundError) else f"can't be read: {error.strerror}"
            )
            raise CheckpointError(f"{path} {what}") from error

    def _decode(self, chunk: Chunk) -> torch.Tensor:
        """The bytes of a chunk's elements, in memory order; the last one is kept."""
        if self._decoded is not None and self._decoded[0] == chunk.place:
            return self._decoded[1]
        import numpy
        import zarr

        grid = self.array.grid
        path = self.folder / self.array.name_of(chunk)
        if self.array.checked and not path.is_file():  # zarr would take zeros for it
            raise CheckpointError(f"{path} is missing")
        try:
            if self._zarr is None:
                self._zarr = zarr.open_array(str(self.folder), mode="r")
            place = tuple(
                slice(i * k, min((i + 1) * k, n))
                for i, k, n in zip(chunk.place, grid.chunk, grid.shape, strict=True)
            )
            values = numpy.asarray(self._zarr[place if place else ...])
        except Exception as error:  # whatever a codec raises for bytes that are none of its own
            raise CheckpointError(
                f"{path if self.array.checked else self.folder / DOCUMENT}: chunk {chunk.place} can't be decoded: "
                f"{error}"
            ) from error
        self.nbytes += values.nbytes
        values = values.astype(values.dtype.newbyteorder("="), copy=False)
        stored = numpy.ascontiguousarray(values.transpose(grid.order))
        data = torch.from_numpy(stored.reshape(-1).view(numpy.uint8))
        self._decoded = (chunk.place, data)
        return data
