"""Predicted and measured: the step of three small configurations, each predicted from the trace of another one.

    python benchmarks/simulate.py [--budget 96MiB 160MiB 256MiB] [--rounds 5] [--keep FOLDER] [--quick] [--json FILE]

A GPT of 29 million parameters in float32, 0.43 GiB of training state, on the cpu, under three host budgets. All three
are in one process and take turns, a few steps each, because a machine's speed drifts; the first step of a turn isn't
counted. A prediction takes what each access computes, and the disk's rate, from the trace of the next budget in the
list: of the step that it predicts, it has seen nothing. What is *planned* is `tiermem plan --here`'s answer, asked
before the runs: it has seen no step at all, only the machine's rates. ``--keep`` leaves the traces in a folder, for a
sweep's picture.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

TURN = 4
"""Steps in a turn."""
SEQUENCE = 64
SHAPES = {False: (4, 768, 4), True: (4, 128, 2)}
"""Layers, width, batch; by whether it shall be quick."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", nargs=3, default=["96MiB", "160MiB", "256MiB"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tiny model: does it run?")
    parser.add_argument("--path", default=".", help="a folder on the disk to use")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the traces there")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if options.quick:
        options.budget, options.rounds = ["4MiB", "6MiB", "8MiB"], 2
    with tempfile.TemporaryDirectory(dir=options.path, prefix="simulate-") as folder:
        asked = {budget: plan(budget, options.quick, Path(folder)) for budget in options.budget}
        traces = options.keep or Path(folder)
        traces.mkdir(parents=True, exist_ok=True)
        measured = measure(options.budget, options.rounds, options.quick, Path(folder), traces)
        rows = predict(options.budget, measured, traces)
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end")
    print(
        f"{'budget':>10} {'predicted from':>15} {'predicted':>10} {'measured':>10} {'error':>7} {'planned':>10} "
        f"{'error':>7} {'moved / bound':>14}"
    )
    for row in rows:
        row["planned"] = asked[row["budget"]]
        row["planned_error"] = row["planned"] / row["measured"] - 1
        print(
            f"{row['budget']:>10} {row['from']:>15} {row['predicted']:9.3f}s {row['measured']:9.3f}s "
            f"{row['error']:+7.1%} {row['planned']:9.3f}s {row['planned_error']:+7.1%} "
            f"{'-' if row['ratio'] is None else format(row['ratio'], '.3f'):>14}"
        )
    if options.json:
        Path(options.json).write_text(json.dumps({"rows": rows}, indent=1))


def plan(budget: str, quick: bool, folder: Path) -> float:
    """Seconds of a step, by the planner, which measures this machine."""
    layers, width, batch = SHAPES[quick]
    sizes = {"n_layer": layers, "n_embd": width, "n_head": width // 64, "n_positions": SEQUENCE}
    model = folder / "config.json"
    model.write_text(
        json.dumps({"model_type": "gpt2", "vocab_size": 256, "tie_word_embeddings": False, **sizes})
    )
    asked = [
        *(
            sys.executable,
            "-c",
            "from tiermem.cli import main; main()",
            "plan",
            "--config",
            model,
            "--here",
            "--path",
            folder,
        ),
        *("--host-budget", budget, "--batch", batch, "--sequence", SEQUENCE),
        *("--precision", "fp32", "--no-advice", "--json"),
    ]
    answer = subprocess.run([str(word) for word in asked], check=True, capture_output=True, text=True)
    return float(json.loads(answer.stdout)["step_seconds"])


def measure(budgets: list[str], rounds: int, quick: bool, folder: Path, traces: Path) -> dict[str, float]:
    """Seconds of a step, for each budget: medians of the steps that count."""
    import torch

    import tiermem
    from tiermem.trainer import AdamW
    from tiermem.trainer.gpt import GPT, GPTShape

    layers, width, batch = SHAPES[quick]
    shape = GPTShape(sequence=SEQUENCE, layers=layers, width=width, heads=width // 64)
    runs: list[tuple[str, Any, Any]] = []
    for budget in budgets:
        torch.manual_seed(0)
        policy = {
            "device": {"kind": "cpu"},
            "host": {"budget": budget},
            "disk": {"paths": [folder]},
            "trace": {"file": traces / f"{budget}.trace"},
        }
        model = tiermem.TieredModule(GPT(shape), policy)
        runs.append((budget, model, AdamW(model.parameters(), lr=1e-4)))
    took: dict[str, list[float]] = {budget: [] for budget in budgets}
    for _ in range(rounds + 1):  # the first round learns the schedules
        for budget, model, optimizer in runs:
            for _ in range(TURN):
                x = torch.randint(0, 256, (batch, SEQUENCE + 1))
                start = time.perf_counter()
                logits = model(x[:, :-1])
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
                took[budget].append(time.perf_counter() - start)
    for _, model, _ in runs:
        model.close(restore=False)
    counted = {budget: [s for i, s in enumerate(each[TURN:]) if i % TURN] for budget, each in took.items()}
    return {budget: statistics.median(each) for budget, each in counted.items()}


def predict(budgets: list[str], measured: dict[str, float], traces: Path) -> list[dict[str, Any]]:
    """A row for each budget."""
    from tiermem.config import Size
    from tiermem.simulator import as_recorded, moved, simulate
    from tiermem.trace.reader import TraceFile
    from tiermem.trace.recorded import recorded

    known = {}
    for budget in budgets:
        with TraceFile(traces / f"{budget}.trace") as trace:
            known[budget] = recorded(trace)
    rows = []
    for index, budget in enumerate(budgets):
        other = budgets[(index + 1) % len(budgets)]
        machine = replace(as_recorded(known[other]), host=Size.parse(budget).resolve(0))
        found = simulate(known[other], machine)
        link = moved(known[budget])
        rows.append(
            {
                "budget": budget,
                "from": other,
                "predicted": found.step_s,
                "measured": measured[budget],
                "error": found.step_s / measured[budget] - 1,
                "disk_rate": machine.disk_read,
                "ratio": None if link is None else link.ratio,
            }
        )
    return rows


if __name__ == "__main__":
    main()
