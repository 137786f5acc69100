"""Compiled: the forwards of units as torch.compile makes them, until the model is closed.

The hooks of paging run outside of what is compiled, so by the time a compiled forward reads a weight it is an ordinary
one with its bytes in place. A unit inside another one breaks the outer one's graph, at its own hooks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_ABSENT = object()


class Compiled:
    """Replaces the ``forward`` of each of ``modules`` by a compiled one; ``settings`` are those of torch.compile."""

    def __init__(self, modules: Iterable[nn.Module], settings: dict[str, Any]) -> None:
        self._own: list[tuple[nn.Module, Any]] = []
        for module in modules:
            own = vars(module).get("forward", _ABSENT)
            forward = torch.compile(module.forward, **settings)
            self._own.append((module, own))
            module.forward = forward

    def close(self) -> None:
        """Give the modules their own ``forward`` back. Idempotent."""
        while self._own:
            module, own = self._own.pop()
            if own is _ABSENT:
                del module.forward
            else:
                module.forward = own
