"""The updater: an optimizer that doesn't wait for its step, as hooks see it."""

from __future__ import annotations

from typing import Protocol

from tiermem.unit import Group, Unit


class Updater(Protocol):
    """Who updates units while backward runs. None of this is called inside the door."""

    clips: bool
    """Are the gradients of a backward used after it, so that they can be clipped?"""

    def begin_forward(self) -> None:
        """A training forward of the whole model begins."""

    def settle(self) -> None:
        """Parameters and state are to be those after the last step."""

    def begin(self) -> None:
        """A backward begins."""

    def enter(self, unit: Unit) -> None:
        """A unit's backward begins, and it will take room."""

    def landing(self, group: Group) -> None:
        """A gradient is about to be put into the group's page."""

    def landed(self, group: Group, index: int) -> None:
        """The gradient of one field has landed."""

    def run(self) -> None:
        """Units may have been left."""
