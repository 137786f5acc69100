"""The trace's writer and reader: what is written is read, whatever happens in between."""

import errno
import json
import os
import signal
import stat
import struct
import subprocess
import sys
import textwrap
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.errors import TiermemError
from tiermem.trace import (
    REASON_WORDS,
    Event,
    NullTrace,
    PageInfo,
    Phase,
    Reason,
    Tier,
    Trace,
    TraceError,
)
from tiermem.trace.layout import CLOSED, HEADER, MAGIC, RECORD, VERSION, WINDOW
from tiermem.trace.reader import RECORD_DTYPE, TraceFile

UNITS = ["embedding", "block.0"]
PAGES = [
    PageInfo(0, 0, "parameter", "bfloat16", 4096, ("embedding.weight",)),
    PageInfo(1, 1, "exp_avg", "float32", 8192, ("block.0.weight", "block.0.bias")),
]
PER_WINDOW = WINDOW // RECORD.size


def create(path, **meta):
    return Trace.create(path, units=UNITS, pages=PAGES, budgets={"host": 1 << 20, "disk": 1 << 30}, meta=meta)


def write(path, count=10):
    trace = create(path)
    for number in range(count):
        trace.record(Event.LANDED, 1000 + number, 10, 1, 1, 8192, Tier.DISK, Tier.HOST, Reason.DEMAND, 0)
    return trace


def first_record(path):
    return HEADER.unpack(path.read_bytes()[: HEADER.size])[4]


