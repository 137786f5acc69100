"""Optimizers of any class over pages: torch.optim's, or the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from tiermem.checkpoint.contents import Stored
from tiermem.errors import PagingError
from tiermem.hooks import Hooks
from tiermem.parameter import owner_of
from tiermem.trainer.base import Exact, PagingOptimizer, hooks_of, pieces_of
from tiermem.trainer.blueprint import Blueprint
from tiermem.trainer.foreign import ForeignUpdate, settings_of
from tiermem.trainer.state import Facts


def paged(
    kind: type[Optimizer], params: ParamsT, *, elementwise: bool | None = None, **settings: Any
) -> Paged:
    """An optimizer of class ``kind`` over parameters that may be paged: ``paged(torch.optim.SGD, params, lr=0.1)``.

    It steps a few tensors at a time, with their gradients and state resident and nothing else, and gives the numbers
    that ``kind(params, **settings)`` gives over the same parameters in memory, bit for bit. Tensors in its state that
    are as large as the parameter become pages after its first step; others stay in memory. Parameter groups,
    schedulers, ``state_dict`` and checkpoints are what they are without paging. Half-precision parameters have no
    master weights, as in torch.

    A parameter's update must not depend on other parameters. Where several ranks have slices of the parameters
    (``ranks.stage`` 1 to 3), an element's must not depend on other elements either. Both are tried out on small
    tensors; ``elementwise`` says so beforehand (True: nothing is tried; False: slices are refused).

    Raises:
        ValueError: what ``kind`` raises for its settings; or it can't be run over pages, and why.
        BudgetError: a step of it needs more than the host's budget.
        ConfigError: the run was resumed, and its commit has the state of another class, or of other groups.
    """
    return Paged(Blueprint(kind, settings, elementwise), params)


class Paged(PagingOptimizer):
    """What :func:`paged` returns. ``param_groups`` has the class's own settings."""

    def __init__(self, blueprint: Blueprint, params: ParamsT) -> None:
        self._paged: dict[Hooks, ForeignUpdate] = {}
        self._blueprint = blueprint
        given: list[Any] = [_listed(each) for each in params]
        # Of the user's class: it steps the parameters that aren't paged, and has the defaults. In the place of those
        # that are, it has tensors of one element that never get a gradient.
        self._plain = blueprint.make([_stood_in(each) for each in given])
        super().__init__(given, dict(self._plain.defaults))
        self.state.update((p, state) for p, state in self._plain.state.items() if self._knows(p))
        self._plain.state = self.state

    def __repr__(self) -> str:
        return f"{self._blueprint.name} over pages: {super().__repr__()}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Paged:
        raise PagingError(
            "an optimizer over pages can't be copied: make another, and load state_dict() into it"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PagingError("an optimizer over pages can't be pickled: save its state_dict()")

    def __setstate__(self, state: dict[str, Any]) -> None:
        # load_state_dict calls it; copies are refused.
        super().__setstate__(state)
        for p, values in self.state.items():
            for name, value in values.items():
                if isinstance(value, Exact):
                    values[name] = _cast(value.tensor, p, name)
        self._plain.state = self.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; parameters of a :class:`tiermem.TieredModule` get their state as pages of it."""
        number = len(self.param_groups)
        group = _listed(param_group)
        if number == len(self._plain.param_groups):
            self._plain.add_param_group(_stood_in(group))
        super().add_param_group({**settings_of(self._plain.param_groups[number]), **group})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict`, or that of the class itself, returned; tensors are cast as torch casts them."""
        # Tensors travel wrapped, since torch would take them to the parameter's device; ours are on the host.
        self._load(state_dict, _wrap)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update each parameter that has a gradient; ``closure`` is called first, and its loss returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._find_paged()
        # Every instance of the class begins with the same settings, whatever the others make of theirs (a count of
        # steps, say).
        settings = [settings_of(group) for group in self.param_groups]
        changed: dict[int, dict[str, Any]] = {}
        if any(owner_of(p) is None for group in self.param_groups for p in group["params"]):
            for group, values in zip(self._plain.param_groups, settings, strict=True):
                group.update(values)
            self._plain.step()
            changed = {number: settings_of(group) for number, group in enumerate(self._plain.param_groups)}
        for update in self._paged.values():
            changed = {**update.step(settings), **changed}
        for number, values in changed.items():
            self.param_groups[number].update(values)
        return loss

    def facts(self) -> dict[int, Facts]:
        """What there is of state for parameters whose state is in pages, by their ids. All ranks must ask."""
        self._find_paged()
        facts = {
            identity: each for update in self._paged.values() for identity, each in update.facts().items()
        }
        for p in (p for group in self.param_groups for p in group["params"]):
            if len(pieces_of(p)) > 1 and id(pieces_of(p)[0]) in facts:
                facts[id(p)] = facts[id(pieces_of(p)[0])]
        return facts

    def set_state(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """Take over the state of one paged parameter; one that was frozen when its model was wrapped has none."""
        update = self._update_of(parameter)
        if update is not None:
            cast = {name: _cast(value, parameter, name) for name, value in state.items()}
            self._write(update, parameter, cast)

    def _update_for(self, owner: Hooks) -> ForeignUpdate:
        return self._paged.get(owner) or self._paged.setdefault(
            owner, ForeignUpdate(owner, self, self._blueprint)
        )

    def _take_paged(self, number: int) -> None:
        super()._take_paged(number)
        inner = self._plain.param_groups[number]["params"]
        for place, p in enumerate(self.param_groups[number]["params"]):
            if inner[place] is p:
                inner[place] = _stood_in(p)

    def _knows(self, p: Any) -> bool:
        return any(p is each for group in self.param_groups for each in group["params"])


def _listed(each: Any) -> Any:
    """A parameter, or a parameter group whose parameters can be gone through again."""
    if isinstance(each, Mapping):
        params = each["params"]
        return {**each, "params": [params] if isinstance(params, Tensor) else list(params)}
    return each


def _stood_in(each: Any) -> Any:
    """A parameter, named parameter or parameter group, with stand-ins for what is paged."""
    if isinstance(each, Mapping):
        return {**each, "params": [_stood_in(param) for param in each["params"]]}
    if isinstance(each, tuple):
        return (each[0], _stood_in(each[1]))
    if isinstance(each, Tensor) and hooks_of(each) is not None:
        return nn.Parameter(torch.zeros((1,) * each.ndim, dtype=each.dtype), requires_grad=each.requires_grad)
    return each


def _wrap(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state = {
        number: {
            name: Exact(value.detach().to("cpu", copy=True)) if isinstance(value, Tensor) else value
            for name, value in values.items()
        }
        for number, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _cast(value: Any, parameter: Tensor, name: str) -> Any:
    """A value of a loaded state in the dtype that torch gives it."""
    if name == "step" or not parameter.is_floating_point():
        return value
    if isinstance(value, Stored):
        return value._replace(dtype=parameter.dtype)
    return value.to(parameter.dtype) if isinstance(value, Tensor) else value
