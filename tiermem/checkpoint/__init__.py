"""Checkpoints: a model's pages as a folder of Zarr arrays, and other formats read into pages."""

from tiermem.checkpoint.inventory import CHUNK_NBYTES, Settings
from tiermem.checkpoint.loading import Loaded
from tiermem.checkpoint.saves import Saves
from tiermem.checkpoint.saving import Saving

__all__ = ["CHUNK_NBYTES", "Loaded", "Saves", "Saving", "Settings"]
