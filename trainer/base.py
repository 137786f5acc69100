"""What optimizers over pages have in common: which of their parameters are paged, and by which wrapped model.

Parameters may be paged or not, in one parameter group or in several. Paged ones are taken over when they are found:
at once, or at the next step, where the model is wrapped after the optimizer was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from tiermem.errors import PagingError
from tiermem.hooks import Hooks
from tiermem.parameter import owner_of
from tiermem.trainer.update import Update
from tiermem.whole import Whole


def hooks_of(p: Tensor) -> Hooks | None:
    """The wrapped model that pages this parameter, whole or in tiles; None for an ordinary one."""
    owner = owner_of(p)
    owner = owner.hooks if isinstance(owner, Whole) else owner
    return owner if isinstance(owner, Hooks) else None


def pieces_of(p: Tensor) -> list[Tensor]:
    """The tiles of a parameter that is in tiles, which have pages each; any other is all there is of it."""
    owner = owner_of(p)
    return [*owner.pieces] if isinstance(owner, Whole) else [p]


class PagingOptimizer(Optimizer):
    """An optimizer some of whose parameters may be paged; those have an :class:`Update` for each wrapped model."""

    _paged: Mapping[Hooks, Update]

    _by_pages = False

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by torch's GradScaler before it calls ``step``."""
        if not self._by_pages and any(hooks.reduction.ranks is not None for hooks in self._paged):
            raise PagingError(
                "torch's GradScaler unscales copies of gradients of which each rank has a slice, and each rank skips "
                "steps on its own: use tiermem.trainer.GradScaler"
            )
        return False

    @contextmanager
    def unscaled_by_pages(self) -> Iterator[None]:
        """Within it, a GradScaler calls ``step`` that knows of pages."""
        self._by_pages = True
        try:
            yield
        finally:
            self._by_pages = False

    def parameters_of(self) -> list[tuple[Hooks, Mapping[int, int]]]:
        """Each wrapped model among the parameters, and the ids of those."""
        self._find_paged()
        return [(hooks, update.settings) for hooks, update in self._paged.items()]

    def _update_for(self, owner: Hooks) -> Update:
        """The update over the pages of this model, made when it is first asked for."""
        raise NotImplementedError

    def _admit(self, parameter: Tensor) -> None:
        """Raise ValueError for a paged parameter that can't be updated."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; those of paged parameters page by page, without bringing them back."""
        for group in self.param_groups:
            for p in group["params"]:
                if owner_of(p) is None and p.grad is not None:
                    p.grad = None if set_to_none else p.grad.detach().zero_()
        self._find_paged(closed_too=True)
        for hooks, update in self._paged.items():
            if hooks.views.closed:
                continue  # its parameters are ordinary again
            forget = hooks.forget_gradients if set_to_none else hooks.zero_gradients
            forget(update.settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; parameters of a :class:`tiermem.TieredModule` get their state as pages of it."""
        super().add_param_group(param_group)
        self._take_paged(len(self.param_groups) - 1)

    def _load(self, state_dict: dict[str, Any], wrap: Callable[[Optimizer, dict[str, Any]], Any]) -> None:
        """As torch's ``load_state_dict``, with tensors that ``wrap`` hides from its casts; paged state into its pages.

        The hook is added last, so it wraps what the user's hooks made of the state dict.
        """
        hook = self.register_load_state_dict_pre_hook(wrap)
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        for group in self.param_groups:
            for p in group["params"]:
                update = self._update_of(p)
                if update is not None:
                    self._write(update, p, self.state.pop(p, {}))

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with full tensors; those of paged parameters are copies, page by page.

        Raises PagingError when the model of paged parameters has been closed.
        """
        self._find_paged()
        result = super().state_dict()
        numbers: dict[int, int] = {}
        for group, packed in zip(self.param_groups, result["param_groups"], strict=True):
            numbers.update(zip(map(id, group["params"]), packed["params"], strict=True))
        readers = {update: update.reader() for update in self._paged.values()}
        for group in self.param_groups:
            for p in group["params"]:
                update = self._update_of(p)
                state = _read(readers[update], p) if update is not None else None
                if state:
                    result["state"][numbers[id(p)]] = state
        return result

    def _find_paged(self, closed_too: bool = False) -> None:
        """Take over parameters that were wrapped after the optimizer was made; refuse those of a closed model."""
        if not closed_too and any(hooks.views.closed for hooks in self._paged):
            raise PagingError(
                "the model of this optimizer has been closed, and the optimizer's state went with its pages: take "
                "optimizer.state_dict() before close(), and load it into a new optimizer after"
            )
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                hooks = hooks_of(p)
                if hooks is not None and self._update_of(p) is None and _trainable(hooks, p):
                    self._take_paged(number)
                    break

    def _take_paged(self, number: int) -> None:
        paged: dict[Hooks, list[Tensor]] = {}
        for p in self.param_groups[number]["params"]:
            hooks = hooks_of(p)
            if hooks is not None and self._update_of(p) is None:
                if not _trainable(hooks, p) and p.requires_grad:
                    raise ValueError(
                        f"a parameter of shape {tuple(p.shape)} was frozen when its model was wrapped, so it has no "
                        "pages for gradient and state: set requires_grad before wrapping"
                    )
                if p.requires_grad:
                    self._admit(p)
                if _trainable(hooks, p):
                    paged.setdefault(hooks, []).append(p)
        for hooks, parameters in paged.items():
            update = self._update_for(hooks)
            update.add([piece for p in parameters for piece in pieces_of(p)], number)
            for p in parameters:
                if self.state.get(p):
                    self._write(update, p, self.state.pop(p))  # from updates before it was wrapped

    def _update_of(self, p: Tensor) -> Update | None:
        hooks = hooks_of(p)
        update = self._paged.get(hooks) if hooks is not None else None
        return update if update is not None and id(pieces_of(p)[0]) in update.settings else None

    def _write(self, update: Update, p: Tensor, state: dict[str, Any]) -> None:
        """Give a parameter its state: to each of its tiles, if it is in tiles, the rows of it."""
        pieces, start = pieces_of(p), 0
        for piece in pieces:
            rows = slice(start, start + len(piece)) if len(pieces) > 1 else ...
            update.write(piece, {name: _part(value, p, rows) for name, value in state.items()})
            start += len(piece) if piece.ndim else 0


def _trainable(hooks: Hooks, p: Tensor) -> bool:
    return hooks.home[id(pieces_of(p)[0])][0].trainable


def _part(value: Any, p: Tensor, rows: Any) -> Any:
    return value[rows] if isinstance(value, Tensor) and value.shape == p.shape and rows is not ... else value


def _read(reader: Callable[[Tensor], dict[str, Any]], p: Tensor) -> dict[str, Any]:
    """The state of a parameter; of one in tiles, that of all of them as one."""
    states = [reader(piece) for piece in pieces_of(p)]
    if len(states) == 1:
        return states[0]
    result = {}
    for name in list(states[0]):
        parts = [state.pop(name) for state in states]
        first = parts[0]
        alike = isinstance(first, Tensor) and first.shape[1:] == p.shape[1:] and first.ndim == p.ndim
        result[name] = torch.cat(parts) if alike else first
    return result


@dataclass(frozen=True, slots=True)
class Exact:
    """A tensor of a state dict that torch is to load as it is: it casts tensors to the parameter's dtype and device."""

    tensor: Tensor
