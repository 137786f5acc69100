"""Steps: each step's schedule is recorded while the last one's is followed, so that the next learns from this one.

A training step ends with the optimizer's. A forward under ``no_grad`` is an inference pass with a schedule of its own;
between two training forwards it leaves the training schedule untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns as now

from tiermem.policies import Access, Course, Cursor, Phase, Schedule
from tiermem.trace import AnyTrace, Event, NullTrace
from tiermem.trace import Phase as TracePhase

MAX_FORWARDS = 8
"""Training forwards in a row without a backward after which they are taken for inference."""


class Steps:
    """What the policies follow.

    ``follow`` is told the cursor to go by, whenever it becomes another one; ``waited`` tells the nanoseconds that have
    been waited for pages so far, which are no computing.
    """

    def __init__(
        self, follow: Callable[[Cursor | None], None], trace: AnyTrace, waited: Callable[[], int] = lambda: 0
    ) -> None:
        self.training = Course()
        self.inference = Course()
        self.number = 0  # training steps completed
        self._follow = follow
        self._waited = waited
        self._trace = trace
        self._now = self.training
        self._forwards = 0
        self._began = 0
        self._told: Schedule | None = None  # which schedule is in the trace

    @property
    def departures(self) -> int:
        """Accesses that no schedule expected, so far."""
        courses = (self.training, self.inference)
        return sum(course.cursor.departures for course in courses if course.cursor is not None)

    @property
    def recognised(self) -> int:
        """Steps that turned out, on the way, to be another known one."""
        return self.training.recognised + self.inference.recognised

    def access(self, access: Access, pages: Sequence[int], effects: Sequence[int] = ()) -> bool:
        """A unit is about to be used, with these effects on its pages; whether that was expected.

        It is recorded, and the cursor moves past it.
        """
        course = self._now
        if course is self.training and access.phase is not Phase.FORWARD:
            self._forwards = 0
        before = course.cursor
        expected = course.access(access, pages, effects, self._clock())
        if not expected:
            self._trace.record(Event.DEPARTURE, now(), 0, access.unit, phase=access.phase)
            if course.cursor is not before:
                self._follow(course.cursor)
        return expected

    def _clock(self) -> float:
        return (now() - self._waited()) / 1e9

    def begin_pass(self, training: bool) -> None:
        """A forward of the whole model begins."""
        if not training:
            self._switch(self.inference)
            return
        self._forwards += 1
        if self._forwards > MAX_FORWARDS:
            # Nobody calls backward: without an end these forwards would be one endless step.
            self.training.finish(self._clock())
            self._forwards = 1
            self._follow(self.training.cursor)
        if not self._began:
            self._began = now()
        self._trace.step = self.number

    def end_pass(self, training: bool) -> None:
        """A forward of the whole model is over."""
        if not training:
            self.inference.finish(self._clock())
            self._switch(self.training)

    def end_step(self) -> None:
        """The optimizer is done: the step is complete."""
        self._now = self.training
        self.training.finish(self._clock())
        self._forwards = 0
        self._follow(self.training.cursor)
        begun = self._began or now()
        self._trace.step = self.number
        self._trace.record(Event.STEP, begun, now() - begun, phase=TracePhase.NONE)
        self._began = now()
        self.number += 1
        self._trace.step = self.number
        if not isinstance(self._trace, NullTrace):
            self._tell()

    def _tell(self) -> None:
        """Write the schedule that the next step follows into the trace, unless it is there."""
        cursor = self.training.cursor
        if cursor is None or cursor.schedule is self._told:
            return
        self._told = schedule = cursor.schedule
        for position, access in enumerate(schedule.accesses):
            for page, effect in zip(schedule.pages[position], schedule.effects[position], strict=True):
                what = position << 4 | effect
                self._trace.record(Event.USE, now(), 0, access.unit, page, what, phase=access.phase)

    def _switch(self, course: Course) -> None:
        self._now = course
        self._follow(course.cursor)
