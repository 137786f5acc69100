"""An activation: one storage that autograd saved, the saved tensors that look into it, and what tells its end."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.multiprocessing import reductions

from tiermem.device import Copy
from tiermem.page import Page, padded

_set_version: Any = torch._C._autograd._unsafe_set_version_counter

StorageRef: Any = reductions.StorageWeakRef
"""Tells whether a storage still has its memory, and keeps its identity from being given to another one."""


class Activation:
    """One storage that autograd saved. ``page`` is None for one that stays in memory.

    ``witness`` has the version counter of the tensor that was saved, and none of its memory.
    """

    __slots__ = ("copy", "key", "nbytes", "page", "serial", "storage", "version", "witness")

    def __init__(self, serial: int, tensor: torch.Tensor, nbytes: int) -> None:
        self.serial = serial
        self.nbytes = nbytes
        self.storage = StorageRef(tensor.untyped_storage())  # where the bytes live, or lived last
        self.key: int = self.storage.cdata
        self.witness = _witness(tensor)
        self.version = tensor._version
        self.page: Page | None = None
        self.copy: Copy | None = None  # on its way from the device

    @property
    def lives(self) -> bool:
        """Is there still memory that has the bytes?"""
        return not self.storage.expired()


class Holder:
    """What the saved tensors of one storage have in common: with it dies the activation. Maybe it has the memory."""

    __slots__ = ("__weakref__", "activation", "memory")

    def __init__(self, activation: Activation, memory: torch.Tensor | None) -> None:
        self.activation = activation
        self.memory = memory


class Slice:
    """A saved tensor as autograd keeps it: where in its storage it lies."""

    __slots__ = ("dtype", "holder", "offset", "size", "stride", "version")

    def __init__(self, holder: Holder, tensor: torch.Tensor) -> None:
        self.holder = holder
        self.dtype = tensor.dtype
        self.offset = tensor.storage_offset()
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.version = tensor._version


class Tie(weakref.ref[Holder]):
    """Tells by a queue that a holder has died, see Note: loans."""

    __slots__ = ("activation",)

    activation: Activation


def _witness(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that shares the version counter of ``tensor``."""
    with torch.inference_mode(False), torch.no_grad():
        witness = tensor.detach()
        witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return witness


def share_version(witness: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Have both the same version counter?"""
    version = witness._version
    if tensor._version != version:
        return False
    _set_version((witness,), (version + 1,))
    try:
        return tensor._version != version
    finally:
        _set_version((witness,), (version,))


def is_plain(tensor: torch.Tensor) -> bool:
    """Is it what its bytes say? No conjugate or negative of them, and not made in inference mode, without a version."""
    return not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference() or tensor.is_quantized)


def rounded(nbytes: int) -> int:
    """Up to one of eight sizes between a power of two and the next, so that pages fit other activations later."""
    step = 1 << max(0, nbytes.bit_length() - 4)
    return padded(-(-nbytes // step) * step)