def patch(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "run.trace"
    trace = create(path, rank=1, limits={"disk->host": 2e9})
    trace.step = 7
    trace.record(
        Event.STALL, 123, 456, 1, 0, 4096, Tier.DISK, Tier.HOST, Reason.PREFETCHED_LATE, Phase.BACKWARD
    )
    trace.record(event=Event.STEP, start=1, duration=2)
    trace.close()
    with TraceFile(path) as read:
        assert read.damage is None
        assert read.closed
        assert not read.live
        assert list(read.units) == UNITS
        assert list(read.pages.values()) == PAGES
        assert read.budgets == {"host": 1 << 20, "disk": 1 << 30}
        assert read.meta == {"rank": 1, "limits": {"disk->host": 2e9}}
        assert read.pid == os.getpid()
        assert [int(x) for x in read.records[0].tolist()] == [
            123,
            456,
            4096,
            1,
            0,
            7,
            3,
            2,
            2,
            1,
            Event.STALL,
        ]
        assert [int(x) for x in read.records[1].tolist()] == [1, 2, 0, -1, -1, 7, 0, 0, 0, 3, Event.STEP]


RECORDS = st.lists(
    st.fixed_dictionaries(
        {
            "event": st.sampled_from(Event),
            "start": st.integers(0, (1 << 60) - 1),
            "duration": st.integers(0, (1 << 60) - 1),
            "unit": st.integers(-1, len(UNITS) - 1),
            "page": st.integers(-1, (1 << 31) - 1),
            "nbytes": st.integers(0, (1 << 48)),
            "source": st.sampled_from(Tier),
            "target": st.sampled_from(Tier),
            "reason": st.sampled_from(Reason),
            "phase": st.sampled_from(Phase),
        }
    ),
    max_size=30,
)


@settings(max_examples=40, deadline=None)
@given(records=RECORDS, step=st.integers(-1, (1 << 31) - 1))
def test_any_record_survives(tmp_path_factory, records, step):
    path = tmp_path_factory.mktemp("any") / "run.trace"
    trace = create(path)
    trace.step = step
    for record in records:
        trace.record(**record)
    trace.close()
    with TraceFile(path) as read:
        assert read.damage is None
        found = [dict(zip(RECORD_DTYPE.names, row.tolist(), strict=True)) for row in read.records]
    assert found == [{**record, "step": step} for record in records]


def test_the_layout_is_one():
    assert RECORD.size == RECORD_DTYPE.itemsize == 48
    packed = RECORD.pack(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
    row = np.frombuffer(packed, RECORD_DTYPE)[0]
    assert row.tolist() == tuple(range(1, 12))


def test_phases_are_the_schedules():
    schedule = pytest.importorskip("tiermem.policies.schedule")
    for phase in schedule.Phase:
        assert Phase[phase.name] == phase


def test_every_reason_has_words():
    assert set(REASON_WORDS) == set(Reason)
    assert len(set(REASON_WORDS.values())) == len(Reason)


def test_a_closed_file_has_no_tail_and_is_its_owners(tmp_path):
    path = tmp_path / "run.trace"
    write(path).close()
    assert path.stat().st_size == first_record(path) + 10 * RECORD.size
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_closing_twice_and_recording_afterwards_do_nothing(tmp_path):
    path = tmp_path / "run.trace"
    trace = write(path)
    trace.close()
    trace.close()
    trace.record(Event.STEP, 0, 0)
    trace.flush()
    with TraceFile(path) as read:
        assert len(read.records) == 10


def test_a_null_trace_does_nothing():
    trace = NullTrace()
    trace.step = 3
    trace.record(Event.STEP, 0, 0)
    trace.flush()
    trace.close()


def test_an_existing_file_is_replaced_and_its_reader_keeps_the_old(tmp_path):
    path = tmp_path / "run.trace"
    write(path).close()
    with TraceFile(path) as old:
        new = write(path, 3)
        assert old.refresh() == 0
        assert len(old.records) == 10
        new.close()
        with TraceFile(path) as read:
            assert len(read.records) == 3


def test_a_link_is_followed(tmp_path):
    path = tmp_path / "run.trace"
    path.symlink_to(tmp_path / "elsewhere.trace")
    write(path).close()
    assert path.is_symlink()
    with TraceFile(tmp_path / "elsewhere.trace") as read:
        assert len(read.records) == 10


def test_where_no_trace_can_be(tmp_path):
    with pytest.raises(TraceError, match="no folder"):
        create(tmp_path / "missing" / "run.trace")
    with pytest.raises(TraceError, match="not a regular file"):
        create(tmp_path)
    with pytest.raises(TraceError, match="not a regular file"):
        create("/dev/null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert list(tmp_path.iterdir()) == []
    assert issubclass(TraceError, TiermemError)


def test_pages_have_to_make_sense(tmp_path):
    for pages in ([PAGES[0], PAGES[0]], [PageInfo(0, 2, "parameter", "float32", 1)]):
        with pytest.raises(ValueError):
            Trace.create(tmp_path / "run.trace", units=UNITS, pages=pages, budgets={})


def test_growing_over_windows_while_somebody_reads(tmp_path):
    path = tmp_path / "run.trace"
    trace = create(path)
    read = TraceFile(path)
    assert len(read.records) == 0
    assert read.live
    assert not read.closed
    wanted = 0
    for count in (3, PER_WINDOW - 3, 1, PER_WINDOW + 5):
        for _ in range(count):
            trace.record(Event.STEP, wanted, 1)
            wanted += 1
        assert read.refresh() == count
        assert read.damage is None
        assert np.array_equal(read.records["start"], np.arange(wanted))
    trace.close()
    assert read.refresh() == 0
    assert read.damage is None
    assert read.closed
    assert not read.live
    assert len(list(read.pieces(1000))) == -(-wanted // 1000)
    read.close()


def test_a_header_larger_than_a_page(tmp_path):
    units = [f"block.{number}" for number in range(20000)]
    path = tmp_path / "run.trace"
    trace = Trace.create(path, units=units, pages=[], budgets={})
    trace.record(Event.STEP, 0, 1, unit=19999)
    trace.close()
    with TraceFile(path) as read:
        assert read.damage is None
        assert read.unit_name(int(read.records["unit"][0])) == "block.19999"


def disk_full(fd, offset, length):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.filterwarnings("error")
def test_a_full_disk_stops_the_trace_and_not_the_run(tmp_path, monkeypatch):
    path = tmp_path / "run.trace"
    trace = write(path, PER_WINDOW)
    monkeypatch.setattr(os, "posix_fallocate", disk_full)
    with pytest.warns(RuntimeWarning, match="stops after 65536 records"):
        trace.record(Event.STEP, 0, 1)
    trace.record(Event.STEP, 0, 1)  # a second warning would fail the test
    trace.close()
    with TraceFile(path) as read:
        assert len(read.records) == PER_WINDOW
        assert "disk was full" in read.damage
        assert not read.live


def test_a_full_disk_at_the_beginning_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "run.trace"
    write(path).close()
    monkeypatch.setattr(os, "posix_fallocate", disk_full)
    with pytest.raises(TraceError, match="No space left"):
        create(path)
    assert list(tmp_path.iterdir()) == [path]
    with TraceFile(path) as read:
        assert len(read.records) == 10


def test_a_killed_writer_loses_nothing(tmp_path):
    path = tmp_path / "run.trace"
    script = textwrap.dedent(
        """
        import sys
        from tiermem.trace import Event, Trace
        trace = Trace.create(sys.argv[1], units=["u"], pages=[], budgets={})
        number = 0
        while True:
            trace.record(Event.STEP, number, 1)
            number += 1
            if number % 50000 == 0:
                print(number, flush=True)
        """
    )
    with subprocess.Popen([sys.executable, "-c", script, path], stdout=subprocess.PIPE, text=True) as process:
        told = 0
        while told < 100_000:
            told = int(process.stdout.readline())
        with TraceFile(path) as read:
            assert read.live
        process.send_signal(signal.SIGKILL)
        process.wait()
    with TraceFile(path) as read:
        assert not read.live
        assert not read.closed
        assert read.damage is None
        assert len(read.records) >= told
        assert np.array_equal(read.records["start"], np.arange(len(read.records)))


def test_a_forked_child_leaves_its_parents_trace_alone(tmp_path):
    path = tmp_path / "run.trace"
    trace = write(path, 2)
    child = os.fork()
    if child == 0:
        trace.record(Event.STEP, 99, 1)
        trace.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with TraceFile(path) as read:
        assert read.live
    trace.record(Event.STEP, 3, 1)
    trace.close()
    with TraceFile(path) as read:
        assert read.records["event"].tolist() == [Event.LANDED, Event.LANDED, Event.STEP]


@pytest.mark.parametrize("closed", [True, False])
def test_cut_short_anywhere(tmp_path, closed):
    path, cut = tmp_path / "run.trace", tmp_path / "cut.trace"
    trace = write(path)
    trace.flush()
    if closed:
        trace.close()
    whole = path.read_bytes()
    first = first_record(path)
    json_end = HEADER.size + HEADER.unpack(whole[: HEADER.size])[5]
    for length in (0, 1, 7, 8, HEADER.size - 1, HEADER.size, HEADER.size + 1, json_end - 1):
        cut.write_bytes(whole[:length])
        with pytest.raises(TraceError, match=r"not a tiermem trace|cut short"):
            TraceFile(cut)
    for length in (json_end, first - 1, first):
        cut.write_bytes(whole[:length])
        with TraceFile(cut) as read:
            assert len(read.records) == 0
            assert bool(read.damage) == closed
    for count in range(10):
        for extra in (0, 1, 20, 47):
            cut.write_bytes(whole[: first + count * RECORD.size + extra])
            with TraceFile(cut) as read:
                assert len(read.records) == count
                assert np.array_equal(read.records["start"], 1000 + np.arange(count))
                if closed or extra:
                    assert read.damage
    trace.close()


def test_bytes_behind_the_last_record_are_told(tmp_path):
    path = tmp_path / "run.trace"
    write(path).close()
    with open(path, "ab") as file:
        file.write(RECORD.pack(0, 0, 0, -1, -1, -1, 0, 0, 0, 3, Event.STEP))
    with TraceFile(path) as read:
        assert "10 records were written, the file holds 11" in read.damage


@pytest.mark.parametrize(
    ("offset", "data", "said"),
    [
        (47, b"\xff", "no event 255"),
        (38, b"\xee", "no reason 238"),
        (36, b"\x04", "no source 4"),
        (37, b"\x09", "no target 9"),
        (39, b"\x04", "no phase 4"),
        (24, struct.pack("<i", 2), "no unit 2 among 2"),
        (8, struct.pack("<q", -1), "out of range"),
        (0, struct.pack("<q", 1 << 62), "out of range"),
        (16, struct.pack("<q", -5), "out of range"),
        (47, b"\0", "record 4 is missing"),
    ],
)
@pytest.mark.parametrize("closed", [True, False])
def test_a_damaged_record_ends_the_trace(tmp_path, offset, data, said, closed):
    path = tmp_path / "run.trace"
    trace = write(path)
    if closed:
        trace.close()
    patch(path, first_record(path) + 4 * RECORD.size + offset, data)
    with TraceFile(path) as read:
        assert len(read.records) == 4
        assert said in read.damage
    trace.close()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_flipped_byte_never_breaks_the_reader(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("flip") / "run.trace"
    write(path).close()
    whole = bytearray(path.read_bytes())
    first = first_record(path)
    place = data.draw(st.one_of(st.integers(0, 700), st.integers(first, len(whole) - 1)))
    whole[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    refusal = ""
    try:
        with TraceFile(path) as read:
            assert len(read.records) <= 10
    except TraceError as error:
        refusal = str(error)
    assert not refusal or (place < first and str(path) in refusal)


def rewrite_header(path, document, **changes):
    fields = {"version": VERSION, "record": RECORD.size, "first": 65536, **changes}
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    head = HEADER.pack(
        MAGIC, fields["version"], CLOSED, fields["record"], fields["first"], len(body), zlib.crc32(body), 0
    )
    path.write_bytes((head + body).ljust(65536, b"\0"))


GOOD = {
    "units": ["u"],
    "pages": [],
    "budgets": {},
    "meta": {},
    "pid": 1,
    "clock": {"monotonic_ns": 0, "wall_ns": 0, "domain": ""},
}


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"\xff",
        b"[]",
        b"[" * 50000,
        {},
        {**GOOD, "units": [1]},
        {**GOOD, "units": 5},
        {**GOOD, "pages": [1]},
        {
            **GOOD,
            "pages": [{"number": 1 << 40, "unit": 0, "kind": "", "dtype": "", "nbytes": 1, "names": []}],
        },
        {**GOOD, "pages": [{"number": 0, "unit": 1, "kind": "", "dtype": "", "nbytes": 1, "names": []}]},
        {**GOOD, "pages": [{"number": 0, "unit": 0, "kind": "", "dtype": "", "nbytes": -1, "names": []}]},
        {**GOOD, "budgets": {"host": "much"}},
        {**GOOD, "meta": 5},
        {**GOOD, "clock": None},
        {**GOOD, "pid": True},
    ],
)
def test_a_header_of_somebody_elses(tmp_path, document):
    path = tmp_path / "run.trace"
    rewrite_header(path, document)
    with pytest.raises(TraceError, match="not what a trace has"):
        TraceFile(path)


def test_a_header_that_is_not_ours(tmp_path):
    path = tmp_path / "run.trace"
    rewrite_header(path, GOOD)
    with TraceFile(path) as read:
        assert read.damage is None
    rewrite_header(path, GOOD, version=2)
    with pytest.raises(TraceError, match="version 2"):
        TraceFile(path)
    for change in ({"record": 40}, {"first": 40}):
        rewrite_header(path, GOOD, **change)
        with pytest.raises(TraceError, match="damaged"):
            TraceFile(path)
    rewrite_header(path, GOOD)
    patch(path, HEADER.size + 3, b"X")
    with pytest.raises(TraceError, match="checksum"):
        TraceFile(path)
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(TraceError, match="not a tiermem trace"):
        TraceFile(path)


def test_what_can_not_be_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "none", tmp_path, tmp_path / "pipe"):
        with pytest.raises(TraceError, match="trace"):
            TraceFile(path)


def test_names_are_handed_on_as_they_are(tmp_path):
    path: Path = tmp_path / "run.trace"
    names = ["<script>alert(1)</script>", "[red]x[/red]", "\x1b[2J", "a\0b", "\ud800", "ünit"]
    Trace.create(path, units=names, pages=[], budgets={}).close()
    with TraceFile(path) as read:
        assert list(read.units) == names
        assert read.unit_name(99) == read.unit_name(-1) == ""
        assert (read.kind_of(-1), read.kind_of(5)) == ("", "unknown")


def test_the_clocks_are_anchored(tmp_path):
    path = tmp_path / "run.trace"
    before, wall = time.perf_counter_ns(), time.time_ns()
    create(path).close()
    with TraceFile(path) as read:
        assert before <= read.monotonic_ns <= time.perf_counter_ns()
        assert abs(read.wall_ns - wall) < 60e9
        assert len(read.clock_domain) in (0, 16)
