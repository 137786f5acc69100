"""Overhead where everything fits: a training step of a wrapped model against the plain loop, same optimizer.

    python benchmarks/overhead.py [--rounds 25] [--quick] [--json FILE]

The models live in this one process and take turns step by step, in changing order; the ratio is that of the medians
over all rounds. float32 GPTs of several sizes, with clipping; and a deep, thin one that costs hooks more than matrices.
The paged runs have a host budget above their state, so that nothing moves; the second of them writes a trace.

The last rows are about plans, of a chain of 1,000 units under half of its state, and 2,048 rows of input, what a batch
of one sequence has. ``--width`` is a unit's: 512 makes pages of 1 MiB. A model that is really cut into so many units
has larger ones, and longer steps; what an access costs, which is printed too, is the same there. *Choosing* is what
following the plan takes: which moves are due, whether their places are free, who is in the way. *Moving* is what the
same calls take besides: to cut, fill and release frames, and to submit transfers. Both are seconds of this thread's
time on the processor, so that other work on the machine doesn't count.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import tiermem
from tiermem.frames import Frames
from tiermem.replay import Replay
from tiermem.room import Room
from tiermem.trainer import AdamW
from tiermem.trainer.gpt import GPT, GPTShape
from tiermem.transfer import Transfers

WARM = 4
SHAPES = {
    "30M, 2 x 256": (GPTShape(sequence=256, layers=4, width=768, heads=12), 2),
    "11M, 4 x 128": (GPTShape(sequence=128, layers=6, width=384, heads=6), 4),
    "thin: 48 units": (GPTShape(sequence=64, layers=48, width=128, heads=4), 8),
}


class Loop:
    """One model, its optimizer and its steps."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.optimizer = AdamW(model.parameters(), lr=1e-4)
        self.seconds: list[float] = []

    def step(self, x: torch.Tensor) -> float:
        """One training step; returns the loss."""
        start = time.perf_counter()
        logits = self.model(x)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        if isinstance(self.model, tiermem.TieredModule):
            self.model.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)
        return loss.item()


def measure(shape: GPTShape, batch: int, rounds: int) -> dict[str, float]:
    """Median seconds a step: plain, paged, and paged with a trace."""
    torch.manual_seed(0)
    net = GPT(shape)
    config = {"device": {"kind": "cpu"}, "host": {"budget": "8GiB"}}
    with tempfile.TemporaryDirectory() as folder:
        traced = config | {"trace": {"file": str(Path(folder, "run.trace"))}}
        loops = {
            "plain": Loop(copy.deepcopy(net)),
            "paged": Loop(tiermem.TieredModule(copy.deepcopy(net), config)),
            "traced": Loop(tiermem.TieredModule(net, traced)),
        }
        generator = torch.Generator().manual_seed(1)
        names = list(loops)
        for number in range(rounds + WARM):
            x = torch.randint(0, 256, (batch, shape.sequence), generator=generator)
            names.append(names.pop(0))
            losses = {loops[name].step(x) for name in names}
            assert len(losses) == 1, "the runs differ"
            if number + 1 == WARM:  # what records schedules and touches memory isn't counted
                for loop in loops.values():
                    loop.seconds.clear()
        result = {name: statistics.median(loop.seconds) for name, loop in loops.items()}
        for name in ("paged", "traced"):
            loops[name].model.close(restore=False)
    return result


