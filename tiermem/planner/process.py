"""What a training process takes of memory before its first page and its first activation."""

from __future__ import annotations

import subprocess
import sys

from tiermem.errors import TiermemError

PROCESS_NBYTES = 330 << 20
"""Of a process on the cpu: measured with CPython 3.11 and torch 2.13 for the cpu, code of torch and tiermem mostly."""

_SCRIPT = """
import torch
import tiermem
from tiermem.trainer import AdamW
from tiermem.trainer.gpt import GPT, GPTShape

model = tiermem.TieredModule(GPT(GPTShape(16, 16, 2, 64, 2)), {"device": {"kind": "cpu"}, "host": {"budget": "8MiB"}})
optimizer = AdamW(model.parameters())
for _ in range(2):
    model(*torch.zeros(2, 1, 16, dtype=torch.int64)).backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
with open("/proc/self/status") as lines:
    print(next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024)
"""


def process_nbytes() -> int:
    """The bytes that a process has which trains a model of almost no size: measured in one, which takes seconds.

    Raises TiermemError when it can't be run.
    """
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=False)
    if done.returncode:
        raise TiermemError(
            f"the memory of a training process can't be measured: {done.stderr.strip()[-300:]}"
        )
    return int(done.stdout)
