"""Checkpoints: a model's pages as a folder of Zarr arrays, and other formats read into pages."""

from tiermem.checkpoint.inventory import CHUNK_NBYTES
from tiermem.checkpoint.loading import Loaded
from tiermem.checkpoint.saves import Saves
from tiermem.checkpoint.saving import Saving
from tiermem.checkpoint.series import Checkpoints

__all__ = ["CHUNK_NBYTES", "Checkpoints", "Loaded", "Saves", "Saving"]
