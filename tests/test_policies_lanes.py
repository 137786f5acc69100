"""Places for very many stays: the same promises as for few, and quickly."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.test_policies_plan import KIB, carry_out, pages, reads, schedule
from tiermem.policies import compile_plan, compiler


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_TRIED", 0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(pages, st.lists(st.integers(1, 6), min_size=10, max_size=10), st.integers(0, 40))
@pytest.mark.usefixtures("lanes")
def test_no_two_lie_on_the_same_bytes(uses: list[list[tuple[int, int]]], units: list[int], room: int) -> None:
    steps, sizes = schedule(*uses), {page: 4 * KIB * nbytes for page, nbytes in enumerate(units)}
    capacity = max(sum(sizes[page] for page in each) for each in steps.pages) + 4 * KIB * room
    carry_out(compile_plan(steps, sizes, capacity), steps, sizes, capacity)


@pytest.mark.usefixtures("lanes")
def test_equal_pages_of_a_model_all_find_a_place() -> None:
    steps = reads(*[[page] for page in (*range(50), *reversed(range(50)))])
    sizes = dict.fromkeys(range(50), 4096)
    plan = compile_plan(steps, sizes, 20 * 4096)
    assert all(offset is not None for offset in plan.offsets)
    assert sum(lead > 0 for lead in plan.leads) > len(plan.leads) * 0.9
