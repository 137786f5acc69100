"""Tiered memory for PyTorch: parameters, gradients and optimizer state paged between device, host and disk.

model = tiermem.TieredModule(net, "policy.toml")
optimizer = tiermem.trainer.AdamW(model.parameters(), lr=3e-4)
"""

from tiermem.config import Config
from tiermem.errors import BudgetError, ConfigError, PagingError, TiermemError, TransferError
from tiermem.module import TieredModule

__all__ = [
    "BudgetError",
    "Config",
    "ConfigError",
    "PagingError",
    "TieredModule",
    "TiermemError",
    "TransferError",
]

__version__ = "0.1.0"
