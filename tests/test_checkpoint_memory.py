"""What saving and loading take in memory: the windows and the slots, however large the model is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import tiermem
from tests.conftest import Wrap
from tests.joint import in_children
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


def save_or_load(rank: int, told: Callable[[int], None], disk: Path) -> list[int]:
    """By how much this rank grows while it saves, and while it loads."""
    from torch import distributed as dist

    config = {
        "device": {"kind": "cpu"},
        "host": {"budget": "40MiB"},
        "disk": {"paths": [str(disk / f"pages-{rank}")]},
        "ranks": {"timeout": 100},
    }
    grown = []
    with tiermem.TieredModule(network(0), config) as model:
        optimizer = adamw(model)
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for what, options in ((model.save, {"chunk_nbytes": MIB}), (model.load, {})):
            dist.barrier()
            before = forget_peak()
            what(disk / "ck", optimizer, **options)
            grown.append(peak_nbytes() - before)
    return grown


@pytest.mark.ranks
def test_a_rank_takes_no_more_memory_than_its_windows_and_slots(disk: Path) -> None:
    ended = in_children(2, disk, lambda rank, told: save_or_load(rank, told, disk))
    for each in ended:
        assert each.status == 0, each.result
        saving, loading = each.result
        assert saving < 32 * MIB, f"saving took {saving / MIB:.1f} MiB"
        assert loading < 32 * MIB, f"loading took {loading / MIB:.1f} MiB"
