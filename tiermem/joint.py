"""Joint runs: the durable run that several ranks have together, each of them its own part in folders of its own.

A step is committed when every rank has a record of it. Each keeps the commit before until it knows that (see
:mod:`tiermem.commits`, Note: ranks), so there always is one that all have, and a resume takes the newest of these.
Whatever is looked at, chosen or removed here, all ranks do it together, or none.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tiermem.durable import (
    DurableRun,
    common_of,
    describe_damage,
    name_of,
    next_number,
    number_of,
    peek,
    remove_unborn,
    search,
    share_of,
    unborn,
)
from tiermem.errors import ConfigError
from tiermem.folder import COMMIT, DurableFolder, Found
from tiermem.layout import Layout, differences
from tiermem.ranks import Peers, agree
from tiermem.verify import damage_of

MISSING, UNBORN, OTHER, EMPTY, UNFINISHED, HERE = "missing", "unborn", "other", "empty", "unfinished", "here"


class Joint:
    """Where the ranks ``peers`` look for their runs: each under its own ``parents``, for those of the same ``model``.

    ``model`` is the part of a layout that says which parameters there are; ``shares`` what one says of the ranks.
    """

    def __init__(
        self,
        peers: Peers,
        parents: Sequence[Path],
        num_kept: int,
        model: Layout,
        shares: Mapping[str, int],
    ) -> None:
        self._peers = peers
        self._parents = parents
        self._num_kept = num_kept
        self._model = model
        self._shares = shares
        self._notes: list[str] = []

    def create(self) -> DurableRun:
        """A new run, with a part of every rank. Raises ConfigError, or RanksError, where one can't have its part."""
        peers = self._peers
        number = max(peers.tell(next_number(self._parents)))
        name = name_of(number, peers.tell(secrets.token_hex(4))[0], (peers.rank, peers.world))
        made: list[DurableRun] = []

        def make() -> None:
            made.append(DurableRun.create(self._parents, self._num_kept, name))

        try:
            peers.together("making the folders of a durable run", make)
        except BaseException:
            for run in made:
                run.remove()
            raise
        made[0].joint = True
        made[0].notes += self._notes
        return made[0]

    def find(self, path: Path | None = None) -> DurableRun | None:
        """The newest run that can be gone on from, or the one of ``path`` (any rank's folder); None if there is none.

        Parts of runs that never committed anything are removed on the way. Raises ConfigError, on all ranks, when there
        is one to go on from and it can't be: in use, damaged, of another model or stage, or a rank has lost its part.
        """
        peers = self._peers
        agree(peers, "what resume is", "auto" if path is None else _base(path.name))
        mine = {_base(each.path.name): each for each in self._mine(path)}
        others: list[str] = []
        for base in sorted({each for one in peers.tell(list(mine)) for each in one}, key=_age, reverse=True):
            run, different = self._try(base, mine.get(base))
            if run is not None:
                run.joint = True
                run.notes += self._notes
                return run
            others = others or different
        others = others or self._of_other_numbers()
        if others:
            raise ConfigError(*others)
        if path is not None:
            raise ConfigError(f"resume: {path}: nothing was committed there")
        return None

    def _mine(self, path: Path | None) -> list[Found]:
        share = self._peers.rank, self._peers.world
        if path is None:
            return [each for each in search(self._parents) if share_of(each.path.name) == share]
        own = path.with_name(name_of(number_of(path.name), _base(path.name).rpartition("-")[2], share))
        return [Found(own, "durable", False)] if own.is_dir() else []

    def _of_other_numbers(self) -> list[str]:
        said = self._peers.tell(of_other_numbers(self._parents, self._model, self._peers.world))
        return next((each for each in said if each), [])

    def _try(self, base: str, found: Found | None) -> tuple[DurableRun | None, list[str]]:
        """The run of this name if it is the one to go on from; else in words what of it isn't this model's."""
        peers, what = self._peers, f"resuming {base}"
        opened: list[DurableRun] = []
        with contextlib.ExitStack() as stack:
            stack.callback(_let_go, opened)
            said = peers.together(what, lambda: self._look(found, opened))
            states = [each[0] for each in said]
            if OTHER in states or UNFINISHED in states:
                self._notes += [text for state, texts in said if state == UNFINISHED for text in texts]
                return None, next((texts for state, texts in said if state == OTHER), [])
            newest = max(
                (commit[0] for state, commits in said if state == HERE for commit in commits), default=0
            )
            if HERE not in states or (newest == 1 and not {EMPTY, UNBORN}.isdisjoint(states)):
                # No step has been committed by all. A part with a record goes first: alone, it would be one of a run
                # whose other parts are lost.
                for first in (True, False):
                    if found is not None and (states[peers.rank] == HERE) == first:
                        peers.together(what, lambda: self._remove(found, opened))
                    else:
                        peers.together(what, lambda: None)
                return None, []
            lost = [rank for rank, state in enumerate(states) if state != HERE]
            if lost:
                raise ConfigError(
                    f"resume: {base} was committed by {peers.world} ranks, and rank {lost[0]} has no "
                    f"{'folder' if states[lost[0]] == MISSING else 'commit'} of it under its disk.paths: bring it "
                    "back, or give resume=None to begin afresh, or load a checkpoint"
                )
            self._choose(opened[0], base)
            stack.pop_all()
        return opened[0], []

    def _look(self, found: Found | None, opened: list[DurableRun]) -> tuple[str, Any]:
        """What this rank's part is: a state, and its commits, or what is wrong with it."""
        if found is None:
            return MISSING, None
        path = found.path
        if found.alive:
            layout = peek(path)
            if layout is not None and not differences(self._model, layout, tensors_only=True):
                raise ConfigError(
                    f"resume: {path} is of this model, and in use by a process that lives: wait for its end, or give "
                    "this one another of disk.paths, or resume=None for a run of its own"
                )
            return OTHER, []
        with contextlib.closing(DurableFolder.open(path)) as folder:
            if unborn(folder):
                return UNBORN, None
        run = DurableRun.open(path, self._num_kept)
        opened.append(run)
        different = differences(self._model, run.layout, tensors_only=True)
        if different:
            return OTHER, [f"resume: {path} is of another model: {each}" for each in different]
        if run.empty:
            return EMPTY, None
        if run.unfinished:
            return UNFINISHED, [
                f"{path}: its first commit was broken off, so there is nothing to resume in it"
            ]
        for key in ("stage", "shards"):
            theirs, mine = run.layout.get(key), self._shares.get(key)
            if theirs != mine:
                raise ConfigError(
                    f"resume: {path} was committed with ranks.{key} {_said(theirs)}, and this is {_said(mine)}: set "
                    f"ranks.{key} to that, or load a checkpoint of model.save, which any can"
                )
        return HERE, [[each.generation, each.step] for each in run.commits()]

    def _remove(self, found: Found, opened: list[DurableRun]) -> None:
        if opened:
            opened[0].remove()
        else:
            remove_unborn(found.path, self._parents)

    def _choose(self, run: DurableRun, base: str) -> None:
        """Take the newest commit that is there on all ranks, and whole on all, for the one to go on from."""
        peers = self._peers
        problems: list[str] = []  # of all ranks: the same on each
        refused: set[int] = set()

        def offer() -> list[Any]:
            whole = [each for each in run.commits() if not run.known_damage(each)]
            return [[[c.generation, c.step] for c in whole if c.generation not in refused], run.torn()]

        while True:
            said = peers.together(f"resuming {base}", offer)
            common = common_of([commits for commits, _ in said])
            torn = [text for _, texts in said for text in texts]
            if not common:
                steps = "; ".join(
                    f"rank {rank} has whole commits of steps {[step for _, step in commits]}"
                    for rank, (commits, _) in enumerate(said)
                )
                raise ConfigError(
                    *problems,
                    *torn,
                    f"no commit is there on all ranks: {steps}: remove the folders to start afresh, or load a "
                    "checkpoint",
                    source=base,
                )
            generation, step = common[-1]
            behind = any(commits[0] != common[-1] for commits, _ in said)  # does a rank have a newer one?
            # What was begun after this commit may have been written over parts of it, where records are missing.
            if not (torn or refused or behind):
                break
            found = peers.together(f"resuming {base}", partial(self._verify, run, generation))
            bad = [f"rank {rank}: {text}" for rank, texts in enumerate(found) for text in texts]
            if not bad:
                break
            refused.add(generation)
            problems.append(f"commit {generation} (step {step}) is damaged: {'; '.join(bad[:3])}")
        if problems or torn:
            run.notes.append(
                f"{run.path}: resumes from commit {generation} (step {step}), because {'; '.join([*problems, *torn])}"
            )
        kept = common[-run.num_kept :] if not (problems or torn) else common[-1:]
        run.kept = [each for each in reversed(run.commits()) if [each.generation, each.step] in kept]
        run.generation = max(peers.tell(run.generation))

    def _verify(self, run: DurableRun, generation: int) -> list[str]:
        """In words, what of this rank's part of a commit isn't whole; it is marked."""
        commit = next(each for each in run.commits() if each.generation == generation)
        bad = damage_of(run, commit)
        run.mark(bad)
        return [describe_damage(each) for each in bad]


