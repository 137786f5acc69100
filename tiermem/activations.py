"""Activations: what autograd saves in a forward leaves memory, and comes back before its backward.

The bytes of a saved tensor's storage are a page. It is copied into a frame of an arena, a part of the host's budget
that only activations have; whoever needs a frame there takes that of the page saved first, since backward needs it
last. Pages that may sink are written to the disk ahead of that, and read again in the reverse of the order in which
they were saved. A storage that several saved tensors look into is one page, and what still lives somewhere is not
brought back. A tensor that finds no room stays in memory, and is counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from time import perf_counter_ns as now
from typing import Any

import torch

from tiermem.activation import Activation, Holder, Slice, StorageRef, Tie, is_plain, rounded, share_version
from tiermem.device import Copy, Device
from tiermem.door import Door
from tiermem.errors import BudgetError
from tiermem.page import Frame, Kind, Page, State
from tiermem.table import PageTable
from tiermem.tier import Tier, trim_memory
from tiermem.trace import Phase, Reason
from tiermem.trace import Tier as At
from tiermem.transfer import Transfers

_Storage: Any = torch.UntypedStorage

MAX_UNTRIMMED = 32 << 20
"""Bytes of activations, at least, after which malloc is asked to give back what has been freed of them."""


class Activations:
    """The saved tensors of one wrapped model that lie in ``least`` bytes or more.

    ``arena`` is the memory for their pages, ``transfers`` moves these; ``sinks``: may they go to the disk?
    """

    def __init__(
        self, arena: Tier, transfers: Transfers, device: Device, door: Door, least: int, sinks: bool
    ) -> None:
        self.arena = arena
        self.least = least
        self.num_paged = self.num_kept = 0  # storages, so far
        self.nbytes_paged = self.nbytes_kept = 0
        self.peak_saved = 0  # bytes that graphs held at one time, wherever they were
        self.peak_in_memory = 0  # of these, the most that were in memory outside of the arena
        self._saved = 0
        self._moves = transfers
        self._device = device
        self._door = door
        self._sinks = sinks
        self._table = PageTable()
        self._idle: dict[int, list[Page]] = {}  # by size: pages of activations that have died
        self._alive: dict[int, Tie] = {}  # by serial number, in the order in which they were saved
        self._by_storage: dict[int, list[Tie]] = {}
        self._in_memory: dict[int, Activation] = {}
        self._dead: deque[Tie] = deque()
        self._exempt: dict[int, Any] = {}  # with references, so that no new storage gets a dead one's address
        self._next = 0
        self._untrimmed = 0
        self._full = False  # has the disk no room for more of them?

    def exempt(self, buffers: Iterable[torch.Tensor]) -> None:
        """A forward begins: these tensors live on, whatever is saved of them."""
        storages = (buffer.untyped_storage() for buffer in buffers if buffer.layout is torch.strided)
        self._exempt = {ref.cdata: ref for ref in map(StorageRef, storages)}

    # -- leaving --------------------------------------------------------------------------------------------

    def save(self, tensor: torch.Tensor) -> Slice | None:
        """What autograd is to keep instead of ``tensor``; None for one that is no affair of ours.

        Raises TransferError where writing an earlier one has failed.
        """
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or not is_plain(tensor):
            return None
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if (
            nbytes < self.least
            or tensor.device != self._device.torch_device
            or storage._cdata in self._exempt
        ):
            return None
        if torch._C._current_graph_task_id() != -1:
            return None  # made in a backward that needs it now
        with self._door:
            self._moves.log.phase = Phase.FORWARD
            self._collect()
            holder = self._holder(storage._cdata, tensor)
            if holder is None:
                holder = self._hold(tensor, nbytes)
        return Slice(holder, tensor)

    def _holder(self, storage: int, tensor: torch.Tensor) -> Holder | None:
        """Who has this storage already, as it is now.

        A tensor with a version counter of its own (of an ``unsafe_chunk``, of ``.data``) may have written to it unseen.
        """
        for tie in self._by_storage.get(storage, ()):
            holder = tie()
            if holder is not None and tie.activation.lives and share_version(tie.activation.witness, tensor):
                # Saved with its version, which was this one unless it has been changed.
                return holder if tie.activation.version == tensor._version else None
        return None

    def _hold(self, tensor: torch.Tensor, nbytes: int) -> Holder:
        activation = Activation(self._next, tensor, nbytes)
        self._next += 1
        page = self._take_page(nbytes)
        frame = self._room(page) if page is not None else None
        holder = Holder(activation, None if frame is not None else tensor.detach())
        if page is not None and frame is not None:
            activation.page = page
            self._moves.frames.settle(page, frame)
            page.dirty, page.blank = True, False
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            activation.copy = self._copy(self.arena.bytes_of(frame)[:nbytes], source)
            self.num_paged += 1
            self.nbytes_paged += nbytes
            self._trim(nbytes)
        else:
            if page is not None:
                self._idle[page.nbytes].append(page)
            self.num_kept += 1
            self.nbytes_kept += nbytes
        tie = Tie(holder, self._dead.append)
        tie.activation = activation
        self._alive[activation.serial] = tie
        self._by_storage.setdefault(activation.key, []).append(tie)
        self._in_memory[activation.serial] = activation
        self._saved += nbytes
        self._count()
        self._write_ahead()
        return holder

    def _trim(self, nbytes: int) -> None:
        """So many bytes more will be freed. On the CPU malloc keeps them, with small things that lie between."""
        self._untrimmed += nbytes
        if (
            self._untrimmed > max(MAX_UNTRIMMED, self.arena.slab.nbytes)
            and self._device.torch_device.type == "cpu"
        ):
            self._untrimmed = 0
            trim_memory()

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> Copy | None:
        if self._device.unified:
            target.copy_(source)
            return None
        return self._device.copy(target, source)

    def _take_page(self, nbytes: int) -> Page | None:
        """A page of at least ``nbytes``: one whose activation has died, or a new one; None where the disk is full."""
        size = rounded(nbytes)
        if size > self.arena.slab.nbytes:
            return None
        idle = self._idle.setdefault(size, [])
        for index, page in enumerate(idle):
            if not page.state.journey:
                if page.host is not None:  # it could not be written when it died
                    page.blank = True
                    self._moves.frames.drop(page, Reason.DISCARD)
                return idle.pop(index)
        if self._full:
            return None
        page = self._table.add(0, Kind.ACTIVATION, torch.uint8, size, sinks=self._sinks)
        if self._sinks:
            try:
                self._moves.provide([page])
            except BudgetError:
                self._full = True
                return None
        return page

    # -- frames ---------------------------------------------------------------------------------------------

    def _room(self, page: Page, wait: bool = True) -> Frame | None:
        """A frame of the arena, if need be that of the page saved first; None where that may not leave."""
        moves = self._moves
        frame = moves.frames.reserve(self.arena, page, Reason.DEMAND)
        start = now()
        victims = self._oldest() if wait else iter(())
        while frame is None:
            victim = next(victims, None)
            if victim is None:
                return None
            self._evict(victim)
            frame = moves.frames.reserve(self.arena, page, Reason.DEMAND)
            if frame is not None:
                moves.log.stall(page, 0, start, Reason.NO_FRAME, (At.HOST, At.DISK))
        return frame

    def _oldest(self) -> Iterator[Page]:
        """Pages with frames in the order in which they may leave: those of the dead, then as they were saved."""
        for pages in list(self._idle.values()):
            yield from [page for page in pages if page.host is not None]
        for tie in list(self._alive.values()):
            page = tie.activation.page
            if page is not None and page.host is not None and (page.sinks or not page.dirty):
                self._arrive(tie.activation)
                yield page

    def _evict(self, page: Page) -> None:
        """Take a page's frame, and wait until it is free."""
        moves = self._moves
        if page.state is State.READING:
            moves.wait(page)
        elif page.state is State.WRITING:
            page.leaving = True
            moves.wait(page)
        elif page.dirty and not page.blank:
            moves.write(page, Reason.LRU, leaving=True)
            moves.wait(page)
        if page.host is not None and (page.blank or not page.dirty):
            moves.frames.drop(page, Reason.LRU)
        moves.raise_error()

    def _write_ahead(self) -> None:
        """Write what will have to leave if as much comes again; so that nobody waits when it does."""
        slab = self.arena.slab
        clean = sum(
            frame.nbytes for frame in slab if not frame.page.dirty or frame.page.state is State.WRITING
        )
        missing = slab.used - clean - slab.nbytes // 2
        for tie in self._alive.values():
            if missing <= 0:
                break
            page = tie.activation.page
            if page is not None and page.state is State.HOST and page.dirty and page.sinks:
                if tie.activation.copy is not None and not tie.activation.copy.done():
                    break
                self._arrive(tie.activation)
                self._moves.write(page, Reason.CLEAN)
                missing -= page.nbytes

    def _arrive(self, activation: Activation) -> None:
        """Wait until its frame has what the device had."""
        copy, activation.copy = activation.copy, None
        if copy is not None:
            copy.wait()

    # -- coming back ----------------------------------------------------------------------------------------

    def restore(self, saved: Slice) -> torch.Tensor:
        """The tensor again: from where it still lives, or from its page.

        Raises RuntimeError, as autograd does, where it was changed in place since; TransferError where the disk fails.
        """
        activation = saved.holder.activation
        if activation.witness._version != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{saved.dtype} {list(saved.size)}] is at version {activation.witness._version}; expected "
                f"{saved.version}"
            )
        with self._door:
            self._moves.log.phase = Phase.BACKWARD
            self._collect()
            storage = _Storage._new_with_weak_ptr(activation.storage.cdata)
            if storage is None:
                storage = self._bring(activation)
            self._read_ahead(activation)
        device = self._device.torch_device
        whole = torch.empty(0, dtype=saved.dtype, device=device)
        return whole.set_(storage, saved.offset, saved.size, saved.stride)

    def _bring(self, activation: Activation) -> Any:
        page, moves = activation.page, self._moves
        assert page is not None
        self._arrive(activation)
        start = now()
        cause = Reason.PREFETCHED_LATE if page.state is State.READING else Reason.NOT_PREFETCHED
        waits = page.state in (State.DISK, State.READING)
        if page.state is State.DISK:
            moves.raise_error(page)
            frame = self._room(page)
            assert frame is not None, "no frame for a page that had one"
            moves.read(page, frame, Reason.DEMAND)
        if page.state is State.READING:
            moves.wait(page)
            moves.raise_error(page)
        if waits:
            moves.log.stall(page, 0, start, cause, (At.DISK, At.HOST))
        assert page.host is not None
        whole = torch.empty(activation.nbytes, dtype=torch.uint8, device=self._device.torch_device)
        copy = self._copy(whole, self.arena.bytes_of(page.host)[: activation.nbytes])
        if copy is not None:
            copy.wait()
        if page.state is State.HOST and not page.dirty:
            moves.frames.drop(page, Reason.LRU)
        self._trim(activation.nbytes)
        activation.storage = StorageRef(whole.untyped_storage())
        self._in_memory[activation.serial] = activation
        self._count()
        return whole.untyped_storage()

    def _read_ahead(self, activation: Activation) -> None:
        """Begin to read what was saved before it, the last one first, as far as there are free frames."""
        moves = self._moves
        moves.poll()
        if not self._sinks:
            return
        for tie in reversed(self._alive.values()):
            page = tie.activation.page
            if tie.activation.serial >= activation.serial or page is None or page.state is not State.DISK:
                continue
            if page.error is not None or tie.activation.lives:
                continue
            frame = self._room(page, wait=False)
            if frame is None:
                return
            moves.read(page, frame, Reason.LOOKAHEAD)

    # -- ends -----------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Give up what no graph holds any more."""
        self._moves.poll()
        self._moves.raise_error()
        while self._dead:
            tie = self._dead.popleft()
            activation, page = tie.activation, tie.activation.page
            self._alive.pop(activation.serial, None)
            self._in_memory.pop(activation.serial, None)
            self._saved -= activation.nbytes
            ties = self._by_storage[activation.key]
            ties.remove(tie)
            if not ties:
                del self._by_storage[activation.key]
            if page is None:
                continue
            self._arrive(activation)
            if page.state is State.READING:
                self._moves.wait(page)
            if page.state is State.WRITING:
                page.leaving = True
            elif page.host is not None:
                page.blank = True
                self._moves.frames.drop(page, Reason.DISCARD)
            page.error = None
            self._idle[page.nbytes].append(page)
        self._in_memory = {serial: each for serial, each in self._in_memory.items() if each.lives}

    def _count(self) -> None:
        self.peak_saved = max(self.peak_saved, self._saved)
        now_ = sum(each.nbytes for each in self._in_memory.values() if each.lives)
        self.peak_in_memory = max(self.peak_in_memory, now_)

    def close(self) -> None:
        """Wait for what is on its way; what graphs still hold is gone after it."""
        for tie in self._alive.values():
            self._arrive(tie.activation)
        self._moves.drain()
        self.arena.close()

    def stats(self) -> dict[str, int]:
        """Figures so far: numbers of storages, and bytes."""
        return {
            "paged": self.num_paged,
            "kept": self.num_kept,
            "nbytes_paged": self.nbytes_paged,
            "nbytes_kept": self.nbytes_kept,
            "peak_saved": self.peak_saved,
            "peak_in_memory": self.peak_in_memory,
            "arena": self.arena.slab.nbytes,
            "peak_arena": self.arena.slab.peak,
        }
