"""Explanations: what the plans of a live model foretell of a step, beside what its last steps were."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

from tiermem.errors import format_bytes
from tiermem.limits import disk_limits
from tiermem.page import Kind
from tiermem.planner.commits import added
from tiermem.planner.forecast import PLACES
from tiermem.policies.timeline import Link, play
from tiermem.runtime import Runtime

KEPT = 16
"""Steps that actual figures are the median of, at most."""
PCIE = Link(25e9, 25e9, 1e-5)
"""A device's link, where it wasn't measured: PCIe 4.0 with 16 lanes in practice."""

Key = tuple[str, str]


class Laps:
    """The counters of a run at the beginning of its last steps. Seconds, and bytes by link."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._step = -1
        self.marks: deque[dict[str, float]] = deque(maxlen=KEPT + 1)

    def mark(self) -> None:
        """A forward begins: if it is a step's first, the step before is over."""
        if self._runtime.steps.number != self._step:
            self._step = self._runtime.steps.number
            self.marks.append(counted(self._runtime))

    def last(self) -> dict[str, float] | None:
        """The median of each figure over the last steps; None when no step has been followed by another."""
        pairs = list(pairwise(self.marks))
        if not pairs:
            return None
        return {name: median(after[name] - before[name] for before, after in pairs) for name in self.marks[0]}

    def __len__(self) -> int:
        return max(0, len(self.marks) - 1)


def counted(runtime: Runtime) -> dict[str, float]:
    """What a run has taken so far."""
    counters = runtime.pager.counters
    return {
        "step_seconds": perf_counter(),
        "stall_seconds": sum(counters.stall_ns.values()) / 1e9,
        "disk_to_host": counters.disk_to_host.total,
        "host_to_disk": counters.host_to_disk.total,
        "host_to_device": counters.host_to_device.total,
        "device_to_host": counters.device_to_host.total,
    }


@dataclass(frozen=True)
class Explanation:
    """Figures of one step, predicted and actual; printed, it is a table. Sizes in bytes, times in seconds.

    ``predicted`` has None for what no plan foretells, ``actual`` is empty before the second step. ``steps`` is how many
    steps the actual figures are the median of; ``rates`` are those that the prediction was made with; ``notes`` say in
    words what is assumed or missing.
    """

    predicted: Mapping[str, float | None]
    actual: Mapping[str, float]
    steps: int
    rates: Mapping[str, float]
    placement: Mapping[str, Mapping[str, int]]
    bottleneck: str
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "predicted": dict(self.predicted),
            "actual": dict(self.actual),
            "steps": self.steps,
            "rates": dict(self.rates),
            "placement": {name: dict(places) for name, places in self.placement.items()},
            "bottleneck": self.bottleneck,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        rows = [("", "predicted", f"actual, median of {self.steps}")]
        for name in self.predicted:
            write = _seconds if name.endswith("seconds") else _size
            rows.append((name.replace("_", " "), write(self.predicted[name]), write(self.actual.get(name))))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join(
            (row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].rjust(widths[2]))
        ) for row in rows]  # fmt: skip
        lines.insert(1, "  ".join("-" * width for width in widths))
        lines += [
            f"{kind}: {format_bytes(places['nbytes'])}"
            + "".join(
                f", {format_bytes(nbytes)} {place}"
                for place, nbytes in places.items()
                if place != "nbytes" and nbytes
            )
            for kind, places in self.placement.items()
            if places["nbytes"]
        ]
        return "\n".join([*lines, f"bottleneck: {self.bottleneck}", *self.notes])


