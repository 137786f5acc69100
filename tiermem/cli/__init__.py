"""The command line: ``tiermem``.

Each command is a file of this package with a function (or an app of its own, for a group), named in
`_register`. Such a file imports at its top only what is quick; what imports torch or numpy is imported in
the function, so that ``tiermem --help`` answers at once.
"""

from typing import Annotated

import typer

from tiermem.cli import bench, checkpoint, config, demo, doctor, plan, simulate, trace, train, verify
from tiermem.cli.errors import ErrorGroup

app = typer.Typer(
    name="tiermem",
    help="Train models that are larger than memory: tiermem pages them between device, host and disk.",
    cls=ErrorGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,  # "[host]" in a help text is a section of the policy file
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"tiermem {version('tiermem')}")
        except PackageNotFoundError:
            typer.echo("tiermem, run from its source and not installed")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


def _register() -> None:
    app.command("demo")(demo.demo)
    app.command("train")(train.train)
    app.add_typer(trace.app, name="trace")
    app.add_typer(checkpoint.app, name="checkpoint")
    app.add_typer(config.app, name="config")
    app.command("bench")(bench.bench)
    app.command("plan")(plan.plan)
    app.command("doctor")(doctor.doctor)
    app.command("verify")(verify.verify)
    app.command("simulate")(simulate.simulate)


_register()


def main() -> None:
    """Run the command line of this process; does not return."""
    app(prog_name="tiermem")
