"""``tiermem plan``: whether a model can be trained on a machine, how fast, and what to change."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiermem.cli import rates
from tiermem.cli.hardware import machine_of
from tiermem.cli.output import JsonOption, format_seconds, print_json, printable

if TYPE_CHECKING:
    from tiermem.planner import Change, Forecast, Model
    from tiermem.planner.forecast import Drafts

DAY = 86_400
YEAR = 365.25


class Precision(enum.Enum):
    """What parameters and activations are computed with."""

    BF16 = "bf16"
    FP32 = "fp32"


def plan(
    params: Annotated[
        str | None, typer.Option(help='The model by its sizes: parameters, such as "70B".')
    ] = None,
    layers: Annotated[int | None, typer.Option(help="With --params: layers.")] = None,
    width: Annotated[int | None, typer.Option(help="With --params; without it, what fits.")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="With --params; 32,000 by default.")] = None,
    heads: Annotated[int | None, typer.Option(help="With --params; by default heads of 128.")] = None,
    config: Annotated[Path | None, typer.Option(help="The model by a Hugging Face config.json.")] = None,
    object: Annotated[
        str | None, typer.Option(help='The model by what makes it, as "package.module:callable".')
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help='The device: its memory, such as "24GiB", or a name, such as "H100".')
    ] = None,
    ram: Annotated[str | None, typer.Option(help='The machine\'s memory, such as "128GiB".')] = None,
    nvme: Annotated[
        list[str] | None,
        typer.Option(help='A disk, as "2TB@7GB/s", or "2TB@7GB/s,5GB/s" with writes; one option for each.'),
    ] = None,
    pcie: Annotated[str | None, typer.Option(help="The link to the device; 25GB/s by default.")] = None,
    tflops: Annotated[
        float | None, typer.Option(help="Peak of the device, in the precision; by default from a table.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Devices that share RAM and disks.")] = 1,
    here: Annotated[
        bool, typer.Option("--here", help="This machine, measured, where no option says more.")
    ] = False,
    path: Annotated[Path | None, typer.Option(help="With --here: a folder on the disk to measure.")] = None,
    host_budget: Annotated[
        str | None, typer.Option(help="[host] budget, instead of what RAM leaves.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences in a batch, for each rank.")] = 1,
    sequence: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 2048,
    precision: Annotated[Precision, typer.Option(help="Of parameters and activations.")] = Precision.BF16,
    accumulation: Annotated[int, typer.Option(help="Batches for one step.")] = 1,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Layers are computed again in backward.")
    ] = False,
    durability: Annotated[
        str, typer.Option(help='[durability] mode: "off", "step", "every:N" or "manual".')
    ] = "off",
    commits: Annotated[int, typer.Option(help="[durability] commits: how many stay whole.")] = 1,
    endurance: Annotated[
        str | None, typer.Option(help='What the disks may be written in their life, such as "600TBW".')
    ] = None,
    advice: Annotated[bool, typer.Option(help="Try changes, which takes some seconds for each.")] = True,
    out: Annotated[Path | None, typer.Option(help="Write the policy file there.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite it.")] = False,
    json: JsonOption = False,
) -> None:
    """Say whether a model can be trained on a machine, how fast, what is slow, and what one change would help most.

    Everything is computed and nothing trained: figures are predictions, and what they assume is printed with them.
    Exits with 1 when the model doesn't fit.
    """
    from tiermem.cli.training import check_writable
    from tiermem.errors import ConfigError
    from tiermem.planner import Training, forecast, try_changes

    if out is not None:
        if out.exists() and not force:
            raise ConfigError(f"--out: {out} is there already; --force overwrites it")
        check_writable("--out", out)
        if ranks > 1:
            raise ConfigError(
                f"--out: a policy file is written for one process, and --ranks {ranks} asks for a forecast of several; "
                "write it without --ranks, and add [ranks] (docs/distributed.md)"
            )
    if commits != 1 and durability == "off":
        raise ConfigError(f"--commits: read {commits}; commits are kept with --durability alone")
    lifetime = rates.size("--endurance", endurance.strip().removesuffix("W")) if endurance else None
    model = _model(params, layers, width, vocabulary, heads, config, object)
    training = Training(batch, sequence, precision.value, accumulation, checkpointing, durability, commits)
    folder = path if path is not None else None
    hardware, assumed = machine_of(
        model, training, gpu, ram, nvme or [], pcie, tflops, ranks, here, folder, host_budget
    )
    drafts: Drafts = {}
    found = forecast(model, hardware, training, drafts)
    changes = try_changes(found, drafts) if advice else []
    if out is not None and found.fits:
        _write(out, found, path)
    assumed = [*model.assumed, *assumed, *_assumptions(found)]
    if json:
        print_json(_json(found, changes, assumed, lifetime, out))
    else:
        _print(found, changes, assumed, lifetime, out)
    if not found.fits:
        raise typer.Exit(1)


def _model(
    params: str | None,
    layers: int | None,
    width: int | None,
    vocabulary: int | None,
    heads: int | None,
    config: Path | None,
    object: str | None,
) -> Model:
    from tiermem.errors import ConfigError
    from tiermem.planner import from_config, from_object, from_sizes

    if sum(each is not None for each in (params, config, object)) != 1:
        raise ConfigError("a model is given by one of --params with --layers, --config, and --object")
    if params is None:
        sizes = {"--layers": layers, "--width": width, "--vocabulary": vocabulary, "--heads": heads}
        given = [name for name, value in sizes.items() if value is not None]
        if given:
            raise ConfigError(f"{', '.join(given)}: the model's own are used; allowed with --params alone")
        if config is not None:
            return from_config(config)
        assert object is not None
        return from_object(object)
    if layers is None:
        raise ConfigError("--params needs --layers")
    return from_sizes(
        rates.count("--params", params), layers, width=width, vocabulary=vocabulary, heads=heads
    )


def _assumptions(found: Forecast) -> list[str]:
    from tiermem.planner.forecast import SYSTEM_SHARE

    hardware = found.hardware
    said = (
        []
        if hardware.utilisation == 1
        else [f"training reaches {100 * hardware.utilisation:.0f} % of that peak"]
    )
    said += [
        f"{100 * SYSTEM_SHARE:.0f} % of each memory is left to the system and to what allocators lose; attention "
        "doesn't keep its scores",
        "units run in the order in which the model has them; hooks cost nothing; the disk keeps its rate",
    ]
    if found.training.every:
        said.append("what commits write beside the plan is written while nothing else goes on")
    if hardware.device_nbytes is not None:
        said.append("waits for both links are added up, though some may overlap")
    if hardware.ranks > 1:
        said.append(
            f"{hardware.ranks} ranks: pages are sharded and each rank takes its own batch. traffic between "
            "them is taken to cost no more than the link to a device, where tiermem's goes through host memory"
        )
    return said


def _write(out: Path, found: Forecast, folder: Path | None) -> None:
    from tiermem.config import Config

    text = Config(**found.policy([folder.absolute()] if folder is not None else [])).to_toml()
    training = found.training
    head = (
        f"# Planned for {found.model.name}, {found.model.num_parameters:,} parameters: batch {training.batch}, "
        f"sequence {training.sequence}, {training.precision}.\n"
    )
    if found.disk_nbytes and folder is None:
        head += (
            "# [disk] paths isn't set: pages go where the policy file's documentation says, without any.\n"
        )
    out.write_text(printable_lines(head) + text, encoding="utf-8")


def printable_lines(text: str) -> str:
    """``text`` with each line made :func:`printable`: a model's name may hold anything."""
    return "".join(printable(line) + "\n" for line in text.splitlines())


