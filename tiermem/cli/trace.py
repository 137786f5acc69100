"""``tiermem trace``: what a run's trace says."""

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiermem.cli.output import JsonOption, format_rate, format_seconds, print_json, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tiermem.trace.reader import TraceFile
    from tiermem.trace.summary import Summary
    from tiermem.viewer.session import Session

app = typer.Typer(help="Look into the trace of a run.", no_args_is_help=True, rich_markup_mode=None)

TraceArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The trace, as [trace] file names it.")]


class Format(enum.Enum):
    """What a trace can be exported as."""

    PERFETTO = "perfetto"


@app.command()
def summary(
    file: TraceArgument,
    json: JsonOption = False,
    top: Annotated[int, typer.Option(min=0, help="How many of the slowest stalls to show.")] = 10,
) -> None:
    """Print where the time went, what each link carried, and the slowest stalls and why.

    Works on a run that is still going on, and on what a killed one has left.
    """
    from tiermem.trace.reader import TraceFile
    from tiermem.trace.summary import summarise

    with TraceFile(file) as trace:
        figures = summarise(trace, top)
        moved = _moved(trace)
    if json:
        print_json({**figures.to_json(), "step_on_disk_link": moved})
        return
    from rich.console import Console

    from tiermem.errors import format_bytes

    console = Console()
    _print(figures, console)
    if moved is not None:
        console.print(
            f"a step moves {format_bytes(moved['nbytes'])} between disk and host; no order of moves takes less than "
            f"{format_bytes(moved['bound'])}: moved / bound "
            + ("-" if moved["ratio"] is None else f"{moved['ratio']:.3f}"),
            highlight=False,
        )


def _moved(trace: "TraceFile") -> dict[str, Any] | None:
    """Bytes of a step over the disk's link, and the bound for them; None where the trace doesn't tell the order."""
    from tiermem.errors import TiermemError
    from tiermem.simulator import moved
    from tiermem.trace.recorded import recorded

    try:
        link = moved(recorded(trace))
    except (TiermemError, KeyError, ValueError):
        return None  # an older trace, one of a run that is in its first step, or a damaged one
    if link is None:
        return None
    return {"nbytes": link.read + link.written, "bound": link.bound, "ratio": link.ratio}


@app.command()
def export(
    file: TraceArgument,
    out: Annotated[Path, typer.Option(help="The file to write; compressed if it ends in .gz.")],
    format: Annotated[Format, typer.Option(help="The format to write.")] = Format.PERFETTO,
    json: JsonOption = False,
) -> None:
    """Write the trace in another program's format."""
    from tiermem.trace.perfetto import export as export_perfetto
    from tiermem.trace.place import check_apart
    from tiermem.trace.reader import TraceFile

    check_apart(out, [file])
    with TraceFile(file) as trace:
        if trace.damage:
            typer.echo(f"tiermem: {printable(str(file))}: {printable(trace.damage)}", err=True)
        number = export_perfetto(trace, out)
    if json:
        print_json({"events": number, "file": str(out), "damage": trace.damage})
        return
    typer.echo(f"{number} events in {printable(str(out))}: open it at https://ui.perfetto.dev")


@app.command()
def view(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="The trace; or those of all ranks of a run, on one clock."),
    ],
    compare: Annotated[
        Path | None, typer.Option(help="A second trace, to be shown beside the first.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Keep showing what a run in progress adds.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write one HTML file that needs nothing else, and end.")
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port to serve on; 0: any that is free.")
    ] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Show the trace in a browser: timeline, units, stalls, and what to change.

    The page is served to this machine alone, until Ctrl-C.
    """
    from tiermem.errors import ConfigError, format_bytes
    from tiermem.trace.place import check_apart
    from tiermem.viewer.session import Mode, Session

    if compare is not None and len(files) != 1:
        raise ConfigError(f"--compare sets one trace beside another; {len(files)} were given besides it")
    if out is not None and follow:
        raise ConfigError("--follow needs a server, --out writes a file: only one of them can be had")
    mode = Mode.COMPARE if compare is not None else Mode.RANKS if len(files) > 1 else Mode.SINGLE
    inputs = [*files, *([compare] if compare is not None else [])]
    if out is not None:
        check_apart(out, inputs)
    session = Session(inputs, mode, follow)
    try:
        for problem in session.errors:
            typer.echo(f"tiermem: {printable(problem)}", err=True)
        if out is None:
            _serve(session, port, browser)
            return
        from tiermem.viewer.page import export as export_page

        nbytes = export_page(session, out)
        typer.echo(f"{format_bytes(nbytes)} in {printable(str(out))}: open it in any browser")
    finally:
        session.close()


def _serve(session: "Session", port: int, browser: bool) -> None:
    import webbrowser

    from tiermem.viewer.server import Server

    server = Server(session, port)
    typer.echo(f"The trace is at {server.url} until Ctrl-C.")
    try:
        if browser:
            webbrowser.open(server.url)
        server.run()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()


@app.command()
def top(
    file: TraceArgument,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two frames.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, and end.")] = False,
) -> None:
    """Watch a run in the terminal: tiers, links, where the time goes, the last stalls. Ends with the run, or with q."""
    from rich.console import Console

    from tiermem.cli.top import frame, watch
    from tiermem.viewer.run import Run

    run = Run(file)
    try:
        if once:
            Console().print(frame(run))
        else:
            watch(run, Console(), interval)
    finally:
        run.close()


def _print(figures: "Summary", console: "Console") -> None:
    from rich.text import Text

    console.print(
        Text(f"{printable(figures.path)}: {figures.num_records:,} records of {figures.num_units} units, ")
        + Text(f"{figures.num_pages} pages, {format_seconds(figures.seconds)}; {figures.state}")
    )
    if figures.damage:
        console.print(Text(printable(figures.damage), style="bold yellow"))
    steps = figures.steps
    if steps.count:
        console.print(
            f"{steps.count} steps, mean {format_seconds(steps.mean_s)}, "
            f"median {format_seconds(steps.median_s)}"
        )
    for table in (_phases(figures), _links(figures), _tiers(figures), _requests(figures), _stalls(figures)):
        if table.row_count:
            console.print(table)
    console.print(Text(printable(figures.verdict), style="bold"))


def _table(title: str, *columns: str, texts: int = 1) -> "Table":
    """A table whose first ``texts`` columns are texts, the others numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < texts else "right", overflow="fold")
    return table


