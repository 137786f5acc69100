"""Registered objects: what a loop has beside model and optimizer, and wants back after a resume.

Anything with ``state_dict`` and ``load_state_dict``. Some of it changes between the optimizer's step and the next
forward (a scheduler's ``step``, a loss scaler's ``update``): that is *late*, and belongs to the step before.
"""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tiermem.errors import ConfigError, PagingError

LATE = {torch.optim.lr_scheduler.LRScheduler: "step", torch.amp.GradScaler: "update"}
"""Known kinds of late objects, and the method after which they are up to date."""


class Registered:
    """The registered objects of one model, by name."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}
        self._late: set[str] = set()
        self._awaited: set[str] = set()  # late ones that haven't changed since the step
        self._resumed: dict[str, Any] = {}  # states of what hasn't been registered yet
        self._classes: dict[str, type] = {}  # as objects had them before they were watched

    def resume(self, states: dict[str, Any]) -> None:
        """These are the states of a commit: they are loaded as objects are registered."""
        self._resumed = dict(states)

    @property
    def missing(self) -> list[str]:
        """Names that the resumed commit has and that haven't been registered."""
        return list(self._resumed)

    def add(self, name: str, each: Any, late: bool | None, ready: Callable[[], None]) -> None:
        """Register an object, and load its state if a commit has it; ``ready`` is called when the last late one is.

        Raises ConfigError when it can't be.
        """
        if not name or name in self._objects:
            raise ConfigError(
                f"register: the name {name!r} is {'taken' if name else 'empty'}: give each object its own"
            )
        missing = [
            method
            for method in ("state_dict", "load_state_dict")
            if not callable(getattr(each, method, None))
        ]
        if missing:
            raise ConfigError(
                f"register: {name!r} is a {type(each).__name__}, which has no {' and no '.join(missing)}"
            )
        if name in self._resumed:
            each.load_state_dict(self._resumed[name])
            del self._resumed[name]
        self.prove({name: each.state_dict()})
        self._objects[name] = each
        method = next((method for kind, method in LATE.items() if isinstance(each, kind)), None)
        if late if late is not None else method is not None:
            self._late.add(name)
        if name in self._late and method is not None:
            self._classes[name] = type(each)
            self._watch(name, each, method, ready)

    def remove(self, name: str) -> None:
        """Forget an object, or the state of one that was committed and is not wanted any more."""
        if name not in self._objects and name not in self._resumed:
            raise ConfigError(
                f"unregister: there is no {name!r}; there are {[*self._objects, *self._resumed]}"
            )
        self._resumed.pop(name, None)
        each = self._objects.pop(name, None)
        if (cls := self._classes.pop(name, None)) is not None:
            each.__class__ = cls
        self._late.discard(name)
        self._awaited.discard(name)

    def _watch(self, name: str, each: Any, method: str, ready: Callable[[], None]) -> None:
        """Notice calls of a method, by a class of the object's own: an attribute would end up in its state."""
        cls, me = type(each), weakref.ref(self)

        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = getattr(super(kind, self), method)(*args, **kwargs)
            registered = me()
            if registered is not None and name in registered._awaited:
                registered._awaited.discard(name)
                if not registered._awaited:
                    ready()
            return result

        kind: Any = type(cls.__name__, (cls,), {method: watched, "__module__": cls.__module__})
        each.__class__ = kind

    def begin(self) -> tuple[dict[str, Any], bool]:
        """A step is over: the states of what isn't late, as they are now, and whether late ones are waited for."""
        self._awaited = set(self._late)
        states = {name: each.state_dict() for name, each in self._objects.items() if name not in self._late}
        return states, bool(self._awaited)

    def end(self) -> dict[str, Any]:
        """The states of the late ones."""
        self._awaited.clear()
        return {name: self._objects[name].state_dict() for name in self._late}

    def prove(self, states: dict[str, Any]) -> None:
        """See that states can be read again. Raises PagingError for one that can't."""
        for name, state in states.items():
            if (reason := _reason(state)) is not None:
                raise PagingError(
                    f"the state of {name!r} can't be committed: only tensors, numbers, strings and nests of them can "
                    f"be read again without running code that is in a file ({reason})"
                )

    def close(self) -> None:
        """Objects are as they were."""
        for name in list(self._objects):
            self.remove(name)


def _reason(state: Any) -> str | None:
    """Why a state can't be read again, if it can't."""
    try:
        unpack(pack(state))
    except Exception as error:  # pickle raises whatever it likes
        return f"{type(error).__name__}: {error}"
    return None


def pack(state: Any) -> bytes:
    """A nest of tensors and plain data as bytes."""
    out = io.BytesIO()
    torch.save(state, out)
    return out.getvalue()


def unpack(data: bytes) -> Any:
    """What :func:`pack` was given; nothing in it is run."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def tensors_of(buffers: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Copies of named tensors, on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in buffers}
