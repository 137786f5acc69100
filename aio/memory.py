"""The machine's memory: what there is and what is free, as the kernel says it, and what the cgroups allow of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
_UNLIMITED = 1 << 62  # of a cgroup: "max" in version 2, some number near 2**63 in version 1


@dataclass(frozen=True, slots=True)
class Memory:
    """Sizes in bytes; ``limit`` and ``headroom`` are None where no cgroup of this process has a limit.

    Attributes:
        total: what the machine has.
        available: what can be had of it without paging anything out, as the kernel estimates it.
        limit: the most that this process and those beside it in its cgroup may have.
        headroom: what of the limit is left; files in the page cache count as left, since they make way.
    """

    total: int
    available: int
    limit: int | None
    headroom: int | None

    @property
    def most(self) -> int:
        """All that this process could ever have."""
        return self.total if self.limit is None else min(self.total, self.limit)

    @property
    def free(self) -> int:
        """What this process can have now."""
        return self.available if self.headroom is None else min(self.available, self.headroom)


def look() -> Memory:
    """The memory at this moment. Raises OSError where the kernel doesn't tell."""
    facts = {}
    for line in MEMINFO.read_text().splitlines():
        name, _, rest = line.partition(":")
        facts[name] = int(rest.split()[0]) << 10
    for wanted in ("MemTotal", "MemAvailable"):
        if wanted not in facts:
            raise OSError(f"{MEMINFO} has no {wanted} line")
    found = list(_limits())
    return Memory(
        facts["MemTotal"],
        facts["MemAvailable"],
        min((limit for limit, _ in found), default=None),
        min((headroom for _, headroom in found), default=None),
    )


def _limits() -> Iterator[tuple[int, int]]:
    """Limit and headroom of each cgroup above this process that has a limit."""
    try:
        lines = OWN_CGROUP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = CGROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = CGROUPS / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # A limit of any group above counts too. Inside a container the path may be the host's, then only
        # the root is there.
        here = root / path.lstrip("/")
        for group in (here, *here.parents):
            limit, used = _number(group / names[0]), _number(group / names[1])
            if limit is not None and used is not None and limit < _UNLIMITED:
                yield limit, min(limit, max(0, limit - used + _reclaimable(group / "memory.stat", names[2])))
            if group == root:
                break


def _reclaimable(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