def explain(runtime: Runtime, laps: Laps, disk: Link | None = None) -> Explanation:
    """What the live plans of a run foretell of a step, and what its last steps were.

    ``disk`` is the rate to foretell with; without it, it is what was measured when the run began, or is measured now,
    with 64 MiB in the run's first folder, where the model is paged to a disk. Nothing of the run changes.
    """
    notes = []
    with runtime.door:
        actual = laps.last()
        # What computes the step after this one has begun: the schedule that is followed, and its plans.
        cursor = runtime.steps.training.cursor
        plans = runtime.pager.plans
        followed = (
            plans.of(cursor.schedule, cursor.seconds) if plans is not None and cursor is not None else {}
        )
        table = runtime.table
        sizes = {page.number: page.nbytes for page in table}
        seconds = list(cursor.seconds) if cursor is not None else []
        accesses = len(cursor.schedule) if cursor is not None else 0
    if len(seconds) != accesses:
        seconds = [0.0] * accesses
    predicted: dict[str, float | None] = dict.fromkeys(
        ("step_seconds", "stall_seconds", "disk_to_host", "host_to_disk", "host_to_device", "device_to_host")
    )
    placement = {kind: {"nbytes": 0, "always on device": 0, "always on host": 0} for kind in PLACES.values()}
    for page in table:
        placement[PLACES[page.kind]]["nbytes"] += page.nbytes
    rates: dict[str, float] = {}
    busy = {"compute": sum(seconds)}
    moved: dict[str, tuple[str, str, Link]] = {}
    if runtime.disk is not None:
        link = disk or Link(*_disk_limits(runtime), 5e-5)
        rates |= {"disk_read": link.read, "disk_write": link.write}
        moved["host"] = ("disk_to_host", "host_to_disk", link)
    if runtime.pager.device is not None:
        link = PCIE
        if "host->device" in runtime.limits:
            link = Link(runtime.limits["host->device"], runtime.limits["device->host"], PCIE.latency)
        else:
            notes.append(
                f"the link to the device is taken to carry {PCIE.read / 1e9:g} GB/s; a run with a trace measures it"
            )
        rates["host_to_device"] = link.read
        moved["device"] = ("host_to_device", "", link)
        predicted["device_to_host"] = _gradients(runtime)
    stall, planned = 0.0, bool(accesses)
    for tier, (down, up, link) in moved.items():
        plan = next((plan for at, plan in followed.items() if at.name == tier), None)
        if plan is None:
            planned = False
            notes.append(f"no plan is followed for the {tier}: nothing is foretold of its moves")
            continue
        line = play(plan, sizes, seconds, link)
        stall += line.late + line.no_frame
        predicted[down] = plan.loaded
        if up:
            predicted[up] = plan.written
        busy[down.replace("_", " ")] = line.link
        for stay in plan.stays:
            if stay.whole:
                placement[PLACES[table[stay.page].kind]][f"always on {tier}"] += sizes[stay.page]
    if runtime.commits is not None and runtime.disk is not None:
        durability, total = runtime.config.durability, sum(sizes.values())
        notes.append(
            f"page files take {format_bytes(runtime.disk.used)} on the disk for {format_bytes(total)} of pages: what "
            f'steps change has {1 + durability.commits} places with durability.mode = "{durability.mode}"'
        )
        fits = total <= runtime.pager.host.slab.nbytes
        if durability.every and (fits or predicted["host_to_disk"] is not None):
            plan = next((plan for at, plan in followed.items() if at.name == "host"), None)
            more = added(runtime.units, None if fits else plan) // durability.every
            predicted["host_to_disk"] = (predicted["host_to_disk"] or 0) + more
    if not moved:
        notes.append("everything fits the budget: nothing moves")
        predicted |= dict.fromkeys(("disk_to_host", "host_to_disk", "host_to_device", "device_to_host"), 0)
    if planned:
        predicted["stall_seconds"] = stall
        predicted["step_seconds"] = sum(seconds) + stall
    if actual is None:
        notes.append("actual figures are there from the second step's end on")
    notes.append("computing is taken to last as long as when the schedule was recorded")
    bottleneck = max(busy, key=busy.__getitem__) if planned else "not known before a step has been recorded"
    return Explanation(predicted, actual or {}, len(laps), rates, placement, bottleneck, tuple(notes))


def _disk_limits(runtime: Runtime) -> tuple[float, float]:
    """What the disk was measured to carry when the run began; measured now if it was not."""
    if "disk->host" in runtime.limits:
        return runtime.limits["disk->host"], runtime.limits["host->disk"]
    return disk_limits(runtime.config)


def _gradients(runtime: Runtime) -> float:
    return sum(page.nbytes for page in runtime.table if page.kind is Kind.GRADIENT)


def _seconds(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def _size(value: float | None) -> str:
    return "-" if value is None else format_bytes(int(value))
