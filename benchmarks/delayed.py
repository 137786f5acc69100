"""Updates delayed by one step: what they do to the loss of a small GPT, and to the bytes that a step moves.

    python benchmarks/delayed.py [--steps 200] [--share 0.4] [--seed 0]

The GPT (float32, 2 layers of width 64) learns in which order a rule lists 61 tokens, with AdamW, clipped; losses are
means of 20 steps. Bytes are those of a step's reads and writes with ``--share`` of the state as the host's budget, from
the tenth step on.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from typing import Any

import torch
from torch import Tensor

import tiermem
from tiermem.trainer import AdamW
from tiermem.trainer.gpt import GPT, GPTShape

ROWS: dict[str, dict[str, Any]] = {
    "at once": {},
    "delayed, after 40 steps": {"delayed": True},
    "delayed, from the first": {"delayed": True, "undelayed_steps": 0},
}
MEAN = 20
SETTLED = 10


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Eight sequences, each from another token on."""
    generator = torch.Generator().manual_seed(1000 * step)
    first = torch.randint(61, (8, 1), generator=generator)
    tokens = (first * torch.tensor([pow(3, k, 61) for k in range(13)])) % 61
    return tokens[:, :-1], tokens[:, 1:]


def train(steps: int, seed: int, budget: int | str, settings: dict[str, Any]) -> tuple[list[float], float]:
    """The losses, and the bytes read and written in a step."""
    torch.manual_seed(seed)
    net = GPT(GPTShape(vocabulary=61, sequence=12, layers=2, width=64))
    losses: list[float] = []
    before = 0
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        config = {"device": {"kind": "cpu"}, "host": {"budget": budget}, "disk": {"paths": [folder]}}
        with tiermem.TieredModule(net, config) as model:
            optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=0.01, **settings)
            for step in range(steps):
                if step == SETTLED:
                    before = moved(model)
                tokens, targets = batch(step)
                loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
                loss.backward()
                model.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            nbytes = (moved(model) - before) / max(1, steps - SETTLED)
            model.close(restore=False)
    return losses, nbytes


def moved(model: tiermem.TieredModule) -> int:
    """Bytes read from the disk and written to it, so far."""
    stats = model.stats()
    return int(stats["nbytes_read_from_disk"] + stats["nbytes_written_to_disk"])


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--share", type=float, default=0.4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    at = sorted({min(each, options.steps) for each in (40, 60, 100, options.steps)})
    state = 16 * GPTShape(vocabulary=61, sequence=12, layers=2, width=64).num_parameters
    print(f"{platform.machine()}, torch {torch.__version__}; {state:,} bytes of state")
    print(f"{'update':<26}" + "".join(f"{f'loss at {step}':>14}" for step in at) + f"{'KiB a step':>14}")
    for name, settings in ROWS.items():
        losses, _ = train(options.steps, options.seed, "1GiB", settings)
        early = {**settings, "undelayed_steps": 0} if settings else {}
        _, nbytes = train(SETTLED + 10, options.seed, int(options.share * state), early)
        means = [sum(losses[max(0, step - MEAN) : step]) / min(MEAN, step) for step in at]
        print(f"{name:<26}" + "".join(f"{mean:>14.4f}" for mean in means) + f"{nbytes / 1024:>14,.0f}")


if __name__ == "__main__":
    main()
