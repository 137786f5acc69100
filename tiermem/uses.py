"""Uses: what the schedule is told of each use of a unit: its pages, and those of the units around it."""

from __future__ import annotations

from collections.abc import Sequence

from tiermem.policies import Effect
from tiermem.unit import Unit


class Uses:
    """By number of a unit: the numbers of the pages that its forward and its backward use, and backward's effects.

    ``effects`` come twice: where gradients are added to what is there, and where they are the first.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        nests = {unit.number: [unit, *(units[number] for number in sorted(unit.outer))] for unit in units}
        self.forward = {
            number: tuple(page.number for each in nest for page in each.pages)
            for number, nest in nests.items()
        }
        self.backward = {
            number: tuple(page.number for each in nest for page in each.pages + each.gradient_pages)
            for number, nest in nests.items()
        }
        self.effects = {
            number: [
                tuple(effect for each in nest for effect in _effects(each, fresh and each is nest[0]))
                for fresh in (False, True)
            ]
            for number, nest in nests.items()
        }


def _effects(unit: Unit, fresh: bool) -> list[Effect]:
    """What backward does to a unit's pages: it reads the parameters, and writes gradients or adds to them."""
    on_gradients = Effect.WRITES | Effect.FRESH if fresh else Effect.WRITES
    return [Effect.NONE] * len(unit.pages) + [on_gradients] * len(unit.gradient_pages)