def _wear(found: Forecast, lifetime: int | None) -> float | None:
    """Days until the disks are written as often as they are made for."""
    written = found.nbytes_written_a_day
    return lifetime / written if lifetime and written else None


def _json(
    found: Forecast, changes: list[Change], assumed: list[str], lifetime: int | None, out: Path | None
) -> dict[str, Any]:
    from tiermem.planner import best

    helps = best(changes)
    return {
        **found.to_dict(),
        "endurance_nbytes": lifetime,
        "endurance_days": _wear(found, lifetime),
        "changes": [change.to_dict() for change in changes],
        "best_change": helps.name if helps else None,
        "assumed": assumed,
        "policy_file": str(out) if out is not None and found.fits else None,
    }


def _rows(found: Forecast, lifetime: int | None) -> list[tuple[str, str]]:
    from tiermem.errors import format_bytes

    hardware = found.hardware
    rows = [("model", f"{found.model.num_parameters:,} in {found.num_units} units")]
    for kind, places in found.state.items():
        kept = [
            f"{format_bytes(places[key])} {key}"
            for key in ("always on device", "always on host")
            if places[key]
        ]
        if found.disk_nbytes or hardware.device_nbytes is not None:
            rows.append((kind, f"{format_bytes(places['nbytes'])}" + "".join(f", {each}" for each in kept)))
        else:
            rows.append((kind, f"{format_bytes(places['nbytes'])}, all of it on the host"))
    for tier, nbytes in found.budgets.items():
        rows.append(
            (
                f"{tier} budget",
                f"{format_bytes(nbytes)}; pages of this size need {format_bytes(found.smallest[tier])} at once",
            )
        )
    rows += [
        ("activations", format_bytes(found.activations)),
        ("memory of the process", format_bytes(found.peak_nbytes)),
        ("disk space", format_bytes(found.disk_nbytes) if found.disk_nbytes else "none: all fits the host"),
        ("step", f"{format_seconds(found.step)}, {found.tokens_per_second:,.1f} tokens/s"),
        (
            "of it",
            f"compute {format_seconds(found.compute)}, optimizer {format_seconds(found.update)}, handling transfers "
            f"{format_seconds(found.effort)}"
            + "".join(f", waiting for {name} {format_seconds(each)}" for name, each in found.waits.items()),
        ),
    ]
    if found.carried:
        carried = ", ".join(f"{name} {format_bytes(each)}" for name, each in found.carried.items())
        rows.append(("moved in a step", carried))
    busy = found.busy[found.bottleneck]
    rows.append(
        ("bottleneck", f"{found.bottleneck}, busy {100 * min(1.0, busy / found.step):.0f} % of a step")
    )
    if found.disk_nbytes:
        written = found.nbytes_written_a_day
        text = f"{format_bytes(written)} a day"
        days = _wear(found, lifetime)
        if days is not None:
            text += (
                f": the endurance lasts {days:,.0f} days"
                if days < 2 * YEAR
                else f": {days / YEAR:,.1f} years"
            )
        rows.append(("written to disk", text))
    return rows


