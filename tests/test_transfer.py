"""Transfers: each arrow of the page states, landed well and badly, and refused at once."""

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.test_pager import Cast
from tiermem.aio import FaultyQueue
from tiermem.errors import PagingError, TransferError
from tiermem.page import ALIGNMENT, Kind, Page, State
from tiermem.policies import Phase
from tiermem.trace import Reason


class _Broken:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        raise RuntimeError("the bus is off")


class Arrows(Cast):
    """Pages on each side of every arrow, and a way to have the next transfer fail."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path) -> None:
        super().__init__(stack, folder, host=4, device=4)
        self.fails: list[int | str] = []
        queue = FaultyQueue(self.disk.queue, lambda index, op: self.fails.pop() if self.fails else None)
        self.disk.queue = self.moves._queue = queue

    def fail(self) -> None:
        self.fails = [errno.EIO]
        self.moves._copier.copy = lambda target, source: _Broken()  # type: ignore[method-assign]

    def begin(self, journey: State) -> Page:
        """A page of sevens, just submitted on that journey."""
        page = self.written(1, 7)
        if journey is not State.READING:
            self.pager.fault([page], Phase.FORWARD if journey is State.STORING else Phase.OPTIMIZER, 0)
            if journey is State.STORING:
                page.device_dirty = True
            self.pager.unpin([page], dirty=journey is State.WRITING)
        return page

    def depart(self, page: Page, journey: State) -> None:
        moves = self.moves
        if journey is State.READING:
            frame = moves.frames.reserve(self.host, page, Reason.DEMAND)
            assert frame is not None
            moves.read(page, frame, Reason.DEMAND)
        elif journey is State.WRITING:
            moves.write(page, Reason.CLEAN)
        elif journey is State.LOADING:
            assert self.device is not None
            frame = moves.frames.reserve(self.device, page, Reason.DEMAND)
            assert frame is not None
            moves.load(page, frame, Reason.DEMAND)
        else:
            moves.store(page)


@pytest.fixture
def arrows(tmp_path: Path) -> Iterator[Arrows]:
    with contextlib.ExitStack() as stack:
        yield Arrows(stack, tmp_path)


JOURNEYS = {
    State.READING: (State.DISK, State.HOST, "disk_to_host"),
    State.WRITING: (State.HOST, State.HOST, "host_to_disk"),
    State.LOADING: (State.HOST, State.DEVICE, "host_to_device"),
    State.STORING: (State.DEVICE, State.HOST, "device_to_host"),
}
LAND: dict[str, Callable[[Arrows, Page], Any]] = {
    "wait": lambda arrows, page: arrows.moves.wait(page),
    "drain": lambda arrows, page: arrows.moves.drain(),
    "poll": lambda arrows, page: _poll(arrows, page),
}


def _poll(arrows: Arrows, page: Page) -> None:
    while page.state.journey:
        arrows.moves.poll()


@pytest.mark.parametrize("land", LAND)
@pytest.mark.parametrize("journey", JOURNEYS)
def test_a_journey_ends_in_its_place(arrows: Arrows, journey: State, land: str) -> None:
    source, target, link = JOURNEYS[journey]
    page = arrows.begin(journey)
    carried = getattr(arrows.moves.counters, link)
    before = carried.total
    assert page.state is source
    arrows.depart(page, journey)
    assert page.state is journey
    assert arrows.moves
    assert arrows.moves.oldest is page
    arrows.check()
    LAND[land](arrows, page)
    assert page.state is target
    assert not arrows.moves
    arrows.check()
    assert carried.total - before == ALIGNMENT
    assert carried.by_name()["parameter"] == carried.total
    assert not page.device_dirty
    assert page.dirty == (journey is State.STORING)
    arrows.moves.raise_error(page)
    arrows.moves.raise_error()
    assert set(arrows.bytes_of(page).tolist()) == {7}


@pytest.mark.parametrize("land", LAND)
@pytest.mark.parametrize("journey", JOURNEYS)
def test_a_failed_journey_is_a_step_back(arrows: Arrows, journey: State, land: str) -> None:
    source, _, link = JOURNEYS[journey]
    page = arrows.begin(journey)
    before = getattr(arrows.moves.counters, link).total
    dirty, on_device = page.dirty, page.device_dirty
    copy = arrows.moves._copier.copy
    arrows.fail()
    arrows.depart(page, journey)
    LAND[land](arrows, page)
    arrows.fails.clear()
    arrows.moves._copier.copy = copy  # type: ignore[method-assign]
    assert page.state is source
    assert (page.dirty, page.device_dirty) == (dirty, on_device)
    arrows.check()
    assert arrows.moves.counters.num_failed == 1
    assert getattr(arrows.moves.counters, link).total == before
    # Told once: of a writeback to whoever comes next, of the others to who needs the page.
    about = None if journey is State.WRITING else page
    with pytest.raises(TransferError, match="the parameter page of unit 1") as info:
        arrows.moves.raise_error(about)
    on_disk = journey in (State.READING, State.WRITING)
    assert info.value.path == (arrows.disk.path_of(page) if on_disk else None)
    assert info.value.errno == errno.EIO
    assert (f"{info.value.source}_to_{info.value.destination}") == link
    assert ("the bus is off" in str(info.value)) != on_disk
    arrows.moves.raise_error(page)
    arrows.moves.raise_error()
    for phase in (Phase.FORWARD, Phase.OPTIMIZER):
        arrows.pager.fault([page], phase, 0)
        assert set(arrows.bytes_of(page).tolist()) == {7}
        arrows.pager.unpin([page])


@pytest.mark.parametrize("fails", [False, True])
def test_a_leaving_page_goes_when_it_is_written_and_only_then(arrows: Arrows, fails: bool) -> None:
    page = arrows.begin(State.WRITING)
    arrows.fails = [errno.ENOSPC] if fails else []
    arrows.moves.write(page, Reason.LRU, leaving=True)
    assert list(arrows.moves.leaving()) == [page.host]
    arrows.moves.wait(page)
    arrows.check()
    assert not page.leaving
    if fails:
        assert (page.state, page.dirty) == (State.HOST, True)
        assert set(arrows.bytes_of(page).tolist()) == {7}
        with pytest.raises(TransferError, match="No space left on device"):
            arrows.moves.raise_error()
    else:
        assert (page.state, page.host, page.dirty) == (State.DISK, None, False)
        assert arrows.host.slab.used == 0


@pytest.mark.parametrize("journey", JOURNEYS)
def test_what_is_refused_at_once_changes_nothing(arrows: Arrows, journey: State) -> None:
    page = arrows.begin(journey)

    def refuse(*_: object) -> None:
        raise MemoryError("no memory for the record of another transfer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrows.disk, "read", refuse)
        patch.setattr(arrows.disk, "write", refuse)
        patch.setattr(arrows.moves._copier, "copy", refuse)
        with pytest.raises(MemoryError, match="another transfer"):
            arrows.depart(page, journey)
    assert page.state is JOURNEYS[journey][0]
    assert not arrows.moves
    arrows.check()
    arrows.pager.fault([page], Phase.OPTIMIZER, 0)
    assert set(arrows.bytes_of(page).tolist()) == {7}


def test_no_disk_to_go_to(arrows: Arrows) -> None:
    page = arrows.page(kind=Kind.MASTER)
    arrows.pager.fault([page], Phase.OPTIMIZER, 0)
    arrows.pager.unpin([page], dirty=True)
    arrows.moves.disk = None
    with pytest.raises(PagingError, match=r"there is no disk tier: name disk.paths"):
        arrows.moves.write(page, Reason.LRU)
    arrows.check()
    assert page.state is State.HOST


def test_a_dirty_page_is_never_dropped(arrows: Arrows) -> None:
    page = arrows.begin(State.WRITING)
    with pytest.raises(AssertionError, match="dropping a dirty page"):
        arrows.moves.frames.drop(page, Reason.LRU)
    stored = arrows.begin(State.STORING)
    with pytest.raises(AssertionError, match="dropping a page written on the device"):
        arrows.moves.frames.drop_device(stored, Reason.LRU)
    arrows.check()


def test_holders_of_views_are_told_before_the_frame_goes(arrows: Arrows) -> None:
    told: list[tuple[bool, bool]] = []
    page = arrows.written(1, 7)
    assert arrows.device is not None
    host, device = arrows.host.slab, arrows.device.slab

    class Holder:
        def unbind(self) -> None:
            told.append((bool(host.used), bool(device.used)))

    page.users.append(Holder())
    arrows.pager.fault([page], Phase.OPTIMIZER, 0)
    arrows.pager.unpin([page])
    arrows.pager.fault([page], Phase.FORWARD, 0)
    arrows.pager.unpin([page])
    assert told == [(True, True)]  # on its way up: its views are of the frame below
    arrows.moves.frames.drop_device(page, Reason.LRU)
    assert told[1:] == [(True, True)]
    assert device.used == 0
    arrows.moves.frames.drop(page, Reason.LRU)
    assert told[2:] == [(True, False)]
    assert host.used == 0
