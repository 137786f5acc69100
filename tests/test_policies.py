"""The policies: conformance, victims, prefetch, and the number of loads that they cost."""

import ast
from itertools import combinations
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiermem.policies
from tiermem.config import PolicySection
from tiermem.policies import (
    LRU,
    NEVER,
    Access,
    Belady,
    Cursor,
    Eviction,
    Lookahead,
    Phase,
    Recorder,
    Schedule,
    eviction,
    prefetch,
)
from tiermem.policies.conformance import PolicyTests, scan
from tiermem.policies.simulate import simulate


class TestLRU(PolicyTests):
    def make(self) -> Eviction:
        return LRU()


class TestBelady(PolicyTests):
    def make(self) -> Eviction:
        return Belady()


# Belady's order


def following(schedule: Schedule, *resident: int) -> tuple[Belady, Cursor]:
    policy, cursor = Belady(), Cursor(schedule)
    policy.follow(cursor)
    for page in resident:
        policy.admitted(page)
    return policy, cursor


def test_the_farthest_next_use_goes_first() -> None:
    policy, cursor = following(scan((1,), (2,), (3,), (1,)), 1, 2, 3)
    assert list(policy.order()) == [3, 2, 1]
    cursor.advance(cursor.schedule.accesses[0])  # 1 is next needed at 3
    assert list(policy.order()) == [1, 3, 2]
    cursor.advance(cursor.schedule.accesses[1])  # 2 is next needed in the next step, at 5
    assert list(policy.order()) == [2, 1, 3]
    assert [policy.next_use(page) for page in (1, 2, 3)] == [3, 5, 2]


def test_the_order_goes_on_into_the_next_step() -> None:
    policy, cursor = following(scan((1,), (2,), (3,)), 1, 2, 3)
    for access in cursor.schedule.accesses:
        cursor.advance(access)
    assert list(policy.order()) == [3, 2, 1]
    cursor.restart()
    assert list(policy.order()) == [3, 2, 1]
    cursor.advance(cursor.schedule.accesses[0])
    assert list(policy.order()) == [1, 3, 2]


def test_what_is_in_no_access_goes_before_the_rest_least_recently_used_first() -> None:
    policy, _ = following(scan((1,), (2,)), 8, 1, 9, 2, 7)
    policy.used(8)
    assert list(policy.order()) == [9, 7, 8, 2, 1]


def test_pages_of_one_access_go_least_recently_used_first() -> None:
    policy, cursor = following(scan((0,), (1, 2, 3)), 3, 1, 2)
    policy.used(3)
    assert list(policy.order()) == [1, 2, 3]
    cursor.advance(cursor.schedule.accesses[1])
    assert list(policy.order()) == [1, 2, 3]


def test_a_new_schedule_changes_the_order() -> None:
    policy, _ = following(scan((1,), (2,), (3,)), 1, 2, 3)
    policy.follow(Cursor(scan((3,), (2,), (1,))))
    assert list(policy.order()) == [1, 2, 3]


def test_a_jump_that_is_taken_back_leaves_no_page_with_too_far_a_use() -> None:
    schedule = scan((0,), (1,), (2,), (3,))
    policy, cursor = following(schedule, 1, 2)
    cursor.advance(schedule.accesses[3])  # one access too many: the cursor jumps to the end,
    policy.used(1)  # from where 1 is next needed at 5, after 0 and before 2,
    policy.admitted(3)
    cursor.advance(schedule.accesses[0])  # and goes back, to where it is needed at 1.
    assert cursor.position == 1
    assert list(policy.order()) == [3, 2, 1]


