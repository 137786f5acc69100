"""The trace: the list of everything that happened to the pages of a run, and when and why.

The pager writes it with `Trace`, `tiermem.trace.reader.TraceFile` reads it, also while it is being written.
"""

from tiermem.trace.errors import TraceError
from tiermem.trace.events import POOL, REASON_WORDS, Event, PageInfo, Phase, Reason, Tier
from tiermem.trace.writer import JSON, AnyTrace, NullTrace, Trace

__all__ = [
    "JSON",
    "POOL",
    "REASON_WORDS",
    "AnyTrace",
    "Event",
    "NullTrace",
    "PageInfo",
    "Phase",
    "Reason",
    "Tier",
    "Trace",
    "TraceError",
]
