"""Meetings: steps that all ranks take together, of which none counts unless every rank has taken it."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from tiermem.errors import CheckpointError
from tiermem.ranks import Ranks


class Meeting:
    """A context for one step after another. At the end of each, ranks tell each other how it went.

    If it failed on one, it raises there what it raised, and CheckpointError with that error's text on all others.
    ``fact``: what this rank has to tell (JSON); ``facts``: what they told at the end of the last step, by rank. A
    process that is alone (``ranks`` is None) tells itself. Raises RanksError when a rank has ended.
    """

    def __init__(self, ranks: Ranks | None, what: str) -> None:
        self.rank = 0 if ranks is None else ranks.rank
        self.fact: Any = None
        self.facts: list[Any] = []
        self._ranks = ranks
        self._what = what

    def __enter__(self) -> None:
        self.fact = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ranks is None:
            self.facts = [self.fact]
            return
        if error is not None and not isinstance(error, Exception):
            return  # Ctrl-C: this rank goes, and the others hear of that
        failure = None if error is None else f"{type(error).__name__}: {error}"
        said = self._ranks.meet("checkpoint", {"fact": self.fact, "failure": failure}, reason=self._what)
        self.facts = [each["fact"] for each in said]
        failed = next((rank for rank, each in enumerate(said) if each["failure"] is not None), None)
        if error is None and failed is not None:
            raise CheckpointError(
                f"{self._what}: rank {failed} could not do its part: {said[failed]['failure']}"
            )
