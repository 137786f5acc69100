"""The disk tier: a locked folder per run, and page files in it.

Two runs on one path never touch each other, because each has a folder of its own and holds a lock on it for as
long as it lives; a folder whose lock can be had belonged to a run that died, and is removed by the next run. Only
files that tiermem itself makes are ever removed, in folders of this user, and links are not followed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tiermem.aio import File, Queue
from tiermem.errors import BudgetError, ConfigError, format_bytes
from tiermem.page import Page

PREFIX = "tiermem-run-"
KEPT = "tiermem-kept-"
PAGES = "pages.bin"
INDEX = "pages.json"


class RunFolder:
    """A folder of this run's own under ``parent``, mode 0700, locked until :meth:`close`."""

    def __init__(self, parent: str | os.PathLike[str], keep: bool = False) -> None:
        self.parent = Path(parent)
        self.keep = keep
        self._owner = os.getpid()
        try:
            self.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.parent):
                self.reclaimed = reclaim(self.parent, locked=True)
                self.path = self.parent / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
                self.path.mkdir(mode=0o700)
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"disk.paths: {os.fspath(parent)!r} can't hold a run folder: {error.strerror}; "
                "name a folder on a disk that you may write to"
            ) from error

    def close(self) -> None:
        """Remove the folder and let go of the lock; idempotent. One that is kept gets a name that no run reclaims.

        In a child of a fork only the child's descriptor is closed: the folder is its parent's.
        """
        if self._lock < 0:
            return
        lock, self._lock = self._lock, -1
        try:
            if self._owner == os.getpid():
                if self.keep:
                    kept = self.path.with_name(KEPT + self.path.name.removeprefix(PREFIX))
                    with contextlib.suppress(FileNotFoundError):
                        self.path = self.path.rename(kept)
                else:
                    _remove(self.path, lock)
        finally:
            os.close(lock)


def reclaim(parent: Path, *, locked: bool = False) -> list[str]:
    """Remove the folders of dead runs under ``parent``; returns their names.

    A folder is a dead run's when it carries our prefix, is this user's, is no link, and nobody holds its lock.
    """
    removed = []
    with contextlib.nullcontext() if locked else _locked(parent):
        for entry in sorted(os.listdir(parent)):
            path = parent / entry
            if not entry.startswith(PREFIX):
                continue
            try:
                info = os.lstat(path)
                if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
                    continue
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue  # alive
            else:
                if _remove(path, lock):
                    removed.append(entry)
            finally:
                os.close(lock)
    return removed


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's own lock: nobody else creates or reclaims run folders in it meanwhile."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _remove(path: Path, folder: int) -> bool:
    """Remove a run folder and our files in it; False (and the folder stays) when there is anything else in it.

    ``folder`` is its descriptor, so that a link put in its place is not followed.
    """
    try:
        for name in (PAGES, INDEX):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
        os.rmdir(path)
    except OSError:
        return False
    return True


