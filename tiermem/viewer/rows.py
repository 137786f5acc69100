"""The rows of the timeline: which record belongs to which, and which times are measured beside those drawn.

A span belongs to one *lane* (forward, stalls of backward, parameters from disk to host). A *row* is a set of lanes
whose time is taken as a union, as `tiermem.trace.summary` takes it: what is drawn, and the unions that the totals
of a selection are made of.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiermem.trace.events import Event, Phase, Tier
from tiermem.trace.reader import Records, TraceFile
from tiermem.trace.tally import Kinds, having

SPANS = (
    Event.LANDED,
    Event.WRITEBACK,
    Event.FAILED,
    Event.COMPUTE,
    Event.OPTIMIZER,
    Event.STALL,
    Event.COLLECTIVE,
    Event.STEP,
)
"""The events that are drawn as spans."""

MOST_KINDS = 8
"""Kinds of pages that have lanes of their own; what a hostile header lists beyond goes into one lane, "other"."""

_TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK)


@dataclass(frozen=True, slots=True)
class Row:
    """One row: ``lanes`` are the numbers of those whose union it measures.

    ``group`` says where it is drawn: "steps", "compute", "stalls", "collectives", "failed", "link" (one kind of page on
    one link), or "" where it isn't. ``link`` and ``kind`` name what a link's row carries.
    """

    key: str
    label: str
    group: str
    lanes: frozenset[int]
    link: str = ""
    kind: str = ""


class Rows:
    """The rows that ``trace`` may have, whether or not anything is in them yet.

    ``links`` maps each link's name to its lanes, whose bytes are counted; lanes are numbered from 1.
    """

    def __init__(self, trace: TraceFile) -> None:
        self.rows: list[Row] = []
        self.links: dict[str, frozenset[int]] = {}
        self.num_lanes = 0
        self._kinds = Kinds(trace)
        self._named = self._kinds.names[:MOST_KINDS]
        self._build()

    def lanes_of(self, spans: Records) -> npt.NDArray[np.int64]:
        """The lane of each of ``spans``."""
        kind = np.minimum(self._kinds.of(spans["page"]), len(self._named))
        lanes: npt.NDArray[np.int64] = self._table[
            spans["event"], spans["phase"], spans["source"], spans["target"], kind
        ]
        return lanes

    def select(self, piece: Records) -> Records:
        """The records of ``piece`` that belong on a lane: spans, except for content made where it is."""
        made = (piece["event"] == Event.LANDED) & (piece["source"] == Tier.NONE)
        found: Records = piece[having(piece, SPANS) & ~made]
        return found

    def _build(self) -> None:
        kinds = [*self._named, "other"]
        self._table = np.zeros((256, len(Phase), len(Tier), len(Tier), len(kinds)), np.int64)
        compute = {phase: self._lane(Event.COMPUTE, phase=phase) for phase in Phase}
        stalls = {phase: self._lane(Event.STALL, phase=phase) for phase in Phase}
        optimizer, steps = self._lane(Event.OPTIMIZER), self._lane(Event.STEP)
        collectives, failed = self._lane(Event.COLLECTIVE), self._lane(Event.FAILED)
        stall, work = frozenset(stalls.values()), frozenset([*compute.values(), optimizer])
        self._add("steps", "steps", "steps", {steps})
        self._add("forward", "forward", "compute", {compute[Phase.FORWARD]})
        self._add("backward", "backward", "compute", {compute[Phase.BACKWARD]})
        self._add("compute", "other compute", "compute", {compute[Phase.OPTIMIZER], compute[Phase.NONE]})
        self._add("optimizer", "optimizer", "compute", {optimizer})
        self._add("stall", "stalls", "stalls", stall)
        self._add("collectives", "collectives", "collectives", {collectives})
        everything: frozenset[int] = frozenset()
        for source in _TIERS:
            for target in _TIERS:
                everything |= self._link(source, target, kinds)
        self._add("failed", "failed", "failed", {failed})
        for phase in Phase:
            name = phase.name.lower()
            self._add(f"stall:{name}", "", "", {stalls[phase]})
            self._add(f"compute+stall:{name}", "", "", {compute[phase], stalls[phase]})
        self._add("link", "", "", everything)
        self._add("link+stall", "", "", everything | stall)
        self._add("work+stall", "", "", work | stall)
        self._add("link+work+stall", "", "", everything | work | stall)

    def _link(self, source: Tier, target: Tier, kinds: Sequence[str]) -> frozenset[int]:
        name = f"{source.name.lower()}->{target.name.lower()}"
        lanes = set()
        for number, kind in enumerate(kinds):
            lane = self._new()
            for event in (Event.LANDED, Event.WRITEBACK):
                self._table[event, :, source, target, number] = lane
            lanes.add(lane)
            self._add(f"{name}:{kind}", kind, "link", {lane}, name, kind)
        self.links[name] = frozenset(lanes)
        self._add(f"link:{name}", name, "", lanes, name)
        return self.links[name]

    def _lane(self, event: Event, phase: Phase | None = None) -> int:
        lane = self._new()
        self._table[event, slice(None) if phase is None else phase] = lane
        return lane

    def _new(self) -> int:
        # 0 is left free: nothing that is selected may land there unnoticed.
        self.num_lanes += 1
        return self.num_lanes

    def _add(
        self,
        key: str,
        label: str,
        group: str,
        lanes: "set[int] | frozenset[int]",
        link: str = "",
        kind: str = "",
    ) -> None:
        self.rows.append(Row(key, label, group, frozenset(lanes), link, kind))
