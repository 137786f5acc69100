"""Text as bytes: a file or a folder of text files, read a window at a time.

A token is a byte, so the vocabulary is 256 and a loss in nats per token is one in nats per byte, whatever the text.
The files stand one after the other in the order of their paths; nothing of them is kept in memory except where each
begins, so a folder may be larger than memory by far.
"""

from __future__ import annotations

import os
import stat
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tiermem.errors import TiermemError, format_bytes

PROBE_NBYTES = 8192
"""How far into a file a NUL byte makes it a binary one (git looks as far)."""


class DataError(TiermemError, ValueError):
    """Data that can't be trained on: missing, empty, too short, or changed while it was read."""


class Corpus:
    """The bytes of text files, as one long row.

    A file named itself is read as bytes, whatever is in it. In a folder, regular files are taken at any depth, in any
    encoding; left out (and counted in ``num_skipped``) are binary files, which are those with a NUL byte in their first
    8 KiB, and files that can't be read. Hidden files and folders, empty files and folders in ``exclude`` are passed
    over. Links are followed; what they lead to is read once, however many ways there are to it.

    Args:
        path: the file or folder.
        suffixes: take only files whose names end so; all of them by default.
        exclude: names of folders to pass over.

    Raises DataError when there is nothing to read.
    """

    def __init__(
        self, path: str | os.PathLike[str], suffixes: Sequence[str] = (), exclude: Sequence[str] = ()
    ) -> None:
        self.path = Path(path)
        self.num_skipped = 0
        self._paths: list[str] = []
        self._ends: list[int] = []  # of each file, in the row
        try:
            kind = os.stat(path).st_mode
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror}") from error
        if stat.S_ISREG(kind):
            self._add(os.fspath(path), binary=True)
        elif stat.S_ISDIR(kind):
            for found in _files(os.fspath(path), frozenset(exclude)):
                if found.endswith(tuple(suffixes)) if suffixes else True:
                    self._add(found, binary=False)
        else:
            raise DataError(f"{self.path} is neither a file nor a folder")
        if not self._paths:
            skipped = f" ({self.num_skipped} were binary or could not be read)" if self.num_skipped else ""
            raise DataError(
                f"{self.path} is empty or can't be read"
                if stat.S_ISREG(kind)
                else f"{self.path}: there are no text files in this folder{skipped}"
            )

    def __len__(self) -> int:
        """Bytes of all files together."""
        return self._ends[-1]

    @property
    def num_files(self) -> int:
        """How many files are read."""
        return len(self._paths)

    def _add(self, path: str, binary: bool) -> None:
        try:
            with open(path, "rb") as file:
                nbytes = os.fstat(file.fileno()).st_size
                text = nbytes > 0 and (binary or b"\0" not in file.read(PROBE_NBYTES))
        except OSError:
            self.num_skipped += 1
            return
        if text:
            self._paths.append(path)
            self._ends.append(nbytes + (self._ends[-1] if self._ends else 0))
        elif nbytes:
            self.num_skipped += 1

    def read(self, offset: int, nbytes: int) -> bytes:
        """``nbytes`` bytes from ``offset`` in the row on, over the ends of files where need be.

        Raises DataError when a file has become shorter or can't be read any more.
        """
        assert 0 <= offset <= offset + nbytes <= len(self)
        pieces = []
        index = bisect_right(self._ends, offset)
        while nbytes:
            begin = self._ends[index - 1] if index else 0
            count = min(nbytes, self._ends[index] - offset)
            path = self._paths[index]
            try:
                with open(path, "rb") as file:
                    piece = os.pread(file.fileno(), count, offset - begin)
            except OSError as error:
                raise DataError(f"{path}: {error.strerror}") from error
            if len(piece) != count:
                raise DataError(f"{path} became shorter while it was being read")
            pieces.append(piece)
            offset, nbytes, index = offset + count, nbytes - count, index + 1
        return b"".join(pieces)

    def batches(self, batch: int, sequence: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless batches of windows from anywhere in the row: (tokens, next tokens), int64 [batch, sequence].

        The same seed gives the same windows. Raises DataError at once when there are less than ``sequence`` + 1 bytes.
        """
        if len(self) < sequence + 1:
            raise DataError(
                f"{self.path} has {format_bytes(len(self))}, too little for one sequence of {sequence} bytes and the "
                "byte after it: shorten --sequence, or give more text"
            )
        return self._batches(batch, sequence, torch.Generator().manual_seed(seed))

    def _batches(
        self, batch: int, sequence: int, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            starts = torch.randint(len(self) - sequence, (batch,), generator=generator)
            windows = b"".join(self.read(start, sequence + 1) for start in starts.tolist())
            table = torch.from_numpy(np.frombuffer(windows, dtype=np.uint8).astype(np.int64))
            table = table.view(batch, sequence + 1)
            yield table[:, :-1].contiguous(), table[:, 1:].contiguous()


def _files(folder: str, exclude: frozenset[str]) -> Iterator[str]:
    """The regular files below ``folder``, each once, in the order of their paths."""
    seen: set[tuple[int, int]] = set()  # links may lead back up, or twice to one file
    for here, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in exclude and _is_new(os.path.join(here, name), seen)
        )
        for name in sorted(files):
            path = os.path.join(here, name)
            if not name.startswith(".") and _is_new(path, seen):
                yield path


def _is_new(path: str, seen: set[tuple[int, int]]) -> bool:
    """Is this a file or folder that was not seen yet? Pipes, sockets, devices and dead links are neither."""
    try:
        info = os.stat(path)
    except OSError:
        return False
    if not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)):
        return False
    identity = (info.st_dev, info.st_ino)
    new = identity not in seen
    seen.add(identity)
    return new
