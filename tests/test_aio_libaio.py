"""The libaio engine passes the Queue's tests; what is its own: the kernel's moods, injected."""

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance_queue import KIB64, MIB, QueueTests
from tiermem.aio import Buffer, File, Queue, open_queue
from tiermem.aio._queue import ffi, lib
from tiermem.aio.libaio import LibaioQueue

Submit = Callable[[Any, int, Any], int]
Getevents = Callable[[Any, int, int, Any, Any], int]


def replace_calls(
    queue: LibaioQueue, submit: Submit = lib.io_submit, getevents: Getevents = lib.io_getevents
) -> LibaioQueue:
    """The queue with Python functions for its system calls, kept alive by it."""
    kept = (
        ffi.callback("int (io_context_t, long, struct iocb **)", submit),
        ffi.callback("int (io_context_t, long, long, struct io_event *, struct timespec *)", getevents),
    )
    lib.queue_replace_calls(queue._queue, *kept)
    queue.kept = kept  # type: ignore[attr-defined]
    return queue


class TestLibaioQueue(QueueTests):
    def open(self, request: int = KIB64, depth: int = 4) -> Queue:
        queue = open_queue("libaio", request, depth)
        assert queue.engine == "libaio"
        return queue

    def open_failing(self, outcomes: dict[int, int]) -> Queue:
        completions = iter(range(1_000_000))

        def getevents(context: Any, least: int, most: int, events: Any, timeout: Any) -> int:
            count: int = lib.io_getevents(context, least, most, events, timeout)
            for i in range(max(count, 0)):
                outcome = outcomes.get(next(completions))
                if outcome is not None:
                    events[i].res = outcome & (2**64 - 1)
            return count

        return replace_calls(LibaioQueue(KIB64, 4), getevents=getevents)

    def open_held(self, gate: threading.Event) -> Queue:
        def submit(context: Any, count: int, requests: Any) -> int:
            gate.wait()
            sent: int = lib.io_submit(context, count, requests)
            return sent

        return replace_calls(LibaioQueue(KIB64, 4), submit=submit)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[File]:
    with File(tmp_path / "pages", MIB, create=True) as file:
        yield file


