"""Recipes: how a parameter's values come about, for whoever wants them where and when they are needed.

A recipe begins with nothing, with a tensor in a file of weights, or with values that were put aside on the disk, and
goes on with calls that are made again: the model's own initialisers, each with the state that the random generators
had. So the values are those of the first time, bit for bit, and take no memory in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from tiermem.spill import Spill, flat
from tiermem.weights import Weights

States = tuple[tuple[torch.Generator, torch.Tensor], ...]


_PLAIN = (int, float, complex, str, type(None), torch.dtype, torch.Generator)


class Hole:
    """Where the parameter itself goes among the arguments of a call that is made again."""


class Call(NamedTuple):
    """One call that gave a parameter its values, or changed them; ``states`` are those of the generators before."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    states: States

    @classmethod
    def of(
        cls,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        own: Sequence[torch.Tensor],
    ) -> Call | None:
        """The call that is about to be made on ``own`` (the parameter); None where it takes more than plain values."""
        generators = {id(torch.default_generator): torch.default_generator}

        def keep(value: Any) -> Any:
            if any(value is tensor for tensor in own):
                return Hole
            if isinstance(value, torch.Generator):
                generators[id(value)] = value
            return value

        values = [*args, *kwargs.values()]
        if not all(isinstance(value, _PLAIN) or keep(value) is Hole for value in values):
            return None
        kept_args, kept_kwargs = tuple(map(keep, args)), {name: keep(value) for name, value in kwargs.items()}
        return cls(
            func, kept_args, kept_kwargs, tuple((each, each.get_state()) for each in generators.values())
        )

    def drawn(self) -> Call:
        """The same, without the states of generators that it has not drawn from."""
        return self._replace(
            states=tuple((g, state) for g, state in self.states if not torch.equal(state, g.get_state()))
        )

    def again(self, target: torch.Tensor) -> None:
        """Make the call on ``target``, which has the parameter's shape, strides and dtype."""
        for generator, state in self.states:
            generator.set_state(state)
        args = [target if each is Hole else each for each in self.args]
        self.func(*args, **{name: target if each is Hole else each for name, each in self.kwargs.items()})


class Base(Protocol):
    """Values that are somewhere else."""

    def read(self, target: torch.Tensor, start: int = 0) -> None:
        """Fill ``target`` with the elements from number ``start`` on."""


class FromWeights:
    """A tensor in a file of weights: elements are counted row by row."""

    by_rows = True

    def __init__(self, weights: Weights, name: str) -> None:
        self._weights = weights
        self._name = name

    def read(self, target: torch.Tensor, start: int = 0) -> None:
        """See :class:`Base`."""
        self._weights.read(self._name, target, start)

    def exact(self, dtype: torch.dtype) -> bool:
        """Does ``dtype`` have every value that the file's dtype has?"""
        return torch.promote_types(self._weights[self._name].dtype, dtype) is dtype


class FromSpill:
    """Values that were put aside: elements are counted as they lay in memory."""

    by_rows = False

    def __init__(self, spill: Spill, offset: int, nbytes: int) -> None:
        self._spill = spill
        self.offset = offset
        self.nbytes = nbytes

    def read(self, target: torch.Tensor, start: int = 0) -> None:
        """See :class:`Base`."""
        self._spill.read(target, self.offset + start * target.element_size())


class Recipe:
    """How the values of one parameter come about: a base, then calls. Without either they are zeros."""

    def __init__(self, base: FromWeights | FromSpill | None = None, calls: Sequence[Call] = ()) -> None:
        self.base = base
        self.calls = list(calls)

    def fill(self, target: torch.Tensor) -> None:
        """Write the values to ``target``: the parameter's shape, strides and dtype, all its elements in one run."""
        if self.base is None:
            target.zero_()
        elif not self.base.by_rows:
            self.base.read(flat(target))
        elif target.is_contiguous():
            self.base.read(target)
        else:
            whole = torch.empty(target.shape, dtype=target.dtype)
            self.base.read(whole)
            target.copy_(whole)
        with torch.no_grad(), kept([generator for call in self.calls for generator, _ in call.states]):
            for call in self.calls:
                call.again(target)

    def exact(self, dtype: torch.dtype) -> bool:
        """Do values of ``dtype`` say exactly what the recipe gives, whatever they are then converted to?"""
        return isinstance(self.base, FromWeights) and not self.calls and self.base.exact(dtype)

    def fill_part(self, target: torch.Tensor, start: int, contiguous: bool) -> bool:
        """Write the elements from number ``start`` on, as memory has them, if they can be had alone; could they?

        ``contiguous``: does the parameter lie row by row?
        """
        if self.base is None or self.calls or (self.base.by_rows and not contiguous):
            return False
        self.base.read(target, start)
        return True


@contextmanager
def kept(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Whatever is drawn inside, these generators go on afterwards as if nothing had been."""
    states = {id(generator): (generator, generator.get_state()) for generator in generators}
    try:
        yield
    finally:
        for generator, state in states.values():
            generator.set_state(state)
