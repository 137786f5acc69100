"""What a run is doing now: the last seconds of its trace."""

from dataclasses import dataclass

import numpy as np

from tiermem.trace.events import REASON_WORDS, Event, Phase, Reason
from tiermem.viewer.grid import Grid
from tiermem.viewer.run import Run

WINDOW_NS = 5 * 10**9
"""What "now" is: the last five seconds of the trace."""

NUM_STALLS = 8


@dataclass(frozen=True, slots=True)
class Stall:
    """One wait, as it is shown."""

    seconds: float
    unit: str
    kind: str
    phase: str
    why: str


@dataclass(frozen=True, slots=True)
class Now:
    """The last `WINDOW_NS` of a run: shares of that time by row, bytes per second by link, and the last stalls."""

    seconds: float
    shares: dict[str, float]
    rates: dict[str, float]
    stalls: list[Stall]


def now(run: Run) -> Now:
    """What ``run`` did last."""
    index = run.index
    width = max(1, min(WINDOW_NS, index.end))
    begin = index.end - width
    first, last, long = index.between(begin, index.end + 1)
    records = index.records(first, last)
    spans = index.rows.select(records)
    spans = spans[spans["duration"] < index.long_from]
    spans = np.concatenate((spans, index.rows.select(run.trace.records[long])))
    grid = Grid(index.rows, width, 1)
    grid.add(spans[spans["start"] + spans["duration"] >= index.base + begin], index.base + begin)
    stalls = spans[spans["event"] == Event.STALL]
    stalls = stalls[np.argsort(stalls["start"] + stalls["duration"], kind="stable")][-NUM_STALLS:][::-1]
    return Now(
        seconds=width / 1e9,
        shares={key: float(busy[0]) / width for key, busy in grid.busy.items()},
        rates={name: float(nbytes[0]) / width * 1e9 for name, nbytes in grid.nbytes.items()},
        stalls=[
            Stall(
                seconds=int(stall["duration"]) / 1e9,
                unit=run.trace.unit_name(int(stall["unit"])),
                kind=run.trace.kind_of(int(stall["page"])),
                phase=Phase(stall["phase"]).name.lower(),
                why=REASON_WORDS[Reason(stall["reason"])],
            )
            for stall in stalls
        ],
    )
