"""Commits: after which steps the state of a wrapped model becomes durable, and how a resumed one gets it back.

Note: the order. A commit is *prepared* when the optimizer's step is over: pages that are newer than the disk are
written, the page files are synchronised, and what isn't in pages is looked at (buffers, the generators' states, counts
of updates, registered objects). Then its record is written, which makes it the truth: at once, or, where late objects
are registered, when these have had their turn, at the latest when the next training forward begins. A run that is
killed before that resumes one step earlier. Either way all that a record says is of one moment: after a step, before
anything was drawn for the next.

Note: ranks. Where several ranks share the model each commits what it has, and a step is committed when all have its
record. Nobody waits for that: the commit before is kept one step longer, until all ranks meet in the optimizer's next
step, where they tell each other what they have (:meth:`Commits.agree`). What not all have is no commit then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from tiermem import randomness
from tiermem.disk import Disk
from tiermem.door import Door
from tiermem.durable import DurableRun, common_of
from tiermem.errors import PagingError, TransferError
from tiermem.layout import LATER, fingerprint
from tiermem.page import Page
from tiermem.pager import Pager
from tiermem.record import BLANK, CHECKED, ROW, STORED, Commit
from tiermem.registered import Registered, pack, tensors_of, unpack
from tiermem.unit import Unit


class Updating(Protocol):
    """What an optimizer has to tell, for the parameters that it updates."""

    def pending(self) -> bool:
        """Are there gradients that have landed and weren't used?"""

    def state(self) -> dict[str, Any]:
        """Settings and counts, as plain data."""

    def resume(self, states: Sequence[dict[str, Any]]) -> None:
        """Take over what :meth:`state` gave for these parameters, of one optimizer or several."""


@dataclass
class Prepared:
    """A commit whose pages are durable and whose record is not written yet."""

    generation: int
    step: int
    rows: Any
    state: dict[str, Any]


