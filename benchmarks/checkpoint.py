"""Saving and loading checkpoints: bytes per second, against the disk's own rate, interleaved.

The model is a stack of linear layers with AdamW's moments, once within memory and once with an eighth of it. The
baselines write as many bytes in order into one file that is there already (the disk's rate) and into a new one, as a
save has to. A save's time includes syncing and publishing.

    python benchmarks/checkpoint.py [--folder DIR] [--nbytes N] [--rounds N] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tiermem
from tiermem.aio import Buffer, File, open_queue
from tiermem.aio.speed import fill, sweep, window
from tiermem.trainer import AdamW

REQUEST, DEPTH = 1 << 20, 32


class Disk:
    """The baselines: as many bytes as a checkpoint has, in order."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.folder, self.nbytes = folder, nbytes
        self.buffer = Buffer(window(REQUEST, DEPTH))
        fill(self.buffer)
        with File(folder / "there", nbytes, create=True) as file, open_queue("auto", REQUEST, DEPTH) as queue:
            sweep(queue, file, self.buffer, nbytes, writing=True)

    def there(self, writing: bool) -> float:
        """Seconds for the file that is there."""
        with File(self.folder / "there") as file, open_queue("auto", REQUEST, DEPTH) as queue:
            return sweep(queue, file, self.buffer, self.nbytes, writing=writing)

    def new(self) -> float:
        """Seconds for a file that is made."""
        start = time.perf_counter()
        with File(self.folder / "new", self.nbytes, create=True) as file:
            with open_queue("auto", REQUEST, DEPTH) as queue:
                sweep(queue, file, self.buffer, self.nbytes, writing=True)
            os.fsync(file.fd)
        seconds = time.perf_counter() - start
        (self.folder / "new").unlink()
        return seconds


class Run:
    """A wrapped model with moments."""

    def __init__(self, folder: Path, width: int, layers: int, budget: int) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        policy = {"device": {"kind": "cpu"}, "host": {"budget": budget}, "disk": {"paths": [str(folder)]}}
        self.model = tiermem.TieredModule(net, policy)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-3)
        self.input = torch.randn(8, width)
        self.step()

    def step(self) -> float:
        """Seconds of one step."""
        start = time.perf_counter()
        self.model(self.input).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start

    def save(self, path: Path) -> float:
        """Seconds of a save."""
        start = time.perf_counter()
        self.model.save(path, self.optimizer)
        return time.perf_counter() - start

    def load(self, path: Path) -> float:
        """Seconds of a load."""
        start = time.perf_counter()
        self.model.load(path, self.optimizer)
        return time.perf_counter() - start

    def save_beside(self, path: Path) -> tuple[float, float]:
        """Seconds of the step that a background save is begun before, and until that save is over."""
        start = time.perf_counter()
        saving = self.model.save(path, self.optimizer, background=True)
        step = self.step()
        saving.wait()
        return step, time.perf_counter() - start


def measure(folder: Path, nbytes: int, width: int, rounds: int) -> dict[str, Any]:
    """All figures, in seconds by round, and the bytes of a checkpoint."""
    layers = max(2, nbytes // (3 * 4 * width * (width + 1)))
    total = layers * 3 * 4 * width * (width + 1)
    seconds: dict[str, list[float]] = {}
    runs = {
        "within memory": Run(folder, width, layers, 2 * total),
        "an eighth of it": Run(folder, width, layers, max(total // 8, 8 * 4 * width * (width + 1))),
    }
    disk = Disk(folder, total // 4096 * 4096)
    try:
        for _ in range(rounds):
            seconds.setdefault("write there", []).append(disk.there(writing=True))
            seconds.setdefault("write new", []).append(disk.new())
            seconds.setdefault("read", []).append(disk.there(writing=False))
            for name, run in runs.items():
                path = folder / "ck"
                seconds.setdefault(f"step, {name}", []).append(run.step())
                seconds.setdefault(f"save, {name}", []).append(run.save(path))
                _forget(path)
                seconds.setdefault(f"load, {name}", []).append(run.load(path))
                shutil.rmtree(path)
                step, whole = run.save_beside(path)
                seconds.setdefault(f"step beside a save, {name}", []).append(step)
                seconds.setdefault(f"save beside a step, {name}", []).append(whole)
                shutil.rmtree(path)
    finally:
        for run in runs.values():
            run.model.close(restore=False)
    return {"nbytes": total, "seconds": seconds}


def processor() -> str:
    """The processor's name."""
    names = Path("/proc/cpuinfo").read_text().split("model name\t: ")
    return names[1].split("\n")[0] if len(names) > 1 else platform.machine()


def _forget(path: Path) -> None:
    """Take the checkpoint out of the page cache, so that loading reads the disk."""
    for file in path.rglob("c.*"):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--folder", default="/var/tmp", help="a folder on the disk to measure (default: /var/tmp)"
    )
    parser.add_argument("--nbytes", type=int, default=1 << 30, help="of a checkpoint (default: 1 GiB)")
    parser.add_argument("--width", type=int, default=2048, help="of a layer (default: 2048)")
    parser.add_argument("--rounds", type=int, default=5, help="of which medians are shown (default: 5)")
    parser.add_argument("--quick", action="store_true", help="64 MiB, one round: only shows that it works")
    parser.add_argument("--json", action="store_true", help="print every round's numbers instead of a table")
    choice = parser.parse_args()
    if choice.quick:
        choice.nbytes, choice.width, choice.rounds = 64 << 20, 512, 1
    torch.set_num_threads(min(2, torch.get_num_threads()))
    with tempfile.TemporaryDirectory(dir=choice.folder, prefix=".tiermem-bench-") as inside:
        result = measure(Path(inside), choice.nbytes, choice.width, choice.rounds)
    if choice.json:
        print(json.dumps({"machine": processor(), **vars(choice), **result}, indent=2))
        return 0
    medians = {name: statistics.median(values) for name, values in result["seconds"].items()}
    nbytes = result["nbytes"]
    print(f"machine   {os.cpu_count()} x {processor()}")
    print(f"work      a checkpoint of {nbytes >> 20} MiB, medians of {choice.rounds} interleaved rounds\n")
    print(f"{'':<40}{'seconds':>10}{'MB/s':>10}{'of the disk':>14}")
    for name, value in medians.items():
        base = medians["read"] if name.startswith(("read", "load")) else medians["write there"]
        rate = "" if name.startswith("step") else f"{nbytes / value / 1e6:>10.0f}{base / value:>14.2f}"
        print(f"{name:<40}{value:>10.3f}{rate}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
