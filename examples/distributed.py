"""The same loop on several ranks: each pages its own slices of parameters, gradients and optimizer state.

Run: torchrun --nproc-per-node 2 examples/distributed.py
(or python examples/distributed.py, which is one rank). All that the loop knows of ranks is which batches are whose.
"""

import os
import sysconfig
import tempfile
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

import tiermem
from tiermem.trainer import AdamW
from tiermem.trainer.data import Corpus
from tiermem.trainer.gpt import GPT, GPTShape

STEPS, ACCUMULATE = 6, 2


def main() -> None:
    """Train, and print the loss and what this rank held."""
    ranks = "RANK" in os.environ  # as torchrun says
    if ranks:
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if ranks else (0, 1)
    torch.manual_seed(0)  # the same on all ranks: each takes its slices of what it built
    net = GPT(GPTShape(sequence=64, layers=4, width=128, heads=4))
    batches = Corpus(Path(sysconfig.get_path("stdlib")) / "argparse.py").batches(batch=4, sequence=64)
    mine = islice(batches, rank, None, world)
    with tempfile.TemporaryDirectory(dir=".", prefix=".distributed-") as folder:
        policy = {
            "device": {"kind": "cpu"},
            "host": {"budget": "6MiB"},
            "disk": {"paths": [folder]},
            "ranks": {"stage": 3},  # the default: parameters, gradients and optimizer state are in slices
        }
        with tiermem.TieredModule(net, policy) as model:
            optimizer = AdamW(model.parameters(), lr=1e-3)
            for step in range(STEPS):
                for micro in range(ACCUMULATE):
                    tokens, targets = next(mine)
                    loss = model(tokens, targets) / ACCUMULATE
                    if micro < ACCUMULATE - 1:
                        with model.no_sync():  # nothing is sent before the last micro-batch
                            loss.backward()
                    else:
                        loss.backward()
                norm = model.clip_grad_norm_(1.0)  # over all ranks
                optimizer.step()
                optimizer.zero_grad()
                if rank == 0:
                    print(
                        f"step {step + 1}: loss {loss.item() * ACCUMULATE:.3f}, gradient norm {norm.item():.3f}"
                    )
            stats = model.stats()
        # Here net is an ordinary module again, on every rank.
    sent = sum(stats["ranks"].get("nbytes_sent", {}).values())
    print(
        f"rank {rank} of {world}: at most {stats['tiers']['host']['peak']:,} B of pages in memory, "
        f"{sent:,} B sent to other ranks"
    )
    if ranks:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
