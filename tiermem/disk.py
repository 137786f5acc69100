"""The disk tier: page files in run folders, and where in them each page is.

A page that is part of commits has several slots, and is written to one that no kept commit names: what a commit named
stays as it was until a later one is the truth. Every other page has one place, and is written over there.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tiermem.aio import File, Queue
from tiermem.durable import DurableRun
from tiermem.errors import BudgetError, format_bytes
from tiermem.folder import INDEX, PAGES, DurableFolder, RunFolder, check_file
from tiermem.page import Page
from tiermem.quota import Quota
from tiermem.record import BLANK, CHECKED, Commit


class Disk:
    """Page files in one or more run folders, and the queue that moves bytes between them and host frames.

    ``capacity`` in bytes is the tier's budget. Slots are given out once and never move; the files are preallocated, so
    that a full disk is found out before training and not in the middle of it. With a ``run``, they are in its folders,
    and stay there; ``paths`` are not used then. ``weights`` say how much of the pages each path is to get, as a share
    of the weights' sum; without them, all get the same.
    """

    def __init__(
        self,
        paths: Sequence[str],
        capacity: int,
        queue: Queue,
        keep: bool = False,
        *,
        run: DurableRun | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        self.capacity = capacity
        self.queue = queue
        self.run = run
        self.used = 0
        self.whole = 0  # bytes that all pages of the model take together, for messages
        self.folders: list[RunFolder | DurableFolder] = []
        self.files: list[File] = []
        self.nbytes_read: list[int] = []  # of each file
        self.nbytes_written: list[int] = []
        self.quota: Quota | None = None
        self.grown = False  # has a page been given a slot since the run's description was written?
        self._ends: list[int] = []  # bytes given out in each file
        try:
            if run is None:
                for path in paths:
                    self.folders.append(RunFolder(path, keep))
                    self._open(self.folders[-1])
            else:
                for folder in run.folders:
                    self.folders.append(folder)
                    self._open(folder)
        except BaseException:
            self.close()
            raise
        self.weights = list(weights or [1.0] * len(self.files))

    def _open(self, folder: RunFolder | DurableFolder) -> None:
        self.files.append(File(folder.path / PAGES, create=True))
        check_file(self.files[-1].fd, folder.path / PAGES)
        self._ends.append(0)
        self.nbytes_read.append(0)
        self.nbytes_written.append(0)

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

    def stats(self) -> dict[str, dict[str, float]]:
        """For each path: bytes given out, read and written, and the share of the pages that it is to get."""
        whole = sum(self.weights)
        return {
            str(folder.parent): {
                "in_use": self._ends[number],
                "read": self.nbytes_read[number],
                "written": self.nbytes_written[number],
                "share": self.weights[number] / whole,
            }
            for number, folder in enumerate(self.folders)
        }

    # -- space --------------------------------------------------------------------------------------------

    def provide(self, pages: Iterable[Page]) -> list[Page]:
        """Give slots to each page that goes to the disk and has none; returns those.

        Raises BudgetError if they don't fit. A page goes to the file that has the least for its weight, of those whose
        filesystems have room for it.
        """
        new = [page for page in pages if (page.sinks or page.durable) and page.extent is None]
        for page, slots in zip(new, self._cut([page.nbytes * page.num_slots for page in new]), strict=True):
            number, offset = slots
            page.slots = [(number, offset + slot * page.nbytes) for slot in range(page.num_slots)]
            page.extent = page.slots[0]
        self.grown = self.grown or bool(new)
        return new

    def _cut(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """New places of these sizes in bytes, preallocated; raises BudgetError if they don't fit."""
        nbytes = sum(sizes)
        if self.used + nbytes > self.capacity:
            raise BudgetError(
                nbytes,
                self.capacity - self.used,
                "disk",
                max(self.used + nbytes, self.whole),
                f"{len(sizes)} pages",
                "raise disk.budget or name another of disk.paths",
            )
        ends = list(self._ends)
        rooms = [self._free(number) if sizes else 0 for number in range(len(self.files))]
        places = []
        for size in sizes:
            roomy = [n for n in range(len(ends)) if ends[n] + size - self._ends[n] <= rooms[n]]
            number = min(roomy or range(len(ends)), key=lambda n: ends[n] / self.weights[n])
            places.append((number, ends[number]))
            ends[number] += size
        for number, end in enumerate(ends):
            if end > self._ends[number]:
                self._grow(number, end, rooms[number])
        self._ends = ends
        self.used += nbytes
        return places

    def _free(self, number: int) -> int:
        space = os.statvfs(self.folders[number].path)
        return space.f_bavail * space.f_frsize

    def _grow(self, number: int, end: int, free: int) -> None:
        """Make a page file ``end`` bytes long; raises BudgetError when its filesystem has no room."""
        asked, parent = end - self._ends[number], self.folders[number].parent
        reason = f"the filesystem has {format_bytes(free)} free" if asked > free else ""
        cause = None
        if not reason:
            try:
                self.files[number].preallocate(end)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                reason, cause = str(error.strerror), error
        if reason:
            raise BudgetError(
                asked,
                free,
                "disk",
                None,
                f"pages in {parent}",
                f"{reason}: make room or name another folder in disk.paths",
            ) from cause

    # -- bytes --------------------------------------------------------------------------------------------

    def path_of(self, page: Page) -> str:
        """The file that holds the page, or will when it has been written, for messages."""
        return str(self.files[self.place_of(page)[0]].path)

    def place_of(self, page: Page) -> tuple[int, int]:
        """Which file, and the byte in it, a page is being written to or else is read from."""
        place = page.target or page.extent
        assert place is not None
        return place

    def read(self, page: Page, address: int) -> int:
        """Begin to read a page into memory at ``address``; returns the queue's ticket."""
        assert page.extent is not None
        number, offset = page.extent
        ticket = self.queue.read(self.files[number], offset, address, page.nbytes)
        self.nbytes_read[number] += page.nbytes
        return ticket

    def read_span(self, page: Page, start: int, nbytes: int, address: int) -> int:
        """Begin to read ``nbytes`` of a page from its byte ``start`` on, both multiples of the alignment."""
        assert page.extent is not None
        number, offset = page.extent
        return self.queue.read(self.files[number], offset + start, address, nbytes)

    def write(self, page: Page, address: int) -> int:
        """Begin to write a page from memory at ``address``; returns the queue's ticket. :meth:`written` must follow.

        Raises BudgetError when it needs another slot and there is no room for one.
        """
        number, offset = target = self._target(page)
        ticket = self.queue.write(self.files[number], offset, address, page.nbytes)
        page.target = target
        self.nbytes_written[number] += page.nbytes
        if self.quota is not None:
            self.quota.add(page.nbytes, number)
        return ticket

    def _target(self, page: Page) -> tuple[int, int]:
        """Where to write a page: over what is there, unless a commit that is kept names that."""
        assert page.extent is not None
        held = [*page.committed, page.prepared]
        if page.extent not in held:
            return page.extent
        free = next((slot for slot in page.slots if slot not in held), None)
        if free is None:
            # Of a page that wasn't expected to change: a frozen parameter that a user has written.
            (free,) = self._cut([page.nbytes])
            page.slots.append(free)
            self.grown = True
        return free

    def written(self, page: Page, checksum: int | None, failed: bool = False) -> None:
        """The write of a page has ended: from now on it is read from there, unless it failed."""
        target, page.target = page.target, None
        if not failed:
            page.extent, page.checksum = target, checksum
        elif target == page.extent:
            page.checksum = None  # what is there now is neither

    # -- commits ------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Return when all that was written would survive a loss of power. Raises OSError.

        Also when a file has been deleted: what is written to it goes with this process.
        """
        for file in self.files:
            file.sync()
            if not os.fstat(file.fd).st_nlink:
                raise OSError(errno.ENOENT, "it was deleted while this run has it open", file.path)

    def prepare(self, pages: Iterable[Page]) -> None:
        """The next commit will name these pages as they are now on the disk."""
        for page in pages:
            page.prepared = None if page.blank else page.extent

    def committed(self, pages: Iterable[Page], num_kept: int) -> None:
        """It does, and ``num_kept`` commits are kept."""
        for page in pages:
            page.committed.append(page.prepared)
            page.prepared = None
            del page.committed[:-num_kept]

    def keep(self, pages: Iterable[Page], numbers: Sequence[int]) -> None:
        """Of the commits that are kept, only those with these numbers are from now on: 0 is the oldest."""
        for page in pages:
            page.committed = [page.committed[number] for number in numbers]

    def adopt(self, pages: Sequence[Page], run: DurableRun) -> None:
        """Take over where the pages of a resumed run are: as its last commit says. Raises OSError."""
        newest = run.kept[-1]
        for page in pages:
            page.slots = list(run.slots[page.number])
            for number, offset in page.slots:
                self._ends[number] = max(self._ends[number], offset + page.nbytes)
            if not page.slots or not (page.sinks or page.durable):
                continue
            page.committed = [_extent(commit, page.number) for commit in run.kept]
            page.extent = _extent(newest, page.number) or page.slots[0]
            page.blank = _extent(newest, page.number) is None
            if not page.blank:
                row = newest.rows[page.number]
                page.checksum = int(row["checksum"]) if row["what"] == CHECKED else None
        self.used = sum(self._ends)
        if self.used > self.capacity:
            raise BudgetError(
                self.used,
                self.capacity,
                "disk",
                max(self.used, self.whole),
                f"the resumed run in {run.path}",
                "raise disk.budget",
            )

    def close(self) -> None:
        """Close the files, and remove folders that aren't a run's to keep; idempotent. The queue stays open."""
        with contextlib.ExitStack() as stack:
            for folder in self.folders:
                if isinstance(folder, RunFolder):
                    stack.callback(folder.close)
            for file in self.files:
                stack.callback(file.close)
            if self.quota is not None:
                stack.callback(self.quota.close)


def weigh(folders: Sequence[Path], rate: Callable[[Path], float]) -> list[float]:
    """What share of the pages each folder is to get: by the ``rate`` of its disk, measured once for each disk.

    Folders on one disk share it, and where there is one disk only, nothing is measured. A disk whose rate can't be had
    is taken to be as fast as the slowest.
    """
    devices = [os.stat(folder).st_dev for folder in folders]
    if len(set(devices)) < 2:
        return [1.0] * len(folders)
    rates: dict[int, float] = {}
    for folder, device in zip(folders, devices, strict=True):
        if device not in rates:
            with contextlib.suppress(OSError):
                rates[device] = rate(folder)
    slowest = min(rates.values(), default=1.0)
    return [rates.get(device, slowest) / devices.count(device) for device in devices]


def free_nbytes(folder: Path) -> int:
    """Bytes free on the filesystem of ``folder``, or of its nearest parent that exists."""
    path = folder.absolute()
    while not path.exists():
        path = path.parent
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize


def _extent(commit: Commit, number: int) -> tuple[int, int] | None:
    if number >= len(commit.rows):
        return None  # the page has come into being since
    row = commit.rows[number]
    return None if row["what"] == BLANK else (int(row["file"]), int(row["offset"]))
