"""Requests: what a rank has asked the others for, from the asking to the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter_ns as now
from typing import Any

from tiermem.ranks.exchange import Term


class Request:
    """Something that is decided by all ranks and then carried out by each.

    ``name`` is its name between the ranks; ``run`` what this rank does when it is decided, given the tag and what each
    rank said; or ``term`` what this one gives to a sum. When :attr:`ended` is set, exactly one of these holds:
    ``error`` says why it failed, ``returned`` that it was taken back and nothing has happened, or it has been carried
    out; ``payloads`` then has what each rank said.
    ``began`` and ``finished`` are when bytes moved, in ns of ``perf_counter_ns``.
    """

    __slots__ = (
        "began",
        "decided",
        "ended",
        "error",
        "finished",
        "name",
        "payloads",
        "posted",
        "returned",
        "run",
        "term",
    )

    def __init__(
        self,
        name: str,
        run: Callable[[int, list[Any]], None] | None = None,
        term: Term | None = None,
    ) -> None:
        self.name = name
        self.run = run
        self.term = term
        self.posted = threading.Event()  # the coordinator has been asked
        self.decided = False
        self.ended = threading.Event()
        self.returned = False
        self.error: Exception | None = None
        self.payloads: list[Any] = []
        self.began = 0
        self.finished = 0

    def begin(self) -> None:
        """It is carried out from now on."""
        self.began = now()

    def end(self, error: Exception | None = None) -> None:
        """It has ended, well or badly."""
        if self.ended.is_set():
            return
        self.finished = now()
        self.began = self.began or self.finished
        self.error = error
        self.posted.set()
        self.ended.set()

    def done(self) -> bool:
        """Has it ended, well or badly? Never blocks."""
        return self.ended.is_set()