def of_other_numbers(parents: Sequence[Path], model: Layout, world: int) -> list[str]:
    """In words, which durable run of this model there is that another number of ranks has committed; empty if none."""
    for found in search(parents):
        share = share_of(found.path.name)
        theirs = share[1] if share is not None else 1
        layout = peek(found.path)
        if theirs == world or found.alive or layout is None or differences(model, layout, tensors_only=True):
            continue
        if any(entry.stat().st_size for entry in os.scandir(found.path) if entry.name.startswith(COMMIT)):
            return [
                f"resume: {found.path} is of this model, and {_processes(theirs)} committed it, where this is "
                f"{_processes(world)}: start as many, or load a checkpoint of model.save, which any number can, or "
                "give resume=None to begin afresh beside it"
            ]
    return []


def _let_go(runs: Sequence[DurableRun]) -> None:
    for run in runs:
        run.let_go()


def _processes(world: int) -> str:
    return "one process alone" if world == 1 else f"{world} ranks together"


def _said(value: int | None) -> str:
    return "left out" if value is None else str(value)


def _base(name: str) -> str:
    """What the names of all ranks' folders of one run have in common."""
    return name if share_of(name) is None else name.rpartition(".")[0]


def _age(base: str) -> tuple[int, str]:
    return number_of(base), base
