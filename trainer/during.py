"""Updates during backward: a unit's, as soon as backward has left it and all its gradients are there.

Its parameters are in memory then, and its gradients never leave it: they are used, and given up, where others are
written and read again. What backward doesn't complete (the resident unit, parameters that got no gradient, a unit that
has no room for its state beside what is open) is left to ``step()``, so the numbers are those of an update behind
backward. Whatever needs all gradients before the first update (clipping, loss scaling) can't be had with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from tiermem.trainer.kernel import Hyper, Kernel
from tiermem.trainer.moments import AdamUpdate
from tiermem.unit import Group, Unit


@runtime_checkable
class Owner(Protocol):
    """The optimizer."""

    def with_what(self) -> tuple[Kernel, Sequence[Hyper]]:
        """The kernel and each parameter group's settings, as they are now."""


class DuringBackward:
    """What ``Hooks`` tells while backward runs, and what is made of it."""

    clips = False

    def __init__(self, update: AdamUpdate) -> None:
        self._update = update
        self._arrived: dict[Group, set[int]] = {}
        self._ready: list[Group] = []
        units = update.hooks.units
        self._unit_of = {group: unit for unit in units[1:] for group in unit.groups if group.trainable}

    def begin_forward(self) -> None:
        """A forward begins: nothing is kept from it."""

    def settle(self) -> None:
        """Nothing is pending."""

    def enter(self, unit: Unit) -> None:
        """A unit's backward begins, and needs nothing of this."""

    def landing(self, group: Group) -> None:
        """A gradient is about to land, where no other one is."""

    def begin(self) -> None:
        """A backward begins; what one before it left incomplete is ``step()``'s."""
        self._arrived.clear()
        self._ready.clear()

    def landed(self, group: Group, index: int) -> None:
        """The gradient of one field has landed."""
        if self._update.hooks.reduction.quiet or group not in self._unit_of:
            return
        arrived = self._arrived.setdefault(group, set())
        arrived.add(index)
        if len(arrived) == len(group.fields):
            self._ready.append(group)

    def run(self) -> None:
        """Update what is complete and isn't used any more. Not to be called inside the door."""
        owner: object = self._update.owner
        if not isinstance(owner, Owner):
            self._update.hooks.updater = None  # the optimizer is gone
            return
        for group in list(self._ready):
            gradient = group.gradient
            assert gradient is not None
            if group.parameter.pins or gradient.pins:
                continue  # its unit is open, or a tensor looks into it
            self._ready.remove(group)
            if all(id(field.parameter) in self._update.settings for field in group.fields):
                self._make(self._unit_of[group], group, owner)

    def _make(self, unit: Unit, group: Group, owner: Owner) -> None:
        self._update.early(unit, group, *owner.with_what())
