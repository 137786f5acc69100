"""Deferred initialisation: modules built inside have their large parameters deferred, see :mod:`tiermem.deferral`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from tiermem.config import Config, Source
from tiermem.deferral import Deferral, forget_dead

_Tensor: Any = torch.Tensor

_EMPTY = {torch.empty, torch.empty_like, torch.empty_strided, _Tensor.new_empty, _Tensor.new_empty_strided}


@contextmanager
def deferred_init(config: Source = None) -> Iterator[None]:
    """Build modules inside whose parameters take no memory, for :class:`tiermem.TieredModule` to page::

        with tiermem.deferred_init(config):
            net = Model(...)
        model = tiermem.TieredModule(net, config)

    Values are those of an ordinary construction, bit for bit, as is the random state afterwards: initialisers run on
    one parameter at a time, while the module is built, and again when it is wrapped. ``config`` names the folder
    (``disk.paths``) for values that come from no initialiser alone; it is the file, dict or Config of the run.
    Parameters below 16 KiB, and those on another device than the CPU, are ordinary ones, as are buffers.

    Raises ConfigError where the configuration is refused, BudgetError where the disk is full.
    """
    with deferring(Config.load(config), draw=True):
        yield


@contextmanager
def deferring(config: Config, draw: bool) -> Iterator[Deferral]:
    """The same; without ``draw`` initialisers don't run, since the values come from elsewhere."""
    forget_dead()
    deferral = Deferral(config.disk.folders[0], config.disk.budget.nbytes or 1 << 62, draw)
    handle = register_module_parameter_registration_hook(deferral.registered)
    try:
        with _Empties(deferral):
            yield deferral
        deferral.cool()
    finally:
        handle.remove()


class _Empties(TorchFunctionMode):
    """Notices which tensors are made without values, so that their parameters have none to keep."""

    def __init__(self, deferral: Deferral) -> None:
        super().__init__()
        self._deferral = deferral

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY:
            self._deferral.made_empty(result)
        return result
