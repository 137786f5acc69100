"""The pager: brings pages where they are needed, and decides who makes room.

Callers stand inside the door (one lock). They *fault* pages in, which pins them where they are needed and waits for
what isn't there yet; they *unpin* them; and they *pump*, which begins what the policies want to see moved ahead of
need and never waits. Policies choose, the pager moves: a policy sees page numbers and the schedule, and a choice of
its that can't be had costs time and nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from time import perf_counter_ns as now

from tiermem.errors import BudgetError, PagingError
from tiermem.page import Frame, Kind, Page, State
from tiermem.policies import Cursor, Phase, Prefetch
from tiermem.table import PageTable
from tiermem.tier import Tier
from tiermem.trace import Event, Reason
from tiermem.trace import Tier as At
from tiermem.transfer import ARROW, Transfers

PLACE = {State.DISK: At.DISK, State.HOST: At.HOST, State.DEVICE: At.DEVICE}
PLACE |= {journey: source for journey, (source, _) in ARROW.items()}


class Pager:
    """Faults, prefetches and evictions over one page table.

    ``reason`` is how the trace names the eviction policy's choices. All sizes are bytes.
    """

    def __init__(
        self, table: PageTable, transfers: Transfers, prefetch: Prefetch | None, reason: Reason = Reason.LRU
    ) -> None:
        self.table = table
        self.transfers = transfers
        self.host = transfers.host
        self.device = transfers.device
        self.counters = transfers.counters
        self.prefetch = prefetch
        self._chosen = reason
        self._room_ns = 0  # waited for frames in the fault in progress
        self._handed_back: deque[Page] = deque()  # pins let go of without the lock
        self._held: set[int] = set()  # pages of the fault in progress: not to be evicted for each other
        self._homes = {
            tier: _homes(table, tier, tier is (self.device or self.host)) for tier in self._tiers()
        }

    def _tiers(self) -> list[Tier]:
        return [self.host] if self.device is None else [self.host, self.device]

    # -- what callers ask ---------------------------------------------------------------------------------

    def fault(
        self,
        pages: Sequence[Page],
        phase: Phase,
        unit: int,
        *,
        overwrite: Sequence[Page] = (),
        on_host: bool = False,
    ) -> None:
        """Make pages resident where ``phase`` needs them, pin them, and return when they have all arrived.

        Parameter pages are needed on the device in forward and backward, everything else (and with ``on_host``
        those too) on the host. ``overwrite`` names pages that get a host frame without their content, because
        the caller will write all of it and then unpin them dirty, or call :meth:`abandon`. No page may be named twice.

        Raises:
            TransferError: a transfer failed; nothing stays pinned, and the page is where it was.
            BudgetError: what is pinned already leaves no room.
            PagingError: a page is needed on one tier, and a tensor that somebody holds pins it on the other.
        """
        self.collect()
        moves = self.transfers
        moves.phase = phase
        moves.poll()
        moves.raise_error()
        device = None if phase is Phase.OPTIMIZER or on_host else self.device
        missing: list[Page] = []
        for page in pages:
            at = At.DEVICE if device is not None and page.kind is Kind.PARAMETER else At.HOST
            if self._arrived(page, device):
                self.counters.num_hits += 1
                self._use(page)
                moves.record(Event.HIT, page, At.NONE, at, Reason.NONE, unit=unit)
            else:
                if page.pins and not on_host:
                    raise _held_elsewhere(page)
                self.counters.num_faults += 1
                reason = Reason.PREFETCHED_LATE if page.prefetched else Reason.NOT_PREFETCHED
                moves.record(Event.FAULT, page, PLACE[page.state], at, reason, unit=unit)
                missing.append(page)
        if missing or overwrite:
            self._held.update(page.number for page in pages)
            self._held.update(page.number for page in overwrite)
            try:
                try:
                    self._bring(missing, device, unit)
                except BudgetError:
                    if device is None:
                        raise
                    # Enough bytes, perhaps, but not side by side: begin again with nothing in the way.
                    for frame in list(device.slab):
                        if not frame.page.pins:
                            self._evict(device, frame.page)
                    self._bring([page for page in pages if not self._arrived(page, device)], device, unit)
                for page in overwrite:
                    self._take_empty(page)
            except BaseException:
                for page in overwrite:
                    if page.hollow and not page.pins:
                        page.hollow = False
                        moves.drop(page, Reason.DISCARD)
                raise
            finally:
                self._held.clear()
        for page in pages:
            page.pins += 1
        for page in overwrite:
            page.pins += 1

    def follow(self, cursor: Cursor | None) -> None:
        """From now on the policies go by ``cursor`` and its schedule."""
        self.host.eviction.follow(cursor)
        if self.device is not None:
            self.device.eviction.follow(cursor)
        if self.prefetch is not None:
            self.prefetch.follow(cursor)

    def hand_back(self, page: Page) -> None:
        """Let go of one pin from wherever; takes no lock and counts when the pager next looks at pins."""
        self._handed_back.append(page)

    def collect(self) -> None:
        """Count the pins that were handed back."""
        while self._handed_back:
            self._handed_back.popleft().pins -= 1

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
            self.transfers.drop(page, Reason.DISCARD)

    def pump(self) -> None:
        """Begin what prefetching wants, as far as there is room or room can be made; never waits."""
        moves = self.transfers
        moves.poll()
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
                frame = self._room_ahead(self.device, page, position, claimed)
                if frame is not None:
                    moves.load(page, frame, Reason.LOOKAHEAD)
                    self._count_prefetch(page)
            elif state is State.DISK:
                if page.error is not None:
                    continue
                frame = self._room_ahead(self.host, page, position, claimed, only_evict=blocked)
                if frame is None:
                    blocked = True
                elif page.blank:
                    self._take_blank(page, frame)
                else:
                    moves.read(page, frame, Reason.LOOKAHEAD)
                    self._count_prefetch(page)
            elif page.leaving:
                page.leaving = False  # wanted again before it was gone: its frame stays

    def discard(self, page: Page) -> None:
        """The content is no longer needed: the page is blank again and holds no frame. It must not be pinned."""
        self.collect()
        assert not page.pins, f"discarding a pinned page: {page!r}"
        if page.state.journey:
            page.leaving = False
            self.transfers.wait(page)
        page.dirty = page.device_dirty = page.spent = False
        page.blank = True
        page.error = None
        if page.device is not None:
            self.transfers.drop_device(page, Reason.DISCARD)
        if page.host is not None:
            self.transfers.drop(page, Reason.DISCARD)

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
                self.store(page)
            if page.dirty and not page.blank and page.sinks and not page.pins:
                if page.state is State.DEVICE:
                    self.transfers.drop_device(page, Reason.CLOSE)
                self.transfers.write(page, Reason.CLOSE)
        self.transfers.drain()
        self.transfers.raise_error()

    def store(self, page: Page) -> None:
        """Bring a page that was written on the device down to the host, and wait; it must not be pinned."""
        moves = self.transfers
        held = page.number in self._held
        self._held.add(page.number)
        try:
            if page.host is None:
                page.host = self._make_room(self.host, page, Reason.WRITEBACK)
            moves.store(page)
            moves.wait(page)
        finally:
            if not held:
                self._held.discard(page.number)
        moves.raise_error(page)

    # -- bringing pages in --------------------------------------------------------------------------------

    def _arrived(self, page: Page, device: Tier | None) -> bool:
        if device is not None and page.kind is Kind.PARAMETER:
            return page.state is State.DEVICE
        return page.state is State.HOST

    def _bring(self, pages: Sequence[Page], device: Tier | None, unit: int) -> None:
        """Submit everything that is missing, then wait for all of it: the transfers overlap."""
        moves = self.transfers
        start = now()
        self._room_ns = 0
        last: Page | None = None
        link = (At.DISK, At.HOST)
        cause = Reason.PREFETCHED_LATE if any(page.prefetched for page in pages) else Reason.NOT_PREFETCHED
        for page in pages:
            if page.state in (State.WRITING, State.STORING):
                page.leaving = False
                link = ARROW[page.state]
                moves.wait(page)
                cause, last = Reason.DISK_BUSY, page
            if page.state is State.DISK:
                moves.raise_error(page)
                frame = self._make_room(self.host, page, Reason.DEMAND)
                if page.blank:
                    self._take_blank(page, frame)
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
                    moves.load(page, self._make_room(device, page, Reason.DEMAND), Reason.DEMAND)
            for page in climbing:
                if page.state is State.LOADING:
                    link = (At.HOST, At.DEVICE) if last is None else link
                    moves.wait(page)
                    last = page
                moves.raise_error(page)
        for page in pages:
            self._use(page)
        if last is not None:
            # What was waited for a frame has been told of already.
            self._stall(last, unit, start + self._room_ns, cause, link)

    def _descend(self, page: Page) -> None:
        """From the device to the host, because the host will change it: the device's copy would be stale."""
        if page.device_dirty:
            self.store(page)
            return
        self.transfers.drop_device(page, Reason.DISCARD)
        if page.state is State.DISK:
            frame = self._make_room(self.host, page, Reason.DEMAND)
            if page.blank:
                self._take_blank(page, frame)
                return
            self.transfers.read(page, frame, Reason.DEMAND)
            self.transfers.wait(page)
            self.transfers.raise_error(page)

    def _take_blank(self, page: Page, frame: Frame) -> None:
        """A page without content gets a frame of zeros; nothing is read."""
        self.host.bytes_of(frame).zero_()
        self.transfers.settle(page, frame)

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
                self.store(page)  # if it isn't overwritten after all, this is its content
            else:
                self.transfers.drop_device(page, Reason.DISCARD)
        if page.state is State.DISK:
            self.transfers.settle(page, self._make_room(self.host, page, Reason.DEMAND))
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
        self.transfers.record(Event.PREFETCH, page, *ARROW[page.state], Reason.LOOKAHEAD)

    def _stall(self, page: Page, unit: int, start: int, cause: Reason, link: tuple[At, At]) -> None:
        duration = now() - start
        self.counters.stall_ns[cause.name.lower()] += duration
        if cause is Reason.PREFETCHED_LATE:
            self.counters.num_prefetches_late += 1
        self.transfers.record(Event.STALL, page, *link, cause, start, duration, unit)

    # -- making room --------------------------------------------------------------------------------------

    def _victims(
        self, tier: Tier, after: int | None = None, but: set[Frame] | None = None
    ) -> Iterator[Frame]:
        """Frames that may be released, best first; ``after``: only of pages not needed up to that position."""
        on_host = tier is self.host
        if on_host:
            for frame in self.transfers.leaving():
                if but is None or frame not in but:
                    yield frame
        for number in tier.eviction.order():
            page = self.table[number]
            if page.state.journey or self._stays(tier, page):
                continue
            if on_host and page.dirty and not page.spent and not page.sinks:
                continue
            victim = page.host if on_host else page.device
            if victim is None or (but is not None and victim in but):
                continue
            if after is not None and not page.spent and tier.eviction.next_use(number) <= after:
                continue
            yield victim

    def _stays(self, tier: Tier, page: Page) -> bool:
        """Is its frame in ``tier`` one that somebody uses? What is pinned on the device needs no frame on the host."""
        if tier is self.host and page.state is State.DEVICE:
            return False
        return bool(page.pins) or page.number in self._held

    def _go_home(self, tier: Tier, page: Page, why: Reason) -> Frame | None:
        """The frame at the end of the slab that is a resident page's own; None when it has none, or can't have it.

        Resident pages are pinned for long. In the middle of the slab they would leave no room side by side for a large
        page, where the budget is small.
        """
        offset = self._homes[tier].get(page.number)
        if offset is None:
            return None
        moves = self.transfers
        for frame in tier.slab.between(offset, offset + page.nbytes):
            other = frame.page
            if other.state.journey:
                other.leaving = False
                moves.wait(other)
            if getattr(other, tier.name) is not frame:
                continue
            if self._stays(tier, other) or (
                tier is self.host and other.dirty and not other.spent and not other.sinks
            ):
                return None
            self._evict(tier, other)
            if other.leaving:
                moves.wait(other)
            moves.raise_error()
        return moves.reserve(tier, page, why, offset)

    def _make_room(self, tier: Tier, page: Page, why: Reason) -> Frame:
        """A frame for ``page``, whatever it takes: eviction, waiting for transfers, relocation.

        Raises BudgetError when what is pinned leaves no room at all.
        """
        moves = self.transfers
        frame = self._go_home(tier, page, why) or moves.reserve(tier, page, why)
        if frame is not None:
            return frame
        start = now()
        waited = relocated = False
        while frame is None:
            self.collect()
            window = tier.slab.window(page.nbytes, self._victims(tier))
            if window is not None:
                for victim in window:
                    self._evict(tier, victim.page)
                for victim in window:
                    if victim.page.leaving:
                        moves.wait(victim.page)
                        waited = True
                moves.raise_error()
            elif moves:
                # Prefetches that have not landed can't be given up: their frames are being written to.
                moves.wait(moves.oldest)
                waited = True
            elif not relocated and tier is self.host:
                # The last resort: everything that may leave leaves, and what stays moves together.
                for victim in list(self._victims(tier)):
                    self._evict(tier, victim.page)
                moves.drain()
                moves.raise_error()
                self._relocate()
                relocated = True
            else:
                raise self._no_room(tier, page)
            frame = moves.reserve(tier, page, why)
        if waited:
            self._stall(page, page.unit, start, Reason.NO_FRAME, (At.HOST, At.DISK))
            self._room_ns += now() - start
        return frame

    def _room_ahead(
        self, tier: Tier, page: Page, position: int, claimed: set[Frame], only_evict: bool = False
    ) -> Frame | None:
        """A frame for a prefetch, or None when it would need waiting, or the frame of a page needed sooner.

        Evictions that it takes are begun, and their frames noted in ``claimed``, so that the next one looks
        elsewhere.
        """
        home = self._homes[tier].get(page.number)
        if (
            not only_evict
            and (frame := self.transfers.reserve(tier, page, Reason.LOOKAHEAD, home)) is not None
        ):
            return frame
        if home is not None:
            return None
        window = tier.slab.window(page.nbytes, self._victims(tier, position, claimed))
        if window is None:
            return None
        if tier is not self.host and any(victim.page.device_dirty for victim in window):
            return None  # would have to wait for it to be stored
        claimed.update(window)
        for victim in window:
            self._evict(tier, victim.page)
        if only_evict or any(victim.page.leaving for victim in window):
            return None
        return self.transfers.reserve(tier, page, Reason.LOOKAHEAD)

    def _evict(self, tier: Tier, page: Page) -> None:
        """Give a page's frame back: at once when the copy below is good, else once it has been written."""
        if page.leaving or (page.host if tier is self.host else page.device) is None:
            return  # on its way, or gone already: to store another one took it along
        moves = self.transfers
        self.counters.num_evictions += 1
        if tier is not self.host:
            if page.device_dirty:
                self.store(page)
            else:
                moves.drop_device(page, self._chosen)
        elif page.device_dirty:
            page.dirty = False  # stale: what counts is on the device
            moves.drop(page, self._chosen)
        elif page.spent or page.blank or not page.dirty:
            moves.drop(page, Reason.DISCARD if page.spent else self._chosen)
        elif page.state is State.DEVICE and (page.pins or page.number in self._held):
            page.dirty = False
            page.device_dirty = True  # what is below is stale: from here on the device has the only good copy
            moves.drop(page, self._chosen)
        else:
            if page.state is State.DEVICE:
                moves.drop_device(page, self._chosen)
            moves.record(Event.EVICT, page, At.HOST, At.DISK, self._chosen)
            moves.write(page, self._chosen, leaving=True)

    def _relocate(self) -> None:
        """Slide every frame that nobody looks at down, so that the holes of the host's slab become one.

        For when enough bytes are free but not side by side; copies at memory speed.
        """
        self.counters.num_relocations += 1
        memory = self.host.memory
        for frame in list(self.host.slab):
            page = frame.page
            if page.pins or page.state.journey:
                continue
            old = self.host.slab.slide(frame)
            if old is None:
                continue
            if page.state is not State.DEVICE:
                for user in page.users:
                    user.unbind()
            # The two may overlap; a step no longer than the distance moved never overwrites what is still to move.
            distance = old - frame.offset
            for done in range(0, frame.nbytes, distance):
                size = min(distance, frame.nbytes - done)
                memory[frame.offset + done :][:size].copy_(memory[old + done :][:size])

    def _no_room(self, tier: Tier, page: Page) -> BudgetError:
        pinned = [frame for frame in tier.slab if self._stays(tier, frame.page)]
        stuck = [
            frame for frame in tier.slab if not frame.page.sinks and frame.page.dirty and frame not in pinned
        ]
        pinned_nbytes = sum(frame.nbytes for frame in pinned)
        stuck_nbytes = sum(frame.nbytes for frame in stuck)
        return BudgetError(
            page.nbytes,
            tier.slab.nbytes - pinned_nbytes - stuck_nbytes,
            tier.name,
            None,
            f"the {page.kind.name.lower()} page of unit {page.unit}",
            f"of {tier.slab.nbytes} bytes, {pinned_nbytes} are pinned by {len(pinned)} pages in use or seen by tensors "
            f"that you hold, {stuck_nbytes} may not leave by [placement]; let go of such tensors, or raise the budget",
        )


def _homes(table: PageTable, tier: Tier, computes: bool) -> dict[int, int]:
    """Page number -> offset of its own place at the end of the slab, for the pages of the resident unit."""
    kinds = [Kind.PARAMETER] if computes else []
    kinds += [Kind.GRADIENT] if tier.name == "host" else []
    homes: dict[int, int] = {}
    end = tier.slab.nbytes
    for page in table:
        if page.unit == 0 and page.kind in kinds and page.nbytes <= end:
            end -= page.nbytes
            homes[page.number] = end
    return homes


def _held_elsewhere(page: Page) -> PagingError:
    return PagingError(
        f"the {page.kind.name.lower()} page of unit {page.unit} is needed elsewhere than on the "
        f"{page.state.name.lower()}, where tensors that you hold look into it ({page.pins} pins): let go of them first"
    )
