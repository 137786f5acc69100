"""What durability and checksums cost: training steps of one model in several modes, taking turns in one process.

    python benchmarks/durability.py [--rounds 20] [--quick] [--json FILE]

A GPT of 11M parameters in float32, 4 x 128 tokens, 165 MiB of state. In one table everything fits the host, so that
commits write what would not have been written; in the other the host's budget is two thirds of the state. Ratios are
those of the medians against mode "off" without checksums. Bytes are those written to the disk in a step, on average.
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
from tiermem.trainer import AdamW
from tiermem.trainer.gpt import GPT, GPTShape

WARM = 4
MODES: dict[str, dict[str, Any]] = {
    "off, no checksums": {"integrity": {"checksums": False}},
    "off": {},
    "every:10": {"durability": {"mode": "every:10"}},
    "step": {"durability": {"mode": "step"}},
    "step, no checksums": {"durability": {"mode": "step"}, "integrity": {"checksums": False}},
}


class Loop:
    """One wrapped model, its optimizer and its steps."""

    def __init__(self, net: torch.nn.Module, folder: str, budget: str, mode: dict[str, Any]) -> None:
        config = {"device": {"kind": "cpu"}, "host": {"budget": budget}, "disk": {"paths": [folder]}, **mode}
        self.model = tiermem.TieredModule(copy.deepcopy(net), config)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-4)
        self.seconds: list[float] = []
        self.written = 0

    def step(self, x: torch.Tensor, number: int) -> None:
        """One training step."""
        start = time.perf_counter()
        logits = self.model(x)
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()
        self.model.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if number == WARM:
            self.written = self.model.stats()["nbytes_written_to_disk"]
        if number >= WARM:
            self.seconds.append(time.perf_counter() - start)


def measure(shape: GPTShape, batch: int, budget: str, rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds of a step and bytes written in one, by mode."""
    torch.manual_seed(0)
    net = GPT(shape)
    x = torch.randint(0, 256, (batch, shape.sequence))
    found = {}
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="tiermem-durability-") as folder:
        loops = {name: Loop(net, folder, budget, mode) for name, mode in MODES.items()}
        for number in range(rounds + WARM):
            names = list(loops)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                loops[name].step(x, number)
        for name, loop in loops.items():
            written = loop.model.stats()["nbytes_written_to_disk"] - loop.written
            found[name] = {
                "seconds": statistics.median(loop.seconds),
                "mean": statistics.mean(loop.seconds),
                "written": written / max(1, rounds - 1),
            }
            loop.model.close(restore=False)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="a tiny model, two rounds: does it run?")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    shape, batch = GPTShape(sequence=128, layers=6, width=384, heads=6), 4
    budgets = {"everything fits the host": "1GiB", "two thirds fit": "110MiB"}
    if options.quick:
        shape, batch = GPTShape(sequence=16, layers=2, width=64, heads=2), 1
        budgets = {"everything fits the host": "64MiB"}
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}; float32")
    rows = {}
    for name, budget in budgets.items():
        rows[name] = measured = measure(shape, batch, budget, 2 if options.quick else options.rounds)
        base = measured["off, no checksums"]
        print(f"\n{name} (host budget {budget})")
        print(f"{'mode':>20} {'median s':>9} {'ratio':>6} {'mean s':>8} {'ratio':>6} {'MiB written':>12}")
        for mode, row in measured.items():
            print(
                f"{mode:>20} {row['seconds']:9.4f} {row['seconds'] / base['seconds']:6.3f} "
                f"{row['mean']:8.4f} {row['mean'] / base['mean']:6.3f} {row['written'] / 2**20:12.1f}"
            )
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
