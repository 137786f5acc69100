"""Activations: memory and time of a training step with what autograd saves in memory, and on the disk.

    python benchmarks/activations.py [--budget 2GiB] [--batch 4] [--tokens 512] [--rounds 3] [--steps 3] [--quick]
                                     [--path DIR] [--json FILE]

A GPT with the blocks of GPT-2 124M and a vocabulary of 8192, so that they count and not the logits, in float32, paged
under one host budget either way; of it, an eighth or what the pages leave is the arena of activations. Both take turns,
each in a process of its own; seconds are medians over all steps but each process's first. Memory is VmHWM from after
wrapping over what was resident then: activations, and the arena as far as it is used.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPE = {"vocabulary": 8192, "layers": 12, "width": 768, "heads": 12, "tied": True}
QUICK = {"vocabulary": 512, "layers": 4, "width": 256, "heads": 4, "tied": True}


def status(key: str) -> int:
    """A figure of this process's memory in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def worker(place: str, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """One contender in this process."""
    import torch

    import tiermem
    from tiermem.trainer import AdamW
    from tiermem.trainer.gpt import GPT, GPTShape

    torch.manual_seed(0)
    shape = GPTShape(sequence=options.tokens, **(QUICK if options.quick else SHAPE))
    config = {
        "device": {"kind": "cpu"},
        "host": {"budget": options.budget},
        "disk": {"paths": [folder]},
        "placement": {"activations": place},
    }
    with tiermem.deferred_init(config):
        net = GPT(shape)
    model = tiermem.TieredModule(net, config)
    optimizer = AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(1)
    base = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    seconds, losses = [], []
    for _ in range(options.steps):
        x = torch.randint(0, shape.vocabulary, (options.batch, options.tokens + 1), generator=generator)
        start = time.perf_counter()
        loss = model(x[:, :-1], x[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    found = {
        "seconds": seconds[1:],
        "losses": losses,
        "grown": status("VmHWM") - base,
        "stats": model.stats(),
    }
    model.close(restore=False)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="2GiB")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a small model: does it run?")
    parser.add_argument("--path", default=".", help="a folder on the disk to use")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.budget, options.rounds, options.tokens = "64MiB", 1, 256
    with tempfile.TemporaryDirectory(dir=options.path, prefix="activations-") as folder:
        if options.worker:
            print(json.dumps(worker(options.worker, options, folder)))
            return
        runs: dict[str, list[dict[str, Any]]] = {"device": [], "disk": []}
        for _ in range(options.rounds):
            for place, found in runs.items():
                command = [sys.executable, *sys.argv, "--worker", place]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                found.append(json.loads(done.stdout.splitlines()[-1]))
    rows = {place: summary(found) for place, found in runs.items()}
    print(
        f"{platform.machine()}, {os.cpu_count()} cores; batch {options.batch} x {options.tokens}, host {options.budget}"
    )
    print(f"{'activations':>12} {'s/step':>8} {'x':>6} {'memory':>9} {'x':>6} {'saved':>9} {'in memory':>9}")
    plain = rows["device"]
    for place, row in rows.items():
        name = "memory" if place == "device" else place
        print(
            f"{name:>12} {row['seconds']:8.2f} {row['seconds'] / plain['seconds']:6.2f} "
            f"{row['grown'] / 2**20:7.0f}Mi {row['grown'] / plain['grown']:6.2f} "
            f"{row.get('saved', 0) / 2**20:7.0f}Mi {row.get('in_memory', 0) / 2**20:7.0f}Mi"
        )
    if plain["losses"] != rows["disk"]["losses"]:
        print("DIFFERENT LOSSES")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of one contender's rounds."""
    row: dict[str, Any] = {
        "seconds": statistics.median(second for run in found for second in run["seconds"]),
        "grown": statistics.median(run["grown"] for run in found),
        "losses": found[0]["losses"],
    }
    if stats := found[0]["stats"]["activations"]:
        row |= {"saved": stats["peak_saved"], "in_memory": stats["peak_in_memory"], "stats": stats}
    return row


if __name__ == "__main__":
    main()
