"""``tiermem demo``: a model trained in a fraction of its memory, on text that is on every machine."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Annotated, Any

import typer

from tiermem.cli.errors import INTERRUPTED
from tiermem.cli.output import JsonOption, print_json, printable

LAYERS, WIDTH, HEADS = 8, 768, 12
SEQUENCE, BATCH = 64, 4
LR = 3e-4
BUDGET = "256MiB"
LEFT_OUT = ("test", "tests", "site-packages", "dist-packages")
NBYTES_PER_PARAMETER = 16


def demo(
    folder: Annotated[
        Path, typer.Option(help="Where the pages are while it runs, and the trace afterwards.")
    ] = Path("demo"),
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps, if there is time for them.")] = 60,
    seconds: Annotated[float, typer.Option(min=0.0, help="Begin no step after so long.")] = 110,
    json: JsonOption = False,
) -> None:
    """Train a GPT of 57 million parameters, 0.9 GiB of training state, in 256 MiB of memory.

    The text is Python's own standard library, a token is a byte, everything is float32 and on the cpu. It takes about
    two minutes; what it prints says when it stopped for the time and not for the steps. Page files are gone afterwards;
    the trace stays.
    """
    from tiermem.cli import training
    from tiermem.errors import ConfigError, format_bytes

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--folder: {folder} can't be made: {error.strerror}") from error
    trace = folder / "run.trace"
    training.check_writable("--folder", trace)

    import torch

    from tiermem.module import TieredModule
    from tiermem.trainer.data import Corpus
    from tiermem.trainer.gpt import GPT, GPTShape
    from tiermem.trainer.loop import adamw, train, warmup_cosine

    corpus = Corpus(sysconfig.get_path("stdlib"), (".py",), LEFT_OUT)
    torch.manual_seed(0)
    shape = GPTShape(sequence=SEQUENCE, layers=LAYERS, width=WIDTH, heads=HEADS)
    unpaged_nbytes = NBYTES_PER_PARAMETER * shape.num_parameters
    if not json:
        typer.echo(
            f"A GPT of {shape.num_parameters:,} parameters: its training state is {format_bytes(unpaged_nbytes)}, "
            f"the memory it may take for it {BUDGET}."
        )
    rss_before = training.current_rss()
    record = training.Record(steps, seconds_limit=seconds)
    # The module goes out of sight as it is wrapped: nothing but pages is left of it.
    model = TieredModule(
        GPT(shape),
        {
            "device": {"kind": "cpu"},
            "host": {"budget": BUDGET},
            "disk": {"paths": [folder]},
            "trace": {"file": trace},
        },
    )
    try:
        measured = training.reset_peak_rss()
        optimizer = adamw(model, LR)
        reports = train(
            model,
            optimizer,
            corpus.batches(BATCH, SEQUENCE),
            steps,
            scheduler=warmup_cosine(optimizer, steps),
            clip=1.0,
        )
        training.follow(record, reports, training.Progress(steps))
        rss_growth = training.peak_rss() - rss_before
        stats = model.stats()
    finally:
        model.close(restore=False)
    figures: dict[str, Any] = {
        "parameters": shape.num_parameters,
        "text": {"path": str(corpus.path), "files": corpus.num_files, "nbytes": len(corpus)},
        "unpaged_state_nbytes": unpaged_nbytes,
        "host_peak_nbytes": stats["tiers"]["host"]["peak"],
        "host_budget_nbytes": stats["tiers"]["host"]["budget"],
        "rss_growth_nbytes": rss_growth if measured else None,
        "trace": str(trace),
        **record.to_json(),
        "stats": stats,
    }
    if json:
        print_json(figures)
    else:
        _print(figures)
    if record.interrupted:
        raise typer.Exit(INTERRUPTED)


def _print(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tiermem.cli import training
    from tiermem.errors import format_bytes

    console = Console()
    for name, value in training.rows(figures, None):
        console.print(f"{name}: {value}", highlight=False)
    unpaged, stats = figures["unpaged_state_nbytes"], figures["stats"]
    peak, budget = figures["host_peak_nbytes"], figures["host_budget_nbytes"]
    table = Table()
    for column in ("", "not paged", "paged"):
        table.add_column(column, justify="right" if column else "left", overflow="fold")
    table.add_row("training state in memory, peak", format_bytes(unpaged), format_bytes(peak), style="bold")
    table.add_row("budget for it", "none", format_bytes(budget))
    table.add_row("training state on disk", "0 B", format_bytes(stats["tiers"]["disk"]["in_use"]))
    if figures["steps"]:
        table.add_row("moved between memory and disk", "0 B", format_bytes(figures["nbytes_paged"]))
        table.add_row("time spent waiting for pages", "0 %", training.stalled(figures))
    if figures["rss_growth_nbytes"] is not None:
        grown = format_bytes(figures["rss_growth_nbytes"])
        table.add_row("growth of the whole process, peak", "not measured", grown)
    console.print(table)
    console.print(
        f"Not paged is computed: {figures['parameters']:,} parameters, each with 4 bytes of its own, 4 of gradient "
        f"and 8 of moments. Paged is measured, {unpaged / peak:.1f} times less in memory; the whole process has "
        "activations and torch's own memory beside its pages.",
        highlight=False,
    )
    trace = printable(figures["trace"])
    console.print(Text(f"The trace is in {trace}. To look at it: tiermem trace summary {trace}"))
