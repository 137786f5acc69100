"""Training on tiered memory: the optimizer, and the loop of the command line."""

from tiermem.trainer.adam import Adam, AdamW
from tiermem.trainer.onebit import OneBitAdam
from tiermem.trainer.optimizer import paged
from tiermem.trainer.scaler import GradScaler

__all__ = ["Adam", "AdamW", "GradScaler", "OneBitAdam", "paged"]
