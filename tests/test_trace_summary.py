"""The summary of a trace made by hand, whose figures are known; its export has to agree with it."""

import gzip
import json
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.trace import Event, PageInfo, Phase, Reason, Tier, Trace, TraceError
from tiermem.trace.perfetto import export
from tiermem.trace.reader import RECORD_DTYPE, TraceFile
from tiermem.trace.summary import summarise
from tiermem.trace.tally import Union, merge

MS = 1_000_000
PAGES = [
    PageInfo(10, 0, "parameter", "bfloat16", 1000, ("a.weight",)),
    PageInfo(11, 0, "master", "float32", 2000, ("a.weight",)),
    PageInfo(12, 1, "parameter", "bfloat16", 500, ("b.weight",)),
]


def write_known(path):
    trace = Trace.create(
        path,
        units=["a", "b"],
        pages=PAGES,
        budgets={"device": 4000, "host": 2500},
        meta={"rank": 2, "limits": {"disk->host": 1e6}},
    )
    with TraceFile(path) as read:
        origin = read.monotonic_ns

    def record(event, at, ms=0, *rest, **fields):
        trace.record(event, origin + at * MS, ms * MS, *rest, **fields)

    # Before the steps: everything is put on the disk, which has no budget here.
    for page in PAGES:
        record(Event.RESERVE, 0, 0, page.unit, page.number, page.nbytes, 0, Tier.DISK, Reason.CREATE)
    record(Event.LANDED, 0, 1, 0, 10, 1000, Tier.NONE, Tier.DISK, Reason.CREATE)
    trace.step = 0
    # a is faulted: 10 ms for 1000 bytes, in which 8 ms are waited.
    record(Event.FAULT, 10, 0, 0, 10, 1000, Tier.DISK, Tier.HOST, Reason.NOT_PREFETCHED, Phase.FORWARD)
    record(Event.RESERVE, 10, 0, 0, 10, 1000, 0, Tier.HOST, Reason.DEMAND, Phase.FORWARD)
    record(Event.LANDED, 10, 10, 0, 10, 1000, Tier.DISK, Tier.HOST, Reason.DEMAND, Phase.FORWARD)
    record(Event.STALL, 12, 8, 0, 10, 1000, Tier.DISK, Tier.HOST, Reason.NOT_PREFETCHED, Phase.FORWARD)
    # b is prefetched at the same time, half of it overlapping, and found there.
    record(Event.PREFETCH, 15, 0, 1, 12, 500, Tier.DISK, Tier.HOST, Reason.LOOKAHEAD, Phase.FORWARD)
    record(Event.RESERVE, 15, 0, 1, 12, 500, 0, Tier.HOST, Reason.LOOKAHEAD, Phase.FORWARD)
    record(Event.LANDED, 15, 10, 1, 12, 500, Tier.DISK, Tier.HOST, Reason.LOOKAHEAD, Phase.FORWARD)
    record(Event.COMPUTE, 20, 30, 0, phase=Phase.FORWARD)
    record(Event.HIT, 50, 0, 1, 12, 500, 0, Tier.HOST, 0, Phase.FORWARD)
    record(Event.COMPUTE, 50, 10, 1, phase=Phase.FORWARD)
    # Backward of b waits in its middle: 20 ms are 15 of computation and 5 of waiting.
    record(Event.STALL, 70, 5, 1, 12, 500, 0, 0, Reason.COLLECTIVE, Phase.BACKWARD)
    record(Event.COLLECTIVE, 65, 10, 1, 12, 500, 0, 0, Reason.GATHER, Phase.BACKWARD)
    record(Event.COMPUTE, 60, 20, 1, phase=Phase.BACKWARD)
    # a's parameter leaves for its master, which is prefetched too late; another prefetch is wasted.
    record(Event.EVICT, 80, 0, 0, 10, 1000, Tier.HOST, Tier.DISK, Reason.LRU, Phase.OPTIMIZER)
    record(Event.WRITEBACK, 80, 4, 0, 10, 1000, Tier.HOST, Tier.DISK, Reason.LRU, Phase.OPTIMIZER)
    record(Event.RELEASE, 84, 0, 0, 10, 1000, Tier.HOST, 0, Reason.LRU, Phase.OPTIMIZER)
    record(Event.PREFETCH, 84, 0, 0, 11, 2000, Tier.DISK, Tier.HOST, Reason.LOOKAHEAD, Phase.OPTIMIZER)
    record(Event.RESERVE, 84, 0, 0, 11, 2000, 0, Tier.HOST, Reason.LOOKAHEAD, Phase.OPTIMIZER)
    record(Event.FAULT, 85, 0, 0, 11, 2000, Tier.DISK, Tier.HOST, Reason.PREFETCHED_LATE, Phase.OPTIMIZER)
    record(Event.STALL, 85, 5, 0, 11, 2000, Tier.DISK, Tier.HOST, Reason.PREFETCHED_LATE, Phase.OPTIMIZER)
    record(Event.LANDED, 84, 6, 0, 11, 2000, Tier.DISK, Tier.HOST, Reason.LOOKAHEAD, Phase.OPTIMIZER)
    record(Event.OPTIMIZER, 90, 10, 0, 10, 4000, phase=Phase.OPTIMIZER)
    record(Event.OPTIMIZER, 95, 10, 0, 10, 4000, phase=Phase.OPTIMIZER)
    record(Event.PREFETCH, 104, 0, 0, 10, 1000, Tier.DISK, Tier.DEVICE, Reason.LOOKAHEAD)
    record(Event.EVICT, 105, 0, 0, 10, 1000, Tier.DEVICE, Tier.NONE, Reason.DISCARD)
    record(Event.STEP, 10, 100)
    trace.step = 1
    record(Event.STEP, 110, 50)
    # A step that is not finished: its stall is a stall, but has no part in the share.
    trace.step = 2
    record(Event.FAILED, 160, 1, 0, 10, 1000, Tier.DISK, Tier.HOST, Reason.IO_ERROR)
    record(Event.DEPARTURE, 160, 0, 1)
    record(Event.LANDED, 161, 1, 0, 99, 7, Tier.HOST, Tier.DEVICE, Reason.DEMAND)
    record(Event.STALL, 165, 40, 0, -1, 0, 0, 0, Reason.NO_FRAME, Phase.FORWARD)
    trace.close()


