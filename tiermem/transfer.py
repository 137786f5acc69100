"""Transfers: every journey of a page between two tiers, performed in one place.

Note: landing. A transfer is submitted (frame reserved, state a journey), moves without us, and *lands* when somebody
looks: in ``poll``, or because somebody waits. Only landing changes the page's place. A failed transfer lands too: the
page is back where it came from, its source being untouched, and the error is kept for the next one who needs the page
(of a writeback: for whoever comes next, since nobody needs a page that leaves).

Note: ranks. Where several of them share a model, they are what a sharded parameter page is read from, and what a
gradient page is written to: both are journeys like those to and from the disk, but for what is at their other end. The
threads that carry them out never take the pager's lock; see :mod:`tiermem.shelf`.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter_ns as now

from tiermem.aio import Check, Checksums, Queue, checksum
from tiermem.device import Copy, Device
from tiermem.disk import Disk
from tiermem.errors import PagingError, RanksError, TransferError
from tiermem.failures import Failures
from tiermem.frames import Frames, unbind
from tiermem.page import Frame, Page, State
from tiermem.pagelog import PageLog
from tiermem.ranks import Request
from tiermem.shelf import Shelf
from tiermem.stats import Counters, Link
from tiermem.tier import Tier
from tiermem.trace import AnyTrace, Event, Reason
from tiermem.trace import Tier as At

ARROW = {
    State.READING: (At.DISK, At.HOST),
    State.WRITING: (At.HOST, At.DISK),
    State.LOADING: (At.HOST, At.DEVICE),
    State.STORING: (At.DEVICE, At.HOST),
}


class Transfer:
    """One copy in flight: how to ask for its end, when it began, and why; ``request``: of the ranks, if it is theirs.

    ``ended`` is called when it has landed, and told whether the ranks have returned it. ``check`` has the checksum of
    its bytes, where it is taken.
    """

    __slots__ = ("check", "done", "ended", "reason", "request", "start", "wait")

    def __init__(
        self,
        done: Callable[[], bool],
        wait: Callable[[], None],
        reason: Reason,
        request: Request | None = None,
        ended: Callable[[bool], None] | None = None,
        check: Check | None = None,
    ) -> None:
        self.done = done
        self.wait = wait
        self.reason = reason
        self.request = request
        self.ended = ended
        self.check = check
        self.start = now()


class Transfers:
    """What is in flight between the tiers; with its ``frames``, the only code that changes where a page is.

    ``device`` is None where the host is the device (the CPU); ``disk`` is None as long as there is none. Callers
    hold the pager's lock.
    """

    def __init__(
        self,
        host: Tier,
        device: Tier | None,
        disk: Disk | None,
        queue: Queue | None,
        copier: Device,
        trace: AnyTrace,
        counters: Counters | None = None,
        checksums: Checksums | None = None,
    ) -> None:
        self.host = host
        self.device = device
        self.disk = disk
        self.counters = counters if counters is not None else Counters()
        self.log = PageLog(trace, self.counters)
        self.failures = Failures(disk)
        self.shelf = Shelf(host, disk, queue, self.counters, self.failures.verify)
        self.frames = Frames(host, device, self.shelf, self.log)
        self._queue = queue
        self._checksums = checksums
        self._copier = copier
        self._flying: dict[int, Page] = {}  # page number -> page on a journey
        self._error: TransferError | RanksError | None = None  # of a writeback
        self._links: dict[State, Link] = {
            State.READING: self.counters.disk_to_host,
            State.WRITING: self.counters.host_to_disk,
            State.LOADING: self.counters.host_to_device,
            State.STORING: self.counters.device_to_host,
        }

    # -- in flight ----------------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        """Is anything in flight?"""
        return bool(self._flying)

    @property
    def oldest(self) -> Page:
        """The page whose transfer was submitted first."""
        return next(iter(self._flying.values()))

    def leaving(self) -> Iterator[Frame]:
        """Host frames that will be free as soon as their pages are written."""
        for page in self._flying.values():
            if page.leaving and page.host is not None:
                yield page.host

    def poll(self) -> None:
        """Land every transfer that has ended."""
        if self._flying:
            for page in [page for page in self._flying.values() if _transfer(page).done()]:
                self.wait(page)

    def drain(self) -> None:
        """Wait until nothing is in flight. Errors stay with their pages."""
        while self._flying:
            self.wait(self.oldest)

    def abandon(self) -> None:
        """At the end: wait for what the disk and the device have to do, and for the ranks only if they can go on."""
        while self._flying:
            page = self.oldest
            try:
                self.wait(page)
            except RanksError:
                del self._flying[
                    page.number
                ]  # its frame goes with the slab, and with the thread that fills it

    def land_gathers(self) -> None:
        """Wait for every page that is on its way from the ranks. Errors stay with their pages."""
        for page in [page for page in self._flying.values() if page.gathered]:
            self.wait(page)

    def raise_error(self, page: Page | None = None) -> None:
        """Raise the error of a transfer of ``page`` that nobody waited for; without a page, that of a writeback."""
        if page is None:
            error, self._error = self._error, None
        else:
            error, page.error = page.error, None
        if error is not None:
            raise error

    def wait(self, page: Page) -> None:
        """Block until the page's transfer has ended, and land it."""
        transfer = _transfer(page)
        request = transfer.request
        error: TransferError | RanksError | None = None
        try:
            transfer.wait()
            if page.state is State.READING and transfer.check is not None:
                error = self.failures.verify(page, transfer.check.value)
        except OSError as failure:
            # A slice that isn't what was written has said so itself.
            error = (
                failure
                if isinstance(failure, TransferError)
                else self.failures.of_transfer(page, failure, *ARROW[page.state])
            )
        except RanksError as failure:
            if request is None or not request.done():
                raise  # bytes may still come: the page stays on its journey
            error = failure
        journey = page.state
        page.transfer = None
        del self._flying[page.number]
        source, target = ARROW[journey]
        if request is not None:
            source, target = (At.NONE, At.HOST) if journey is State.READING else (At.HOST, At.NONE)
        if error is None:
            if request is None:
                self._links[journey].nbytes[page.kind] += page.nbytes
            elif not request.returned:
                what = Reason.GATHER if journey is State.READING else Reason.REDUCE
                self.log.collective(page, what, request)
            event = Event.LANDED if journey in (State.READING, State.LOADING) else Event.WRITEBACK
            reason = transfer.reason
        else:
            self.counters.num_failed += 1
            event = Event.FAILED
            reason = Reason.NO_SPACE if getattr(error, "errno", 0) == errno.ENOSPC else Reason.IO_ERROR
        self.log.record(event, page, source, target, reason, transfer.start, now() - transfer.start)
        if request is not None and journey is State.WRITING:
            self._land_given(page, transfer, error)
            return
        if journey is State.WRITING:
            assert self.disk is not None
            self.disk.written(
                page, transfer.check.value if transfer.check else None, failed=error is not None
            )
        _LANDINGS[journey](self, page, error)

    # -- submitting ---------------------------------------------------------------------------------------

    def read(self, page: Page, frame: Frame, reason: Reason) -> None:
        """DISK -> READING, into a frame that was reserved for the page."""
        if page.gathered:
            self._gather(page, frame, reason)
            return
        assert self.disk is not None
        try:
            address = self.host.address_of(frame)
            ticket = self.disk.read(page, address)
        except BaseException:
            self.host.slab.release(frame)
            raise
        page.host = frame
        self._depart(page, State.READING, self._on_disk(page, ticket, address, True, reason))

    def _gather(self, page: Page, frame: Frame, reason: Reason) -> None:
        """As :meth:`read`, of what the ranks have."""
        ranks = self.shelf.ranks
        assert ranks is not None
        try:
            request = self.shelf.gather(page, frame)
        except BaseException:
            self.host.slab.release(frame)
            raise
        page.host = frame
        what = f"the use of unit {page.unit}"
        self._depart(
            page, State.READING, Transfer(request.done, lambda: ranks.wait(request, what), reason, request)
        )

    def give(self, page: Page, request: Request, ended: Callable[[bool], None]) -> None:
        """HOST -> WRITING: a gradient page, to the ranks; its frame is released when they have added it up.

        ``ended`` is called then, and told whether they returned it: it is here then as before.
        """
        ranks = self.shelf.ranks
        assert ranks is not None
        page.leaving = True
        what = f"the reduction of the gradients of unit {page.unit}"
        self._depart(
            page,
            State.WRITING,
            Transfer(request.done, lambda: ranks.wait(request, what), Reason.REDUCE, request, ended),
        )

    def write(self, page: Page, reason: Reason, *, leaving: bool = False) -> None:
        """HOST -> WRITING; ``leaving``: its frame is released when it has landed."""
        if page.extent is None:
            if self.disk is None:
                raise PagingError(
                    f"{page!r} has to leave the host and there is no disk tier: name disk.paths"
                )
            self.provide([page])
        assert self.disk is not None
        assert page.host is not None
        address = self.host.address_of(page.host)
        ticket = self.disk.write(page, address)
        page.leaving = leaving
        self._depart(page, State.WRITING, self._on_disk(page, ticket, address, False, reason))

    def write_pinned(self, page: Page) -> None:
        """Write a page that somebody looks at: it stays in its place, and this waits. Raises TransferError."""
        assert self.disk is not None
        assert self._queue is not None
        assert page.host is not None
        address = self.host.address_of(page.host)
        value = checksum(address, page.nbytes) if self._checksums is not None else None
        ticket = self.disk.write(page, address)
        try:
            self._queue.wait(ticket)
        except OSError as failure:
            error = self.failures.of_transfer(page, failure, At.HOST, At.DISK)
            self.disk.written(page, None, failed=True)
            self.counters.num_failed += 1
            raise error from failure
        self.disk.written(page, value)
        page.dirty = False
        self._links[State.WRITING].nbytes[page.kind] += page.nbytes

    def provide(self, pages: Iterable[Page]) -> None:
        """Give extents on the disk to pages that may sink and have none; raises BudgetError when they don't fit."""
        assert self.disk is not None
        for page in self.disk.provide(pages):
            self.log.record(Event.RESERVE, page, At.NONE, At.DISK, Reason.CREATE)

    def load(self, page: Page, frame: Frame, reason: Reason) -> None:
        """HOST -> LOADING, into a device frame that was reserved for the page."""
        assert self.device is not None
        assert page.host is not None
        try:
            copy = self._copier.copy(self.device.bytes_of(frame), self.host.bytes_of(page.host))
        except BaseException:
            self.frames.release(self.device, frame, page, reason)
            raise
        page.device = frame
        unbind(page)
        self._depart(page, State.LOADING, _of_copy(copy, reason))

    def store(self, page: Page) -> None:
        """DEVICE -> STORING, into the host frame that the page has."""
        assert self.device is not None
        assert page.host is not None
        assert page.device is not None
        copy = self._copier.copy(self.host.bytes_of(page.host), self.device.bytes_of(page.device))
        unbind(page)
        self._depart(page, State.STORING, _of_copy(copy, Reason.STATE))

    def _on_disk(self, page: Page, ticket: int, address: int, reading: bool, reason: Reason) -> Transfer:
        queue = self._queue
        assert queue is not None
        if self._checksums is not None and not (reading and page.checksum is None):
            check = self._checksums.begin(ticket, address, page.nbytes, reading)
            return Transfer(check.done, check.wait, reason, check=check)
        return Transfer(lambda: queue.done(ticket), lambda: queue.wait(ticket), reason)

    def _depart(self, page: Page, journey: State, transfer: Transfer) -> None:
        page.state = journey
        page.transfer = transfer
        self._flying[page.number] = page

    # -- landing ------------------------------------------------------------------------------------------

    def _land_given(self, page: Page, transfer: Transfer, error: TransferError | RanksError | None) -> None:
        page.state = State.HOST
        page.leaving = False
        assert transfer.request is not None
        assert transfer.ended is not None
        returned = transfer.request.returned
        transfer.ended(returned)
        if error is not None:
            self._error = error
        elif not returned:
            page.dirty = False
            page.blank = True
            self.frames.drop(page, Reason.DISCARD)

    def _land_reading(self, page: Page, error: TransferError | RanksError | None) -> None:
        if error is None:
            page.state = State.HOST
            page.dirty = False
            self.host.eviction.admitted(page.number)
        else:
            page.state = State.DISK
            page.error = error
            page.prefetched = False
            frame, page.host = page.host, None
            assert frame is not None
            self.frames.release(self.host, frame, page, Reason.IO_ERROR)

    def _land_writing(self, page: Page, error: TransferError | RanksError | None) -> None:
        page.state = State.HOST
        leaving, page.leaving = page.leaving, False
        if error is not None:
            self._error = error  # the page is still here and dirty: nothing is lost
            return
        page.dirty = False
        if leaving:
            self.frames.drop(page, Reason.NONE, traced=False)

    def _land_loading(self, page: Page, error: TransferError | RanksError | None) -> None:
        assert self.device is not None
        if error is None:
            page.state = State.DEVICE
            self.device.eviction.admitted(page.number)
            return
        page.state = State.HOST
        page.error = error
        frame, page.device = page.device, None
        assert frame is not None
        self.frames.release(self.device, frame, page, Reason.IO_ERROR)

    def _land_storing(self, page: Page, error: TransferError | RanksError | None) -> None:
        page.state = State.DEVICE
        if error is not None:
            page.error = error
            return
        page.device_dirty = False
        page.dirty = True
        page.blank = False
        self.host.eviction.admitted(page.number)
        self.frames.drop_device(page, Reason.STATE)


def _transfer(page: Page) -> Transfer:
    transfer = page.transfer
    assert isinstance(transfer, Transfer), f"4: {page!r} has no transfer"
    return transfer


def _of_copy(copy: Copy, reason: Reason) -> Transfer:
    def wait() -> None:
        try:
            copy.wait()
        except RuntimeError as failure:  # torch's and CUDA's
            raise OSError(errno.EIO, str(failure)) from failure

    return Transfer(copy.done, wait, reason)


_LANDINGS: dict[State, Callable[[Transfers, Page, TransferError | RanksError | None], None]] = {
    State.READING: Transfers._land_reading,
    State.WRITING: Transfers._land_writing,
    State.LOADING: Transfers._land_loading,
    State.STORING: Transfers._land_storing,
}
