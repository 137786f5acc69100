"""The part of a Queue that all engines share: tickets, their checks, and failures in words.

An engine adds how bytes move. A ticket is good until it has been waited for, also after close and after a
wait that an exception (KeyboardInterrupt) broke off.
"""

import itertools
import os
import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Generic, NamedTuple, TypeVar

from tiermem.aio.file import File

RecordT = TypeVar("RecordT")


class Failure(NamedTuple):
    """Why a transfer failed: the errno of its first failing request, and how far it and the whole came."""

    error: int
    at: int
    asked: int
    came: int
    moved: int
    ended: bool


class Flight(Generic[RecordT]):
    """A transfer that was submitted and not yet waited for."""

    __slots__ = ("nbytes", "offset", "path", "record", "waiter", "writing")

    def __init__(self, writing: bool, path: str, offset: int, nbytes: int, record: RecordT) -> None:
        self.writing = writing
        self.path = path
        self.offset = offset
        self.nbytes = nbytes
        self.record = record
        self.waiter: int | None = None

    def error(self, failure: Failure) -> OSError:
        """The failure as an OSError whose text has all the numbers."""
        op = "write" if self.writing else "read"
        reason = f"a short {op}" if failure.ended else os.strerror(failure.error)
        text = (
            f"{op} of {self.nbytes} bytes at offset {self.offset}: {reason}: "
            f"{failure.asked} bytes were asked at offset {failure.at} and {failure.came} came "
            f"({failure.moved} of the whole)"
        )
        return OSError(failure.error, text, self.path)


class EngineQueue(ABC, Generic[RecordT]):
    """A Queue (see tiermem.aio.queue) but for the moving of bytes.

    Args:
        request: the most bytes of one system call, a multiple of 4096, at most 1 GiB.
        depth: the most requests in flight, 1 to 4096.
    """

    engine: str

    def __init__(self, request: int, depth: int, note: str) -> None:
        if request <= 0 or request % 4096 or request > 1 << 30:
            raise ValueError(f"request must be a multiple of 4096 bytes, at most 1 GiB, not {request}")
        if not 1 <= depth <= 4096:
            raise ValueError(f"depth must be from 1 to 4096 requests, not {depth}")
        self.request = request
        self.depth = depth
        self.note = note
        self._owner = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._flights: dict[int, Flight[RecordT]] = {}

    @abstractmethod
    def _start(self, writing: bool, file: File, offset: int, address: int, nbytes: int) -> RecordT:
        """Begins a transfer that was checked, and returns at once."""

    @abstractmethod
    def _landed(self, record: RecordT) -> bool:
        """Whether it has ended; without a system call."""

    @abstractmethod
    def _await(self, record: RecordT) -> None:
        """Blocks until it has ended; may be broken off and called again."""

    @abstractmethod
    def _settle(self, record: RecordT) -> Failure | None:
        """How it ended. The record isn't used again."""

    @abstractmethod
    def _stop(self) -> None:
        """Lets what is in flight land and ends the threads. Records stay good. Idempotent."""

    @property
    @abstractmethod
    def nbytes_read(self) -> int:
        """Bytes read since the queue was opened."""

    @property
    @abstractmethod
    def nbytes_written(self) -> int:
        """Bytes written since the queue was opened."""

    def read(self, file: File, offset: int, address: int, nbytes: int) -> int:
        """Begins to fill memory from the file and returns the ticket."""
        return self._submit(False, file, offset, address, nbytes)

    def write(self, file: File, offset: int, address: int, nbytes: int) -> int:
        """Begins to write memory to the file and returns the ticket."""
        return self._submit(True, file, offset, address, nbytes)

    def _submit(self, writing: bool, file: File, offset: int, address: int, nbytes: int) -> int:
        self._check_owner()
        if self._closed:
            raise ValueError(f"the {self.engine} queue is closed")
        file.check(offset, address, nbytes)
        if self.request % file.alignment.offset:
            raise ValueError(
                f"{file.path} is aligned to {file.alignment.offset} bytes: the queue's request "
                f"of {self.request} bytes must be a multiple of that"
            )
        record = self._start(writing, file, offset, address, nbytes)
        ticket = next(self._numbers)
        self._flights[ticket] = Flight(writing, file.path, offset, nbytes, record)
        return ticket

    def done(self, ticket: int) -> bool:
        """Whether the transfer has ended, well or badly; never blocks."""
        return self._landed(self._flight(ticket).record)

    def wait(self, ticket: int) -> None:
        """Blocks until the transfer has ended. Raises OSError if it failed. Once for each ticket."""
        self._check_owner()
        flight = self._flight(ticket)
        thread = threading.get_ident()
        try:
            with self._lock:
                if flight.waiter not in (None, thread):
                    raise ValueError(f"ticket {ticket} is being waited for by another thread")
                flight.waiter = thread
            self._await(flight.record)
        except BaseException:
            if flight.waiter == thread:
                flight.waiter = None
            raise
        del self._flights[ticket]
        failure = self._settle(flight.record)
        if failure is not None:
            raise flight.error(failure)

    def close(self) -> None:
        """Lets what is in flight land, then frees the engine. Idempotent; tickets can still be waited for."""
        self._closed = True
        if self._owner == os.getpid():
            self._stop()

    def _flight(self, ticket: int) -> Flight[RecordT]:
        try:
            return self._flights[ticket]
        except KeyError:
            raise ValueError(f"ticket {ticket} is unknown: never given, or already waited for") from None

    def _check_owner(self) -> None:
        if self._owner != os.getpid():
            raise RuntimeError(
                f"the {self.engine} queue belongs to process {self._owner}, whose threads a fork "
                "doesn't copy: open another one in this process"
            )

    def __enter__(self) -> "EngineQueue[RecordT]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
