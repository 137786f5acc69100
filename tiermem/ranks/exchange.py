"""The exchange: bytes from rank to rank, by point-to-point messages of a process group.

Every rank sends its slice, or the slices of the others, straight from the frame and receives straight into it: no byte
is copied on the way, and a rank sends (N - 1) / N of a page, as in a ring. Slices are added up in the order of the
ranks, so that N ranks give the bits of one rank that accumulates their N batches one after the other; no ring or tree
does. One thread calls, and posts ahead what needs no arithmetic.

With hybrid sharding, ranks that are *near* each other have the slices of a page between them, and each has *replicas*
elsewhere, which have the same slice. Near ranks add up first, each its slice; then the replicas add up what these have,
in their order: each a part of the slice, which it sends back to the others. So little goes between machines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from tiermem.aio import Buffer
from tiermem.page import ALIGNMENT, padded

PIECE_NBYTES = 1 << 18
"""Bytes of a slice that are on their way to be added up at a time: what scratch memory is sized by."""
_PIECES = 1 << 10  # of a slice, at most
_TAGS = 1 << 31


class Term(NamedTuple):
    """What a rank gives to a sum, see :meth:`Exchange.reduce`."""

    page: torch.Tensor | None
    target: torch.Tensor
    fresh: bool


class Exchange:
    """Moves slices between the ``world`` ranks of ``group``, whose tensors must be on the CPU.

    ``piece`` is how many bytes of a slice are added up at a time, and of small slices move together; ``float32`` has
    sums made in that. So many ranks as ``shards`` says, one after the other, are near each other.
    """

    def __init__(self, group: Any, rank: int, world: int, piece: int, float32: bool, shards: int) -> None:
        self.rank = rank
        self.world = world
        first = rank // shards * shards
        self.near = range(first, first + shards)
        self.place = rank - first
        self._sets = [range(start, start + shards) for start in range(0, world, shards)]
        self._replicas = range(self.place, world, shards)
        self._group = group
        self._others = [other for other in self.near if other != rank]
        self.piece = piece
        self._float32 = float32
        # Aligned, since slices are read into it from the disk.
        self._scratch = torch.frombuffer(
            Buffer(_num_pieces(shards, world // shards) * piece).view, dtype=torch.uint8
        )
        self.nbytes_sent: dict[str, int] = defaultdict(int)
        self.nbytes_received: dict[str, int] = defaultdict(int)
        self.num: dict[str, int] = defaultdict(int)  # of exchanges, by what they are

    # -- messages -----------------------------------------------------------------------------------------

    def _send(self, what: str, to: int, source: torch.Tensor, tag: int) -> Any:
        self.nbytes_sent[what] += source.numel() * source.element_size()
        return self._group.send([source], to, tag)

    def _receive(self, what: str, of: int, target: torch.Tensor, tag: int) -> Any:
        self.nbytes_received[what] += target.numel() * target.element_size()
        return self._group.recv([target], of, tag)

    def _scratch_of(self, index: int, nbytes: int) -> torch.Tensor:
        return self._scratch[index * self.piece :][:nbytes]

    def _slice(self, page: torch.Tensor, size: int, rank: int) -> torch.Tensor:
        """A near rank's slice of a page, of ``size`` elements."""
        place = rank - self.near[0]
        return page[place * size : (place + 1) * size]

    # -- gather -------------------------------------------------------------------------------------------

    def gather(self, page: torch.Tensor, ranks: Collection[int], tag: int) -> list[Any]:
        """Begin to fill ``page`` (bytes, this rank's slice of which is there), and to send to the others of ``ranks``.

        Returns what is to be waited for. Slices of ranks that don't want the page come in pieces.
        """
        self.num["gather"] += 1
        size = page.numel() // len(self.near)
        works = []
        for other in self._others:
            target = self._slice(page, size, other)
            if other in ranks:
                works.append(self._receive("gather", other, target, _tagged(tag, 0)))
            else:
                works += [
                    self._receive("gather", other, piece, _tagged(tag, index))
                    for index, piece in enumerate(_pieces(target, self.piece))
                ]
        own = self._slice(page, size, self.rank)
        works += [
            self._send("gather", other, own, _tagged(tag, 0)) for other in self._others if other in ranks
        ]
        return works

    def serve(
        self, read: Callable[[int, torch.Tensor], None], nbytes: int, ranks: Collection[int], tag: int
    ) -> None:
        """Send this rank's slice of a page that only ``ranks`` want, in pieces that ``read`` puts into memory.

        ``read`` is given the first byte within the slice, and the memory to fill.
        """
        self.num["gather"] += 1
        for index, start in enumerate(range(0, nbytes, self.piece)):
            piece = self._scratch_of(0, min(self.piece, nbytes - start))
            read(start, piece)
            for work in [self._send("gather", other, piece, _tagged(tag, index)) for other in ranks]:
                work.wait()

    # -- reduce -------------------------------------------------------------------------------------------

    def reduce(
        self,
        page: torch.Tensor | None,
        target: torch.Tensor,
        fresh: bool,
        givers: Sequence[bool],
        tag: int,
    ) -> None:
        """Add the mean over the ranks of their pages' own slices to ``target``, or put it there if that is ``fresh``.

        ``page`` is this rank's (None: it gives nothing), and of the gradient's dtype, as is ``target``; ``givers`` says
        which ranks give one. ``target`` may be a slice of ``page``.
        """
        self.num["reduce"] += 1
        itemsize = target.element_size()
        step = self.piece // itemsize
        size = target.numel()
        edges = [(start, min(start + step, size)) for start in range(0, size, step)]
        sends: list[Any] = []
        coming: dict[int, list[tuple[int, Any, torch.Tensor]]] = {}

        def post(index: int) -> None:
            start, stop = edges[index]
            rows = []
            for row, other in enumerate(self._others):
                if givers[other]:
                    place = self._scratch_of(index % 2 * len(self._others) + row, (stop - start) * itemsize)
                    rows.append((other, self._receive("reduce", other, place, _tagged(tag, index)), place))
            coming[index] = rows
            if page is not None:
                for other in self._others:
                    piece = self._slice(page, size, other)[start:stop].view(torch.uint8)
                    sends.append(self._send("reduce", other, piece, _tagged(tag, index)))

        for index in range(min(1, len(edges))):
            post(index)
        for index, (start, stop) in enumerate(edges):
            if index + 1 < len(edges):
                post(index + 1)
            terms: dict[int, torch.Tensor] = {}
            if page is not None:
                terms[self.rank] = self._slice(page, size, self.rank)[start:stop]
            for other, work, place in coming.pop(index):
                work.wait()
                terms[other] = place.view(target.dtype)
            rows = [terms[rank] for rank in sorted(terms)]
            self._add(target[start:stop], rows, fresh, givers, _tagged(tag, index))
        for work in sends:
            work.wait()

    def reduce_together(
        self, terms: Sequence[Term], givers: Sequence[Sequence[bool]], tags: Sequence[int]
    ) -> None:
        """As :meth:`reduce`, of small pages whose slices are no more than a piece together."""
        self.num["reduce"] += 1
        sizes = [term.target.numel() for term in terms]
        works, coming = [], {}
        for row, other in enumerate(self._others):
            theirs = [
                size * term.target.element_size()
                for size, term, gave in zip(sizes, terms, givers, strict=True)
                if gave[other]
            ]
            mine = [
                _bytes(self._slice(term.page, size, other))
                for term, size in zip(terms, sizes, strict=True)
                if term.page is not None
            ]
            if theirs:
                room = self._scratch_of(row, sum(theirs))
                works.append(self._receive("reduce", other, room, _tagged(tags[0], 0)))
                coming[other] = iter(torch.split(room, theirs))
            if mine:
                room = self._scratch_of(len(self._others) + row, sum(map(torch.numel, mine)))
                works.append(self._send("reduce", other, torch.cat(mine, out=room), _tagged(tags[0], 0)))
        for work in works:
            work.wait()
        for term, size, gave, tag in zip(terms, sizes, givers, tags, strict=True):
            rows = []
            for rank in self.near:
                if rank == self.rank and term.page is not None:
                    rows.append(self._slice(term.page, size, rank))
                elif rank != self.rank and gave[rank]:
                    rows.append(next(coming[rank]).view(term.target.dtype))
            self._add(term.target, rows, term.fresh, gave, _tagged(tag, 0))

    def _add(
        self,
        target: torch.Tensor,
        terms: Sequence[torch.Tensor],
        fresh: bool,
        givers: Sequence[bool],
        tag: int,
    ) -> None:
        """The mean of the ranks' ``terms``, one after the other, onto what ``target`` has."""
        of = torch.float32 if self._float32 else target.dtype
        scaled: Iterator[torch.Tensor] = (term.to(of) * (1 / self.world) for term in terms)
        total = None if fresh else target.to(of)
        if len(self._replicas) > 1:
            scaled = iter(self._across(_sum(None, scaled), target, of, givers, tag))
        total = _sum(total, scaled)
        if total is None:
            target.zero_()
        else:
            target.copy_(total)

    def _across(
        self,
        sum_: torch.Tensor | None,
        target: torch.Tensor,
        of: torch.dtype,
        givers: Sequence[bool],
        tag: int,
    ) -> list[torch.Tensor]:
        """The sum of the replicas' sums for ``target``, made in their order; nothing where nobody has given."""
        gave = [any(givers[rank] for rank in near) for near in self._sets]
        if not any(gave):
            return []
        whole = torch.empty_like(target, dtype=of) if sum_ is None else sum_
        parts = dict(zip(self._replicas, _parts(whole, len(self._replicas)), strict=True))
        own, others = parts[self.rank], [rank for rank in self._replicas if rank != self.rank]
        works = []
        if sum_ is not None:
            works = [
                self._send("across", other, _bytes(parts[other]), tag)
                for other in others
                if parts[other].numel()
            ]
        terms = {self.rank: own} if sum_ is not None else {}
        room = self._scratch[2 * len(self._others) * self.piece :].view(of)
        for index, (other, there) in enumerate(zip(self._replicas, gave, strict=True)):
            if there and other != self.rank and own.numel():
                place = room[index * own.numel() :][: own.numel()]
                self._receive("across", other, _bytes(place), tag).wait()
                terms[other] = place
        for work in works:
            work.wait()  # before what was sent is written over
        if own.numel():
            own.copy_(_sum(None, (terms[rank] for rank in sorted(terms))))  # type: ignore[arg-type]  # some gave
        works = [
            self._receive("across", other, _bytes(parts[other]), tag + 1)
            for other in others
            if parts[other].numel()
        ]
        if own.numel():
            works += [self._send("across", other, _bytes(own), tag + 1) for other in others]
        for work in works:
            work.wait()
        return [whole]

    # -- scatter -------------------------------------------------------------------------------------------

    def scatter(self, what: str, outgoing: torch.Tensor, incoming: torch.Tensor, tag: int) -> None:
        """Row r of ``outgoing`` (bytes) goes to rank r, and what that has for this one to row r of ``incoming``."""
        works = [self._receive(what, other, incoming[other], _tagged(tag, 0)) for other in self._others]
        works += [self._send(what, other, outgoing[other], _tagged(tag, 0)) for other in self._others]
        incoming[self.rank].copy_(outgoing[self.rank])
        for work in works:
            work.wait()

    # -- share --------------------------------------------------------------------------------------------

    def share(self, whole: torch.Tensor, bounds: Sequence[tuple[int, int]], tag: int) -> None:
        """Fill ``whole`` (one dimension): each rank has the elements within its ``bounds`` and sends them to all."""
        self.num["share"] += 1
        start, stop = bounds[self.rank]
        own = whole[start:stop].view(torch.uint8)
        works = [
            self._receive("share", other, whole[slice(*bounds[other])].view(torch.uint8), _tagged(tag, 0))
            for other in self._others
            if bounds[other][0] < bounds[other][1]
        ]
        if start < stop:
            works += [self._send("share", other, own, _tagged(tag, 0)) for other in self._others]
        for work in works:
            work.wait()


