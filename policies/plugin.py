"""Eviction policies of users: a class named as `module:Class`, which can choose badly and break nothing.

What it says is checked here: pages that aren't resident, or are named twice, are passed over, and those it leaves out
come last. If it raises, least recently used takes its place for the rest of the run. Either is told once, by the name
of the class.
"""

import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from tiermem.policies.base import Eviction
from tiermem.policies.lru import LRU
from tiermem.policies.schedule import NEVER, Cursor

METHODS = ("follow", "used", "admitted", "removed", "order", "next_use")
log = logging.getLogger("tiermem")


def load(name: str) -> Callable[[], Eviction]:
    """The class that `module:Class` names, made safe. Raises ValueError when it can't be had or lacks a method."""
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
    return lambda: Guarded(name, found)


class Guarded:
    """Somebody's policy, with its answers checked."""

    def __init__(self, name: str, make: Callable[[], Eviction]) -> None:
        self.name = name
        self.failed = False
        self._resident = LRU()  # what is really there, and what takes over
        self._told = False
        self._policy: Eviction = self._resident
        try:
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
            try:
                for page in self._policy.order():
                    if page in left:
                        del left[page]
                        yield page
                    else:
                        self._note(
                            f"named page {page!r}, which isn't resident, or named it twice: passed over"
                        )
            except Exception as error:
                self._give_up(error)
            else:
                if left:
                    self._note(
                        f"left out {len(left)} resident pages, page {next(iter(left))} for one: they go last"
                    )
        yield from list(left)

    def next_use(self, page: int) -> int:
        if not self.failed:
            try:
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
