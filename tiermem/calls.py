"""Calls: the forwards that run, of the whole model and of its units, each thread's in the order in which they began.

Python calls no hook for a forward that Ctrl-C broke off. What it entered is left by whoever comes next, and how that
shows is that the call which made it is on no stack any more.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from threading import get_ident
from types import FrameType
from typing import Any, NamedTuple

from tiermem.unit import Group, Unit
from tiermem.views import Views


class Entry(NamedTuple):
    """One forward of a unit: since when, the saved-tensor hooks that it brought, and the call that makes it."""

    unit: Unit
    start: int
    saving: Any
    caller: FrameType

    @property
    def runs(self) -> bool:
        """Is its call on a stack?"""
        return _runs(self.caller)


class Pass:
    """One forward of the whole model: was it a training one, how many units had been entered before it, who calls."""

    def __init__(self, training: bool, depth: int, views: Views, caller: FrameType) -> None:
        self.training = training
        self.depth = depth
        self.caller = caller
        self._views = views
        self._groups: Sequence[Group] = ()
        self._saving: Any = None

    @property
    def runs(self) -> bool:
        """Is its call on a stack?"""
        return _runs(self.caller)

    def begin(self, groups: Sequence[Group]) -> None:
        """Open the resident unit, and have autograd save through us."""
        for group in groups:
            self._views.open(group)
        self._groups = groups
        saving = self._views.saving()
        if saving is not None:
            saving.__enter__()
        self._saving = saving

    def end(self) -> Any:
        """Undo what :meth:`begin` did, as far as it came; returns what ``Views.stop_saving`` is to be told."""
        for group in self._groups:
            self._views.close(group)
        return self._saving


class Stack:
    """One thread's forwards. ``saving``: contexts of forwards that another thread found broken off and left."""

    __slots__ = ("entered", "passes", "saving")

    def __init__(self) -> None:
        self.passes: list[Pass] = []
        self.entered: list[Entry] = []
        self.saving: list[Any] = []

    @property
    def last(self) -> Entry | Pass | None:
        """The forward that began last and has not ended."""
        depth = self.passes[-1].depth if self.passes else 0
        if len(self.entered) > depth:
            return self.entered[-1]
        return self.passes[-1] if self.passes else None

    def __bool__(self) -> bool:
        return bool(self.passes or self.entered or self.saving)


class Calls:
    """The stacks of all threads. Under the door, but for :meth:`wait`."""

    def __init__(self) -> None:
        self._stacks: dict[int, Stack] = {}
        self._idle = threading.Event()

    @property
    def mine(self) -> Stack:
        """This thread's."""
        me = get_ident()
        stack = self._stacks.get(me)
        if stack is None:
            stack = self._stacks[me] = Stack()
        return stack

    @property
    def any_pass(self) -> bool:
        """Does a forward of the whole model run, in any thread?"""
        return any(stack.passes for stack in self._stacks.values())

    @property
    def taken(self) -> bool:
        """Does one run in another thread?"""
        me = get_ident()
        taken = any(stack.passes for thread, stack in self._stacks.items() if thread != me)
        if taken:
            self._idle.clear()
        return taken

    def others(self) -> Iterator[Stack]:
        """The stacks of other threads that have something on them."""
        me = get_ident()
        for thread in list(self._stacks):
            if thread != me:
                stack = self._stacks[thread]
                if stack:
                    yield stack
                else:
                    del self._stacks[thread]

    def passed(self) -> None:
        """A forward of the whole model is over: who waits for its turn looks again."""
        self._idle.set()

    def wait(self) -> None:
        """Until a forward of the whole model ended, or a moment has passed: a broken one doesn't tell."""
        self._idle.wait(0.05)


def _runs(call: FrameType) -> bool:
    """Is this call on the stack of some thread? If not, what it held is let go of."""
    try:
        call.clear()
    except RuntimeError:  # which is what Python refuses an executing frame with
        return True
    return False
