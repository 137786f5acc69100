"""Overhead where everything fits: a training step of a wrapped model against the plain loop, same optimizer.

    python benchmarks/overhead.py [--rounds 25] [--quick] [--json FILE]

The models live in this one process and take turns step by step, in changing order; the ratio is that of the medians
over all rounds. float32 GPTs of several sizes, with clipping; and a deep, thin one that costs hooks more than matrices.
The paged runs have a host budget above their state, so that nothing moves; the second of them writes a trace.

The last row is about plans, of a chain of units under half of its state: what carrying the plan out takes in each step
(the transfers' own submission left out), and what compiling it took, once.
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
from tiermem.replay import Replay
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


def planner(units: int, rounds: int) -> dict[str, float]:
    """Seconds a step, of it in carrying out the plan, and for compiling it."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(units)))
    state = sum(p.numel() for p in net.parameters()) * 16
    spent = {"pump": 0.0, "moves": 0.0}

    def timed(owner: Any, method: str, account: str) -> None:
        original = getattr(owner, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                if account == "pump" or spent["inside"]:
                    spent[account] += time.perf_counter() - start

        setattr(owner, method, call)

    pump = Replay.pump
    spent["inside"] = 0.0

    def marked(replay: Replay) -> None:
        spent["inside"] = 1.0
        try:
            pump(replay)
        finally:
            spent["inside"] = 0.0

    saved = {
        (Replay, "pump"): pump,
        (Transfers, "read"): Transfers.read,
        (Transfers, "write"): Transfers.write,
    }
    Replay.pump = marked  # type: ignore[method-assign]
    timed(Replay, "pump", "pump")
    timed(Transfers, "read", "moves")
    timed(Transfers, "write", "moves")
    steps, planning = [], []
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        config = {"device": {"kind": "cpu"}, "host": {"budget": state // 2}, "disk": {"paths": [folder]}}
        model = tiermem.TieredModule(net, config | {"policy": {"units": ["*"]}})
        optimizer = AdamW(model.parameters())
        x = torch.randn(1024, 256)
        try:
            for number in range(rounds + WARM):
                spent["pump"] = spent["moves"] = 0.0
                start = time.perf_counter()
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if number >= WARM:
                    steps.append(time.perf_counter() - start)
                    planning.append(spent["pump"] - spent["moves"])
            plans = model._runtime.pager.plans
            assert plans is not None
            compiling = plans.compile_ns / 1e9 / max(1, plans.compiled)
        finally:
            model.close(restore=False)
            for (owner, method), original in saved.items():
                setattr(owner, method, original)
    return {"step": statistics.median(steps), "planning": statistics.median(planning), "compiling": compiling}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--quick", action="store_true", help="the smallest model, one round: does it run?")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    shapes = dict(list(SHAPES.items())[-1:]) if options.quick else SHAPES
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
    row = rows[f"plan of {units} units"] = planner(units, 1 if options.quick else 3)
    print(
        f"plan of {units} units: step {row['step']:.2f} s, of it {row['planning'] * 1e3:.1f} ms "
        f"({row['planning'] / row['step']:.2%}) carrying out the plan; compiled once in {row['compiling']:.2f} s"
    )
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
