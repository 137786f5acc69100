"""Checksums of memory, and of transfers in flight: of what is written while it is written, of what was read before
it counts as landed.

The hash is XXH3 (64 bits), which is quicker than memory: it finds bytes that changed, not somebody who changes them on
purpose. It is taken in a thread of its own, so that nobody waits for it who computes meanwhile; whoever waits for a
transfer takes its checksum himself if the thread hasn't come to it.
"""

import ctypes
import queue
import threading

import xxhash

from tiermem.aio.queue import Queue


def checksum(address: int, nbytes: int) -> int:
    """That of `nbytes` of memory at `address`; the GIL is released meanwhile."""
    return xxhash.xxh3_64_intdigest((ctypes.c_char * nbytes).from_address(address))


class Check:
    """One transfer that is in flight, and the checksum of its memory: done when both are."""

    __slots__ = ("_claim", "_ended", "_error", "_queue", "address", "nbytes", "reading", "ticket", "value")

    def __init__(self, queue: Queue, ticket: int, address: int, nbytes: int, reading: bool) -> None:
        self.ticket = ticket
        self.address = address
        self.nbytes = nbytes
        self.reading = reading
        self.value = 0
        self._queue = queue
        self._claim = threading.Lock()
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do it, unless somebody does or has done."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            if self.reading:
                self._queue.wait(self.ticket)
            self.value = checksum(self.address, self.nbytes)
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def done(self) -> bool:
        """Whether the transfer has ended, and the checksum is there. Never blocks."""
        return self._ended.is_set() and (self.reading or self._queue.done(self.ticket))

    def wait(self) -> None:
        """Blocks until both are there. Raises OSError if the transfer failed. Once for each."""
        self.run()
        self._ended.wait()
        if not self.reading:
            self._queue.wait(self.ticket)
        if self._error is not None:
            raise self._error


class Checksums:
    """The thread that takes the checksums of a queue's transfers, in their order."""

    def __init__(self, of: Queue) -> None:
        self._of = of
        self._checks: queue.SimpleQueue[Check | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="tiermem-checksums", daemon=True)
        self._thread.start()

    def begin(self, ticket: int, address: int, nbytes: int, reading: bool) -> Check:
        """Has the checksum of a transfer's memory taken; the memory must stay until the check has been waited for."""
        check = Check(self._of, ticket, address, nbytes, reading)
        self._checks.put(check)
        return check

    def close(self) -> None:
        """Ends the thread. Checks that were begun can still be waited for. Idempotent."""
        self._checks.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (check := self._checks.get()) is not None:
            check.run()