def _print(
    found: Forecast, changes: list[Change], assumed: list[str], lifetime: int | None, out: Path | None
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tiermem.planner import best

    console = Console()
    name = printable(found.model.name)
    if found.fits:
        console.print(Text(f"{name}: it fits", style="bold green"))
        table = Table(show_header=False)
        for what, value in _rows(found, lifetime):
            table.add_row(what, Text(printable(value)))
        console.print(table)
    else:
        console.print(Text(f"{name}: it doesn't fit", style="bold red"))
        console.print(Text(printable(found.reason)))
    if changes:
        table = Table(title="One change", title_justify="left")
        for column in ("change", "step", "tokens/s", "times as fast"):
            table.add_column(column, justify="left" if column == "change" else "right")
        for change in changes:
            if not change.after.fits:
                table.add_row(change.name, "doesn't fit", "", "")
                continue
            after = change.after
            gain = f"{change.gain:.2f}" if found.fits else ""
            table.add_row(change.name, format_seconds(after.step), f"{after.tokens_per_second:,.1f}", gain)
        console.print(table)
        helps = best(changes)
        console.print(
            Text(f"what would help most: {helps.name}" if helps else "no single change of these would help"),
            style="bold",
        )
    console.print("Assumed:", highlight=False)
    for each in assumed:
        console.print(Text(f"- {printable(each)}"))
    if out is not None and found.fits:
        console.print(Text(f"The policy file is {printable(str(out))}"))
