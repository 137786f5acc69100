"""What the ranks of a test of checkpoints do: load what others saved, train, save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import tiermem
from tests.models import BY_NAME
from tests.optimizers import ELEMENTWISE, MIXING
from tests.parity import adamw, build, snapshot
from tiermem.checkpoint.reader import ArrayReader
from tiermem.trainer import paged

CASE = BY_NAME["gpt-tied"]


def run(
    rank: int,
    world: int,
    folder: Path,
    stage: int,
    dtype: torch.dtype,
    load: str | None,
    save: str | None,
    kind: str | None = None,
) -> dict[str, Any]:
    """Load, look, make a step, save, look again. All ranks have the same batch, so their mean is its gradient."""
    config = {
        "device": {"kind": "cpu"},
        "disk": {"paths": [str(folder / f"pages{rank}")]},
        "host": {"budget": "1500KiB"},
        "ranks": {"stage": stage, "timeout": 150},
    }
    count = [0]
    read = ArrayReader.read

    def counting(reader: ArrayReader, start: int, out: torch.Tensor) -> None:
        count[0] += out.numel()
        read(reader, start, out)

    ArrayReader.read = counting  # type: ignore[method-assign]
    found: dict[str, Any] = {}
    with tiermem.TieredModule(build(CASE, dtype, seed=0 if load is None else 5), config) as model:
        optimizer: Any = adamw(model) if kind is None else None
        if kind is not None:
            cls, settings = {**ELEMENTWISE, **MIXING}[kind]
            optimizer = paged(cls, model.parameters(), **settings)
        if load is not None:
            found["step"] = model.load(load, optimizer).step
            found["read"] = count[0]
            found["loaded"] = {name: value.clone() for name, value in model.state_dict().items()}
            found["loaded optimizer"] = snapshot(optimizer)
            model._runtime.check()
        torch.manual_seed(3)
        CASE.loss(model, CASE.batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if save is not None:
            model.save(save, optimizer)
            model._runtime.check()
        found["state"] = {name: value.clone() for name, value in model.state_dict().items()}
        found["optimizer"] = snapshot(optimizer)
    return found


def fail(rank: int, world: int, folder: Path, path: str) -> str:
    """One rank can't write its slices: all are told, and nothing is left."""
    config = {"device": {"kind": "cpu"}, "host": {"budget": "64MiB"}, "ranks": {"timeout": 150}}
    with tiermem.TieredModule(build(CASE), config) as model:
        if rank == 1:
            import tiermem.checkpoint.writer as writer

            def refuse(*_: Any) -> None:
                raise OSError(28, "No space left on device", "its.file")

            writer._write_into = refuse
        try:
            model.save(path)
        except tiermem.TiermemError as error:
            return f"{type(error).__name__}: {error}"
    return "saved"


def load_damaged(rank: int, world: int, folder: Path, path: str) -> list[str]:
    """Save together, flip a bit in one chunk and another, and load: what each rank is told."""
    config = {"device": {"kind": "cpu"}, "host": {"budget": "64MiB"}, "ranks": {"stage": 3, "timeout": 150}}
    told = []
    with tiermem.TieredModule(build(CASE), config) as model:
        model.save(path)
        model.load(path)
        chunks = sorted(Path(path).rglob("c.*"), key=lambda each: each.stat().st_size)[-3:]
        for chunk in chunks:
            torch.distributed.barrier()
            data = bytearray(chunk.read_bytes())
            data[len(data) // 2] ^= 4
            torch.distributed.barrier()
            if rank == 0:
                chunk.write_bytes(data)
            torch.distributed.barrier()
            try:
                model.load(path)
            except tiermem.CheckpointError as error:
                told.append(str(error))
            torch.distributed.barrier()
            data[len(data) // 2] ^= 4
            if rank == 0:
                chunk.write_bytes(data)
        torch.distributed.barrier()
        model.load(path)
    return told
