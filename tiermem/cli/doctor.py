"""``tiermem doctor``: what this machine offers, and what tiermem will do about it."""

from pathlib import Path
from typing import Annotated

import typer

from tiermem.cli.output import JsonOption, print_json, printable


def doctor(
    path: Annotated[
        Path | None,
        typer.Option(help="A folder on the disk to look at; by default where pages go without [disk] paths."),
    ] = None,
    speed: Annotated[bool, typer.Option(help="Measure the disk, which takes seconds.")] = True,
    clear: Annotated[bool, typer.Option("--clear", help="Remove what runs that died left there.")] = False,
    json: JsonOption = False,
) -> None:
    """Say what this machine offers, and what tiermem will do about it.

    Leaves no file behind. Exits with 1 if there is something that tiermem can't do without. Durable runs that
    committed anything are listed and never removed.
    """
    from tiermem.cli.machine import Verdict, examine
    from tiermem.cli.runs import clear_dead, run_folders

    folder = path if path is not None else _default_folder()
    folder = _checked(folder)
    removed = clear_dead(folder) if clear else []
    findings = [*examine(folder, speed), run_folders(folder, removed)]
    bad = any(finding.verdict is Verdict.BAD for finding in findings)
    if json:
        print_json({"path": str(folder), "findings": [finding.to_json() for finding in findings]})
    else:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        styles = {Verdict.GOOD: "green", Verdict.SLOWER: "yellow", Verdict.BAD: "bold red"}
        table = Table(show_lines=True)
        for column in ("what", "", "found", "so"):
            table.add_column(column, overflow="fold")
        for finding in findings:
            table.add_row(
                finding.name,
                Text(finding.verdict.value, style=styles[finding.verdict]),
                Text(printable(finding.found)),
                Text(printable(finding.consequence)),
            )
        Console().print(table)
    if bad:
        raise typer.Exit(1)


def _default_folder() -> Path:
    """Where pages go without [disk] paths: that folder, or the one above it that is there already."""
    from tiermem.config.sections import DiskSection

    folder = DiskSection().folders[0]
    return next(each for each in (folder, *folder.absolute().parents) if each.is_dir())


def _checked(folder: Path) -> Path:
    from tiermem.errors import ConfigError

    if not folder.is_dir():
        raise ConfigError(f"--path: there is no folder {folder}")
    return folder
