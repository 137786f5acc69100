"""How a command ends: an error in one line, an interrupt and a closed pipe quietly.

Exit status: 0 good, 1 the command's own "no", 2 refused (usage, or an error of tiermem's), 130 interrupted. A
reader of the output that went away is a 1 too, as it is for the libraries that print here.
"""

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from tiermem.cli.output import printable
from tiermem.errors import TiermemError

REFUSED = 2
INTERRUPTED = 128 + 2
PIPE_CLOSED = 1


class ErrorGroup(TyperGroup):
    """A group of commands whose errors are shown to people."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; turns the errors it may end with into exit statuses."""
        try:
            result = super().invoke(ctx)
            # Here, and not when the interpreter ends, where a closed pipe could no longer be caught.
            sys.stdout.flush()
        except TiermemError as error:
            lines = [printable(line) for line in str(error).splitlines()] or [type(error).__name__]
            typer.echo("tiermem: " + "\n".join(lines), err=True)
            raise typer.Exit(REFUSED) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(INTERRUPTED) from error
        except BrokenPipeError as error:
            # The interpreter flushes once more as it ends: into nothing.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(PIPE_CLOSED) from error
        return result