@pytest.fixture
def buffer() -> Iterator[Buffer]:
    with Buffer(2 * MIB) as buffer:
        buffer.view[:MIB] = bytes(range(256)) * (MIB // 256)
        yield buffer


def roundtrip(queue: Queue, file: File, buffer: Buffer) -> None:
    queue.wait(queue.write(file, 0, buffer.address, MIB))
    queue.wait(queue.read(file, 0, buffer.address + MIB, MIB))
    assert buffer.view[MIB:] == buffer.view[:MIB]


@pytest.mark.parametrize("mood", [-errno.EAGAIN, -errno.EINTR, 0])
@pytest.mark.parametrize("period", [2, 3])
def test_a_submit_that_takes_nothing_is_made_again(
    file: File, buffer: Buffer, mood: int, period: int
) -> None:
    calls = iter(range(1_000_000))

    def submit(context: Any, count: int, requests: Any) -> int:
        sent: int = mood if next(calls) % period == 0 else lib.io_submit(context, count, requests)
        return sent

    with replace_calls(LibaioQueue(KIB64, 4), submit=submit) as queue:
        roundtrip(queue, file, buffer)


def test_a_submit_that_takes_a_part_is_continued(file: File, buffer: Buffer) -> None:
    counts = []

    def submit(context: Any, count: int, requests: Any) -> int:
        counts.append(count)
        sent: int = lib.io_submit(context, 1, requests)
        return sent

    with replace_calls(LibaioQueue(KIB64, 4), submit=submit) as queue:
        roundtrip(queue, file, buffer)
    assert max(counts) > 1
    assert len(counts) == 2 * MIB // KIB64


@pytest.mark.parametrize("k", range(8))
def test_a_submit_that_refuses_a_request_fails_its_transfer(file: File, buffer: Buffer, k: int) -> None:
    calls = iter(range(1_000_000))

    def submit(context: Any, count: int, requests: Any) -> int:
        sent: int = -errno.EINVAL if next(calls) == k else lib.io_submit(context, 1, requests)
        return sent

    with replace_calls(LibaioQueue(KIB64, 4), submit=submit) as queue:
        doomed = queue.write(file, 0, buffer.address, MIB)
        with pytest.raises(OSError, match="Invalid argument"):
            queue.wait(doomed)
        roundtrip(queue, file, buffer)


def test_a_kernel_that_never_takes_a_request(file: File, buffer: Buffer) -> None:
    def submit(context: Any, count: int, requests: Any) -> int:
        return -errno.EAGAIN

    with replace_calls(LibaioQueue(KIB64, 1), submit=submit) as queue:
        doomed = queue.write(file, 0, buffer.address, MIB)
        with pytest.raises(BlockingIOError):
            queue.wait(doomed)


def test_an_interrupted_reap_is_made_again(file: File, buffer: Buffer) -> None:
    calls = iter(range(1_000_000))

    def getevents(context: Any, least: int, most: int, events: Any, timeout: Any) -> int:
        if next(calls) % 2 == 0:
            return -errno.EINTR
        count: int = lib.io_getevents(context, least, 1, events, timeout)
        return count

    with replace_calls(LibaioQueue(KIB64, 4), getevents=getevents) as queue:
        roundtrip(queue, file, buffer)


def test_a_queue_whose_completions_are_lost_fails_all_that_follows(file: File, buffer: Buffer) -> None:
    def getevents(context: Any, least: int, most: int, events: Any, timeout: Any) -> int:
        return -errno.EINVAL

    with replace_calls(LibaioQueue(KIB64, 4), getevents=getevents) as queue:
        for _ in range(2):
            tickets = [queue.write(file, 0, buffer.address, MIB), queue.read(file, 0, buffer.address, MIB)]
            for ticket in tickets:
                with pytest.raises(OSError, match="Invalid argument"):
                    queue.wait(ticket)


def test_reads_flow_beside_a_long_write(file: File, buffer: Buffer) -> None:
    """A read submitted after a write of 16 requests takes turns with it; it doesn't wait for its end."""
    order = []
    gate = threading.Event()

    def submit(context: Any, count: int, requests: Any) -> int:
        gate.wait()
        sent: int = lib.io_submit(context, 1, requests)
        order.append("read" if requests[0].aio_lio_opcode == 0 else "write")
        return sent

    with replace_calls(LibaioQueue(KIB64, 4), submit=submit) as queue:
        tickets = [
            queue.write(file, 0, buffer.address, MIB),
            queue.read(file, 0, buffer.address + MIB, 3 * KIB64),
        ]
        gate.set()
        for ticket in tickets:
            queue.wait(ticket)
    last = len(order) - 1 - order[::-1].index("read")
    assert order.count("write") == 16
    assert last < 10


class Refusing:
    """The extension on a kernel that gives no context."""

    def __init__(self, code: int) -> None:
        self.code = code

    def queue_open(self, depth: int, request: int) -> Any:
        ffi.errno = self.code
        return ffi.NULL


@pytest.mark.parametrize(
    ("code", "reason"),
    [(errno.EAGAIN, "raise the limit"), (errno.ENOSYS, "no asynchronous I/O"), (errno.ENOMEM, "memory")],
)
def test_a_refused_context_falls_back_to_threads(
    monkeypatch: pytest.MonkeyPatch, code: int, reason: str
) -> None:
    monkeypatch.setattr("tiermem.aio.libaio.lib", Refusing(code))
    with pytest.raises(OSError, match=reason) as info:
        open_queue("libaio", depth=5)
    assert info.value.errno == code
    assert "io_setup for 5 requests" in str(info.value)
    with open_queue("auto", depth=5) as queue:
        assert queue.engine == "threads"
        assert queue.note.startswith("threads instead of libaio: io_setup for 5 requests was refused")
        assert reason in queue.note


def test_records_are_used_again(file: File, buffer: Buffer) -> None:
    with LibaioQueue(KIB64, 4) as queue:
        for _ in range(10):
            tickets = [queue.read(file, 0, buffer.address, KIB64) for _ in range(200)]
            for ticket in tickets:
                queue.wait(ticket)
