"""Three dimensions: a pipeline of two stages, tensor parallelism inside them, and ranks that share what is the same.

Run: torchrun --nproc-per-node 8 examples/parallel.py
(or 4, where tensor parallelism is left out, or python examples/parallel.py, which is one process of each). A module is
cut first, by torch's own tools, and wrapped then: what it has of the model by then is what is paged.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tiermem
from tiermem.trainer import AdamW

WIDTH, LAYERS, STEPS, MICRO = 128, 8, 6, 4
SHAPES = {8: (2, 2, 2), 4: (2, 2, 1), 2: (1, 2, 1), 1: (1, 1, 1)}  # by number of processes: pp, dp, tp


class Layer(nn.Module):
    """A feed-forward layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape [..., WIDTH], as is the result."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


def mean_of_micro(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """A micro-batch's share of the loss: divided here, gradients need not be afterwards."""
    return F.mse_loss(found, expected) / MICRO


def main() -> None:
    """Train, and print the loss and what this process held."""
    if "RANK" not in os.environ:  # as torchrun says
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", SHAPES[world], mesh_dim_names=("pp", "dp", "tp"))
    stage, stages = mesh.get_local_rank("pp"), mesh["pp"].size()

    torch.manual_seed(0)  # everybody builds the whole, and keeps its part
    net = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    size = LAYERS // stages
    net = net[stage * size : (stage + 1) * size]
    for layer in net:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

    generator = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
    with tempfile.TemporaryDirectory(dir=".", prefix=".parallel-") as folder:
        policy = {
            "device": {"kind": "cpu"},
            "host": {"budget": "4MiB"},
            "disk": {"paths": [folder]},
            "policy": {"units": ["*"]},
        }
        with tiermem.TieredModule(net, policy, group=mesh["dp"], pipeline=mesh["pp"]) as model:
            optimizer = AdamW(model.parameters(), lr=1e-3)
            part = PipelineStage(model, stage, stages, torch.device("cpu"), group=mesh.get_group("pp"))
            schedule = Schedule1F1B(part, MICRO, loss_fn=mean_of_micro, scale_grads=False)
            for step in range(STEPS):
                x = torch.randn(8, 16, WIDTH, generator=generator)
                losses: list[torch.Tensor] = []
                arguments = (x,) if part.is_first else ()
                expected = {"target": x.roll(1, -1), "losses": losses} if part.is_last else {}
                with model.no_sync():  # gradients are summed over "dp" once, by what follows
                    schedule.step(*arguments, **expected)
                norm = model.clip_grad_norm_(1.0)  # of the whole model: all stages, all parts
                optimizer.step()
                optimizer.zero_grad()
                if losses and mesh.get_local_rank("dp") == mesh.get_local_rank("tp") == 0:
                    loss = torch.stack(losses).sum()
                    print(f"step {step + 1}: loss {loss.item():.4f}, gradient norm {norm.item():.4f}")
            stats = model.stats()
    print(
        f"process {dist.get_rank()} of {world} (pp, dp, tp: {mesh.get_coordinate()}): at most "
        f"{stats['tiers']['host']['peak']:,} B of pages in memory"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
