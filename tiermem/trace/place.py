"""The place of a new file: where it may be put without harm to what is there."""

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from tiermem.trace.errors import TraceError


def replaceable(path: Path) -> Path:
    """Where a file that is to be at ``path`` has to be put by a rename: links followed.

    Raises `TraceError` where its folder is missing, or where there is something that is no regular file: a
    rename would put a file in the place of a device such as /dev/null.
    """
    try:
        where = path.resolve()
        mode = where.stat().st_mode if where.exists() else stat.S_IFREG
    except (OSError, RuntimeError, ValueError) as error:
        raise TraceError(f"can't create {path}: {error}") from error
    if not stat.S_ISREG(mode):
        raise TraceError(f"can't create {path}: there is something already that is not a regular file")
    if not where.parent.is_dir():
        raise TraceError(f"can't create {path}: there is no folder {where.parent}")
    return where


def reason(error: OSError) -> str:
    """What the system says of an error, without the path that the caller names anyway."""
    return os.strerror(error.errno) if error.errno else str(error)


def check_apart(out: Path, inputs: Iterable[Path]) -> None:
    """Raise `TraceError` where the file to write is one of those that are read."""
    for file in inputs:
        same = False
        with contextlib.suppress(OSError):
            same = os.path.samefile(out, file)
        if same:
            raise TraceError(f"{out} is the trace that is read, and would be overwritten: name another file")
