"""``tiermem simulate``: a recorded step under other budgets, links, policies and compute speeds."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiermem.cli.output import JsonOption, format_rate, format_seconds, print_json, printable

if TYPE_CHECKING:
    from tiermem.simulator import Machine, Simulated
    from tiermem.trace.recorded import Recorded

POINTS = 24
"""Budgets of a sweep."""


class Policy(enum.Enum):
    """Who chooses what leaves."""

    PLAN = "plan"
    LRU = "lru"
    BELADY = "belady"


class Sweep(enum.Enum):
    """What a sweep goes through."""

    HOST = "host"


def simulate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The trace of a run.")],
    host: Annotated[str | None, typer.Option(help='The host budget, as in "64GiB".')] = None,
    device: Annotated[str | None, typer.Option(help="The budget of a device with memory of its own.")] = None,
    disk_read: Annotated[str | None, typer.Option(help='What the disk reads, as in "7GB/s".')] = None,
    disk_write: Annotated[str | None, typer.Option(help="What the disk writes.")] = None,
    pcie: Annotated[str | None, typer.Option(help="What the link to the device carries.")] = None,
    compute: Annotated[float, typer.Option(min=1e-3, help="How many times as fast it computes.")] = 1.0,
    policy: Annotated[Policy | None, typer.Option(help="Who chooses what leaves.")] = None,
    sweep: Annotated[
        Sweep | None, typer.Option(help="Step time against this budget, all else the same.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="With --sweep: the picture to write, an SVG.")] = None,
    measured: Annotated[
        list[Path] | None, typer.Option(help="With --sweep: traces whose step times are drawn as points.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Print how long the step of a recorded run would take on another machine, and what it would wait for.

    What is not given is as in the trace. Disk rates that are not given are those at which the simulated step takes as
    long as the recorded one. Reads and writes share the disk.
    """
    from dataclasses import replace

    from tiermem.errors import ConfigError
    from tiermem.simulator import as_recorded
    from tiermem.simulator import simulate as run

    if sweep is None and (out is not None or measured):
        raise ConfigError("--out and --measured draw a sweep; they need --sweep host")
    if sweep is not None and host is not None:
        raise ConfigError("--host and --sweep host: a sweep goes through all host budgets; leave --host out")
    if out is not None and out.suffix != ".svg":
        raise ConfigError(
            f"--out: read {printable(str(out))}; the picture is an SVG, and its name has to end in .svg"
        )
    recorded = _read(file)
    machine = as_recorded(recorded)
    if pcie is not None and device is None and machine.device is None:
        raise ConfigError(
            "--pcie: the run had no device with memory of its own; give --device, or leave it out"
        )
    if not json:
        _note(recorded, machine)
    given: dict[str, Any] = {
        "host": _size("--host", host),
        "device": _size("--device", device),
        "disk_read": _size("--disk-read", disk_read, "/s"),
        "disk_write": _size("--disk-write", disk_write, "/s"),
        "pcie": _size("--pcie", pcie, "/s"),
        "policy": None if policy is None else policy.value,
    }
    machine = replace(machine, compute=compute, **{key: to for key, to in given.items() if to is not None})
    try:
        if sweep is not None:
            _sweep(recorded, machine, out, measured or [], json)
            return
        found = run(recorded, machine)
    except ValueError as error:
        raise ConfigError(f"this step can't be simulated: {error}") from error
    if json:
        data = found.to_json()
        data["recorded"] = {
            "step_s": recorded.step_s,
            "num_steps": recorded.num_steps,
            "alike": recorded.alike,
            "policy": recorded.policy,
        }
        print_json(data)
        return
    _print(found, recorded)


def _read(file: Path) -> Recorded:
    from tiermem.trace.reader import TraceFile
    from tiermem.trace.recorded import recorded

    with TraceFile(file) as trace:
        if trace.damage:
            typer.echo(f"tiermem: {printable(str(file))}: {printable(trace.damage)}", err=True)
        return recorded(trace)


def _note(recorded: Recorded, machine: Machine) -> None:
    """Say what of the run is not in the figures."""
    if not recorded.alike:
        typer.echo(
            "tiermem: no recorded step was wholly the schedule that is simulated: what its accesses compute is taken "
            f"from the same ones in {recorded.num_steps} other steps",
            err=True,
        )
    if recorded.policy != machine.policy:
        typer.echo(
            f"tiermem: the run's policy, {printable(recorded.policy)}, can't be simulated: {machine.policy} is",
            err=True,
        )


