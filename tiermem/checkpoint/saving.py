"""A save: from a model's pages into a folder of Zarr arrays, unit by unit, at once or while training goes on.

Note: what a background save is of. It is the state at the moment of the call. Numbers (updates, settings) and tensors
that are in no page (buffers, mostly) are copied then. Pages are read one group after another, in the order in which the
optimizer will come to them; whoever is about to write a page that hasn't been read yet asks for it first (``first``),
and waits while its group is saved. So nothing is copied ahead and the memory is that of the windows and slots; what it
costs is the disk's bandwidth, and a wait in ``optimizer.step()`` for what isn't saved by then.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tiermem.aio import open_queue
from tiermem.checkpoint.contents import Key, What, kinds_of, path_of, share_of, stretches
from tiermem.checkpoint.folder import published, sync
from tiermem.checkpoint.inventory import Inventory, Published
from tiermem.checkpoint.meeting import Meeting
from tiermem.checkpoint.pages import PageReader, Window
from tiermem.checkpoint.writer import ChunkWriter, seal
from tiermem.disk import free_nbytes
from tiermem.errors import CheckpointError, SavingError, format_bytes
from tiermem.page import Kind, Page
from tiermem.runtime import Runtime
from tiermem.unit import Group

WINDOW_NBYTES = 4 << 20


class Piece(NamedTuple):
    """A window of a page: of which kind, and the elements of the group that the page begins and ends with."""

    kind: What
    first: int
    last: int  # not in it; behind it the page is padded
    window: Window


class Saving:
    """One save to ``path``, of what the model is when this is made. See ``TieredModule.save``."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        inventory: Inventory,
        runtime: Runtime | None,
        after: Callable[[], Any] | None = None,
    ) -> None:
        self.path = Path(os.path.abspath(path))
        self.nbytes = inventory.nbytes
        self.nbytes_linked = 0
        self.result: Published | None = None
        self.told = False  # has somebody been told of its end?
        self._after = after
        self._inventory = inventory
        self._runtime = runtime
        self._moved = threading.Condition()  # groups have been saved, or won't be
        self._urgent: list[int] = []  # those that somebody waits for
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._pending = dict(inventory.groups)
        self._group_of = {
            stretch.page.number: key
            for key, group in self._pending.items()
            for kind in kinds_of(group)
            for stretch in stretches(group, kind)
        }
        self._versions = {group.parameter.number: group.parameter.version for group in self._pending.values()}
        self._folder = Path()
        self._reader: PageReader | None = None
        self._writer: ChunkWriter | None = None

    # -- at once, or in the background ----------------------------------------------------------------------

    def run(self) -> None:
        """Save, and return when the checkpoint is durable under its name. Raises SavingError or CheckpointError."""
        try:
            self._save()
            if self._after is not None:
                self._after()
        finally:
            self._give_up()

    def start(self) -> None:
        """Save in a thread of its own. Whoever writes pages calls :meth:`first` meanwhile."""
        plain = self._inventory.plain
        plain.update({key: tensor.clone() for key, tensor in plain.items()})
        self._thread = threading.Thread(target=self._in_background, name=f"tiermem-save-{self.path.name}")
        self._thread.start()

    def _in_background(self) -> None:
        try:
            self.run()
        except Exception as error:
            self._fail(error)  # told to whoever waits

    @property
    def done(self) -> bool:
        """Has it ended, well or badly?"""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is durable under its name. Raises SavingError or CheckpointError if it isn't."""
        self.settle()
        self.told = True
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        """Return when it has ended, well or badly."""
        if self._thread is not None:
            self._thread.join()

    def first(self, pages: Iterable[Page]) -> None:
        """Return when none of these pages is still to be read. Not to be called inside the door."""
        keys = {key for page in pages if (key := self._group_of.get(page.number)) in self._pending}
        if keys:
            with self._moved:
                self._urgent.extend(keys)
                while not keys.isdisjoint(self._pending):
                    self._moved.wait()

    def spoiled(self, page: Page, name: str) -> None:
        """A page was written without asking first: unless it has been read already, this save can't be had."""
        if self._group_of.get(page.number) in self._pending:
            self._fail(
                CheckpointError(
                    f"{name} was written inside its module's forward while {self.path} was being saved in the "
                    "background, and hadn't been saved yet: save without background=True"
                )
            )

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._give_up()

    def _give_up(self) -> None:
        """What hasn't been saved won't be."""
        with self._moved:
            self._pending.clear()
            self._moved.notify_all()

    # -- the save -------------------------------------------------------------------------------------------

    def _save(self) -> None:
        self._check_room()
        inventory = self._inventory
        with contextlib.ExitStack() as stack:
            self._folder = stack.enter_context(self._place())
            queue = stack.enter_context(open_queue())
            largest = max((array.file_nbytes for array in inventory.arrays.values()), default=1)
            self._writer = writer = ChunkWriter(queue, largest)
            stack.callback(writer.close)
            if self._pending:
                assert self._runtime is not None
                pages = [page.nbytes for group in self._pending.values() for page in _pages(group)]
                self._reader = PageReader(self._runtime, min(WINDOW_NBYTES, max(pages, default=1)))
                stack.callback(self._reader.close)
            while (key := self._next()) is not None:
                self._stream(key, inventory.groups[key])
                with self._moved:
                    self._pending.pop(key, None)
                    self._moved.notify_all()
            if self._error is not None:
                raise self._error
            if inventory.partition.rank == inventory.partition.replica == 0:
                for plain, tensor in inventory.plain.items():
                    self._save_plain(plain, tensor)
            writer.flush()
            info = os.lstat(self._folder)
        self.result = Published(self.path, (info.st_dev, info.st_ino), self._versions)

    @contextlib.contextmanager
    def _place(self) -> Iterator[Path]:
        """The folder to write into, with its documents; published at the end, by rank 0 where there are several."""
        overwrite, runtime = self._inventory.settings.overwrite, self._runtime
        with contextlib.ExitStack() as stack:
            meeting = Meeting(None if runtime is None else runtime.ranks, f"the checkpoint {self.path}")
            with meeting:
                if meeting.rank == 0:
                    folder = stack.enter_context(published(self.path, overwrite=overwrite))
                    self._inventory.write_documents(folder)
                    meeting.fact = os.fspath(folder)
            with meeting:
                yield Path(meeting.facts[0])
                if meeting.rank:
                    sync(Path(meeting.facts[0]))
                meeting.fact = self._writer.parts if self._writer is not None else []
            with meeting:
                if meeting.rank == 0:
                    arrays = self._inventory.arrays.items()
                    seal(meeting.facts, {str(folder / path_of(key)): array for key, array in arrays})
                stack.close()

    def _check_room(self) -> None:
        """Refuse what doesn't fit before anything is written; how far compression goes nobody knows."""
        inventory, parent = self._inventory, self.path.parent
        needed, free = inventory.nbytes - inventory.nbytes_linked, free_nbytes(parent)
        if needed > free and inventory.settings.compression == "none":
            raise SavingError(
                errno.ENOSPC,
                f"the checkpoint takes {format_bytes(needed)} ({needed:,} bytes) and the filesystem has "
                f"{format_bytes(free)} free: make room, or name a path on another one",
                os.fspath(parent),
            )

    def _next(self) -> int | None:
        """Which group is saved now: one that somebody waits for, if there is one."""
        with self._moved:
            while self._urgent:
                key = self._urgent.pop()
                if key in self._pending:
                    return key
            return next(iter(self._pending), None)

    def _stream(self, number: int, group: Group) -> None:
        """Read the group's pages in order, and put each field's elements where they belong."""
        reader, writer = self._reader, self._writer
        assert reader is not None
        assert writer is not None
        wanted = {kind: dict(self._inventory.places.get((number, kind), {})) for kind in kinds_of(group)}
        for index, key in list(wanted[Kind.PARAMETER].items()):
            if key in self._inventory.linked and self._inventory.link(key, self._folder):
                self.nbytes_linked += self._inventory.arrays[key].nbytes
                del wanted[Kind.PARAMETER][index]
        pieces = [piece for kind in wanted for piece in self._pieces(group, kind, sorted(wanted[kind]))]
        starts = [field.offset for field in group.fields]
        mine = share_of(self._inventory.partition, group)
        begun: Key | None = None
        for piece, (window, data) in zip(pieces, reader.read(piece.window for piece in pieces), strict=True):
            size = window.page.dtype.itemsize
            low = piece.first + window.start // size
            high = min(piece.last, piece.first + window.stop // size)
            for index in range(max(0, bisect_right(starts, low) - 1), bisect_right(starts, high - 1)):
                field = group.fields[index]
                start, stop = max(low, mine[0], field.offset), min(high, mine[1], field.offset + field.numel)
                named = wanted[piece.kind].get(index)
                if start < stop and named is not None:
                    if named != begun:
                        begun = named
                        writer.begin(self._folder / path_of(named), self._inventory.arrays[named])
                    at = field.first + start - field.offset
                    writer.put(at, data[(start - low) * size : (stop - low) * size])

    def _pieces(self, group: Group, kind: What, indices: list[int]) -> Iterator[Piece]:
        """The windows of a group's pages of one kind that hold elements of these fields."""
        assert self._reader is not None
        first, last = share_of(self._inventory.partition, group)
        for page, start, stop in stretches(group, kind) if indices else ():
            low, high = max(first, start), min(last, stop)
            inside = [
                (max(field.offset, low), min(field.offset + field.numel, high))
                for field in map(group.fields.__getitem__, indices)
                if max(field.offset, low) < min(field.offset + field.numel, high)
            ]
            if inside:
                size = page.dtype.itemsize
                begin, end = (inside[0][0] - start) * size, (inside[-1][1] - start) * size
                for window in self._reader.windows(page, begin, end):
                    yield Piece(kind, start, stop, window)

    def _save_plain(self, key: Key, tensor: torch.Tensor) -> None:
        array, writer = self._inventory.arrays[key], self._writer
        assert writer is not None
        flat = tensor.permute(array.grid.order).reshape(-1)
        writer.begin(self._folder / path_of(key), array)
        step = max(1, WINDOW_NBYTES // array.dtype.itemsize)
        for start in range(0, array.grid.numel, step):
            piece = flat[start : start + step].to("cpu").contiguous()
            writer.put(start, piece.view(torch.uint8))


def _pages(group: Group) -> list[Page]:
    return [stretch.page for kind in kinds_of(group) for stretch in stretches(group, kind)]
