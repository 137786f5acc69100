"""Processes killed while they train durably: at their n-th I/O, with what wasn't synchronised lost, or at a line.

``python -m tests.killing --kills 200 --steps 250`` kills one run over and over at random moments (of wrapping, of
training, committing, saving a checkpoint, exporting it), each time resuming it, and compares what comes out with the
run that nobody killed. After each kill the checkpoint that is there must be that of some step, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any

import torch
import torch._dynamo  # hooks bring it in: here, before a fork, and not in every child
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import tiermem
import tiermem.runtime
from tests.models import Case
from tests.parity import assert_equal, assert_same
from tests.resuming import Loop, from_step, seed
from tiermem.aio import File, Queue, open_queue
from tiermem.checkpoint.folder import PARTIAL
from tiermem.checkpoint.formats import open_source
from tiermem.checkpoint.safetensors import export

KILLED = 137
LINES = 130_000
"""Of tiermem's code: about 10 000 wrap the model, or resume it, 80 000 are its first step, 14 000 each later one."""

CHECKPOINT, EXPORT = "checkpoints/ck", "exports/out"

WRITTEN = -1
"""The ticket of every write of a dying queue."""
OURS = str(Path(tiermem.__file__).parent)


def _build() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Dropout(0.2), nn.Tanh(), nn.Linear(24, 24), nn.Linear(24, 4)
    )


TINY = Case(
    "tiny",
    _build,
    lambda: (torch.randn(6, 16), torch.randint(0, 4, (6,))),
    lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
)
SECTIONS: dict[str, Any] = {"host": "44KiB", "policy": {"units": ["*"]}}


