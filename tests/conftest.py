"""Fixtures of the tests of a whole wrapped model."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from tests.parity import wrap_in

Wrap = Callable[..., tiermem.TieredModule]

# Models here are small: a second thread would spin at barriers, and several test runs share this machine's cores.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def grad_mode() -> Iterator[None]:
    """A test that leaves gradients off fails itself, and not all those after it."""
    yield
    left = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert left, "gradients were left off"


@pytest.fixture
def disk() -> Iterator[Path]:
    """A folder of its own on a real disk: /tmp is RAM on many machines."""
    path = Path(tempfile.mkdtemp(prefix="tiermem-test-", dir="/var/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def wrap(disk: Path) -> Iterator[Wrap]:
    """Wraps a module: ``wrap(net, host=, device=, three=, **sections)``; closed (restore=False) at the end.

    ``host`` and ``device`` are bytes, or "smallest", or a fraction of the training state (never below the smallest).
    ``three`` computes on the stand-in device, apart from the host.
    """
    opened: list[tiermem.TieredModule] = []

    def make(
        net: nn.Module, host: Any = "1GiB", device: Any = "1GiB", three: bool = False, **sections: Any
    ) -> tiermem.TieredModule:
        model = wrap_in(net, disk, host, device, three, **sections)
        opened.append(model)
        return model

    yield make
    for model in opened:
        model.close(restore=False)
