"""What a policy is: it chooses, by page numbers and the schedule, and moves nothing.

Whoever moves pages tells the policy what happened and asks it what should. A policy is never told of sizes,
states or pins: the caller passes over what it can't take, and a poor choice costs time only.
"""

from collections.abc import Iterator
from typing import Protocol

from tiermem.policies.schedule import Cursor, Phase


class Eviction(Protocol):
    """Which of the pages that are resident on one tier should make room."""

    def follow(self, cursor: Cursor | None) -> None:
        """From now on go by `cursor` and its schedule; by None when there is no schedule."""

    def used(self, page: int) -> None:
        """`page` is needed by the access that has just begun, whether it is resident or not."""

    def admitted(self, page: int) -> None:
        """`page` has become resident on the tier; again for one that is, it counts as used."""

    def removed(self, page: int) -> None:
        """`page` is no longer resident on the tier; for one that was not, nothing happens."""

    def order(self) -> Iterator[int]:
        """The resident pages, each once, best victim first, as of this call.

        Pages may be admitted, used and removed while it is read; it may leave out those that have been since.
        """

    def next_use(self, page: int) -> int:
        """The position at which `page` is needed next, by the cursor's schedule; NEVER if that is not
        known."""


class Prefetch(Protocol):
    """Which pages should be moved up before they are needed."""

    def follow(self, cursor: Cursor | None) -> None:
        """From now on go by `cursor` and its schedule; by None when there is no schedule."""

    def wanted(self) -> Iterator[tuple[int, int]]:
        """(position, page) for the pages needed ahead of the cursor, nearest first, each page once.

        Resident ones are among them: the window says what should be resident. A position past the end of the
        schedule is in the next step.
        """

    def phase(self, position: int) -> Phase:
        """The phase of the access at a `position` that `wanted` gave."""
