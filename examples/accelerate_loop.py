"""A loop of accelerate's over a paged model: one class and one argument more.

Needs: pip install "tiermem[hf]". Run: python examples/accelerate_loop.py
"""

import sysconfig
import tempfile
from pathlib import Path

import torch

from tiermem.integrations.accelerate import PagedAccelerator
from tiermem.trainer import AdamW
from tiermem.trainer.data import Corpus
from tiermem.trainer.gpt import GPT, GPTShape


def main() -> None:
    """Train, and print the loss and what was paged."""
    torch.manual_seed(0)
    net = GPT(GPTShape(sequence=64, layers=4, width=128, heads=4))
    batches = Corpus(Path(sysconfig.get_path("stdlib")) / "argparse.py").batches(batch=4, sequence=64)
    with tempfile.TemporaryDirectory(dir=".", prefix=".accelerate-") as folder:
        policy = {"device": {"kind": "cpu"}, "host": {"budget": "4MiB"}, "disk": {"paths": [folder]}}
        accelerator = PagedAccelerator(cpu=True, gradient_accumulation_steps=2, policy=policy)
        model, optimizer = accelerator.prepare(net, AdamW(net.parameters(), lr=1e-3))
        for number in range(1, 21):
            tokens, targets = next(batches)
            with accelerator.accumulate(model):
                loss = model(tokens, targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if number % 10 == 0:
                print(f"batch {number}: loss {loss.item():.3f} nats/byte")
        host = model.stats()["tiers"]["host"]
        print(f"at most {host['peak']:,} B in memory (budget {host['budget']:,} B)")
        accelerator.end_training()  # net is an ordinary module again


if __name__ == "__main__":
    main()
