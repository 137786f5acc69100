"""The order in which units are used in a step: recorded once, immutable, followed by a cursor.

Positions count the accesses of a step from 0. A position at or past the end of the schedule is in a later
step, because training repeats its steps: position `len(schedule) + 2` is the third access of the next one.
"""

import dataclasses
import enum
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

NEVER = 1 << 62
"""The next use of a page that no access needs: farther than every position."""


class Phase(enum.IntEnum):
    """The part of a step that an access belongs to."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2


class Effect(enum.IntFlag):
    """What an access does to the content of a page that it needs; without a flag it only reads."""

    NONE = 0
    FRESH = 1
    """What was there before isn't needed: the content comes into being, or all of it is written."""
    WRITES = 2
    """It is newer than the copy below from then on."""
    SPENDS = 4
    """It isn't needed any more afterwards."""
    RENEWED = 8
    """It has been changed elsewhere since: a copy that stayed is stale."""


class Access(NamedTuple):
    """One use of a unit in a step. `part` tells apart the pieces in which a phase handles the unit."""

    unit: int
    phase: Phase
    part: int = 0


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A step's accesses in order, and for each the pages that it needs, by number, with its effect on each.

    Two schedules are equal when accesses, pages and effects are. Raises ValueError unless there is one tuple of pages
    for each access, and of effects (ints: combinations of :class:`Effect`) for each page; without any, all only read.
    """

    accesses: tuple[Access, ...] = ()
    pages: tuple[tuple[int, ...], ...] = ()
    effects: tuple[tuple[int, ...], ...] = ()
    _uses: dict[int, list[int]] = dataclasses.field(init=False, repr=False, compare=False)
    _occurrences: dict[Access, list[int]] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.accesses) != len(self.pages):
            raise ValueError(f"{len(self.accesses)} accesses, but pages for {len(self.pages)}")
        if not self.effects:
            object.__setattr__(self, "effects", tuple((0,) * len(pages) for pages in self.pages))
        if [len(pages) for pages in self.pages] != [len(effects) for effects in self.effects]:
            raise ValueError("there must be one effect for each page of each access")
        uses: dict[int, list[int]] = {}
        occurrences: dict[Access, list[int]] = {}
        for position, (access, pages) in enumerate(zip(self.accesses, self.pages, strict=True)):
            occurrences.setdefault(access, []).append(position)
            for page in dict.fromkeys(pages):
                uses.setdefault(page, []).append(position)
        object.__setattr__(self, "_uses", uses)
        object.__setattr__(self, "_occurrences", occurrences)

    def __len__(self) -> int:
        return len(self.accesses)

    def next_use(self, page: int, position: int) -> int:
        """The smallest position, at `position` or after it, at which `page` is needed; NEVER if no access
        needs it."""
        uses = self._uses.get(page)
        if uses is None:
            return NEVER
        step, offset = divmod(position, len(self))
        index = bisect_left(uses, offset)
        if index < len(uses):
            return step * len(self) + uses[index]
        return (step + 1) * len(self) + uses[0]

    def phase(self, position: int) -> Phase:
        """The phase of the access at `position`, which may be in a later step."""
        return self.accesses[position % len(self)].phase

    def find(self, access: Access, position: int) -> int | None:
        """The position of the first `access` at `position` or after it in this step; None if there is
        none."""
        occurrences = self._occurrences.get(access, [])
        index = bisect_left(occurrences, position)
        return occurrences[index] if index < len(occurrences) else None


class Recorder:
    """Collects the accesses of one step as they happen."""

    def __init__(self) -> None:
        self._accesses: list[Access] = []
        self._pages: list[tuple[int, ...]] = []
        self._effects: list[tuple[int, ...]] = []

    def __len__(self) -> int:
        return len(self._accesses)

    def record(self, access: Access, pages: Sequence[int], effects: Sequence[int] = ()) -> None:
        """Append `access`, which needs `pages`, in this order, with its effect on each (default: it only reads).

        A page that is named again counts once, with all its effects.
        """
        if len(set(pages)) < len(pages):
            merged = dict.fromkeys(pages, 0)
            for page, effect in zip(pages, effects or (0,) * len(pages), strict=True):
                merged[page] |= effect
            pages, effects = tuple(merged), tuple(merged.values())
        self._accesses.append(access)
        self._pages.append(tuple(pages))
        self._effects.append(tuple(effects) or (0,) * len(pages))

    def begins(self, schedule: Schedule) -> bool:
        """Are the accesses so far those that `schedule` begins with?"""
        return schedule.accesses[: len(self._accesses)] == tuple(self._accesses)

    def finish(self) -> Schedule:
        """The schedule of what was recorded so far."""
        return Schedule(tuple(self._accesses), tuple(self._pages), tuple(self._effects))


class Cursor:
    """Where in a schedule the running step is.

    `position` is the index of the next expected access, `len(schedule)` when none is left. `steps` counts the
    restarts. Over all steps, `hits` counts the accesses that were the expected ones, `departures` those that
    were not, and `skipped` the expected ones that never came because a departure led past them. `seconds` is what
    each access took when the schedule was recorded, waiting left out; empty when that isn't known.
    """

    def __init__(self, schedule: Schedule, seconds: Sequence[float] = ()) -> None:
        self.schedule = schedule
        self.seconds = seconds
        self.position = 0
        self.steps = 0
        self.hits = 0
        self.departures = 0
        self.skipped = 0
        self._left: int | None = None

    def advance(self, access: Access) -> bool:
        """Move past `access`, which has begun; whether it was the expected one.

        A surprise that occurs later in this step is jumped to, and one that doesn't leaves the cursor in
        place. If what follows a jump is what was expected before it, the surprise was an access too many and
        not a leap: the cursor goes back, so that it costs itself alone.
        """
        accesses = self.schedule.accesses
        if self.position < len(accesses) and accesses[self.position] == access:
            self.hits += 1
            self.position += 1
            self._left = None
            return True
        self.departures += 1
        if self._left is not None and accesses[self._left] == access:
            # The jump was to position - 1, and nothing has been a hit since.
            self.skipped -= self.position - 1 - self._left
            self.position = self._left + 1
            self._left = None
            return False
        found = self.schedule.find(access, self.position)
        if found is not None:
            self.skipped += found - self.position
            self._left = self.position
            self.position = found + 1
        return False

    def restart(self) -> None:
        """Begin a new step at position 0."""
        self.position = 0
        self.steps += 1
        self._left = None
