"""Out of core: a GPT-2 124M training step under a host budget far below its state, beside the step that isn't paged.

    python benchmarks/outofcore.py [--budget 512MiB ...] [--steps 6] [--quick] [--json FILE]
                                   [--dtype float32] [--during-backward] [--deepspeed-python PATH]

Batch 2 x 256 tokens, bfloat16 parameters and gradients, float32 master weights and moments: 16 bytes of state a
parameter. For each budget: seconds a step (median, the first two left out), bytes read and written a step, and the
ratio of the step to its floor, the larger of (the unpaged step, bytes moved / disk bandwidth). The bandwidth is that of
tiermem's own queue on the same disk in the same run (benchmarks/io.py compares it with fio). With ``--during-backward``
each budget is run once more, as "... early": parameters are updated as soon as their gradients are there. Each
configuration is a process of its own, and they take turns for ``--rounds`` rounds. Memory is VmHWM from after wrapping,
and also the growth over the interpreter with torch imported.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPE = {"vocabulary": 50257, "sequence": 256, "layers": 12, "width": 768, "heads": 12, "tied": True}
EARLY = " early"
QUICK = {"vocabulary": 4096, "sequence": 128, "layers": 4, "width": 512, "heads": 8, "tied": True}


def memory() -> dict[str, int]:
    """Current and peak resident bytes of this process."""
    fields = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("VmHWM", "VmRSS")):
            fields[line.split(":")[0]] = int(line.split()[1]) * 1024
    return fields


def worker(budget: str, steps: int, quick: bool, folder: str, trace: str, dtype: str) -> dict[str, Any]:
    """One configuration in this process; ``budget`` is a size, a size and EARLY, or "unpaged"."""
    import torch

    import tiermem
    from tiermem.trainer import AdamW
    from tiermem.trainer.gpt import GPT, GPTShape

    base = memory()["VmRSS"]
    shape = QUICK if quick else SHAPE
    torch.manual_seed(0)
    net = GPT(GPTShape(**shape)).to(getattr(torch, dtype))
    parameters = sum(p.numel() for p in net.parameters())
    model: Any = net
    if budget != "unpaged":
        config: dict[str, Any] = {
            "device": {"kind": "cpu"},
            "host": {"budget": budget.removesuffix(EARLY)},
            "disk": {"paths": [folder]},
        }
        if trace:
            config["trace"] = {"file": trace}
        start = time.perf_counter()
        model = tiermem.TieredModule(net, config)
        wrapped = time.perf_counter() - start
    optimizer = AdamW(model.parameters(), lr=1e-4, during_backward=budget.endswith(EARLY))
    Path("/proc/self/clear_refs").write_text("5")
    generator = torch.Generator().manual_seed(1)
    seconds, losses, moved, phases = [], [], [], []
    before = (0, 0)
    for _ in range(steps):
        x = torch.randint(0, shape["vocabulary"], (2, shape["sequence"]), generator=generator)
        start = time.perf_counter()
        logits = model(x)
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, logits.shape[-1]), x[:, 1:].reshape(-1)
        )
        t1 = time.perf_counter()
        loss.backward()
        t2 = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        t3 = time.perf_counter()
        seconds.append(t3 - start)
        phases.append((t1 - start, t2 - t1, t3 - t2))
        losses.append(loss.item())
        if budget != "unpaged":
            stats = model.stats()
            now = (stats["nbytes_read_from_disk"], stats["nbytes_written_to_disk"])
            moved.append((now[0] - before[0], now[1] - before[1]))
            before = now
    result = {
        "budget": budget,
        "parameters": parameters,
        "seconds": seconds,
        "phases": [statistics.median(phase[i] for phase in phases[2:]) for i in range(3)],
        "losses": losses,
        "read": statistics.median(m[0] for m in moved[2:]) if moved else 0,
        "written": statistics.median(m[1] for m in moved[2:]) if moved else 0,
        "peak": memory()["VmHWM"],
        "growth": memory()["VmHWM"] - base,
    }
    if budget != "unpaged":
        result["stats"] = model.stats()
        result["wrap_seconds"] = wrapped
        model.close(restore=False)
    return result


def bandwidth(folder: str) -> tuple[float, float]:
    """Read and write rates of the disk in bytes/s, as tiermem's queue reaches them."""
    from tiermem.aio.speed import measure

    speed = measure(folder, 512 << 20, 1 << 20, 32, "auto")
    return speed.read, speed.write


def output(command: list[str], seconds: float) -> str:
    """What a command prints; it and all that it started are killed after ``seconds``.

    Raises RuntimeError with the end of its errors where it fails.
    """
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        late = ""
        try:
            out, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            late = f"not done after {seconds:.0f} s; "
            os.killpg(process.pid, signal.SIGKILL)
            out, errors = process.communicate()
    if late or process.returncode:
        lines = [line for line in errors.splitlines() if line.strip()]
        raise RuntimeError(late + (" | ".join(lines[-3:]) or f"exit status {process.returncode}, no message"))
    return out


# Each of DeepSpeed's contenders, with the options of peers/deepspeed_step.py. Pipelining takes three sets of buffers.
PEERS = {
    "DS NVMe": ["--offload", "nvme"],
    "DS NVMe pipe": ["--offload", "nvme", "--pipeline", "--buffers", "12"],
    "DS CPU": ["--offload", "cpu"],
}
PEER = str(Path(__file__).parent / "peers" / "deepspeed_step.py")


