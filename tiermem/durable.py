"""Durable runs: run folders that hold a state to resume from, one on each path, found again by their names and records.

The first folder of a run has its journal; every one has a ``run.json`` that says which run it belongs to, where the
others are, and, in the first, the layout. A folder without any commit holds nothing to resume from: it is a dead run's,
and is removed by the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiermem.errors import ConfigError, TransferError
from tiermem.folder import COMMIT, DAMAGE, DURABLE, PAGES, RUN, DurableFolder, Found, InUse, find
from tiermem.journal import Journal
from tiermem.layout import Layout, fingerprint, held, page_name, pages_of
from tiermem.record import BLANK, CHECKED, EMPTY, Commit, Unreadable

Extent = tuple[int, int]
"""Which page file, and the byte in it."""

Verify = Callable[["DurableRun", Commit], list[dict[str, Any]]]
"""Reads all pages of a commit and returns what is damaged of it, as :meth:`DurableRun.mark` takes it."""


@dataclass
class DurableRun:
    """The folders of one durable run, locked; closed with :meth:`close`.

    ``num_kept`` commits stay whole at a time. ``kept`` are those on the disk, oldest first; the last is the
    one to resume from. ``slots`` are the extents that each page has, by its number.
    """

    folders: list[DurableFolder]
    journal: Journal
    num_kept: int
    layout: Layout = field(default_factory=dict)
    slots: list[list[Extent]] = field(default_factory=list)
    kept: list[Commit] = field(default_factory=list)
    generation: int = 0
    """The highest that was ever begun; who begins a commit counts it."""
    notes: list[str] = field(default_factory=list)
    records: list[Commit | Unreadable] = field(default_factory=list)
    damage: list[dict[str, Any]] = field(default_factory=list)
    described: int = 0
    """How many commits stayed whole when it was described last."""
    _marking: threading.Lock = field(default_factory=threading.Lock)
    joint: bool = False
    """Is it one rank's part of what several commit together? Then who writes says what is kept no longer."""

    @property
    def path(self) -> Path:
        """The first folder, by which the run is known."""
        return self.folders[0].path

    @property
    def nbytes(self) -> int:
        """Bytes that its page files take."""
        return sum(_size(folder.path / PAGES) for folder in self.folders)

    # -- opening ------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, parents: Sequence[Path], num_kept: int, name: str | None = None) -> DurableRun:
        """A new one, with a folder under each of ``parents``, of this name. Raises ConfigError where one can't be."""
        with contextlib.ExitStack() as stack:
            name = name or name_of(next_number(parents), secrets.token_hex(4))
            folders = []
            for parent in parents:
                folders.append(DurableFolder.create(parent, name))
                stack.callback(folders[-1].remove)
            try:
                journal = Journal(folders[0], num_kept + 1)
            except OSError as error:
                raise ConfigError(
                    f"disk.paths: {os.fspath(parents[0])!r} can't hold a durable run: {error.strerror}; name one on "
                    "a disk that has room and that you may write to"
                ) from error
            stack.pop_all()
        return cls(folders, journal, num_kept)

    @classmethod
    def open(cls, path: Path, num_kept: int = 0) -> DurableRun:
        """The run that the folder ``path`` belongs to. What is in it is looked at, and nothing is judged yet.

        Without ``num_kept``, it is only looked at, and nothing is made in it.

        Raises ConfigError when it isn't a durable run's, isn't ours, is in use, or a folder of it is missing.
        """
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(contextlib.closing(DurableFolder.open(path)))
            read = _read_run(folder)
            if read["index"] != 0:
                raise ConfigError(
                    f"{path}: is folder {read['index']} of a run; name its first, {read['folders'][0]}"
                )
            folders = [folder]
            missing = []
            for index in range(1, len(read["folders"])):
                other = _open_other(read, index)
                if isinstance(other, str):
                    missing.append(other)
                else:
                    folders.append(stack.enter_context(contextlib.closing(other)))
            if missing:
                raise ConfigError(*missing, source=str(path))
            num_slots = num_kept + 1 if num_kept else 0
            journal = stack.enter_context(contextlib.closing(Journal(folder, num_slots)))
            slots = [[(slot[0], slot[1]) for slot in each] for each in read["slots"]]
            run = cls(folders, journal, num_kept or read["commits"], read["layout"], slots)
            run.described = read["commits"]
            run.records = journal.read()
            run.damage = json.loads(folder.read(DAMAGE) or b"[]")
            run.generation = max((each.generation or 0 for each in run.records), default=0)
            stack.pop_all()
        return run

    @property
    def empty(self) -> bool:
        """Was nothing ever committed?"""
        return all(isinstance(each, Unreadable) and each.reason == EMPTY for each in self.records)

    @property
    def unfinished(self) -> bool:
        """Was its first commit broken off, as far as can be told? Then there is nothing in it to resume from."""
        torn = [each for each in self.records if isinstance(each, Unreadable) and each.reason != EMPTY]
        return len(torn) == 1 and not any(isinstance(each, Commit) for each in self.records)

    # -- which commit -------------------------------------------------------------------------------------

    def commits(self) -> list[Commit]:
        """The whole records of this layout, newest first."""
        mine = fingerprint(self.layout)
        whole = [each for each in self.records if isinstance(each, Commit) and each.fingerprint == mine]
        return sorted(whole, key=lambda commit: -commit.generation)

    def choose(self, verify: Verify) -> None:
        """Take the newest commit that is whole for the one to resume from; what is passed over is said in the notes.

        Records that can't be read make it uncertain whether an older commit's pages are still there: it is verified
        then. Raises ConfigError when there is no whole commit, with what is wrong with each.
        """
        problems = self.torn()
        for commit in self.commits():
            bad = self.known_damage(commit)
            if not bad and problems:
                bad = verify(self, commit)
            if not bad:
                self.kept = [commit]
                if problems:
                    text = "; ".join(problems)
                    self.notes.append(
                        f"{self.path}: resumes from commit {commit.generation} (step {commit.step}), because {text}"
                    )
                older = [each for each in self.commits() if each.generation < commit.generation]
                if self.num_kept > 1 and older and not problems:
                    self.kept = [*reversed(older[: self.num_kept - 1]), commit]
                return
            self.mark(bad)
            problems.append(
                f"commit {commit.generation} (step {commit.step}) is damaged: "
                + "; ".join(map(describe_damage, bad[:3]))
            )
        raise ConfigError(
            *problems or ["it has no commit"],
            "no whole commit is left: remove the folder to start afresh, or load a checkpoint",
            source=str(self.path),
        )

    def torn(self) -> list[str]:
        """In words, which records can't be read."""
        return [
            f"{self.journal.slot(number)}: {record.reason}"
            for number, record in enumerate(self.records)
            if isinstance(record, Unreadable) and record.reason != EMPTY
        ]

    def known_damage(self, commit: Commit) -> list[dict[str, Any]]:
        """What is known to be wrong with a commit without reading its pages."""
        found = []
        places = {(each["file"], each["offset"], each["expected"]): each for each in self.damage}
        sizes = [_size(folder.path / PAGES) for folder in self.folders]
        pages = pages_of(self.layout)
        for number, row in enumerate(commit.rows):
            if row["what"] == BLANK:
                continue
            file, offset, nbytes = int(row["file"]), int(row["offset"]), pages[number][3]
            expected = int(row["checksum"]) if row["what"] == CHECKED else None
            if known := places.get((file, offset, expected)):
                found.append(known)
            elif offset + nbytes > sizes[file]:
                found.append(self.damaged(number, file, offset, expected, None))
        return found

    def damaged(
        self, number: int, file: int, offset: int, expected: int | None, actual: int | None
    ) -> dict[str, Any]:
        """A page that is damaged, as :meth:`mark` takes it; ``actual`` is None where its bytes aren't all there."""
        return {
            "page": page_name(self.layout, number),
            "file": file,
            "path": str(self.folders[file].path / PAGES),
            "offset": offset,
            "expected": expected,
            "actual": actual,
        }

    def mark(self, damage: Sequence[dict[str, Any]]) -> None:
        """Remember what is damaged, so that no resume takes a commit that has it. Raises OSError."""
        with self._marking:  # threads that serve other ranks find damage too
            new = [each for each in damage if each not in self.damage]
            if new:
                self.damage += new
                self.folders[0].write(DAMAGE, json.dumps(self.damage, indent=1).encode())

    # -- writing ------------------------------------------------------------------------------------------

    def describe(self, layout: Layout, slots: Sequence[Sequence[Extent]]) -> None:
        """Write into each folder which run it belongs to, and into the first what is where, if it isn't there.

        Raises TransferError.
        """
        new = [list(each) for each in slots]
        if new == self.slots and self.described == self.num_kept:
            return
        self.layout, self.slots, self.described = layout, new, self.num_kept
        paths = [str(folder.path.absolute()) for folder in self.folders]
        for index, folder in reversed(list(enumerate(self.folders))):
            known: dict[str, Any] = {"version": 1, "index": index, "folders": paths}
            if index == 0:
                known |= {"commits": self.num_kept, "slots": self.slots, "layout": layout}
            try:
                folder.write(RUN, json.dumps(known).encode())
            except OSError as error:
                self.described = 0
                path = str(folder.path / RUN)
                detail = "nothing was changed"
                raise TransferError(
                    "what a run says of itself", "host", "disk", path, error.errno or 0, detail
                ) from error

    def write(self, commit: Commit) -> None:
        """Make ``commit`` durable; its pages must be. Raises OSError, and then it may be durable or not."""
        self.journal.write(commit, {each.generation for each in self.kept})
        self.kept = [*self.kept, commit]
        if not self.joint:
            self.kept = self.kept[-self.num_kept :]

    def close(self) -> None:
        """Let go of everything; the folders stay, unless nothing was ever committed. Idempotent."""
        if not self.kept and self.empty:
            self.remove()
        else:
            self.let_go()

    def let_go(self) -> None:
        """Let go of everything; whatever is there stays. Idempotent."""
        with contextlib.ExitStack() as stack:
            for folder in self.folders:
                stack.callback(folder.close)
            stack.callback(self.journal.close)

    def remove(self) -> bool:
        """Let go of everything, and remove what is ours; False when something else is in a folder, which stays."""
        self.journal.close()
        # The first one last: without it, the others would be a run's that lost a disk.
        removed = [folder.remove() for folder in reversed(self.folders) if folder.fd >= 0]
        return all(removed)


