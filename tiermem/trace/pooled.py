"""A pool in the trace: pages that come and go during a run, and can't be listed when it begins, stand there as one."""

from tiermem.trace.writer import Trace

POOL = (1 << 31) - 1
"""The pool's number: behind those of all pages, of which more may come into being during the run."""


class Pooled:
    """Records into ``trace``, with one unit, and the pool, in the place of whatever they are about."""

    __slots__ = ("_trace", "_unit")

    def __init__(self, trace: Trace, unit: int) -> None:
        self._trace = trace
        self._unit = unit

    def record(
        self,
        event: int,
        start: int,
        duration: int,
        unit: int = -1,
        page: int = -1,
        nbytes: int = 0,
        source: int = 0,
        target: int = 0,
        reason: int = 0,
        phase: int = 3,
    ) -> None:
        """As `Trace.record`, but for ``unit`` and ``page``."""
        self._trace.record(event, start, duration, self._unit, POOL, nbytes, source, target, reason, phase)
