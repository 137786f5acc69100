"""Eviction policies of users: a class named as `module:Class`, which can choose badly and break nothing.

What it says is checked here: pages that aren't resident, or are named twice, are passed over, and those it leaves out
come last. If it raises, or names nothing else for long, least recently used takes its place for the rest of the run.
Either is told once, by the name of the class. What it draws from random number generators, training doesn't notice.
"""

import importlib
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

from tiermem.policies.base import Eviction
from tiermem.policies.lru import LRU
from tiermem.policies.schedule import NEVER, Cursor

MAX_STRANGERS = 1000
"""Answers in one order that name no page to go, beyond one for each that is resident, from where it is given up."""
METHODS = ("follow", "used", "admitted", "removed", "order", "next_use")
AT_A_TIME = 64
"""Answers that are asked for at once."""
Undisturbed = Callable[[], AbstractContextManager[None]]
log = logging.getLogger("tiermem")


def load(name: str, undisturbed: Undisturbed = nullcontext) -> Callable[[], Eviction]:
    """The class that `module:Class` names, made safe. Raises ValueError when it can't be had or lacks a method.

    ``undisturbed`` makes the contexts in which it is asked: what it changes of the process is put back after them.
    """
    module, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name!r}: {error}") from error
    missing = [method for method in METHODS if not callable(getattr(found, method, None))]
    if missing:
        raise ValueError(f"{name!r} lacks {', '.join(missing)}: see tiermem.policies.Eviction")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise ValueError(f"{name!r} can't be made without arguments: {error}") from error
    except ValueError:
        pass  # a class of C, which doesn't tell
    return lambda: Guarded(name, found, undisturbed)


class Guarded:
    """Somebody's policy, with its answers checked."""

    def __init__(
        self, name: str, make: Callable[[], Eviction], undisturbed: Undisturbed = nullcontext
    ) -> None:
        self.name = name
        self._undisturbed = undisturbed
        self.failed = False
        self._resident = LRU()  # what is really there, and what takes over
        self._told = False
        self._policy: Eviction = self._resident
        try:
            with undisturbed():
                self._policy = make()
        except Exception as error:
            self._give_up(error)

    def follow(self, cursor: Cursor | None) -> None:
        self._tell(lambda policy: policy.follow(cursor))

    def used(self, page: int) -> None:
        self._resident.used(page)
        self._tell(lambda policy: policy.used(page))

    def admitted(self, page: int) -> None:
        self._resident.admitted(page)
        self._tell(lambda policy: policy.admitted(page))

    def removed(self, page: int) -> None:
        self._resident.removed(page)
        self._tell(lambda policy: policy.removed(page))

    def order(self) -> Iterator[int]:
        left = dict.fromkeys(self._resident.order())
        if not self.failed:
            strangers = len(left) + MAX_STRANGERS
            try:
                for page in self._answers():
                    if isinstance(page, int) and page in left:
                        del left[page]
                        yield page
                        continue
                    self._note(f"named page {page!r}, which isn't resident, or named it twice: passed over")
                    strangers -= 1
                    if not strangers:
                        raise ValueError(
                            "its order names nothing but pages that aren't resident, or named already"
                        )
            except Exception as error:
                self._give_up(error)
            else:
                if left:
                    self._note(
                        f"left out {len(left)} resident pages, page {next(iter(left))} for one: they go last"
                    )
        yield from list(left)

    def _answers(self) -> Iterator[object]:
        """The policy's own order, some at a time: whatever it changes of the process is put back after each time."""
        with self._undisturbed():
            order = iter(self._policy.order())
        while True:
            with self._undisturbed():
                some = list(islice(order, AT_A_TIME))
            yield from some
            if len(some) < AT_A_TIME:
                return

    def next_use(self, page: int) -> int:
        if not self.failed:
            try:
                with self._undisturbed():
                    position: object = self._policy.next_use(page)
                if isinstance(position, int):
                    return position
                self._note(
                    f"gave {position!r} as the next use of page {page}, which is no position: taken for never"
                )
            except Exception as error:
                self._give_up(error)
        return NEVER

    def _tell(self, what: Callable[[Eviction], None]) -> None:
        if self.failed:
            return
        try:
            with self._undisturbed():
                what(self._policy)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.failed = True
        log.warning(
            "the eviction policy %s raised %s: %s; least recently used takes its place",
            self.name,
            type(error).__name__,
            error,
        )

    def _note(self, what: str) -> None:
        if not self._told:
            self._told = True
            log.warning("the eviction policy %s %s", self.name, what)
