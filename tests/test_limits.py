"""What links can carry is measured when a traced run begins, and is what the trace's readers compare with."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import Wrap
from tiermem.limits import LEAST
from tiermem.trace.reader import TraceFile
from tiermem.trace.summary import summarise

LARGE = 1100  # a square of this has more than 16 MiB of training state, and two of them more parameters on a device


def chain(width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


def run(wrap: Wrap, file: Path, width: int, **sections: Any) -> None:
    net = chain(width)
    state = 16 * sum(p.numel() for p in net.parameters())
    model = wrap(net, host=state // 2, trace={"file": str(file)}, **sections)
    model(torch.ones(1, width)).sum().backward()
    model.close(restore=False)


@pytest.mark.parametrize("three", [False, True])
def test_limits_are_in_the_trace_and_its_summary(wrap: Wrap, disk: Path, three: bool) -> None:
    file = disk / "run.trace"
    run(wrap, file, LARGE, three=three)
    links = {"disk->host", "host->disk"} | ({"host->device", "device->host"} if three else set())
    with TraceFile(file) as trace:
        limits = trace.meta["limits"]
        assert set(limits) == links
        assert all(1e6 < rate < 1e12 for rate in limits.values())
        for link in summarise(trace).links:
            name = f"{link.source}->{link.target}"
            assert link.limit == limits.get(name)
    assert list(disk.glob(".tiermem-speed-*")) == []


def test_a_small_model_is_not_held_up(wrap: Wrap, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: Any) -> None:
        raise AssertionError(f"below {LEAST} bytes nothing is measured")

    monkeypatch.setattr("tiermem.limits.measure", measure)
    run(wrap, disk / "run.trace", 64)
    with TraceFile(disk / "run.trace") as trace:
        assert trace.meta["limits"] == {}


def test_a_disk_that_cannot_be_measured_has_no_limit(
    wrap: Wrap, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tiermem.limits.measure", measure)
    run(wrap, disk / "run.trace", LARGE)
    with TraceFile(disk / "run.trace") as trace:
        assert trace.meta["limits"] == {}
