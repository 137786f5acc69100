"""The words of a trace: what can happen to a page, where, why, and in which phase.

The numbers are the file format: they are never renumbered, new ones are added at the end.

Which events there are, and who fills which fields. ``now`` is an instant (duration 0), ``span`` has a
duration. Times are nanoseconds of ``time.perf_counter_ns()`` (CLOCK_MONOTONIC). A field that is not named
is left at its default. ``phase`` goes with every event that happens in one; the step comes from
``Trace.step``.

=========== ===== ======================================================================================
event       time  meaning and fields
=========== ===== ======================================================================================
RESERVE     now   A frame of tier ``target`` was given to ``page``: ``nbytes`` count against that tier's
                  budget from here on, journeys included. ``unit``, ``reason``: CREATE, DEMAND, LOOKAHEAD,
                  WRITEBACK (a frame below for a page on its way down), STATE.
RELEASE     now   The frame of ``page`` in tier ``source`` was given back: ``nbytes`` no longer count.
                  Every RELEASE answers one RESERVE of the same page, tier and size. ``unit``, ``reason``:
                  that of the EVICT which led to it; NONE where the content left for another tier; CLOSE.
HIT         now   ``unit`` asked for ``page`` and it was resident: nobody waited. ``nbytes``, ``target``
                  (the tier it was needed in).
FAULT       now   ``unit`` asked for ``page`` and it was not resident. ``nbytes``, ``source`` (the tier it
                  was found in), ``target``, ``reason``: NOT_PREFETCHED or PREFETCHED_LATE. Every request
                  of a unit for a page is exactly one HIT or one FAULT.
PREFETCH    now   The movement of ``page`` was begun before it was needed. ``unit``, ``nbytes``,
                  ``source``, ``target``, ``reason``: LOOKAHEAD.
LANDED      span  A transfer upward arrived: ``start`` is its submission, the end its landing. ``unit``,
                  ``page``, ``nbytes`` (bytes that crossed the link), ``source``, ``target``, ``reason``:
                  DEMAND, LOOKAHEAD or STATE. A way over two links (disk, host, device) is two transfers.
                  With ``source`` NONE nothing crossed a link: the content came into being in that frame
                  (a first fill, a gradient produced, a moment zeroed; ``reason`` CREATE).
EVICT       now   The policy chose ``page`` to leave tier ``source``. ``unit``, ``nbytes``, ``target`` (the
                  tier it lives on in; NONE where the content is no longer needed), ``reason``: LRU,
                  BELADY, PLAN, DISCARD, CLOSE. A dirty page's WRITEBACK follows, then its RELEASE.
WRITEBACK   span  A transfer downward arrived, the page is clean. Fields as LANDED; ``reason``: that of
                  the EVICT that needed it, or CLEAN (written ahead of need), STATE, CLOSE.
FAILED      span  A transfer did not arrive. Fields as LANDED; ``reason``: IO_ERROR, NO_SPACE, SHORT.
COMPUTE     span  ``unit`` computed on the device: forward or backward by ``phase``. On CUDA the span is
                  the device's, taken from events.
OPTIMIZER   span  The optimizer's arithmetic on ``page`` (its parameter page) of ``unit``; spans of
                  several threads may overlap. ``nbytes``: all bytes read and written by it.
STALL       span  A caller waited. ``unit`` and ``page`` it waited for (the last to arrive), ``nbytes``,
                  ``source`` and ``target`` (the link waited for; NONE where it was none), ``reason``:
                  NOT_PREFETCHED, PREFETCHED_LATE, NO_FRAME, DISK_BUSY, COLLECTIVE, UPDATE, DEPARTED. One record a
                  wait; waits of one thread do not overlap.
COLLECTIVE  span  An exchange between ranks. ``unit``, ``page``, ``nbytes`` (of the whole page),
                  ``reason``: GATHER, SCATTER, REDUCE, BROADCAST.
STEP        span  One optimizer step, from the end of the one before to its own; the record's step is its
                  number. Written last in the step.
DEPARTURE   now   ``unit`` was used out of the schedule's order; only it pays for that.
USE         now   One use of ``page`` in the schedule that is followed from here on: a row of them, in its
                  order, is written at the end of the first step, and whenever another is followed. ``unit``,
                  ``nbytes``: 16 times the number of the access within the step, plus what it does to the page
                  (``tiermem.policies.Effect``).
PAGE        now   ``page`` of ``unit``, which the header doesn't list, came into being: ``nbytes`` of the state of
                  an optimizer that isn't tiermem's.
=========== ===== ======================================================================================

With the cpu as the device, the device and host tiers are one: it is called HOST, and DEVICE does not occur.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


class Event(enum.IntEnum):
    """What happened; the table is in the module's docstring. 0 in a file means: nothing written here."""

    RESERVE = 1
    RELEASE = 2
    HIT = 3
    FAULT = 4
    PREFETCH = 5
    LANDED = 6
    EVICT = 7
    WRITEBACK = 8
    FAILED = 9
    COMPUTE = 10
    OPTIMIZER = 11
    STALL = 12
    COLLECTIVE = 13
    STEP = 14
    DEPARTURE = 15
    USE = 16
    PAGE = 17


