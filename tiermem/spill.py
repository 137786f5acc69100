"""A spill: values that are put aside on the disk for a while, and can't be made again."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

from tiermem.errors import BudgetError


class Spill:
    """A file without a name in ``folder``, for values that can't be made again; it goes with its descriptor.

    ``capacity``: the most bytes that it may have.
    """

    def __init__(self, folder: Path, capacity: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._capacity = capacity
        self._end = 0
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # closed in close()

    def write(self, values: torch.Tensor, old: tuple[int, int] | None = None) -> tuple[int, int]:
        """Put the values of a dense tensor aside, in the place of ``old`` ones of the same size.

        Returns their place: the first byte, and how many. Raises BudgetError where the disk has no room.
        """
        memory = _bytes_of(flat(values))
        offset = old[0] if old is not None and old[1] == len(memory) else self._end
        if max(self._end, offset + len(memory)) > self._capacity:
            raise self._full(len(memory), self._capacity - self._end, "raise disk.budget")
        done = 0
        try:
            while done < len(memory):
                done += os.pwrite(self._file.fileno(), memory[done : done + (1 << 30)], offset + done)
        except OSError as error:
            space = os.statvfs(self._folder)
            had = space.f_bavail * space.f_frsize
            raise self._full(len(memory), had, f"{self._folder}: {error.strerror}") from error
        self._end = max(self._end, offset + len(memory))
        return offset, len(memory)

    def _full(self, asked: int, had: int, why: str) -> BudgetError:
        what = "a parameter's values between its initialisation and TieredModule"
        return BudgetError(
            asked, max(0, had), "disk", None, what, f"{why}, or name another folder in disk.paths"
        )

    def read(self, target: torch.Tensor, offset: int) -> None:
        """Fill ``target`` (one dimension) with the bytes from ``offset`` on."""
        memory = _bytes_of(target)
        done = 0
        while done < len(memory):
            got = os.preadv(self._file.fileno(), [memory[done : done + (1 << 30)]], offset + done)
            assert got, "read past what was written"
            done += got

    def close(self) -> None:
        """Give the file up; idempotent."""
        self._file.close()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements as they lie in memory (one dimension)."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().view(torch.uint8).numpy().data) if tensor.numel() else memoryview(b"")
