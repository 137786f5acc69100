"""What tracing costs: nanoseconds a record, and the share of a step that would be.

Run: python benchmarks/trace.py [--records N] [--quick]
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tiermem.trace import AnyTrace, Event, NullTrace, Trace

ROUNDS = 5


def cost(trace: AnyTrace, number: int) -> float:
    """Nanoseconds a record, the loop included, growth of the file included."""
    record, now = trace.record, time.perf_counter_ns
    begin = now()
    for page in range(number):
        record(Event.LANDED, begin, 100, 1, page, 4096, 3, 2, 20, 0)
    return (now() - begin) / number


def main() -> None:
    """Print one table: both traces, interleaved. Other processes slow the median, the fastest hardly."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=300_000)
    parser.add_argument("--quick", action="store_true", help="few records: does it run?")
    options = parser.parse_args()
    number = 10_000 if options.quick else options.records
    with tempfile.TemporaryDirectory() as folder:
        trace = Trace.create(Path(folder) / "run.trace", units=["unit"], pages=[], budgets={})
        rows = [(cost(trace, number), cost(NullTrace(), number)) for _ in range(ROUNDS)]
        trace.close()
    print(f"{number} records, {ROUNDS} rounds, {sys.implementation.name} {sys.version.split()[0]}, ns/record")
    print(f"{'trace':<12}{'fastest':>10}{'median':>10}{'records in 1 % of a 1 s step':>32}")
    for name, column in zip(("written", "none"), zip(*rows, strict=True), strict=True):
        median = sorted(column)[ROUNDS // 2]
        print(f"{name:<12}{min(column):>10.0f}{median:>10.0f}{1e7 / median:>32,.0f}")


if __name__ == "__main__":
    main()
