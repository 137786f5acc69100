"""The journal of a durable run: a few slots in its folder, each with one commit record, written in turn.

A record is written into a slot that none of the commits which are kept is in, and is the truth once it is on the disk.
If that breaks off anywhere, the slots beside it still have what was the truth before.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from tiermem.folder import COMMIT, DurableFolder, check_file
from tiermem.record import Commit, Unreadable, decode

GRAIN = 1 << 16
"""Bytes. A slot grows by whole multiples, so that most records need no more space than is there."""


class Journal:
    """The slots of one folder, open for writing until :meth:`close`; at least ``num_slots``."""

    def __init__(self, folder: DurableFolder, num_slots: int) -> None:
        self.path = folder.path
        self._fds: list[int] = []
        self._generations: list[int | None] = []  # in each slot; None: nothing that is to be kept
        self._sizes: list[int] = []
        try:
            present = num_slots_in(folder)
            for number in range(max(num_slots, present)):
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                self._fds.append(os.open(f"{COMMIT}{number}", flags, 0o600, dir_fd=folder.fd))
                self._sizes.append(check_file(self._fds[-1], self.slot(number)).st_size)
                self._generations.append(None)
            if present < len(self._fds):
                os.fsync(folder.fd)
        except BaseException:
            self.close()
            raise

    def slot(self, number: int) -> Path:
        """The file of one slot, for messages."""
        return self.path / f"{COMMIT}{number}"

    def read(self) -> list[Commit | Unreadable]:
        """What is in each slot."""
        found = []
        for number, fd in enumerate(self._fds):
            record = decode(_pread(fd, self._sizes[number]))
            self._generations[number] = record.generation
            found.append(record)
        return found

    def write(self, commit: Commit, kept: Collection[int]) -> None:
        """Make ``commit`` durable, in a slot that has none of the ``kept`` generations. Raises OSError.

        After an error it is not known whether it is durable; it may be written again.
        """
        number = next(n for n, generation in enumerate(self._generations) if generation not in kept)
        fd, data = self._fds[number], commit.encode()
        self._generations[number] = commit.generation
        if len(data) > self._sizes[number]:
            size = -(-len(data) // GRAIN) * GRAIN
            os.posix_fallocate(fd, 0, size)
            self._sizes[number] = size
        done = 0
        while done < len(data):
            done += os.pwrite(fd, data[done:], done)
        os.fdatasync(fd)

    def close(self) -> None:
        """Close the files; idempotent."""
        with contextlib.ExitStack() as stack:
            while self._fds:
                stack.callback(os.close, self._fds.pop())


def num_slots_in(folder: DurableFolder) -> int:
    """How many slots the folder has."""
    names = set(os.listdir(folder.fd))
    return next(number for number in range(len(names) + 1) if f"{COMMIT}{number}" not in names)


def _pread(fd: int, nbytes: int) -> bytes:
    pieces = []
    at = 0
    while at < nbytes and (piece := os.pread(fd, nbytes - at, at)):
        pieces.append(piece)
        at += len(piece)
    return b"".join(pieces)
