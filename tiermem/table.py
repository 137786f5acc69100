"""The page table: page number -> page, and the invariants that hold between all pages and frames."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tiermem.page import ALIGNMENT, Kind, Page, State
from tiermem.slab import Slab


class PageTable:
    """All pages of one run; the only answer to "where is it?"."""

    def __init__(self) -> None:
        self._pages: list[Page] = []

    def add(
        self,
        unit: int,
        kind: Kind,
        dtype: torch.dtype,
        numel: int,
        *,
        sinks: bool,
        alignment: int = ALIGNMENT,
    ) -> Page:
        """A new blank page of ``numel`` elements; ``sinks`` says whether it may go to the disk."""
        page = Page(len(self._pages), unit, kind, dtype, numel, sinks, alignment)
        self._pages.append(page)
        return page

    def __getitem__(self, number: int) -> Page:
        return self._pages[number]

    def __iter__(self) -> Iterator[Page]:
        return iter(self._pages)

    def __len__(self) -> int:
        return len(self._pages)

    def check(self, host: Slab, device: Slab | None = None) -> None:
        """Assert the invariants (HOUSE numbers): called after every step of every test, never in a run.

        1 valid copy, 2 frames, 3 pins, 4 transfers, 5 sources, 6 dirty pages, 7 budgets.
        """
        host.check()
        if device is not None:
            device.check()
        for slab, attribute in ((host, "host"), (device, "device")):
            if slab is None:
                continue
            for frame in slab:
                assert getattr(frame.page, attribute) is frame, f"2: {frame!r} isn't the frame of its page"
            assert slab.used <= slab.nbytes, "7: more in use than the budget"
        in_host = {id(frame) for frame in host}
        in_device = {id(frame) for frame in device} if device is not None else set()
        for page in self:
            state = page.state
            assert page.host is None or id(page.host) in in_host, f"2: {page!r} holds a frame that isn't cut"
            assert page.device is None or id(page.device) in in_device, f"2: {page!r} holds a frame not cut"
            if state is State.DISK:
                assert page.host is None, f"1: {page!r} has a frame"
                assert page.device is None, f"1: {page!r} has a frame"
                assert page.blank or page.extent is not None or page.gathered, (
                    f"1: {page!r} has no copy anywhere"
                )
                assert not page.dirty, f"6: {page!r} was dropped dirty"
            elif state is State.DEVICE:
                assert page.device is not None, f"1: {page!r} has no device frame"
                assert page.host is not None or not page.dirty, f"6: {page!r} lost its only good copy below"
            elif state in (State.LOADING, State.STORING):
                assert page.host is not None, f"5: {page!r}: no host frame"
                assert page.device is not None, f"5: {page!r}: no device frame"
            else:
                assert page.host is not None, f"1: {page!r} has no host frame"
                assert page.device is None, f"1: {page!r} is on the device too"
            assert (page.transfer is not None) == state.journey, f"4: {page!r}"
            assert not (page.pins and state.journey), f"3: {page!r} is pinned on a journey"
            assert page.pins >= 0, f"3: {page!r}"
            assert not page.leaving or state is State.WRITING, f"4: {page!r}"
            assert page.sinks or page.durable or page.extent is None, f"1: {page!r} may not be on the disk"
            assert not page.durable or page.extent is None or page.extent in page.slots, (
                f"1: {page!r} is in a slot of another"
            )
            held = [*page.committed, page.prepared]
            assert page.target is None or page.target not in held, f"1: {page!r} overwrites a commit"
