"""Parallelism inside a model: the processes that have other parts of the model which this process's module is of.

Tensor parallelism cuts parameters over a mesh (:mod:`tiermem.dtensors`), a pipeline cuts the layers into stages.
Neither shares pages with this process: who does are the ranks. What is of the whole model all the same, the norm that
clipping goes by and whether a gradient overflowed, is agreed on with them, over process groups of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from tiermem.config import Config
from tiermem.dtensors import DTensors
from tiermem.errors import CheckpointError, ConfigError
from tiermem.ranks import group_of

Kind = tuple[Any, tuple[int, ...]]
"""A mesh, and the dimensions of it along which parts differ; (None, ()) of a parameter that is no DTensor."""

WHOLE: Kind = (None, ())


class Parallel:
    """Where this process is inside of its model. ``pipeline``: the group of the stages, None without.

    Of its methods, those that ask others must be called by all of them.
    """

    def __init__(self, dtensors: DTensors | None = None, pipeline: Any = None) -> None:
        self.dtensors = dtensors
        self._pipeline = pipeline
        locals_ = [] if dtensors is None else list(dtensors.locals.values())
        self.kinds: list[Kind] = [WHOLE, *dict.fromkeys((each.mesh, each.sharded) for each in locals_)]
        self._kind_of = {
            id(each.parameter): self.kinds.index((each.mesh, each.sharded), 1) for each in locals_
        }
        meshes = dict.fromkeys(each.mesh for each in locals_)
        self._groups = [mesh.get_group(index) for mesh in meshes for index in range(mesh.ndim)]

    def __bool__(self) -> bool:
        """Is there more of the model than what this process and its ranks have?"""
        return bool(self._groups) or self._pipeline is not None

    def kind_of(self, parameter: torch.Tensor) -> int:
        """Which of the kinds a parameter is of."""
        return self._kind_of.get(id(parameter), 0)

    def norm(self, norms: Sequence[float], norm_type: float) -> float:
        """The norm over the whole model; ``norms`` are those over the parameters here, kind by kind."""
        here = []
        for (mesh, sharded), norm in zip(self.kinds, norms, strict=True):
            for index in range(mesh.ndim if mesh is not None else 0):
                said = _said(norm, mesh.get_group(index))
                norm = combined(said, norm_type) if index in sharded else said[0]
            here.append(norm)
        total = combined(here, norm_type)
        for group in self._groups:
            total = _said(total, group)[
                0
            ]  # equal to the last bit, or parts of one parameter would drift apart
        return total if self._pipeline is None else combined(_said(total, self._pipeline), norm_type)

    def largest(self, found: float) -> float:
        """The largest of what the processes of this model have found."""
        for group in self._every:
            found = max(_said(found, group))
        return found

    def require_folders(self, path: Path) -> None:
        """Raise CheckpointError, on all, where two of them would save different parts into one folder."""
        for group in self._every:
            said = _said(str(path), group)
            if len(set(said)) < len(said):
                raise CheckpointError(
                    f"{path}: {len(said)} processes have different parts of the model, by tensor parallelism or as "
                    "stages of a pipeline, and would save them into one folder: give each a folder of its own "
                    f'(f"{path}.{{mesh.get_local_rank(dimension)}}"); ranks that share a part save together'
                )

    @property
    def place(self) -> list[list[int]]:
        """For each group of such processes, which of them this is, and of how many."""
        return [[dist.get_rank(group), dist.get_world_size(group)] for group in self._every]

    @property
    def _every(self) -> list[Any]:
        return self._groups + ([self._pipeline] if self._pipeline is not None else [])


ALONE = Parallel()
"""Of a process that has a model for itself, or shares with ranks only."""


def find_parallel(config: Config, dtensors: DTensors, group: Any, pipeline: Any) -> Parallel:
    """Where this process is inside of its model; ``group``: what it shares pages with, ``pipeline`` has the stages.

    Raises ConfigError for what doesn't go together.
    """
    stages = None if pipeline is None else group_of(pipeline, "pipeline")
    if stages is not None and dist.get_world_size(stages) == 1:
        stages = None
    parallel = Parallel(dtensors, stages)
    if not parallel:
        return parallel
    if config.durability.every is not None:
        raise ConfigError(
            "durability.mode: runs are durable for ranks that share a model, and not yet where tensor parallelism or a "
            'pipeline cuts it, whose parts would have to be committed together: set durability.mode = "off", and save '
            "checkpoints"
        )
    if config.ranks.stage != "none" and dist.get_world_size() > 1:
        _check_apart(dtensors, stages, group)
    return parallel


def _check_apart(dtensors: DTensors, stages: Any, group: Any) -> None:
    """Those who share pages have the same part, so none of them has another."""
    if group is None:
        raise ConfigError(
            "group: read None, which is every process, and tensor parallelism or a pipeline gives processes different "
            'parts of this model; name those that have the same: group=mesh["dp"], or set ranks.stage to none'
        )
    mine = set(dist.get_process_group_ranks(group_of(group, "group")))
    others = [
        (f"parameter {each.name}", each.mesh.mesh.flatten().tolist()) for each in dtensors.locals.values()
    ]
    if stages is not None:
        others.append(("the pipeline", dist.get_process_group_ranks(stages)))
    for what, members in others:
        common = sorted(mine.intersection(members))
        if len(common) > 1:
            raise ConfigError(
                f"group: has processes {common}, between which {what} is cut as well: those who share pages have the "
                'same part of a model; give it another dimension of the mesh (group=mesh["dp"])'
            )


def combined(norms: Sequence[float], norm_type: float) -> float:
    """The norm of numbers that are norms of parts."""
    if norm_type == math.inf:
        return math.nan if any(map(math.isnan, norms)) else max(norms, default=0.0)
    if any(math.isnan(norm) for norm in norms):
        return math.nan
    return float(math.fsum(norm**norm_type for norm in norms) ** (1 / norm_type))


def _said(fact: Any, group: Any) -> list[Any]:
    """What each process of a group says, by rank."""
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, fact, group=group)
    return said
