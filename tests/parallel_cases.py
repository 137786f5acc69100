"""Models that tensor parallelism and pipelines cut, trained on four ranks and in one process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import tiermem
from tests.optimizers import MIXING
from tiermem.trainer import AdamW, paged

DIM, DEPTH, BATCH, STEPS, MICRO = 32, 4, 8, 3, 4
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


class Layer(nn.Module):
    """Half a transformer block. ``saving``: under checkpoint, reentrant or not."""

    def __init__(self, saving: bool | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)
        self.saving = saving

    def forward(self, x: Tensor) -> Tensor:
        if self.saving is None:
            return x + self.inner(x)
        return x + torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=self.saving)

    def inner(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """``layers`` says which of the layers are there, and so which stage of a pipeline this is."""

    def __init__(self, layers: Sequence[int] = range(DEPTH)) -> None:
        super().__init__()
        made = [Layer({1: True, 2: False}.get(number)) for number in range(DEPTH)]
        head = nn.Linear(DIM, 5)
        self.layers = nn.ModuleDict({str(number): made[number] for number in layers})
        self.head = head if DEPTH - 1 in layers else None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def build(layers: Sequence[int] = range(DEPTH)) -> Net:
    torch.manual_seed(0)
    return Net(layers)


def data(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(BATCH, 2, DIM, generator=generator), torch.randn(BATCH, 2, 5, generator=generator))
        for _ in range(count)
    ]


SETTINGS = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3}


def optimizer_of(net: nn.Module) -> AdamW:
    return AdamW(net.parameters(), **SETTINGS)


def alone(micro: int = 1, clip: float | None = None) -> dict[str, Any]:
    """One process that accumulates the batches of two, micro-batch by micro-batch."""
    net, losses, norms = build(), [], []
    optimizer, batches = optimizer_of(net), data(2 * STEPS)
    for step in range(STEPS):
        both = [[each.chunk(micro) for each in batches[2 * step + rank]] for rank in range(2)]
        for number in range(micro):
            for x, y in both:
                loss = F.mse_loss(net(x[number]), y[number])
                (loss / 2).backward()
                losses.append(loss.detach())
        for parameter in net.parameters():
            if micro > 1:
                parameter.grad.div_(micro)
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), clip))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "state": {k: v.clone() for k, v in net.state_dict().items()}}


# -- tensor parallelism -----------------------------------------------------------------------------------


def cut(net: Net, mesh: Any) -> Net:
    """Over a mesh: weights by rows and columns; one norm over sequences, whose gradients are sums to be made."""
    plan: dict[str, Any] = {"head": ColwiseParallel(output_layouts=Replicate())}
    for number in net.layers:
        plan[f"layers.{number}.up"] = ColwiseParallel()
        plan[f"layers.{number}.down"] = RowwiseParallel()
    plan |= {
        "layers.0": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        "layers.0.norm": SequenceParallel(),
        "layers.0.up": ColwiseParallel(input_layouts=Shard(1)),
        "layers.0.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(net, mesh, plan)
    out = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    parallelize_module(net, mesh, {"layers.0": out})
    return net


def policy(folder: Path, rank: int, **sections: Any) -> dict[str, Any]:
    return {
        "disk": {"paths": [str(folder / f"pages{rank}")]},
        "policy": {"units": ["layers.*", "head"]},
        "ranks": {"stage": 3, "timeout": 120},
        **sections,
    }


def tensor_parallel(
    rank: int, folder: Path, mesh: Any, stage: Any = 3, clip: float | None = None, **sections: Any
) -> dict[str, Any]:
    """A run of two times two: batches over "dp", parameters over "tp". Also the same, not wrapped, on each of "dp"."""
    batches = data(2 * STEPS)
    mine = mesh.get_local_rank("dp")
    bare = cut(build(), mesh["tp"])
    parts = [nn.Parameter(local(each.detach())) for each in bare.parameters()]
    plain = AdamW(parts, **SETTINGS)
    config = policy(folder, rank, ranks={"stage": stage, "timeout": 120}, **sections)
    losses, norms, same = [], [], True
    net = cut(build(), mesh["tp"])
    with tiermem.TieredModule(net, config, group=mesh["dp"]) as model:
        optimizer = optimizer_of(model)
        for step in range(STEPS):
            x, y = batches[2 * step + mine]
            loss = F.mse_loss(model(x), y)
            losses.append(loss.detach())
            loss.backward()
            model._runtime.check()
            if clip is not None:
                norms.append(model.clip_grad_norm_(clip))
            optimizer.step()
            optimizer.zero_grad()
            for x, y in batches[2 * step : 2 * step + 2]:
                (F.mse_loss(bare(x), y) / 2).backward()
                for part, each in zip(parts, bare.parameters(), strict=True):
                    gradient = local(reduced(each.grad, each))
                    part.grad = gradient.clone() if part.grad is None else part.grad + gradient
                bare.zero_grad()
            plain.step()
            plain.zero_grad()
        state = model.state_dict()
        for (name, found), expected in zip(state.items(), bare.state_dict().values(), strict=True):
            assert type(found) is type(expected), name
            same &= torch.equal(local(found), local(expected))
        state = {name: whole(value) for name, value in state.items()}
        read = model.stats()["nbytes_read_from_disk"]
    given_back = {name: whole(value) for name, value in net.state_dict().items()}
    assert all(torch.equal(given_back[name], value) for name, value in state.items())
    return {"losses": losses, "norms": norms, "state": state, "same": same, "read": read}


def local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def reduced(gradient: Any, parameter: Any) -> Tensor:
    return (
        gradient.redistribute(placements=parameter.placements) if isinstance(parameter, DTensor) else gradient
    )


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


# -- pipelines ------------------------------------------------------------------------------------------------


def pipelined(
    rank: int,
    folder: Path,
    mesh: Any,
    name: str = "1F1B",
    stage: Any = 3,
    clip: float | None = None,
    quiet: bool = False,
    **sections: Any,
) -> dict[str, Any]:
    """A run of two times two: batches over "dp", layers over "pp"; returns the state of this rank's stage."""
    batches = data(2 * STEPS)
    place, mine = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    net = build([range(DEPTH // 2), range(DEPTH // 2, DEPTH)][place])
    config = policy(folder, rank, ranks={"stage": stage, "timeout": 120}, **sections)
    config["policy"] = {"units": ["layers.*"]}
    losses, norms = [], []
    with tiermem.TieredModule(net, config, group=mesh["dp"], pipeline=mesh["pp"]) as model:
        optimizer = optimizer_of(model)
        part = PipelineStage(model, place, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = SCHEDULES[name](part, MICRO, loss_fn=F.mse_loss)
        for step in range(STEPS):
            x, y = batches[2 * step + mine]
            with model.no_sync() if quiet else nullcontext():
                if place == 0:
                    schedule.step(x)
                else:
                    each: list[Tensor] = []
                    schedule.step(target=y, losses=each)
                    losses += [loss.detach() for loss in each]
            model._runtime.check()
            if clip is not None:
                norms.append(model.clip_grad_norm_(clip))
            optimizer.step()
            optimizer.zero_grad()
        state = {key: value.clone() for key, value in model.state_dict().items()}
        read = model.stats()["nbytes_read_from_disk"]
    return {"losses": losses, "norms": norms, "state": state, "read": read}


# -- saving, refusals -------------------------------------------------------------------------------------------


def raised(call: Any) -> str:
    try:
        call()
    except (tiermem.TiermemError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def saved(rank: int, folder: Path, mesh: Any) -> dict[str, Any]:
    """A parallel model's checkpoints and states, and what is refused of it."""
    shared, tp = folder.parent, mesh.get_local_rank("tp")
    config = policy(folder, rank)
    found: dict[str, Any] = {}

    def trained(net: nn.Module, steps: int, optimizer: AdamW | None = None) -> AdamW:
        optimizer = optimizer or optimizer_of(net)
        for x, y in data(steps):
            F.mse_loss(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    net = cut(build(), mesh["tp"])
    early = optimizer_of(net)
    F.mse_loss(net(data(1)[0][0]), data(1)[0][1]).backward()
    found["not wrapped"] = raised(early.step)
    early.zero_grad()
    with tiermem.TieredModule(net, config, group=mesh["dp"]) as model:
        found["optimizer made before"] = raised(early.step)
        optimizer = trained(model, 2)
        found["one folder"] = raised(lambda: model.save(shared / "one", optimizer))
        model.save(shared / f"part{tp}", optimizer)
        wholes = {name: whole(value) for name, value in model.state_dict().items()}
        trained(model, 2, optimizer)
        expected = {name: whole(value) for name, value in model.state_dict().items()}
    net = cut(build(), mesh["tp"])
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(0.5)
    with tiermem.TieredModule(net, config, group=mesh["dp"]) as model:
        optimizer = optimizer_of(model)
        found["another's part"] = raised(lambda: model.load(shared / f"part{1 - tp}", optimizer))
        model.load(shared / f"part{tp}", optimizer)
        trained(model, 2, optimizer)
        again = {name: whole(value) for name, value in model.state_dict().items()}
        found["goes on"] = all(torch.equal(again[name], value) for name, value in expected.items())
        model.load_state_dict(wholes)
        again = {name: whole(value) for name, value in model.state_dict().items()}
        found["whole tensors"] = all(torch.equal(again[name], value) for name, value in wholes.items())
        model.load_state_dict(model.state_dict())
        kind, settings = MIXING["TrustRatio"]
        found["mixes"] = raised(lambda: paged(kind, model.parameters(), **settings))
    found["closed"] = raised(lambda: model.save(shared / f"closed{rank}"))
    net = cut(build(), mesh["tp"])
    before = list(net.parameters())
    durable = config | {"durability": {"mode": "step"}}
    for what, wrap in {
        "no group": lambda: tiermem.TieredModule(net, config),
        "wrong group": lambda: tiermem.TieredModule(net, config, group=mesh["tp"]),
        "durable": lambda: tiermem.TieredModule(net, durable, group=mesh["dp"]),
        "two dimensions": lambda: tiermem.TieredModule(net, config, group=mesh),
    }.items():
        found[what] = raised(wrap)
    assert all(a is b for a, b in zip(before, net.parameters(), strict=True))
    assert all(isinstance(each, DTensor) for each in (net.head.weight, net.layers["1"].up.weight))
    return found


def everything(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """All runs on four ranks, in turn."""
    tp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    pp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    tight = {"host": {"budget": "300KiB"}}
    return {
        "tp": tensor_parallel(rank, folder / "tp", tp, **tight),
        "tp, stage 1, clipped": tensor_parallel(rank, folder / "tp1", tp, stage=1, clip=0.05),
        "1F1B": pipelined(rank, folder / "pp", pp, "1F1B", **tight),
        "GPipe, stage 2": pipelined(rank, folder / "pp2", pp, "GPipe", stage=2),
        "no_sync, clipped": pipelined(rank, folder / "ppq", pp, clip=0.05, quiet=True),
        "saved": saved(rank, folder / "saved", tp),
    }
