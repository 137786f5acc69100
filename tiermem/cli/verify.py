"""``tiermem verify``: whether what durable runs committed, and what checkpoints have, is as it was written."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiermem.cli.output import JsonOption, print_json, printable

if TYPE_CHECKING:
    from tiermem.checkpoint.examination import Examination
    from tiermem.durable import DurableRun
    from tiermem.record import Commit


@dataclass
class Report:
    """What was found of one run: rows of figures for ``commits``, and ``problems`` in words."""

    path: Path
    commits: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    damaged: bool = False


def verify(
    path: Annotated[
        Path, typer.Argument(help="A durable run's folder, a checkpoint's, or one that such folders are in.")
    ],
    mark: Annotated[
        bool, typer.Option("--mark", help="Note what is damaged, so that a resume takes the commit before.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Read every page of what durable runs committed, or all of a checkpoint, and compare it with its checksums.

    Changes nothing, unless with --mark. Exits with 1 if a commit or checkpoint that should be whole is not.
    """
    from tiermem.checkpoint.examination import checkpoints_in, examine
    from tiermem.errors import ConfigError

    path = path.absolute()
    if not path.is_dir():
        raise ConfigError(f"PATH: there is no folder {path}")
    runs, checkpoints = _runs(path), list(checkpoints_in(path))
    if not runs and not checkpoints:
        raise ConfigError(f"PATH: there is no durable run and no checkpoint in {path}")
    reports = [_examine(each, mark) for each in runs]
    examinations = [examine(each) for each in checkpoints]
    if json:
        print_json([_as_json(each) for each in reports] + [_in_json(each) for each in examinations])
    else:
        _print(reports)
        for each in examinations:
            _tell(each)
    if any(report.damaged for report in reports) or any(each.problems for each in examinations):
        raise typer.Exit(1)


def _runs(path: Path) -> list[Path]:
    from tiermem.durable import search
    from tiermem.folder import RUN

    return [path] if (path / RUN).exists() else [each.path for each in search([path])]


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "path": str(report.path),
        "commits": report.commits,
        "problems": report.problems,
        "damaged": report.damaged,
    }


def _in_json(found: "Examination") -> dict[str, Any]:
    return {
        "path": str(found.path),
        "step": found.step,
        "arrays": found.num_arrays,
        "nbytes": found.nbytes,
        "unchecked": found.unchecked,
        "problems": found.problems,
        "damaged": bool(found.problems),
    }


def _tell(found: "Examination") -> None:
    from tiermem.errors import format_bytes

    so = f"{len(found.problems)} problems" if found.problems else "whole"
    step = "" if found.step is None else f" of step {found.step}"
    typer.echo(printable(f"{found.path}: checkpoint{step}, {found.num_arrays} arrays, "
                         f"{format_bytes(found.nbytes)}: {so}"))  # fmt: skip
    if found.unchecked:
        typer.echo(
            f"{len(found.unchecked)} arrays have no checksums, as earlier versions wrote them: of these it is only "
            "known that they are there"
        )
    for problem in found.problems:
        typer.echo(printable(problem))


def _examine(path: Path, mark: bool) -> Report:
    from tiermem.durable import DurableRun
    from tiermem.folder import InUse
    from tiermem.record import Unreadable

    report = Report(path)
    try:
        run = DurableRun.open(path)
    except InUse as error:
        report.problems.append(str(error))
        return report
    try:
        for number, record in enumerate(run.records):
            if isinstance(record, Unreadable) and not run.empty:
                report.problems.append(
                    f"{run.journal.slot(number)}: {record.reason} (a run that died while it wrote this leaves that too)"
                )
        commits = run.commits()
        if not commits:
            report.problems.append("it has no commit: nothing can be resumed from it")
        for index, commit in enumerate(commits):
            report.commits.append(_figures(run, commit, index < run.num_kept, mark, report))
    finally:
        run.let_go()
    return report


def _figures(run: "DurableRun", commit: "Commit", kept: bool, mark: bool, report: Report) -> dict[str, Any]:
    from tiermem.durable import describe_damage
    from tiermem.layout import pages_of
    from tiermem.record import BLANK
    from tiermem.verify import damage_of

    pages = pages_of(run.layout)
    numbers = [number for number, row in enumerate(commit.rows) if row["what"] != BLANK]
    figures: dict[str, Any] = {
        "generation": commit.generation,
        "step": commit.step,
        "pages": len(numbers),
        "nbytes": sum(pages[number][3] for number in numbers),
        "kept": kept,
        "damaged_pages": None,
    }
    if kept:
        damage = damage_of(run, commit)
        figures["damaged_pages"] = len(damage)
        report.damaged |= bool(damage)
        report.problems += [f"commit {commit.generation}: {describe_damage(each)}" for each in damage]
        if mark:
            run.mark(damage)
    return figures


def _print(reports: list[Report]) -> None:
    from rich.console import Console
    from rich.table import Table

    from tiermem.errors import format_bytes

    console = Console()
    for report in reports:
        console.print(printable(str(report.path)), soft_wrap=True, highlight=False, markup=False)
        table = Table()
        for column in ("commit", "step", "pages", "bytes", "so"):
            table.add_column(column, justify="left" if column == "so" else "right")
        for row in report.commits:
            damaged = row["damaged_pages"]
            so = (
                "written over by now"
                if damaged is None
                else f"{damaged} pages damaged"
                if damaged
                else "whole"
            )
            table.add_row(
                str(row["generation"]), str(row["step"]), str(row["pages"]), format_bytes(row["nbytes"]), so
            )
        if report.commits:
            console.print(table)
        for problem in report.problems:
            console.print(printable(problem), soft_wrap=True, highlight=False, markup=False)
