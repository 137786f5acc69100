"""What ``tiermem trace top`` draws: a run in the terminal, frame by frame."""

import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tiermem.cli.output import format_rate, format_seconds, printable
from tiermem.errors import format_bytes
from tiermem.viewer.now import Now, now
from tiermem.viewer.run import Run

_BAR = 30
_NAME = 24


def frame(run: Run) -> RenderableType:
    """One frame."""
    summary, last = run.summary, now(run)
    steps = summary.steps
    told = f"{steps.count} steps, mean {format_seconds(steps.mean_s)}" if steps.count else "no step finished"
    title = Text(printable(summary.path), style="bold")
    title.append(f"   {summary.state}, {told}, {summary.num_records:,} records", style="not bold")
    parts: list[RenderableType] = [title]
    if summary.damage:
        parts.append(Text(printable(summary.damage), style="bold yellow"))
    # What it comes to stands above the tables, the last of which may go on below a small terminal.
    parts.append(Text(printable(summary.verdict), style="bold"))
    parts += [Text(), _tiers(run), Text(), _links(run, last), Text(), _time(last), Text(), _stalls(last)]
    return Group(*parts)


def watch(run: Run, console: Console, interval: float) -> None:
    """Show ``run`` until its writer has ended, "q" is pressed or Ctrl-C; then print the last frame once."""
    try:
        with (
            _keys() as pressed,
            Live(console=console, screen=console.is_terminal, auto_refresh=False) as live,
        ):
            while True:
                ended = not run.trace.live
                run.refresh()
                live.update(frame(run), refresh=True)
                if ended or pressed(interval):
                    break
    except KeyboardInterrupt:
        pass
    if console.is_terminal:  # that screen is gone; without one the frames are there already
        console.print(frame(run))


def _tiers(run: Run) -> Table:
    table = _table("tier", "held now", "", "budget", "peak")
    for name, tier in run.summary.tiers.items():
        budget = tier.budget
        bar = _bar(tier.final, budget) if budget else Text()
        told = format_bytes(budget) if budget else "not told"
        table.add_row(name, format_bytes(tier.final), bar, told, format_bytes(tier.peak))
    return table


def _links(run: Run, last: Now) -> Table:
    table = _table("link", f"last {last.seconds:.0f} s", "", "at best", "in all")
    best = run.best_rates()
    for link in run.summary.links:
        name = f"{link.source}->{link.target}"
        limit, rate = link.limit or best.get(name, 0.0), last.rates.get(name, 0.0)
        bar = _bar(rate, max(limit, rate, 1.0))
        table.add_row(
            name.replace("->", " → "),
            format_rate(rate),
            bar,
            format_rate(limit),
            format_bytes(link.nbytes),
        )
    return table


def _time(last: Now) -> Table:
    table = _table(f"last {last.seconds:.0f} s", "share", "")
    for key in ("forward", "backward", "compute", "optimizer", "stall", "collectives", "link"):
        share = last.shares.get(key, 0.0)
        if share or key == "stall":
            bar = _bar(min(share, 1.0), 1.0, "red" if key == "stall" else "cyan")
            table.add_row({"stall": "waiting", "link": "any link busy"}.get(key, key), f"{share:.0%}", bar)
    return table


def _stalls(last: Now) -> Table:
    table = _table("last stalls", "waited", "kind", "phase", "why")
    for stall in last.stalls:
        table.add_row(
            Text(_ended(printable(stall.unit))),
            format_seconds(stall.seconds),
            Text(printable(stall.kind)),
            stall.phase,
            stall.why,
        )
    return table


def _ended(name: str) -> str:
    """A unit's name by its end, which tells it from others, where all of it would push the figures off the screen."""
    return name if len(name) <= _NAME else f"…{name[1 - _NAME :]}"


def _bar(part: float, whole: float, style: str = "cyan") -> ProgressBar:
    return ProgressBar(total=whole, completed=part, width=_BAR, complete_style=style, finished_style=style)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number == 1 else "left", no_wrap=True)
    return table


@contextmanager
def _keys() -> Iterator["_Pressed"]:
    """Single keys from the terminal, without waiting for a line; without a terminal nothing is ever pressed."""
    if not sys.stdin.isatty():
        yield _Pressed(None)
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield _Pressed(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@dataclass(frozen=True, slots=True)
class _Pressed:
    fd: int | None

    def __call__(self, seconds: float) -> bool:
        """Wait for so long; whether "q" was pressed meanwhile."""
        if self.fd is None:
            time.sleep(seconds)
            return False
        ready, _, _ = select.select([self.fd], [], [], seconds)
        return bool(ready) and sys.stdin.read(1) in ("q", "Q")
