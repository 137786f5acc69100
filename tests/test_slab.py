"""Slabs: hypothesis cuts, releases and slides frames beside a list of bytes that says who owns each."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.page import ALIGNMENT, Frame, Kind, Page
from tiermem.slab import Slab

CELLS = 12
_numbers = itertools.count()


def page_of(cells: int) -> Page:
    return Page(next(_numbers), 0, Kind.PARAMETER, torch.uint8, cells * ALIGNMENT, sinks=True)


class Naive:
    """One owner (or None) for each cell of ALIGNMENT bytes."""

    def __init__(self) -> None:
        self.cells: list[Page | None] = [None] * CELLS

    def holes(self) -> list[tuple[int, int]]:
        """(first cell, number of cells) of each run of free cells."""
        runs = []
        for free, group in itertools.groupby(enumerate(self.cells), key=lambda cell: cell[1] is None):
            cells = list(group)
            if free:
                runs.append((cells[0][0], len(cells)))
        return runs

    def place(self, frame: Frame) -> None:
        first, count = frame.offset // ALIGNMENT, frame.nbytes // ALIGNMENT
        assert self.cells[first : first + count] == [None] * count
        self.cells[first : first + count] = [frame.page] * count

    def remove(self, frame: Frame) -> None:
        self.cells = [None if page is frame.page else page for page in self.cells]

    def agree(self, slab: Slab) -> None:
        slab.check()
        assert slab.free == self.cells.count(None) * ALIGNMENT
        for cell, page in enumerate(self.cells):
            for offset in (cell * ALIGNMENT, (cell + 1) * ALIGNMENT - 1):
                if page is None:
                    with pytest.raises(KeyError):
                        slab.frame_at(offset)
                else:
                    assert slab.frame_at(offset).page is page


def largest(naive: Naive) -> int:
    return max((count for _, count in naive.holes()), default=0)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_slab_does_what_a_list_of_cells_does(data: st.DataObject) -> None:
    slab, naive, peak = Slab(CELLS * ALIGNMENT), Naive(), 0
    for _ in range(data.draw(st.integers(1, 30), label="operations")):
        frames = list(slab)
        kind = data.draw(st.sampled_from(["reserve", "reserve", "release", "slide", "window"]))
        if kind == "reserve":
            page = page_of(data.draw(st.integers(1, 5), label="cells"))
            cells = page.nbytes // ALIGNMENT
            fitting = [(count, first) for first, count in naive.holes() if count >= cells]
            frame = slab.reserve(page)
            if frame is None:
                assert not fitting
            else:
                assert frame.page is page
                assert frame.offset == min(fitting)[1] * ALIGNMENT  # the smallest hole, the lowest of equals
                naive.place(frame)
        elif kind == "window":
            order = data.draw(st.permutations(frames))
            victims = order[: data.draw(st.integers(0, len(order)))]
            asked = data.draw(st.integers(largest(naive) + 1, CELLS + 1))  # holes that do are never asked for
            check_window(slab, naive, asked, victims)
        elif frames:
            frame = data.draw(st.sampled_from(frames))
            naive.remove(frame)
            if kind == "release":
                slab.release(frame)
            else:
                old = frame.offset
                below = max((f.offset + f.nbytes for f in frames if f.offset < old), default=0)
                assert slab.slide(frame) == (old if below < old else None)
                assert frame.offset == below
                naive.place(frame)
        peak = max(peak, slab.used)
        assert slab.peak == peak
        naive.agree(slab)
    for frame in list(slab):
        slab.release(frame)
    slab.check()
    assert slab.used == 0
    assert slab.reserve(page_of(CELLS)) is not None


def check_window(slab: Slab, naive: Naive, asked: int, victims: list[Frame]) -> None:
    def room_without(gone: list[Frame]) -> int:
        trial = Naive()
        pages = [frame.page for frame in gone]
        trial.cells = [None if page in pages else page for page in naive.cells]
        return largest(trial)

    window = slab.window(asked * ALIGNMENT, victims)
    if window is None:
        assert room_without(victims) < asked
        return
    assert room_without(window) >= asked
    assert len(set(window)) == len(window)
    # The shortest prefix that does, and nobody of it whose going isn't needed.
    prefix = next(n for n in range(len(victims) + 1) if room_without(victims[:n]) >= asked)
    assert set(window) <= set(victims[:prefix])
    for frame in window:
        assert room_without([other for other in window if other is not frame]) < asked
    slab.check()


def test_sliding_everything_makes_one_hole() -> None:
    slab = Slab(8 * ALIGNMENT)
    frames = [slab.reserve(page_of(cells)) for cells in (1, 2, 1, 3, 1)]
    for index in (0, 2, 4):
        frame = frames[index]
        assert frame is not None
        slab.release(frame)
    for frame in list(slab):
        slab.slide(frame)
        slab.check()
    assert [(frame.offset, frame.nbytes) for frame in slab] == [
        (0, 2 * ALIGNMENT),
        (2 * ALIGNMENT, 3 * ALIGNMENT),
    ]
    assert slab.reserve(page_of(3)) is not None


def test_window_takes_the_victims_that_cost_least() -> None:
    slab = Slab(7 * ALIGNMENT)
    big, small = slab.reserve(page_of(3)), slab.reserve(page_of(1))
    spacer, other = slab.reserve(page_of(2)), slab.reserve(page_of(1))
    assert big
    assert small
    assert spacer
    assert other
    # All but the spacer may go. The first prefix that makes room of 4 is (other, big, small); other isn't needed.
    assert slab.window(4 * ALIGNMENT, [other, big, small]) == [big, small]
    assert slab.window(3 * ALIGNMENT, [other, big, small]) == [big]
    assert slab.window(5 * ALIGNMENT, [other, big, small]) is None


def test_a_frame_is_released_once() -> None:
    slab = Slab(2 * ALIGNMENT)
    frame = slab.reserve(page_of(1))
    assert frame is not None
    slab.release(frame)
    with pytest.raises(AssertionError, match="not cut from this slab"):
        slab.release(frame)
    slab.check()


def test_an_empty_slab() -> None:
    slab = Slab(0)
    slab.check()
    assert slab.reserve(page_of(1)) is None
    assert slab.window(ALIGNMENT, []) is None


@pytest.mark.parametrize("nbytes", [-ALIGNMENT, 1, ALIGNMENT + 512])
def test_a_slab_is_a_multiple_of_the_alignment(nbytes: int) -> None:
    with pytest.raises(ValueError, match="must be a multiple of 4096"):
        Slab(nbytes)
