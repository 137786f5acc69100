"""What saving and loading take in memory: the windows and the slots, however large the model is."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tests.conftest import Wrap
from tests.parity import adamw

MIB = 1 << 20


def peak_nbytes() -> int:
    """The most memory that this process has had since :func:`forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))) << 10


def forget_peak() -> int:
    """Begin anew; what the process has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_nbytes()


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(10)))


def test_memory_is_that_of_windows_and_slots(disk: Path, wrap: Wrap) -> None:
    model = wrap(network(0), host="24MiB")
    optimizer = adamw(model)
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.save(disk / "warm", optimizer, chunk_nbytes=MIB)
    before = forget_peak()
    saving = model.save(disk / "ck", optimizer, chunk_nbytes=MIB)
    grown = peak_nbytes() - before
    assert saving.nbytes > 120 * MIB
    # Four slots of one MiB, four windows of at most four MiB; the rest is what Python and malloc take.
    assert grown < 32 * MIB, f"saving took {grown / MIB:.1f} MiB"
    model.close(restore=False)
    other = wrap(network(1), host="24MiB")
    second = adamw(other)
    other.load(disk / "warm", second)
    before = forget_peak()
    other.load(disk / "ck", second)
    grown = peak_nbytes() - before
    assert grown < 32 * MIB, f"loading took {grown / MIB:.1f} MiB"