@pytest.fixture
def known(tmp_path):
    write_known(tmp_path / "run.trace")
    with TraceFile(tmp_path / "run.trace") as trace:
        assert trace.damage is None
        yield trace


def test_the_known_figures(known):
    figures = summarise(known, top=2)
    assert (figures.state, figures.damage, figures.num_units, figures.num_pages) == ("closed", None, 2, 3)
    assert figures.seconds == pytest.approx(0.205)
    assert figures.steps.count == 2
    assert (figures.steps.mean_s, figures.steps.median_s) == pytest.approx((0.075, 0.075))
    forward, backward, optimizer = (figures.phases[name] for name in ("forward", "backward", "optimizer"))
    assert (forward.compute_s, forward.stall_s) == pytest.approx((0.040, 0.048))
    assert (backward.compute_s, backward.stall_s) == pytest.approx((0.015, 0.005))
    assert (optimizer.compute_s, optimizer.optimizer_s, optimizer.stall_s) == pytest.approx((0, 0.015, 0.005))
    assert figures.compute_s == pytest.approx(0.055)
    assert figures.optimizer_s == pytest.approx(0.015)
    assert figures.collective_s == pytest.approx(0.010)
    assert figures.stall_s == pytest.approx(0.058)
    assert figures.stall_share == pytest.approx(0.018 / 0.150)
    assert list(figures.stalls_by_reason)[:2] == ["no frame free", "not prefetched"]
    assert figures.stalls_by_reason == pytest.approx(
        {
            "no frame free": 0.040,
            "not prefetched": 0.008,
            "waited for a collective": 0.005,
            "prefetched too late": 0.005,
        }
    )
    assert (figures.failures, figures.departures) == (1, 1)


def test_the_known_links(known):
    links = {(link.source, link.target): link for link in summarise(known).links}
    assert set(links) == {("disk", "host"), ("host", "disk"), ("host", "device")}
    up = links["disk", "host"]
    assert (up.num_transfers, up.nbytes) == (3, 3500)
    assert up.busy_s == pytest.approx(0.021)
    assert up.bandwidth == pytest.approx(3500 / 0.021)
    assert up.limit == 1e6
    assert up.by_kind == {"parameter": 1500, "master": 2000}
    down = links["host", "disk"]
    assert (down.nbytes, down.busy_s, down.limit) == (1000, pytest.approx(0.004), None)
    assert links["host", "device"].by_kind == {"unknown": 7}


def test_the_known_requests_and_evictions(known):
    requests = summarise(known).requests
    assert (requests.hits, requests.faults) == (1, 2)
    assert requests.hit_rate == pytest.approx(1 / 3)
    assert (requests.prefetches, requests.used, requests.late, requests.wasted) == (3, 1, 1, 1)
    assert summarise(known).evictions == {"least recently used": 1, "content no longer needed": 1}


def test_the_known_residency(known):
    tiers = summarise(known).tiers
    assert {name: (use.peak, use.final, use.budget) for name, use in tiers.items()} == {
        "device": (0, 0, 4000),
        "host": (2500, 2500, 2500),
        "disk": (3500, 3500, None),
    }


def test_the_known_stalls(known):
    figures = summarise(known, top=2)
    first, second = figures.slowest_stalls
    assert (first.seconds, first.unit, first.kind, first.link) == (0.040, "a", "", "")
    assert (second.at_s, second.seconds, second.step, second.page) == (0.012, 0.008, 0, 10)
    assert (second.unit, second.kind, second.phase) == ("a", "parameter", "forward")
    assert (second.link, second.reason) == ("disk->host", "not prefetched")
    # The longest wait was for no link: the one of another cause isn't blamed for it.
    assert figures.verdict.endswith("; first cause: no frame free")
    assert "disk" not in figures.verdict
    assert "12.0%" in figures.verdict
    assert summarise(known, top=0).slowest_stalls == []


def test_the_summary_is_json(known):
    figures = summarise(known).to_json()
    assert json.loads(json.dumps(figures)) == figures


def test_nothing_happened(tmp_path):
    Trace.create(tmp_path / "run.trace", units=[], pages=[], budgets={}).close()
    with TraceFile(tmp_path / "run.trace") as trace:
        figures = summarise(trace)
        number = export(trace, tmp_path / "out.json")
    assert (figures.seconds, figures.steps.count, figures.stall_share, figures.links) == (0, 0, 0, [])
    assert "no step" in figures.verdict
    assert len(json.loads((tmp_path / "out.json").read_text())["traceEvents"]) == number


def test_pieces_make_no_difference(known, monkeypatch):
    whole = summarise(known).to_json()
    records = known.records
    monkeypatch.setattr(
        known, "pieces", lambda: (records[begin : begin + 3] for begin in range(0, len(records), 3))
    )
    assert summarise(known).to_json() == whole


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=20))
def test_the_union_of_intervals(spans):
    start = np.array([begin for begin, _ in spans], np.int64)
    end = np.array([begin + length for begin, length in spans], np.int64)
    first, last = merge(start, end)
    covered = {point for begin, length in spans for point in range(begin, begin + length)}
    assert int((last - first).sum()) == len(covered)
    assert np.all(first[1:] > last[:-1])


@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_the_export_agrees_with_the_summary(known, tmp_path, name):
    path = tmp_path / name
    number = export(known, path)
    text = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
    events = json.loads(text)["traceEvents"]
    assert len(events) == number
    assert {event["ph"] for event in events} == {"M", "X", "C", "i"}
    assert {event["pid"] for event in events} == {2}
    figures = summarise(known)
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    # Bytes of every link, by lane name.
    carried = defaultdict(int)
    for event in spans:
        if event["cat"] in ("landed", "writeback"):
            carried[threads[event["tid"]].split()[0]] += event["args"]["nbytes"]
    assert carried.pop("none->disk") == 1000
    assert carried == {f"{link.source}->{link.target}": link.nbytes for link in figures.links}
    # Stalls do not overlap here, so their sum is the union.
    assert sum(event["dur"] for event in spans if event["cat"] == "stall") == pytest.approx(
        figures.stall_s * 1e6
    )
    steps = [event["dur"] for event in spans if event["cat"] == "step"]
    assert sum(steps) / len(steps) == pytest.approx(figures.steps.mean_s * 1e6)
    for tier, use in figures.tiers.items():
        levels = [event["args"]["bytes"] for event in events if event["name"] == f"{tier} bytes"]
        assert max(levels, default=0) == use.peak
        assert (levels or [0])[-1] == use.final


def test_spans_of_a_lane_do_not_overlap(known, tmp_path):
    export(known, tmp_path / "out.json")
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"disk->host", "disk->host 2", "optimizer", "optimizer 2"} <= set(names.values())
    assert set(lanes) <= set(names)
    for spans in lanes.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_an_export_that_can_not_be_written(known, tmp_path):
    for path in (tmp_path / "missing" / "out.json", tmp_path, "/dev/null"):
        with pytest.raises(TraceError):
            export(known, path)
    assert [path.name for path in tmp_path.iterdir()] == ["run.trace"]


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=40),
    st.integers(1, 7),
)
def test_a_union_is_the_same_in_pieces(spans, size):
    records = np.zeros(len(spans), RECORD_DTYPE)
    for record, (start, duration) in zip(records, spans, strict=True):
        record["start"], record["duration"] = start, duration
    covered = {moment for start, duration in spans for moment in range(start, start + duration)}
    union = Union()
    for begin in range(0, len(records), size):
        union.add(records[begin : begin + size])
        rest = records["start"][begin + size :]
        union.settle(int(rest.min()) if len(rest) else 1 << 40)
    assert union.seconds == len(covered) / 1e9
    assert len(union._start) == 0  # what is settled takes no memory
