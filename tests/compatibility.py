"""The table of what works with what, made of the tests that show it: ``python -m tests.compatibility``.

A test says ``@pytest.mark.compatible(area, row, column, result)``. Words in braces are the test's parameters;
``result`` is "equal" (the same bits as without paging) unless the test shows a refusal: then it is "refused".
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
WIDTH = 120

HEAD = """\
# Compatibility

What works with what. This page is made of the tests: each entry stands for at least one that CI runs, on the cpu and,
mostly, on a stand-in device with memory of its own (`make docs` writes it, and a test checks that it is current).

- **equal**: outputs, losses, gradients, parameters, buffers and optimizer state are those of the run that isn't paged,
  bit for bit (`torch.equal`), in the smallest budget that works.
- **works**: it does what it says; there is no run without paging to compare with.
- **refused**: an error that names the module or the call, and says what to do instead.
"""

ORDER = [
    "Models of transformers",
    "Pretrained models",
    "PEFT",
    "Frozen and quantised weights",
    "Autograd",
    "Parameters in tiles",
    "torch.compile",
    "Trainers",
]


class Rows:
    """A plugin of pytest that reads the marks of all collected tests."""

    def __init__(self) -> None:
        self.areas: dict[str, dict[str, dict[str, set[str]]]] = {area: {} for area in ORDER}
        self.versions: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            given: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
            for mark in item.iter_markers("compatible"):
                area, row, column, result = (*mark.args, *("", "equal")[len(mark.args) - 2 :])
                rows = self.areas.setdefault(area, {})
                rows.setdefault(row.format(**given), {}).setdefault(column, set()).add(result)


def table(rows: dict[str, dict[str, set[str]]]) -> list[str]:
    """One area as lines of Markdown."""
    columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
    heads = ["", *(column or "result" for column in columns)]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for row, cells in rows.items():
        found = [", ".join(sorted(cells.get(column, ()))) for column in columns]
        lines.append(f"| {row} | {' | '.join(found)} |")
    return lines


def document() -> str:
    """The whole page."""
    files = sorted(str(path) for path in TESTS.glob("test_*.py") if "mark.compatible" in path.read_text())
    plugin = Rows()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *files], plugins=[plugin])
    if code != 0:
        sys.exit(said.getvalue())
    parts = [HEAD.rstrip()]
    for area, rows in plugin.areas.items():
        if rows:
            parts.append("\n".join([f"## {area}", "", *table(rows)]))
    parts.append(releases())
    return "\n\n".join(parts) + "\n"


def releases() -> str:
    """The releases that the tests run with, from the constraints."""
    wanted = ("torch", "transformers", "peft", "accelerate", "pytorch-lightning")
    lines = (TESTS.parent / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    named = ", ".join(f"{name} {pinned[name]}" for name in wanted if name in pinned)
    return f"CI runs these with {named}."


if __name__ == "__main__":
    sys.stdout.write(document())
