"""The threads engine passes the Queue's tests; what is its own: interrupted calls and the fallback."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conformance_queue import KIB64, MIB, QueueTests
from tiermem.aio import Buffer, File, Queue, open_queue
from tiermem.aio.threads import ThreadQueue, VectorCall


class TestThreadQueue(QueueTests):
    def open(self, request: int = KIB64, depth: int = 4) -> Queue:
        queue = open_queue("threads", request, depth)
        assert queue.engine == "threads"
        return queue

    def open_failing(self, outcomes: dict[int, int]) -> Queue:
        lock = threading.Lock()
        calls = iter(range(1_000_000))

        def failing(call: VectorCall) -> VectorCall:
            def wrapped(fd: int, memory: Sequence[memoryview], offset: int) -> int:
                with lock:
                    outcome = outcomes.get(next(calls))
                if outcome is None:
                    return call(fd, memory, offset)
                if outcome < 0:
                    raise OSError(-outcome, os.strerror(-outcome))
                done = call(fd, memory, offset)
                return min(done, outcome)

            return wrapped

        return ThreadQueue(KIB64, 4, preadv=failing(os.preadv), pwritev=failing(os.pwritev))

    def open_held(self, gate: threading.Event) -> Queue:
        def held(fd: int, memory: Sequence[memoryview], offset: int) -> int:
            gate.wait()
            return os.preadv(fd, memory, offset)

        return ThreadQueue(KIB64, 4, preadv=held)


def test_an_interrupted_call_is_made_again(tmp_path: Path) -> None:
    interruptions = [InterruptedError(), InterruptedError()]

    def interrupted(fd: int, memory: Sequence[memoryview], offset: int) -> int:
        if interruptions:
            raise interruptions.pop()
        return os.preadv(fd, memory, offset)

    with (
        File(tmp_path / "pages", MIB, create=True) as file,
        Buffer(MIB) as buffer,
        ThreadQueue(KIB64, 4, preadv=interrupted) as queue,
    ):
        buffer.view[:] = b"\1" * MIB
        queue.wait(queue.read(file, 0, buffer.address, MIB))
        assert buffer.view == bytes(MIB)


@pytest.mark.parametrize(
    ("request_nbytes", "depth"), [(0, 4), (1000, 4), (2 << 30, 4), (4096, 0), (4096, 5000)]
)
@pytest.mark.parametrize("engine", ["libaio", "threads"])
def test_sizes_that_make_no_sense(engine: str, request_nbytes: int, depth: int) -> None:
    with pytest.raises(ValueError, match=r"request must be|depth must be"):
        open_queue(engine, request_nbytes, depth)


def test_an_unknown_engine() -> None:
    with pytest.raises(ValueError, match="not 'uring'"):
        open_queue("uring")
