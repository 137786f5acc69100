"""Failures of transfers, in words: which page, of which module, where, and what can be done."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiermem.disk import Disk
from tiermem.errors import IntegrityError, TransferError
from tiermem.page import Page
from tiermem.trace import Tier as At


class Failures:
    """Makes the errors of one run's transfers; ``disk`` is None as long as there is none."""

    def __init__(self, disk: Disk | None) -> None:
        self.modules: Sequence[str] = ()  # the units' names
        # Told of a page whose bytes have changed and what their checksum is; says in words what can be done about it.
        self.damaged: Callable[[Page, int], str] = lambda page, found: ""
        self._disk = disk

    def of_transfer(self, page: Page, failure: OSError, source: At, target: At) -> TransferError:
        """The error of a transfer that the system has refused."""
        path = self._disk.path_of(page) if self._disk is not None and At.DISK in (source, target) else None
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
        assert self._disk is not None
        assert page.checksum is not None
        offset = self._disk.place_of(page)[1]
        try:
            advice = self.damaged(page, found)
        except OSError as failure:
            advice = (
                f"; it couldn't be noted for the next resume: {failure}"  # to say what is wrong comes first
            )
        path = self._disk.path_of(page)
        return IntegrityError(self._named(page), path, offset, page.checksum, found, advice)

    def _named(self, page: Page) -> str:
        name = f", {self.modules[page.unit]}" if self.modules else ""
        return f"the {page.kind.name.lower()} page of unit {page.unit}{name} (page {page.number}, {page.nbytes} bytes)"