class Commits:
    """The commits of one wrapped model. ``every``: how many steps apart; 0: only those that are asked for.

    ``step`` counts the optimizer steps of the run, those before a resume included. ``unclaimed``: of a resumed run, the
    pages for the state of optimizers that aren't ours, by number, which no optimizer has taken over yet.
    """

    def __init__(
        self,
        net: nn.Module,
        units: Sequence[Unit],
        pager: Pager,
        disk: Disk,
        run: DurableRun,
        door: Door,
        every: int,
    ) -> None:
        self.run = run
        self.step = 0
        self.registered = Registered()
        self.num_commits = 0
        self.seconds = 0.0
        self._net = net
        self._units = units
        self._pager = pager
        self._disk = disk
        self._door = door
        self._every = every
        self._ranks = pager.transfers.shelf.ranks
        self._fingerprint = fingerprint(run.layout)
        self._num_first = len(run.layout["pages"])  # pages that wrapping has made
        self.unclaimed = {page.number: page for page in list(pager.table)[self._num_first :]}
        self._updates: list[Updating] = []
        self._resumed: dict[str, Any] | None = None  # until training goes on
        self._optimizers: list[dict[str, Any]] = []  # as they were committed, until an update was made
        self._prepared: Prepared | None = None
        self._due = False  # a commit is to be made as soon as no gradient is pending
        self._broken = False  # an update was broken off: the state is between two steps
        self._quiet = False  # has nothing been computed since the last step?
        if run.kept:
            commit = run.kept[-1]
            self.step = commit.step
            self._resumed = unpack(commit.state)
            self._optimizers = self._resumed["optimizers"]
            self.registered.resume(self._resumed["registered"])

    # -- resuming -----------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Give the module its buffers back, and the parameters' pages what isn't in them."""
        if self._resumed is None:
            return
        committed = self._resumed["buffers"]
        with torch.no_grad():
            for name, buffer in _buffers(self._net):
                if name in committed:
                    buffer.copy_(committed[name])
        stale = set(self._resumed["stale"])
        for unit in self._units:
            for group in unit.groups:
                group.stale.update(i for i, field in enumerate(group.fields) if field.name in stale)
        self.put_back()

    def put_back(self) -> None:
        """The generators' states and the optimizers' settings are what they were, until training goes on."""
        if self._optimizers:
            for update in self._updates:
                update.resume(self._optimizers)
        if self._resumed is not None:
            randomness.restore(self._resumed["random"])

    def join(self, update: Updating) -> None:
        """An optimizer is there, or has more parameters than before; it takes over what was committed of it."""
        if update not in self._updates:
            self._updates.append(update)
        self.put_back()

    def register(self, name: str, each: Any, late: bool | None) -> None:
        """See :meth:`tiermem.TieredModule.register`."""
        if any(each is getattr(update, "owner", None) for update in self._updates):
            raise PagingError(f"register: {name!r} is this model's optimizer, which is committed anyway")
        self.registered.add(name, each, late, self._write)
        self.put_back()

    def admit(self, page: Page) -> None:
        """A page has come into being that is part of commits from now on; it isn't in those that are there."""
        page.durable = True
        page.num_slots = 1 + self.run.num_kept
        page.committed = [None] * len(self.run.kept)

    def claim(self, unit: int, dtype: torch.dtype, nbytes: int) -> Page | None:
        """A page that has come into being in the run and has nothing in the commit that was resumed, if there is one.

        A step that isn't committed is made again, and needs again what it made.
        """
        for page in self.unclaimed.values():
            if page.blank and (page.unit, page.dtype, page.nbytes) == (unit, dtype, nbytes):
                return self.unclaimed.pop(page.number)
        return None

    # -- the moments of a step ----------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """A training forward begins: what was waiting for late objects waits no longer."""
        if self.registered.missing:
            raise PagingError(
                f"the commit that was resumed has states of {self.registered.missing}, and nothing is registered by "
                "these names: register them before training, or unregister what isn't wanted any more"
            )
        self._resumed = None
        self._quiet = False
        self._write()

    def begin_update(self) -> None:
        """The optimizer begins a step. Raises PagingError when the last one was broken off."""
        if self._broken:
            raise PagingError(
                f"a step after step {self.step} was broken off half way, so the state in memory is of no step at all: "
                'close this model, and wrap it with resume="auto" to go on from the last commit'
            )
        self._write()
        self._broken = True

    @property
    def writing(self) -> bool:
        """Will the step that is being made be committed? Then what it updates can be written at once."""
        return bool(self._every) and (self._due or (self.step + 1) % self._every == 0)

    def end_update(self) -> None:
        """The optimizer's step is complete. Raises TransferError when it can't be made durable; it is complete then."""
        self._broken = False
        self._quiet = True
        self._resumed = None
        self._optimizers = []
        due = self.writing
        self.step += 1
        if due:
            self._due = any(update.pending() for update in self._updates)
            if not self._due:
                self._prepare()

    def commit(self) -> None:
        """Make the state durable as it is now; where there are ranks, all ask for it, and it is durable on all."""
        if self._ranks is None:
            self._commit()
            return
        self._meet(None)  # what was written last is agreed on first
        failure: Exception | None = None
        try:
            self._commit()
        except (PagingError, TransferError) as error:
            failure = error
        self._meet(failure)

    def _commit(self) -> None:
        if self._broken:
            self.begin_update()
        if any(update.pending() for update in self._updates):
            raise PagingError(
                "gradients have landed that no step has used, and gradients aren't part of a commit: commit after "
                "optimizer.step(), before the next backward"
            )
        self._prepare()
        self._write()

    # -- ranks --------------------------------------------------------------------------------------------

    def told(self) -> list[list[int]]:
        """What the other ranks are to know: generation and step of each commit that is kept here."""
        return [[commit.generation, commit.step] for commit in self.run.kept]

    def agree(self, said: Sequence[Any]) -> None:
        """All ranks are here, and this is what each has told: from now on, what not all have may be written over."""
        if self._ranks is None:
            return
        common = common_of(said)
        numbers = [n for n, one in enumerate(self.told()) if one in common][-self.run.num_kept :]
        if len(numbers) < len(self.run.kept):
            with self._door:
                self._disk.keep([page for page in self._pager.table if page.durable], numbers)
            self.run.kept = [self.run.kept[number] for number in numbers]

    def _meet(self, failure: Exception | None) -> None:
        """See that :meth:`commit` came to its end on all ranks; raises what kept this one from it, or another."""
        assert self._ranks is not None
        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        said = self._ranks.meet("commit", [self.told(), text], "commit()")
        self.agree([each[0] for each in said])
        if failure is not None:
            raise failure
        failed = next((rank for rank, each in enumerate(said) if each[1] is not None), None)
        if failed is not None:
            raise PagingError(
                f"nothing was committed: rank {failed} could not do its part: {said[failed][1]}; the last commit that "
                f"all ranks have is of step {self._last_step}"
            )

    def stats(self) -> dict[str, Any]:
        """The run's folder and step, the commits made since it was opened, and the seconds that they took."""
        return {
            "path": str(self.run.path),
            "step": self.step,
            "committed_step": self._last_step if self.run.kept else None,
            "count": self.num_commits,
            "seconds": self.seconds,
        }

    def close(self) -> None:
        """Commit what is left to commit: steps since the last one, if the loop stands right behind a step."""
        try:
            if self._prepared is not None:
                self._write()
            elif self._every and self._quiet and not self._broken and self._last_step != self.step:
                self._commit()
        finally:
            self.registered.close()

    @property
    def _last_step(self) -> int:
        return self.run.kept[-1].step if self.run.kept else -1

    # -- making one ---------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        start = perf_counter()
        with self._door.hold():
            self._prepared = None
            self.run.generation += 1  # of what fails, too: it is the same on all ranks
            pages = [page for page in self._pager.table if page.durable]
            with self._door:
                self._pager.clean(pages)
            try:
                self._disk.sync()
                if self._disk.grown:
                    self._describe()
            except OSError as failure:
                raise self._failed(failure) from failure
            states, waiting = self.registered.begin()
            state = {
                "random": randomness.capture(),
                "buffers": tensors_of(iter(_buffers(self._net))),
                "optimizers": [update.state() for update in self._updates],
                "stale": [
                    g.fields[i].name for unit in self._units for g in unit.groups for i in sorted(g.stale)
                ],
                "registered": states,
            }
            self._disk.prepare(pages)
            self._prepared = Prepared(self.run.generation, self.step, self._rows(), state)
        self.seconds += perf_counter() - start
        if not waiting:
            self._write()

    def _describe(self) -> None:
        """Say where pages are that have been given a place since that was said last. Raises TransferError."""
        table = list(self._pager.table)
        later = [
            [page.unit, page.kind.name.lower(), str(page.dtype).removeprefix("torch."), page.nbytes]
            for page in table[self._num_first :]
        ]
        layout = {**self.run.layout, LATER: later} if later else self.run.layout
        self.run.describe(layout, [page.slots for page in table])
        self._disk.grown = False

    def _rows(self) -> Any:
        rows = np.zeros(len(self._pager.table), dtype=ROW)
        for page in self._pager.table:
            if page.durable and not page.blank and page.extent is not None:
                file, offset = page.extent
                checked = page.checksum is not None
                rows[page.number] = (offset, page.checksum or 0, file, CHECKED if checked else STORED)
            else:
                rows[page.number] = (0, 0, 0, BLANK)
        return rows

    def _write(self) -> None:
        """Write the record of what is prepared, if anything is."""
        prepared = self._prepared
        if prepared is None:
            return
        start = perf_counter()
        with self._door.hold():
            prepared.state["registered"] |= self.registered.end()
            # A scheduler has changed the settings since.
            prepared.state["optimizers"] = [update.state() for update in self._updates]
            data = pack(prepared.state)
            if not self.num_commits:
                self.registered.prove(
                    prepared.state["registered"] | {"optimizer": prepared.state["optimizers"]}
                )
            commit = Commit(prepared.generation, prepared.step, self._fingerprint, prepared.rows, data)
            try:
                self.run.write(commit)
            except OSError as failure:
                raise self._failed(failure) from failure
            self._prepared = None
            # Pages that have come into being since are in this commit as blank ones.
            self._disk.committed([page for page in self._pager.table if page.durable], len(self.run.kept))
            self.num_commits += 1
        self.seconds += perf_counter() - start

    def _failed(self, failure: OSError) -> TransferError:
        return TransferError(
            f"the commit of step {self.step}",
            "host",
            "disk",
            str(failure.filename or self.run.path),
            failure.errno or 0,
            f"{failure.strerror or failure}; the step itself is complete, the last commit is of step {self._last_step}",
        )


def _buffers(net: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The buffers that are part of the module's state, each once."""
    seen: dict[int, tuple[str, torch.Tensor]] = {}
    for path, module in net.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                seen.setdefault(id(buffer), (f"{path}.{name}" if path else name, buffer))
    return list(seen.values())
