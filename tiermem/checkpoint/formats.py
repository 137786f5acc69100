"""Formats: which reader a path is for."""

from __future__ import annotations

from pathlib import Path

from tiermem.checkpoint.document import DOCUMENT
from tiermem.checkpoint.source import Source, ZarrSource
from tiermem.errors import CheckpointError


def open_source(path: Path) -> Source:
    """The tensors at ``path``, in whichever of the known formats they are. Raises CheckpointError."""
    if not path.exists():
        raise CheckpointError(f"{path}: there is nothing")
    if (path / DOCUMENT).is_file():
        return ZarrSource(path)
    raise CheckpointError(f"{path} is no checkpoint of a format that is known here")
