"""Room: who gives up a frame for whom, on every tier.

The order of victims is the policy's; what may not go (pinned, on a journey, needed by the fault in progress) is passed
over. A demand gets a frame whatever it takes; a prefetch only what can be had without waiting, and never from a page
that is needed sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter_ns as now

from tiermem.errors import BudgetError
from tiermem.frames import unbind
from tiermem.loan import Loans
from tiermem.page import Frame, Kind, Page, State
from tiermem.table import PageTable
from tiermem.tier import Tier
from tiermem.trace import Event, Reason
from tiermem.trace import Tier as At
from tiermem.transfer import Transfers


class Room:
    """Frames for pages. ``reason`` is how the trace names the policy's choices.

    ``held`` are the numbers of the pages of the fault in progress: they are not evicted for each other.
    ``waited_ns`` is what that fault has waited for frames.
    """

    def __init__(self, table: PageTable, transfers: Transfers, reason: Reason) -> None:
        self.table = table
        self.transfers = transfers
        self.host = transfers.host
        self.held: set[int] = set()
        self.waited_ns = 0
        self._blocked_ns = 0  # what the frame that is being made has been waited for
        self.counters = transfers.counters
        self._chosen = reason
        # Where a plan has a page in a tier, if anywhere; the pager says.
        self.place: Callable[[Tier, Page], int | None] = lambda tier, page: None
        # Would a page be missed if it made way for another? The pager says.
        self.missed: Callable[[Tier, Page, Page], bool] = lambda tier, stray, page: False
        # Told of pages that give up their frames by need; the pager listens.
        self.lost: Callable[[Tier, Page], None] = lambda tier, page: None
        # Asked when nothing else may leave: lets go of pins that are only ahead of need, and says whether it had any.
        self.relieve: Callable[[], bool] = lambda: False
        self.loans = Loans()
        tiers = [self.host] if transfers.device is None else [self.host, transfers.device]
        self._homes = {tier: _homes(table, tier, tier is tiers[-1]) for tier in tiers}

    def _victims(
        self, tier: Tier, after: int | None = None, but: set[Frame] | None = None
    ) -> Iterator[Frame]:
        """Frames that may be released, best first; ``after``: only of pages not needed up to that position."""
        if tier is self.host:
            for frame in self.transfers.leaving():
                if but is None or frame not in but:
                    yield frame
        homes, last = self._homes[tier], []
        for number in tier.eviction.order():
            if number in homes:
                # Units that are always needed: not for long is anything gained by it.
                last.append(number)
            elif (victim := self._victim(tier, number, after, but)) is not None:
                yield victim
        for number in last:
            if (victim := self._victim(tier, number, after, but)) is not None:
                yield victim

    def _victim(self, tier: Tier, number: int, after: int | None, but: set[Frame] | None) -> Frame | None:
        """The page's frame, if it may be released; see :meth:`_victims`."""
        page, on_host = self.table[number], tier is self.host
        if page.state.journey or self.stays(tier, page) or (on_host and page.stuck):
            return None
        victim = page.host if on_host else page.device
        if victim is None or (but is not None and victim in but):
            return None
        if after is not None and not page.spent and tier.eviction.next_use(number) <= after:
            return None
        return victim

    def stays(self, tier: Tier, page: Page) -> bool:
        """Is its frame in ``tier`` one that somebody uses? What is pinned on the device needs no frame on the host."""
        if tier is self.host and page.state is State.DEVICE:
            return False
        return bool(page.pins) or page.number in self.held

    def capacity(self, tier: Tier) -> tuple[int, frozenset[int]]:
        """The bytes of the slab before the homes of resident pages, and the numbers of these pages."""
        homes = self._homes[tier]
        return min(homes.values(), default=tier.slab.nbytes), frozenset(homes)

    def _go_home(self, tier: Tier, page: Page, why: Reason) -> Frame | None:
        """The frame that is a page's own; None when it has none, or can't have it.

        Resident pages have theirs at the end of the slab: they are pinned for long, and in the middle they would leave
        no room side by side for a large page, where the budget is small. Of others, a plan may say.
        """
        home = self._homes[tier].get(page.number)
        offset = self.place(tier, page) if home is None else home
        if offset is None:
            return None
        moves = self.transfers
        for frame in tier.slab.between(offset, offset + page.nbytes):
            other = frame.page
            place = None if home is not None else self.place(tier, other)
            if place is not None and (place == frame.offset or self.missed(tier, other, page)):
                return None  # the step has left its schedule: both should be there, or the other will be needed first
            if other.state.journey:
                other.leaving = False
                self._wait(other)
            if getattr(other, tier.name) is not frame:
                continue
            if self.stays(tier, other) or (tier is self.host and other.stuck):
                return None
            self.evict(tier, other)
            if other.leaving:
                self._wait(other)
            moves.raise_error()
        return moves.frames.reserve(tier, page, why, offset)

    def _wait(self, page: Page) -> None:
        start = now()
        self.transfers.wait(page)
        self._blocked_ns += now() - start

    def make(self, tier: Tier, page: Page, why: Reason) -> Frame:
        """A frame for ``page``, whatever it takes: eviction, waiting for transfers, relocation.

        Raises BudgetError when what is pinned leaves no room at all.
        """
        moves = self.transfers
        self._blocked_ns = 0
        frame = self._go_home(tier, page, why) or moves.frames.reserve(tier, page, why)
        relocated = False
        while frame is None:
            self.loans.collect()
            window = tier.slab.window(page.nbytes, self._victims(tier))
            if window is not None:
                for victim in window:
                    self.evict(tier, victim.page)
                for victim in window:
                    if victim.page.leaving:
                        self._wait(victim.page)
                moves.raise_error()
            elif moves:
                # Prefetches that have not landed can't be given up: their frames are being written to.
                self._wait(moves.oldest)
            elif not relocated and tier is self.host:
                # The last resort: everything that may leave leaves, and what stays moves together.
                for victim in list(self._victims(tier)):
                    self.evict(tier, victim.page)
                moves.drain()
                moves.raise_error()
                self._relocate()
                relocated = True
            elif self.relieve():
                relocated = False
            else:
                raise self._no_room(tier, page)
            frame = moves.frames.reserve(tier, page, why)
        if self._blocked_ns:
            moves.log.stall(page, page.unit, now() - self._blocked_ns, Reason.NO_FRAME, (At.HOST, At.DISK))
            self.waited_ns += self._blocked_ns
        return frame

    def give_way(self, tier: Tier, frame: Frame, place: int | None, wanted: bool = False) -> bool:
        """Free a frame for a plan, without waiting; whether it is free now.

        ``place`` is where the plan has the page that is in it: it goes there if it can, and is evicted otherwise,
        unless it is ``wanted`` sooner than what it would make way for.
        """
        page = frame.page
        if place == frame.offset or page.number in self.held:
            return False
        if page.state is State.WRITING and tier is self.host and not wanted:
            page.leaving = True  # gone when it has landed
        if page.state.journey or self.stays(tier, page):
            return False
        if tier is self.host and page.stuck:
            return False
        if place is not None and page.state is State.HOST and self._move(page, frame, place):
            return True
        if wanted or page.device_dirty:
            return False
        self.evict(tier, page)
        return not page.leaving

    def _move(self, page: Page, frame: Frame, offset: int) -> bool:
        """Move a page in the host's slab to ``offset``, if that is free."""
        new = self.host.slab.reserve_at(page, offset)
        if new is None:
            return False
        self.counters.num_relocations += 1
        unbind(page)
        with self.transfers.shelf.lock:
            self.host.bytes_of(new).copy_(self.host.bytes_of(frame))
            page.host = new
        self.host.slab.release(frame)
        return True

    def take_blank(self, page: Page, frame: Frame) -> None:
        """A page without content gets a frame of zeros; nothing is read."""
        whole = self.host.bytes_of(frame)
        if page.gaps is None:
            whole.zero_()
        else:
            for start, stop in page.gaps:
                whole[start:stop].zero_()
        self.transfers.frames.settle(page, frame)

    def ahead(
        self, tier: Tier, page: Page, position: int, claimed: set[Frame], only_evict: bool = False
    ) -> Frame | None:
        """A frame for a prefetch, or None when it would need waiting, or the frame of a page needed sooner.

        Evictions that it takes are begun, and their frames noted in ``claimed``, so that the next one looks
        elsewhere.
        """
        home = self._homes[tier].get(page.number)
        if (
            not only_evict
            and (frame := self.transfers.frames.reserve(tier, page, Reason.LOOKAHEAD, home)) is not None
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
            self.evict(tier, victim.page)
        if only_evict or any(victim.page.leaving for victim in window):
            return None
        return self.transfers.frames.reserve(tier, page, Reason.LOOKAHEAD)

    def evict(self, tier: Tier, page: Page) -> None:
        """Give a page's frame back: at once when the copy below is good, else once it has been written."""
        if page.leaving or (page.host if tier is self.host else page.device) is None:
            return  # on its way, or gone already: to store another one took it along
        moves = self.transfers
        self.counters.num_evictions += 1
        if tier is not self.host:
            if page.device_dirty:
                self.store(page)
            else:
                moves.frames.drop_device(page, self._chosen)
        elif page.device_dirty:
            page.dirty = False  # stale: what counts is on the device
            moves.frames.drop(page, self._chosen)
        elif page.spent or page.blank or not page.dirty:
            moves.frames.drop(page, Reason.DISCARD if page.spent else self._chosen)
        elif page.state is State.DEVICE and (page.pins or page.number in self.held):
            page.dirty = False
            page.device_dirty = True  # what is below is stale: from here on the device has the only good copy
            moves.frames.drop(page, self._chosen)
        else:
            if page.state is State.DEVICE:
                moves.frames.drop_device(page, self._chosen)
            moves.log.record(Event.EVICT, page, At.HOST, At.DISK, self._chosen)
            moves.write(page, self._chosen, leaving=True)
        self.lost(tier, page)

    def _relocate(self) -> None:
        """Slide every frame that nobody looks at down, so that the holes of the host's slab become one.

        For when enough bytes are free but not side by side; copies at memory speed.
        """
        self.counters.num_relocations += 1
        memory = self.host.memory
        with self.transfers.shelf.lock:
            for frame in list(self.host.slab):
                page = frame.page
                if page.pins or page.state.journey:
                    continue
                old = self.host.slab.slide(frame)
                if old is None:
                    continue
                if page.state is not State.DEVICE:
                    unbind(page)
                # The two may overlap; a step no longer than the distance moved never overwrites what is still to move.
                distance = old - frame.offset
                for done in range(0, frame.nbytes, distance):
                    size = min(distance, frame.nbytes - done)
                    memory[frame.offset + done :][:size].copy_(memory[old + done :][:size])

    def _no_room(self, tier: Tier, page: Page) -> BudgetError:
        pinned = [frame for frame in tier.slab if self.stays(tier, frame.page)]
        stuck = [frame for frame in tier.slab if frame.page.stuck and frame not in pinned]
        pinned_nbytes = sum(frame.nbytes for frame in pinned)
        stuck_nbytes = sum(frame.nbytes for frame in stuck)
        return BudgetError(
            page.nbytes,
            tier.slab.nbytes - pinned_nbytes - stuck_nbytes,
            tier.name,
            None,
            f"the {page.kind.name.lower()} page of unit {page.unit}",
            f"of {tier.slab.nbytes} bytes, {pinned_nbytes} are pinned by {len(pinned)} pages in use or seen by tensors "
            f"that you hold, {stuck_nbytes} may not leave by [placement]; let go of such tensors, or raise the budget "
            "(torch.autograd.grad of parameters, torch's own optimizers and torch.nn.utils functions hold all of them, "
            "or all gradients, at once: backward(), tiermem.trainer.AdamW and model.clip_grad_norm_ go page by page)",
        )

    def store(self, page: Page) -> None:
        """Bring a page that was written on the device down to the host, and wait; it must not be pinned."""
        moves = self.transfers
        held = page.number in self.held
        self.held.add(page.number)
        try:
            if page.host is None:
                page.host = self.make(self.host, page, Reason.WRITEBACK)
            moves.store(page)
            moves.wait(page)
        finally:
            if not held:
                self.held.discard(page.number)
        moves.raise_error(page)


def _homes(table: PageTable, tier: Tier, computes: bool) -> dict[int, int]:
    """Page number -> offset of its own place at the end of the slab, for the pages of the resident unit.

    Where all pages fit the slab, each has its own: nothing has to make way, and no hole is ever too small.
    """
    on_host = tier.name == "host"
    pages = [page for page in table if on_host or page.kind is Kind.PARAMETER]
    end = tier.slab.nbytes
    if sum(page.nbytes for page in pages) > end:
        kinds = ([Kind.PARAMETER] if computes else []) + ([Kind.GRADIENT] if on_host else [])
        pages = [page for page in pages if page.unit == 0 and page.kind in kinds]
    homes: dict[int, int] = {}
    for page in pages:
        if page.nbytes <= end:
            end -= page.nbytes
            homes[page.number] = end
    return homes
