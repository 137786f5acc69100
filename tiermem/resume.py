"""Resuming: which durable run a model goes on from, if any, and whether it is of the same model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiermem.config import Config
from tiermem.disk import Disk
from tiermem.durable import DurableRun, peek, remove_unborn, search, share_of
from tiermem.errors import ConfigError
from tiermem.joint import Joint, of_other_numbers
from tiermem.layout import Layout, differences
from tiermem.page import Page
from tiermem.partition import ALONE, Partition
from tiermem.ranks import Peers
from tiermem.table import PageTable
from tiermem.unit import Unit
from tiermem.verify import damage_of

Resume = str | os.PathLike[str] | None
"""``"auto"``, the path of a run folder, or None."""


def open_run(
    net: nn.Module,
    config: Config,
    dtype: torch.dtype | None,
    resume: Resume,
    peers: Peers | None = None,
    partition: Partition = ALONE,
) -> DurableRun | None:
    """The run to train ``net`` in: a new one, or the one that ``resume`` names or finds; None without durability.

    Of several ranks (``peers``), each gets its part of one. Raises ConfigError when there is one to resume and it
    can't be: it is in use, of another model, or damaged.
    """
    if config.durability.every is None:
        if resume is not None:
            raise ConfigError(
                f'resume: read {os.fspath(resume)!r} with durability.mode = "off", where nothing is kept; '
                'allowed is None, or set durability.mode to "step"'
            )
        return None
    parents = [folder.absolute() for folder in config.disk.folders]
    num_kept = config.durability.commits
    model = tensors_of(net, dtype)
    path = None if resume in (None, "auto") else Path(resume).expanduser().absolute()
    if peers is not None:
        joint = Joint(peers, parents, num_kept, model, shares_of(partition))
        run = joint.find(path) if resume is not None else None
        return run if run is not None else joint.create()
    if path is not None:
        return _checked(DurableRun.open(path, num_kept), model)
    notes: list[str] = []
    run = _find(parents, num_kept, model, notes) if resume is not None else None
    if run is None:
        run = DurableRun.create(parents, num_kept)
    run.notes += notes
    return run


def _find(parents: Sequence[Path], num_kept: int, model: Layout, notes: list[str]) -> DurableRun | None:
    """The newest run of the same model; those that never committed anything are removed on the way."""
    others: list[str] = []
    for found in search(parents):
        if share_of(found.path.name) is not None:
            continue
        if found.alive:
            layout = peek(found.path)
            if layout is not None and not differences(model, layout, tensors_only=True):
                raise ConfigError(
                    f"resume: {found.path} is of this model, and in use by a process that lives: wait for its end, or "
                    "give this one another of disk.paths, or resume=None for a run of its own"
                )
            continue
        if remove_unborn(found.path, parents):
            continue
        run = DurableRun.open(found.path, num_kept)
        if run.empty:
            run.remove()
            continue
        different = differences(model, run.layout, tensors_only=True)
        if not different and run.unfinished:
            notes.append(f"{run.path}: its first commit was broken off, so there is nothing to resume in it")
            run.close()
            continue
        if not different:
            return _checked(run, model)
        run.close()
        others = others or [f"resume: {found.path} is of another model: {each}" for each in different]
    others = others or of_other_numbers(parents, model, 1)
    if others:
        raise ConfigError(
            *others, "give this model another of disk.paths, or resume=None to begin afresh beside it"
        )
    return None


def _checked(run: DurableRun, model: Layout) -> DurableRun:
    try:
        different = differences(model, run.layout, tensors_only=True)
        if different:
            raise ConfigError(*(f"resume: {run.path} is of another model: {each}" for each in different))
        run.choose(damage_of)
    except BaseException:
        run.close()
        raise
    return run


def tensors_of(net: nn.Module, dtype: torch.dtype | None) -> Layout:
    """The part of a layout that is the model's own, whatever it is cut into: its parameters."""
    return {
        "tensors": [
            {
                "name": name,
                "size": list(parameter.shape),
                "dtype": _word(
                    dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
                ),
                "trainable": parameter.requires_grad,
            }
            for name, parameter in net.named_parameters()
            if parameter.numel()
        ]
    }


def shares_of(partition: Partition) -> dict[str, int]:
    """What a layout says of the ranks: ``ranks.stage``, and with hybrid sharding how many have the slices."""
    return {"stage": partition.stage} | ({"shards": partition.world} if partition.replicas > 1 else {})


def describe(
    units: Sequence[Unit], table: PageTable, part_numel: int, partition: Partition | None = None
) -> Layout:
    """The layout of a model that is cut into ``units``, with parts of ``part_numel`` elements at most.

    ``partition``: of the ranks, where it is one rank's part.
    """
    return {
        **({} if partition is None else shares_of(partition)),
        "part_numel": part_numel,
        "units": [unit.name for unit in units],
        "pages": [
            [page.unit, page.kind.name.lower(), str(page.dtype).removeprefix("torch."), page.nbytes]
            for page in table
        ],
        "tensors": [
            {
                "name": field.name,
                "dtype": str(group.dtype).removeprefix("torch."),
                "trainable": group.trainable,
                "page": group.parameter.number,
                "offset": field.offset,
                "size": list(field.size),
                "stride": list(field.stride),
            }
            for unit in units
            for group in unit.groups
            for field in group.fields
        ],
    }


def units_of(net: nn.Module, layout: Layout) -> Iterator[dict[str, nn.Module]]:
    """The modules that were units, as candidates for :func:`tiermem.budget.fit`: the one way to cut it again."""
    modules = dict(net.named_modules())
    missing = [name for name in layout["units"][1:] if name not in modules]
    if missing:
        raise ConfigError(f"resume: the committed model has modules {missing}, which this one doesn't have")
    yield {name: modules[name] for name in layout["units"][1:]}


def adopt_pages(run: DurableRun, table: PageTable, layout: Layout, disk: Disk) -> None:
    """Find the pages of ``table`` where the commit of a resumed run has them.

    Raises ConfigError when ``layout``, which they were cut to, isn't that of the run.
    """
    if run.kept:
        different = differences(layout, run.layout)
        if different:
            raise ConfigError(*(f"resume: {run.path} can't be resumed: {each}" for each in different))
        disk.adopt(list(table), run)


def mark_damage(run: DurableRun, page: Page, found: int) -> str:
    """A page isn't what was written: if a commit names it, no resume takes that commit. Says what can be done."""
    if page.extent is None or page.extent not in page.committed:
        return ""
    run.mark([run.damaged(page.number, *page.extent, page.checksum, found)])
    named = zip(reversed(run.kept), reversed(page.committed), strict=False)
    others = [commit for commit, extent in named if extent != page.extent]
    if not others:
        return (
            "; no commit is kept that has another copy (durability.commits = 2 would keep one), and whether the one "
            'before is still whole, resume="auto" finds out'
        )
    return (
        f"; the commit of step {others[0].step} has another copy: close the model, and wrap it with "
        'resume="auto" to go on from there'
    )


def _word(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
