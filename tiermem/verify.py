"""Verification: every page of a commit read again, in bounded memory, and compared with its checksum."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import xxhash

from tiermem.durable import DurableRun
from tiermem.folder import PAGES, check_file
from tiermem.layout import pages_of
from tiermem.record import BLANK, CHECKED, Commit

PIECE_NBYTES = 4 << 20


def damage_of(
    run: DurableRun, commit: Commit, told: Callable[[int], None] = lambda nbytes: None
) -> list[dict[str, Any]]:
    """What of a commit isn't as it was written, as :meth:`DurableRun.mark` takes it; ``told`` the bytes read so far.

    Pages without a checksum (``integrity.checksums = false``) are only looked for. Raises OSError.
    """
    found: list[dict[str, Any]] = []
    done = 0
    files: list[int] = []
    try:
        for folder in run.folders:
            files.append(os.open(PAGES, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder.fd))
            check_file(files[-1], folder.path / PAGES)
        pages = pages_of(run.layout)
        for number, row in enumerate(commit.rows):
            if row["what"] == BLANK:
                continue
            file, offset, nbytes = int(row["file"]), int(row["offset"]), pages[number][3]
            actual = checksum_of(files[file], offset, nbytes)
            expected = int(row["checksum"]) if row["what"] == CHECKED else None
            if actual is None or expected not in (None, actual):
                found.append(run.damaged(number, file, offset, expected, actual))
            done += nbytes
            told(done)
    finally:
        for fd in files:
            os.close(fd)
    return found


def checksum_of(fd: int, offset: int, nbytes: int) -> int | None:
    """That of a span of a file; None when the file ends before it does."""
    digest = xxhash.xxh3_64()
    end = offset + nbytes
    while offset < end:
        piece = os.pread(fd, min(PIECE_NBYTES, end - offset), offset)
        if not piece:
            return None
        digest.update(piece)
        offset += len(piece)
    return digest.intdigest()
