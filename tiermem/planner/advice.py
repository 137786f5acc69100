"""Advice: what one change of the machine or of the training would do, each of them forecast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tiermem.planner.forecast import Drafts, Forecast, Hardware, forecast
from tiermem.planner.shape import Training
from tiermem.policies.timeline import Link

_DISK = Link(5e9, 5e9, 5e-5)
WORTH = 1.02
"""Times as many tokens a second, from where a change is worth being named."""


@dataclass(frozen=True)
class Change:
    """One change, in words, and what is predicted with it. ``gain``: times as many tokens a second (0: doesn't fit;
    inf: what didn't fit does)."""

    name: str
    after: Forecast
    gain: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data; ``gain`` is None where there is nothing to compare with."""
        return {
            "change": self.name,
            "fits": self.after.fits,
            "step_seconds": self.after.step,
            "tokens_per_second": self.after.tokens_per_second,
            "nbytes_written_a_day": self.after.nbytes_written_a_day,
            "gain": self.gain if self.gain not in (0.0, float("inf")) else None,
        }


def changes(hardware: Hardware, training: Training) -> Iterator[tuple[str, Hardware, Training]]:
    """The changes that are tried, one at a time."""
    if hardware.host_budget is None:
        yield "twice the RAM", replace(hardware, ram_nbytes=2 * hardware.ram_nbytes), training
    else:
        yield "twice the host budget", replace(hardware, host_budget=2 * hardware.host_budget), training
    if hardware.disk_nbytes:
        disk = hardware.disk
        second = disk._replace(read=2 * disk.read, write=2 * disk.write)
        yield (
            "a second disk like the first",
            replace(hardware, disk_nbytes=2 * hardware.disk_nbytes, disk=second),
            training,
        )
    else:
        yield "a disk of 2 TB at 5 GB/s", replace(hardware, disk_nbytes=2 * 10**12, disk=_DISK), training
    if hardware.device_nbytes is not None:
        yield (
            "twice the device's memory",
            replace(hardware, device_nbytes=2 * hardware.device_nbytes),
            training,
        )
        yield "twice the rate to the device", replace(hardware, pcie=2 * hardware.pcie), training
    yield "twice the arithmetic", replace(hardware, flops=2 * hardware.flops), training
    yield f"batch {2 * training.batch}", hardware, replace(training, batch=2 * training.batch)
    if training.batch > 1:
        half = training.batch // 2
        yield f"batch {half}", hardware, replace(training, batch=half)
    more = 4 * training.accumulation
    yield f"accumulation {more}", hardware, replace(training, accumulation=more)
    if training.checkpointing:
        yield "no checkpointing", hardware, replace(training, checkpointing=False)
    else:
        yield "checkpointing", hardware, replace(training, checkpointing=True)
    if training.precision == "fp32" and hardware.device_nbytes is not None:
        yield "bf16 at the same arithmetic rate", hardware, replace(training, precision="bf16")


def try_changes(before: Forecast, drafts: Drafts | None = None) -> list[Change]:
    """All changes with their forecasts, the one that helps most first.

    More tokens in a step change the training too, and not only its speed: that is for whoever asks to weigh.
    ``drafts``: see :func:`tiermem.planner.forecast.forecast`.
    """
    found: list[Change] = []
    drafts = {} if drafts is None else drafts
    for name, hardware, training in changes(before.hardware, before.training):
        after = forecast(before.model, hardware, training, drafts)
        gain = 0.0
        if after.fits:
            gain = after.tokens_per_second / before.tokens_per_second if before.fits else float("inf")
        found.append(Change(name, after, gain))
    return sorted(found, key=lambda change: (-change.gain, -change.after.tokens_per_second))


def best(found: list[Change]) -> Change | None:
    """The change that helps most; None when none is worth it."""
    return found[0] if found and found[0].gain >= WORTH else None
