"""The partition: which slice of every page is whose, where several ranks share a model.

Stages are those of ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
SC 2020): 0 replicates everything, 1 gives each rank the optimizer state of its slice only, 2 the gradients as well, 3
the parameters as well.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tiermem.page import ALIGNMENT, padded


class Partition(NamedTuple):
    """This rank's place among the ``world`` ranks that have the slices of a page. One rank alone has every page whole.

    With hybrid sharding there are several such sets of ranks, the ``replicas``; this is one of number ``replica``.
    """

    rank: int = 0
    world: int = 1
    stage: int = 3
    replica: int = 0
    replicas: int = 1

    @property
    def alignment(self) -> int:
        """Bytes. Pages that are cut into slices are padded to it, so that slices are equal and aligned."""
        return ALIGNMENT * self.world

    @property
    def shards_gradients(self) -> bool:
        """Does a rank keep its slice of a gradient only, once it is reduced?"""
        return self.world > 1 and self.stage >= 2

    @property
    def shards_parameters(self) -> bool:
        """Does a rank keep its slice of the parameters only?"""
        return self.world > 1 and self.stage >= 3

    def slice_numel(self, numel: int, dtype: torch.dtype) -> int:
        """Elements of one slice of a page of ``numel`` elements, padding included."""
        return padded(numel * dtype.itemsize, self.alignment) // self.world // dtype.itemsize

    def own(self, numel: int, dtype: torch.dtype) -> tuple[int, int]:
        """The first element of this rank's slice and the one after its last, without padding.

        Whose optimizer state this rank keeps: at stage 0, of all elements.
        """
        if self.world == 1 or self.stage == 0:
            return 0, numel
        size = self.slice_numel(numel, dtype)
        return min(self.rank * size, numel), min((self.rank + 1) * size, numel)


ALONE = Partition()
"""The partition of a process that shares its model with nobody."""
