"""Ranks of a durable run in forks of this process: they train together, die where a test says, and begin again."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.killing import TINY, Assassin
from tests.models import Case
from tests.parity import Outcome
from tests.ranks import _free_port
from tests.resuming import Loop, seed
from tiermem.errors import RanksError, TiermemError
from tiermem.journal import Journal
from tiermem.record import Commit

ENDED = 3
"""The status of a rank that ended because another was gone."""
REFUSED = 4
"""The status of a rank that tiermem refused something to, or the disk; what, it has left in a file."""
SECONDS = 150
"""After which a rank is killed: for a machine on which much else runs. It is no part of what is tested."""

Work = Callable[[int, Callable[[int], None]], Any]


class Ended:
    """How a rank ended: its ``status`` (negative: a signal), the steps it ``told`` as durable, what it returned."""

    def __init__(self, status: int, told: list[int], result: Any) -> None:
        self.status = status
        self.told = told
        self.result = result


def in_children(world: int, folder: Path, work: Work) -> list[Ended]:
    """``work(rank, told)`` in a fork for each rank, all in one gloo group."""
    port = _free_port()
    sys.stdout.flush()
    children = []
    others = (
        os.pipe()
    )  # at its end when all ranks but the first are: that one has the store that they talk over
    for rank in range(world):
        result = folder / f"result-{rank}"
        result.unlink(missing_ok=True)
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(read)
            os.close(others[rank == 0])
            _child(rank, world, port, result, work, write, others[rank > 0])
        os.close(write)
        children.append((pid, read, result))
    for fd in others:
        os.close(fd)
    ended = []
    for pid, read, result in children:
        with open(read, "rb") as pipe:
            told = list(pipe.read())
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        value = torch.load(result, weights_only=False) if result.exists() else None  # of this test's own
        ended.append(Ended(status, told, value))
        result.unlink(missing_ok=True)
    return ended


def _child(rank: int, world: int, port: int, result: Path, work: Work, write: int, others: int) -> None:
    status = 1
    try:
        signal.alarm(SECONDS)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
        torch.save(work(rank, lambda number: os.write(write, bytes([number])) and None), result)
        status = 0
    except RanksError as error:
        torch.save(str(error), result)
        status = ENDED
    except (TiermemError, OSError) as error:
        torch.save(f"{type(error).__name__}: {error}", result)
        status = REFUSED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.settrace(None)
        if rank == 0:
            os.read(others, 1)
        os._exit(status)


class Way:
    """How the ranks train: which model, where, with what configuration."""

    def __init__(
        self,
        folder: Path,
        case: Case = TINY,
        stage: int = 3,
        host: str = "64MiB",
        shared: bool = False,
        **options: Any,
    ) -> None:
        self.folder = folder
        self.case = case
        self.stage = stage
        self.host = host
        self.shared = shared  # is it one folder for all ranks?
        self.options = options

    def loop(self, rank: int, resume: Any = "auto", mode: str = "step") -> Loop:
        """Begin, or go on."""
        own = self.folder / ("shared" if self.shared else f"rank-{rank}")
        loop = Loop(
            self.case, own, resume=resume if mode != "off" else None, host=self.host, mode=mode, rank=rank,
            ranks={"stage": self.stage, "timeout": 100}, **self.options,
        )  # fmt: skip
        if loop.step == 0:
            seed(3 + rank)
        return loop

    def train(
        self,
        steps: int,
        world: int = 2,
        before: Callable[[int], None] = lambda rank: None,
        mode: str = "step",
    ) -> list[Ended]:
        """All ranks train to step number ``steps``; ``before`` that, each does this. Results: (first step, outcome).

        What is told: the step that it begins at, and each that is durable on this rank.
        """

        def work(rank: int, told: Callable[[int], None]) -> tuple[int, Outcome]:
            loop = self.loop(rank, mode=mode)
            first = loop.step
            told(first)
            before(rank)
            # Within `with`, so that an error here is told to the other ranks.
            with loop.model:
                loop.train(steps, told)
                sys.settrace(None)
                return first, loop.outcome()

        return in_children(world, self.folder, work)


def assassin(victim: int, at: int) -> Callable[[int], None]:
    """SIGKILL for one rank, at its ``at``-th line."""

    def before(rank: int) -> None:
        if rank == victim:
            sys.settrace(Assassin(at))

    return before


def last_to_commit(victim: int, generation: int) -> Callable[[int], None]:
    """SIGKILL for one of two ranks where it would write this record, which the other one has written."""
    read, write = os.pipe()

    def before(rank: int) -> None:
        written = Journal.write

        def witness(journal: Journal, commit: Commit, kept: Any) -> None:
            if rank == victim and commit.generation == generation:
                os.read(read, 1)
                os.kill(os.getpid(), signal.SIGKILL)
            written(journal, commit, kept)
            if commit.generation == generation:
                os.write(write, b"!")

        Journal.write = witness  # type: ignore[method-assign]

    return before


def folders(way: Way) -> list[str]:
    """The names of the run folders that there are."""
    return sorted(
        each.name for parent in way.folder.iterdir() if parent.is_dir() for each in parent.iterdir()
    )
