"""What a policy costs: pages loaded into one tier over repeated steps, counted and not carried out."""

from collections.abc import Mapping
from typing import NamedTuple

from tiermem.policies.base import Eviction
from tiermem.policies.schedule import Cursor, Schedule


class Counts(NamedTuple):
    """Pages brought into the tier, and their bytes, over all steps."""

    loads: int
    nbytes: int


def simulate(
    schedule: Schedule, sizes: Mapping[int, int], budget: int, eviction: Eviction, steps: int = 1
) -> Counts:
    """Run `schedule` `steps` times on a tier of `budget` bytes that is empty at first.

    Every access has all its pages resident at once; each page that is not is loaded when it is needed, after
    as many victims as its bytes take, in the order of `eviction` (a new one, which is told the schedule from
    the start). `sizes` gives each page's bytes. Raises ValueError for an access whose pages exceed the
    budget.
    """
    cursor = Cursor(schedule)
    eviction.follow(cursor)
    resident: set[int] = set()
    free = budget
    loads = nbytes = 0
    for _ in range(steps):
        for access, pages in zip(schedule.accesses, schedule.pages, strict=True):
            needed = sum(sizes[page] for page in set(pages))
            if needed > budget:
                raise ValueError(f"{access} needs {needed} bytes at once, of a budget of {budget}")
            cursor.advance(access)
            for page in pages:
                eviction.used(page)
            for page in pages:
                if page in resident:
                    continue
                for victim in eviction.order():
                    if free >= sizes[page]:
                        break
                    if victim not in pages:
                        resident.remove(victim)
                        eviction.removed(victim)
                        free += sizes[victim]
                resident.add(page)
                eviction.admitted(page)
                free -= sizes[page]
                loads += 1
                nbytes += sizes[page]
        cursor.restart()
    return Counts(loads, nbytes)