def _size(option: str, written: str | None, suffix: str = "") -> int | None:
    from tiermem.config import Size
    from tiermem.errors import ConfigError

    if written is None:
        return None
    try:
        size = Size.parse(written.strip().removesuffix(suffix))
    except ValueError as error:
        raise ConfigError(f"{option}: read {printable(written)!r}: {error}") from error
    if size.nbytes is None:
        raise ConfigError(
            f"{option}: read {printable(written)!r}; a percentage has nothing here to be a part of"
        )
    return size.nbytes


def _print(found: Simulated, recorded: Recorded) -> None:
    from rich.console import Console
    from rich.table import Table

    from tiermem.errors import format_bytes

    console, machine = Console(), found.machine
    where = "" if machine.device is None else f", device {format_bytes(machine.device)}"
    console.print(
        f"{len(recorded.schedule)} accesses; host {format_bytes(machine.host)}{where}, disk reads "
        f"{format_rate(machine.disk_read)}, writes {format_rate(machine.disk_write)}, computing x {machine.compute:g}, "
        f"policy {machine.policy}",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(title="A step, simulated", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("time", justify="right")
    table.add_row("computing", format_seconds(found.compute_s))
    for cause, seconds in found.stalls_s.items():
        table.add_row(f"waiting {cause}", format_seconds(seconds))
    table.add_row("the step", format_seconds(found.step_s), style="bold")
    table.add_row("the recorded step", format_seconds(recorded.step_s))
    console.print(table)
    links = Table(title="Bytes in a step", title_justify="left", title_style="bold")
    for column in ("link", "up", "down", "bound", "moved / bound", "busy"):
        links.add_column(column, justify="left" if column == "link" else "right")
    for name, link in found.links.items():
        links.add_row(
            {"disk": "disk - host", "device": "host - device"}[name],
            format_bytes(link.read),
            format_bytes(link.written),
            format_bytes(link.bound),
            "-" if link.ratio is None else f"{link.ratio:.3f}",
            format_seconds(link.busy_s),
        )
    console.print(links)


def _smallest(recorded: Recorded, machine: Machine, least: int = 1) -> int:
    """The smallest host budget from ``least`` bytes up that works."""
    from dataclasses import replace

    from tiermem.errors import BudgetError
    from tiermem.simulator import simulate as run

    try:
        run(recorded, replace(machine, host=least), bounds=False)
    except BudgetError as error:
        if error.smallest is None or error.smallest <= least:
            raise
        # With more, the parts of optimizer state may be larger, and so may what works.
        return _smallest(recorded, machine, error.smallest)
    return least


def _sweep(recorded: Recorded, machine: Machine, out: Path | None, files: list[Path], json: bool) -> None:
    from dataclasses import replace

    from tiermem.errors import TiermemError, format_bytes
    from tiermem.picture import draw
    from tiermem.simulator import simulate as run

    whole = sum(recorded.sizes.values())
    rows = []
    smallest = _smallest(recorded, machine)
    for number in range(POINTS):
        budget = smallest + (whole - smallest) * number // (POINTS - 1)
        rows.append((budget, run(recorded, replace(machine, host=budget), bounds=False)))
    points = [(other.budgets["host"], other.step_s) for other in map(_read, files)]
    if out is not None:
        gib = float(1 << 30)
        title = f"Step time of {printable(machine.policy)} against the host budget"
        picture = draw(
            title,
            [(budget / gib, found.step_s) for budget, found in rows],
            [(budget / gib, seconds) for budget, seconds in points],
            rows[-1][1].compute_s,
        )
        try:
            out.write_text(picture)
        except OSError as error:
            raise TiermemError(f"--out: {out} can't be written: {error.strerror}") from error
    if json:
        print_json(
            {
                "simulated": [{"host": budget, "step_s": found.step_s} for budget, found in rows],
                "measured": [{"host": budget, "step_s": seconds} for budget, seconds in points],
                "file": None if out is None else str(out),
            }
        )
        return
    for budget, found in rows:
        link = found.links["disk"]
        typer.echo(
            f"{format_bytes(budget):>12} {format_seconds(found.step_s):>9} a step, "
            f"{format_bytes(link.read + link.written):>12} moved"
        )
    for budget, seconds in points:
        typer.echo(f"{format_bytes(budget):>12} {format_seconds(seconds):>9} measured")
    if out is not None:
        typer.echo(f"{printable(str(out))} shows it")
