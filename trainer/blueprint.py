"""Blueprints: an optimizer's class with its arguments, to make instances of; and what its update mixes, by trying.

Over pages a class sees a few parameters at a time, and across ranks slices of them. Whether its numbers survive that
can't be read off a class, but it can be tried out on small tensors: step on all of them together and on each alone, on
a tensor and on its halves. Two results that differ prove that something is mixed; two that agree are no proof of the
contrary, so the steps are several and the gradients of very different sizes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

_SHAPE = (4, 6)
_CUT = 10  # of the 24 elements
_STEPS = 3


class Blueprint:
    """How instances of an optimizer's class are made: ``kind(groups, **arguments)``.

    ``elementwise``: does each element's update depend on that element alone? None: it is found out.

    Raises ValueError for a class that can't be run over pages at all.
    """

    def __init__(self, kind: type[Optimizer], arguments: Mapping[str, Any], elementwise: bool | None) -> None:
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
            raise ValueError(f"paged() takes a class of torch.optim.Optimizer, not {kind!r}")
        self.kind = kind
        self.name = kind.__name__
        self._arguments = dict(arguments)
        self._elementwise = elementwise
        closure = inspect.signature(kind.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"{self.name}.step() needs a closure: it evaluates the whole model within its step, and over pages it "
                "is given a few parameters at a time"
            )

    def make(self, groups: Sequence[Any]) -> Optimizer:
        """An instance over these parameter groups, whose settings come before the arguments."""
        return self.kind(groups, **self._arguments)

    def require_separate(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError where the update of one parameter depends on others."""
        if self._elementwise:
            return
        one, two = _values(0), _values(1)
        try:
            together = self._trained([one, two], settings)
            alone = [*self._trained([one], settings), *self._trained([two], settings)]
        except Exception:  # what a class of somebody else's makes of a small tensor, nobody knows
            return
        if not all(map(_close, together, alone)):
            raise ValueError(
                f"{self.name} updates one parameter otherwise where another one is beside it, and over pages it is "
                "given a few at a time: its numbers would be others. (Tried on two small tensors, together and alone. "
                "If it draws random numbers and is elementwise otherwise, say elementwise=True)"
            )

    def require_elementwise(self, reason: str, settings: Mapping[str, Any]) -> None:
        """Raise ValueError where an update of slices isn't that of the whole tensor; ``reason``: why it is asked."""
        if self._elementwise:
            return
        why = "elementwise=False says so"
        if self._elementwise is None:
            whole = _values(0)
            try:
                expected = self._trained([whole], settings)[0].flatten()
                parts = self._trained([each.flatten() for each in _halves(whole)], settings)
            except Exception as error:  # likewise
                why = f"trying it on a small tensor raised {type(error).__name__}: {error}"
            else:
                if _close(expected, torch.cat(parts)):
                    return
                why = "a small tensor and its two halves were updated to different numbers"
        raise ValueError(
            f"{self.name} doesn't update every element on its own ({why}), and {reason}, or, if it is elementwise "
            "after all, say elementwise=True"
        )

    def state_dtypes(self, settings: Mapping[str, Any], dtype: torch.dtype) -> list[torch.dtype]:
        """The dtypes of the tensors as large as a parameter of ``dtype`` that it keeps for it; [] if unknown."""
        parameter = nn.Parameter(_values(0).to(dtype))
        try:
            with torch.random.fork_rng(devices=[]):
                optimizer = self.make([{**settings, "params": [parameter]}])
                parameter.grad = torch.ones_like(parameter)
                optimizer.step()
        except Exception:  # likewise
            return []
        state = optimizer.state.get(parameter, {}).values()
        return [
            value.dtype for value in state if isinstance(value, Tensor) and value.shape == parameter.shape
        ]

    def _trained(self, values: Sequence[Tensor], settings: Mapping[str, Any]) -> list[Tensor]:
        """These tensors after some steps. What is drawn meanwhile doesn't count for anybody."""
        parameters = [nn.Parameter(value.clone()) for value in values]
        with torch.random.fork_rng(devices=[]):
            optimizer = self.make([{**settings, "params": parameters}])
            for step in range(_STEPS):
                for parameter in parameters:
                    # From what the parameter is, so that a slice's gradients are those of the slice.
                    parameter.grad = (parameter.detach() * 3.0).sin() * _SIZES[step]
                    parameter.grad[parameter.detach() > 0] *= 1e-3
                optimizer.step()
        return [parameter.detach() for parameter in parameters]


_SIZES = (1.0, 1e3, 1e-2)


def _values(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(_SHAPE, generator=generator)


def _halves(whole: Tensor) -> tuple[Tensor, Tensor]:
    flat = whole.flatten()
    return flat[:_CUT], flat[_CUT:]


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
