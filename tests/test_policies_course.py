"""Courses: which schedule is followed, and what a surprise changes."""

from __future__ import annotations

import random
from collections.abc import Iterable

from tiermem.policies import Access, Course, Eviction, Farthest, Phase
from tiermem.policies.conformance import PolicyTests
from tiermem.policies.course import MAX_KNOWN


def step(course: Course, units: Iterable[int]) -> int:
    """One step that uses these units; how many accesses were not expected."""
    surprises = 0
    clock = 0.0
    for unit in units:
        surprises += not course.access(Access(unit, Phase.FORWARD), [unit], [0], clock)
        clock += 1.0
    course.finish(clock)
    return surprises


def followed(course: Course) -> list[int]:
    assert course.cursor is not None
    return [access.unit for access in course.cursor.schedule.accesses]


def settled(units: Iterable[int]) -> Course:
    course, units = Course(), list(units)
    for _ in range(5):
        step(course, units)
    return course


def test_the_first_step_is_followed_and_timed() -> None:
    course = Course()
    assert step(course, [1, 2, 3]) == 0
    assert followed(course) == [1, 2, 3]
    assert course.cursor is not None
    assert list(course.cursor.seconds) == [1.0, 1.0, 1.0]
    assert step(course, [1, 2, 3]) == 0
    assert course.cursor.steps == 1


def test_one_strange_step_changes_nothing() -> None:
    course = settled(range(10))
    before = course.cursor
    assert step(course, [*range(5), 50, *range(5, 10)]) > 0
    assert course.cursor is before
    assert step(course, range(10)) == 0


def test_a_step_that_comes_twice_is_followed_from_then_on() -> None:
    course = settled(range(10))
    step(course, range(8))  # units that are no longer used
    step(course, range(8))
    assert followed(course) == list(range(8))
    assert step(course, range(8)) == 0


def test_what_nothing_foretold_is_followed_at_once() -> None:
    course = settled(range(10))
    step(course, range(20, 30))
    assert followed(course) == list(range(20, 30))


def test_a_known_step_is_recognised_by_its_prefix() -> None:
    training, evaluation = [0, 1, 2, 3, 3, 2, 1, 0], [0, 1, 2, 9, 9, 8, 7, 6]
    course = settled(training)
    step(course, evaluation)
    step(course, evaluation)
    step(course, training)
    assert followed(course) == training
    # It departs once, where the two part, and everything after that was expected.
    assert step(course, evaluation) == 1
    assert course.recognised >= 1
    step(course, training)
    assert step(course, training) == 0


def test_what_is_followed_becomes_what_most_steps_have_in_common() -> None:
    """Eight experts between the layers; a router picks two of them each time."""
    pick = random.Random(0)
    course = Course()
    layers = [0, 1, 2, 3]
    for _ in range(40):
        experts = [
            10 + 10 * layer + expert for layer in layers for expert in sorted(pick.sample(range(8), 2))
        ]
        step(course, [unit for layer in layers for unit in (layer, *experts[2 * layer : 2 * layer + 2])])
    assert [unit for unit in followed(course) if unit < 10] == layers
    assert len(followed(course)) <= len(layers) + 4


def test_dropped_layers_come_back_into_what_is_followed() -> None:
    pick = random.Random(1)
    course = Course()
    step(course, [0, 1, 2, 9])
    for _ in range(40):
        step(course, [unit for unit in range(10) if unit in (0, 9) or pick.random() < 0.9])
    assert set(followed(course)) >= {0, 9}
    assert len(followed(course)) >= 9
    assert followed(course) == sorted(followed(course))


def test_only_so_many_are_remembered() -> None:
    course = settled(range(4))
    for number in range(3 * MAX_KNOWN):
        step(course, [0, 1, 2, 100 + number])
    assert len(course._known) <= MAX_KNOWN
    assert step(course, range(4)) <= 1


def test_an_empty_step_leaves_everything_as_it_was() -> None:
    course = settled(range(4))
    course.finish(0.0)
    assert step(course, range(4)) == 0


class TestFarthest(PolicyTests):
    def make(self) -> Eviction:
        return Farthest()
