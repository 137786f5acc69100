"""Guard: while a module is paged, no parameter joins it whose bytes no budget counts.

Modules and parameters are assigned to attributes all the time. What is refused is one that brings parameters of its
own into the wrapped tree (resized embeddings, an adapter added later, a new head), at the line that does it.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from tiermem.errors import PagingError, format_bytes


class Guard:
    """Watches the modules below ``net`` while attached; ``home`` has the ids of its parameters."""

    def __init__(self, net: nn.Module, home: Container[int]) -> None:
        self._home = home
        # The modules are kept: the id of a dead one could be another's.
        self._modules = {id(module): (name, module) for name, module in net.named_modules()}
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Begin to watch."""
        self._handles = [
            register_module_module_registration_hook(self._module),
            register_module_parameter_registration_hook(self._parameter),
        ]

    def detach(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _module(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        if module is None or id(parent) not in self._modules:
            return
        for key, parameter in module.named_parameters():
            self._check(parent, f"{name}.{key}", parameter)
        path = self._modules[id(parent)][0]
        for key, each in module.named_modules(prefix=f"{path}.{name}" if path else name):
            self._modules.setdefault(id(each), (key, each))

    def _parameter(self, parent: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and id(parent) in self._modules:
            self._check(parent, name, parameter)

    def _check(self, parent: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if id(parameter) in self._home or not parameter.numel():
            return
        path, nbytes = self._modules[id(parent)][0], parameter.numel() * parameter.element_size()
        raise PagingError(
            f"{path + '.' if path else ''}{name}, a parameter of shape {list(parameter.shape)}, can't join a model "
            f"that is paged: its {format_bytes(nbytes)} would be outside of the budget. "
            "close() the model, change it, and wrap it again (and make its optimizer again)"
        )
