"""Traces for the tests of the viewer, made up as a training run would write them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tiermem.trace import Event, PageInfo, Phase, Reason, Tier, Trace
from tiermem.trace.reader import TraceFile

MS = 1_000_000
KINDS = ("parameter", "gradient", "exp_avg")
NBYTES = 4 << 20


class Writer:
    """Writes steps of a model of ``units`` blocks, each with a page of every kind, to ``path``."""

    def __init__(
        self, path: Path, units: int = 6, seed: int = 0, names: list[str] | None = None, **meta: Any
    ) -> None:
        self.units = names if names is not None else [f"blocks.{number}" for number in range(units)]
        pages = [
            PageInfo(unit * len(KINDS) + kind, unit, name, "float32", NBYTES, (f"{self.units[unit]}.weight",))
            for unit in range(len(self.units))
            for kind, name in enumerate(KINDS)
        ]
        self.path = path
        self.trace = Trace.create(
            path, units=self.units, pages=pages, budgets={"host": 8 * NBYTES, "disk": 1 << 40}, meta=meta
        )
        with TraceFile(path) as read:
            self.now = read.monotonic_ns
        self.random = random.Random(seed)
        self.held: dict[int, bool] = {}
        self.step = -1
        self.ahead = Reason.LOOKAHEAD

    def record(
        self, event: Event, start: int, duration: int = 0, unit: int = -1, page: int = -1, **more: Any
    ) -> None:
        nbytes = more.pop("nbytes", NBYTES if page >= 0 else 0)
        self.trace.record(event, start, duration, unit, page, nbytes, **more)

    def fetch(self, unit: int, kind: int, phase: Phase) -> None:
        """Have a page in the host: found there, prefetched in time or late, or faulted."""
        page = unit * len(KINDS) + kind
        up = {"source": Tier.DISK, "target": Tier.HOST, "phase": phase}
        if self.held.get(page):
            self.record(Event.HIT, self.now, 0, unit, page, target=Tier.HOST, phase=phase)
            return
        ahead = self.random.random() < 0.7
        why = self.ahead if ahead else Reason.DEMAND
        takes = self.random.randrange(1, 6) * MS
        begun = self.now - (self.random.randrange(0, 8) * MS if ahead else 0)
        if ahead:
            self.record(Event.PREFETCH, self.now, 0, unit, page, reason=why, **up)
        self.record(Event.RESERVE, self.now, 0, unit, page, target=Tier.HOST, reason=why, phase=phase)
        landed = begun + takes
        cause = Reason.PREFETCHED_LATE if ahead else Reason.NOT_PREFETCHED
        if landed > self.now:
            self.record(Event.FAULT, self.now, 0, unit, page, reason=cause, **up)
        self.record(Event.LANDED, begun, takes, unit, page, reason=why, **up)
        if landed > self.now:
            self.record(Event.STALL, self.now, landed - self.now, unit, page, reason=cause, **up)
            self.now = landed
        else:
            self.record(Event.HIT, self.now, 0, unit, page, target=Tier.HOST, phase=phase)
        self.held[page] = True
        if sum(self.held.values()) > 8:
            self.evict(page, phase)

    def evict(self, but: int, phase: Phase) -> None:
        page = next(number for number, here in self.held.items() if here and number != but)
        unit = page // len(KINDS)
        down = {"source": Tier.HOST, "target": Tier.DISK, "reason": Reason.BELADY, "phase": phase}
        self.record(Event.EVICT, self.now, 0, unit, page, **down)
        takes = self.random.randrange(1, 4) * MS
        self.record(Event.WRITEBACK, self.now - takes, takes, unit, page, **down)
        self.record(
            Event.RELEASE, self.now, 0, unit, page, source=Tier.HOST, reason=Reason.BELADY, phase=phase
        )
        self.held[page] = False
        del self.held[page]

    def compute(self, unit: int, phase: Phase, ms: int) -> None:
        self.record(Event.COMPUTE, self.now, ms * MS, unit, phase=phase)
        self.now += ms * MS

    def write(self, steps: int) -> Writer:
        """Write so many more steps."""
        numbers = range(len(self.units))
        for _ in range(steps):
            self.step += 1
            self.trace.step = self.step
            begun = self.now
            for unit in numbers:
                self.fetch(unit, 0, Phase.FORWARD)
                self.compute(unit, Phase.FORWARD, 5)
            for unit in reversed(numbers):
                self.fetch(unit, 0, Phase.BACKWARD)
                self.fetch(unit, 1, Phase.BACKWARD)
                self.compute(unit, Phase.BACKWARD, 9)
            for unit in numbers:
                for kind in range(len(KINDS)):
                    self.fetch(unit, kind, Phase.OPTIMIZER)
                self.record(Event.OPTIMIZER, self.now, 2 * MS, unit, unit * len(KINDS), phase=Phase.OPTIMIZER)
                self.now += 2 * MS
            self.record(Event.STEP, begun, self.now - begun)
        return self

    def close(self) -> Path:
        self.trace.close()
        return self.path
