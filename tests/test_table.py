"""The page table: what it holds, and that every broken invariant is found."""

from collections.abc import Callable

import pytest
import torch

from tiermem.page import ALIGNMENT, Frame, Kind, Page, State
from tiermem.slab import Slab
from tiermem.table import PageTable


def cast() -> tuple[PageTable, Slab, Slab, dict[str, Page]]:
    """One page in each place that checks: on the disk, on the host, on the device (with and without a copy below)."""
    table, host, device = PageTable(), Slab(8 * ALIGNMENT), Slab(8 * ALIGNMENT)
    names = ("disk", "host", "device", "both", "blank")
    pages = {
        name: table.add(number, Kind.PARAMETER, torch.float32, 1000, sinks=True)
        for number, name in enumerate(names)
    }
    for name, page in pages.items():
        page.blank = name == "blank"
        page.extent = None if name == "blank" else (0, page.number * ALIGNMENT)
        if name in ("host", "both"):
            page.host, page.state = host.reserve(page), State.HOST
        if name in ("device", "both"):
            page.device, page.state = device.reserve(page), State.DEVICE
    pages["host"].dirty = pages["both"].dirty = True
    return table, host, device, pages


def test_pages_are_numbered_and_padded() -> None:
    table, host, device, pages = cast()
    assert [page.number for page in table] == list(range(len(table))) == [0, 1, 2, 3, 4]
    assert table[3] is pages["both"]
    assert {page.nbytes for page in table} == {ALIGNMENT}
    table.check(host, device)


def test_a_new_page_is_blank_and_nowhere() -> None:
    table = PageTable()
    page = table.add(3, Kind.GRADIENT, torch.bfloat16, 3 * ALIGNMENT, sinks=False)
    assert (page.unit, page.kind, page.dtype, page.nbytes) == (
        3,
        Kind.GRADIENT,
        torch.bfloat16,
        6 * ALIGNMENT,
    )
    assert (page.state, page.blank, page.dirty, page.pins, page.extent) == (State.DISK, True, False, 0, None)
    table.check(Slab(0))


def _steal(pages: dict[str, Page]) -> None:
    pages["disk"].host = pages["host"].host


BREAKS: dict[str, Callable[[dict[str, Page]], object]] = {
    "1: .* has a frame": _steal,
    "1: .* no copy anywhere": lambda pages: setattr(pages["disk"], "extent", None),
    "1: .* may not be on the disk": lambda pages: setattr(pages["disk"], "sinks", False),
    "1: .* is on the device too": lambda pages: setattr(pages["both"], "state", State.HOST),
    "2: .* isn't the frame of its page": lambda pages: setattr(pages["host"], "host", None),
    "2: .* isn't cut": lambda pages: setattr(pages["disk"], "host", Frame(0, ALIGNMENT, pages["disk"])),
    "3: .* is pinned on a journey": lambda pages: (
        setattr(pages["host"], "state", State.WRITING),
        setattr(pages["host"], "transfer", object()),
        setattr(pages["host"], "pins", 1),
    ),
    "3: ": lambda pages: setattr(pages["blank"], "pins", -1),
    "4: ": lambda pages: setattr(pages["host"], "state", State.READING),
    r"4:  ?.*": lambda pages: setattr(pages["host"], "transfer", object()),
    "4: .*l>": lambda pages: setattr(pages["host"], "leaving", True),
    "5: .* no host frame": lambda pages: (
        setattr(pages["device"], "state", State.STORING),
        setattr(pages["device"], "transfer", object()),
    ),
    "6: .* was dropped dirty": lambda pages: setattr(pages["disk"], "dirty", True),
    "6: .* lost its only good copy below": lambda pages: setattr(pages["device"], "dirty", True),
}


@pytest.mark.parametrize("message", BREAKS)
def test_what_is_broken_is_found(message: str) -> None:
    table, host, device, pages = cast()
    table.check(host, device)
    BREAKS[message](pages)
    with pytest.raises(AssertionError, match=message):
        table.check(host, device)


def test_more_in_use_than_there_is_is_found() -> None:
    table, host, device, _ = cast()
    host.used += 1
    with pytest.raises(AssertionError):
        table.check(host, device)
