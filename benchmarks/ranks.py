"""Several ranks on this machine: step time, memory, bytes on the wire against theory, how much of exchanges hides.

    python benchmarks/ranks.py [--ranks 1 2 4] [--stages 2 3] [--budget 64MiB] [--width 512] [--layers 6] [--steps 6]

Each row trains one float32 GPT in as many processes as it says, over gloo, on the same machine: they share its cores,
so the time of a step says what exchanging costs and not how training scales. "wire" is what each rank sends in a step,
in units of the parameters' bytes times (N - 1) / N, beside the theory of docs/distributed.md. "hidden" is the share of
the seconds of exchanges for which no fault waited. The first two steps, in which the schedule is learned, are left out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tiermem
from tiermem.page import Kind
from tiermem.trainer import AdamW
from tiermem.trainer.gpt import GPT, GPTShape

WARM = 2
THEORY = {0: "2", 1: "2", 2: "2", 3: "at most 3"}


def train(rank: int, world: int, port: int, folder: str, options: argparse.Namespace, stage: int) -> None:
    """One rank; its figures go into a file."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    torch.manual_seed(0)
    heads = max(1, options.width // 64)
    net = GPT(GPTShape(sequence=128, layers=options.layers, width=options.width, heads=heads))
    config = {
        "device": {"kind": "cpu"},
        "host": {"budget": options.budget},
        "disk": {"paths": [f"{folder}/{rank}"]},
        "ranks": {"stage": stage},
    }
    seconds: list[float] = []
    with tiermem.TieredModule(net, config) as model:
        optimizer = AdamW(model.parameters(), lr=1e-4)
        generator = torch.Generator().manual_seed(rank)
        before: dict[str, Any] = {}
        for step in range(options.steps + WARM):
            if step == WARM:
                before = model.stats()
            start = time.perf_counter()
            x = torch.randint(256, (2, 128), generator=generator)
            logits = model(x)
            torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - start)
        after = model.stats()
        psi = sum(page.nbytes for page in model._runtime.table if page.kind is Kind.GRADIENT)
        model.close(restore=False)

    def grown(*keys: str) -> float:
        old, new = before, after
        for key in keys:
            old, new = old.get(key, {}), new.get(key, {})
        return float(sum(new.values()) - sum(old.values()))

    exchanging = grown("ranks", "seconds")
    causes = "stall_seconds_by_cause"
    waited = after[causes].get("collective", 0.0) - before[causes].get("collective", 0.0)
    figures = {
        "step": statistics.median(seconds[WARM:]),
        "peak": after["tiers"]["host"]["peak"],
        "state": after["state_nbytes"],
        "wire": grown("ranks", "nbytes_sent") / options.steps / (psi * (world - 1) / world)
        if world > 1
        else 0.0,
        "hidden": max(0.0, 1 - waited / exchanging) if exchanging else 1.0,
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(figures))
    if world > 1:
        dist.destroy_process_group()


def measure(world: int, stage: int, options: argparse.Namespace) -> dict[str, float]:
    """The means over the ranks of one run; the largest peak."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        sock.close()
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=train, args=(rank, world, port, folder, options, stage))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        rows = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]
    found = {key: statistics.mean(row[key] for row in rows) for key in rows[0]}
    return found | {"peak": max(row["peak"] for row in rows)}


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--budget", default="64MiB")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--folder", default="/var/tmp", help="on the disk to page to")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="small, and one and two ranks only")
    options = parser.parse_args()
    if options.quick:
        options.ranks, options.width, options.layers, options.steps, options.budget = (
            [1, 2],
            128,
            4,
            3,
            "8MiB",
        )
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}; {options.layers} layers of width "
        f"{options.width}, host budget {options.budget} a rank"
    )
    print("ranks stage  step s  peak MiB  state of a rank MiB  wire (theory)      hidden")
    rows = []
    for world in options.ranks:
        for stage in options.stages if world > 1 else [3]:
            row = measure(world, stage, options)
            rows.append({"ranks": world, "stage": stage, **row})
            wire = f"{row['wire']:.2f} ({THEORY[stage]})" if world > 1 else "-"
            hidden = f"{row['hidden']:.0%}" if world > 1 else "-"
            print(
                f"{world:5} {stage if world > 1 else '-':>5} {row['step']:7.2f} {row['peak'] / 2**20:9.1f} "
                f"{row['state'] / 2**20:20.1f}  {wire:18} {hidden:>6}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
