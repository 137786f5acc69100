"""Tiered memory for PyTorch: parameters, gradients and optimizer state paged between device, host and disk.

model = tiermem.TieredModule(net, "policy.toml")
optimizer = tiermem.trainer.AdamW(model.parameters(), lr=3e-4)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiermem.checkpoint import Checkpoints
    from tiermem.config import Config
    from tiermem.deferred import deferred_init
    from tiermem.errors import (
        BudgetError,
        CheckpointError,
        ConfigError,
        IntegrityError,
        PagingError,
        RanksError,
        SavingError,
        TiermemError,
        TransferError,
    )
    from tiermem.module import TieredModule
    from tiermem.pretrained import from_pretrained

__all__ = [
    "BudgetError",
    "CheckpointError",
    "Checkpoints",
    "Config",
    "ConfigError",
    "IntegrityError",
    "PagingError",
    "RanksError",
    "SavingError",
    "TieredModule",
    "TiermemError",
    "TransferError",
    "deferred_init",
    "from_pretrained",
]

__version__ = "0.1.0"

_HOMES = {
    "Checkpoints": "tiermem.checkpoint",
    "Config": "tiermem.config",
    "TieredModule": "tiermem.module",
    "deferred_init": "tiermem.deferred",
    "from_pretrained": "tiermem.pretrained",
}


def __getattr__(name: str) -> Any:
    # Not before somebody asks: the command line answers --help without the seconds that torch takes.
    if name in __all__:
        return getattr(import_module(_HOMES.get(name, "tiermem.errors")), name)
    if name == "trainer":
        return import_module("tiermem.trainer")
    raise AttributeError(f"module 'tiermem' has no attribute {name!r}")
