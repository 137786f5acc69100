"""Examinations of checkpoints: everything read again, in bounded memory, and compared with its checksums."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tiermem.checkpoint.contents import path_of
from tiermem.checkpoint.document import DOCUMENT, read_document
from tiermem.checkpoint.folder import PARTIAL
from tiermem.checkpoint.reader import ArrayReader
from tiermem.checkpoint.source import ZarrSource
from tiermem.errors import CheckpointError


@dataclass
class Examination:
    """What was found: ``nbytes`` of ``num_arrays`` were read; ``problems`` has in words what isn't as it was written.

    ``unchecked`` are the paths of arrays without checksums, which earlier versions wrote: of these it is only known
    that the files are there, and long enough.
    """

    path: Path
    step: int | None = None
    num_arrays: int = 0
    nbytes: int = 0
    unchecked: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def examine(path: Path) -> Examination:
    """Read all of a checkpoint. In memory is a piece of 1 MiB, or, of a compressed one, a chunk."""
    found = Examination(path)
    try:
        source = ZarrSource(path)
    except CheckpointError as error:
        found.problems += error.problems
        return found
    found.step = source.attributes.get("step")
    found.num_arrays = len(source.arrays)
    for key, array in source.arrays.items():
        if not array.checked:
            found.unchecked.append(path_of(key))
        with contextlib.closing(source.reader(key)) as reader:
            for number in range(array.grid.num_chunks):
                found.problems += _problems(reader, number)
        found.nbytes += array.nbytes
    return found


def _problems(reader: ArrayReader, number: int) -> tuple[str, ...]:
    """What isn't as it was written of one chunk."""
    try:
        reader.check(number)
    except CheckpointError as error:
        return error.problems
    return ()


def checkpoints_in(path: Path) -> Iterator[Path]:
    """The checkpoints that ``path`` is, or that lie in it; those that are being written are none."""
    if is_checkpoint(path):
        yield path
        return
    for name in sorted(os.listdir(path)):
        if not name.startswith(PARTIAL) and is_checkpoint(path / name):
            yield path / name


def is_checkpoint(path: Path) -> bool:
    """Is this a checkpoint's folder, damaged or not?"""
    if not (path / DOCUMENT).is_file():
        return False
    try:
        return "tiermem" in read_document(path)["attributes"]
    except CheckpointError:
        return True