def piece_nbytes(largest: int) -> int:
    """Bytes of a piece, where the largest slice has ``largest``."""
    return max(min(PIECE_NBYTES, padded(largest)), padded(-(-largest // _PIECES)), ALIGNMENT)


def scratch_nbytes(largest: int, shards: int, replicas: int) -> int:
    """Bytes of memory that an exchange needs for itself: two pieces from every other rank that is near, and sums."""
    return _num_pieces(shards, replicas) * piece_nbytes(largest)


def _num_pieces(shards: int, replicas: int) -> int:
    return 2 * (shards - 1) + (3 if replicas > 1 else 0)


def _pieces(tensor: torch.Tensor, size: int) -> list[torch.Tensor]:
    return [tensor[start : start + size] for start in range(0, tensor.numel(), size)]


def _parts(tensor: torch.Tensor, num: int) -> list[torch.Tensor]:
    """A tensor in ``num`` parts of one size, the last but for what is left; none is empty where others aren't."""
    size = -(-tensor.numel() // num)
    return [tensor[min(start * size, tensor.numel()) :][:size] for start in range(num)]


def _sum(total: torch.Tensor | None, terms: Iterable[torch.Tensor]) -> torch.Tensor | None:
    for term in terms:
        total = term if total is None else total + term
    return total


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def _tagged(tag: int, piece: int) -> int:
    return 2 * (tag * _PIECES + piece) % _TAGS  # and the next one, for what goes back