def describe_damage(damage: dict[str, Any]) -> str:
    """One damaged page in words."""
    where = f"{damage['page']}, at byte {damage['offset']:,} of {damage['path']}"
    if damage["actual"] is None:
        return f"{where}: the file ends before it does"
    return f"{where}: its checksum is {damage['actual']:016x}, and {damage['expected']:016x} was written"


def common_of(said: Sequence[Sequence[Any]]) -> list[list[int]]:
    """The commits, [generation, step], that are in what every rank has said, oldest first."""
    return sorted(each for each in said[0] if all(each in one for one in said))


def next_number(parents: Sequence[Path]) -> int:
    """What the next run under ``parents`` is numbered."""
    return 1 + max((number_of(each.path.name) for parent in parents for each in _durable(parent)), default=0)


def name_of(number: int, token: str, share: tuple[int, int] | None = None) -> str:
    """The name of a run's folders. Newer runs have higher numbers; ``share``: rank and number of ranks, if several."""
    name = f"{DURABLE}{number:06}-{token}"
    return name if share is None else f"{name}.{share[0]}of{share[1]}"


def share_of(name: str) -> tuple[int, int] | None:
    """Which rank's of how many a run's folder is; None where it is of one process alone."""
    match = re.search(r"\.(\d+)of(\d+)$", name)
    return (int(match[1]), int(match[2])) if match else None