class Death:
    """Ends the process at its ``at``-th I/O, as a loss of power would.

    Of what was written and not synchronised, each piece is lost, torn, or there, as a generator seeded with ``at``
    picks. It replaces the functions of ``os`` that write, so it is for a process of its own.
    """

    def __init__(self, at: int) -> None:
        self.at = at
        self.count = 0
        self._random = random.Random(at)
        self._unsynced: dict[str, list[tuple[int, bytes]]] = {}  # by file: what was there before
        self._write, self._sync = os.pwrite, os.fdatasync

    def install(self) -> None:
        """From now on, count and die."""

        def pwrite(fd: int, data: bytes, offset: int) -> int:
            self._before(
                _path(fd), offset, len(data), lambda: self._write(fd, data[: len(data) // 2], offset)
            )
            return self._write(fd, data, offset)

        def fdatasync(fd: int) -> None:
            self.event()
            self._sync(fd)
            self._unsynced.pop(_path(fd), None)

        replace, fsync = os.replace, os.fsync

        def counted_replace(*args: Any, **kwargs: Any) -> None:
            self.event()
            replace(*args, **kwargs)

        def counted_fsync(fd: int) -> None:
            self.event()
            fsync(fd)

        os.pwrite, os.fdatasync = pwrite, fdatasync  # type: ignore[assignment]
        os.replace, os.fsync = counted_replace, counted_fsync  # type: ignore[assignment]
        tiermem.runtime.open_queue = lambda *args: DyingQueue(open_queue(*args), self)  # type: ignore[attr-defined]

    def event(self, torn: Callable[[], Any] = lambda: None) -> None:
        """One I/O is about to happen; ``torn`` does half of it."""
        self.count += 1
        if self.count == self.at:
            if self._random.random() < 0.5:
                torn()
            self.die()

    def _before(self, path: str, offset: int, nbytes: int, torn: Callable[[], Any]) -> None:
        with open(path, "rb") as file:
            file.seek(offset)
            before = file.read(nbytes)
        self._unsynced.setdefault(path, []).append((offset, before))
        self.event(torn)

    def writing(self, file: File, offset: int, nbytes: int) -> None:
        """A page is about to be written."""
        self._before(file.path, offset, nbytes, lambda: None)

    def die(self) -> None:
        """Lose what may be lost, and end."""
        for path, pieces in self._unsynced.items():
            fd = os.open(path, os.O_WRONLY)
            for offset, before in reversed(pieces):
                fate = self._random.choice(["lost", "torn", "there"])
                if fate != "there":
                    self._write(fd, before if fate == "lost" else before[: len(before) // 2], offset)
        os._exit(KILLED)


class DyingQueue:
    """A queue whose writes are events; they are waited for at once, so that what is lost can be told."""

    def __init__(self, queue: Queue, death: Death) -> None:
        self._queue = queue
        self._death = death

    def write(self, file: File, offset: int, address: int, nbytes: int) -> int:
        self._death.writing(file, offset, nbytes)
        self._queue.wait(self._queue.write(file, offset, address, nbytes))
        return WRITTEN

    def done(self, ticket: int) -> bool:
        return ticket == WRITTEN or self._queue.done(ticket)

    def wait(self, ticket: int) -> None:
        if ticket != WRITTEN:
            self._queue.wait(ticket)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def __enter__(self) -> DyingQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.close()


class Assassin:
    """Sends this process SIGKILL when tiermem's code in the main thread has come to its ``at``-th line."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.lines = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self.line if frame.f_code.co_filename.startswith(OURS) else None

    def line(self, frame: FrameType, event: str, arg: Any) -> Any:
        """One line."""
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.line


def _path(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def in_child(work: Callable[[Callable[[int], None]], None]) -> tuple[int, list[int]]:
    """Run ``work`` in a fork; the exit status (negative: a signal), and the numbers that it told before it ended."""
    read, write = os.pipe()
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        status = 1
        try:
            os.close(read)
            work(lambda number: os.write(write, bytes([number])) and None)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    with open(read, "rb") as pipe:
        told = list(pipe.read())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), told


def go_on(folder: Path, steps: int, told: Callable[[int], None] = lambda step: None, **sections: Any) -> Loop:
    """Resume, or begin, and train to ``steps``; ``told`` of each step that is durable."""
    loop = Loop(TINY, folder, resume="auto", **{**SECTIONS, **sections})
    if loop.step == 0:
        seed(3)
    told(loop.step)
    return loop.train(steps, told)


def killed_at_line(
    folder: Path, steps: int, at: int, saving: bool = False, **sections: Any
) -> tuple[int, list[int]]:
    """Go on in a process that is killed at a line; see :func:`in_child`. ``saving``: it saves and exports as well."""

    def work(told: Callable[[int], None]) -> None:
        sys.settrace(Assassin(at))
        loop = Loop(TINY, folder / "runs", resume="auto", **{**SECTIONS, **sections}) if saving else None
        if loop is None:
            loop = go_on(folder, steps, told, **sections)
        else:
            _train_and_save(loop, folder, steps, told)
        sys.settrace(None)
        loop.model.close()

    return in_child(work)


def _train_and_save(loop: Loop, folder: Path, steps: int, told: Callable[[int], None]) -> None:
    """A checkpoint every second step, in the background or not, and an export of it every fourth."""
    if loop.step == 0:
        seed(3)
    told(loop.step)

    def after(step: int) -> None:
        told(step)
        if step % 2 == 0:
            loop.model.save(
                folder / CHECKPOINT, loop.optimizer, step=step, overwrite=True, background=step % 4 == 0
            )
        if step % 4 == 2:
            out = folder / EXPORT
            shutil.rmtree(out, ignore_errors=True)
            export(open_source(folder / CHECKPOINT), out)

    loop.train(steps, after)


def killed_at_io(folder: Path, steps: int, at: int, **sections: Any) -> tuple[int, list[int]]:
    """Go on in a process that loses power at an I/O; see :func:`in_child`."""

    def work(told: Callable[[int], None]) -> None:
        Death(at).install()
        go_on(folder, steps, told, **sections).model.close()

    return in_child(work)


def kill_over_and_over(
    folder: Path,
    kills: int,
    steps: int,
    number: int = 0,
    after: Callable[[int, int], None] = lambda kill, step: None,
    **sections: Any,
) -> int:
    """Kill one run at random lines until it has been killed so often or has ended; the step it came to.

    ``after`` each kill, this is called with its number and that step.
    """
    draw = random.Random(number)
    durable = 0
    for kill in range(1, kills + 1):
        status, told = killed_at_line(folder, steps, draw.randrange(1, LINES), **sections)
        if told:
            assert told[0] >= durable, f"step {durable} was durable, and step {told[0]} came back"
            durable = told[-1]
        if status == 0:
            break
        assert status == -signal.SIGKILL, f"the process ended with {status}"
        after(kill, durable)
    return durable


def check_saved(folder: Path, states: Mapping[int, Mapping[str, torch.Tensor]]) -> int | None:
    """The checkpoint and the export that are there are whole, and of some step; that of the checkpoint, if any.

    ``states``: what the run that nobody killed has after each step.
    """
    step = None
    if (folder / CHECKPOINT).exists():
        net = _build()
        with tiermem.TieredModule(net, {"host": {"budget": "64MiB"}}) as model:
            step = model.load(folder / CHECKPOINT).step
            assert step is not None
            assert_same(f"the checkpoint of step {step}", states[step], dict(model.state_dict()))
    if (folder / EXPORT).exists():
        found = load_file(folder / EXPORT / "model.safetensors")
        exported = [
            number for number, state in states.items() if torch.equal(state["0.weight"], found["0.weight"])
        ]
        assert exported, "the export is of no step"
        assert_same(f"the export of step {exported[0]}", states[exported[0]], found)
    for parent in (folder / CHECKPOINT, folder / EXPORT):
        names = os.listdir(parent.parent) if parent.parent.exists() else []
        assert len([name for name in names if name.startswith(PARTIAL)]) <= 1, names
    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    states: dict[int, dict[str, torch.Tensor]] = {}
    plain = Loop(TINY)
    plain.train(
        arguments.steps,
        lambda step: states.update(
            {step: {name: each.clone() for name, each in plain.net.state_dict().items()}}
        ),
    )
    expected = plain.close()
    start = perf_counter()
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="tiermem-killing-") as name:
        folder = Path(name)

        def after(kill: int, step: int) -> None:
            saved = check_saved(folder, states)
            seen["saved" if saved is not None else "nothing saved yet"] += 1
            seen["a save was broken off"] += any(
                each.startswith(PARTIAL) for parent in folder.iterdir() for each in os.listdir(parent)
            )
            if kill % 10 == 0:
                seconds = perf_counter() - start
                print(f"{kill} kills in {seconds:.0f} s; step {step}, checkpoint of step {saved}", flush=True)

        step = kill_over_and_over(
            folder, arguments.kills, arguments.steps, arguments.seed, after=after, saving=True
        )
        print(
            f"killed {sum(seen.values()) - seen['a save was broken off']} times; step {step} is durable; {dict(seen)}"
        )
        loop = go_on(folder / "runs", 0)
        first = loop.step
        assert_equal(from_step(expected, first), loop.train(arguments.steps).close())
        print(
            f"resumed at step {first}, trained to step {arguments.steps}: every bit is that of the run never killed"
        )


if __name__ == "__main__":
    main()