def deepspeed(name: str, folder: str, options: Any) -> dict[str, Any]:
    """DeepSpeed ZeRO-3 with offload on the same work, with the interpreter that has it."""
    with tempfile.TemporaryDirectory(dir=folder) as nvme:
        command = [options.deepspeed_python, PEER, *PEERS[name], "--steps", str(options.steps)]
        command += ["--dtype", options.dtype, "--path", nvme]
        try:
            result: dict[str, Any] = json.loads(output(command, options.timeout).strip().splitlines()[-1])
        except RuntimeError as error:
            return {"error": str(error)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", nargs="+", default=["4GiB", "1GiB", "512MiB"])
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a small model: does it run?")
    parser.add_argument("--path", default=".", help="a folder on the disk to use")
    parser.add_argument("--during-backward", action="store_true", help="also with updates during backward")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--trace", default="", help="write the trace of a paged run to this file")
    parser.add_argument("--deepspeed-python", default="", help="an interpreter that has deepspeed")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for each process (default 900)")
    parser.add_argument(
        "--dtype", default="bfloat16", help="of parameters; float32 where the CPU can't multiply bfloat16"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.budget, options.rounds = ["256MiB", "64MiB"], 1
    if options.during_backward:
        options.budget = [each + end for each in options.budget for end in ("", EARLY)]
    with tempfile.TemporaryDirectory(dir=options.path, prefix="outofcore-") as folder:
        if options.worker:
            print(
                json.dumps(
                    worker(options.worker, options.steps, options.quick, folder, options.trace, options.dtype)
                )
            )
            return
        runs: dict[str, list[dict[str, Any]]] = {}
        rates = []
        peers = list(PEERS) if options.deepspeed_python and not options.quick else []
        if peers:
            try:  # by itself and with a time of its own: compiling DeepSpeed's extensions takes minutes
                output([options.deepspeed_python, PEER, "--build"], 3600)
            except RuntimeError as error:
                print(f"DeepSpeed: {error}", file=sys.stderr)
                peers = []
        for _ in range(options.rounds):
            for budget in ["unpaged", *options.budget]:
                rates.append(bandwidth(folder))
                command = [sys.executable, __file__, "--worker", budget, "--steps", str(options.steps)]
                command += ["--dtype", options.dtype, "--path", options.path] + (
                    ["--quick"] if options.quick else []
                )
                command += ["--trace", options.trace] if options.trace else []
                try:
                    printed = output(command, options.timeout)
                except RuntimeError as error:
                    print(f"{budget}: {error}", file=sys.stderr)
                    continue
                runs.setdefault(budget, []).append(json.loads(printed.strip().splitlines()[-1]))
            for name in peers:
                runs.setdefault(name, []).append(deepspeed(name, folder, options))
        report(runs, rates, options)


def report(runs: dict[str, list[dict[str, Any]]], rates: list[tuple[float, float]], options: Any) -> None:
    """Print the table."""
    read, write = (statistics.median(rate[i] for rate in rates) for i in range(2))

    def step(name: str) -> float:
        return statistics.median(s for run in runs[name] if "seconds" in run for s in run["seconds"][2:])

    plain = step("unpaged")
    parameters = runs["unpaged"][0]["parameters"]
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, disk reads {read / 1e9:.2f} and writes {write / 1e9:.2f} GB/s"
    )
    print(
        f"GPT of {parameters / 1e6:.1f}M parameters, state {parameters * 16 / 2**30:.2f} GiB, batch 2, "
        f"{options.dtype} with float32 state; medians of {options.rounds} x {options.steps - 2} steps"
    )
    print(
        f"{'budget':>15} {'s/step':>7} {'x plain':>8} {'read':>8} {'written':>8} {'floor':>6} {'ratio':>6} "
        f"{'peak':>8} {'growth':>8}"
    )
    rows = []
    for name, results in runs.items():
        for run in results:
            if "error" in run:
                print(f"{name:>15} {run['error']}")
        good = [run for run in results if "seconds" in run]
        if not good:
            continue
        run = good[-1]
        seconds = step(name)
        row = {"budget": name, "seconds": seconds, "peak": run["peak"], "growth": run["growth"]}
        moves = f"{'':>33}"  # DeepSpeed doesn't say what it moves
        if "budget" in run:
            floor = max(plain, run["read"] / read + run["written"] / write)
            row |= {"read": run["read"], "written": run["written"], "floor": floor, "ratio": seconds / floor}
            moves = f"{run['read'] / 2**20:6.0f}Mi {run['written'] / 2**20:6.0f}Mi {floor:6.2f} {seconds / floor:6.2f}"
        rows.append(row)
        print(
            f"{name:>15} {seconds:7.3f} {seconds / plain:8.2f} {moves} "
            f"{run['peak'] / 2**20:6.0f}Mi {run['growth'] / 2**20:6.0f}Mi"
        )
        if "budget" in run and run["losses"] != runs["unpaged"][0]["losses"]:
            print(f"{'':>15} DIFFERENT LOSSES from the unpaged run")
    found = {row["budget"]: row for row in rows}
    for peer in PEERS:
        for budget in options.budget:
            if peer in found and budget in found:
                ours, theirs = found[budget], found[peer]
                print(
                    f"tiermem at {budget} takes {ours['seconds'] / theirs['seconds']:.2f} of the step of {peer} and "
                    f"{ours['peak'] / theirs['peak']:.2f} of its peak; last loss {runs[budget][0]['losses'][-1]:.4f}, "
                    f"there {next(run for run in runs[peer] if 'losses' in run)['losses'][-1]:.4f}"
                )
    if options.json:
        Path(options.json).write_text(json.dumps({"read": read, "write": write, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
