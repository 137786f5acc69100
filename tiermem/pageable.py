"""Pageable: which tensors of a module go into pages, and which can't.

All parameters do, and the large buffers that aren't floating point: packed and 8-bit weights are often kept as such.
Other buffers (running means, caches) are written in forward and replaced at will: they stay in memory, and count
against the budget.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import torch
from torch import nn

from tiermem.errors import ConfigError
from tiermem.parameter import DeferredParameter

MIN_BUFFER_NBYTES = 16 << 10
"""A smaller buffer isn't worth a fault."""


def tensors_of(module: nn.Module, but: Container[int] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a module's own, by their names in it, that go into pages; ``but``: none with these ids."""
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.numel() and id(parameter) not in but:
            yield name, parameter
    for name, buffer in module.named_buffers(recurse=False):
        if is_pageable(buffer):
            yield name, buffer


def is_pageable(buffer: torch.Tensor) -> bool:
    """Does this buffer go into a page?"""
    return (
        type(buffer) is torch.Tensor
        and not (is_compute(buffer.dtype) or buffer.is_complex() or buffer.requires_grad)
        and buffer.layout is torch.strided
        and buffer.numel() * buffer.element_size() >= MIN_BUFFER_NBYTES
        and not (buffer.is_meta or buffer.is_inference() or buffer.is_quantized)
        and buffer.is_contiguous()
    )


def is_compute(dtype: torch.dtype) -> bool:
    """Is it a floating-point type that modules compute in? Those of 8 bits only store: they are never cast."""
    return dtype.is_floating_point and dtype.itemsize > 1


def nbytes_of(module: nn.Module, but: Container[int] = ()) -> int:
    """Bytes of all that a module and those below it have for pages, each tensor counted once; see tensors_of."""
    tensors = {id(tensor): tensor for each in module.modules() for _, tensor in tensors_of(each, but)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def nbytes_of_buffers(module: nn.Module) -> int:
    """Bytes of the buffers that stay in memory."""
    return sum(
        buffer.numel() * buffer.element_size() for buffer in module.buffers() if not is_pageable(buffer)
    )


def admit(tensor: torch.Tensor, name: str, meta: bool) -> None:
    """Raise ConfigError, naming it, for a parameter that can't be paged. ``meta``: it may be without data."""
    kind = type(tensor)
    if kind not in (nn.Parameter, DeferredParameter, torch.Tensor):
        raise ConfigError(
            f"parameter {name} is a {kind.__name__}: only plain torch.nn.Parameter can be paged "
            "(initialise lazy modules, unwrap distributed ones, close the model that pages it already; of quantised "
            "weights, those that are plain integer or 8-bit tensors)"
        )
    if (tensor.is_meta and not meta) or tensor.layout is not torch.strided:
        raise ConfigError(f"parameter {name} has no dense data ({tensor.device}, {tensor.layout})")
    if tensor.is_inference():
        raise ConfigError(
            f"parameter {name} was made in inference mode, and can't be trained or paged: make it outside"
        )
    if not is_dense(tensor.shape, tensor.stride()):
        raise ConfigError(
            f"parameter {name} of shape {list(tensor.shape)} has strides {list(tensor.stride())}, with gaps or "
            "overlaps: replace it by a contiguous one"
        )


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Has a tensor of this shape and these strides, in elements, neither gaps nor overlaps?

    Not asked of torch's meta tensors, whose first use imports sympy: half a second, and 40 MB.
    """
    expected = 1
    for step, num in sorted((step, num) for num, step in zip(size, stride, strict=True) if num != 1):
        if step != expected and 0 not in size:
            return False
        expected *= num
    return True
