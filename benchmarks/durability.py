"""What durability and checksums cost: training steps of one model in several modes, taking turns in one process.

    python benchmarks/durability.py [--rounds 20] [--quick] [--json FILE]
    python benchmarks/durability.py --checksums [--rounds 200]

A GPT of 11M parameters in float32, 4 x 128 tokens, 165 MiB of state. In one table everything fits the host, so that
commits write what would not have been written; in the other the host's budget is two thirds of the state. Ratios are
those of the medians against mode "off" without checksums. Bytes are those written to the disk in a step, on average.

With ``--checksums`` only steps with and without them take turns, out of core. The ratio is the median of those of
neighbouring steps, since the machine's speed drifts, and between the ends of its interval are 95 % of the medians of as
many ratios drawn from these. Beside it is the processor's time that was spent in checksums, by the clocks of the
threads that took them, and which part that is of all processor time of a step: what they cost where no core is idle.
Unlike the ratio, that doesn't depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import os
import platform
import random
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
        self.processor: list[float] = []  # the process's seconds of all cores
        self.written = 0

    def step(self, x: torch.Tensor, number: int) -> None:
        """One training step."""
        start, processor = time.perf_counter(), time.process_time()
        logits = self.model(x)
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()
        self.model.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if number == WARM:
            self.written = self.model.stats()["nbytes_written_to_disk"]
        if number >= WARM:
            self.seconds.append(time.perf_counter() - start)
            self.processor.append(time.process_time() - processor)


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


class Meter:
    """The checksums that are taken while it is open: processor seconds and bytes."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.nbytes = 0
        self._module = importlib.import_module("tiermem.aio.checksum")

    def __enter__(self) -> Meter:
        take = self._take = self._module.checksum

        def metered(address: int, nbytes: int) -> int:
            start = time.thread_time()
            value = take(address, nbytes)
            self.seconds += time.thread_time() - start
            self.nbytes += nbytes
            return int(value)

        self._module.checksum = metered  # type: ignore[attr-defined]
        return self

    def __exit__(self, *_: object) -> None:
        self._module.checksum = self._take  # type: ignore[attr-defined]


def measure_checksums(shape: GPTShape, batch: int, budget: str, rounds: int) -> dict[str, float]:
    """The ratio of steps with checksums to steps without, out of core, and what checksums took by themselves."""
    torch.manual_seed(0)
    net = GPT(shape)
    x = torch.randint(0, 256, (batch, shape.sequence))
    modes = {"on": MODES["off"], "off": MODES["off, no checksums"]}
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp", prefix="tiermem-durability-") as folder,
        Meter() as meter,
    ):
        loops = {name: Loop(net, folder, budget, mode) for name, mode in modes.items()}
        for number in range(rounds + WARM):
            if number == WARM:
                meter.seconds, meter.nbytes = 0.0, 0
            for name in ("on", "off") if number % 2 else ("off", "on"):
                loops[name].step(x, number)
        seconds = {name: loop.seconds for name, loop in loops.items()}
        processor = statistics.mean(loops["on"].processor)
        for loop in loops.values():
            loop.model.close(restore=False)
    ratios = [on / off for on, off in zip(seconds["on"], seconds["off"], strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(1000))
    return {
        "step": statistics.median(seconds["on"]),
        "ratio": statistics.median(ratios),
        "low": medians[25],
        "high": medians[974],
        "nbytes": meter.nbytes / rounds,
        "processor": meter.seconds / rounds,
        "of": processor,
    }


def tell_checksums(row: dict[str, float]) -> None:
    """Print what :func:`measure_checksums` found."""
    print(
        f"\nchecksums, out of core: {row['nbytes'] / 2**20:.0f} MiB a step of {row['step'] * 1e3:.0f} ms; with them it "
        f"takes {row['ratio']:.3f} times as long as without ({row['low']:.3f} to {row['high']:.3f});\n"
        f"{row['processor'] * 1e3:.1f} ms of processor time, {row['nbytes'] / max(row['processor'], 1e-9) / 1e9:.1f} "
        f"GB/s: {row['processor'] / row['of']:.2%} of the {row['of'] * 1e3:.0f} ms that a step takes of it"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="a tiny model, two rounds: does it run?")
    parser.add_argument("--checksums", action="store_true", help="measure these alone, out of core")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    shape, batch = GPTShape(sequence=128, layers=6, width=384, heads=6), 4
    budgets = {"everything fits the host": "1GiB", "two thirds fit": "110MiB"}
    if options.quick:
        shape, batch = GPTShape(sequence=16, layers=2, width=64, heads=2), 1
        budgets = {"everything fits the host": "64MiB"}
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}; float32")
    rows: dict[str, Any] = {}
    rounds = 2 if options.quick else options.rounds
    if options.checksums or options.quick:
        rows["checksums"] = measure_checksums(shape, batch, "1MiB" if options.quick else "110MiB", rounds)
        tell_checksums(rows["checksums"])
    for name, budget in budgets.items() if not options.checksums else ():
        rows[name] = measured = measure(shape, batch, budget, rounds)
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
