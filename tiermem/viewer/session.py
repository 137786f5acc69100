"""What one viewer shows: one run, the ranks of one run on one clock, or two runs side by side."""

import enum
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tiermem.trace.errors import TraceError
from tiermem.trace.events import REASON_WORDS, Phase, Tier
from tiermem.viewer.run import Run
from tiermem.viewer.tiles import NUM
from tiermem.viewer.units import differences


class Mode(enum.Enum):
    """How several runs belong together."""

    SINGLE = "single"
    RANKS = "ranks"
    COMPARE = "compare"


class Session:
    """The runs of one viewer. A trace that can't be opened is told in ``errors``; the others are shown."""

    def __init__(self, paths: Sequence[Any], mode: Mode, follow: bool = False) -> None:
        """Open the traces at ``paths``. Raises `TraceError` where none of them can be, or not both of a comparison."""
        self.mode = mode
        self.follow = follow
        self.errors: list[str] = []
        self.runs: list[Run] = []
        for path in paths:
            with self._telling(self.errors):
                self.runs.append(Run(path))
        if not self.runs or (mode is Mode.COMPARE and self.errors):
            self.close()
            raise TraceError(self.errors[0])

    @staticmethod
    @contextmanager
    def _telling(problems: list[str]) -> Iterator[None]:
        """What a trace can't be read for is told, and the others are read all the same."""
        try:
            yield
        except TraceError as error:
            problems.append(str(error))

    def close(self) -> None:
        """Close all traces."""
        for run in self.runs:
            run.close()

    def document(self, seen: Sequence[tuple[int, int]] = ()) -> dict[str, Any]:
        """What a page is told at once, for JSON; new records are taken in first, where the session follows.

        ``seen`` are the generation and the number of records of each run that the page knows; ``changed`` of a run is
        the time from which on its tiles differ from those.
        """
        problems = list(self.errors)
        if self.follow:
            for run in self.runs:
                with self._telling(problems):
                    run.refresh()
        runs = [run.document() for run in self.runs]
        shifts = self._shifts(runs)
        for number, (run, document) in enumerate(zip(self.runs, runs, strict=True)):
            document["label"] = self._label(number, document)
            document["shift"] = shifts[number]
            if number < len(seen):
                document["changed"] = run.changed_since(seen[number][1], seen[number][0])
        return {
            "mode": self.mode.value,
            "follow": self.follow,
            "errors": problems,
            "clocks": self._clocks(),
            "bins": NUM,
            "reasons": {str(reason.value): words for reason, words in REASON_WORDS.items()},
            "tiers": [tier.name.lower() for tier in Tier],
            "phases": [phase.name.lower() for phase in Phase],
            "runs": runs,
        }

    def comparison(self) -> dict[str, Any]:
        """The two runs of a comparison side by side: per step by unit, and the bytes of each link by unit."""
        before, after = self.runs
        steps = [max(run.summary.steps.count, 0) for run in self.runs]
        return {"units": differences(before.units(), after.units(), steps), "steps": steps}

    def _label(self, number: int, document: dict[str, Any]) -> str:
        if self.mode is Mode.COMPARE:
            return ("before", "after")[number]
        if self.mode is Mode.RANKS:
            rank = document["rank"]
            return f"rank {rank if rank is not None else number}"
        return ""

    def _shifts(self, runs: Sequence[dict[str, Any]]) -> list[int]:
        """Where each run's base is on the common axis, in ns; 0 is where the first trace was begun.

        Two runs that are compared have the beginning of their first step in common instead.
        """
        if self.mode is Mode.COMPARE:
            return [-min(document["steps"]["start"], default=0) for document in runs]
        first = self.runs[0].trace
        found = []
        for run, document in zip(self.runs, runs, strict=True):
            trace = run.trace
            apart = trace.monotonic_ns - first.monotonic_ns
            if not self._same_clock(run):
                apart = trace.wall_ns - first.wall_ns
            found.append(apart - document["zero"])
        return found

    def _same_clock(self, run: Run) -> bool:
        domain = self.runs[0].trace.clock_domain
        return run is self.runs[0] or (bool(domain) and run.trace.clock_domain == domain)

    def _clocks(self) -> str:
        if self.mode is not Mode.RANKS:
            return ""
        if all(self._same_clock(run) for run in self.runs):
            return "on one clock: all ranks ran on one machine"
        return "on one clock by the time of day: the ranks ran on several machines, whose clocks may differ"


def pyramid(run: Run) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The tiles of ``run``, from the whole to the finest, level by level; what lists its spans isn't cut further."""
    wanted = [0]
    level = run.document()["top_level"]
    while wanted and level >= 0:
        finer = []
        for number in wanted:
            tile = run.tile(level, number)
            yield level, number, tile
            if tile["spans"] is None:
                finer += [2 * number, 2 * number + 1]
        level -= 1
        wanted = [number for number in finer if number * NUM << level <= run.index.end] if level >= 0 else []
