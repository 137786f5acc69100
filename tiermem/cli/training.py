"""A training run as the commands show it: settings, progress, the summary; shared by ``train`` and ``demo``."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiermem.cli.output import format_rate
from tiermem.errors import ConfigError, format_bytes

if TYPE_CHECKING:
    from rich.progress import TaskID

    from tiermem.config import Config
    from tiermem.trainer.loop import StepReport

NATS_PER_BIT = math.log(2)


@dataclass
class Record:
    """What a run has done so far: its reports, and whether Ctrl-C or its time limit in seconds broke it off."""

    steps: int
    reports: list[StepReport] = field(default_factory=list)
    interrupted: bool = False
    seconds_limit: float | None = None
    out_of_time: bool = False

    def to_json(self) -> dict[str, Any]:
        """Figures of the run. Losses in nats and bits per byte, times in seconds, sizes in bytes.

        One batch says little, so the last loss is a mean: of the last tenth of the steps, at least five. Rates are
        those after the first step, which records the schedule that the others follow; None when it is the only one.
        """
        reports = self.reports
        figures: dict[str, Any] = {
            "steps": len(reports),
            "steps_asked": self.steps,
            "interrupted": self.interrupted,
            "seconds_limit": self.seconds_limit,
            "out_of_time": self.out_of_time,
        }
        if not reports:
            return figures
        last = reports[1:][-max(5, len(reports) // 10) :] or reports
        last_loss = sum(each.loss for each in last) / len(last)
        after = reports[1:]
        seconds = sum(each.seconds for each in after)
        tokens, stalled = sum(each.num_tokens for each in after), sum(each.stall_seconds for each in after)
        return {
            **figures,
            "loss_first": reports[0].loss,
            "loss_last_mean": last_loss,
            "bits_per_byte_first": reports[0].loss / NATS_PER_BIT,
            "bits_per_byte_last_mean": last_loss / NATS_PER_BIT,
            "steps_in_last_mean": len(last),
            "losses": [each.loss for each in reports],
            "tokens": sum(each.num_tokens for each in reports),
            "seconds": sum(each.seconds for each in reports),
            "stall_seconds": sum(each.stall_seconds for each in reports),
            "tokens_per_second_after_first": tokens / seconds if after else None,
            "seconds_per_step_after_first": seconds / len(after) if after else None,
            "stall_fraction_after_first": stalled / seconds if after else None,
            "nbytes_paged": sum(each.nbytes_paged for each in reports),
        }


class Progress:
    """What a person sees while a run goes on, on stderr: a bar in a terminal, a line now and then elsewhere."""

    def __init__(self, steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        console = Console(stderr=True)
        self._steps = steps
        self._bar = Bar(
            BarColumn(bar_width=8),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )
        self._lines = not console.is_terminal
        self._task: TaskID | None = None
        self._nbytes = 0

    def __enter__(self) -> Progress:
        self._bar.start()
        self._task = self._bar.add_task("", total=self._steps)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, report: StepReport) -> None:
        """Show how far the run has come."""
        assert self._task is not None
        self._nbytes += report.nbytes_paged
        text = (
            f"loss {report.loss:.3f}, {report.num_tokens / report.seconds:,.0f} tokens/s, "
            f"stall {100 * report.stall_seconds / report.seconds:.0f} %, {format_bytes(self._nbytes)} paged"
        )
        self._bar.update(self._task, advance=1, description=text)
        every = max(1, self._steps // 10)
        if self._lines and (report.number % every == 0 or report.number in (1, self._steps)):
            print(f"step {report.number}/{self._steps}: {text}", file=sys.stderr, flush=True)


def follow(record: Record, reports: Iterable[StepReport], progress: Progress | None) -> None:
    """Run a training to its end, or to Ctrl-C, or to the record's time limit; what was done is in ``record``."""
    began = time.monotonic()
    with progress or contextlib.nullcontext():
        try:
            for report in reports:
                record.reports.append(report)
                if progress is not None:
                    progress.show(report)
                limit = record.seconds_limit
                if limit is not None and time.monotonic() - began > limit:
                    record.out_of_time = len(record.reports) < record.steps
                    break
        except KeyboardInterrupt:
            record.interrupted = True


def overridden(policy: Path | None, changes: dict[str, dict[str, Any]]) -> Config:
    """The policy file's configuration (or the default one) with the keys that were given on the command line."""
    from tiermem.config import Config

    config = Config.load(policy)
    tables: dict[str, dict[str, Any]] = {
        name: dict(getattr(config, name).changed()) for name in type(config).model_fields
    }
    for name, keys in changes.items():
        tables[name].update({key: value for key, value in keys.items() if value is not None})
    return Config(**tables)


def check_writable(option: str, path: Path) -> None:
    """Refuse a file that can't be written, before the run that would be lost with it."""
    folder = path.parent
    if path.is_dir():
        raise ConfigError(f"{option}: {path} is a folder, not a file")
    if not folder.is_dir():
        raise ConfigError(f"{option}: there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{option}: {path} can't be written by this user")


def rows(figures: dict[str, Any], stats: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    """A run's figures for people: what, and how much."""
    asked = figures["steps_asked"]
    steps = f"{figures['steps']}" + (f" of {asked}" if figures["steps"] != asked else "")
    if figures["out_of_time"]:
        steps += f", stopped by its time limit of {figures['seconds_limit']:g} s"
    yield "steps", steps + (", interrupted" if figures["interrupted"] else "")
    alone = figures["steps"] == 1
    if figures["steps"]:
        count = figures["steps_in_last_mean"]
        mean = f"; the last is the mean of {count} steps" if count > 1 else ""
        yield (
            "loss",
            f"{figures['loss_first']:.3f} → {figures['loss_last_mean']:.3f} nats/byte "
            f"({figures['bits_per_byte_first']:.3f} → {figures['bits_per_byte_last_mean']:.3f} bits/byte{mean})",
        )
        seconds = figures["seconds"]
        if alone:
            yield "speed", f"{figures['tokens'] / seconds:,.0f} tokens/s, {seconds:.2f} s in all"
        else:
            yield (
                "speed",
                f"{figures['tokens_per_second_after_first']:,.0f} tokens/s and "
                f"{figures['seconds_per_step_after_first']:.2f} s a step after the first, {seconds:.0f} s in all",
            )
    if stats is not None and figures["steps"]:
        nbytes = figures["nbytes_paged"]
        yield (
            "paged",
            f"{format_bytes(nbytes)} ({format_bytes(nbytes // figures['steps'])} a step, "
            f"{format_rate(nbytes / figures['seconds'])})",
        )
        yield "stalled", f"{stalled(figures)} of the time{'' if alone else ' after the first step'}"
    if stats is not None:
        for name, tier in stats["tiers"].items():
            if tier["peak"]:
                yield f"{name} peak", f"{format_bytes(tier['peak'])} of {format_bytes(tier['budget'])}"
        yield "state", f"{format_bytes(stats['state_nbytes'])} in pages"


def stalled(figures: dict[str, Any]) -> str:
    """What part of a run was spent waiting for pages: after the first step, or in it when it is the only one."""
    part = figures["stall_fraction_after_first"]
    return f"{100 * (figures['stall_seconds'] / figures['seconds'] if part is None else part):.1f} %"


def peak_rss() -> int:
    """The most memory this process has had since its start or the last :func:`reset_peak_rss`, in bytes."""
    return _status("VmHWM")


def current_rss() -> int:
    """The memory this process has, in bytes."""
    return _status("VmRSS")


def reset_peak_rss() -> bool:
    """Have :func:`peak_rss` count from now on; False where the kernel doesn't allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {name}")
