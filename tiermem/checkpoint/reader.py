"""The reader: any run of an array's elements, from the bytes of the chunks that hold it and from no others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from tiermem.checkpoint.document import DOCUMENT, Array
from tiermem.checkpoint.grid import Chunk
from tiermem.errors import CheckpointError


class ArrayReader:
    """Reads one array, by elements in memory order; closed by its owner. ``nbytes`` counts what was read of files."""

    def __init__(self, folder: Path, array: Array) -> None:
        self.folder = folder
        self.array = array
        self.nbytes = 0
        self._fd = -1
        self._name: str | None = None
        self._zarr: Any = None
        self._decoded: tuple[tuple[int, ...], torch.Tensor] | None = None

    def read(self, start: int, out: torch.Tensor) -> None:
        """Fill ``out`` (uint8, one dimension) with the elements from ``start`` on.

        Raises CheckpointError, with the file's path, when a chunk isn't there, is too short or can't be read.
        """
        size = self.array.dtype.itemsize
        stop = start + out.numel() // size
        for chunk in self.array.grid.covering(start, stop):
            low, high = max(start, chunk.start), min(stop, chunk.stop)
            piece = out[(low - start) * size : (high - start) * size]
            if self.array.raw:
                self._read_raw(chunk, (low - chunk.start) * size, piece)
            else:
                decoded = self._decode(chunk)
                piece.copy_(decoded[(low - chunk.start) * size : (high - chunk.start) * size])

    def close(self) -> None:
        """Close the file that is open. Idempotent."""
        fd, self._fd, self._name = self._fd, -1, None
        self._decoded = None
        if fd >= 0:
            os.close(fd)

    def _read_raw(self, chunk: Chunk, offset: int, piece: torch.Tensor) -> None:
        name = self.array.name_of(chunk)
        path = self.folder / name
        try:
            if self._name != name:
                self.close()
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._name = name
                nbytes = os.fstat(self._fd).st_size
                if nbytes != self.array.chunk_nbytes:
                    raise CheckpointError(
                        f"{path} is damaged: it is {nbytes} bytes long, and a chunk of this array has "
                        f"{self.array.chunk_nbytes}"
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
                f"{self.folder / DOCUMENT}: chunk {chunk.place} can't be decoded: {error}"
            ) from error
        self.nbytes += values.nbytes
        values = values.astype(values.dtype.newbyteorder("="), copy=False)
        stored = numpy.ascontiguousarray(values.transpose(grid.order))
        data = torch.from_numpy(stored.reshape(-1).view(numpy.uint8))
        self._decoded = (chunk.place, data)
        return data
