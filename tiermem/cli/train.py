"""``tiermem train``: a language model on a text file or folder."""

from __future__ import annotations

import enum
import math
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from tiermem.cli.errors import INTERRUPTED
from tiermem.cli.output import JsonOption, print_json, printable


class DType(enum.Enum):
    """What parameters may be computed with."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def train(
    path: Annotated[
        Path,
        typer.Argument(
            help="A file, read as bytes whatever is in it, or a folder, of which all text files are read "
            "(those without a NUL byte near their beginning; hidden ones are left out)."
        ),
    ],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 100,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 4,
    sequence: Annotated[int, typer.Option(min=1, help="Bytes in a sequence.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Transformer blocks.")] = 8,
    width: Annotated[int, typer.Option(min=1, help="Numbers that stand for one byte.")] = 512,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads; the width is divided among them.")] = 8,
    tied: Annotated[bool, typer.Option(help="One matrix for bytes going in and coming out.")] = False,
    lr: Annotated[
        float, typer.Option(help="Highest learning rate: warm-up over a tenth of the steps, then a cosine.")
    ] = 3e-4,
    clip: Annotated[float, typer.Option(min=0.0, help="Largest norm of the gradients; 0 for any.")] = 1.0,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches for one step.")] = 1,
    dtype: Annotated[
        DType | None,
        typer.Option(help="What parameters are computed with; by default what the policy says, or float32."),
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(help="A policy file; the options below go before it.")
    ] = None,
    host_budget: Annotated[str | None, typer.Option(help='[host] budget, such as "512MiB".')] = None,
    device_budget: Annotated[str | None, typer.Option(help="[device] budget, where there is CUDA.")] = None,
    disk_path: Annotated[
        list[Path] | None, typer.Option(help="[disk] paths; may be given several times.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="[trace] file.")] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write the model's state_dict there at the end, with torch.save.")
    ] = None,
    seed: Annotated[int, typer.Option(help="For the first weights, and the order of the text.")] = 0,
    unpaged: Annotated[
        bool, typer.Option("--unpaged", help="The same loop on the plain module, on the cpu, for comparing.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Train a GPT on a text file or folder, paged within a budget.

    A token is a byte: losses are nats per byte. The last loss is the mean of the last tenth of the steps, at least
    five, and rates leave out the first step, which records the schedule of the others. Progress goes to stderr. Ctrl-C
    ends the run with its summary so far (exit status 130), saves nothing, and leaves no page files behind.
    """
    from tiermem.cli import training
    from tiermem.errors import ConfigError

    if not (math.isfinite(lr) and lr > 0):
        raise ConfigError(f"--lr: read {lr}; allowed is a number above 0")
    if not math.isfinite(clip):
        raise ConfigError(f"--clip: read {clip}; allowed is a number above 0, or 0 for no clipping")
    if width % heads:
        raise ConfigError(
            f"--width: read {width}, which {heads} heads don't divide; allowed are its multiples"
        )
    if not -(2**63) <= seed < 2**63:
        raise ConfigError(f"--seed: read {seed}; allowed are integers of 64 bits")
    config = training.overridden(
        policy,
        {
            "host": {"budget": host_budget},
            "device": {"budget": device_budget},
            "disk": {"paths": disk_path or None},
            "trace": {"file": trace},
            "precision": {"parameters": dtype.value if dtype else None},
        },
    )
    if save is not None:
        training.check_writable("--save", save)

    import torch

    from tiermem.module import TieredModule
    from tiermem.trainer.data import Corpus
    from tiermem.trainer.gpt import GPT, GPTShape
    from tiermem.trainer.loop import adamw, warmup_cosine
    from tiermem.trainer.loop import train as steps_of

    corpus = Corpus(path)
    batches = corpus.batches(batch, sequence, seed)
    torch.manual_seed(seed)
    shape = GPTShape(sequence=sequence, layers=layers, width=width, heads=heads, tied=tied)
    # Rounded before it is wrapped, so that master weights begin alike with and without paging.
    net = GPT(shape).to(getattr(torch, config.precision.parameters or "float32"))
    record = training.Record(steps)
    model = net if unpaged else TieredModule(net, config)
    try:
        optimizer = adamw(model, lr)
        reports = steps_of(
            model,
            optimizer,
            batches,
            steps,
            scheduler=warmup_cosine(optimizer, steps),
            clip=clip or None,
            accumulate=accumulate,
        )
        training.follow(record, reports, training.Progress(steps))
        stats = model.stats() if isinstance(model, TieredModule) else None
        if save is not None and not record.interrupted:
            _save(model.state_dict(), save)
    finally:
        if isinstance(model, TieredModule):
            model.close(restore=False)
    figures = {
        "path": str(path),
        "files": corpus.num_files,
        "files_skipped": corpus.num_skipped,
        "nbytes": len(corpus),
        "parameters": shape.num_parameters,
        "paged": not unpaged,
        **record.to_json(),
        "stats": stats,
    }
    if json:
        print_json(figures)
    else:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(show_header=False)
        table.add_row("model", f"GPT of {shape.num_parameters:,} parameters, {'un' if unpaged else ''}paged")
        table.add_row("text", Text(printable(_describe(corpus))))
        for name, value in training.rows(figures, stats):
            table.add_row(name, value)
        for name, file in (("trace", config.trace.file if not unpaged else None), ("saved", save)):
            if file is not None and not (name == "saved" and record.interrupted):
                table.add_row(name, Text(printable(str(file))))
        Console().print(table)
    if record.interrupted:
        raise typer.Exit(INTERRUPTED)


def _describe(corpus: Any) -> str:
    from tiermem.errors import format_bytes

    skipped = f", {corpus.num_skipped} skipped (binary or unreadable)" if corpus.num_skipped else ""
    return f"{corpus.path}: {format_bytes(len(corpus))} in {corpus.num_files:,} files{skipped}"


def _save(state: dict[str, Any], path: Path) -> None:
    """Write the whole file or nothing: what was there before stays until the new one is complete."""
    import torch

    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torch.save(state, partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
