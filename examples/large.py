"""A model that is never in memory whole is built, trained a little, and its activations are paged too.

Training state of 80 MB in 25 MB of memory. Beside it the same model as anybody builds and trains it: the losses are the
same numbers. Run: python examples/large.py
"""

import tempfile
from typing import Any

import torch
from torch import nn

import tiermem
from tiermem.trainer import AdamW
from tiermem.trainer.gpt import GPT, GPTShape

SHAPE = GPTShape(sequence=128, layers=6, width=256, heads=4)


def train(model: nn.Module, steps: int = 2) -> list[float]:
    """The losses of a few steps on noise."""
    optimizer = AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, SHAPE.vocabulary, (4, SHAPE.sequence + 1), generator=generator)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train it born paged, and as ever."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        config: dict[str, Any] = {
            "host": {"budget": "24MiB"},
            "disk": {"paths": [folder]},
            "placement": {"activations": "disk", "activation_size": "256KiB"},
        }
        torch.manual_seed(0)
        with tiermem.deferred_init(config):
            net = GPT(SHAPE)
        with tiermem.TieredModule(net, config) as model:
            losses = train(model)
            stats = model.stats()
            model.close(restore=False)
    host, activations = stats["tiers"]["host"], stats["activations"]
    print(
        f"training state {stats['state_nbytes'] >> 20} MiB, host budget {host['budget'] >> 20} MiB, peak {host['peak']}"
    )
    saved, in_memory = activations["peak_saved"], activations["peak_in_memory"]
    print(f"activations {saved >> 10} KiB, of which at most {in_memory >> 10} KiB in memory")
    torch.manual_seed(0)
    print(f"losses {losses}, the same as built and trained in memory: {losses == train(GPT(SHAPE))}")


if __name__ == "__main__":
    main()
