"""One step seen from each tier: what of its schedule happens on the device, and what that leaves for the host."""

from collections.abc import Collection

from tiermem.policies.plan import Plan
from tiermem.policies.schedule import Effect, Phase, Schedule

HOST_LEAD = 2
"""Accesses before the device needs a page, by which it has to be on the host."""


def on_device(schedule: Schedule, parameters: Collection[int]) -> Schedule:
    """Parameters, in forward and backward; the optimizer changes them on the host, and renews them."""
    changed: set[int] = set()
    pages: list[tuple[int, ...]] = []
    effects: list[tuple[int, ...]] = []
    # Twice, because what the end of a step changed is renewed for the beginning of the next.
    for access, each in 2 * list(zip(schedule.accesses, schedule.pages, strict=True)):
        own: dict[int, int] = {}
        for page in each:
            if page not in parameters:
                continue
            if access.phase is Phase.OPTIMIZER:
                changed.add(page)
            else:
                own[page] = Effect.RENEWED if page in changed else Effect.NONE
                changed.discard(page)
        pages.append(tuple(own))
        effects.append(tuple(own.values()))
    half = len(schedule)
    return Schedule(schedule.accesses, tuple(pages[half:]), tuple(effects[half:]))


def on_host(schedule: Schedule, parameters: Collection[int], above: Plan) -> Schedule:
    """All else, and parameters on their way up, shortly before the device needs them."""
    uses: list[dict[int, int]] = []
    for access, pages, effects in zip(schedule.accesses, schedule.pages, schedule.effects, strict=True):
        on_device = access.phase is not Phase.OPTIMIZER
        uses.append(
            {
                page: effect
                for page, effect in zip(pages, effects, strict=True)
                if not (on_device and page in parameters)
            }
        )
    for index, stay in enumerate(above.stays):
        if not stay.whole:
            before = (stay.start - min(HOST_LEAD, above.leads[index])) % len(schedule)
            uses[before].setdefault(stay.page, Effect.NONE)
    return Schedule(
        schedule.accesses, tuple(tuple(use) for use in uses), tuple(tuple(use.values()) for use in uses)
    )
