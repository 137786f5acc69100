"""The disk tier: folders that nobody else touches, and room that is known before it is needed."""

import contextlib
import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tiermem.aio import Buffer, File, Queue, open_queue
from tiermem.disk import Disk
from tiermem.errors import BudgetError, ConfigError
from tiermem.folder import KEPT, PAGES, PREFIX, RunFolder, reclaim
from tiermem.page import ALIGNMENT, Kind, Page

ROOT = Path(__file__).parent.parent


@pytest.fixture
def queue() -> Iterator[Queue]:
    with open_queue("threads", 4096, 2) as queue:
        yield queue


def page(cells: int, number: int = 0, sinks: bool = True) -> Page:
    return Page(number, 0, Kind.PARAMETER, torch.uint8, cells * ALIGNMENT, sinks)


@contextlib.contextmanager
def another_run(parent: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has a run folder under ``parent`` with a page file in it, and lives until it is killed."""
    code = (
        "import sys; from tiermem.folder import RunFolder; from tiermem.aio import File;"
        "folder = RunFolder(sys.argv[1]); file = File(folder.path / 'pages.bin', 8192, create=True);"
        "print(folder.path.name, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(parent)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


# -- folders ------------------------------------------------------------------------------------------------


def test_two_runs_on_one_path_have_two_folders(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    assert first.path != second.path
    assert {entry.name for entry in tmp_path.iterdir()} == {first.path.name, second.path.name}
    assert first.reclaimed == second.reclaimed == reclaim(tmp_path) == []
    for folder in (first, second):
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        folder.close()
        folder.close()
    assert list(tmp_path.iterdir()) == []


def test_a_dead_runs_folder_is_reclaimed_and_a_live_ones_never(tmp_path: Path) -> None:
    with another_run(tmp_path) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        assert (tmp_path / name / PAGES).stat().st_size == 8192
        folder = RunFolder(tmp_path)
        assert folder.reclaimed == []
        folder.close()
        assert (tmp_path / name / PAGES).exists()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert (tmp_path / name / PAGES).exists()
        folder = RunFolder(tmp_path)
        assert folder.reclaimed == [name]
        assert not (tmp_path / name).exists()
        folder.close()


def test_what_is_kept_stays(tmp_path: Path, queue: Queue) -> None:
    disk = Disk([str(tmp_path)], 1 << 20, queue, keep=True)
    disk.provide([page(2)])
    disk.close()
    (kept,) = tmp_path.iterdir()
    assert kept.name.startswith(KEPT)
    assert (kept / PAGES).stat().st_size == 2 * ALIGNMENT
    assert disk.folders[0].path == kept
    folder = RunFolder(tmp_path)
    assert folder.reclaimed == []
    folder.close()
    disk.close()
    assert (kept / PAGES).exists()


def test_what_is_kept_is_removed_when_the_run_dies(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, keep=True)
    os.close(folder._lock)  # as the kernel does when a process dies
    assert reclaim(tmp_path) == [folder.path.name]


@pytest.mark.parametrize("entry", ["file", "folder"])
def test_what_isnt_ours_is_never_deleted(tmp_path: Path, entry: str) -> None:
    folder = RunFolder(tmp_path)
    (folder.path / PAGES).touch()
    foreign = folder.path / "notes"
    foreign.mkdir() if entry == "folder" else foreign.write_text("mine")
    folder.close()
    assert [path.name for path in folder.path.iterdir()] == ["notes"]
    assert reclaim(tmp_path) == []
    assert foreign.exists()


def test_a_folder_in_the_page_files_place_is_left(tmp_path: Path) -> None:
    odd = tmp_path / f"{PREFIX}1-odd"
    (odd / PAGES).mkdir(parents=True)
    folder = RunFolder(tmp_path)
    assert folder.reclaimed == []
    folder.close()
    assert (odd / PAGES).is_dir()


def test_other_names_are_left(tmp_path: Path) -> None:
    for name in ("tiermem-kept-1-a", "tiermem-runs", "data", f"x{PREFIX}1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / PAGES).touch()
    (tmp_path / f"{PREFIX}file").touch()
    assert reclaim(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 5


def test_links_are_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "elsewhere"
    victim.mkdir()
    (victim / PAGES).write_text("precious")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / f"{PREFIX}1-link").symlink_to(victim)
    inside = tmp_path / "runs" / f"{PREFIX}1-inside"
    inside.mkdir()
    (inside / PAGES).symlink_to(victim / PAGES)
    assert reclaim(tmp_path / "runs") == [inside.name]
    assert (victim / PAGES).read_text() == "precious"
    # Nor when the running folder is exchanged for a link.
    folder = RunFolder(tmp_path / "runs")
    (folder.path / PAGES).touch()
    moved = folder.path.rename(tmp_path / "moved")
    folder.path.symlink_to(victim)
    folder.close()
    assert (victim / PAGES).read_text() == "precious"
    assert list(moved.iterdir()) == []


def test_a_link_in_the_page_files_place_is_refused(tmp_path: Path, queue: Queue) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"mine")
    folder = RunFolder(tmp_path)
    (folder.path / PAGES).symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"):
        File(folder.path / PAGES, create=True)
    folder.close()
    assert target.read_bytes() == b"mine"


def test_the_childs_fork_leaves_its_parents_folder(tmp_path: Path) -> None:
    for keep in (False, True):
        folder = RunFolder(tmp_path, keep)
        if (child := os.fork()) == 0:
            folder.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert folder.path.exists()
        assert reclaim(tmp_path) == []
        folder.close()


def test_the_parent_of_run_folders_is_made(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "b")
    assert folder.path.parent == tmp_path / "a" / "b"
    folder.close()
    assert (tmp_path / "a" / "b").is_dir()


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"disk.paths: '.*/file' can't hold a run folder: File exists"):
        RunFolder(tmp_path / "file")
    with pytest.raises(ConfigError, match="Not a directory"):
        RunFolder(tmp_path / "file" / "below")


def test_a_path_that_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # root may write anywhere, so the refusal is the kernel's word put into mkdir's mouth.
    mkdir = Path.mkdir

    def refuse(path: Path, *args: object, **kwargs: object) -> None:
        if path.name.startswith(PREFIX):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        mkdir(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", refuse)
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="Permission denied; name a folder on a disk that you may write to"):
        RunFolder(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == fds


# -- room ---------------------------------------------------------------------------------------------------


def test_files_are_private_and_preallocated(tmp_path: Path, queue: Queue) -> None:
    disk = Disk([str(tmp_path)], 1 << 20, queue)
    file = Path(disk.files[0].path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    disk.provide([page(4)])
    assert file.stat().st_size == 4 * ALIGNMENT
    assert file.stat().st_blocks * 512 >= 4 * ALIGNMENT
    disk.close()
    disk.close()
    assert list(tmp_path.iterdir()) == []


def test_several_paths_are_filled_evenly(tmp_path: Path, queue: Queue) -> None:
    disk = Disk([str(tmp_path / name) for name in "abc"], 1 << 20, queue)
    pages = [page(cells, number) for number, cells in enumerate((3, 1, 2, 1, 3, 2, 3, 3))]
    disk.provide(pages[:4])
    disk.provide(pages)  # those that have an extent keep it
    extents = [each.extent for each in pages]
    assert all(extent is not None for extent in extents)
    ends = [0, 0, 0]
    for each in sorted(pages, key=lambda each: each.extent or (0, 0)):
        assert each.extent is not None
        number, offset = each.extent
        assert offset == ends[number]  # side by side, none on another
        ends[number] += each.nbytes
    assert max(ends) - min(ends) <= 3 * ALIGNMENT
    assert sum(ends) == disk.used == 18 * ALIGNMENT
    for file, end in zip(disk.files, ends, strict=True):
        assert os.stat(file.path).st_size == end
    assert disk.path_of(pages[0]) == disk.files[0].path
    disk.close()


def test_a_page_that_may_not_sink_gets_no_extent(tmp_path: Path, queue: Queue) -> None:
    disk = Disk([str(tmp_path)], 1 << 20, queue)
    disk.provide([stays := page(1, sinks=False)])
    assert stays.extent is None
    assert disk.used == 0
    disk.close()


def test_a_budget_that_is_too_small(tmp_path: Path, queue: Queue) -> None:
    disk = Disk([str(tmp_path)], 3 * ALIGNMENT, queue)
    disk.provide([page(2)])
    with pytest.raises(BudgetError, match=r"raise disk.budget or name another of disk.paths") as info:
        disk.provide([page(1, 1), late := page(1, 2)])
    assert (info.value.asked, info.value.had, info.value.tier) == (2 * ALIGNMENT, ALIGNMENT, "disk")
    assert info.value.smallest == 4 * ALIGNMENT
    assert late.extent is None
    assert disk.used == 2 * ALIGNMENT
    disk.provide([late])
    disk.close()


def test_a_filesystem_that_is_full(tmp_path: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk([str(tmp_path)], 1 << 30, queue)
    full = SimpleNamespace(f_bavail=3, f_frsize=ALIGNMENT)
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _: full)
        with pytest.raises(BudgetError, match=r"the filesystem has 12.00 KiB free") as info:
            disk.provide([large := page(4)])
    assert (info.value.asked, info.value.had) == (4 * ALIGNMENT, 3 * ALIGNMENT)
    assert large.extent is None
    disk.provide([large])
    disk.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_filesystem_that_fills_meanwhile(
    tmp_path: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    disk = Disk([str(tmp_path / "a"), str(tmp_path / "b")], 1 << 30, queue)
    allocate, calls = os.posix_fallocate, iter(range(9))

    def refuse(*args: int) -> None:
        if next(calls) == 1:  # the second file's
            raise OSError(code, os.strerror(code))
        allocate(*args)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    pages = [page(1), page(1, 1)]
    with pytest.raises(BudgetError, match=r"make room or name another folder") as info:
        disk.provide(pages)
    assert isinstance(info.value.__cause__, OSError)
    assert [each.extent for each in pages] == [None, None]
    assert disk.used == 0
    disk.provide(pages)
    assert [each.extent for each in pages] == [(0, 0), (1, 0)]
    disk.close()


def test_a_failure_to_open_leaves_nothing(tmp_path: Path, queue: Queue) -> None:
    (tmp_path / "file").touch()
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError):
        Disk([str(tmp_path / "good"), str(tmp_path / "file")], 1 << 20, queue)
    assert len(os.listdir("/proc/self/fd")) == fds
    assert list((tmp_path / "good").iterdir()) == []


@pytest.mark.parametrize("where", [None, "/dev/shm"])
@pytest.mark.parametrize("engine", ["libaio", "threads"])
def test_pages_go_and_come_back(tmp_path: Path, where: str | None, engine: str) -> None:
    folder = RunFolder(where) if where else None
    parent = folder.path / "below" if folder else tmp_path
    with open_queue(engine, 4096, 4) as queue, Buffer(8 * ALIGNMENT) as buffer:
        disk = Disk([str(parent)], 1 << 20, queue)
        pages = [page(1), page(3, 1)]
        disk.provide(pages)
        buffer.view[:] = bytes(range(256)) * (buffer.nbytes // 256)
        for number, each in enumerate(pages):
            buffer.view[number * ALIGNMENT] = 77
            queue.wait(disk.write(each, buffer.address + number * ALIGNMENT))
        for number, each in enumerate(pages):
            want = bytes(buffer.view[number * ALIGNMENT :][: each.nbytes])
            buffer.view[4 * ALIGNMENT :] = bytes(4 * ALIGNMENT)
            queue.wait(disk.read(each, buffer.address + 4 * ALIGNMENT))
            assert buffer.view[4 * ALIGNMENT :][: each.nbytes] == want
        assert bool(disk.notes) != disk.files[0].direct  # buffered is worth a note
        disk.close()
    if folder:
        parent.rmdir()
        folder.close()
