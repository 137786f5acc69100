"""A model paged on one NVIDIA GPU: what the copies carry beside the link, and the step beside the unpaged model's.

    python benchmarks/gpu.py [--layers 12] [--width 1024] [--device-budget 60%] [--steps 8] [--json FILE]

The link's rate is that of pinned copies of 256 MiB, alone, up and down. A run's rate is the bytes that it copied by the
seconds of its steps, so it is low where there is little to copy: *used* is the share of the step that the link would
have been busy at its own rate. The unpaged model is on the GPU as a whole, with torch's fused AdamW there, if it fits;
the paged one gets the share of its parameters' bytes that ``--device-budget`` says as its budget on the device, has all
else on the host, and its updates are made on the CPU. Medians, after two steps
to warm up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tiermem
from tiermem.trainer import AdamW
from tiermem.trainer.gpt import GPT, GPTShape

WARM = 2
NBYTES = 256 << 20
ROUNDS = 10


def link(up: bool) -> float:
    """Bytes per second of pinned copies to the device, or from it."""
    host = torch.empty(NBYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(NBYTES, dtype=torch.uint8, device="cuda")
    rates = []
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        if up:
            there.copy_(host, non_blocking=True)
        else:
            host.copy_(there, non_blocking=True)
        end.record()
        end.synchronize()
        rates.append(NBYTES / (begin.elapsed_time(end) / 1e3))
    return statistics.median(rates)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, shape: GPTShape, count: int) -> list[float]:
    """Seconds of each step, those that warm up left out."""
    torch.manual_seed(1)
    seconds = []
    for _ in range(WARM + count):
        batch = torch.randint(0, shape.vocabulary, (4, shape.sequence + 1), device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        model(batch[:, :-1], batch[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[WARM:]


def unpaged(shape: GPTShape, dtype: torch.dtype, count: int) -> float | None:
    """Seconds of a step of the model that is on the GPU as a whole; None where it doesn't fit."""
    try:
        net = GPT(shape).to("cuda", dtype)
        return statistics.median(steps(net, torch.optim.AdamW(net.parameters(), fused=True), shape, count))
    except torch.cuda.OutOfMemoryError:
        return None


def paged(shape: GPTShape, dtype: torch.dtype, share: float, count: int) -> dict[str, Any]:
    """Seconds of a step of the paged model, and the bytes that it copied in each."""
    net = GPT(shape).to(dtype)
    budget = int(share * sum(p.nbytes for p in net.parameters()))
    config = {"device": {"kind": "cuda", "budget": budget}}
    with tiermem.TieredModule(net, config) as model:
        optimizer = AdamW(model.parameters())
        steps(model, optimizer, shape, 1)
        before = model.stats()["links"]
        seconds = steps(model, optimizer, shape, count)
        after = model.stats()["links"]
        copied = {
            way: (sum(after[way].values()) - sum(before[way].values())) / (count + WARM)
            for way in ("host_to_device", "device_to_host")
        }
        return {"seconds": statistics.median(seconds), "copied": copied, "device_budget": budget}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--device-budget", default="60%", help="of the parameters' bytes")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("this torch sees no CUDA device: nothing was measured")
        if args.json is not None:
            args.json.write_text("{}")
        return
    dtype = getattr(torch, args.dtype)
    shape = GPTShape(sequence=args.sequence, layers=args.layers, width=args.width, heads=args.width // 64)
    rates = {"host_to_device": link(True), "device_to_host": link(False)}
    whole = unpaged(shape, dtype, args.steps)
    torch.cuda.empty_cache()
    run = paged(shape, dtype, float(args.device_budget.rstrip("%")) / 100, args.steps)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    print(
        f"{shape.num_parameters:,} parameters in {args.dtype}, {args.device_budget} of them on the device at a time"
    )
    for way, rate in rates.items():
        nbytes = run["copied"][way]
        print(
            f"{way.replace('_', ' ')}: the link carries {rate / 1e9:.1f} GB/s; a step copies {nbytes / 1e6:,.0f} MB, "
            f"{nbytes / rate / run['seconds']:.0%} of the step at that rate"
        )
    print(f"step, paged: {run['seconds']:.3f} s")
    print("step, unpaged: " + (f"{whole:.3f} s" if whole is not None else "it doesn't fit the device"))
    if whole is not None:
        print(f"ratio: {run['seconds'] / whole:.2f}")
    if args.json is not None:
        figures = {"link": rates, "paged": run, "unpaged_seconds": whole, "parameters": shape.num_parameters}
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
