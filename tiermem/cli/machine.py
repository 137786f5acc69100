"""What a machine offers to tiermem, found by trying it.

Each check says what it found, whether that is good, and what tiermem will do about it.
"""

import enum
import errno
import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiermem.aio import HUGE_NBYTES, File, measure, open_queue
from tiermem.aio.memory import look
from tiermem.cli.output import format_rate
from tiermem.errors import format_bytes

SPEED_NBYTES = 256 << 20
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_RAM_FILESYSTEMS = ("tmpfs", "ramfs", "devtmpfs")


class Verdict(enum.Enum):
    """How good a finding is."""

    GOOD = "good"
    SLOWER = "slower"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: what was ``found``, the ``consequence`` for tiermem, and the figures behind it."""

    name: str
    verdict: Verdict
    found: str
    consequence: str
    figures: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data; sizes are in bytes."""
        return {
            "name": self.name,
            "verdict": self.verdict.value,
            "found": self.found,
            "consequence": self.consequence,
            "figures": dict(self.figures),
        }


def examine(folder: Path, speed: bool = True) -> Iterator[Finding]:
    """Look at the machine and at the disk of ``folder``, one finding after the other.

    Files made for it, 256 MiB at most, are gone when the iterator has ended or was closed. With ``speed``
    the disk is measured, which takes seconds.
    """
    yield kernel()
    yield cores()
    yield memory()
    yield huge_pages()
    yield locked_memory()
    yield device()
    yield asynchronous_io()
    checks: list[Callable[[Path], Finding]] = [disk_space, direct_io]
    if speed:
        checks.append(disk_speed)
    for check in checks:
        yield _on_disk(check, folder)


def _on_disk(check: Callable[[Path], Finding], folder: Path) -> Finding:
    try:
        return check(folder)
    except OSError as error:
        return Finding(
            check.__name__.replace("_", " "),
            Verdict.BAD,
            f"{folder}: {error.strerror or error}",
            "tiermem can't keep pages there: choose another folder in [disk] paths",
        )


def kernel() -> Finding:
    """The system's version, for the reader of a report."""
    return Finding(
        "kernel",
        Verdict.GOOD,
        f"{platform.system()} {platform.release()}, {platform.machine()}, Python {platform.python_version()}",
        "nothing depends on it but what is below",
        {"release": platform.release(), "machine": platform.machine(), "python": platform.python_version()},
    )


def cores() -> Finding:
    """The cores that this process may use."""
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    return Finding(
        "cores",
        Verdict.GOOD if usable > 1 else Verdict.SLOWER,
        f"{usable} of {present} may be used",
        "transfers and the optimizer run beside the computation"
        if usable > 1
        else "transfers, optimizer and computation share one core",
        {"usable": usable, "present": present},
    )


def memory() -> Finding:
    """The memory there is and the memory that is free, a cgroup's limit included."""
    from tiermem.config.sections import HostSection

    there = look()
    found = f"{format_bytes(there.total)}, {format_bytes(there.available)} free"
    if there.free < there.available:
        found += f", {format_bytes(there.free)} of it for this process (its cgroup's limit)"
    percent = HostSection().budget.percent or 0
    budget = format_bytes(int(there.free * percent / 100))
    return Finding(
        "memory",
        Verdict.GOOD,
        found,
        f"the default [host] budget, {percent:g} % of what is free, is {budget}",
        {"total": there.total, "free": there.free, "limit": there.limit},
    )


def huge_pages() -> Finding:
    """Whether slabs get transparent huge pages when they ask."""
    try:
        setting = HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        setting = "not in this kernel"
    given = setting in ("always", "madvise")
    return Finding(
        "huge pages",
        Verdict.GOOD if given else Verdict.SLOWER,
        f"transparent huge pages: {setting}",
        f"slabs are made of pages of {format_bytes(HUGE_NBYTES)}"
        if given
        else f"slabs are made of small pages, which is slower; to change it: echo madvise > {HUGE_PAGES}",
        {"setting": setting},
    )


