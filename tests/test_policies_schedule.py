"""Recorder, Schedule, Cursor."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.policies import NEVER, Access, Cursor, Phase, Recorder, Schedule
from tiermem.policies.conformance import scan

A, B, C, D = (Access(unit, Phase.FORWARD) for unit in range(4))
X = Access(99, Phase.BACKWARD)


def test_a_recorder_keeps_order_and_names_each_page_once() -> None:
    recorder = Recorder()
    recorder.record(A, [3, 1, 3])
    recorder.record(Access(0, Phase.OPTIMIZER, 2), [])
    assert len(recorder) == 2
    schedule = recorder.finish()
    assert schedule.accesses == (A, Access(0, Phase.OPTIMIZER, 2))
    assert schedule.pages == ((3, 1), ())
    assert len(schedule) == 2
    recorder.record(B, [4])
    assert len(schedule) == 2


def test_schedules_are_values() -> None:
    assert scan((1,), (2,)) == scan((1,), (2,))
    assert hash(scan((1,), (2,))) == hash(scan((1,), (2,)))
    assert scan((1,), (2,)) != scan((1,), (3,))
    assert Schedule((A,), ((1,),)) != Schedule((B,), ((1,),))
    with pytest.raises(dataclasses.FrozenInstanceError):
        scan((1,)).accesses = ()  # type: ignore[misc]
    with pytest.raises(ValueError, match="2 accesses, but pages for 1"):
        Schedule((A, B), ((1,),))


def test_next_use_is_cyclic() -> None:
    schedule = scan((1,), (2,), (1, 3), (4,))
    assert [schedule.next_use(1, position) for position in range(6)] == [0, 2, 2, 4, 4, 6]
    assert schedule.next_use(4, 4) == 7
    assert schedule.next_use(2, 9) == 9
    assert schedule.next_use(5, 0) == NEVER
    assert Schedule().next_use(1, 0) == NEVER
    assert schedule.phase(6) is Phase.FORWARD


@given(
    st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=8),
    st.integers(0, 5),
    st.integers(0, 20),
)
def test_next_use_is_what_a_search_finds(needed: list[tuple[int, ...]], page: int, position: int) -> None:
    schedule = scan(*needed)
    later = range(position, position + len(needed))
    expected = next((each for each in later if page in needed[each % len(needed)]), NEVER)
    assert schedule.next_use(page, position) == expected


def test_find_looks_in_this_step_only() -> None:
    schedule = Schedule((A, B, A), ((), (), ()))
    assert [schedule.find(A, position) for position in range(4)] == [0, 2, 2, None]
    assert schedule.find(X, 0) is None


# Cursor


def cursor() -> Cursor:
    return Cursor(Schedule((A, B, C, D), ((0,), (1,), (2,), (3,))))


def counts(cursor: Cursor) -> tuple[int, int, int, int]:
    return cursor.position, cursor.hits, cursor.departures, cursor.skipped


def test_a_step_as_expected() -> None:
    it = cursor()
    assert [it.advance(access) for access in (A, B, C, D)] == [True] * 4
    assert counts(it) == (4, 4, 0, 0)
    it.restart()
    assert it.advance(A)
    assert counts(it) == (1, 5, 0, 0)
    assert it.steps == 1


def test_accesses_that_are_left_out_are_skipped() -> None:
    it = cursor()
    assert [it.advance(access) for access in (A, D)] == [True, False]
    assert counts(it) == (4, 1, 1, 2)


def test_an_access_that_is_in_no_schedule_costs_itself() -> None:
    it = cursor()
    assert [it.advance(access) for access in (A, X, B, C, D)] == [True, False, True, True, True]
    assert counts(it) == (4, 4, 1, 0)


def test_an_access_from_earlier_costs_itself() -> None:
    it = cursor()
    assert [it.advance(access) for access in (A, B, A, C, D)] == [True, True, False, True, True]
    assert counts(it) == (4, 4, 1, 0)


def test_an_access_too_early_does_not_lose_the_place() -> None:
    it = cursor()
    assert [it.advance(access) for access in (A, D, B, C, D)] == [True, False, False, True, True]
    assert counts(it) == (4, 3, 2, 0)


def test_a_place_is_not_gone_back_to_after_a_hit() -> None:
    it = cursor()
    assert [it.advance(access) for access in (B, C, A)] == [False, True, False]
    assert counts(it) == (3, 1, 2, 1)


def test_nor_in_the_next_step() -> None:
    it = cursor()
    it.advance(B)
    it.restart()
    assert it.advance(X) is False
    assert it.advance(A) is True
    assert counts(it) == (1, 1, 2, 1)


def test_more_than_was_recorded() -> None:
    it = cursor()
    for access in (A, B, C, D):
        it.advance(access)
    assert [it.advance(access) for access in (A, X)] == [False, False]
    assert counts(it) == (4, 4, 2, 0)
    empty = Cursor(Schedule())
    assert empty.advance(A) is False
    assert (empty.position, empty.departures) == (0, 1)


@given(st.lists(st.sampled_from([A, B, C, D, X]), max_size=30))
def test_the_cursor_stays_in_the_step_and_every_access_is_counted(accesses: list[Access]) -> None:
    it = cursor()
    for access in accesses:
        expected = it.position < 4 and it.schedule.accesses[it.position] == access
        assert it.advance(access) is expected
        assert 0 <= it.position <= 4
    assert it.hits + it.departures == len(accesses)
    assert 0 <= it.skipped <= 4