def number_of(name: str) -> int:
    """The number that :func:`name_of` was given."""
    match = re.match(rf"{re.escape(DURABLE)}(\d+)-", name)
    return int(match[1]) if match else 0


def search(parents: Sequence[Path]) -> list[Found]:
    """The durable runs whose first folder is under one of ``parents``, the newest first."""
    runs = {each.path.name: each for parent in reversed(parents) for each in _durable(parent)}
    return sorted(runs.values(), key=lambda each: -number_of(each.path.name))


def unborn(folder: DurableFolder) -> bool:
    """Is it the first folder of a run that died before it described itself, so before any commit?"""
    names = os.listdir(folder.fd)
    return RUN not in names and not any(
        name.startswith(COMMIT) and (folder.path / name).lstat().st_size for name in names
    )


def remove_unborn(path: Path, parents: Sequence[Path]) -> bool:
    """Remove the folders of a run that died before it described itself; was it such a one?"""
    with contextlib.closing(DurableFolder.open(path)) as first:
        if not unborn(first):
            return False
        for parent in reversed(parents):
            other = parent / path.name
            if other != path and other.is_dir():
                DurableFolder.open(other).remove()
        first.remove()
        return True


def peek(path: Path) -> Layout | None:
    """The layout of a run that somebody has open; None when there is none to be read."""
    try:
        fd = os.open(path / RUN, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            layout: Layout = json.load(file)["layout"]
            return layout
    except (OSError, ValueError, KeyError):
        return None


def _durable(parent: Path) -> list[Found]:
    if not parent.is_dir():
        return []
    return [each for each in find(parent) if each.kind == "durable"]


def _read_run(folder: DurableFolder) -> dict[str, Any]:
    try:
        text = folder.read(RUN)
        read: dict[str, Any] = json.loads(text) if text is not None else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder.path / RUN}: can't be read: {error}") from error
    if read.get("version") != 1:
        raise ConfigError(
            f"{folder.path}: is no durable run's folder"
            + (
                f" ({RUN} is of version {read['version']}, and this release reads 1)"
                if "version" in read
                else ""
            )
        )
    return read


def _open_other(read: dict[str, Any], index: int) -> DurableFolder | str:
    """Another folder of the run, or what is wrong with it and what it held."""
    try:
        return DurableFolder.open(Path(read["folders"][index]))
    except InUse:
        raise
    except ConfigError as error:
        numbers = [n for n, each in enumerate(read["slots"]) if any(slot[0] == index for slot in each)]
        return f"{error}; it held {held(read['layout'], numbers)}"


def _size(path: Path) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except OSError:
        return 0
