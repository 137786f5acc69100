"""The pager: brings pages where they are needed.

Callers stand inside the door (one lock). They *fault* pages in, which pins them where they are needed and waits for
what isn't there yet; they *unpin* them; and they *pump*, which begins what the policies want to see moved ahead of
need and never waits. Policies choose, the pager moves: a policy sees page numbers and the schedule, and a choice of
its that can't be had costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import perf_counter_ns as now
from typing import Protocol

from tiermem.errors import BudgetError, PagingError
from tiermem.page import Frame, Kind, Page, State
from tiermem.plans import Area, Plans
from tiermem.policies import Ahead, Cursor, Phase, Prefetch
from tiermem.replay import Replay
from tiermem.room import Room
from tiermem.table import PageTable
from tiermem.tier import Tier
from tiermem.trace import Event, Reason
from tiermem.trace import Tier as At
from tiermem.transfer import ARROW, Transfers

PLACE = {State.DISK: At.DISK, State.HOST: At.HOST, State.DEVICE: At.DEVICE}
PLACE |= {journey: source for journey, (source, _) in ARROW.items()}


class Watcher(Protocol):
    """Who reads pages while others may write them: a save in the background."""

    def first(self, pages: Iterable[Page]) -> None:
        """Return when none of these pages is still to be read."""

    def spoiled(self, page: Page, name: str) -> None:
        """A parameter of this page was written without asking first."""

    def settle(self) -> None:
        """Return when nothing is read any more."""


class Pager:
    """Faults, prefetches and evictions over one page table.

    ``reason`` is how the trace names the eviction policy's choices. With ``ahead``, plans are compiled and carried out
    that fetch that far ahead; ``prefetch`` then is for what no plan is for. All sizes are bytes.
    """

    def __init__(
        self,
        table: PageTable,
        transfers: Transfers,
        prefetch: Prefetch | None,
        reason: Reason = Reason.LRU,
        *,
        ahead: Ahead | None = None,
    ) -> None:
        self.table = table
        self.transfers = transfers
        self.host = transfers.host
        self.device = transfers.device
        self.counters = transfers.counters
        self.prefetch = prefetch
        self.watcher: Watcher | None = None
        self.room = Room(table, transfers, reason)
        self.plans: Plans | None = None
        self._replays: list[Replay] = []
        if ahead is not None:
            self._prepare(ahead)

    def _prepare(self, ahead: Ahead) -> None:
        tiers = [self.host] if self.device is None else [self.host, self.device]
        areas = [Area(tier, *self.room.capacity(tier)) for tier in tiers]
        self.plans = Plans(self.table, areas[0], areas[1] if self.device is not None else None, ahead)
        self._replays = [Replay(tier, self.room, self.table, ahead.accesses != 0) for tier in tiers]
        self._replays[0].above = self._replays[-1] if self.device is not None else None
        by_tier = {replay.tier: replay for replay in self._replays}
        self.room.place = lambda tier, page: by_tier[tier].place(page)
        self.room.missed = lambda tier, stray, page: by_tier[tier].missed(stray, 0, page)
        self.room.lost = lambda tier, page: by_tier[tier].lost(page)

    # -- what callers ask ---------------------------------------------------------------------------------

    def fault(
        self,
        pages: Sequence[Page],
        phase: Phase,
        unit: int,
        *,
        overwrite: Sequence[Page] = (),
        on_host: bool = False,
        expected: bool = True,
    ) -> None:
        """Make pages resident where ``phase`` needs them, pin them, and return when they have all arrived.

        Parameter pages are needed on the device in forward and backward, everything else (and with ``on_host``
        those too) on the host. ``overwrite`` names pages that get a host frame without their content, because
        the caller will write all of it and then unpin them dirty, or call :meth:`abandon`. No page may be named twice.
        ``expected``: whether the schedule foretold this, which is what the trace says of the waiting.

        Raises:
            TransferError: a transfer failed; nothing stays pinned, and the page is where it was.
            BudgetError: what is pinned already leaves no room.
            PagingError: a page is needed on one tier, and a tensor that somebody holds pins it on the other.
        """
        self.room.loans.collect()
        moves = self.transfers
        moves.log.phase = phase
        moves.poll()
        moves.raise_error()
        if self.planning:
            # Before what is missing is waited for: what the plan wants to be on its way by now goes along.
            self.room.held.update(page.number for page in pages)
            self.room.held.update(page.number for page in overwrite)
            try:
                for replay in self._replays:
                    replay.pump()
            finally:
                self.room.held.clear()
        device = None if phase is Phase.OPTIMIZER or on_host else self.device
        missing: list[Page] = []
        for page in pages:
            at = At.DEVICE if device is not None and page.kind is Kind.PARAMETER else At.HOST
            if self._arrived(page, device):
                self.counters.num_hits += 1
                self._use(page)
                moves.log.record(Event.HIT, page, At.NONE, at, Reason.NONE, unit=unit)
            else:
                if page.pins and not on_host:
                    raise _held_elsewhere(page)
                self.counters.num_faults += 1
                reason = Reason.PREFETCHED_LATE if page.prefetched else Reason.NOT_PREFETCHED
                moves.log.record(Event.FAULT, page, PLACE[page.state], at, reason, unit=unit)
                missing.append(page)
        if missing or overwrite:
            self.room.held.update(page.number for page in pages)
            self.room.held.update(page.number for page in overwrite)
            try:
                try:
                    self._bring(missing, device, unit, expected)
                except BudgetError:
                    if device is None:
                        raise
                    # Enough bytes, perhaps, but not side by side: begin again with nothing in the way.
                    for frame in list(device.slab):
                        if not frame.page.pins:
                            self.room.evict(device, frame.page)
                    missing = [page for page in pages if not self._arrived(page, device)]
                    self._bring(missing, device, unit, expected)
                for page in overwrite:
                    self._take_empty(page)
            except BaseException:
                for page in overwrite:
                    if page.hollow and not page.pins:
                        page.hollow = False
                        moves.frames.drop(page, Reason.DISCARD)
                raise
            finally:
                self.room.held.clear()
        for page in pages:
            page.pins += 1
        for page in overwrite:
            page.pins += 1

    def announce(self, pages: Iterable[Page]) -> None:
        """Say that the content of these pages is about to be changed: call it before, and not inside the door."""
        if self.watcher is not None:
            self.watcher.first(pages)

    def follow(self, cursor: Cursor | None) -> None:
        """From now on the policies go by ``cursor`` and its schedule."""
        self.host.eviction.follow(cursor)
        if self.device is not None:
            self.device.eviction.follow(cursor)
        if self.prefetch is not None:
            self.prefetch.follow(cursor)
        if self.plans is not None:
            plans = self.plans.of(cursor.schedule, cursor.seconds) if cursor is not None else {}
            for replay in self._replays:
                replay.follow(cursor, plans.get(replay.tier))

    @property
    def planning(self) -> bool:
        """Is a plan being carried out?"""
        return bool(self._replays) and self._replays[0].plan is not None

    def nudge(self) -> None:
        """An access has ended. What the plan wants on its way and could not have is tried again, too."""
        for replay in self._replays:
            replay.ended()
        if any(replay.waiting for replay in self._replays):
            self.pump()

    def unpin(self, pages: Iterable[Page], *, dirty: bool = False) -> None:
        """Let go of pins that :meth:`fault` set; ``dirty`` says that the host's copy was written."""
        for page in pages:
            page.pins -= 1
            if dirty:
                page.dirty = True
                page.blank = page.hollow = False

    def abandon(self, page: Page) -> None:
        """Unpin a page that was to be overwritten and was not, or only in part.

        What it was before is still below, or in its frame: with the parts that were written, which is the page now.
        """
        page.pins -= 1
        if not page.hollow:
            page.dirty = True
            page.blank = False
        elif not page.pins:
            page.hollow = False
            self.transfers.frames.drop(page, Reason.DISCARD)

    def pump(self) -> None:
        """Begin what prefetching wants, as far as there is room or room can be made; never waits."""
        moves = self.transfers
        moves.poll()
        if moves.shelf.ranks is not None:
            moves.shelf.ranks.tick()
        if self.planning:
            for replay in self._replays:
                replay.pump()
            return
        if self.prefetch is None:
            return
        claimed: set[Frame] = set()
        blocked = False
        for position, number in self.prefetch.wanted():
            page = self.table[number]
            state = page.state
            if state is State.HOST:
                if self.device is None or page.kind is not Kind.PARAMETER or blocked or page.pins:
                    continue
                if self.prefetch.phase(position) is Phase.OPTIMIZER:
                    continue
                frame = self.room.ahead(self.device, page, position, claimed)
                if frame is not None:
                    moves.load(page, frame, Reason.LOOKAHEAD)
                    self._count_prefetch(page)
            elif state is State.DISK:
                if page.error is not None or not moves.shelf.ready(page):
                    continue
                frame = self.room.ahead(self.host, page, position, claimed, only_evict=blocked)
                if frame is None:
                    blocked = True
                elif page.blank:
                    self.room.take_blank(page, frame)
                else:
                    moves.read(page, frame, Reason.LOOKAHEAD)
                    self._count_prefetch(page)
            elif page.leaving:
                page.leaving = False  # wanted again before it was gone: its frame stays

    def discard(self, page: Page) -> None:
        """The content is no longer needed: the page is blank again and holds no frame. It must not be pinned."""
        self.room.loans.collect()
        assert not page.pins, f"discarding a pinned page: {page!r}"
        if page.state.journey:
            page.leaving = False
            self.transfers.wait(page)
        page.dirty = page.device_dirty = page.spent = False
        page.blank = True
        page.error = None
        if page.device is not None:
            self.transfers.frames.drop_device(page, Reason.DISCARD)
        if page.host is not None:
            self.transfers.frames.drop(page, Reason.DISCARD)

    def commit(self, page: Page) -> None:
        """A user has changed parameters, on all ranks alike: each keeps its slice. Without ranks, nothing is to do.

        The page is pinned. Raises RanksError where other ranks don't change it.
        """
        ranks, shard = self.transfers.shelf.ranks, page.shard
        if not page.gathered or ranks is None or shard is None:
            return
        # Before all have made the change, somebody may still want the page as it was.
        ranks.meet(f"change of page {page.key}", reason=f"a change of the parameters of unit {page.unit}")
        self.fault([], Phase.FORWARD, page.unit, overwrite=[shard])
        tier, frame = (
            (self.host, page.host) if page.state is State.HOST else (self.device or self.host, page.device)
        )
        assert frame is not None
        assert shard.host is not None
        first = ranks.place * shard.nbytes
        self.host.bytes_of(shard.host).copy_(tier.bytes_of(frame)[first : first + shard.nbytes])
        self.unpin([shard], dirty=True)
        page.dirty = page.device_dirty = False
        if page.state is State.DEVICE and page.host is not None:
            self.transfers.frames.drop(page, Reason.DISCARD)  # stale
        ranks.offer([(page.key, page.version)])

    def renew(self, page: Page) -> None:
        """This rank's slice of the page has been changed: what is here of the whole is stale, and is let go of.

        Raises PagingError when tensors that somebody holds look into it.
        """
        self.room.loans.collect()
        if page.state.journey:
            self.transfers.wait(page)
        if page.pins:
            raise PagingError(
                f"tensors that you hold look into the parameters of unit {page.unit} ({page.pins} pins), which have "
                "changed on other ranks: let go of them before"
            )
        page.dirty = page.device_dirty = page.blank = False
        if page.device is not None:
            self.transfers.frames.drop_device(page, Reason.DISCARD)
        if page.host is not None:
            self.transfers.frames.drop(page, Reason.DISCARD)
        page.renewed = True
        page.version += 1

    def writeback(self, pages: Iterable[Page]) -> None:
        """Begin to write dirty pages whose frames will be wanted soon; doesn't wait."""
        for page in pages:
            if page.state is State.HOST and page.dirty and not page.pins and page.extent is not None:
                self.transfers.write(page, Reason.CLEAN)

    def flush(self) -> None:
        """Write every dirty page that may sink, and wait until all have landed."""
        self.transfers.drain()
        for page in self.table:
            if page.device_dirty:
                self.room.store(page)
            wanted = page.dirty and not page.blank and not page.pins and not page.gathered
            if wanted and (page.sinks or page.durable):
                if page.state is State.DEVICE:
                    self.transfers.frames.drop_device(page, Reason.CLOSE)
                self.transfers.write(page, Reason.CLOSE)
        self.transfers.drain()
        self.transfers.raise_error()

    def clean(self, pages: Iterable[Page]) -> None:
        """Have the disk hold these pages as they are now; waits. What is resident stays, as far as it can.

        Raises TransferError, and PagingError for a page that was written on the device and that a tensor looks into.
        """
        moves = self.transfers
        pages = list(pages)
        self.room.loans.collect()
        for page in pages:
            if page.blank or not (page.dirty or page.device_dirty):
                continue
            if page.state.journey and page.state is not State.WRITING:
                moves.wait(page)
                moves.raise_error(page)
            if page.device_dirty:
                if page.pins:
                    raise _held_elsewhere(page)
                self.room.store(page)
            if not page.dirty or page.state is State.WRITING:
                continue
            if page.pins:
                moves.write_pinned(page)
                continue
            if page.state is State.DEVICE:
                moves.frames.drop_device(page, Reason.CLOSE)
            moves.write(page, Reason.CLEAN)
        for page in pages:
            if page.state is State.WRITING:
                moves.wait(page)
        moves.raise_error()

    # -- bringing pages in --------------------------------------------------------------------------------

    def _arrived(self, page: Page, device: Tier | None) -> bool:
        if device is not None and page.kind is Kind.PARAMETER:
            return page.state is State.DEVICE
        return page.state is State.HOST

    def _bring(self, pages: Sequence[Page], device: Tier | None, unit: int, expected: bool) -> None:
        """Submit everything that is missing, then wait for all of it: the transfers overlap."""
        moves = self.transfers
        start = now()
        self.room.waited_ns = 0
        last: Page | None = None
        link = (At.DISK, At.HOST)
        cause = Reason.NOT_PREFETCHED if expected else Reason.DEPARTED
        if any(page.prefetched for page in pages):
            cause = Reason.PREFETCHED_LATE
        for page in pages:
            if page.state in (State.WRITING, State.STORING):
                page.leaving = False
                link = ARROW[page.state]
                moves.wait(page)
                cause, last = Reason.DISK_BUSY, page
            if page.state is State.DISK:
                moves.raise_error(page)
                frame = self.room.make(self.host, page, Reason.DEMAND)
                if page.blank:
                    self.room.take_blank(page, frame)
                else:
                    moves.read(page, frame, Reason.DEMAND)
        for page in pages:
            if page.state is State.READING or (device is None and page.state is State.LOADING):
                moves.wait(page)
                last = page
            moves.raise_error(page)
            if page.state is State.DEVICE and (device is None or page.kind is not Kind.PARAMETER):
                self._descend(page)
                last = page
        if device is not None:
            climbing = [
                page for page in pages if page.kind is Kind.PARAMETER and page.state is not State.DEVICE
            ]
            for page in climbing:
                if page.state is State.HOST:
                    moves.load(page, self.room.make(device, page, Reason.DEMAND), Reason.DEMAND)
            for page in climbing:
                if page.state is State.LOADING:
                    link = (At.HOST, At.DEVICE) if last is None else link
                    moves.wait(page)
                    last = page
                moves.raise_error(page)
        for page in pages:
            self._use(page)
        if last is not None and last.gathered and device is None:
            cause, link = Reason.COLLECTIVE, (At.NONE, At.HOST)
        if last is not None:
            # What was waited for a frame has been told of already.
            moves.log.stall(last, unit, start + self.room.waited_ns, cause, link)

    def _descend(self, page: Page) -> None:
        """From the device to the host, because the host will change it: the device's copy would be stale."""
        if page.device_dirty:
            self.room.store(page)
            return
        assert self.device is not None
        self.transfers.frames.drop_device(page, Reason.DISCARD)
        self.room.lost(self.device, page)
        if page.state is State.DISK:
            frame = self.room.make(self.host, page, Reason.DEMAND)
            if page.blank:
                self.room.take_blank(page, frame)
                return
            self.transfers.read(page, frame, Reason.DEMAND)
            self.transfers.wait(page)
            self.transfers.raise_error(page)

    def _take_empty(self, page: Page) -> None:
        """A page whose content is about to be overwritten gets a frame, whatever is in it."""
        if page.state.journey:
            page.leaving = False
            self.transfers.wait(page)
        page.error = None
        if page.device is not None:
            if page.pins:
                raise _held_elsewhere(page)
            if page.device_dirty:
                self.room.store(page)  # if it isn't overwritten after all, this is its content
            else:
                assert self.device is not None
                self.transfers.frames.drop_device(page, Reason.DISCARD)
                self.room.lost(self.device, page)
        if page.state is State.DISK:
            self.transfers.frames.settle(page, self.room.make(self.host, page, Reason.DEMAND))
            page.hollow = True
        self._use(page)

    def _use(self, page: Page) -> None:
        if page.prefetched:
            page.prefetched = False
            self.counters.num_prefetches_used += 1
        self.host.eviction.used(page.number)
        if self.device is not None:
            self.device.eviction.used(page.number)

    def _count_prefetch(self, page: Page) -> None:
        page.prefetched = True
        self.counters.num_prefetches += 1
        self.transfers.log.record(Event.PREFETCH, page, *ARROW[page.state], Reason.LOOKAHEAD)


def _held_elsewhere(page: Page) -> PagingError:
    return PagingError(
        f"the {page.kind.name.lower()} page of unit {page.unit} is needed elsewhere than on the "
        f"{page.state.name.lower()}, where tensors that you hold look into it ({page.pins} pins): let go of them first"
    )
