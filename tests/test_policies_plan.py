"""Plans: what they keep, where it lies, and that carrying one out on paper never breaks a rule."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.policies import Access, Ahead, Belady, Effect, Phase, Plan, Schedule, compile_plan
from tiermem.policies.simulate import simulate
from tiermem.policies.timeline import Link, play

KIB = 1024


def schedule(*uses: Sequence[tuple[int, int]]) -> Schedule:
    return Schedule(
        tuple(Access(number, Phase.FORWARD) for number in range(len(uses))),
        tuple(tuple(page for page, _ in each) for each in uses),
        tuple(tuple(effect for _, effect in each) for each in uses),
    )


def reads(*pages: Sequence[int]) -> Schedule:
    return schedule(*[[(page, 0) for page in each] for each in pages])


def carry_out(plan: Plan, steps: Schedule, sizes: dict[int, int], capacity: int) -> None:
    """Every page is where the plan has it when it is needed, and no two lie on the same bytes."""
    for position, pages in enumerate(steps.pages):
        for page in pages:
            index = plan.stay(page, position)
            assert index is not None, f"page {page} isn't there at {position}"
            stay = plan.stays[index]
            assert (position - stay.start) % plan.length < stay.length
        taken = []
        for index, stay in enumerate(plan.stays):
            offset = plan.offsets[index]
            early = (position - stay.start + plan.leads[index]) % plan.length
            if offset is not None and (stay.whole or early < plan.leads[index] + stay.length):
                taken.append((offset, offset + sizes[stay.page]))
        taken.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(taken)), (
            position,
            taken,
        )
        assert not taken or taken[-1][1] <= capacity


pages = st.lists(
    st.lists(
        st.tuples(
            st.integers(0, 9),
            st.sampled_from([0, Effect.WRITES, Effect.WRITES | Effect.FRESH, Effect.SPENDS]),
        ),
        min_size=1,
        max_size=3,
        unique_by=lambda use: use[0],
    ),
    min_size=1,
    max_size=24,
)


@given(pages, st.lists(st.integers(1, 6), min_size=10, max_size=10), st.integers(0, 40))
def test_a_plan_holds_what_is_needed_and_nothing_twice(
    uses: list[list[tuple[int, int]]], units: list[int], room: int
) -> None:
    steps = schedule(*uses)
    sizes = {page: 4 * KIB * nbytes for page, nbytes in enumerate(units)}
    least = max(sum(sizes[page] for page in each) for each in steps.pages)
    capacity = least + 4 * KIB * room
    plan = compile_plan(steps, sizes, capacity)
    # What found no place (None) is found one when it is needed; everything else lies where it may.
    carry_out(plan, steps, sizes, capacity)
    if capacity >= sum(sizes[page] for page in {page for each in steps.pages for page in each}):
        assert plan.loaded == 0 or any(effect & Effect.FRESH for each in steps.effects for effect in each)
    timeline = play(plan, sizes, [1e-3] * len(steps), Link(1e9, 1e9))
    assert timeline.step >= timeline.compute * (1 - 1e-9)


@given(
    st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3, unique=True), min_size=1, max_size=20),
    st.integers(3, 8),
)
def test_of_equal_pages_that_are_only_read_a_plan_loads_as_few_as_belady(
    each: list[list[int]], frames: int
) -> None:
    """MIN is optimal there; a cyclic plan may be at most as good as it, and is within its closing of the cycle."""
    steps = reads(*each)
    sizes = dict.fromkeys(range(8), 4096)
    plan = compile_plan(steps, sizes, frames * 4096, ahead=Ahead(accesses=0))
    cycles = 24
    fewest = simulate(steps, sizes, frames * 4096, Belady(), cycles).nbytes
    assert plan.loaded * cycles >= fewest - frames * 4096 * 2
    lru_like = sum(len(pages) for pages in steps.pages) * 4096
    assert plan.loaded <= lru_like


def test_the_scan_of_a_model_keeps_what_fits_and_streams_the_rest() -> None:
    order = [*range(8), *reversed(range(8))]
    steps = reads(*[[page] for page in order])
    sizes = dict.fromkeys(range(8), 64 * KIB)
    plan = compile_plan(steps, sizes, 5 * 64 * KIB, seconds=[0.01] * 16)
    everything = compile_plan(steps, sizes, 8 * 64 * KIB, seconds=[0.01] * 16)
    assert everything.loaded == everything.written == 0
    assert all(stay.whole for stay in everything.stays)
    # 3 of 8 don't fit, and are loaded about once on the way there and once on the way back.
    assert 3 * 64 * KIB <= plan.loaded <= 8 * 64 * KIB
    assert plan.written == 0


def test_a_large_page_stays_where_small_ones_could_not_make_up_for_it() -> None:
    # An embedding that the head uses too: used first and last. By Belady's rule it goes first, and comes again.
    steps = reads([0], *[[page] for page in range(1, 13)], [0])
    sizes = dict.fromkeys(range(13), 4 * KIB) | {0: 24 * KIB}
    plan = compile_plan(steps, sizes, 36 * KIB)
    carry_out(plan, steps, sizes, 36 * KIB)
    assert any(stay.page == 0 and stay.whole for stay in plan.stays)
    # Beside it there is room for three, of which one or two are for those that come and go.
    assert plan.loaded <= 11 * 4 * KIB


def test_clean_pages_are_never_written_and_dirty_ones_once() -> None:
    steps = schedule(*[[(page, Effect.WRITES if page % 2 else Effect.NONE)] for page in range(6)])
    sizes = dict.fromkeys(range(6), 4096)
    plan = compile_plan(steps, sizes, 2 * 4096)
    written = [page for each in plan.writes for page in each]
    assert set(written) <= {1, 3, 5}
    assert len(written) == len(set(written))
    assert plan.written == 4096 * len(written)


def test_what_comes_into_being_is_not_loaded_and_what_is_spent_is_not_written() -> None:
    fresh, spent = Effect.FRESH | Effect.WRITES, Effect.SPENDS
    steps = schedule([(0, fresh)], [(1, fresh)], [(2, fresh)], [(0, spent)], [(1, spent)], [(2, spent)])
    sizes = dict.fromkeys(range(3), 4096)
    plan = compile_plan(steps, sizes, 3 * 4096)
    assert (plan.loaded, plan.written) == (0, 0)
    tight = compile_plan(steps, sizes, 2 * 4096)
    assert tight.loaded == tight.written == 4096


def test_a_page_changed_elsewhere_is_loaded_again_though_there_is_room() -> None:
    steps = schedule([(0, Effect.RENEWED)], [(0, Effect.NONE)])
    plan = compile_plan(steps, {0: 4096}, 8 * 4096)
    assert plan.loaded == 4096
    assert plan.written == 0


def test_stuck_pages_stay_and_fixed_ones_are_none_of_its_business() -> None:
    steps = schedule(*[[(page, Effect.WRITES)] for page in range(6)])
    sizes = dict.fromkeys(range(6), 4096)
    plan = compile_plan(steps, sizes, 3 * 4096, stuck={4, 5}, fixed={0})
    assert {stay.page for stay in plan.stays if stay.whole} >= {4, 5}
    assert 0 not in {stay.page for stay in plan.stays}


def test_an_access_that_needs_more_than_there_is_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 12288 bytes at once, of 8192"):
        compile_plan(reads([0, 1, 2]), dict.fromkeys(range(3), 4096), 8192)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_no_page_is_fetched_more_accesses_ahead_than_allowed(most: int) -> None:
    steps = reads(*[[page] for page in range(12)])
    plan = compile_plan(steps, dict.fromkeys(range(12), 4096), 8 * 4096, ahead=Ahead(accesses=most))
    moving = [lead for lead, stay in zip(plan.leads, plan.stays, strict=True) if not stay.whole]
    assert moving
    assert max(moving) <= most


def test_no_more_bytes_are_fetched_ahead_than_allowed() -> None:
    steps = reads(*[[page] for page in range(12)])
    plan = compile_plan(steps, dict.fromkeys(range(12), 4096), 8 * 4096, ahead=Ahead(nbytes=2 * 4096))
    moving = [(stay, lead) for stay, lead in zip(plan.stays, plan.leads, strict=True) if not stay.whole]
    assert any(lead for _, lead in moving)
    for position in range(12):
        on_the_way = [stay for stay, lead in moving if 0 < (stay.start - position) % 12 <= lead]
        assert len(on_the_way) <= 2, position


def test_more_room_for_what_is_on_its_way_is_bought_where_it_shortens_the_step() -> None:
    """Compute and disk take equally long: a plan without slack would wait for every page."""
    steps = reads(*[[page] for page in range(64)])
    sizes = dict.fromkeys(range(64), 1 << 20)
    seconds = [(1 << 20) / 1e9] * 64
    plan = compile_plan(steps, sizes, 16 << 20, seconds=seconds, link=Link(1e9, 1e9))
    timeline = play(plan, sizes, seconds, Link(1e9, 1e9))
    assert timeline.step < 1.1 * timeline.compute
    leads = [lead for lead, stay in zip(plan.leads, plan.stays, strict=True) if not stay.whole]
    assert sum(lead == 0 for lead in leads) < len(leads) / 8
