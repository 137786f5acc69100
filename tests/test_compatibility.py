"""docs/compatibility.md says what the tests show."""

import subprocess
import sys
from pathlib import Path

from tests.compatibility import table

ROOT = Path(__file__).parent.parent


def test_the_page_is_current() -> None:
    # In a process of its own: collecting would disturb the tests that run.
    done = subprocess.run(
        [sys.executable, "-m", "tests.compatibility"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    current = (ROOT / "docs" / "compatibility.md").read_text()
    assert current == done.stdout, "run: make docs"


def test_rows_and_columns() -> None:
    rows = {"A": {"x": {"equal"}, "y": {"refused"}}, "B": {"y": {"equal", "refused"}}}
    assert table(rows) == [
        "|  | x | y |",
        "| --- | --- | --- |",
        "| A | equal | refused |",
        "| B |  | equal, refused |",
    ]
