"""The queue that fails on demand, and the measure of a disk's speed."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiermem.aio import Buffer, FaultyQueue, File, Queue, measure, open_queue

KIB64 = 1 << 16


@pytest.fixture
def file(tmp_path: Path) -> Iterator[File]:
    with File(tmp_path / "pages", 8 * KIB64, create=True) as file:
        yield file


@pytest.fixture
def buffer() -> Iterator[Buffer]:
    with Buffer(16 * KIB64) as buffer:
        yield buffer


@pytest.mark.parametrize("k", range(4))
def test_the_kth_transfer_fails_at_its_wait(file: File, buffer: Buffer, k: int) -> None:
    calls = []

    def fail(index: int, op: str) -> int | None:
        calls.append((index, op))
        return errno.ENOSPC if index == k else None

    buffer.view[: 8 * KIB64] = b"p" * 8 * KIB64
    with FaultyQueue(open_queue(), fail) as queue:
        typed: Queue = queue
        tickets = [typed.write(file, i * KIB64, buffer.address + i * KIB64, KIB64) for i in range(4)]
        for i, ticket in enumerate(tickets):
            if i == k:
                assert queue.done(ticket)
                with pytest.raises(OSError, match=r"write of 65536 bytes at offset .*injected") as info:
                    queue.wait(ticket)
                assert info.value.errno == errno.ENOSPC
                assert info.value.filename == file.path
            else:
                queue.wait(ticket)
            with pytest.raises(ValueError, match="already waited for"):
                queue.wait(ticket)
        assert queue.num_submitted == 4
        assert queue.nbytes_written == 3 * KIB64
    assert calls == [(i, "write") for i in range(4)]
    data = Path(file.path).read_bytes()
    assert [data[i * KIB64] for i in range(4)] == [0 if i == k else ord("p") for i in range(4)]


def test_a_failed_read_leaves_nothing_to_believe(file: File, buffer: Buffer) -> None:
    with FaultyQueue(open_queue(), lambda index, op: errno.EIO) as queue:
        ticket = queue.read(file, 0, buffer.address, KIB64)
        with pytest.raises(OSError, match="Input/output error"):
            queue.wait(ticket)
    assert buffer.view[:KIB64] == b"\xa5" * KIB64


def test_short_moves_half(file: File, buffer: Buffer) -> None:
    buffer.view[:KIB64] = b"p" * KIB64
    with FaultyQueue(open_queue(), lambda index, op: "short") as queue:
        ticket = queue.write(file, 0, buffer.address, KIB64)
        with pytest.raises(OSError, match="a short write: 32768 came"):
            queue.wait(ticket)
    assert Path(file.path).read_bytes()[:KIB64] == b"p" * (KIB64 // 2) + bytes(KIB64 // 2)


def test_real_errors_pass_through(file: File, buffer: Buffer) -> None:
    with FaultyQueue(open_queue(), lambda index, op: None) as queue:
        ticket = queue.read(file, 8 * KIB64, buffer.address, KIB64)
        with pytest.raises(OSError, match="a short read"):
            queue.wait(ticket)
        with pytest.raises(ValueError, match="unknown"):
            queue.done(ticket)


@pytest.mark.parametrize("engine", ["libaio", "threads"])
def test_speed_is_measured_and_nothing_stays(tmp_path: Path, engine: str) -> None:
    speed = measure(tmp_path, 3 * KIB64 + 4096, request=4096, depth=4, engine=engine)
    assert speed.read > 0
    assert speed.write > 0
    assert speed.engine == engine
    assert list(tmp_path.iterdir()) == []
