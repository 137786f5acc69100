"""``tiermem checkpoint``: what a checkpoint has, in which other formats it can be had, which of a series are kept."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiermem.cli.output import JsonOption, print_json, printable

if TYPE_CHECKING:
    from tiermem.checkpoint.source import Source

app = typer.Typer(
    help="Look into checkpoints, write them in other formats, take over those of others, prune a series.",
    no_args_is_help=True,
)

SourceArgument = Annotated[
    Path,
    typer.Argument(
        help="A folder of model.save(), safetensors (a file or a Hugging Face folder), a file of torch.save(), a "
        "folder of torch.distributed.checkpoint, or one of DeepSpeed's ZeRO-3."
    ),
]


class Format(enum.Enum):
    """What can be written."""

    SAFETENSORS = "safetensors"


class DType(enum.Enum):
    """What floating-point tensors can be converted to."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Compression(enum.Enum):
    """How chunks can be compressed."""

    NONE = "none"
    ZSTD = "zstd"
    BLOSC = "blosc"
    GZIP = "gzip"


@app.command()
def show(path: SourceArgument, json: JsonOption = False) -> None:
    """List the tensors of a checkpoint: names, dtypes, shapes, bytes."""
    from tiermem.checkpoint.dtypes import name_of
    from tiermem.errors import format_bytes

    source = _open(path)
    try:
        rows: list[dict[str, Any]] = [
            {
                "group": key.group,
                "name": key.name,
                "dtype": name_of(entry.dtype),
                "shape": list(entry.size),
                "nbytes": entry.numel * entry.dtype.itemsize,
            }
            for key, entry in source.entries.items()
        ]
        total = sum(row["nbytes"] for row in rows)
        figures: dict[str, Any] = {
            "path": str(source.path),
            "step": source.attributes.get("step"),
            "nbytes": total,
            "tied": dict(source.tied),
            "optimizer": source.param_groups is not None,
            "tensors": rows,
        }
        if json:
            print_json(figures)
            return
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table("group", "name", "dtype", "shape", "bytes")
        for row in rows:
            shape = " x ".join(map(str, row["shape"])) or "scalar"
            table.add_row(
                row["group"], Text(printable(row["name"])), row["dtype"], shape, format_bytes(row["nbytes"])
            )
        console = Console()
        console.print(table)
        step = "" if figures["step"] is None else f" of step {figures['step']}"
        console.print(f"{len(rows)} tensors{step}, {format_bytes(total)}", highlight=False)
    finally:
        source.close()


@app.command()
def export(
    path: SourceArgument,
    out: Annotated[Path, typer.Argument(help="The folder to write; it must not be there yet.")],
    format: Annotated[Format, typer.Option(help="What to write.")] = Format.SAFETENSORS,
    dtype: Annotated[DType | None, typer.Option(help="Convert floating-point tensors to it.")] = None,
    masters: Annotated[
        bool, typer.Option("--masters", help="Write float32 master weights where there are some.")
    ] = False,
    shard: Annotated[str, typer.Option(help="The most bytes of one file.")] = "5GB",
    adapter: Annotated[
        str | None,
        typer.Option(
            help="Write the LoRA adapter of this name alone, as PEFT does; PEFT's own is called default."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write parameters and buffers as safetensors, in Hugging Face's layout, in bounded memory.

    The folder is there whole, or not at all. config.json and a tokenizer are not in a checkpoint: put them beside it.
    """
    import torch

    from tiermem.checkpoint.adapters import STEM, Adapter
    from tiermem.checkpoint.safetensors import export as write
    from tiermem.config import Size
    from tiermem.errors import ConfigError

    try:
        shard_nbytes = Size.parse(shard).nbytes
    except ValueError as error:
        raise ConfigError(f"--shard: {error}") from error
    if not shard_nbytes:
        raise ConfigError(f"--shard: read {shard}; allowed is a number of bytes, such as 5GB")
    options: dict[str, Any] = {}
    if adapter is not None:
        chosen = Adapter(adapter)
        options = {"only": chosen.has, "rename": chosen.rename, "stem": STEM}
    source = _open(path)
    try:
        files = write(
            source,
            out,
            dtype=getattr(torch, dtype.value) if dtype is not None else None,
            shard_nbytes=shard_nbytes,
            masters=masters,
            **options,
        )
    finally:
        source.close()
    if json:
        print_json(
            {"files": [str(file) for file in files], "nbytes": sum(file.stat().st_size for file in files)}
        )
    else:
        for file in files:
            typer.echo(printable(str(file)))


@app.command("import")
def import_(
    path: SourceArgument,
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    compression: Annotated[Compression, typer.Option(help="Of the chunks.")] = Compression.NONE,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a checkpoint that is there.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Write a checkpoint of any known format as a folder of Zarr arrays, in bounded memory.

    Not needed for training: model.load() reads all of these formats itself.
    """
    from tiermem.checkpoint.convert import convert
    from tiermem.errors import format_bytes

    source = _open(path)
    try:
        nbytes = convert(source, out, compression=compression.value, overwrite=overwrite)
        count = len(source.entries)
    finally:
        source.close()
    if json:
        print_json({"path": str(out), "tensors": count, "nbytes": nbytes})
    else:
        typer.echo(printable(f"{out}: {count} tensors, {format_bytes(nbytes)}"))


@app.command()
def prune(
    folder: Annotated[Path, typer.Argument(help="A folder of checkpoints, as tiermem.Checkpoints makes it.")],
    keep_last: Annotated[int, typer.Option(min=1, help="How many of the newest to keep.")] = 3,
    keep_every: Annotated[
        int | None, typer.Option(min=1, help="Keep those of steps that are a multiple of it.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    json: JsonOption = False,
) -> None:
    """Remove old checkpoints of a series: the folders step-N that no rule keeps."""
    from tiermem.checkpoint.series import Checkpoints

    series = Checkpoints(folder, keep_last, keep_every)
    steps = series.doomed() if dry_run else series.prune()
    if json:
        print_json(
            {
                "removed": [] if dry_run else steps,
                "would_remove": steps if dry_run else [],
                "kept": _kept(series, steps),
            }
        )
    else:
        for step in steps:
            typer.echo(printable(f"{'would remove' if dry_run else 'removed'} {series.path(step)}"))
        typer.echo(f"{len(_kept(series, steps))} kept, {len(steps)} {'to remove' if dry_run else 'removed'}")


def _kept(series: Any, gone: list[int]) -> list[int]:
    return [step for step in series.steps() if step not in gone]


def _open(path: Path) -> Source:
    from tiermem.checkpoint.formats import open_source

    return open_source(path)
