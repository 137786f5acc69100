"""Scalars: what an optimizer keeps for a parameter as a whole, as ranks tell each other of it, or commits have it."""

from __future__ import annotations

from typing import Any

import torch

from tiermem.errors import PagingError


def encoded(value: Any, what: str) -> Any:
    """A number, text, None, or tensor of one element, for JSON; ``what`` it is, for the message.

    Raises PagingError for anything else: ranks have slices of a parameter, and of all of it nothing but numbers.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "value": value.item(),
        }
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = f"tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise PagingError(
        f"the optimizer's state {what} is a {kind}: where ranks have slices of the parameters, state is numbers, or a "
        "tensor with as many elements as the slice; use ranks.stage = 0, where every rank updates all of them"
    )


def decoded(value: Any) -> Any:
    """What :func:`encoded` was given."""
    if isinstance(value, dict):
        dtype: torch.dtype = getattr(torch, value["dtype"])
        return torch.tensor(value["value"], dtype=dtype).reshape(value["shape"])
    return value


def packed(value: Any) -> Any:
    """As a commit has it: a tensor of one element as plain data, since a file of many tensors is slow to write."""
    one = isinstance(value, torch.Tensor) and value.numel() == 1
    return ("scalar", encoded(value, "")) if one else ("value", value)


def unpacked(value: Any) -> Any:
    """What :func:`packed` was given, in memory of its own."""
    kind, given = value
    if kind == "scalar":
        return decoded(given)
    return given.clone() if isinstance(given, torch.Tensor) else given
