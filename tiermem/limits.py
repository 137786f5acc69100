"""Limits: what a run's links can carry, measured before it begins.

The trace's viewer draws them beside what the links did carry. Link names are "disk->host" and so on.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from time import perf_counter

from tiermem.aio import measure
from tiermem.config import Config
from tiermem.device import Device
from tiermem.disk import free_nbytes
from tiermem.tier import Tier

MOST = 64 << 20
"""Bytes that are moved to measure a link: 40 ms at 3 GB/s, twice over."""

LEAST = 16 << 20
"""Bytes below which a rate says nothing; a model smaller than this has no limits in its trace."""


def disk_limits(config: Config, nbytes: int = MOST) -> tuple[float, float]:
    """Bytes per second that the folders of ``disk.paths`` read and write together, with up to ``nbytes`` in the first.

    The others are taken to be as fast. Raises OSError when the folder can't take the bytes.
    """
    folders, io = config.disk.folders, config.io
    with contextlib.suppress(OSError):
        nbytes = min(nbytes, free_nbytes(folders[0]) // 4)
    nbytes -= nbytes % (1 << 20)
    speed = measure(folders[0], max(nbytes, 1 << 20), io.request.resolve(0), io.depth, io.engine)
    return len(folders) * speed.read, len(folders) * speed.write


def rate_of(folder: Path) -> float:
    """Bytes per second of what reads and writes a folder's disk by turns. Raises OSError when it can't be measured."""
    speed = measure(folder, LEAST)
    return 2 / (1 / speed.read + 1 / speed.write)


def copy_limits(host: Tier, above: Tier, device: Device) -> tuple[float, float] | None:
    """Bytes per second from ``host`` to the device's slab and back; None where these are too small to tell.

    Overwrites the slabs, so it is for when no page is in them yet.
    """
    nbytes = min(MOST, host.slab.nbytes, above.slab.nbytes)
    if nbytes < LEAST:
        return None
    here, there = host.memory[:nbytes], above.memory[:nbytes]
    rates = []
    for target, source in ((there, here), (here, there)):
        device.copy(target, source).wait()  # the first touch of the memory isn't the link's doing
        start = perf_counter()
        device.copy(target, source).wait()
        rates.append(nbytes / max(perf_counter() - start, 1e-9))
    return rates[0], rates[1]


def measure_limits(
    config: Config, state_nbytes: int | None, host: Tier, above: Tier | None, device: Device
) -> dict[str, float]:
    """Bytes per second by link. ``state_nbytes`` is what the disk may come to hold, None where there is no disk tier.

    A link that can't be measured, or whose pages are too few to, is left out.
    """
    limits: dict[str, float] = {}
    if state_nbytes is not None and state_nbytes >= LEAST:
        with contextlib.suppress(OSError):
            limits["disk->host"], limits["host->disk"] = disk_limits(config)
    if above is not None and (rates := copy_limits(host, above, device)) is not None:
        limits["host->device"], limits["device->host"] = rates
    return limits
