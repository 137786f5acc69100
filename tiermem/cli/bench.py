"""``tiermem bench``: the measurements of a source checkout."""

import ast
import re
import subprocess
import sys
import tempfile
from json import loads
from pathlib import Path
from typing import Annotated, Any

import typer

from tiermem.cli.output import JsonOption, print_json, printable


def bench(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Which to run; all by default.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Say what there is, and run nothing.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Smaller and shorter, where a script offers it.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Run the scripts of benchmarks/, each of which prints one table: machine, sizes, baseline, ratio.

    They are not installed with the package: run this in a checkout of the sources. Exits with 1 if one of them fails.
    """
    from tiermem.errors import ConfigError

    scripts = _scripts()
    unknown = [name for name in names or () if name not in scripts]
    if unknown:
        raise ConfigError(f"there is no benchmark {unknown[0]!r}; allowed are {', '.join(scripts)}")
    if listing:
        about = {name: _title(path) for name, path in scripts.items()}
        if json:
            print_json(about)
        else:
            for name, title in about.items():
                typer.echo(f"{name:12}{printable(title)}")
        return
    results = {name: _run(scripts[name], quick, json) for name in dict.fromkeys(names or scripts)}
    if json:
        print_json(results)
    failed = [name for name, result in results.items() if result["status"]]
    if failed:
        typer.echo(f"tiermem: failed: {', '.join(failed)}", err=True)
        raise typer.Exit(1)


def _folder() -> Path:
    """``benchmarks/`` of the checkout that this package runs from, or that the working directory is in."""
    from tiermem.errors import ConfigError

    starts = (Path(__file__).resolve(), Path.cwd() / "here")
    for root in (root for start in starts for root in start.parents):
        if (root / "benchmarks").is_dir() and (root / "tiermem" / "cli").is_dir():
            return root / "benchmarks"
    raise ConfigError(
        "there are no benchmarks here: they are scripts of the source checkout and not installed with the package; "
        "run this in a checkout, where the folder benchmarks/ is"
    )


def _scripts() -> dict[str, Path]:
    return {path.stem: path for path in sorted(_folder().glob("[!_]*.py"))}


def _title(path: Path) -> str:
    """The first line of a script's docstring."""
    document = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    return document.splitlines()[0] if document else ""


def _run(path: Path, quick: bool, json: bool) -> dict[str, Any]:
    """Run one script; with ``json``, its figures (or its text where it has no others) are in the result."""
    command = [sys.executable, str(path)]
    usage = subprocess.run([*command, "--help"], capture_output=True, text=True)
    offered = usage.stdout if usage.returncode == 0 else ""
    if quick and "--quick" in offered:
        command.append("--quick")
    if not json:
        typer.secho(f"== {path.stem}: {printable(_title(path))}", bold=True)
        return {"status": subprocess.run(command).returncode}
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "figures.json"
        if re.search(r"--json [A-Z]", offered):
            command += ["--json", str(written)]
        elif "--json" in offered:
            command.append("--json")
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        text = written.read_text() if written.exists() else done.stdout
    try:
        return {"status": done.returncode, "figures": loads(text)}
    except ValueError:
        return {"status": done.returncode, "text": text}
