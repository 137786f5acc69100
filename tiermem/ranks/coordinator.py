"""The coordinator: what the ranks do together, decided in one place from what each of them says.

The first rank of the group has it. It is told what each rank wants, has and waits for, and answers with decisions;
nothing is exchanged before it is decided, and whatever is decided can be done by every rank without help of its main
thread. So no rank is ever inside an exchange that another one doesn't join, whatever order they ask in. The idea of
asking before a collective is Horovod's (Sergeev & Del Balso, "Horovod: fast and easy distributed deep learning in
TensorFlow", 2018); here it is asked for single ranks too, and waits that can't end are found and named.

It is a state machine: no sockets, no threads, no clock.

Messages of a rank (lists, as they travel):
``["offer", [[key, version], ...]]`` its slice of these pages can be read, in this version of its content;
``["want", key, version]`` it wants the whole page;
``["join", name, payload]`` it takes part in what all have to take part in;
``["blocked", name, reason]`` it can't go on before that is decided (``"want <key>"`` for a page);
``["free"]`` it goes on all the same;
``["late", seconds]`` it has waited as long as ``ranks.timeout`` allows;
``["fail", text]`` it can't go on at all.

Decisions:
``["gather", key, tag, ranks]`` these ranks get the page: everyone sends them its slice;
``["done", name, tag, payloads]`` all have joined;
``["return", name]`` an exchange that was joined is taken back, because nobody could go on;
``["error", text, rank]`` it is over.
:func:`together` makes one decision of neighbouring reductions of small pages: ``["together", [decisions]]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Message = list[Any]
Decision = tuple[Sequence[int], Message]  # to which ranks, what

REDUCE = "reduce"
SETTLE = "settle"
STEP = "step"
CLOSE = "close"


class Coordinator:
    """Decides for ``world`` ranks. ``words`` names the pages in messages.

    So many ranks as ``shards`` says (None: all), one after the other, have the slices of a page between them.
    """

    def __init__(self, world: int, words: Sequence[str] = (), shards: int | None = None) -> None:
        self.world = world
        size = shards or world
        self._near = [range(first, first + size) for first in range(0, world, size)]
        self.failed = False
        self._words = words
        self._all = range(world)
        self._offered: list[dict[int, int]] = [{} for _ in self._all]  # rank -> page -> version
        self._wants: dict[tuple[int, int], set[int]] = {}  # (page, version) -> ranks
        self._joined: dict[str, dict[int, Any]] = {}  # name -> rank -> payload
        self._blocked: dict[int, tuple[str, str]] = {}  # rank -> (name, reason in words)
        self._gone: set[int] = set()
        self._tag = 0

    # -- what it is told ----------------------------------------------------------------------------------

    def hear(self, rank: int, message: Message) -> list[Decision]:
        """Take one message; returns what is decided now."""
        if self.failed:
            return []
        what = message[0]
        if what == "offer":
            self._offered[rank].update((key, version) for key, version in message[1])
            decided = self._gathers(patient=True)
        elif what == "want":
            self._wants.setdefault((message[1], message[2]), set()).add(rank)
            decided = self._gathers(patient=True)
        elif what == "join":
            decided = self._join(rank, message[1], message[2])
        elif what == "blocked":
            if self._waits(rank, message[1]):
                self._blocked[rank] = (message[1], message[2])
            decided = []
        elif what == "free":
            self._blocked.pop(rank, None)
            decided = []
        elif what == "late":
            return self.fail(
                f"rank {rank} has waited for {message[1]:g} seconds, as ranks.timeout allows: {self.describe()}",
                None,
            )
        else:
            assert what == "fail", message
            return self.fail(f"rank {rank}: {message[1]}", rank)
        return decided + self._resolve()

    def lost(self, rank: int, why: str) -> list[Decision]:
        """The connection to a rank has ended."""
        self._gone.add(rank)
        if self.failed or len(self._gone) == self.world:
            return []
        return self.fail(
            f"rank {rank} is gone ({why}): its process has died, or was killed, or the network to it is down",
            rank,
        )

    def fail(self, text: str, rank: int | None) -> list[Decision]:
        """Nobody can go on."""
        self.failed = True
        return [(self._all, ["error", text, rank])]

    @property
    def impatient(self) -> bool:
        """Is there a page that could be gathered for some of the ranks, if the others aren't waited for?"""
        return any(
            self._ready(key, version, near)
            for (key, version), ranks in self._wants.items()
            for near in self._near
            if not ranks.isdisjoint(near)
        )

    def hurry(self) -> list[Decision]:
        """Go ahead with what is wanted, by whomever: it has been waited for the others long enough."""
        return [] if self.failed else self._gathers(patient=False)

    # -- deciding -----------------------------------------------------------------------------------------

    def _ready(self, key: int, version: int, near: range) -> bool:
        return all(self._offered[rank].get(key) == version for rank in near)

    def _gathers(self, patient: bool) -> list[Decision]:
        """Gathers that can be; while ``patient``, only of what all ranks want, so that slices are read once."""
        decided: list[Decision] = []
        for (key, version), ranks in list(self._wants.items()):
            for near in self._near:
                wanting = sorted(ranks.intersection(near))
                if not wanting or (patient and len(wanting) < len(near)):
                    continue
                if not self._ready(key, version, near):
                    continue
                ranks.difference_update(wanting)
                for rank in wanting:
                    self._unblock(rank, f"want {key}")
                decided.append((near, ["gather", key, self._next_tag(), wanting]))
            if not ranks:
                del self._wants[key, version]
        return decided

    def _join(self, rank: int, name: str, payload: Any) -> list[Decision]:
        ranks = self._joined.setdefault(name, {})
        assert rank not in ranks, f"rank {rank} has joined {name} already"
        ranks[rank] = payload
        if len(ranks) < self.world:
            return []
        decided: list[Decision] = []
        if name.startswith(SETTLE):
            # Contributions that not all ranks made wait no longer: they are seen to by all, right after this.
            decided += [
                one for each in list(self._joined) if each.startswith(REDUCE) for one in self._return(each)
            ]
        elif name.startswith(STEP):
            for offered in self._offered:
                offered.clear()
        del self._joined[name]
        for each in self._all:
            self._unblock(each, name)
        decided.append((self._all, ["done", name, self._next_tag(), [ranks[each] for each in self._all]]))
        return decided

    def _return(self, name: str) -> list[Decision]:
        ranks = sorted(self._joined.pop(name))
        for rank in ranks:
            self._unblock(rank, name)
        return [(ranks, ["return", name])]

    def _resolve(self) -> list[Decision]:
        """When every rank is blocked: go ahead with less than all, or take back, or say that it can't go on."""
        if len(self._blocked) < self.world:
            return []
        decided = self._gathers(patient=False)
        if len(self._blocked) < self.world:
            return decided
        stuck = sorted({name for name, _ in self._blocked.values() if name.startswith(REDUCE)})
        if stuck:
            return decided + [one for name in stuck for one in self._return(name)]
        return decided + self.fail(
            f"the ranks wait for each other and none can go on: {self.describe()}", self._odd_one()
        )

    def _waits(self, rank: int, name: str) -> bool:
        if name.startswith("want "):
            key = int(name[5:])
            return any(rank in ranks for (page, _), ranks in self._wants.items() if page == key)
        return rank in self._joined.get(name, ())

    def _unblock(self, rank: int, name: str) -> None:
        if rank in self._blocked and self._blocked[rank][0] == name:
            del self._blocked[rank]

    def _next_tag(self) -> int:
        self._tag += 1
        return self._tag

    def _odd_one(self) -> int | None:
        """The rank that waits for something else than all others do, if there is one."""
        names = [self._blocked[rank][0] for rank in self._all]
        odd = [rank for rank in self._all if names.count(names[rank]) == 1]
        return odd[0] if len(odd) == 1 and self.world > 2 else None

    # -- telling ------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """In words, what each rank waits for."""
        return "; ".join(f"rank {rank} {self._state(rank)}" for rank in self._all)

    def _state(self, rank: int) -> str:
        if rank in self._gone:
            return "is gone"
        if rank not in self._blocked:
            joined = [name for name, ranks in self._joined.items() if rank in ranks]
            return f"computes (it has joined {', '.join(joined)})" if joined else "computes"
        name, reason = self._blocked[rank]
        if not name.startswith("want "):
            missing = self._absent(name)
            return f"waits in {reason} for {missing}"
        key = int(name[5:])
        version = next(v for (page, v), ranks in self._wants.items() if page == key and rank in ranks)
        word = self._words[key] if key < len(self._words) else f"page {key}"
        others = [
            f"rank {each} has {self._version(each, key)}"
            for each in next(near for near in self._near if rank in near)
            if self._offered[each].get(key) != version
        ]
        return f"waits in {reason} for version {version} of {word}, of which {', '.join(others)}"

    def _absent(self, name: str) -> str:
        absent = [str(rank) for rank in self._all if rank not in self._joined.get(name, ())]
        return f"rank{'s' if len(absent) > 1 else ''} {_listed(absent)}"

    def _version(self, rank: int, key: int) -> str:
        version = self._offered[rank].get(key)
        return "none, being in its optimizer step" if version is None else f"version {version}"


def together(decisions: Sequence[Decision], slices: Sequence[int], small: int, limit: int) -> list[Decision]:
    """Neighbouring decisions to reduce slices of at most ``small`` bytes as one, up to ``limit`` bytes in all.

    ``slices`` are the sizes of slices by page.
    """
    merged: list[Decision] = []
    run: list[Message] = []
    nbytes = 0
    for ranks, message in decisions:
        size = slices[int(message[1].split()[1])] if _reduces(message) else limit
        if size > small or not run or nbytes + size > limit:
            run, nbytes = [], 0
            merged.append((ranks, message))
        if size <= small:
            run.append(message)
            nbytes += size
        if len(run) > 1:
            merged[-1] = (ranks, ["together", run])
    return merged


def _reduces(message: Message) -> bool:
    return bool(message[0] == "done" and message[1].startswith(REDUCE))


def _listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
