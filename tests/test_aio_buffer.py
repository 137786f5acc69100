"""Buffers: aligned, exactly as long as asked, and refused in numbers."""

import ctypes
import mmap
import struct
import subprocess
import sys

import pytest

from tiermem.aio import HUGE_NBYTES, Buffer


@pytest.mark.parametrize("nbytes", [1, 4096, HUGE_NBYTES - 1, HUGE_NBYTES, 3 * HUGE_NBYTES + 5])
def test_where_it_lies_and_how_long_it_is(nbytes: int) -> None:
    with Buffer(nbytes) as buffer:
        assert buffer.nbytes == len(buffer.view) == nbytes
        assert buffer.address % (HUGE_NBYTES if nbytes >= HUGE_NBYTES else 4096) == 0
        assert not any(buffer.view[-5:])
        buffer.view[-1] = 7
        assert buffer.view[-1] == 7


def test_the_view_starts_at_the_address() -> None:
    with Buffer(HUGE_NBYTES) as buffer:
        buffer.view[:4] = b"page"
        assert ctypes.string_at(buffer.address, 4) == b"page"


def test_it_holds_no_more_than_what_was_touched() -> None:
    def resident(buffer: Buffer) -> int:
        with open("/proc/self/pagemap", "rb") as entries:
            entries.seek(buffer.address // mmap.PAGESIZE * 8)
            found = entries.read(-(-buffer.nbytes // mmap.PAGESIZE) * 8)
        return sum(entry >> 63 for (entry,) in struct.iter_unpack("Q", found)) * mmap.PAGESIZE

    with Buffer(2 * HUGE_NBYTES + 4096) as buffer:
        assert resident(buffer) == 0
        buffer.view[-1] = 1
        assert resident(buffer) == mmap.PAGESIZE
        buffer.view[0] = 1
        assert resident(buffer) <= HUGE_NBYTES + mmap.PAGESIZE


@pytest.mark.parametrize("populate", [True, False])
@pytest.mark.parametrize("nbytes", [5000, 2 * HUGE_NBYTES + 5000])
def test_touch_keeps_the_bytes(monkeypatch: pytest.MonkeyPatch, nbytes: int, populate: bool) -> None:
    if not populate:  # as on a kernel before 5.14: advice that no kernel knows
        monkeypatch.setattr("tiermem.aio.buffer._MADV_POPULATE_WRITE", 12345)
    with Buffer(nbytes) as buffer:
        buffer.view[-4:] = b"page"
        buffer.touch()
        assert buffer.view[-4:] == b"page"
        assert not any(buffer.view[:-4])


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_length_that_makes_no_sense(nbytes: int) -> None:
    with pytest.raises(ValueError, match=f"not {nbytes}"):
        Buffer(nbytes)


@pytest.mark.parametrize("nbytes", [1 << 62, 1 << 70])
def test_a_refusal_says_what_was_asked(nbytes: int) -> None:
    with pytest.raises(MemoryError, match=f"{nbytes} bytes.*bytes are available"):
        Buffer(nbytes)


def test_a_limit_of_the_process_is_named() -> None:
    code = (
        "import resource; from tiermem.aio import Buffer\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))\n"
        "try: Buffer(2 << 30)\n"
        "except MemoryError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"RLIMIT_DATA is {1 << 30} bytes" in done.stdout


def test_close_waits_for_no_view() -> None:
    buffer = Buffer(HUGE_NBYTES)
    kept = buffer.view[:10]
    with pytest.raises(BufferError, match=f"{HUGE_NBYTES} bytes can't close"):
        buffer.close()
    assert len(buffer.view) == HUGE_NBYTES
    kept.release()
    buffer.close()
    buffer.close()
