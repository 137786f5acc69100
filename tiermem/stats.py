"""Counters of a run: what moved, what was waited for, what prefetching was worth."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from tiermem.page import Kind


@dataclass(slots=True)
class Link:
    """Bytes that one link carried in one direction, by kind of page."""

    nbytes: dict[Kind, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.nbytes.values())

    def by_name(self) -> dict[str, int]:
        """Bytes by the kind's name in lower case."""
        return {kind.name.lower(): count for kind, count in sorted(self.nbytes.items())}


@dataclass(slots=True)
class Counters:
    """What the pager counts. Bytes, numbers of pages, nanoseconds."""

    disk_to_host: Link = field(default_factory=Link)
    host_to_disk: Link = field(default_factory=Link)
    host_to_device: Link = field(default_factory=Link)
    device_to_host: Link = field(default_factory=Link)
    num_hits: int = 0
    num_faults: int = 0
    num_prefetches: int = 0
    num_prefetches_used: int = 0
    num_prefetches_late: int = 0
    num_prefetches_wasted: int = 0
    num_evictions: int = 0
    num_failed: int = 0
    num_relocations: int = 0
    stall_ns: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    collective_ns: dict[str, int] = field(default_factory=lambda: defaultdict(int))
