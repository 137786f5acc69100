"""What opening a large trace costs: seconds until the page is drawn, memory, and milliseconds a frame.

Run: python benchmarks/viewer.py [--records N ...] [--quick]. Needs Playwright and a Chromium, as the tests do.
"""

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from playwright.sync_api import Page, sync_playwright

from tiermem.trace import Event, PageInfo, Phase, Reason, Tier, Trace
from tiermem.trace.layout import NUM_RECORDS_OFFSET
from tiermem.trace.reader import RECORD_DTYPE, TraceFile

UNITS, KINDS = 48, ("parameter", "gradient", "exp_avg", "exp_avg_sq")
NBYTES = 8 << 20
MS = 1_000_000
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
FRAMES = 60


def step() -> np.ndarray:
    """The records of one step: each page of each unit comes, is used and goes; times from 0 on."""
    rows = []
    now = 0
    for unit in range(UNITS):
        for kind in range(len(KINDS)):
            page = unit * len(KINDS) + kind
            phase = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OPTIMIZER)[kind]
            up, down = (Tier.DISK, Tier.HOST), (Tier.HOST, Tier.DISK)
            work = Event.OPTIMIZER if phase == Phase.OPTIMIZER else Event.COMPUTE
            rows += [
                (now, 0, NBYTES, unit, page, 0, *up, Reason.LOOKAHEAD, phase, Event.PREFETCH),
                (now, 0, NBYTES, unit, page, 0, 0, Tier.HOST, Reason.LOOKAHEAD, phase, Event.RESERVE),
                (now - 2 * MS, 4 * MS, NBYTES, unit, page, 0, *up, Reason.LOOKAHEAD, phase, Event.LANDED),
                (now + MS, MS, NBYTES, unit, page, 0, *up, Reason.PREFETCHED_LATE, phase, Event.STALL),
                (now + 2 * MS, 0, NBYTES, unit, page, 0, 0, Tier.HOST, 0, phase, Event.HIT),
                (now + 2 * MS, 6 * MS, 0, unit, page, 0, 0, 0, 0, phase, work),
                (now + 8 * MS, 0, NBYTES, unit, page, 0, *down, Reason.BELADY, phase, Event.EVICT),
                (now + 5 * MS, 3 * MS, NBYTES, unit, page, 0, *down, Reason.BELADY, phase, Event.WRITEBACK),
                (now + 8 * MS, 0, NBYTES, unit, page, 0, Tier.HOST, 0, Reason.BELADY, phase, Event.RELEASE),
            ]
            now += 8 * MS
    rows.append((0, now, 0, -1, -1, 0, 0, 0, 0, Phase.NONE, Event.STEP))
    return np.array(rows, RECORD_DTYPE)


def write(path: Path, number: int) -> None:
    """A closed trace of about ``number`` records at ``path``."""
    pages = [
        PageInfo(unit * len(KINDS) + kind, unit, name, "float32", NBYTES)
        for unit in range(UNITS)
        for kind, name in enumerate(KINDS)
    ]
    units = [f"transformer.blocks.{unit}" for unit in range(UNITS)]
    Trace.create(path, units=units, pages=pages, budgets={"host": 4 * NBYTES}).close()
    with TraceFile(path) as trace:
        zero = trace.monotonic_ns
    pattern = step()
    long = int(pattern["duration"][-1])
    steps = max(1, number // len(pattern))
    with path.open("r+b") as file:
        file.seek(0, 2)
        for each in range(steps):
            records = pattern.copy()
            records["start"] += zero + each * long
            records["step"] = each
            file.write(records.tobytes())
        file.seek(NUM_RECORDS_OFFSET)
        file.write((steps * len(pattern)).to_bytes(8, "little"))


def drawn(page: Page) -> None:
    """Wait until everything that was asked for is there and drawn."""
    page.wait_for_function(
        "() => !tiermem.tiles.inFlight.size && !tiermem.tiles.wanted.length && !tiermem.pending && tiermem.frame"
    )


def frames(page: Page) -> list[float]:
    """Milliseconds of drawing of each frame while the view is panned and zoomed."""
    found = []
    for key in "w" * 12 + "d" * (FRAMES - 24) + "s" * 12:
        page.keyboard.press(key)
        page.evaluate("() => new Promise(requestAnimationFrame)")
        found.append(page.evaluate("() => tiermem.frame"))
    return found


def peak_mib(pid: int) -> tuple[float, float]:
    """The most memory that a process had, and how much of it was its own and not the file's."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = {name: float(number) for name, number in re.findall(r"(\w+):\s+(\d+) kB", status)}
    return fields["VmHWM"] / 1024, fields["RssAnon"] / 1024


def measure(path: Path, page: Page) -> tuple[float, float, float, float, list[float]]:
    """Seconds until the page is drawn; then until units are; MiB at most, and private; milliseconds of the frames."""
    command = [
        sys.executable,
        "-c",
        "from tiermem.cli import main; main()",
        "trace",
        "view",
        str(path),
        "--no-browser",
    ]
    begun = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        told = re.search(r"http://\S+", process.stdout.readline())
        assert told
        page.goto(told[0])
        page.wait_for_selector("#app[aria-busy=false]")
        drawn(page)
        opened = time.perf_counter() - begun
        timed = frames(page)
        begun = time.perf_counter()
        page.click("#tab-units")
        page.wait_for_selector("#units button.name")
        units = time.perf_counter() - begun
        memory = peak_mib(process.pid)
        process.terminate()
    return opened, units, *memory, timed


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--quick", action="store_true", help="few records: does it run?")
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no Chromium here: scripts/browser.sh installs one")
    print(
        f"{'records':>12}{'file, MiB':>11}{'drawn, s':>10}{'units, s':>10}{'peak, MiB':>11}"
        f"{'private':>9}{'frame, ms':>11}{'slowest':>9}"
    )
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        for number in [20_000] if options.quick else options.records:
            path = Path(folder) / "run.trace"
            write(path, number)
            page = browser.new_page(viewport={"width": 1280, "height": 860})
            opened, units, most, private, timed = measure(path, page)
            print(
                f"{number:>12,}{path.stat().st_size / (1 << 20):>11,.0f}{opened:>10.2f}{units:>10.2f}{most:>11,.0f}"
                f"{private:>9,.0f}{statistics.median(timed):>11.1f}{max(timed):>9.1f}"
            )
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
