"""Run folders: where a run keeps its files, locked for as long as it lives.

Two runs on one path never touch each other, because each has folders of its own and holds a lock on them. A *working*
folder goes with its run; one whose lock can be had belonged to a run that died, and is removed by the next run. A
*durable* folder stays, and is taken up again by a resume. Only files that tiermem itself makes are ever removed, in
folders of this user, and links are not followed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tiermem.errors import ConfigError

PREFIX = "tiermem-run-"
KEPT = "tiermem-kept-"
DURABLE = "tiermem-durable-"
PAGES = "pages.bin"
INDEX = "pages.json"
RUN = "run.json"
DAMAGE = "damage.json"
COMMIT = "commit-"
TEMPORARY = ".new"
MAX_FILE_NBYTES = 1 << 30
"""The most that is read of a file which isn't pages: what is larger is none of ours."""

_OURS = re.compile(
    rf"({re.escape(PAGES)}|({re.escape(INDEX)}|{RUN}|{DAMAGE}|{COMMIT}\d)({re.escape(TEMPORARY)})?)"
)


class RunFolder:
    """A folder of this run's own under ``parent``, mode 0700, locked until :meth:`close`."""

    def __init__(self, parent: str | os.PathLike[str], keep: bool = False) -> None:
        self.parent = Path(parent)
        self.keep = keep
        self._owner = os.getpid()
        self.path, self._lock, self.reclaimed = _make(
            self.parent, f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        )

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


class DurableFolder:
    """A folder that outlives its run, mode 0700, locked until :meth:`close`; see :meth:`create` and :meth:`open`.

    ``fd`` is its descriptor: files in it are reached through that, so that nothing put in the folder's place is.
    """

    def __init__(self, path: Path, fd: int, reclaimed: Sequence[str] = ()) -> None:
        self.path = path
        self.parent = path.parent
        self.fd = fd
        self.reclaimed = list(reclaimed)

    @classmethod
    def create(cls, parent: Path, name: str) -> DurableFolder:
        """A new one. Raises ConfigError where ``parent`` can't hold it."""
        path, fd, reclaimed = _make(parent, name)
        return cls(path, fd, reclaimed)

    @classmethod
    def open(cls, path: Path) -> DurableFolder:
        """One that is there. Raises ConfigError when it isn't this user's alone, or a living process has it."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            reason = "it is a link, and links are not followed" if path.is_symlink() else error.strerror
            raise ConfigError(f"{path}: can't be opened as a run folder: {reason}") from error
        try:
            info = os.fstat(fd)
            if info.st_uid != os.geteuid():
                raise ConfigError(
                    f"{path}: belongs to user {info.st_uid} and this is user {os.geteuid()}: its owner can resume it"
                )
            if info.st_mode & 0o022:
                raise ConfigError(
                    f"{path}: has mode {stat.S_IMODE(info.st_mode):04o}, so that others may have changed it; a run "
                    "folder has 0700: look into it, and chmod it if you trust what is there"
                )
            _check_files(fd, path)
            try:
                with lock_folder(path.parent):  # nobody else tries meanwhile, just to see
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InUse(
                    f"{path}: is in use by a run that lives: wait for its end, or name another path"
                ) from error
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd)

    def read(self, name: str) -> bytes | None:
        """All of a small file; None when there is none. Raises OSError for what isn't this user's regular file."""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self.fd)
        except FileNotFoundError:
            return None
        with open(fd, "rb") as file:
            check_file(fd, self.path / name)
            return file.read(MAX_FILE_NBYTES)

    def write(self, name: str, data: bytes) -> None:
        """Put a file there, whole or not at all, and durable when this returns. Raises OSError."""
        new = name + TEMPORARY
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new, dir_fd=self.fd)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(new, flags, 0o600, dir_fd=self.fd), "wb") as file:
            file.write(data)
            file.flush()
            os.fdatasync(file.fileno())
        os.replace(new, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        os.fsync(self.fd)

    def remove(self) -> bool:
        """Remove the folder and our files in it, and let go of it; False when something else is in it."""
        try:
            return _remove(self.path, self.fd)
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the lock; idempotent. The folder stays."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


class InUse(ConfigError):
    """A run folder that a living process holds."""


class Found(NamedTuple):
    """A run folder that was found: ``kind`` is "working", "durable" or "kept"; ``alive``: does somebody hold it?"""

    path: Path
    kind: str
    alive: bool


def find(parent: Path) -> list[Found]:
    """The run folders of this user under ``parent``, by name; links and others' folders are passed over."""
    found = []
    kinds = {PREFIX: "working", KEPT: "kept", DURABLE: "durable"}
    with lock_folder(parent):
        for name in sorted(os.listdir(parent)):
            kind = next((kind for prefix, kind in kinds.items() if name.startswith(prefix)), None)
            lock = _try_lock(parent / name) if kind is not None else None
            if kind is None or lock is None:
                continue
            found.append(Found(parent / name, kind, lock < 0))
            if lock >= 0:
                os.close(lock)
    return found


