"""The training loop of any PyTorch program, with one line more: accumulation, clipping and a schedule included.

The model's training state is about 13 MB; the policy allows 4 MB of memory for it. Run: python examples/finetune.py
"""

import sysconfig
import tempfile
from pathlib import Path

import torch

import tiermem
from tiermem.trainer import AdamW
from tiermem.trainer.data import Corpus
from tiermem.trainer.gpt import GPT, GPTShape

STEPS, ACCUMULATE = 10, 2


def main() -> None:
    """Train, and print the loss and what was paged."""
    torch.manual_seed(0)
    net = GPT(GPTShape(sequence=64, layers=4, width=128, heads=4))
    batches = Corpus(Path(sysconfig.get_path("stdlib")) / "argparse.py").batches(batch=4, sequence=64)
    with tempfile.TemporaryDirectory(dir=".", prefix=".finetune-") as folder:
        policy = {"device": {"kind": "cpu"}, "host": {"budget": "4MiB"}, "disk": {"paths": [folder]}}
        model = tiermem.TieredModule(net, policy)  # the one line
        optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=STEPS)
        for step in range(STEPS):
            total = 0.0
            for _ in range(ACCUMULATE):
                tokens, targets = next(batches)
                loss = model(tokens, targets) / ACCUMULATE
                loss.backward()
                total += loss.item()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if step % 3 == 0 or step == STEPS - 1:
                print(f"step {step + 1}: loss {total:.3f} nats/byte")
        stats = model.stats()
        host = stats["tiers"]["host"]
        print(
            f"state {stats['state_nbytes']:,} B, of which at most {host['peak']:,} B were in memory at a time "
            f"(budget {host['budget']:,} B); {stats['nbytes_read_from_disk']:,} B read from disk"
        )
        model.close()  # net is an ordinary module again, with what it learned


if __name__ == "__main__":
    main()
