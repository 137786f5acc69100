"""Frames of pages: cut for them, given up, and what that makes of a page's state.

These are the changes of state that need no transfer; those that do are in :mod:`tiermem.transfer`.
"""

from __future__ import annotations

from tiermem.page import Frame, Kind, Page, State
from tiermem.pagelog import PageLog
from tiermem.shelf import Shelf
from tiermem.tier import Tier
from tiermem.trace import Event, Reason
from tiermem.trace import Tier as At


class Frames:
    """The frames of the host's tier and, where it has memory of its own, of the device's.

    Callers hold the pager's lock.
    """

    def __init__(self, host: Tier, device: Tier | None, shelf: Shelf, log: PageLog) -> None:
        self.host = host
        self.device = device
        self._shelf = shelf
        self._log = log

    def reserve(self, tier: Tier, page: Page, reason: Reason, offset: int | None = None) -> Frame | None:
        """Cut a frame for the page out of a hole (at ``offset``, or wherever); None when there is none that does."""
        frame = tier.slab.reserve(page) if offset is None else tier.slab.reserve_at(page, offset)
        if frame is not None:
            self._log.record(Event.RESERVE, page, At.NONE, self._at(tier), reason)
        return frame

    def settle(self, page: Page, frame: Frame) -> None:
        """DISK -> HOST without reading: the content comes into being in the frame."""
        page.host = frame
        page.state = State.HOST
        self.host.eviction.admitted(page.number)
        self._log.record(Event.LANDED, page, At.NONE, At.HOST, Reason.CREATE)

    def drop(self, page: Page, reason: Reason, *, traced: bool = True) -> None:
        """Release the host frame of a page that is clean, or whose content isn't needed any more.

        A page that is on the device too stays there; any other is on the disk, or blank, from here on.
        """
        frame = page.host
        assert frame is not None
        if page.spent:
            page.dirty = False
            page.blank = True
        assert page.blank or not page.dirty, f"dropping a dirty page: {page!r}"
        page.dirty = False
        if traced:
            self._log.record(Event.EVICT, page, At.HOST, At.NONE if page.blank else At.DISK, reason)
        if page.kind is Kind.PARAMETER_SHARD:
            with self._shelf.lock:
                page.host = None
        page.host = None
        if page.state is not State.DEVICE:
            unbind(page)
            page.state = State.DISK
            if page.prefetched:
                page.prefetched = False
                self._log.counters.num_prefetches_wasted += 1
        self.host.eviction.removed(page.number)
        self.release(self.host, frame, page, reason)

    def drop_device(self, page: Page, reason: Reason) -> None:
        """Release the device frame of a page whose copy below is good."""
        assert self.device is not None
        assert not page.device_dirty, f"dropping a page written on the device: {page!r}"
        frame, page.device = page.device, None
        assert frame is not None
        unbind(page)
        self._log.record(Event.EVICT, page, At.DEVICE, At.HOST if page.host else At.DISK, reason)
        page.state = State.HOST if page.host is not None else State.DISK
        self.device.eviction.removed(page.number)
        self.release(self.device, frame, page, reason)

    def release(self, tier: Tier, frame: Frame, page: Page, reason: Reason) -> None:
        """Give a frame back that the page has had."""
        tier.slab.release(frame)
        self._log.record(Event.RELEASE, page, self._at(tier), At.NONE, reason)

    def _at(self, tier: Tier) -> At:
        return At.HOST if tier is self.host else At.DEVICE


def unbind(page: Page) -> None:
    """The page's bytes move, or go: whoever computes with views of them makes new ones."""
    for user in page.users:
        user.unbind()
