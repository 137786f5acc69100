"""Pages as a save reads them: where they are, window by window, and without moving one.

A page that has a copy on the host or on the device is copied from there, and any other is read from its place on the
disk. No frame is asked for and nothing is evicted, so a save needs no room within the budgets, and the training that it
interrupts, or runs beside, finds everything where it was.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import xxhash

from tiermem.aio import Buffer
from tiermem.errors import SavingError
from tiermem.page import ALIGNMENT, Page, State, padded
from tiermem.runtime import Runtime


def copy_bytes(out: torch.Tensor, data: torch.Tensor) -> None:
    """Copy bytes on the CPU in this thread alone: torch's copy waits for threads that training may be using."""
    ctypes.memmove(out.data_ptr(), data.data_ptr(), data.numel())


def clear_bytes(out: torch.Tensor) -> None:
    """Make bytes on the CPU zeros, likewise."""
    ctypes.memset(out.data_ptr(), 0, out.numel())


class Window(NamedTuple):
    """A run of a page's bytes; both ends are multiples of :data:`ALIGNMENT`."""

    page: Page
    start: int
    stop: int


class PageReader:
    """Reads windows of pages, the next ones on their way while one is looked at. Closed by its owner.

    ``nbytes``: of a window; ``depth`` windows are in memory. The pages must not be written meanwhile.
    """

    def __init__(self, runtime: Runtime, nbytes: int, depth: int = 4) -> None:
        self.nbytes = padded(nbytes)
        self._runtime = runtime
        self._buffers = [Buffer(self.nbytes) for _ in range(depth)]
        self._hash: tuple[Page, xxhash.xxh3_64] | None = None
        self._memory = [torch.frombuffer(buffer.view, dtype=torch.uint8) for buffer in self._buffers]

    def windows(self, page: Page, start: int = 0, stop: int | None = None) -> Iterator[Window]:
        """The windows that hold bytes ``start`` to ``stop`` of a page: all, where its checksum is to be checked."""
        if stop is None or page.checksum is not None:
            start, stop = 0, page.nbytes
        for first in range(start - start % ALIGNMENT, stop, self.nbytes):
            yield Window(page, first, min(first + self.nbytes, padded(stop)))

    def read(self, windows: Iterable[Window]) -> Iterator[tuple[Window, torch.Tensor]]:
        """Each window with its bytes (uint8), which are good until the next one is asked for.

        Raises SavingError when the disk fails, and IntegrityError when a page isn't what was written there: by then
        some of its windows have been given out.
        """
        flying: deque[tuple[Window, int, int | None]] = deque()
        todo = iter(windows)
        number = 0
        try:
            while True:
                while len(flying) < len(self._buffers):
                    window = next(todo, None)
                    if window is None:
                        break
                    slot = number % len(self._buffers)
                    number += 1
                    flying.append((window, slot, self._begin(window, slot)))
                if not flying:
                    return
                window, slot, ticket = flying[0]
                if ticket is not None:
                    flying[0] = (window, slot, None)
                    self._wait(window, ticket)
                    self._check(window, self._memory[slot])
                else:
                    self._hash = None  # the pager has checked what is in memory
                yield window, self._memory[slot][: window.stop - window.start]
                flying.popleft()
        finally:
            for window, _, ticket in flying:  # after an error: the memory must not be written any more
                if ticket is not None:
                    with contextlib.suppress(SavingError):
                        self._wait(window, ticket)

    def _check(self, window: Window, memory: torch.Tensor) -> None:
        """Take the window into its page's checksum, and compare that at the page's end."""
        page = window.page
        if window.start == 0:
            self._hash = (page, xxhash.xxh3_64())
        if self._hash is None or self._hash[0] is not page:
            return
        self._hash[1].update(memory[: window.stop - window.start].numpy().data)
        if window.stop == page.nbytes and page.checksum is not None:
            with self._runtime.door:
                error = self._runtime.pager.transfers.failures.verify(page, self._hash[1].intdigest())
            if error is not None:
                raise error

    def close(self) -> None:
        """Give the memory back."""
        self._memory.clear()
        for buffer in self._buffers:
            with contextlib.suppress(BufferError):  # the traceback of an error looks into it: freed with that
                buffer.close()

    def _begin(self, window: Window, slot: int) -> int | None:
        """Copy the window from memory, or begin to read it from the disk: then returns the ticket."""
        page, runtime = window.page, self._runtime
        out = self._memory[slot][: window.stop - window.start]
        pager = runtime.pager
        with runtime.door:
            if page.state is State.STORING:
                pager.transfers.wait(page)
            device = pager.device
            if page.device_dirty or (
                page.state is State.DEVICE and page.host is None and page.extent is None
            ):
                assert device is not None
                assert page.device is not None
                runtime.device.copy(out, device.bytes_of(page.device)[window.start : window.stop]).wait()
            elif page.host is not None and page.state is not State.READING and not page.hollow:
                copy_bytes(out, pager.host.bytes_of(page.host)[window.start : window.stop])
            elif page.blank:
                out.zero_()
            else:
                assert runtime.disk is not None
                address = self._buffers[slot].address
                return runtime.disk.read_span(page, window.start, window.stop - window.start, address)
        return None

    def _wait(self, window: Window, ticket: int) -> None:
        queue = self._runtime.queue
        assert queue is not None
        try:
            queue.wait(ticket)
        except OSError as error:
            page, disk = window.page, self._runtime.disk
            assert disk is not None
            raise SavingError(
                error.errno or 0,
                f"reading the {page.kind.name.lower()} page of unit {page.unit} (page {page.number}): "
                f"{error.strerror or error}",
                disk.path_of(page),
            ) from error
