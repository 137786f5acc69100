"""The log of pages: what happens to them, counted and written into the trace."""

from __future__ import annotations

from time import perf_counter_ns as now

from tiermem.page import Page
from tiermem.ranks import Request
from tiermem.stats import Counters
from tiermem.trace import POOL, AnyTrace, Event, NullTrace, Phase, Reason
from tiermem.trace import Tier as At


class PageLog:
    """Counters, and a trace that may write nothing. Callers hold the pager's lock."""

    def __init__(self, trace: AnyTrace, counters: Counters) -> None:
        self.counters = counters
        self.phase: int = Phase.NONE  # written into every record
        # Of pages that come and go: the unit under which the trace has all of them as one.
        self.pool: int | None = None
        self.trace = trace
        self._tracing = not isinstance(trace, NullTrace)

    def stall(self, page: Page, unit: int, start: int, cause: Reason, link: tuple[At, At]) -> None:
        """Count and trace that ``unit`` has waited since ``start``, for ``page`` to arrive over ``link``."""
        duration = now() - start
        self.counters.stall_ns[cause.name.lower()] += duration
        if cause is Reason.PREFETCHED_LATE:
            self.counters.num_prefetches_late += 1
        self.record(Event.STALL, page, *link, cause, start, duration, unit)

    def collective(self, page: Page, what: Reason, request: Request) -> None:
        """Count and trace an exchange with the other ranks that has ended."""
        duration = request.finished - request.began
        self.counters.collective_ns[what.name.lower()] += duration
        self.record(Event.COLLECTIVE, page, At.NONE, At.NONE, what, request.began, duration)

    def record(
        self,
        event: Event,
        page: Page,
        source: At,
        target: At,
        reason: Reason,
        start: int = 0,
        duration: int = 0,
        unit: int | None = None,
    ) -> None:
        """Write one event of a page; without ``start``, it is now. ``unit``: who asked, if not the page's own."""
        if not self._tracing:
            return
        if unit is None:
            unit = page.unit
        number = page.number
        if self.pool is not None:
            unit, number = self.pool, POOL
        self.trace.record(
            event,
            start or now(),
            duration,
            unit,
            number,
            page.nbytes,
            source,
            target,
            reason,
            self.phase,
        )
