"""Transfers: every arrow of the page states, performed in one place.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter_ns as now

from tiermem.aio import Check, Checksums, Queue, checksum
from tiermem.device import Copy, Device
from tiermem.disk import Disk
from tiermem.errors import IntegrityError, PagingError, RanksError, TransferError
from tiermem.page import Frame, Kind, Page, State
from tiermem.ranks import Request
from tiermem.shelf import Shelf
from tiermem.stats import Counters, Link
from tiermem.tier import Tier
from tiermem.trace import POOL, AnyTrace, Event, NullTrace, Phase, Reason
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
    """What is in flight between the tiers, and the only code that changes where a page is.

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
        self.trace = trace
        self._tracing = not isinstance(trace, NullTrace)
        self.phase: int = Phase.NONE  # written into every record
        self.modules: Sequence[str] = ()  # the units' names, for messages
        # Of pages that come and go: the unit under which the trace has all of them as one.
        self.pool: int | None = None
        # Told of a page whose bytes have changed and what their checksum is; says in words what can be done about it.
        self.damaged: Callable[[Page, int], str] = lambda page, found: ""
        self._queue = queue
        self._checksums = checksums
        self._copier = copier
        self._flying: dict[int, Page] = {}  # page number -> page on a journey
        self._error: TransferError | RanksError | None = None  # of a writeback
        self.shelf = Shelf(host, disk, queue, self.counters, self.verify)
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
                error = self.verify(page, transfer.check.value)
        except OSError as failure:
            # A slice that isn't what was written has said so itself.
            error = failure if isinstance(failure, TransferError) else self._failed(page, failure)
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
                self.collective(page, what, request)
            event = Event.LANDED if journey in (State.READING, State.LOADING) else Event.WRITEBACK
            reason = transfer.reason
        else:
            self.counters.num_failed += 1
            event = Event.FAILED
            reason = Reason.NO_SPACE if getattr(error, "errno", 0) == errno.ENOSPC else Reason.IO_ERROR
        self.record(event, page, source, target, reason, transfer.start, now() - transfer.start)
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
            error = self._failed(page, failure, (At.HOST, At.DISK))
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
            self.record(Event.RESERVE, page, At.NONE, At.DISK, Reason.CREATE)

    def load(self, page: Page, frame: Frame, reason: Reason) -> None:
        """HOST -> LOADING, into a device frame that was reserved for the page."""
        assert self.device is not None
        assert page.host is not None
        try:
            copy = self._copier.copy(self.device.bytes_of(frame), self.host.bytes_of(page.host))
        except BaseException:
            self._release(self.device, frame, page, reason)
            raise
        page.device = frame
        self._unbind(page)
        self._depart(page, State.LOADING, _of_copy(copy, reason))

    def store(self, page: Page) -> None:
        """DEVICE -> STORING, into the host frame that the page has."""
        assert self.device is not None
        assert page.host is not None
        assert page.device is not None
        copy = self._copier.copy(self.host.bytes_of(page.host), self.device.bytes_of(page.device))
        self._unbind(page)
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
            self.drop(page, Reason.DISCARD)

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
            self._release(self.host, frame, page, Reason.IO_ERROR)

    def _land_writing(self, page: Page, error: TransferError | RanksError | None) -> None:
        page.state = State.HOST
        leaving, page.leaving = page.leaving, False
        if error is not None:
            self._error = error  # the page is still here and dirty: nothing is lost
            return
        page.dirty = False
        if leaving:
            self.drop(page, Reason.NONE, traced=False)

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
        self._release(self.device, frame, page, Reason.IO_ERROR)

    def _land_storing(self, page: Page, error: TransferError | RanksError | None) -> None:
        page.state = State.DEVICE
        if error is not None:
            page.error = error
            return
        page.device_dirty = False
        page.dirty = True
        page.blank = False
        self.host.eviction.admitted(page.number)
        self.drop_device(page, Reason.STATE)

    def _failed(self, page: Page, failure: OSError, link: tuple[At, At] | None = None) -> TransferError:
        source, target = link or ARROW[page.state]
        path = self.disk.path_of(page) if self.disk is not None and At.DISK in (source, target) else None
        error = TransferError(
            self._named(page),
            source.name.lower(),
            target.name.lower(),
            path,
            failure.errno or 0,
            str(failure.strerror or failure),
        )
        error.__cause__ = failure
        return error

    def verify(self, page: Page, found: int) -> TransferError | None:
        """The error of a page whose bytes aren't those that were written; None when they are."""
        if found == page.checksum:
            return None
        assert self.disk is not None
        assert page.checksum is not None
        offset = self.disk.place_of(page)[1]
        try:
            advice = self.damaged(page, found)
        except OSError as failure:
            advice = (
                f"; it couldn't be noted for the next resume: {failure}"  # to say what is wrong comes first
            )
        path = self.disk.path_of(page)
        return IntegrityError(self._named(page), path, offset, page.checksum, found, advice)

    def _named(self, page: Page) -> str:
        name = f", {self.modules[page.unit]}" if self.modules else ""
        return f"the {page.kind.name.lower()} page of unit {page.unit}{name} (page {page.number}, {page.nbytes} bytes)"

    # -- frames -------------------------------------------------------------------------------------------

    def reserve(self, tier: Tier, page: Page, reason: Reason, offset: int | None = None) -> Frame | None:
        """Cut a frame for the page out of a hole (at ``offset``, or wherever); None when there is none that does."""
        frame = tier.slab.reserve(page) if offset is None else tier.slab.reserve_at(page, offset)
        if frame is not None:
            self.record(Event.RESERVE, page, At.NONE, self._at(tier), reason)
        return frame

    def settle(self, page: Page, frame: Frame) -> None:
        """DISK -> HOST without reading: the content comes into being in the frame."""
        page.host = frame
        page.state = State.HOST
        self.host.eviction.admitted(page.number)
        self.record(Event.LANDED, page, At.NONE, At.HOST, Reason.CREATE)

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
            self.record(Event.EVICT, page, At.HOST, At.NONE if page.blank else At.DISK, reason)
        if page.kind is Kind.PARAMETER_SHARD:
            with self.shelf.lock:
                page.host = None
        page.host = None
        if page.state is not State.DEVICE:
            self._unbind(page)
            page.state = State.DISK
            if page.prefetched:
                page.prefetched = False
                self.counters.num_prefetches_wasted += 1
        self.host.eviction.removed(page.number)
        self._release(self.host, frame, page, reason)

    def drop_device(self, page: Page, reason: Reason) -> None:
        """Release the device frame of a page whose copy below is good."""
        assert self.device is not None
        assert not page.device_dirty, f"dropping a page written on the device: {page!r}"
        frame, page.device = page.device, None
        assert frame is not None
        self._unbind(page)
        self.record(Event.EVICT, page, At.DEVICE, At.HOST if page.host else At.DISK, reason)
        page.state = State.HOST if page.host is not None else State.DISK
        self.device.eviction.removed(page.number)
        self._release(self.device, frame, page, reason)

    def _release(self, tier: Tier, frame: Frame, page: Page, reason: Reason) -> None:
        tier.slab.release(frame)
        self.record(Event.RELEASE, page, self._at(tier), At.NONE, reason)

    def _unbind(self, page: Page) -> None:
        for user in page.users:
            user.unbind()

    def _at(self, tier: Tier) -> At:
        return At.HOST if tier is self.host else At.DEVICE

    def stall(self, page: Page, unit: int, start: int, cause: Reason, link: tuple[At, At]) -> None:
        """Count and trace that ``unit`` has waited since ``start``, for ``page`` to arrive over ``link``."""
        duration = now() - start
        self.counters.stall_ns[cause.name.lower()] += duration
        if cause is Reason.PREFETCHED_LATE:
            self.counters.num_prefetches_late += 1
        self.record(Event.STALL, page, *link, cause, start, duration, unit)

    def collective(self, page: Page, what: Reason, request: Request) -> None:
        """Count and trace an exchange with the other ranks that has ended."""
        duration = request.finished - request.began
        self.counters.collective_ns[what.name.lower()] += duration
        self.record(Event.COLLECTIVE, page, At.NONE, At.NONE, what, request.began, duration)

    def record(
        self,
        event: Event,
        page: Page,
        source: At,
        target: At,
        reason: Reason,
        start: int = 0,
        duration: int = 0,
        unit: int | None = None,
    ) -> None:
        """Write one event of a page; without ``start``, it is now. ``unit``: who asked, if not the page's own."""
        if not self._tracing:
            return
        if unit is None:
            unit = page.unit
        number = page.number
        if self.pool is not None:
            unit, number = self.pool, POOL
        self.trace.record(
            event,
            start or now(),
            duration,
            unit,
            number,
            page.nbytes,
            source,
            target,
            reason,
            self.phase,
        )


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
