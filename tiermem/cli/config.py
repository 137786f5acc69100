"""``tiermem config``: policy files out of the configurations of others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tiermem.cli.output import JsonOption, print_json, printable

app = typer.Typer(help="Make policy files.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """Make policy files."""


@app.command("from-deepspeed")
def from_deepspeed(
    file: Annotated[Path, typer.Argument(help="DeepSpeed's configuration, ds_config.json.")],
    out: Annotated[Path | None, typer.Option(help="Write the policy there; it is printed otherwise.")] = None,
    json: JsonOption = False,
) -> None:
    """Write the policy file of a DeepSpeed configuration, and say what became of each of its keys.

    Budgets are not in such a file: set [host] and [device] budget, or ask tiermem plan. What the training script has to
    change is in docs/deepspeed.md.
    """
    from tiermem.config.deepspeed import translate
    from tiermem.errors import ConfigError

    config, verdicts = translate(file)
    policy = config.to_toml()
    if out is not None:
        try:
            with open(out, "x", encoding="utf-8") as opened:
                opened.write(policy)
        except OSError as error:
            raise ConfigError(f"--out: {out}: {error.strerror}") from error
    if json:
        rows = [
            {"key": each.key, "value": each.value, "fate": each.fate.value, "why": each.why}
            for each in verdicts
        ]
        print_json({"policy": policy, "keys": rows})
        return
    width = max((len(each.key) for each in verdicts), default=0)
    for each in verdicts:
        typer.echo(printable(f"{each.key:{width}}  {each.fate.value}: {each.why}"), err=out is None)
    if out is None:
        typer.echo(policy, nl=False)
    else:
        typer.echo(printable(f"\n{out}: written"))