def locked_memory() -> Finding:
    """The limit on memory locked by mlock, for completeness."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    return Finding(
        "memlock",
        Verdict.GOOD,
        "no limit" if unlimited else f"limit {format_bytes(soft)}",
        "does not bind tiermem: slabs are pinned through CUDA, not with mlock",
        {"limit": None if unlimited else soft},
    )


def device() -> Finding:
    """What modules compute on, and whether host memory is pinned for it."""
    import torch

    if not torch.cuda.is_available():
        return Finding(
            "device",
            Verdict.GOOD,
            "no CUDA device",
            "modules compute on the cpu, straight from host frames: there is nothing to pin or copy",
            {"cuda": []},
        )
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return Finding(
        "device",
        Verdict.GOOD,
        ", ".join(f"{each.name} with {format_bytes(each.total_memory)}" for each in found),
        "modules compute on it, host slabs are pinned through CUDA so that copies overlap",
        {"cuda": [{"name": each.name, "memory": each.total_memory} for each in found]},
    )


def asynchronous_io(request: int = 1 << 20, depth: int = 32) -> Finding:
    """Whether the kernel gives an AIO queue."""
    figures = {name: _number(Path("/proc/sys/fs") / name) for name in ("aio-nr", "aio-max-nr")}
    try:
        with open_queue("libaio", request, depth):
            return Finding("AIO", Verdict.GOOD, "works", "the libaio engine is used", figures)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.EAGAIN:
            reason = (
                f"EAGAIN: fs.aio-max-nr is {figures['aio-max-nr']}, {figures['aio-nr']} in use, "
                f"{depth} asked for"
            )
    except ImportError as error:
        reason = str(error)
    return Finding(
        "AIO",
        Verdict.SLOWER,
        f"refused ({reason})",
        "the threads engine is used, which costs more time",
        figures,
    )


def disk_space(folder: Path) -> Finding:
    """The free space of the folder's disk, and whether it is a disk at all."""
    usage = shutil.disk_usage(folder)
    kind = _filesystem(folder)
    in_ram = kind in _RAM_FILESYSTEMS
    return Finding(
        "disk space",
        Verdict.SLOWER if in_ram else Verdict.GOOD,
        f"{folder} ({kind}): {format_bytes(usage.free)} free of {format_bytes(usage.total)}",
        "this is memory and no disk: pages put there save none; choose a disk in [disk] paths"
        if in_ram
        else "pages of a run may take what [disk] budget allows of it",
        {"free": usage.free, "total": usage.total, "filesystem": kind},
    )


def direct_io(folder: Path) -> Finding:
    """Whether files in the folder can be read and written past the page cache, and how aligned."""
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix=".tiermem-doctor-") as inside,
        File(Path(inside) / "probe", 1 << 20, create=True) as file,
    ):
        return Finding(
            "O_DIRECT",
            Verdict.GOOD if file.direct else Verdict.SLOWER,
            file.note,
            "transfers bypass the page cache"
            if file.direct
            else "transfers go through the page cache, which takes memory beside the host budget",
            {"direct": file.direct, "memory": file.alignment.memory, "offset": file.alignment.offset},
        )


def disk_speed(folder: Path) -> Finding:
    """Bytes per second to and from the folder, as a page sees them."""
    space = shutil.disk_usage(folder).free // 4
    nbytes = min(SPEED_NBYTES, space - space % (1 << 20))
    if nbytes == 0:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    speed = measure(folder, nbytes)
    gib = 1 << 30
    return Finding(
        "disk speed",
        Verdict.GOOD,
        f"reads {format_rate(speed.read)}, writes {format_rate(speed.write)} "
        f"({format_bytes(nbytes)}, {speed.engine}{'' if speed.direct else ', through the page cache'})",
        f"1 GiB takes {gib / speed.read:.2f} s to read and {gib / speed.write:.2f} s to write",
        {"read": speed.read, "write": speed.write, "direct": speed.direct, "engine": speed.engine},
    )


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _filesystem(folder: Path) -> str:
    """The type of the filesystem that the folder is on."""
    number = os.stat(folder).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == device:
            return rest.split()[0]
    return "unknown"
