"""What every eviction policy must keep to: a test file subclasses PolicyTests and says how to make one."""

import random

import pytest

from tiermem.policies import NEVER, Access, Cursor, Eviction, Phase, Recorder, Schedule
from tiermem.policies.simulate import simulate


def scan(*pages: tuple[int, ...]) -> Schedule:
    """A schedule whose accesses, one unit each, need these pages."""
    recorder = Recorder()
    for unit, needed in enumerate(pages):
        recorder.record(Access(unit, Phase.FORWARD), needed)
    return recorder.finish()


class PolicyTests:
    """Subclass it as `class TestMine(PolicyTests)` and define `make`."""

    def make(self) -> Eviction:
        """A new policy that knows of no page."""
        raise NotImplementedError

    @pytest.fixture
    def policy(self) -> Eviction:
        return self.make()

    def test_nothing_is_resident_at_first(self, policy: Eviction) -> None:
        assert list(policy.order()) == []

    def test_order_is_of_the_resident_pages_each_once(self, policy: Eviction) -> None:
        for page in (3, 1, 2):
            policy.admitted(page)
        policy.used(1)
        assert sorted(policy.order()) == [1, 2, 3]
        policy.removed(3)
        assert sorted(policy.order()) == [1, 2]
        policy.admitted(3)
        assert sorted(policy.order()) == [1, 2, 3]

    def test_admitting_a_resident_page_again_is_a_use(self, policy: Eviction) -> None:
        policy.admitted(1)
        policy.admitted(2)
        policy.admitted(1)
        assert sorted(policy.order()) == [1, 2]
        policy.removed(1)
        assert list(policy.order()) == [2]

    def test_using_a_page_does_not_make_it_resident(self, policy: Eviction) -> None:
        policy.used(7)
        assert list(policy.order()) == []

    def test_removing_what_is_not_resident_does_nothing(self, policy: Eviction) -> None:
        policy.admitted(1)
        policy.removed(2)
        assert list(policy.order()) == [1]

    def test_the_order_is_as_of_the_call(self, policy: Eviction) -> None:
        for page in range(4):
            policy.admitted(page)
        order = policy.order()
        read = [next(order)]
        policy.removed(read[0])
        policy.admitted(9)
        policy.used(2)
        read += order
        assert sorted(read) == [0, 1, 2, 3]

    def test_without_a_schedule_the_least_recently_used_goes_first(self, policy: Eviction) -> None:
        for page in (1, 2, 3):
            policy.admitted(page)
        policy.used(1)
        assert list(policy.order()) == [2, 3, 1]
        assert policy.next_use(1) == NEVER
        policy.follow(Cursor(scan((1,), (2,), (3,))))
        policy.follow(None)
        assert list(policy.order()) == [2, 3, 1]
        assert policy.next_use(1) == NEVER

    def test_an_empty_schedule_is_as_good_as_none(self, policy: Eviction) -> None:
        policy.follow(Cursor(Schedule()))
        policy.admitted(1)
        policy.admitted(2)
        assert list(policy.order()) == [1, 2]
        assert policy.next_use(1) == NEVER

    def test_no_page_is_said_to_be_needed_later_than_it_is(self, policy: Eviction) -> None:
        schedule = scan((1,), (2,), (1,), (3,))
        cursor = Cursor(schedule)
        policy.follow(cursor)
        for access in schedule.accesses:
            for page in (1, 2, 3, 4):
                assert policy.next_use(page) in (NEVER, schedule.next_use(page, cursor.position))
            cursor.advance(access)

    def test_books_are_kept_whatever_happens(self, policy: Eviction) -> None:
        rng = random.Random(0)
        schedule = scan(*[tuple(rng.sample(range(12), 2)) for _ in range(20)])
        cursor = Cursor(schedule)
        policy.follow(cursor)
        resident: set[int] = set()
        for _ in range(1000):
            page = rng.randrange(16)
            match rng.randrange(6):
                case 0:
                    policy.used(page)
                case 1 | 2:
                    policy.admitted(page)
                    resident.add(page)
                case 3:
                    policy.removed(page)
                    resident.discard(page)
                case 4:
                    expected = rng.random() < 0.8 and cursor.position < len(schedule)
                    cursor.advance(schedule.accesses[cursor.position if expected else rng.randrange(20)])
                case 5 if rng.random() < 0.2:
                    cursor.restart()
            order = list(policy.order())
            assert len(order) == len(resident)
            assert set(order) == resident

    def test_what_fits_is_loaded_once(self, policy: Eviction) -> None:
        schedule = scan((0, 1), (2,), (1, 3), (0,))
        assert simulate(schedule, dict.fromkeys(range(4), 10), 40, policy, steps=5) == (4, 40)

    def test_it_makes_room_at_the_smallest_budget(self, policy: Eviction) -> None:
        schedule = scan((0, 1), (2,), (3,))
        sizes = {0: 10, 1: 20, 2: 30, 3: 5}
        assert simulate(schedule, sizes, 30, policy, steps=3) == (3 * 4, 3 * 65)
