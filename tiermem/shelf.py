"""The shelf: this rank's slices of the parameters, which pages are gathered from, by this rank and by the others.

Note: who reads. Other ranks may ask for any slice at any time, and the thread that serves them never takes the pager's
lock, which may be held while this rank waits for them. It reads a slice where that is, in its frame or on the disk,
under the shelf's own lock, under which frames of slices are given up or moved. The content doesn't change meanwhile:
the optimizer's step begins where all ranks are, and ends what was offered before.

What is read from the disk here is compared with its checksum, as at any page-in: before the page counts as gathered,
and before the last piece of a slice goes to another rank, so that nobody's page is ever whole with damage in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch
import xxhash

from tiermem.aio import Queue, checksum
from tiermem.disk import Disk
from tiermem.errors import TransferError
from tiermem.page import Frame, Page, State
from tiermem.ranks import Ranks, Request
from tiermem.stats import Counters
from tiermem.tier import Tier


class Shelf:
    """Slices by the keys of their pages; empty, and ``ranks`` None, where this process is alone.

    ``verify`` gives the error of a page that has this checksum, if that is not its own. Callers hold the pager's lock.
    """

    def __init__(
        self,
        host: Tier,
        disk: Disk | None,
        queue: Queue | None,
        counters: Counters,
        verify: Callable[[Page, int], TransferError | None],
    ) -> None:
        self.ranks: Ranks | None = None
        self.lock = threading.Lock()
        self._host = host
        self._disk = disk
        self._queue = queue
        self._counters = counters
        self._shards: Mapping[int, Page] = {}
        self._verify = verify
        # Of the slice that is being read for others: how much of it has been, and the checksum of that.
        self._read_so_far: tuple[Page, int, xxhash.xxh3_64] | None = None

    def open(self, ranks: Ranks, shards: Mapping[int, Page]) -> None:
        """From now on other ranks may ask for ``shards``, by the keys of their pages."""
        self.ranks = ranks
        self._shards = shards
        ranks.read = self._read

    def ready(self, page: Page) -> bool:
        """Can it be read now? Not in the optimizer's step, while slices of it are changed somewhere."""
        return not page.gathered or (self.ranks is not None and not self.ranks.stepping)

    def gather(self, page: Page, frame: Frame) -> Request:
        """Begin to gather a page into its frame: this rank's slice goes there first, then the others are asked."""
        ranks, shard = self.ranks, page.shard
        assert ranks is not None
        assert shard is not None
        whole = self._host.bytes_of(frame)
        wait: Callable[[], None] | None = None
        first = ranks.place * shard.nbytes
        if shard.host is not None and shard.state in (State.HOST, State.WRITING):
            whole[first : first + shard.nbytes].copy_(self._host.bytes_of(shard.host))
        else:
            queue, disk = self._queue, self._disk
            assert queue is not None
            assert disk is not None
            ticket = disk.read(shard, self._host.address_of(frame) + first)
            self._counters.disk_to_host.nbytes[shard.kind] += shard.nbytes

            def wait() -> None:
                queue.wait(ticket)
                address = self._host.address_of(frame) + first
                self._check(shard, checksum(address, shard.nbytes) if shard.checksum is not None else None)

        return ranks.gather(page.key, page.version, whole, wait)

    def _read(self, key: int, start: int, piece: torch.Tensor) -> None:
        """Fill ``piece`` with bytes of a slice from ``start`` on, for another rank. Without the pager's lock."""
        shard = self._shards[key]
        with self.lock:
            if shard.host is not None and shard.state in (State.HOST, State.WRITING):
                piece.copy_(self._host.bytes_of(shard.host)[start : start + piece.numel()])
                return
        assert self._disk is not None
        assert self._queue is not None
        self._queue.wait(self._disk.read_span(shard, start, piece.numel(), piece.data_ptr()))
        if shard.checksum is None:
            return
        before, self._read_so_far = self._read_so_far, None
        if start == 0:
            before = (shard, 0, xxhash.xxh3_64())
        if before is None or before[:2] != (shard, start):
            return  # pieces before it were in memory, where they had been compared when they came
        digest, stop = before[2], start + piece.numel()
        digest.update(piece.numpy().data)
        if stop < shard.nbytes:
            self._read_so_far = (shard, stop, digest)
        else:
            self._check(shard, digest.intdigest())

    def _check(self, shard: Page, found: int | None) -> None:
        if found is not None and (error := self._verify(shard, found)) is not None:
            raise error
