"""What grows with the number of units, and what with the number of steps: costs per unit, and memory, should stay flat.

    python benchmarks/growth.py [--units 10 100 1000 3000] [--steps 6000] [--quick] [--json FILE]

Chains of small linear layers, each of them a unit, on one thread. The first table has processor time per unit, of
wrapping and of a training step where everything fits, so that what is measured is tiermem's own work (median of 5
steps, the first left out). The second trains a model of 8 units within half of its state for many steps, and prints the
process's resident memory, open files, threads and Python objects along the way.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tiermem
from tiermem.trainer import AdamW

WIDTH = 128


def chain(units: int) -> nn.Sequential:
    """So many layers, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(units)])


def wrapped(net: nn.Module, budget: int, folder: str) -> tiermem.TieredModule:
    """``net`` within ``budget`` bytes of host memory, each layer a unit."""
    policy = {
        "device": {"kind": "cpu"},
        "host": {"budget": budget},
        "disk": {"paths": [folder]},
        "policy": {"units": ["*"]},
    }
    return tiermem.TieredModule(net, policy)


def state_of(net: nn.Module) -> int:
    """Bytes of parameters, gradients and moments."""
    return 4 * sum(parameter.nbytes for parameter in net.parameters())


def per_unit(units: int, folder: str) -> dict[str, Any]:
    """Seconds of processor time per unit: wrapping, and a step."""
    net = chain(units)
    start = time.process_time()
    with wrapped(net, 2 * state_of(net) + (16 << 20), folder) as model:
        wrapping = time.process_time() - start
        optimizer = AdamW(model.parameters(), lr=1e-4)
        x = torch.randn(2, WIDTH)
        steps = []
        for _ in range(6):
            start = time.process_time()
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append(time.process_time() - start)
    return {"units": units, "wrap": wrapping / units, "step": statistics.median(steps[1:]) / units}


def along(steps: int, folder: str) -> list[dict[str, int]]:
    """What the process has, ten times along the way."""
    net = chain(8)
    found = []
    with wrapped(net, state_of(net) // 2, folder) as model:
        optimizer = AdamW(model.parameters(), lr=1e-4)
        for step in range(1, steps + 1):
            model(torch.randn(4, WIDTH)).square().mean().backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % max(1, steps // 10) == 0:
                resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
                found.append(
                    {
                        "step": step,
                        "resident": resident,
                        "files": files,
                        "threads": threads,
                        "objects": len(gc.get_objects()),
                    }
                )
    return found


def main() -> None:
    """Measure, print two tables, write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--units", type=int, nargs="+", default=[10, 100, 1000, 3000])
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--folder", default="/var/tmp", help="on the disk to page to")
    parser.add_argument("--quick", action="store_true", help="few units and steps: does it run?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    units, steps = ([10, 30], 50) if options.quick else (options.units, options.steps)
    torch.set_num_threads(1)
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, 1 thread")
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="tiermem-growth-") as folder:
        per_unit(3, folder)  # what is imported at first use belongs to no row
        print(" units  wrap us/unit  step us/unit")
        rows = []
        for number in units:
            row = per_unit(number, folder)
            rows.append(row)
            print(f"{number:6,}  {row['wrap'] * 1e6:12,.0f}  {row['step'] * 1e6:12,.0f}", flush=True)
        print("\n  step  resident KiB  files  threads  objects")
        way = along(steps, folder)
        for each in way:
            print(
                f"{each['step']:6,}  {each['resident'] >> 10:12,}  {each['files']:5}  {each['threads']:7}  "
                f"{each['objects']:7,}"
            )
    if options.json is not None:
        options.json.write_text(json.dumps({"units": rows, "steps": way}, indent=2))


if __name__ == "__main__":
    main()
