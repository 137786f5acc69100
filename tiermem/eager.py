"""Eager: functions that torch.compile leaves alone, at no cost where nobody compiles.

The decorator of torch's own imports its compiler, which takes 80 MB and a second.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, never traced: where compiled code calls it, the graph is broken and it runs as it is."""
    disabled: list[Callable[P, R]] = []

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*args, **kwargs)

    mark: Any = call
    mark._torchdynamo_disable = True  # which is how dynamo knows what it mustn't inline
    return call
