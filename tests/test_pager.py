"""The pager: single promises, each with the smallest cast that shows it. The rest is in test_pager_model."""

import contextlib
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import tiermem
from tiermem.aio import Buffer, open_queue
from tiermem.device import CpuDevice, StandInDevice
from tiermem.disk import Disk
from tiermem.errors import BudgetError, PagingError
from tiermem.page import ALIGNMENT, Kind, Page, State
from tiermem.pager import Pager
from tiermem.policies import Fetch, Phase, eviction
from tiermem.replay import Replay
from tiermem.table import PageTable
from tiermem.tier import Tier
from tiermem.trace import NullTrace, Reason
from tiermem.trainer import AdamW
from tiermem.transfer import Transfers


class Cast:
    """A pager over a host of ``host`` alignments, a stand-in device of ``device`` (0: unified), and a disk."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, host: int, device: int = 0) -> None:
        copier = StandInDevice() if device else CpuDevice()
        stack.callback(copier.close)
        memory = torch.frombuffer(Buffer(host * ALIGNMENT).view, dtype=torch.uint8)
        self.host = Tier("host", memory, eviction("lru"))
        self.device = Tier("device", copier.allocate(device * ALIGNMENT), eviction("lru")) if device else None
        queue = stack.enter_context(open_queue("threads", 4096, 4))
        self.disk = Disk([str(folder)], 1 << 30, queue)
        stack.callback(self.disk.close)
        self.table = PageTable()
        self.moves = Transfers(self.host, self.device, self.disk, queue, copier, NullTrace())
        stack.callback(self.moves.drain)
        self.pager = Pager(self.table, self.moves, None)

    def page(self, cells: int = 1, kind: Kind = Kind.PARAMETER, sinks: bool = True) -> Page:
        return self.table.add(1, kind, torch.uint8, cells * ALIGNMENT, sinks=sinks)

    def written(self, cells: int, byte: int, kind: Kind = Kind.PARAMETER) -> Page:
        """A page whose content is ``byte`` over and over, clean, on the disk only."""
        page = self.page(cells, kind)
        self.pager.fault([page], Phase.OPTIMIZER, 0)
        self.bytes_of(page).fill_(byte)
        self.pager.unpin([page], dirty=True)
        self.pager.flush()
        self.moves.frames.drop(page, Reason.CLOSE)
        return page

    def bytes_of(self, page: Page) -> torch.Tensor:
        if page.state is State.DEVICE:
            assert self.device is not None
            assert page.device is not None
            return self.device.bytes_of(page.device)
        assert page.host is not None
        return self.host.bytes_of(page.host)

    def check(self) -> None:
        self.table.check(self.host.slab, self.device.slab if self.device else None)


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def test_a_fault_brings_zeros_then_what_was_written(stack: contextlib.ExitStack, tmp_path: Path) -> None:
    cast = Cast(stack, tmp_path, host=1)
    first, second = cast.page(), cast.page()
    for byte in (0, 7, 9):
        for page in (first, second):  # one frame for two pages: each fault evicts the other
            cast.pager.fault([page], Phase.FORWARD, 0)
            assert set(cast.bytes_of(page).tolist()) == {byte}
            cast.bytes_of(page).fill_({0: 7, 7: 9, 9: 0}[byte])
            cast.pager.unpin([page], dirty=True)
            cast.check()
    assert cast.moves.counters.num_faults == 6
    assert cast.moves.counters.disk_to_host.total == 4 * ALIGNMENT
    assert cast.moves.counters.host_to_disk.total == 5 * ALIGNMENT


def test_no_room_among_what_is_pinned(stack: contextlib.ExitStack, tmp_path: Path) -> None:
    cast = Cast(stack, tmp_path, host=3)
    pinned, large = cast.page(2), cast.page(2)
    cast.pager.fault([pinned], Phase.FORWARD, 0)
    with pytest.raises(BudgetError, match="8192 are pinned by 1 pages") as info:
        cast.pager.fault([large], Phase.FORWARD, 0)
    assert (info.value.asked, info.value.had, info.value.tier) == (8192, 4096, "host")
    cast.check()
    assert (pinned.pins, large.pins) == (1, 0)
    cast.pager.unpin([pinned])
    cast.pager.fault([large], Phase.FORWARD, 0)
    cast.check()


def test_frames_move_together_when_room_is_not_side_by_side(
    stack: contextlib.ExitStack, tmp_path: Path
) -> None:
    cast = Cast(stack, tmp_path, host=4)
    low, stays, high = cast.written(1, 1), cast.page(1, sinks=False), cast.page(1)
    cast.pager.fault([low, stays], Phase.FORWARD, 0)
    cast.bytes_of(stays).fill_(5)
    cast.pager.unpin([low])
    cast.pager.unpin([stays], dirty=True)
    assert stays.host is not None
    assert stays.host.offset == ALIGNMENT
    del high
    cast.pager.fault([large := cast.page(3)], Phase.FORWARD, 0)
    assert cast.moves.counters.num_relocations == 1
    assert stays.host.offset == 0
    assert set(cast.bytes_of(stays).tolist()) == {5}
    assert large.pins == 1
    cast.check()


def test_pages_to_overwrite_are_given_up_together(stack: contextlib.ExitStack, tmp_path: Path) -> None:
    cast = Cast(stack, tmp_path, host=3)
    pinned, small, large = cast.page(), cast.written(1, 3), cast.written(2, 4)
    cast.pager.fault([pinned], Phase.OPTIMIZER, 0)
    with pytest.raises(BudgetError):
        cast.pager.fault([], Phase.OPTIMIZER, 0, overwrite=[small, large])
    cast.check()
    cast.pager.fault([small], Phase.OPTIMIZER, 0)
    assert set(cast.bytes_of(small).tolist()) == {3}


def test_an_overwrite_broken_off_in_a_frame_is_kept(stack: contextlib.ExitStack, tmp_path: Path) -> None:
    cast = Cast(stack, tmp_path, host=2)
    page = cast.written(2, 3)
    cast.pager.fault([page], Phase.OPTIMIZER, 0)
    cast.pager.unpin([page])
    cast.pager.fault([], Phase.OPTIMIZER, 0, overwrite=[page])
    cast.bytes_of(page)[:ALIGNMENT] = 9
    cast.pager.abandon(page)
    cast.pager.fault([other := cast.page(2)], Phase.OPTIMIZER, 0)
    cast.pager.unpin([other])
    cast.pager.fault([page], Phase.OPTIMIZER, 0)
    # What its frame had when it was let go of: half of it new. It must not depend on whether it was evicted.
    assert cast.bytes_of(page)[::ALIGNMENT].tolist() == [9, 3]


def test_an_overwrite_broken_off_leaves_what_was_written_on_the_device(
    stack: contextlib.ExitStack, tmp_path: Path
) -> None:
    cast = Cast(stack, tmp_path, host=2, device=2)
    page = cast.written(1, 3)
    cast.pager.fault([page], Phase.FORWARD, 0)
    cast.bytes_of(page).fill_(8)
    page.device_dirty = True
    cast.pager.unpin([page])
    cast.pager.fault([], Phase.OPTIMIZER, 0, overwrite=[page])
    cast.pager.abandon(page)
    cast.pager.fault([page], Phase.FORWARD, 0)
    assert set(cast.bytes_of(page).tolist()) == {8}


def test_the_host_gives_up_a_stale_copy_of_a_page_written_on_the_device(
    stack: contextlib.ExitStack, tmp_path: Path
) -> None:
    cast = Cast(stack, tmp_path, host=1, device=2)
    page, other = cast.page(), cast.page(kind=Kind.GRADIENT)
    cast.pager.fault([page], Phase.OPTIMIZER, 0)
    cast.bytes_of(page).fill_(3)
    cast.pager.unpin([page], dirty=True)
    cast.pager.fault([page], Phase.FORWARD, 0)
    cast.bytes_of(page).fill_(4)
    page.device_dirty = True
    cast.pager.unpin([page])
    cast.pager.fault([other], Phase.BACKWARD, 0)  # needs the only host frame
    cast.check()
    cast.pager.unpin([other])
    cast.pager.fault([page], Phase.OPTIMIZER, 0)
    assert set(cast.bytes_of(page).tolist()) == {4}


def test_a_pin_on_the_device_holds_nothing_on_the_host(stack: contextlib.ExitStack, tmp_path: Path) -> None:
    cast = Cast(stack, tmp_path, host=1, device=1)
    page, other = cast.page(), cast.page(kind=Kind.GRADIENT)
    cast.pager.fault([page], Phase.OPTIMIZER, 0)
    cast.bytes_of(page).fill_(3)
    cast.pager.unpin([page], dirty=True)
    cast.pager.fault([page], Phase.FORWARD, 0)
    cast.pager.fault([other], Phase.BACKWARD, 0)
    cast.check()
    assert set(cast.bytes_of(page).tolist()) == {3}
    cast.pager.unpin([page, other])
    cast.pager.fault([page], Phase.OPTIMIZER, 0)
    assert set(cast.bytes_of(page).tolist()) == {3}
    cast.check()


def test_making_room_for_one_may_take_the_next_along(stack: contextlib.ExitStack, tmp_path: Path) -> None:
    cast = Cast(stack, tmp_path, host=3, device=2)
    first, second, large = cast.written(1, 1), cast.page(), cast.written(2, 3)
    cast.pager.fault([second], Phase.OPTIMIZER, 0)
    cast.bytes_of(second).fill_(2)
    cast.pager.unpin([second], dirty=True)
    cast.pager.fault([first, second], Phase.FORWARD, 0)
    first.device_dirty = True
    cast.pager.unpin([first, second])
    cast.moves.frames.drop(first, Reason.LRU)
    # Both have to go. To store the first takes the second's host frame, and the second leaves the device with it.
    cast.pager.fault([large], Phase.FORWARD, 0)
    cast.check()
    cast.pager.unpin([large])
    for byte, page in enumerate((first, second, large), 1):
        cast.pager.fault([page], Phase.OPTIMIZER, 0)
        assert set(cast.bytes_of(page).tolist()) == {byte}
        cast.pager.unpin([page])


def test_a_page_that_a_plan_wants_where_it_is_leaving_stays(
    stack: contextlib.ExitStack, tmp_path: Path
) -> None:
    cast = Cast(stack, tmp_path, host=1)
    page = cast.page()
    cast.pager.fault([page], Phase.OPTIMIZER, 0)
    cast.bytes_of(page).fill_(5)
    cast.pager.unpin([page], dirty=True)
    cast.moves.write(page, Reason.PLAN, leaving=True)
    assert page.host is not None
    replay = Replay(cast.host, cast.pager.room, cast.table)
    replay._start(Fetch(page.number, page.host.offset, 1, False, 0), 1)
    assert not replay.waiting
    cast.moves.drain()
    assert set(cast.bytes_of(page).tolist()) == {5}
    assert cast.moves.counters.disk_to_host.total == 0
    cast.check()


def test_a_page_that_somebody_looks_at_is_not_taken_from_the_device(
    stack: contextlib.ExitStack, tmp_path: Path
) -> None:
    cast = Cast(stack, tmp_path, host=2, device=2)
    page = cast.written(1, 3)
    cast.pager.fault([page], Phase.FORWARD, 0)
    for overwrite in ([], [page]):
        with pytest.raises(PagingError, match="look into it"):
            cast.pager.fault([] if overwrite else [page], Phase.OPTIMIZER, 0, overwrite=overwrite)
        cast.check()
        assert page.pins == 1
    cast.pager.unpin([page])
    cast.pager.fault([page], Phase.OPTIMIZER, 0)


def layers(seed: int) -> nn.Sequential:
    choose = random.Random(seed)
    torch.manual_seed(seed)
    widths = [32, *(choose.choice([16, 24, 40, 64, 96, 128]) for _ in range(choose.randint(3, 7))), 8]
    return nn.Sequential(
        *(
            module
            for a, b in itertools.pairwise(widths)
            for module in (nn.Linear(a, b), nn.Tanh(), nn.LayerNorm(b))
        )
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [3, 5, 13, 15])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("placement", [{}, {"gradients": "host"}])
def test_the_smallest_budget_works(
    seed: int, separate: bool, dtype: torch.dtype, placement: dict[str, str], tmp_path: Path
) -> None:
    config = {
        "host": {"budget": 4096},
        "policy": {"eviction": "lru" if seed % 4 == 3 else "belady"},
        "disk": {"paths": [str(tmp_path)]},
        "precision": {"parameters": str(dtype).removeprefix("torch.")},
        "placement": placement,
    }
    if separate:
        config["device"] = {"budget": 4096}
    net = layers(seed)

    def wrap() -> tiermem.TieredModule:
        return tiermem.TieredModule(net, config, device=StandInDevice() if separate else None)

    for _ in range(1 + separate):
        with pytest.raises(BudgetError, match=r"the smallest .* budget that would do") as info:
            wrap()
        config[info.value.tier] = {"budget": info.value.smallest}
    model = wrap()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        for _ in range(2):
            model(torch.randn(3, 32, dtype=dtype)).float().square().sum().backward()
            model._runtime.check()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        model._runtime.check()
        if step % 2:
            with torch.no_grad():
                model(torch.randn(3, 32, dtype=dtype))
    for tier in info.value.tier, "host":
        figures = model.stats()["tiers"][tier]
        assert figures["peak"] <= figures["budget"] == figures["smallest"]
    model.close(restore=False)
