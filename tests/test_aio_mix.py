"""Random transfers through both engines give what plain bytes give."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.aio import Buffer, File, Queue, open_queue

STEP = 4096
NUM_STEPS = 32
SPACE = STEP * NUM_STEPS

pieces = st.lists(
    st.tuples(
        st.sampled_from(["read", "write"]),
        st.integers(0, NUM_STEPS - 1),
        st.integers(1, NUM_STEPS),
        st.integers(1, 255),
    ),
    max_size=12,
)


def through(queue: Queue, file: File, buffer: Buffer, work: list[tuple[str, int, int, int]]) -> list[bytes]:
    """Submits all pieces whose ranges don't overlap together, and waits where they do."""
    seen = []
    open_tickets: list[tuple[int, int, int]] = []
    place = 0
    placed = []
    for op, start, length, value in work:
        stop = min(start + length, NUM_STEPS)
        nbytes = (stop - start) * STEP
        for ticket, low, high in [entry for entry in open_tickets if entry[1] < stop and start < entry[2]]:
            queue.wait(ticket)
            open_tickets.remove((ticket, low, high))
        address = buffer.address + place
        if op == "write":
            buffer.view[place : place + nbytes] = bytes([value]) * nbytes
            ticket = queue.write(file, start * STEP, address, nbytes)
        else:
            ticket = queue.read(file, start * STEP, address, nbytes)
            placed.append((place, nbytes))
        open_tickets.append((ticket, start, stop))
        place += nbytes
    for ticket, _, _ in reversed(open_tickets):
        queue.wait(ticket)
    seen.extend(bytes(buffer.view[at : at + nbytes]) for at, nbytes in placed)
    return seen


def plainly(work: list[tuple[str, int, int, int]]) -> tuple[list[bytes], bytes]:
    space = bytearray(SPACE)
    seen = []
    for op, start, length, value in work:
        low, high = start * STEP, min(start + length, NUM_STEPS) * STEP
        if op == "write":
            space[low:high] = bytes([value]) * (high - low)
        else:
            seen.append(bytes(space[low:high]))
    return seen, bytes(space)


@settings(max_examples=40, deadline=None)
@given(work=pieces, request_steps=st.integers(1, 5), depth=st.integers(1, 6))
def test_engines_agree_with_plain_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    work: list[tuple[str, int, int, int]],
    request_steps: int,
    depth: int,
) -> None:
    expected_seen, expected_space = plainly(work)
    for engine in ("libaio", "threads"):
        path = tmp_path_factory.mktemp("mix") / "pages"
        with (
            File(path, SPACE, create=True) as file,
            Buffer(12 * SPACE) as buffer,
            open_queue(engine, request_steps * STEP, depth) as queue,
        ):
            assert through(queue, file, buffer, work) == expected_seen
        assert path.read_bytes() == expected_space