class Account:
    """Seconds of this thread in calls of some methods, each counted in the innermost of them.

    What the counting itself takes is measured and left out.
    """

    def __init__(self, methods: dict[str, list[tuple[Any, str]]]) -> None:
        self.seconds = dict.fromkeys(methods, 0.0)
        self._calls = dict.fromkeys(methods, 0)  # for whom the counting of a call was counted
        self._each = 0.0
        self._stack: list[str] = []
        self._since = 0.0
        self._saved: list[tuple[Any, str, Any]] = []
        self._methods = methods

    def __enter__(self) -> Account:
        self._each = self._calibrate()
        for name, methods in self._methods.items():
            for owner, method in methods:
                self._saved.append((owner, method, getattr(owner, method)))
                setattr(owner, method, self._counted(name, getattr(owner, method)))
        return self

    def __exit__(self, *error: object) -> None:
        for owner, method, original in self._saved:
            setattr(owner, method, original)

    def clear(self) -> None:
        """Begin at nothing."""
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        self._calls = dict.fromkeys(self.seconds, 0)

    def taken(self, name: str) -> float:
        """Seconds in the methods of this name since :meth:`clear`."""
        return self.seconds[name] - self._calls[name] * self._each

    def _calibrate(self, calls: int = 20_000) -> float:
        """Seconds that are counted for a call which does nothing, by the caller and in it."""
        nothing = self._counted(CHOOSING, lambda: None)
        self._turn(CHOOSING)
        for _ in range(calls):
            nothing()
        self._turn(None)
        each = self.seconds[CHOOSING] / calls
        self.clear()
        return each

    def _counted(self, name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._turn(name)
            try:
                return original(*args, **kwargs)
            finally:
                self._turn(None)

        return call

    def _turn(self, name: str | None) -> None:
        time_now = time.thread_time()
        if self._stack:
            self.seconds[self._stack[-1]] += time_now - self._since
        if name is None:
            self._calls[self._stack.pop()] += 1
        else:
            # Of what moves, only what the plan's own calls do is meant.
            self._stack.append(name if name == CHOOSING or self._stack else OTHER)
        self._since = time.thread_time()


CHOOSING, MOVING, OTHER = "choosing", "moving", "other"
METHODS: dict[str, list[tuple[Any, str]]] = {
    CHOOSING: [(Replay, name) for name in ("pump", "follow", "ended", "lost", "place", "missed")],
    MOVING: [
        *((Transfers, name) for name in ("read", "write")),
        *((Frames, name) for name in ("drop", "reserve", "settle")),
        (Room, "take_blank"),
    ],
    OTHER: [],
}


def planner(units: int, rounds: int, width: int) -> dict[str, float]:
    """Seconds of a step, and of it in choosing and moving by the plan; accesses; seconds of compiling it, once."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(units)))
    state = sum(p.numel() for p in net.parameters()) * 16
    found: dict[str, list[float]] = {"step": [], CHOOSING: [], MOVING: []}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, Account(METHODS) as account:
        config = {"device": {"kind": "cpu"}, "host": {"budget": state // 2}, "disk": {"paths": [folder]}}
        model = tiermem.TieredModule(net, config | {"policy": {"units": ["*"]}})
        optimizer = AdamW(model.parameters())
        x = torch.randn(2048, width)
        try:
            for number in range(rounds + WARM):
                account.clear()
                start = time.perf_counter()
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if number >= WARM:
                    found["step"].append(time.perf_counter() - start)
                    for name in (CHOOSING, MOVING):
                        found[name].append(account.taken(name))
            plans = model._runtime.pager.plans
            assert plans is not None
            compiling = plans.compile_ns / 1e9 / max(1, plans.compiled)
            accesses = float(model.stats()["schedule_accesses"])
        finally:
            model.close(restore=False)
    return {
        **{name: statistics.median(each) for name, each in found.items()},
        "accesses": accesses,
        "compiling": compiling,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--width", type=int, default=512, help="of a unit of the plan's rows (default 512)")
    parser.add_argument("--plan-only", action="store_true", help="the plan's rows alone")
    parser.add_argument("--quick", action="store_true", help="the smallest model, one round: does it run?")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    shapes = {} if options.plan_only else dict(list(SHAPES.items())[-1:]) if options.quick else SHAPES
    rounds = 1 if options.quick else options.rounds
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}; float32, everything fits the host"
    )
    print(f"{'model':>16} {'plain s':>9} {'paged s':>9} {'ratio':>6} {'traced s':>9} {'ratio':>6}")
    rows = {}
    for name, (shape, batch) in shapes.items():
        row = rows[name] = measure(shape, batch, rounds)
        print(
            f"{name:>16} {row['plain']:9.4f} {row['paged']:9.4f} {row['paged'] / row['plain']:6.3f} "
            f"{row['traced']:9.4f} {row['traced'] / row['plain']:6.3f}"
        )
    units = 20 if options.quick else 1000
    row = rows[f"plan of {units} units"] = planner(units, 1 if options.quick else 3, options.width)
    print(
        f"plan of {units} units of {options.width}: step {row['step']:.2f} s, {row['accesses']:.0f} accesses"
    )
    for name in (CHOOSING, MOVING):
        print(
            f"{name:>16} {row[name] * 1e3:8.1f} ms {row[name] / row['step']:7.2%} of the step "
            f"{row[name] / row['accesses'] * 1e6:6.1f} us an access"
        )
    print(f"{'compiling':>16} {row['compiling']:8.2f} s, once")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
