"""Peers: the processes of a torch process group, found, agreed with, and connected."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

from torch import distributed as dist

from tiermem.errors import ConfigError, RanksError
from tiermem.page import padded
from tiermem.ranks.coordinator import Coordinator
from tiermem.ranks.exchange import PIECE_NBYTES, Exchange, piece_nbytes
from tiermem.ranks.ranks import Ranks
from tiermem.ranks.wire import Server, connect

CONNECT_SECONDS = 60
_c10d: Any = dist  # partly without types


_numbers: dict[tuple[int, ...], int] = defaultdict(int)  # how often these processes have become peers


class Peers:
    """This process's place among those that share a model: ``rank`` of ``world``, over a gloo group of their own.

    The group is apart from the one that it was made from, so that the training loop's own collectives and these
    can't get into each other's way. It ends with its last user.
    """

    def __init__(self, parent: Any, timeout: float) -> None:
        members = tuple(dist.get_process_group_ranks(parent))
        self.rank = dist.get_rank(parent)
        self.world = len(members)
        self._timeout = timeout
        # A name of its own for each time: what an earlier group left in the store would be taken for this one's.
        _numbers[members] += 1
        name = f"tiermem/{'-'.join(map(str, members))}/{_numbers[members]}"
        self._store = _c10d.PrefixStore(name, _c10d.distributed_c10d._get_default_store())
        self._told = 0
        try:
            self.tell(None)  # so that nobody waits below for who doesn't come
        except BaseException:
            _numbers[members] -= 1  # the next time has the name that this one had
            raise
        # Nobody waits for this group's timeout: waits are bounded above it, where there is something to say.
        group = _c10d.PrefixStore("group", self._store)
        self._group = _c10d.ProcessGroupGloo(group, self.rank, self.world, timedelta(days=1))

    def tell(self, fact: Any) -> list[Any]:
        """Tell all ranks something (JSON), and hear what each of them says, by rank.

        Raises RanksError when one says nothing within the timeout.
        """
        self._told += 1
        self._store.set(f"{self._told}/{self.rank}", json.dumps(fact))
        end = monotonic() + self._timeout
        said = []
        for rank in range(self.world):
            key = f"{self._told}/{rank}"
            try:
                self._store.wait([key], timedelta(seconds=max(0.001, end - monotonic())))
            except RuntimeError as error:
                raise RanksError(
                    f"rank {rank} has not wrapped the model as rank {self.rank} has, within the {self._timeout:g} "
                    "seconds of ranks.timeout: every rank has to, or set ranks.stage to none for models that each "
                    "has alone",
                    rank,
                ) from error
            said.append(json.loads(self._store.get(key)))
        return said

    def together(self, what: str, work: Callable[[], Any]) -> list[Any]:
        """Do ``work`` on every rank, which all must ask for; returns what it gave (JSON) on each, by rank.

        If it failed on one, it raises there what it raised, and RanksError with that error's text on all others.
        """
        fact, failure = None, None
        try:
            fact = work()
        except Exception as error:
            failure = error
        said = self.tell([fact, None if failure is None else str(failure)])
        if failure is not None:
            raise failure
        failed = next((rank for rank, each in enumerate(said) if each[1] is not None), None)
        if failed is not None:
            raise RanksError(f"{what}: rank {failed} could not do its part: {said[failed][1]}", failed)
        return [each[0] for each in said]

    def connect(
        self, slices: Sequence[int], words: Sequence[str], float32: bool, shards: int, share: int
    ) -> Ranks:
        """Open the connections; ``slices`` are the bytes of one slice of each page, by key, ``words`` their names.

        ``shards``: how many ranks, one after the other, have the slices between them; ``share``: the bytes of all
        parameters that one of them has, without padding.

        Raises RanksError, on all ranks, when they can't reach each other.
        """
        piece = max(piece_nbytes(max(slices, default=0)), min(PIECE_NBYTES, padded(share)))
        coordinator = Coordinator(self.world, words, shards)
        server = Server(coordinator, slices, piece) if self.rank == 0 else None
        invitation = self.tell(server.invitation if server is not None else None)[0]
        with contextlib.ExitStack() as stack:
            if server is not None:
                stack.callback(server.close)
                stack.callback(server.abandon)
                server.start(CONNECT_SECONDS)
            connection = connect(invitation, self.rank, CONNECT_SECONDS)
            stack.callback(connection.close)
            exchange = Exchange(self._group, self.rank, self.world, piece, float32, shards)
            ranks = Ranks(connection, server, exchange, slices, self._timeout)
            stack.pop_all()
        return ranks


def find_peers(group: Any, timeout: float) -> Peers | None:
    """The peers in ``group`` (a process group, a one-dimensional DeviceMesh, or None for all processes).

    None when this process is alone, or torch.distributed isn't initialised.
    """
    if not dist.is_available() or not dist.is_initialized():
        if group is not None:
            raise ConfigError("ranks: a process group was given, and torch.distributed isn't initialised")
        return None
    group = group_of(group, "ranks")
    if dist.get_world_size(group) == 1:
        return None
    return Peers(group if group is not None else dist.group.WORLD, timeout)


def group_of(group: Any, what: str) -> Any:
    """A process group, or that of a DeviceMesh. Raises ConfigError for a mesh of several dimensions."""
    if not hasattr(group, "get_group"):
        return group
    if group.ndim != 1:
        raise ConfigError(
            f"{what}: a DeviceMesh of {group.ndim} dimensions {group.mesh_dim_names}; allowed is one: "
            'mesh["dp"], say'
        )
    return group.get_group()


def agree(peers: Peers, what: str, mine: Any) -> None:
    """Raise RanksError, on all ranks, unless all say the same of ``what``."""
    said = peers.tell(mine)
    other = next((rank for rank, each in enumerate(said) if each != said[0]), None)
    if other is not None:
        raise RanksError(
            f"the ranks differ in {what}: rank 0 has {said[0]!r}, rank {other} has {said[other]!r}", other
        )
