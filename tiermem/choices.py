"""Policies as the policy file asks for them."""

from __future__ import annotations

from typing import Any

from tiermem.config import Config, Size
from tiermem.policies import Ahead, Eviction, Prefetch, eviction, prefetch
from tiermem.randomness import undisturbed
from tiermem.table import PageTable


def eviction_of(config: Config) -> Eviction:
    """A new policy for one tier. Raises ValueError where there is none of that name."""
    return eviction(config.policy.eviction, undisturbed)


def prefetch_of(config: Config, table: PageTable, capacity: int) -> Prefetch | None:
    """What looks ahead where there is no plan, for a tier of ``capacity`` bytes; None where nothing shall."""
    ahead = config.policy.lookahead
    limits: dict[str, Any] = {"accesses": 64, "nbytes": max(1, capacity // 2)}
    if isinstance(ahead, int):
        limits = {"accesses": ahead}
    elif isinstance(ahead, Size):
        limits = {"nbytes": ahead.resolve(0)}
    if "nbytes" in limits:
        limits["size"] = lambda number: table[number].nbytes
    return prefetch(config.policy.prefetch, **limits)


def ahead_of(config: Config) -> Ahead:
    """How far ahead plans fetch."""
    if config.policy.prefetch == "none":
        return Ahead(accesses=0)
    ahead = config.policy.lookahead
    if isinstance(ahead, Size):
        return Ahead(nbytes=ahead.resolve(0))
    return Ahead(accesses=ahead if isinstance(ahead, int) else None)