def reclaim(parent: Path, *, locked: bool = False) -> list[str]:
    """Remove the folders of dead runs under ``parent``; returns their names.

    A folder is a dead run's when it is a working one, is this user's, is no link, and nobody holds its lock.
    """
    removed = []
    with contextlib.nullcontext() if locked else lock_folder(parent):
        for name in sorted(os.listdir(parent)):
            lock = _try_lock(parent / name) if name.startswith(PREFIX) else None
            if lock is None or lock < 0:
                continue
            try:
                if _remove(parent / name, lock):
                    removed.append(name)
            finally:
                os.close(lock)
    return removed


def check_file(fd: int, path: Path) -> os.stat_result:
    """What fstat says of a file in a run folder. Raises OSError unless it is a regular file of this user's."""
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
        what = "isn't a regular file" if not stat.S_ISREG(info.st_mode) else f"belongs to user {info.st_uid}"
        raise OSError(errno.EPERM, f"{what}: it isn't used", str(path))
    return info


def _check_files(folder: int, path: Path) -> None:
    """Raise ConfigError for a file in a durable folder that isn't a regular one of this user's."""
    for name in os.listdir(folder):
        if not _OURS.fullmatch(name) or name.endswith(TEMPORARY):  # those are never read
            continue
        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
        what = ""
        if stat.S_ISLNK(info.st_mode):
            what = "is a link, and links are not followed"
        elif not stat.S_ISREG(info.st_mode):
            what = "isn't a regular file"
        elif info.st_uid != os.geteuid():
            what = f"belongs to user {info.st_uid}, and this is user {os.geteuid()}"
        if what:
            raise ConfigError(
                f"{path / name}: {what}: somebody has put it into a run's folder, which isn't used"
            )


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the folder's lock; -1 when somebody else does, None when it isn't our folder."""
    try:
        info = os.lstat(path)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            return None
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return -1
    return lock


def _make(parent: Path, name: str) -> tuple[Path, int, list[str]]:
    """A new, locked folder under ``parent``; its path, the lock, and the names of dead runs that made way."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with lock_folder(parent):
            reclaimed = reclaim(parent, locked=True)
            path = parent / name
            path.mkdir(mode=0o700)
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return path, lock, reclaimed
    except OSError as error:
        raise ConfigError(
            f"disk.paths: {os.fspath(parent)!r} can't hold a run folder: {error.strerror}; "
            "name a folder on a disk that you may write to"
        ) from error


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the folder's own lock: nobody else makes or removes folders of ours in it meanwhile. Raises OSError."""
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
        for name in os.listdir(folder):
            if _OURS.fullmatch(name):
                os.unlink(name, dir_fd=folder)
        os.rmdir(path)
    except OSError:
        return False
    return True
