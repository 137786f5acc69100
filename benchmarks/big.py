"""Big: a model several times larger than memory is created, takes training steps, and keeps to its budget.

    python benchmarks/big.py [--size 3B] [--budget 4GiB] [--tokens 32] [--steps 1]
                             [--dtype float32] [--quick] [--path DIR] [--json FILE]

A GPT is built under ``tiermem.deferred_init`` by its own initialisers, wrapped, and trained for ``--steps`` steps on
one row of ``--tokens`` random tokens: bfloat16 parameters and gradients, float32 masters and moments (or, with
``--dtype float32``, where the CPU can't multiply bfloat16, no masters); 16 bytes a parameter either way, nearly all of
it on the disk. Printed are the seconds of each part, the first loss beside the logarithm of the vocabulary, what the
process grew by over its interpreter (VmHWM), the pages' peak and budget, and the bytes on the disk. It is refused
beforehand where the disk has no room for the state and a tenth more.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import tiermem
from tiermem.errors import format_bytes
from tiermem.trainer import AdamW
from tiermem.trainer.gpt import GPT, GPTShape

SIZES = {
    "124M": {"layers": 12, "width": 768, "heads": 12},
    "1.3B": {"layers": 24, "width": 2048, "heads": 16},
    "3B": {"layers": 37, "width": 2560, "heads": 32},
}
VOCABULARY = 50257
STATE = 16  # bytes a parameter: value, gradient, master where there is one, two moments


def status(key: str) -> int:
    """A figure of this process's memory in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def run(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Build, wrap and train; what came of it."""
    shape = GPTShape(vocabulary=VOCABULARY, sequence=options.tokens, tied=True, **SIZES[options.size])
    config = {
        "device": {"kind": "cpu"},
        "host": {"budget": options.budget},
        "disk": {"paths": [folder]},
        "precision": {"parameters": options.dtype},
    }
    base = status("VmRSS")
    torch.manual_seed(0)
    seconds: dict[str, float] = {}
    start = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal start
        now = time.perf_counter()
        seconds[name] = seconds.get(name, 0.0) + now - start
        print(f"  {name}: {now - start:.1f} s, peak {format_bytes(status('VmHWM') - base)}", flush=True)
        start = now

    with tiermem.deferred_init(config):
        net = GPT(shape)
    lap("build")
    peak_built = status("VmHWM") - base
    losses = []
    with tiermem.TieredModule(net, config) as model:
        lap("wrap")
        optimizer = AdamW(model.parameters(), lr=1e-4)
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, VOCABULARY, (1, options.tokens + 1), generator=generator)
        for _ in range(options.steps):
            loss = model(tokens[:, :-1], tokens[:, 1:])
            lap("forward")
            loss.backward()
            lap("backward")
            optimizer.step()
            optimizer.zero_grad()
            lap("update")
            losses.append(loss.item())
        stats = model.stats()
        model.close(restore=False)
    return {
        "size": options.size, "dtype": options.dtype, "parameters": shape.num_parameters, "tokens": options.tokens,
        "seconds": seconds, "losses": losses, "peak_built": peak_built, "peak": status("VmHWM") - base, "stats": stats,
    }  # fmt: skip


def report(found: dict[str, Any]) -> None:
    """Print the table."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    stats, tiers = found["stats"], found["stats"]["tiers"]
    print(f"{platform.machine()}, {os.cpu_count()} cores, {format_bytes(memory)} of memory")
    rows = [
        (f"parameters in {found['dtype']}", f"{found['parameters'] / 1e9:.2f}e9"),
        ("their state, 16 bytes each", format_bytes(stats["state_nbytes"])),
        ("process grew while it was built", format_bytes(found["peak_built"])),
        ("process grew in all", format_bytes(found["peak"])),
        ("pages' peak and budget", f"{format_bytes(tiers['host']['peak'])} of {format_bytes(tiers['host']['budget'])}"),
        ("on the disk", format_bytes(tiers["disk"]["peak"])),
        ("read and written", f"{format_bytes(stats['nbytes_read_from_disk'])}, "
                             f"{format_bytes(stats['nbytes_written_to_disk'])}"),
        (f"losses (ln {VOCABULARY} = {math.log(VOCABULARY):.3f})", " ".join(f"{loss:.3f}" for loss in found["losses"])),
        *((f"seconds of {name}", f"{seconds:.1f}") for name, seconds in found["seconds"].items()),
        ("of which waiting for pages", f"{stats['stall_seconds']:.1f}"),
    ]  # fmt: skip
    for name, value in rows:
        print(f"{name:>32}  {value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="3B")
    parser.add_argument("--budget", default="4GiB")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--quick", action="store_true", help="124M parameters in 400 MiB: does it run?")
    parser.add_argument("--path", default=".", help="a folder on the disk to use")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if options.quick:
        options.size, options.budget = "124M", "400MiB"
    shape = GPTShape(vocabulary=VOCABULARY, sequence=options.tokens, tied=True, **SIZES[options.size])
    space = os.statvfs(options.path)
    free, needed = space.f_bavail * space.f_frsize, int(shape.num_parameters * STATE * 1.1)
    if free < needed:
        raise SystemExit(
            f"{options.path}: {format_bytes(free)} are free, and {options.size} takes {format_bytes(needed)} with a "
            "tenth to spare: name another --path, or a smaller --size"
        )
    with tempfile.TemporaryDirectory(dir=options.path, prefix="big-") as folder:
        found = run(options, folder)
    report(found)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
