"""The pager beside a dict of bytes: hypothesis faults, writes, overwrites, prefetches, flushes and fails transfers.

After every rule the page table's invariants hold; whatever a page was last given is what is read back, wherever it
went in between.
"""

import contextlib
import errno
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tiermem.aio import Buffer, FaultyQueue, open_queue
from tiermem.device import Copy, CpuDevice, StandInDevice
from tiermem.disk import Disk
from tiermem.errors import BudgetError, PagingError, TransferError
from tiermem.page import ALIGNMENT, Kind, Page, State
from tiermem.pager import Pager
from tiermem.policies import Access, Cursor, Lookahead, Phase, Recorder
from tiermem.policies import eviction as policy
from tiermem.table import PageTable
from tiermem.tier import Tier
from tiermem.trace import NullTrace, Reason
from tiermem.transfer import Transfers

CELLS = (2, 1, 3, 1, 2, 1, 1)
"""Sizes of the pages, in alignments."""
KINDS = (
    Kind.PARAMETER,
    Kind.PARAMETER,
    Kind.PARAMETER,
    Kind.GRADIENT,
    Kind.GRADIENT,
    Kind.MASTER,
    Kind.EXP_AVG,
)
NUMBERS = st.sampled_from(range(len(CELLS)))
SOME = st.lists(NUMBERS, min_size=1, max_size=3, unique=True)
PHASES = st.sampled_from(Phase)


class _Failed:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        raise OSError(errno.EIO, "copying failed (injected)")


class FaultyStandIn(StandInDevice):
    """A stand-in device whose next copies fail, as many as ``failing`` says."""

    failing = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        if self.failing:
            self.failing -= 1
            target.fill_(0xA5)
            return _Failed()
        return super().copy(target, source)


class Pin:
    """What one fault pinned: some pages where they were needed, some to be overwritten."""

    def __init__(self, pages: Sequence[Page], overwrite: Sequence[Page], on_device: bool) -> None:
        self.pages = list(pages)
        self.overwrite = list(overwrite)
        self.on_device = on_device


class PagerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.fails: list[int | str] = []  # what the next transfers to or from the disk fail with
        self.num_failed = 0

    @initialize(
        engine=st.sampled_from(["libaio", "threads", None]),
        separate=st.booleans(),
        eviction=st.sampled_from(["lru", "belady"]),
        host=st.sampled_from([6, 7, 9]),
        device=st.sampled_from([3, 4, 5]),
        stays=st.sets(NUMBERS, max_size=2),
        ahead=st.sampled_from([{"accesses": 2}, {"nbytes": 4 * ALIGNMENT}]),
    )
    def begin(
        self,
        engine: str | None,
        separate: bool,
        eviction: str,
        host: int,
        device: int,
        stays: set[int],
        ahead: dict[str, int],
    ) -> None:
        if engine is None:
            host = sum(CELLS)  # without a disk everything must have room
        self.table = PageTable()
        for number, (cells, kind) in enumerate(zip(CELLS, KINDS, strict=True)):
            self.table.add(
                number, kind, torch.uint8, cells * ALIGNMENT, sinks=engine is not None and number not in stays
            )
        self.content = {page.number: bytes(page.nbytes) for page in self.table}
        self.unknown: set[int] = set()  # spent: whatever is in them is nobody's business
        self.pins: list[Pin] = []
        self.copier = FaultyStandIn() if separate else CpuDevice()
        self.stack.callback(self.copier.close)
        buffer = Buffer(host * ALIGNMENT)
        buffer.view[:] = b"\xee" * buffer.nbytes
        self.host = Tier("host", torch.frombuffer(buffer.view, dtype=torch.uint8), policy(eviction))
        self.device = None
        if separate:
            self.device = Tier("device", self.copier.allocate(device * ALIGNMENT), policy(eviction))
        self.disk = queue = None
        if engine is not None:
            folder = self.stack.enter_context(tempfile.TemporaryDirectory())
            inner = open_queue(engine, request=4096, depth=4)
            queue = self.stack.enter_context(FaultyQueue(inner, self.next_fault))
            self.disk = Disk([folder], sum(CELLS) * ALIGNMENT, queue)
            self.stack.callback(self.disk.close)
        self.moves = Transfers(self.host, self.device, self.disk, queue, self.copier, NullTrace())
        size = (lambda number: self.table[number].nbytes) if "nbytes" in ahead else None
        prefetch = Lookahead(**ahead, size=size)  # type: ignore[arg-type]
        self.pager = Pager(self.table, self.moves, prefetch, Reason.LRU)
        self.cursor: Cursor | None = None

    def next_fault(self, index: int, op: str) -> int | str | None:
        if not self.fails:
            return None
        self.num_failed += 1
        return self.fails.pop()

    # -- what the tests look at ---------------------------------------------------------------------------

    def frame_bytes(self, page: Page, on_device: bool) -> torch.Tensor:
        if on_device:
            assert self.device is not None
            assert page.state is State.DEVICE
            assert page.device is not None
            return self.device.bytes_of(page.device)
        assert page.state is State.HOST
        assert page.host is not None
        return self.host.bytes_of(page.host)

    def on_device(self, page: Page, pin_on_device: bool) -> bool:
        return self.device is not None and pin_on_device and page.kind is Kind.PARAMETER

    def verify(self, pages: Sequence[Page], on_device: bool) -> None:
        for page in pages:
            held = self.frame_bytes(page, self.on_device(page, on_device)).numpy().tobytes()
            assert held == self.content[page.number], f"{page!r} has other bytes"

    def pinned(self, page: Page, on_device: bool | None = None) -> bool:
        return any(
            page in pin.overwrite or (page in pin.pages and on_device in (None, pin.on_device))
            for pin in self.pins
        )

    def hollow(self, page: Page) -> bool:
        return any(page in pin.overwrite for pin in self.pins)

    def fault(self, pages: list[Page], overwrite: list[Page], phase: Phase, on_host: bool) -> bool:
        """The fault, and what must be true of the pins whether it can be had or not."""
        on_device = self.device is not None and phase is not Phase.OPTIMIZER and not on_host
        before = [page.pins for page in self.table]
        anything_pinned = any(before)
        try:
            self.pager.fault(pages, phase, 0, overwrite=overwrite, on_host=on_host)
        except (BudgetError, TransferError) as error:
            assert [page.pins for page in self.table] == before
            if isinstance(error, BudgetError):
                stays = sum(
                    page.nbytes for page in self.table if not page.sinks and page not in [*pages, *overwrite]
                )
                asked = sum(page.nbytes for page in [*pages, *overwrite])
                parameters = sum(page.nbytes for page in pages if self.on_device(page, on_device))
                fits = asked + stays <= self.host.slab.nbytes and (
                    self.device is None or parameters <= self.device.slab.nbytes
                )
                assert anything_pinned or not fits, f"there is room: {error}"  # noqa: PT017
            return False
        for page in self.table:
            named = (page in pages) + (page in overwrite)
            assert page.pins == before[page.number] + named
        self.pins.append(Pin(pages, overwrite, on_device))
        return True

    # -- rules --------------------------------------------------------------------------------------------

    @rule(numbers=SOME, phase=PHASES, on_host=st.booleans())
    def fault_some(self, numbers: list[int], phase: Phase, on_host: bool) -> None:
        on_device = self.device is not None and phase is not Phase.OPTIMIZER and not on_host
        pages = [
            page
            for page in map(self.table.__getitem__, numbers)
            if page.number not in self.unknown
            and not self.hollow(page)
            # Where it is pinned, and nowhere else.
            and not self.pinned(page, not on_device if page.kind is Kind.PARAMETER else None)
        ]
        if pages and self.fault(pages, [], phase, on_host):
            self.verify(pages, on_device)

    @precondition(lambda self: self.device is not None)
    @rule(number=NUMBERS)
    def fault_where_it_is_not_pinned(self, number: int) -> None:
        page = self.table[number]
        if page.kind is Kind.PARAMETER and page.pins and page.state is State.DEVICE:
            pins, state = page.pins, page.state
            with contextlib.suppress(TransferError), pytest.raises(PagingError, match="look"):
                self.pager.fault([page], Phase.OPTIMIZER, 0)
            assert (page.pins, page.state) == (pins, state)

    @rule(numbers=SOME, beside=st.lists(NUMBERS, max_size=1))
    def fault_to_overwrite(self, numbers: list[int], beside: list[int]) -> None:
        overwrite = [page for page in map(self.table.__getitem__, numbers) if not self.pinned(page)]
        pages = [
            page
            for page in map(self.table.__getitem__, beside)
            if page not in overwrite
            and not self.hollow(page)
            and page.number not in self.unknown
            and not (page.kind is Kind.PARAMETER and self.pinned(page, on_device=True))
        ]
        if overwrite and self.fault(pages, overwrite, Phase.OPTIMIZER, False):
            self.verify(pages, False)
            for page in overwrite:
                assert page.state is State.HOST

    @precondition(lambda self: self.pins)
    @rule(data=st.data(), write=st.booleans(), byte=st.integers(0, 255))
    def unpin(self, data: st.DataObject, write: bool, byte: int) -> None:
        pin = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1), label="pin"))
        self.verify(pin.pages, pin.on_device)
        for page in pin.overwrite:
            if write:
                self.give(page, byte, on_device=False)
                self.unknown.discard(page.number)
                page.spent = False
                self.pager.unpin([page], dirty=True)
            else:
                if page.hollow:
                    self.frame_bytes(page, False).fill_(byte)  # begun, and broken off
                self.pager.abandon(page)
        for page in pin.pages:
            on_device = self.on_device(page, pin.on_device)
            if write:
                self.give(page, byte, on_device)
                if on_device:
                    page.device_dirty = True
            self.pager.unpin([page], dirty=write and not on_device)

    def give(self, page: Page, byte: int, on_device: bool) -> None:
        self.frame_bytes(page, on_device).fill_(byte)
        self.content[page.number] = bytes([byte]) * page.nbytes

    @rule(numbers=SOME)
    def discard(self, numbers: list[int]) -> None:
        for page in map(self.table.__getitem__, numbers):
            if not page.pins:
                self.pager.discard(page)
                self.content[page.number] = bytes(page.nbytes)
                self.unknown.discard(page.number)
                assert page.state is State.DISK
                assert page.host is page.device is None

    @rule(number=st.sampled_from([n for n, kind in enumerate(KINDS) if kind is Kind.GRADIENT]))
    def spend(self, number: int) -> None:
        page = self.table[number]
        if not page.pins and not page.blank:
            page.spent = True
            self.unknown.add(number)

    @rule(accesses=st.lists(st.tuples(PHASES, SOME), min_size=1, max_size=6))
    def record(self, accesses: list[tuple[Phase, list[int]]]) -> None:
        recorder = Recorder()
        for unit, (phase, numbers) in enumerate(accesses):
            recorder.record(Access(unit, phase), numbers)
        self.cursor = Cursor(recorder.finish())
        self.pager.follow(self.cursor)

    @precondition(lambda self: self.cursor is not None)
    @rule(jump=st.booleans())
    def advance(self, jump: bool) -> None:
        assert self.cursor is not None
        schedule, position = self.cursor.schedule, self.cursor.position
        if position == len(schedule):
            self.cursor.restart()
        else:
            self.cursor.advance(schedule.accesses[-1 if jump else position])

    @rule(times=st.integers(1, 3))
    def pump(self, times: int) -> None:
        pins = [page.pins for page in self.table]
        for _ in range(times):
            self.pager.pump()
        assert [page.pins for page in self.table] == pins

    @rule()
    def poll(self) -> None:
        self.moves.poll()

    @rule()
    def drain(self) -> None:
        self.moves.drain()
        assert not self.moves

    @precondition(lambda self: self.disk is not None)
    @rule(numbers=SOME)
    def writeback(self, numbers: list[int]) -> None:
        pages = [self.table[number] for number in numbers]
        assert self.disk is not None
        self.disk.provide(pages)
        self.pager.writeback(pages)

    @rule()
    def flush(self) -> None:
        # At close: nothing is pinned then.
        if self.pins:
            return
        try:
            self.pager.flush()
        except (BudgetError, TransferError):
            return
        for page in self.table:
            assert not page.device_dirty
            if page.sinks and not page.blank:
                assert not page.dirty
                self.verify_file(page)

    def verify_file(self, page: Page) -> None:
        assert self.disk is not None
        assert page.extent is not None
        data = Path(self.disk.path_of(page)).read_bytes()[page.extent[1] :][: page.nbytes]
        if page.number not in self.unknown:
            assert data == self.content[page.number]

    @precondition(lambda self: self.device is not None)
    @rule(number=NUMBERS)
    def store(self, number: int) -> None:
        page = self.table[number]
        if page.device_dirty and not page.pins and page.state is State.DEVICE:
            try:
                self.pager.store(page)
            except (BudgetError, TransferError):
                assert page.state is State.DEVICE
                assert page.device_dirty
            else:
                assert page.state is State.HOST

    @precondition(lambda self: self.disk is not None)
    @rule(faults=st.lists(st.sampled_from([errno.EIO, errno.ENOSPC, "short"]), min_size=1, max_size=2))
    def fail_next_transfers(self, faults: list[int | str]) -> None:
        self.fails = list(faults)

    @precondition(lambda self: self.device is not None)
    @rule()
    def fail_next_copy(self) -> None:
        assert isinstance(self.copier, FaultyStandIn)
        self.copier.failing = 1

    # -- what always holds --------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "pager"):
            return
        self.table.check(self.host.slab, self.device.slab if self.device is not None else None)
        for pin in self.pins:
            # A pinned page stays, with its bytes.
            self.verify(pin.pages, pin.on_device)
            for page in pin.overwrite:
                assert page.state is State.HOST
        assert not self.pager.room.held

    def teardown(self) -> None:
        if not hasattr(self, "pager"):
            return
        try:
            self.fails.clear()
            if isinstance(self.copier, FaultyStandIn):
                self.copier.failing = 0
            for pin in self.pins:
                self.pager.unpin(pin.pages)
                for page in pin.overwrite:
                    self.pager.abandon(page)
            self.pins.clear()
            self.holds()
            self.moves.drain()
            for page in self.table:
                if page.number in self.unknown:
                    continue
                for phase in (Phase.FORWARD, Phase.OPTIMIZER):
                    for _ in range(2):  # old failures are told, each once
                        with contextlib.suppress(TransferError):
                            self.pager.fault([page], phase, 0)
                            break
                    else:
                        self.pager.fault([page], phase, 0)
                    self.verify([page], phase is Phase.FORWARD)
                    self.pager.unpin([page])
                    self.holds()
            for page in self.table:
                self.pager.discard(page)
            assert self.host.slab.used == 0
            assert self.device is None or self.device.slab.used == 0
            self.holds()
        finally:
            self.moves.drain()
            self.stack.close()


PagerMachine.TestCase.settings = settings(
    max_examples=50,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)
TestPager = PagerMachine.TestCase