def _phases(figures: "Summary") -> "Table":
    table = _table("Time", "phase", "compute", "optimizer", "stall")
    for name, phase in figures.phases.items():
        times = (phase.compute_s, phase.optimizer_s, phase.stall_s)
        if any(times):
            table.add_row(name if name != "none" else "outside", *map(format_seconds, times))
    if table.row_count:
        total = (figures.compute_s, figures.optimizer_s, figures.stall_s)
        table.add_row("all", *map(format_seconds, total), style="bold")
    return table


def _links(figures: "Summary") -> "Table":
    from rich.text import Text

    from tiermem.errors import format_bytes

    table = _table("Links", "link", "by kind", "bytes", "transfers", "busy", "bandwidth", texts=2)
    for link in figures.links:
        kinds = sorted(link.by_kind.items(), key=lambda item: -item[1])
        table.add_row(
            f"{link.source} → {link.target}",
            Text("\n".join(f"{printable(kind)} {format_bytes(nbytes)}" for kind, nbytes in kinds)),
            format_bytes(link.nbytes),
            f"{link.num_transfers:,}",
            format_seconds(link.busy_s),
            format_rate(link.bandwidth) + (f" of {format_rate(link.limit)}" if link.limit else ""),
        )
    return table


def _tiers(figures: "Summary") -> "Table":
    from tiermem.errors import format_bytes

    table = _table("Tiers", "tier", "peak", "at the end", "budget")
    for name, tier in figures.tiers.items():
        budget = "not told" if tier.budget is None else format_bytes(tier.budget)
        table.add_row(name, format_bytes(tier.peak), format_bytes(tier.final), budget)
    return table


def _requests(figures: "Summary") -> "Table":
    requests = figures.requests
    table = _table("Pages asked for", "what", "number")
    if requests.hits + requests.faults + requests.prefetches == 0:
        return table
    table.add_row("found resident", f"{requests.hits:,} ({requests.hit_rate:.1%})")
    table.add_row("faults", f"{requests.faults:,}")
    table.add_row("prefetches", f"{requests.prefetches:,}")
    table.add_row("  in time", f"{requests.used:,}")
    table.add_row("  too late", f"{requests.late:,}")
    table.add_row("  evicted unused", f"{requests.wasted:,}")
    for reason, number in figures.evictions.items():
        table.add_row(f"evicted: {reason}", f"{number:,}")
    if figures.failures:
        table.add_row("failed transfers", f"{figures.failures:,}", style="bold red")
    if figures.departures:
        table.add_row("departures from the schedule", f"{figures.departures:,}")
    return table


def _stalls(figures: "Summary") -> "Table":
    from rich.text import Text

    table = _table("Slowest stalls", "unit", "kind", "phase", "why", "link", "step", "at", "waited", texts=5)
    for stall in figures.slowest_stalls:
        table.add_row(
            Text(printable(stall.unit)),
            Text(printable(stall.kind)),
            stall.phase,
            stall.reason,
            stall.link.replace("->", " → "),
            str(stall.step) if stall.step >= 0 else "",
            f"{stall.at_s:.3f} s",
            format_seconds(stall.seconds),
        )
    return table
