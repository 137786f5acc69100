"""What every Queue must do: a class of tests that each engine's tests subclass."""

import errno
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiermem.aio import Buffer, File, Queue
from tiermem.aio.engine import EngineQueue

MIB = 1 << 20
KIB64 = 1 << 16
STEP = 4096


class QueueTests:
    """Subclasses say how to open a queue and how to make its requests fail."""

    def open(self, request: int = KIB64, depth: int = 4) -> Queue:
        raise NotImplementedError

    def open_failing(self, outcomes: dict[int, int]) -> Queue:
        """A queue of 64 KiB x 4 whose k-th request ends as told: -errno, or at most so many bytes."""
        raise NotImplementedError

    def open_held(self, gate: threading.Event) -> Queue:
        """A queue of 64 KiB x 4 whose requests are made once the gate is set."""
        raise NotImplementedError

    @pytest.fixture
    def file(self, tmp_path: Path) -> Iterator[File]:
        with File(tmp_path / "pages", 4 * MIB, create=True) as file:
            yield file

    @pytest.fixture
    def buffer(self) -> Iterator[Buffer]:
        with Buffer(8 * MIB) as buffer:
            yield buffer

    def write_pattern(self, file: File, buffer: Buffer, nbytes: int = 4 * MIB, seed: int = 7) -> bytes:
        """Random bytes in the buffer's first `nbytes` and in the file."""
        pattern = random.Random(seed).randbytes(nbytes)
        buffer.view[:nbytes] = pattern
        with self.open() as queue:
            queue.wait(queue.write(file, 0, buffer.address, nbytes))
        return pattern

    def test_bytes_come_back(self, file: File, buffer: Buffer) -> None:
        pattern = self.write_pattern(file, buffer)
        assert Path(file.path).read_bytes() == pattern
        with self.open() as queue:
            queue.wait(queue.read(file, 0, buffer.address + 4 * MIB, 4 * MIB))
            assert queue.nbytes_read == 4 * MIB
            assert queue.nbytes_written == 0
        assert buffer.view[4 * MIB :] == pattern

    @pytest.mark.parametrize("depth", [1, 3, 32])
    @pytest.mark.parametrize("request_nbytes", [STEP, 5 * STEP, MIB])
    def test_any_request_and_depth(self, file: File, buffer: Buffer, request_nbytes: int, depth: int) -> None:
        pattern = self.write_pattern(file, buffer)
        with self.open(request_nbytes, depth) as queue:
            queue.wait(queue.read(file, STEP, buffer.address + 4 * MIB, MIB + STEP))
        assert buffer.view[4 * MIB : 5 * MIB + STEP] == pattern[STEP : MIB + 2 * STEP]

    def test_many_transfers_waited_for_in_any_order(self, file: File, buffer: Buffer) -> None:
        pattern = self.write_pattern(file, buffer)
        dice = random.Random(1)
        pieces = []
        at = 0
        while at < 4 * MIB:
            pieces.append((at, min(STEP * dice.randint(1, 40), 4 * MIB - at)))
            at += pieces[-1][1]
        with self.open() as queue:
            tickets = [queue.read(file, at, buffer.address + 4 * MIB + at, n) for at, n in pieces]
            assert len(set(tickets)) == len(tickets)
            dice.shuffle(tickets)
            for ticket in tickets:
                queue.wait(ticket)
        assert buffer.view[4 * MIB :] == pattern

    def test_reads_and_writes_together(self, file: File, buffer: Buffer) -> None:
        pattern = self.write_pattern(file, buffer)
        new = random.Random(8).randbytes(2 * MIB)
        buffer.view[: 2 * MIB] = new
        with self.open() as queue:
            write = queue.write(file, 0, buffer.address, 2 * MIB)
            read = queue.read(file, 2 * MIB, buffer.address + 4 * MIB, 2 * MIB)
            queue.wait(read)
            queue.wait(write)
        assert buffer.view[4 * MIB : 6 * MIB] == pattern[2 * MIB :]
        assert Path(file.path).read_bytes() == new + pattern[2 * MIB :]

    def test_done_turns_true_without_a_wait(self, file: File, buffer: Buffer) -> None:
        with self.open() as queue:
            ticket = queue.write(file, 0, buffer.address, MIB)
            while not queue.done(ticket):
                os.sched_yield()
            queue.wait(ticket)

    def test_a_ticket_is_waited_for_once(self, file: File, buffer: Buffer) -> None:
        with self.open() as queue:
            ticket = queue.write(file, 0, buffer.address, STEP)
            queue.wait(ticket)
            for call in (queue.wait, queue.done):
                with pytest.raises(ValueError, match=f"ticket {ticket} is unknown"):
                    call(ticket)
            with pytest.raises(ValueError, match="ticket 12345 is unknown"):
                queue.wait(12345)

    def test_misaligned_transfers_are_refused_with_their_numbers(self, file: File, buffer: Buffer) -> None:
        if not file.direct:
            pytest.skip("the temporary folder's filesystem refuses O_DIRECT")
        with self.open() as queue:
            for offset, shift, nbytes in ((1, 0, STEP), (0, 1, STEP), (0, 0, STEP + 1)):
                with pytest.raises(ValueError, match=f"offset {offset} and nbytes {nbytes}") as info:
                    queue.read(file, offset, buffer.address + shift, nbytes)
                assert hex(buffer.address + shift) in str(info.value)

    @pytest.mark.parametrize(("offset", "nbytes"), [(-STEP, STEP), (0, 0), (0, -STEP)])
    def test_nonsense_is_refused(self, file: File, buffer: Buffer, offset: int, nbytes: int) -> None:
        with self.open() as queue, pytest.raises(ValueError, match=f"offset {offset}, nbytes {nbytes}"):
            queue.write(file, offset, buffer.address, nbytes)

    def test_a_buffered_file_takes_any_bytes(self, tmp_path: Path, buffer: Buffer) -> None:
        buffer.view[:100_000] = random.Random(2).randbytes(100_000)
        with File(tmp_path / "odd", create=True, direct=False) as file, self.open() as queue:
            queue.wait(queue.write(file, 3, buffer.address + 1, 99_999))
            queue.wait(queue.read(file, 3, buffer.address + MIB + 7, 99_999))
        assert buffer.view[MIB + 7 : MIB + 7 + 99_999] == buffer.view[1:100_000]

    def test_the_end_of_the_file_is_an_error(self, file: File, buffer: Buffer) -> None:
        with self.open() as queue:
            ticket = queue.read(file, 4 * MIB - KIB64, buffer.address, 2 * KIB64)
            with pytest.raises(OSError, match="a short read") as info:
                queue.wait(ticket)
            assert info.value.errno == errno.EIO
            assert info.value.filename == file.path
            assert f"read of {2 * KIB64} bytes at offset {4 * MIB - KIB64}" in str(info.value)
            assert f"at offset {4 * MIB} and 0 came" in str(info.value)
            queue.wait(queue.read(file, 0, buffer.address, KIB64))

    def test_a_file_that_ends_within_a_step(self, file: File, buffer: Buffer) -> None:
        os.truncate(file.path, MIB + 700)
        with self.open() as queue, pytest.raises(OSError, match="a short read"):
            queue.wait(queue.read(file, 0, buffer.address, 2 * MIB))

    def test_a_descriptor_that_can_not_be_written(self, file: File, buffer: Buffer) -> None:
        reader = os.open(file.path, os.O_RDONLY)
        os.dup2(reader, file.fd, inheritable=False)
        os.close(reader)
        with self.open() as queue:
            ticket = queue.write(file, 0, buffer.address, MIB)
            with pytest.raises(OSError, match=os.strerror(errno.EBADF)) as info:
                queue.wait(ticket)
            assert info.value.errno == errno.EBADF

    def test_every_request_failing_in_turn(self, file: File, buffer: Buffer) -> None:
        self.write_pattern(file, buffer)
        for k in range(16):
            with self.open_failing({k: -errno.ENOSPC}) as queue:
                doomed = queue.write(file, 0, buffer.address, 16 * KIB64)
                with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as info:
                    queue.wait(doomed)
                assert info.value.errno == errno.ENOSPC
                assert f"write of {16 * KIB64} bytes at offset 0" in str(info.value)

    def test_a_failure_is_of_its_own_transfer_only(self, file: File, buffer: Buffer) -> None:
        pattern = self.write_pattern(file, buffer)
        with self.open_failing({1: -errno.EIO}) as queue:
            reads = [
                queue.read(file, i * KIB64, buffer.address + 4 * MIB + i * KIB64, KIB64) for i in range(8)
            ]
            failed = [i for i, ticket in enumerate(reads) if self.error_of(queue, ticket) == errno.EIO]
        assert len(failed) == 1
        for i in set(range(8)) - set(failed):
            got = buffer.view[4 * MIB + i * KIB64 : 4 * MIB + (i + 1) * KIB64]
            assert got == pattern[i * KIB64 : (i + 1) * KIB64]

    def test_short_requests_are_continued(self, file: File, buffer: Buffer) -> None:
        pattern = self.write_pattern(file, buffer)
        with self.open_failing({k: STEP * (k % 3 + 1) for k in range(0, 40, 2)}) as queue:
            queue.wait(queue.read(file, 0, buffer.address + 4 * MIB, MIB))
            assert queue.nbytes_read == MIB
        assert buffer.view[4 * MIB : 5 * MIB] == pattern[:MIB]

    def test_a_short_request_that_can_not_be_continued(self, file: File, buffer: Buffer) -> None:
        if not file.direct:
            pytest.skip("the temporary folder's filesystem refuses O_DIRECT")
        with self.open_failing({2: 100}) as queue:
            ticket = queue.write(file, 0, buffer.address, MIB)
            with pytest.raises(OSError, match=r"a short write.*100 came"):
                queue.wait(ticket)

    def test_a_write_that_makes_no_progress(self, file: File, buffer: Buffer) -> None:
        with self.open_failing({3: 0}) as queue:
            ticket = queue.write(file, 0, buffer.address, MIB)
            with pytest.raises(OSError, match=r"a short write.*0 came"):
                queue.wait(ticket)

    def test_close_lands_what_is_in_flight(self, file: File, buffer: Buffer) -> None:
        pattern = random.Random(3).randbytes(4 * MIB)
        buffer.view[: 4 * MIB] = pattern
        queue = self.open()
        good = queue.write(file, 0, buffer.address, 4 * MIB)
        bad = queue.read(file, 4 * MIB, buffer.address + 4 * MIB, KIB64)
        queue.close()
        queue.close()
        assert Path(file.path).read_bytes() == pattern
        assert queue.done(good)
        queue.wait(good)
        with pytest.raises(OSError, match="a short read"):
            queue.wait(bad)
        with pytest.raises(ValueError, match="closed"):
            queue.read(file, 0, buffer.address, STEP)

    def test_a_closed_file_is_refused(self, file: File, buffer: Buffer) -> None:
        file.close()
        with self.open() as queue, pytest.raises(ValueError, match="is closed"):
            queue.read(file, 0, buffer.address, STEP)

    def test_nothing_is_left_behind(self, file: File, buffer: Buffer) -> None:
        def held() -> tuple[int, int]:
            return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

        before_fds, before_threads = held()
        for _ in range(5):
            with self.open() as queue:
                queue.wait(queue.write(file, 0, buffer.address, MIB))
        for _ in range(100_000):
            if held()[1] <= before_threads:
                break
            os.sched_yield()  # a thread that was joined stays listed for a moment
        fds, threads = held()
        assert fds == before_fds
        assert threads <= before_threads

    def test_an_interrupted_wait_can_be_repeated(self, file: File, buffer: Buffer) -> None:
        pattern = self.write_pattern(file, buffer)
        gate = threading.Event()
        with self.open_held(gate) as queue:
            ticket = queue.read(file, 0, buffer.address + 4 * MIB, MIB)

            struck = threading.Event()

            def interrupt() -> None:
                self.until_waited_for(queue, ticket)
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                # One that arrives between Python's last look and the wait wakes nobody; people press the keys again.
                while not struck.wait(10):
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

            thread = threading.Thread(target=interrupt)
            thread.start()
            try:
                with pytest.raises(KeyboardInterrupt):
                    queue.wait(ticket)
                struck.set()
                assert not queue.done(ticket)
            finally:
                struck.set()
                gate.set()
                thread.join()
            queue.wait(ticket)
        assert buffer.view[4 * MIB : 5 * MIB] == pattern[:MIB]

    def test_a_second_waiter_is_refused(self, file: File, buffer: Buffer) -> None:
        gate = threading.Event()
        with self.open_held(gate) as queue:
            ticket = queue.read(file, 0, buffer.address, MIB)
            first = threading.Thread(target=queue.wait, args=(ticket,))
            first.start()
            try:
                self.until_waited_for(queue, ticket)
                with pytest.raises(ValueError, match=f"ticket {ticket} is being waited for by another"):
                    queue.wait(ticket)
            finally:
                gate.set()
                first.join()

    def test_close_wakes_those_who_wait(self, file: File, buffer: Buffer) -> None:
        gate = threading.Event()
        queue = self.open_held(gate)
        ticket = queue.read(file, 0, buffer.address, MIB)
        waiter = threading.Thread(target=queue.wait, args=(ticket,))
        waiter.start()
        self.until_waited_for(queue, ticket)
        closers = [threading.Thread(target=queue.close) for _ in range(2)]
        for closer in closers:
            closer.start()
        gate.set()
        for thread in (waiter, *closers):
            thread.join()
        assert queue.nbytes_read == MIB

    def error_of(self, queue: Queue, ticket: int) -> int | None:
        try:
            queue.wait(ticket)
        except OSError as error:
            return error.errno
        return None

    def until_waited_for(self, queue: Queue, ticket: int) -> None:
        assert isinstance(queue, EngineQueue)
        while queue._flights[ticket].waiter is None:
            os.sched_yield()

    def test_a_fork_is_told_to_open_its_own(self, file: File, buffer: Buffer) -> None:
        with self.open() as queue:
            ticket = queue.write(file, 0, buffer.address, STEP)
            queue.wait(ticket)
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    queue.read(file, 0, buffer.address, STEP)
                except RuntimeError as error:
                    code = 0 if f"belongs to process {os.getppid()}" in str(error) else 2
                finally:
                    queue.close()
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            queue.wait(queue.read(file, 0, buffer.address, STEP))
