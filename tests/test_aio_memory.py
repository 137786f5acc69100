"""What the kernel and cgroups say of memory."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tiermem.aio import memory

Machine = Callable[[str, dict[str, str]], None]
MEMINFO = "MemTotal:    1000 kB\nMemFree:  100 kB\nMemAvailable:  400 kB\n"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """A machine of 1000 KiB, with the cgroups that are given."""

    def make(membership: str, files: dict[str, str]) -> None:
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
        for name, content in (("own", membership), ("meminfo", MEMINFO)):
            (tmp_path / name).write_text(content)
        monkeypatch.setattr(memory, "CGROUPS", tmp_path)
        monkeypatch.setattr(memory, "OWN_CGROUP", tmp_path / "own")
        monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")

    return make


def test_this_machine() -> None:
    found = memory.look()
    assert 0 < found.free <= found.available <= found.total
    assert 0 < found.most <= found.total


def v1(limit: int, used: int) -> dict[str, str]:
    return {"memory/a/memory.limit_in_bytes": str(limit), "memory/a/memory.usage_in_bytes": str(used)}


@pytest.mark.parametrize(
    ("membership", "files", "limit", "headroom"),
    [
        ("0::/a/b\n", {"a/memory.max": "100", "a/memory.current": "40"}, 100, 60),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/b/memory.current": "40"}, None, None),
        ("0::/a\n", {"memory.max": "100", "memory.current": "400"}, 100, 0),
        ("0::/\n", {}, None, None),
        ("3:cpu,memory:/a\n", v1(90, 50), 90, 40),
        ("3:memory:/a\n", v1(9223372036854771712, 5), None, None),
        # Files that were read are given up for memory that is wanted.
        (
            "0::/a\n",
            {"a/memory.max": "100", "a/memory.current": "90", "a/memory.stat": "anon 9\ninactive_file 30\n"},
            100,
            40,
        ),
        ("3:memory:/a\n", v1(90, 50) | {"memory/a/memory.stat": "total_inactive_file 20\n"}, 90, 60),
    ],
)
def test_limits_of_cgroups(
    machine: Machine, membership: str, files: dict[str, str], limit: int | None, headroom: int | None
) -> None:
    machine(membership, files)
    found = memory.look()
    assert (found.limit, found.headroom) == (limit, headroom)
    assert (found.total, found.available) == (1000 << 10, 400 << 10)
    assert found.most == (limit or 1000 << 10)
    assert found.free == (400 << 10 if headroom is None else headroom)


def test_a_kernel_that_does_not_tell(machine: Machine, tmp_path: Path) -> None:
    machine("", {})
    (tmp_path / "meminfo").write_text("MemTotal: 5 kB\n")
    with pytest.raises(OSError, match="no MemAvailable"):
        memory.look()