class Disk:
    """Page files in one or more run folders, and the queue that moves bytes between them and host frames.

    ``capacity`` in bytes is the tier's budget. Extents are given out once and never move; the files are
    preallocated, so that a full disk is found out before training and not in the middle of it.
    """

    def __init__(self, paths: Sequence[str], capacity: int, queue: Queue, keep: bool = False) -> None:
        self.capacity = capacity
        self.queue = queue
        self.used = 0
        self.whole = 0  # bytes that all pages of the model take together, for messages
        self.folders: list[RunFolder] = []
        self.files: list[File] = []
        self._ends: list[int] = []  # bytes given out in each file
        try:
            for path in paths:
                self.folders.append(RunFolder(path, keep))
                self.files.append(File(self.folders[-1].path / PAGES, create=True))
                self._ends.append(0)
        except BaseException:
            self.close()
            raise

    @property
    def notes(self) -> list[str]:
        """In words, what is not as good as it could be (a filesystem without O_DIRECT, say)."""
        notes = [
            f"{folder.parent}: removed {name}, left by a run that died"
            for folder in self.folders
            for name in folder.reclaimed
        ]
        return notes + [f"{file.path}: {file.note}" for file in self.files if not file.direct]

    def describe(self, pages: Iterable[tuple[Page, Mapping[str, Any]]]) -> None:
        """Write beside each page file what is in it: for each page, the offset of its first byte and what is given."""
        rows: list[list[dict[str, Any]]] = [[] for _ in self.files]
        for page, facts in pages:
            if page.extent is not None:
                number, offset = page.extent
                rows[number].append({"offset": offset, "nbytes": page.nbytes, **facts})
        for folder, row in zip(self.folders, rows, strict=True):
            (folder.path / INDEX).write_text(json.dumps({"pages": row}, indent=1))

    def provide(self, pages: Iterable[Page]) -> list[Page]:
        """Give an extent to each page that may sink and has none; returns those, raises BudgetError if they don't fit.

        Pages go to the file with the fewest bytes, so that several paths are filled evenly.
        """
        new = [page for page in pages if page.sinks and page.extent is None]
        nbytes = sum(page.nbytes for page in new)
        if not new:
            return new
        if self.used + nbytes > self.capacity:
            raise BudgetError(
                nbytes,
                self.capacity - self.used,
                "disk",
                max(self.used + nbytes, self.whole),
                f"{len(new)} pages",
                "raise disk.budget or name another of disk.paths",
            )
        ends = list(self._ends)
        extents = []
        for page in new:
            number = ends.index(min(ends))
            extents.append((number, ends[number]))
            ends[number] += page.nbytes
        for file, folder, old, end in zip(self.files, self.folders, self._ends, ends, strict=True):
            space = os.statvfs(folder.path)
            free = space.f_bavail * space.f_frsize
            if end - old > free:
                raise BudgetError(
                    end - old,
                    free,
                    "disk",
                    None,
                    f"pages in {folder.parent}",
                    f"the filesystem has {format_bytes(free)} free: "
                    "make room or name another folder in disk.paths",
                )
            if end > old:
                try:
                    file.preallocate(end)
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise
                    raise BudgetError(
                        end - old,
                        free,
                        "disk",
                        None,
                        f"pages in {folder.parent}",
                        f"{error.strerror}: make room or name another folder in disk.paths",
                    ) from error
        self._ends = ends
        self.used += nbytes
        for page, extent in zip(new, extents, strict=True):
            page.extent = extent
        return new

    def path_of(self, page: Page) -> str:
        """The file that holds the page's extent, for messages."""
        assert page.extent is not None
        return str(self.files[page.extent[0]].path)

    def read(self, page: Page, address: int) -> int:
        """Begin to read a page into memory at ``address``; returns the queue's ticket."""
        assert page.extent is not None
        number, offset = page.extent
        return self.queue.read(self.files[number], offset, address, page.nbytes)

    def read_span(self, page: Page, start: int, nbytes: int, address: int) -> int:
        """Begin to read ``nbytes`` of a page from its byte ``start`` on, both multiples of the alignment."""
        assert page.extent is not None
        number, offset = page.extent
        return self.queue.read(self.files[number], offset + start, address, nbytes)

    def write(self, page: Page, address: int) -> int:
        """Begin to write a page from memory at ``address``; returns the queue's ticket."""
        assert page.extent is not None
        number, offset = page.extent
        return self.queue.write(self.files[number], offset, address, page.nbytes)

    def close(self) -> None:
        """Close the files, then remove the folders; idempotent. The queue is closed by whoever opened it."""
        with contextlib.ExitStack() as stack:
            for folder in self.folders:
                stack.callback(folder.close)
            for file in self.files:
                stack.callback(file.close)


def free_nbytes(folder: Path) -> int:
    """Bytes free on the filesystem of ``folder``, or of its nearest parent that exists."""
    path = folder.absolute()
    while not path.exists():
        path = path.parent
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize
