"""What tracing costs: nanoseconds a record, and the share of a step that would be.

Run: python benchmarks/trace.py [number of records]
"""

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
    """Print one table: both traces, interleaved."""
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 300_000
    with tempfile.TemporaryDirectory() as folder:
        trace = Trace.create(Path(folder) / "run.trace", units=["unit"], pages=[], budgets={})
        rows = [(cost(trace, number), cost(NullTrace(), number)) for _ in range(ROUNDS)]
        trace.close()
    written, null = (sorted(column)[ROUNDS // 2] for column in zip(*rows, strict=True))
    print(f"{number} records, median of {ROUNDS} rounds, {sys.implementation.name} {sys.version.split()[0]}")
    print(f"{'trace':<12}{'ns/record':>12}{'records in 1 % of a 1 s step':>32}")
    print(f"{'written':<12}{written:>12.0f}{1e7 / written:>32,.0f}")
    print(f"{'none':<12}{null:>12.0f}{1e7 / null:>32,.0f}")


if __name__ == "__main__":
    main()
