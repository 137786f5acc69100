"""Membership: how a process that wraps a model finds the others that train it, and becomes one of the ranks."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn

from tiermem.config import Config
from tiermem.errors import ConfigError
from tiermem.partition import ALONE, Partition
from tiermem.ranks import Peers, Ranks, agree, find_peers
from tiermem.transfer import Transfers
from tiermem.unit import Unit


def meet_peers(net: nn.Module, config: Config, group: Any) -> tuple[Peers | None, Partition]:
    """The other processes in ``group`` (see ``TieredModule``), and this one's share; (None, ALONE) without others.

    Raises RanksError, on all of them, unless they have the same model and the same stage.
    """
    stage = config.ranks.stage
    peers = find_peers(group, config.ranks.timeout) if stage != "none" else None
    if peers is None or stage == "none":
        return None, ALONE
    agree(peers, "what ranks.stage is", stage)
    for name, fact in fingerprint(net):
        agree(peers, name, fact)
    slices = num_slices(config, peers)
    replica, place = divmod(peers.rank, slices)
    return peers, Partition(place, slices, stage, replica, peers.world // slices)


def num_slices(config: Config, peers: Peers) -> int:
    """How many ranks have the slices of a page between them: all, unless ``ranks.shards`` has them replicate.

    Raises ConfigError on all ranks where they can't be divided so.
    """
    shards = config.ranks.shards
    agree(peers, "what ranks.shards is", shards)
    if shards is None:
        return peers.world
    if shards == "machine":
        names = peers.tell(platform.node())
        runs = [(name, len(list(each))) for name, each in groupby(names)]
        if len({name for name, _ in runs}) < len(runs) or len({count for _, count in runs}) > 1:
            raise ConfigError(
                f'ranks.shards: read "machine", and the ranks are on {", ".join(names)}; allowed where each machine '
                "has as many as every other, one after the other: give a number, or the group a machine at a time"
            )
        shards = runs[0][1]
    if peers.world % shards:
        raise ConfigError(
            f"ranks.shards: read {shards}, with {peers.world} ranks; allowed is what divides them: "
            f"{', '.join(str(each) for each in range(2, peers.world + 1) if peers.world % each == 0)}"
        )
    return peers.world if shards == 1 else shards


def join_ranks(
    peers: Peers, partition: Partition, units: Sequence[Unit], transfers: Transfers, config: Config
) -> Ranks:
    """Connect to the others; from then on they can ask for this rank's slices. The caller closes."""
    groups = [group for unit in units for group in unit.groups]
    slices = [group.parameter.nbytes // partition.world for group in groups]
    share = sum(group.numel * group.dtype.itemsize for group in groups) // partition.world
    words = [f"the parameters of {units[group.unit].name}" for group in groups]
    ranks = peers.connect(slices, words, config.ranks.reduce == "float32", partition.world, share)
    shards = {group.parameter.key: group.parameter.shard for group in groups}
    transfers.shelf.open(ranks, {key: shard for key, shard in shards.items() if shard is not None})
    return ranks


def fingerprint(net: nn.Module) -> Iterator[tuple[str, Any]]:
    """What must be the same on all ranks, with its name, cheapest first."""
    named = list(net.named_parameters())
    yield "their parameters' names", [name for name, _ in named]
    yield (
        "their parameters' shapes, dtypes and requires_grad",
        [(name, list(p.shape), str(p.dtype), p.requires_grad) for name, p in named],
    )
    with torch.no_grad():
        yield (
            "their parameters' values, of which these are the sums (seed all ranks alike before building the model)",
            {name: float(p.sum(dtype=torch.float64)) for name, p in named if type(p) is nn.Parameter},
        )


def local_ranks() -> int:
    """How many ranks share this machine, as torchrun says; all of them where nobody says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))
