"""The states of the random number generators that a training loop draws from: torch's, Python's and numpy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def capture() -> dict[str, Any]:
    """All of them, as tensors and plain data. numpy's only if numpy is in use, CUDA's only if CUDA is."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state(legacy=True)
        states["numpy"] = (str(name), torch.tensor(keys.tolist()), *rest)
    return states


@contextmanager
def undisturbed() -> Iterator[None]:
    """Whatever is drawn in this context, what is drawn after it is what would have been."""
    states = capture()
    try:
        yield
    finally:
        restore(states)


def restore(states: dict[str, Any]) -> None:
    """Put them back. CUDA's are put back on as many devices as there are."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    for index, state in enumerate(states.get("cuda", ())[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, index)
    if "numpy" in states:
        import numpy

        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, keys.numpy().astype(numpy.uint32), *rest))
