"""The commands on traces, and what all commands share: errors, interrupts, closed pipes, quick help."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tiermem.trace.summary
from tiermem.cli import app
from tiermem.cli.output import format_rate, format_seconds, printable
from tiermem.trace import Event, PageInfo, Phase, Reason, Tier, Trace
from tiermem.trace.reader import TraceFile
from tiermem.trace.summary import summarise

HOSTILE = "[bold]\x1b[2J<script>"


@pytest.fixture
def run():
    runner = CliRunner(env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    return lambda *arguments: runner.invoke(app, [str(each) for each in arguments], prog_name="tiermem")


@pytest.fixture
def path(tmp_path):
    trace = Trace.create(
        tmp_path / "run.trace",
        units=["block.0", HOSTILE],
        pages=[PageInfo(0, 0, "parameter", "float32", 4096)],
        budgets={"host": 8192},
    )
    now = 10**9
    trace.step = 0
    trace.record(Event.RESERVE, now, 0, 0, 0, 4096, 0, Tier.HOST, Reason.DEMAND, Phase.FORWARD)
    trace.record(Event.FAULT, now, 0, 0, 0, 4096, Tier.DISK, Tier.HOST, Reason.NOT_PREFETCHED, Phase.FORWARD)
    trace.record(Event.LANDED, now, 10**7, 0, 0, 4096, Tier.DISK, Tier.HOST, Reason.DEMAND, Phase.FORWARD)
    for unit in (0, 1):
        trace.record(
            Event.STALL, now, 10**7, unit, 0, 0, Tier.DISK, Tier.HOST, Reason.NOT_PREFETCHED, Phase.FORWARD
        )
    trace.record(Event.STEP, now, 2 * 10**7)
    trace.close()
    return tmp_path / "run.trace"


def tiermem_process(*arguments, **options):
    # As the installed entry point does it.
    code = "from tiermem.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], timeout=120, check=False, **options
    )


def test_the_summary_for_people(run, path):
    result = run("trace", "summary", path)
    assert result.exit_code == 0
    for text in (
        "block.0",
        "disk → host",
        "not prefetched",
        "4.00 KiB",
        "8.00 KiB",
        "waiting takes 50.0%",
        "10 ms",
    ):
        assert text in result.stdout
    assert "\x1b" not in result.stdout
    assert "[bold]" in result.stdout


def test_the_summary_for_programs(run, path):
    result = run("trace", "summary", path, "--json", "--top", 1)
    assert result.exit_code == 0
    with TraceFile(path) as trace:
        # This trace has no schedule, so nothing is said of the bound.
        assert json.loads(result.stdout) == {**summarise(trace, 1).to_json(), "step_on_disk_link": None}


def test_damage_is_told(run, path):
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert "ends within record 5" in run("trace", "summary", path).stdout
    assert "ends within record 5" in json.loads(run("trace", "summary", path, "--json").stdout)["damage"]
    assert "ends within record 5" in run("trace", "export", path, "--out", path.parent / "out.json").stderr


@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_the_export(run, path, name):
    out = path.parent / name
    result = run("trace", "export", path, "--format", "perfetto", "--out", out)
    assert result.exit_code == 0
    text = gzip.decompress(out.read_bytes()) if name.endswith("gz") else out.read_bytes()
    number = len(json.loads(text)["traceEvents"])
    assert result.stdout.startswith(f"{number} events in")
    again = run("trace", "export", path, "--out", out, "--json")
    assert json.loads(again.stdout) == {"events": number, "file": str(out), "damage": None}


def test_errors_are_one_line(run, path, tmp_path):
    other = tmp_path / "other.trace"
    other.write_text("hello")
    refused = [
        ("trace", "summary", tmp_path / "missing"),
        ("trace", "summary", other),
        ("trace", "export", path, "--out", tmp_path / "missing" / "out.json"),
    ]
    for arguments in refused:
        result = run(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("tiermem: ")
        assert result.stderr.count("\n") == 1
    assert run("trace", "summary").exit_code == 2
    assert run("trace", "export", path, "--format", "other", "--out", "x").exit_code == 2


def test_an_interrupt_is_quiet(run, path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tiermem.trace.summary, "summarise", interrupted)
    result = run("trace", "summary", path)
    assert (result.exit_code, result.output) == (130, "")


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_a_closed_pipe_is_quiet(path, extra):
    reading, writing = os.pipe()
    os.close(reading)
    result = tiermem_process("trace", "summary", path, *extra, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (result.returncode, result.stderr) == (1, b"")


def test_a_process_of_its_own(path):
    result = tiermem_process("trace", "summary", path, "--json", capture_output=True)
    assert (result.returncode, result.stderr) == (0, b"")
    assert json.loads(result.stdout)["steps"]["count"] == 1


def test_help_is_quick():
    code = (
        "import sys\n"
        "from tiermem.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    for arguments in (["--help"], ["trace", "--help"], ["doctor", "--help"], ["--version"]):
        result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=False)
        assert result.returncode == 0, result.stderr.decode()
        assert b"tiermem" in result.stdout


def test_texts_for_a_terminal():
    assert printable("a\x1b[2J\n\ud800\u202eü") == "a�[2J���ü"
    assert [format_seconds(x) for x in (0, 2.5e-6, 0.0831, 1.239, 4000)] == [
        "0",
        "2.5 us",
        "83.1 ms",
        "1.24 s",
        "4,000 s",
    ]
    assert [format_rate(x) for x in (2.1e9, 3.5e6)] == ["2.10 GB/s", "3.5 MB/s"]


def test_every_command_has_its_own_file():
    folder = Path(tiermem.cli.__file__).parent
    for command in app.registered_commands:
        assert (folder / f"{command.name}.py").is_file()
    for group in app.registered_groups:
        assert (folder / f"{group.name}.py").is_file()
