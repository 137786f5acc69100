"""The memory claim: a run's peak is the interpreter, the budget and the activations, and 5 % more at most.

The interpreter is one that has imported torch and tiermem; the activations are what the unpaged run takes beyond it and
its state.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = """
import json, sys
import torch
import tiermem
from tiermem.trainer import AdamW
from tests.models import GPT

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

torch.set_num_threads(1)
tokens = torch.randint(0, 256, (2, 32))
tiny = torch.nn.Linear(64, 64)  # a step of it, for what torch imports late
optimizer = AdamW(tiny.parameters())
torch.nn.functional.gelu(tiny(torch.ones(8, 64))).sum().backward()
optimizer.step()
tiermem.Config()  # what tiermem imports late: code, and its libraries
interpreter = status("VmRSS")
budget, folder = json.loads(sys.argv[1])
model = GPT(256, 256, 16, 32)
state = sum(p.nbytes for p in model.parameters()) * 4
if budget:
    model = tiermem.TieredModule(model, {"host": {"budget": budget}, "disk": {"paths": [folder]}})
optimizer = AdamW(model.parameters(), lr=1e-3)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # VmHWM starts anew
for _ in range(3):
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    model.clip_grad_norm_(1.0) if budget else torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
print(json.dumps({
    "interpreter": interpreter, "state": state, "peak": status("VmHWM"), "loss": loss.item(),
    "host": model.stats()["tiers"]["host"] if budget else None,
}))
"""


def run(budget: int, folder: Path) -> dict[str, Any]:
    """One training run in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([budget, str(folder)])],
        capture_output=True, text=True, check=False, timeout=120, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_peak_is_interpreter_and_budget_and_activations(disk: Path) -> None:
    plain = run(0, disk)
    budget = plain["state"] // 8
    paged = run(budget, disk)
    activations = plain["peak"] - plain["interpreter"] - plain["state"]
    allowed = 1.05 * (paged["interpreter"] + budget + activations)
    told = (
        f"{paged}; unpaged {plain}; activations {activations:,}; peak {paged['peak']:,} of {allowed:,.0f} allowed, "
        f"over the interpreter: {paged['peak'] - paged['interpreter']:,}, budget {budget:,}"
    )
    print(told)
    assert paged["host"]["peak"] <= budget, told
    assert paged["peak"] <= allowed, told
    assert plain["peak"] > 2 * (paged["peak"] - paged["interpreter"]), told  # the claim isn't empty
