"""Folders that appear whole or not at all: written beside their place, synced, and put there by one rename."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from tiermem.errors import CheckpointError, SavingError
from tiermem.folder import lock_folder

PARTIAL = ".tiermem-partial-"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextlib.contextmanager
def published(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder to write into, which takes the place of ``path`` at the end, durably; after an error it is removed.

    Until the rename, what was at ``path`` is there whole, and a crash leaves at most a folder beside it that the next
    one that is published there removes. Raises CheckpointError when there is something at ``path`` that may not be
    replaced, SavingError when the folder can't be written.
    """
    path = Path(os.path.abspath(path))
    _admit(path, overwrite)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock_folder(path.parent):
            _remove_dead(path.parent)
            folder = path.parent / f"{PARTIAL}{os.getpid()}-{secrets.token_hex(4)}"
            folder.mkdir()
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise _failed(error, path) from error
    try:
        yield folder
        try:
            sync(folder)
            _admit(path, overwrite)
            _put(folder, path)
        except OSError as error:
            raise _failed(error, path) from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def dead(parent: Path) -> list[Path]:
    """What processes that died have left half written in ``parent``: see :func:`remove_dead`."""
    with lock_folder(parent):
        return [path for path, _ in _dead(parent)]


def remove_dead(parent: Path) -> list[str]:
    """Remove what processes that died have left half written in ``parent``; returns the folders' names.

    Such a folder carries our prefix, is this user's, is no link, and nobody holds its lock.
    """
    with lock_folder(parent):
        return _remove_dead(parent)


def _remove_dead(parent: Path) -> list[str]:
    removed = []
    for path, _ in _dead(parent):
        with contextlib.suppress(OSError):
            shutil.rmtree(path)
            removed.append(path.name)
    return removed


def _dead(parent: Path) -> Iterator[tuple[Path, int]]:
    """Each with a descriptor that holds its lock until the next is asked for."""
    for entry in sorted(os.listdir(parent)):
        if not entry.startswith(PARTIAL):
            continue
        path = parent / entry
        try:
            if os.lstat(path).st_uid != os.geteuid():
                continue
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue  # alive
            yield path, lock
        finally:
            os.close(lock)


def sync(folder: Path) -> None:
    """Return when all files and folders below ``folder`` would survive a loss of power."""
    if _sync_filesystem(folder):
        return
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            _sync(os.path.join(parent, name), os.O_RDONLY)
        _sync(parent, os.O_RDONLY | os.O_DIRECTORY)


def _sync_filesystem(folder: Path) -> bool:
    """Sync everything on the filesystem at once: one commit instead of one for each of a thousand small files.

    False where the kernel can't, or is older than Linux 5.8, whose syncfs(2) keeps errors to itself.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = [int(number) for number in re.findall(r"\d+", os.uname().release)[:2]]
    if version < [5, 8] or not hasattr(libc, "syncfs"):
        return False
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if libc.syncfs(fd):
            code = ctypes.get_errno()
            if code == errno.ENOSYS:
                return False
            raise OSError(code, os.strerror(code), os.fspath(folder))
    finally:
        os.close(fd)
    return True


def _sync(path: str, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    except OSError as error:
        error.filename = path
        raise
    finally:
        os.close(fd)


def _admit(path: Path, overwrite: bool) -> None:
    """Refuse to replace what isn't a checkpoint, or what the caller didn't say may go."""
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _failed(error, path) from error
    if not overwrite:
        raise CheckpointError(f"{path} is there already: name another path, or pass overwrite=True")
    if not stat.S_ISDIR(info.st_mode) or (os.listdir(path) and not (path / "zarr.json").is_file()):
        raise CheckpointError(f"{path} is there already and is no checkpoint: it is not overwritten")


def _put(folder: Path, path: Path) -> None:
    """Rename ``folder`` to ``path``, whose old content goes when the new one is there."""
    if not os.path.lexists(path):
        os.rename(folder, path)
        _sync(str(path.parent), os.O_RDONLY | os.O_DIRECTORY)
        return
    if not _exchange(folder, path):
        # A filesystem that can't exchange two names: for a moment the old one has another name.
        aside = path.with_name(f"{PARTIAL}{os.getpid()}-{secrets.token_hex(4)}")
        os.rename(path, aside)
        os.rename(folder, path)
        folder = aside
    _sync(str(path.parent), os.O_RDONLY | os.O_DIRECTORY)
    shutil.rmtree(folder, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step of the kernel's; False where it can't be had."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if not libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), os.fspath(other))


def _failed(error: OSError, path: Path) -> SavingError:
    return SavingError(error.errno or 0, error.strerror or str(error), os.fspath(error.filename or path))