@settings(deadline=None)
@given(
    st.lists(st.sampled_from("ABCDEF"), min_size=1, max_size=12),
    st.lists(st.tuples(st.sampled_from(["admit", "use", "remove", "access", "restart"]), st.integers(0, 7))),
)
def test_the_order_is_by_next_use_whatever_the_cursor_does(units: str, events: list[tuple[str, int]]) -> None:
    needed = ["ABCDEF".index(unit) for unit in units]
    schedule = Schedule(
        tuple(Access(unit, Phase.FORWARD) for unit in needed), tuple((unit, unit // 2) for unit in needed)
    )
    policy, cursor = following(schedule)
    for event, page in events:
        match event:
            case "admit":
                policy.admitted(page)
            case "use":
                policy.used(page)
            case "remove":
                policy.removed(page)
            case "access":
                cursor.advance(Access(page, Phase.FORWARD))
            case "restart":
                cursor.restart()
        if page != 0:  # not always: what happens between two calls must not be missed
            uses = [schedule.next_use(resident, cursor.position) for resident in policy.order()]
            assert uses == sorted(uses, reverse=True)


# Loads


@st.composite
def small_cases(draw: st.DrawFn) -> tuple[Schedule, int]:
    """A schedule of up to 8 accesses of 1 or 2 of 6 pages, and the number of pages that fit."""
    needed = st.lists(st.integers(0, 5), min_size=1, max_size=2, unique=True).map(tuple)
    return scan(*draw(st.lists(needed, min_size=1, max_size=8))), draw(st.integers(2, 5))


def fewest_loads(schedule: Schedule, fitting: int, steps: int) -> int:
    """By trying every choice of victims: the loads that each reachable set of pages has cost at least."""
    costs = {frozenset[int](): 0}
    for pages in schedule.pages * steps:
        after: dict[frozenset[int], int] = {}
        for resident, cost in costs.items():
            others = resident - set(pages)
            kept_at_most = min(len(others), fitting - len(pages))
            loads = cost + len(set(pages) - resident)
            for kept in combinations(sorted(others), kept_at_most):
                state = frozenset(pages).union(kept)
                after[state] = min(after.get(state, loads), loads)
        costs = after
    return min(costs.values())


@settings(max_examples=150, deadline=None)
@given(small_cases(), st.integers(1, 3))
def test_no_choice_of_victims_loads_fewer_equal_pages_than_belady(
    case: tuple[Schedule, int], steps: int
) -> None:
    schedule, fitting = case
    sizes = dict.fromkeys(range(6), 4096)
    belady = simulate(schedule, sizes, fitting * 4096, Belady(), steps)
    lru = simulate(schedule, sizes, fitting * 4096, LRU(), steps)
    assert belady.loads == fewest_loads(schedule, fitting, steps)
    assert belady.loads <= lru.loads
    assert belady.nbytes == belady.loads * 4096


def test_a_cyclic_scan_gives_lru_no_reuse_and_belady_what_fits() -> None:
    schedule = scan(*[(page,) for page in range(10)])
    sizes = dict.fromkeys(range(10), 1)
    steps = 20
    assert simulate(schedule, sizes, 8, LRU(), steps).loads == 10 * steps
    # After the first 10, MIN's rate on a cycle of N pages over M frames: (N - M) / (N - 1) of the accesses.
    assert simulate(schedule, sizes, 8, Belady(), steps).loads == 10 + 190 * 2 // 9


def test_forward_backward_optimizer_in_half_the_memory() -> None:
    recorder = Recorder()
    for unit in range(8):
        recorder.record(Access(unit, Phase.FORWARD), [unit])
    for unit in reversed(range(8)):
        recorder.record(Access(unit, Phase.BACKWARD), [unit])
    for unit in range(8):
        recorder.record(Access(unit, Phase.OPTIMIZER), [unit])
    schedule, sizes = recorder.finish(), dict.fromkeys(range(8), 1)
    lru, belady = (simulate(schedule, sizes, 4, policy, steps=10).loads for policy in (LRU(), Belady()))
    # LRU reuses the 4 pages at each turn, forward to backward and backward to optimizer: 16 of 24 are loads.
    assert (lru, belady) == (16 * 10, 124)


def test_an_access_that_cannot_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="needs 30 bytes at once, of a budget of 29"):
        simulate(scan((0, 1)), {0: 10, 1: 20}, 29, LRU())


# Lookahead


def test_lookahead_wants_what_comes_nearest_first_without_repeats() -> None:
    schedule = scan((1, 2), (3,), (2, 4), (1,))
    policy, cursor = Lookahead(), Cursor(schedule)
    assert list(policy.wanted()) == []
    policy.follow(cursor)
    assert list(policy.wanted()) == [(0, 1), (0, 2), (1, 3), (2, 4)]
    cursor.advance(schedule.accesses[0])
    assert list(policy.wanted()) == [(1, 3), (2, 2), (2, 4), (3, 1)]


def test_lookahead_goes_past_the_end_of_the_step_once_around() -> None:
    schedule = scan((1,), (2,), (3,))
    policy, cursor = Lookahead(), Cursor(schedule)
    policy.follow(cursor)
    for access in schedule.accesses:
        cursor.advance(access)
    assert list(policy.wanted()) == [(3, 1), (4, 2), (5, 3)]
    assert policy.phase(4) is Phase.FORWARD
    policy.follow(None)
    assert list(policy.wanted()) == []


def test_lookahead_ends_at_its_limits() -> None:
    schedule = scan((1,), (1,), (2,), (3,))
    cursor = Cursor(schedule)

    def wanted(**limits: int) -> list[tuple[int, int]]:
        policy = Lookahead(size=lambda page: page * 100, **limits)
        policy.follow(cursor)
        return list(policy.wanted())

    assert wanted(accesses=2) == [(0, 1)]
    assert wanted(accesses=3) == [(0, 1), (2, 2)]
    assert wanted(accesses=9) == [(0, 1), (2, 2), (3, 3)]
    assert wanted(nbytes=599) == [(0, 1), (2, 2)]
    assert wanted(nbytes=600) == [(0, 1), (2, 2), (3, 3)]
    assert wanted(nbytes=99) == []


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"accesses": 0}, "accesses: 0"),
        ({"nbytes": 0}, "nbytes: 0"),
        ({"nbytes": 10}, "10 bytes needs the sizes"),
    ],
)
def test_lookahead_refuses_limits_that_are_none(limits: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lookahead(**limits)


@given(small_cases(), st.integers(0, 30))
def test_lookahead_and_next_use_agree(case: tuple[Schedule, int], advances: int) -> None:
    schedule, _ = case
    cursor = Cursor(schedule)
    for index in range(advances % (len(schedule) + 1)):
        cursor.advance(schedule.accesses[index])
    policy = Lookahead()
    policy.follow(cursor)
    wanted = list(policy.wanted())
    assert wanted == sorted(wanted, key=lambda each: each[0])
    assert {page: position for position, page in wanted} == {
        page: schedule.next_use(page, cursor.position) for pages in schedule.pages for page in pages
    }


# By name


def test_the_names_are_those_of_the_policy_file() -> None:
    fields = PolicySection.model_fields
    for name in get_args(fields["eviction"].annotation):
        assert eviction(name).next_use(0) == NEVER
    assert {name: prefetch(name) is not None for name in get_args(fields["prefetch"].annotation)} == {
        "none": False,
        "lookahead": True,
    }


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="'fifo' is no eviction policy; there are lru, belady"):
        eviction("fifo")
    with pytest.raises(ValueError, match="'all' is no prefetch policy; there are none, lookahead"):
        prefetch("all")


def test_policies_import_nothing_above_them() -> None:
    allowed = {
        "importlib",
        "inspect",
        "contextlib",
        "logging",
        "pytest",
        "random",
        "bisect",
        "collections",
        "dataclasses",
        "difflib",
        "enum",
        "heapq",
        "itertools",
        "numpy",
        "scipy",
        "typing",
    }
    for path in Path(tiermem.policies.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert name.startswith("tiermem.policies") or name.split(".")[0] in allowed, f"{path}: {name}"
