"""Checkpoints: saved in the background while training goes on, read by zarr, and loaded under a smaller budget.

Run: python examples/checkpoint.py
"""

import sysconfig
import tempfile
from pathlib import Path

import torch
import zarr

import tiermem
from tiermem.trainer import AdamW
from tiermem.trainer.data import Corpus
from tiermem.trainer.gpt import GPT, GPTShape

STEPS = 6


def run(folder: str, budget: str, path: Path, resume: bool) -> list[float]:
    """Train to the end, saving half-way, or go on from there; returns the losses."""
    torch.manual_seed(1 if resume else 0)
    net = GPT(GPTShape(sequence=64, layers=4, width=128, heads=4))
    batches = Corpus(Path(sysconfig.get_path("stdlib")) / "argparse.py").batches(batch=4, sequence=64)
    policy = {"device": {"kind": "cpu"}, "host": {"budget": budget}, "disk": {"paths": [folder]}}
    losses = []
    with tiermem.TieredModule(net, policy) as model:
        optimizer = AdamW(model.parameters(), lr=1e-3)
        start = model.load(path, optimizer).step if resume else 0
        for step in range(STEPS):
            tokens, targets = next(batches)
            if step < start:
                continue  # the data that the first run has seen
            loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step + 1 == STEPS // 2 and not resume:
                model.save(path, optimizer, step=step + 1, background=True)
        # Leaving lets the save come to its end.
    return losses


def main() -> None:
    """Train, look into the checkpoint, and train its second half again."""
    with tempfile.TemporaryDirectory(dir=".", prefix=".checkpoint-") as folder:
        path = Path(folder) / "half-way"
        losses = run(folder, "8MiB", path, resume=False)
        root = zarr.open_group(str(path), mode="r")
        weight = root["parameters/blocks.0.mlp.0.weight"]
        print(f"step {root.attrs['step']}: {weight.shape} {weight.dtype}, norm {abs(weight[...]).sum():.1f}")
        again = run(folder, "4MiB", path, resume=True)
        print(f"the same losses from there on: {losses[STEPS // 2 :] == again}")


if __name__ == "__main__":
    main()
