"""Uses: what the schedule is told of each use of a unit: its pages, and those of the units around it."""

from __future__ import annotations

from collections.abc import Sequence

from tiermem.partition import ALONE, Partition
from tiermem.policies import Effect
from tiermem.unit import Unit


class Uses:
    """By number of a unit: the numbers of the pages that its forward and its backward use, and backward's effects.

    ``effects`` come twice: where gradients are added to what is there, and where they are the first.
    """

    def __init__(self, units: Sequence[Unit], partition: Partition = ALONE) -> None:
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
                tuple(
                    effect for each in nest for effect in _effects(each, fresh and each is nest[0], partition)
                )
                for fresh in (False, True)
            ]
            for number, nest in nests.items()
        }
        self._nests = nests
        if partition.shards_gradients:
            # Where backward leaves a unit, its slices of gradients are added to, and needed.
            for unit in units[1:]:
                shards = [page.shard for page in unit.gradient_pages if page.shard is not None]
                self.backward[unit.number] += tuple(shard.number for shard in shards)
                for fresh in (False, True):
                    effect = Effect.WRITES | Effect.FRESH if fresh else Effect.WRITES
                    self.effects[unit.number][fresh] += (effect,) * len(shards)

    def effects_of_forward(self, unit: Unit) -> Sequence[Effect]:
        """What the optimizer has changed on all ranks since the unit was used is read anew."""
        if not any(page.renewed for page in unit.pages):
            return ()
        pages = [page for each in self._nests[unit.number] for page in each.pages]
        effects = [Effect.RENEWED if page.renewed else Effect.NONE for page in pages]
        for page in unit.pages:
            page.renewed = False
        return effects


def _effects(unit: Unit, fresh: bool, partition: Partition) -> list[Effect]:
    """What backward does to a unit's pages: it reads the parameters, and writes gradients or adds to them.

    Where a rank keeps its slice of gradients only, whole ones come into being and go again.
    """
    on_gradients = Effect.WRITES | Effect.FRESH if fresh else Effect.WRITES
    if partition.shards_gradients:
        on_gradients = Effect.WRITES | Effect.FRESH | Effect.SPENDS
    return [Effect.NONE] * len(unit.pages) + [on_gradients] * len(unit.gradient_pages)