class Tier(enum.IntEnum):
    """A kind of memory; a smaller number is nearer to the arithmetic."""

    NONE = 0
    DEVICE = 1
    HOST = 2
    DISK = 3


class Phase(enum.IntEnum):
    """The part of a step; the first three are the numbers of ``tiermem.policies.schedule.Phase``."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2
    NONE = 3


class Reason(enum.IntEnum):
    """Why an event happened; for a COLLECTIVE, which one it was; for FAILED, how. Words in `REASON_WORDS`."""

    NONE = 0
    NOT_PREFETCHED = 1
    PREFETCHED_LATE = 2
    NO_FRAME = 3
    DISK_BUSY = 4
    COLLECTIVE = 5
    UPDATE = 6
    DEPARTED = 7
    LRU = 10
    BELADY = 11
    PLAN = 12
    DISCARD = 13
    CLOSE = 14
    DEMAND = 20
    LOOKAHEAD = 21
    CREATE = 22
    CLEAN = 23
    WRITEBACK = 24
    STATE = 25
    PLUGIN = 26
    GATHER = 30
    SCATTER = 31
    REDUCE = 32
    BROADCAST = 33
    IO_ERROR = 40
    NO_SPACE = 41
    SHORT = 42


REASON_WORDS: Mapping[Reason, str] = MappingProxyType(
    {
        Reason.NONE: "no reason given",
        Reason.NOT_PREFETCHED: "not prefetched",
        Reason.PREFETCHED_LATE: "prefetched too late",
        Reason.NO_FRAME: "no frame free",
        Reason.DISK_BUSY: "disk busy with writes",
        Reason.COLLECTIVE: "waited for a collective",
        Reason.UPDATE: "the optimizer had not finished with it",
        Reason.DEPARTED: "the step left its schedule",
        Reason.LRU: "least recently used",
        Reason.BELADY: "used again last (Belady)",
        Reason.PLAN: "planned for the step",
        Reason.DISCARD: "content no longer needed",
        Reason.CLOSE: "closing",
        Reason.DEMAND: "on demand",
        Reason.LOOKAHEAD: "looked ahead",
        Reason.CREATE: "created",
        Reason.CLEAN: "written ahead of need",
        Reason.WRITEBACK: "room for a writeback",
        Reason.STATE: "state saved or loaded",
        Reason.PLUGIN: "chosen by a policy of the user's",
        Reason.GATHER: "gather",
        Reason.SCATTER: "scatter",
        Reason.REDUCE: "reduce",
        Reason.BROADCAST: "broadcast",
        Reason.IO_ERROR: "input or output failed",
        Reason.NO_SPACE: "no space left on the disk",
        Reason.SHORT: "short read or write",
    }
)
"""Each reason in words for people."""


POOL = (1 << 31) - 1
"""The number of the page that stands for those that come and go in a pool (activations): behind all other numbers."""


@dataclass(frozen=True, slots=True)
class PageInfo:
    """What a reader of a trace is told about a page.

    ``number`` is the page's number in the page table, ``unit`` the index of its unit in the trace's list of
    units, ``kind`` one of the house's kinds ("parameter", "gradient", "master", "exp_avg", "exp_avg_sq",
    "activation"), ``dtype`` as in "bfloat16", ``nbytes`` its size in bytes, ``names`` the module's
    parameters that live in it.
    """

    number: int
    unit: int
    kind: str
    dtype: str
    nbytes: int
    names: tuple[str, ...] = ()
