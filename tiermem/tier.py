"""A tier of memory: a slab's books, the bytes behind them, and the policy that picks who leaves."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence

import torch

from tiermem.page import TENSOR_ALIGNMENT, Frame
from tiermem.policies import Eviction
from tiermem.slab import Slab


class Tier:
    """Frames in one kind of memory. ``memory`` is the whole slab as bytes (uint8, one dimension)."""

    def __init__(self, name: str, memory: torch.Tensor, eviction: Eviction) -> None:
        self.name = name
        self.memory = memory
        self.address = memory.data_ptr()
        self.slab = Slab(memory.numel())
        self.eviction = eviction
        self._typed: dict[torch.dtype, torch.Tensor] = {torch.uint8: memory}

    def close(self) -> None:
        """Let go of the memory. It is freed with the last tensor that looks into it, wherever that is held."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._typed.clear()

    def bytes_of(self, frame: Frame) -> torch.Tensor:
        """The frame's bytes (uint8)."""
        return self.memory[frame.offset : frame.offset + frame.nbytes]

    def address_of(self, frame: Frame) -> int:
        """The address of the frame's first byte, for kernels and I/O."""
        return self.address + frame.offset

    def view(
        self, frame: Frame, dtype: torch.dtype, start: int, size: Sequence[int], stride: Sequence[int]
    ) -> torch.Tensor:
        """A tensor over part of a frame; ``start`` in elements of ``dtype`` from the frame's first byte."""
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = self.memory.view(dtype)
        return typed.as_strided(size, stride, frame.offset // dtype.itemsize + start)


def aligned(numel: int, dtype: torch.dtype) -> int:
    """``numel`` rounded up so that a tensor after it starts on :data:`TENSOR_ALIGNMENT` bytes."""
    step = max(1, TENSOR_ALIGNMENT // dtype.itemsize)
    return -(-numel // step) * step


def trim_memory() -> None:
    """Have malloc give back to the system what has been freed."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
