"""Courses: the schedules of one kind of step, which is followed, and what to do when a step departs from it.

Nothing is thrown away whole. A step that was a little different leaves the schedule that is followed in place; one that
is known already is recognised by its prefix, in the middle of the step; and where each step differs (experts that a
router picks, layers that are dropped) what is followed becomes the accesses that most steps have in common.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise

from tiermem.policies.schedule import Access, Cursor, Recorder, Schedule

MAX_KNOWN = 8
"""Schedules that are remembered."""
SETTLING = 3
"""Steps at the beginning whose schedule is followed at once: the first differ, since state comes into being."""
USUAL = 0.5
"""The share of the steps that must have an access for it to be followed, where each step differs."""
FORETOLD = 0.25
"""The share of a step's accesses that a schedule must have foretold to be followed any longer."""
FORGETTING = 0.9
"""What a step that surprised counts, of what the next such one does."""


@dataclass
class _Known:
    schedule: Schedule
    seconds: tuple[float, ...]
    times: int
    """How often a step was exactly this."""


class Course:
    """One kind of step. ``cursor`` stands in the schedule that is followed; None before the first step has ended."""

    def __init__(self) -> None:
        self.cursor: Cursor | None = None
        self.recognised = 0
        """Times that a step was recognised as another schedule's, on the way."""
        self._recorder = Recorder()
        self._clock: list[float] = []
        self._steps = 0
        self._surprises = 0
        self._known: list[_Known] = []  # the latest first
        self._often: dict[
            Access, float
        ] = {}  # in how many of the steps that surprised, older ones counting less
        self._weight = 0.0  # the count of these steps, in the same way

    def __len__(self) -> int:
        """Accesses of the running step so far."""
        return len(self._recorder)

    def access(self, access: Access, pages: Sequence[int], effects: Sequence[int], clock: float) -> bool:
        """``access`` begins, at ``clock`` seconds of computing; whether it was expected.

        After one that was not, the cursor may be another one.
        """
        self._recorder.record(access, pages, effects)
        self._clock.append(clock)
        if self.cursor is None or self.cursor.advance(access):
            return True
        known = self._recognise()
        if known is not None:
            self.recognised += 1
            self._follow(known.schedule, known.seconds, len(self._recorder))
        return False

    def finish(self, clock: float) -> None:
        """The step is over: decide what the next one follows. The cursor then stands at its beginning."""
        schedule = self._recorder.finish()
        times = [*self._clock, clock]
        seconds = tuple(max(0.0, after - before) for before, after in pairwise(times))
        self._recorder, self._clock = Recorder(), []
        if not len(schedule):
            return
        self._steps += 1
        if self.cursor is not None and self.cursor.schedule == schedule:
            if self.cursor.schedule is not schedule:
                self._remember(schedule, seconds)
            self.cursor.restart()
            return
        known = self._remember(schedule, seconds)
        if (
            self.cursor is None
            or self._steps <= SETTLING
            or known.times > 1
            or self._foretold(schedule) < FORETOLD
        ):
            self._follow(known.schedule, known.seconds)
            return
        followed = self.cursor.schedule
        self._count(schedule, followed)
        self._surprises += 1
        # At the 2nd, the 4th, the 8th: less and less often, since a new schedule costs a new plan.
        if self._surprises > 1 and self._surprises & (self._surprises - 1) == 0:
            often = {access for access, weight in self._often.items() if weight >= USUAL * self._weight}
            core = _merge(followed, schedule, often)
            if core != followed:
                took = dict(zip(followed.accesses, self.cursor.seconds, strict=False))
                took.update(zip(schedule.accesses, seconds, strict=True))
                self._follow(core, [took.get(access, 0.0) for access in core.accesses])
                return
        self.cursor.restart()

    def _foretold(self, schedule: Schedule) -> float:
        assert self.cursor is not None
        expected = set(self.cursor.schedule.accesses)
        return sum(access in expected for access in schedule.accesses) / len(schedule)

    def _recognise(self) -> _Known | None:
        """A schedule that has come more than once, and begins as this step did."""
        for known in self._known:
            followed = self.cursor is not None and known.schedule is self.cursor.schedule
            if known.times > 1 and not followed and self._recorder.begins(known.schedule):
                return known
        return None

    def _remember(self, schedule: Schedule, seconds: tuple[float, ...]) -> _Known:
        for index, known in enumerate(self._known):
            if known.schedule == schedule:
                known.times += 1
                self._known.insert(0, self._known.pop(index))
                return known
        known = _Known(schedule, seconds, 1)
        self._known.insert(0, known)
        del self._known[MAX_KNOWN:]
        return known

    def _follow(self, schedule: Schedule, seconds: Sequence[float], position: int = 0) -> None:
        old, self.cursor = self.cursor, Cursor(schedule, seconds)
        self.cursor.position = position
        if old is not None:  # what was counted stays counted
            self.cursor.hits, self.cursor.departures, self.cursor.skipped = (
                old.hits,
                old.departures,
                old.skipped,
            )

    def _count(self, schedule: Schedule, followed: Schedule) -> None:
        seen = set(schedule.accesses)
        self._weight = FORGETTING * self._weight + 1
        for access in seen.union(followed.accesses, self._often):
            self._often[access] = FORGETTING * self._often.get(access, 0.0) + (access in seen)


def _merge(followed: Schedule, latest: Schedule, often: set[Access]) -> Schedule:
    """The accesses of both that most steps have, in an order that agrees with both."""
    recorder = Recorder()

    def take(schedule: Schedule, start: int, stop: int) -> None:
        for position in range(start, stop):
            access = schedule.accesses[position]
            if access in often:
                recorder.record(access, schedule.pages[position], schedule.effects[position])

    matcher = SequenceMatcher(None, followed.accesses, latest.accesses, autojunk=False)
    for what, start, stop, begin, end in matcher.get_opcodes():
        if what != "equal":
            take(followed, start, stop)
        take(latest, begin, end)
    return recorder.finish()
