"""What the commands print with: JSON for programs, and texts that can't do harm in a terminal."""

import json
from typing import Annotated, Any

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]


def print_json(data: Any) -> None:
    """One JSON document on stdout; keys keep their order."""
    typer.echo(json.dumps(data, indent=2))


def printable(text: str) -> str:
    """``text`` with everything replaced that would steer a terminal (escapes, line ends, right-to-left)."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def format_seconds(seconds: float) -> str:
    """``seconds`` for people: "1.24 s", "83.1 ms", "12.0 us"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}" if abs(seconds) < 1000 * size else f"{seconds:,.0f} s"
    return f"{seconds * 1e6:.3g} us" if seconds else "0"


def format_rate(nbytes_per_second: float) -> str:
    """A bandwidth for people, in powers of 1000 as disks are sold: "2.10 GB/s"."""
    if nbytes_per_second >= 1e9:
        return f"{nbytes_per_second / 1e9:.2f} GB/s"
    return f"{nbytes_per_second / 1e6:.1f} MB/s"
