"""The bound: nobody moves less, and it is close to what the best whole-page policy moves."""

from __future__ import annotations

import importlib
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_policies_plan import KIB, pages, reads, schedule
from tiermem.policies import Belady, Effect, Schedule, bound, compile_plan, residency
from tiermem.policies.residency import Uses
from tiermem.policies.simulate import simulate

# The package has the function under the module's name.
module = importlib.import_module("tiermem.policies.bound")


def best(steps: Schedule, sizes: dict[int, int], capacity: int) -> int:
    """The fewest bytes of all ways to keep whole pages, by trying all of them."""
    uses = Uses(steps, sizes)
    needed = uses.needed()
    gaps = [
        (page, use)
        for page, each in uses.of.items()
        for use in range(len(each))
        if not uses.after(page, use)[1]
    ]
    least = None
    for number in range(len(gaps) + 1):
        for kept in combinations(gaps, number):
            held = needed.copy()
            for page, use in kept:
                start = uses.of[page][use][0]
                for step in range(1, uses.after(page, use)[0]):
                    held[(start + step) % uses.length] += sizes[page]
            if held.max() <= capacity:
                moved = sum(residency.traffic(residency.stays(uses, set(kept)), sizes))
                least = moved if least is None else min(least, moved)
    assert least is not None
    return least


effects = st.sampled_from([0, 0, Effect.WRITES, Effect.WRITES | Effect.FRESH, Effect.SPENDS, Effect.RENEWED])
few = st.lists(
    st.lists(st.tuples(st.integers(0, 3), effects), min_size=1, max_size=2, unique_by=lambda use: use[0]),
    min_size=1,
    max_size=6,
)


@settings(deadline=None)
@given(few, st.lists(st.integers(1, 5), min_size=4, max_size=4), st.integers(0, 8))
def test_no_policy_on_whole_pages_moves_less(
    uses: list[list[tuple[int, int]]], sizes: list[int], room: int
) -> None:
    steps, nbytes = schedule(*uses), {page: size * KIB for page, size in enumerate(sizes)}
    capacity = max(sum(nbytes[page] for page in each) for each in steps.pages) + room * KIB
    assert bound(steps, nbytes, capacity) <= best(steps, nbytes, capacity)


@settings(deadline=None)
@given(pages, st.lists(st.integers(1, 6), min_size=10, max_size=10), st.integers(0, 40))
def test_no_plan_moves_less(uses: list[list[tuple[int, int]]], units: list[int], room: int) -> None:
    steps, sizes = schedule(*uses), {page: 4 * KIB * nbytes for page, nbytes in enumerate(units)}
    capacity = max(sum(sizes[page] for page in each) for each in steps.pages) + 4 * KIB * room
    assert 0 <= bound(steps, sizes, capacity) <= compile_plan(steps, sizes, capacity).nbytes


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3, unique=True), min_size=1, max_size=20),
    st.integers(3, 8),
)
def test_of_equal_pages_that_are_only_read_it_is_what_belady_loads(
    each: list[list[int]], frames: int
) -> None:
    """MIN is optimal there: over many steps its mean is the bound, but for the steps at both ends."""
    steps, sizes = reads(*each), dict.fromkeys(range(8), 4096)
    cycles = 200
    loaded = simulate(steps, sizes, frames * 4096, Belady(), cycles).nbytes / cycles
    assert bound(steps, sizes, frames * 4096) == pytest.approx(loaded, abs=frames * 4096 * 2 / cycles + 1)


def test_with_few_accesses_counted_it_is_lower_and_not_much(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = [[(page, 0)] for page in range(60)]
    updates = [[(page, Effect.WRITES), (100 + page, Effect.WRITES)] for page in range(60)]
    steps, sizes = schedule(*forward, *updates), dict.fromkeys([*range(60), *range(100, 160)], 4096)
    exact = bound(steps, sizes, 30 * 4096)
    monkeypatch.setattr(module, "MAX_COUNTED", 24)
    assert 0.9 * exact <= bound(steps, sizes, 30 * 4096) <= exact


def test_what_must_be_moved_is_counted() -> None:
    writes, fresh, spent = Effect.WRITES, Effect.WRITES | Effect.FRESH, Effect.SPENDS
    sizes = dict.fromkeys(range(3), 1000)
    scan = schedule([(0, writes)], [(1, writes)], [(2, writes)])
    assert bound(scan, sizes, 3000) == 0
    # One of three always goes, and comes back: Belady on dirty pages, each time loaded and written.
    assert bound(scan, sizes, 2000) == pytest.approx(3000, abs=1)
    assert bound(scan, sizes, 1000) == pytest.approx(6000, abs=1)
    gradients = schedule([(0, fresh)], [(1, fresh)], [(0, spent)], [(1, spent)])
    assert bound(gradients, sizes, 2000) == 0
    assert bound(gradients, sizes, 1000) == pytest.approx(4000, abs=1)
    assert bound(schedule([(0, Effect.RENEWED)]), sizes, 3000) == 1000


def test_stuck_and_fixed_pages() -> None:
    scan = schedule(*[[(page, Effect.WRITES)] for page in range(3)])
    sizes = dict.fromkeys(range(3), 1000)
    assert bound(scan, sizes, 2000, fixed={2}) == 0
    assert bound(scan, sizes, 2000, stuck={2}) == pytest.approx(4000, abs=1)
    with pytest.raises(ValueError, match="stuck exceeds"):
        bound(scan, sizes, 2000, stuck={0, 1, 2})
    with pytest.raises(ValueError, match="needs 1000 bytes at once, of 999"):
        bound(scan, sizes, 999)
