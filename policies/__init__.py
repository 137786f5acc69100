"""Pure decisions on the order in which pages are used: what to evict, what to prefetch.

No torch, no I/O, no clock: policies see page numbers and the schedule, so that they can be tested and
simulated without either.
"""

from collections.abc import Callable
from contextlib import nullcontext

from tiermem.policies import plugin
from tiermem.policies.base import Eviction, Prefetch
from tiermem.policies.belady import Belady
from tiermem.policies.bound import bound
from tiermem.policies.compiler import Ahead, compile_plan
from tiermem.policies.course import Course
from tiermem.policies.farthest import Farthest
from tiermem.policies.lookahead import Lookahead
from tiermem.policies.lru import LRU
from tiermem.policies.plan import Fetch, Plan
from tiermem.policies.schedule import NEVER, Access, Cursor, Effect, Phase, Recorder, Schedule

__all__ = [
    "LRU",
    "NEVER",
    "Access",
    "Ahead",
    "Belady",
    "Course",
    "Cursor",
    "Effect",
    "Eviction",
    "Farthest",
    "Fetch",
    "Lookahead",
    "Phase",
    "Plan",
    "Prefetch",
    "Recorder",
    "Schedule",
    "bound",
    "compile_plan",
    "eviction",
    "prefetch",
]

_EVICTIONS: dict[str, Callable[[], Eviction]] = {"lru": LRU, "belady": Belady, "plan": Farthest}


def eviction(name: str, undisturbed: plugin.Undisturbed = nullcontext) -> Eviction:
    """A new policy for one tier: "lru", "belady" or, beside a plan, "plan"; or a class of somebody's, "module:Class".

    ``undisturbed``: the contexts in which somebody's class is asked, see `plugin.load`. Raises ValueError for another
    name, or a class that can't be had.
    """
    if ":" in name:
        return plugin.load(name, undisturbed)()
    if name not in _EVICTIONS:
        raise ValueError(f"{name!r} is no eviction policy; there are {', '.join(_EVICTIONS)}")
    return _EVICTIONS[name]()


def prefetch(
    name: str,
    accesses: int | None = None,
    nbytes: int | None = None,
    size: Callable[[int], int] | None = None,
) -> Prefetch | None:
    """A new policy: "lookahead" within the limits that `Lookahead` takes, or None for "none". Raises
    ValueError."""
    if name == "none":
        return None
    if name == "lookahead":
        return Lookahead(accesses, nbytes, size)
    raise ValueError(f"{name!r} is no prefetch policy; there are none, lookahead")
