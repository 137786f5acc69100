"""Training that can be killed at any time, and started again: it goes on where it was, bit for bit.

$ python examples/durable.py & sleep 10; kill -9 $!
$ python examples/durable.py
"""

import argparse

import torch
from torch import nn

import tiermem
from tiermem.trainer import AdamW


class Batches:
    """Batches of noise in an order of their own; where they are is their state."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __next__(self) -> torch.Tensor:
        return torch.randn(16, 128, generator=self.generator)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.generator.set_state(state["generator"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", default="durable-run", help="where the run is kept")
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    blocks = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.Tanh(), nn.Dropout(0.1))]
    config = {
        "host": {"budget": "2MiB"},
        "disk": {"paths": [arguments.folder]},
        "durability": {"mode": "step"},
    }
    with tiermem.TieredModule(nn.Sequential(*blocks), config, resume="auto") as model:
        optimizer = AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
        batches = Batches()
        model.register("scheduler", scheduler)
        model.register("batches", batches)
        print(f"{model.num_steps} steps are made")
        while model.num_steps < arguments.steps:
            x = next(batches)
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            print(f"step {model.num_steps}: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
