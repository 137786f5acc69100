"""The doctor: what it finds here, what it says of worse machines, and that it leaves nothing behind."""

import errno
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tiermem.aio import Speed
from tiermem.aio.memory import Memory
from tiermem.cli import app, machine
from tiermem.cli.machine import Verdict

NAMES = ["kernel", "cores", "memory", "huge pages", "memlock", "device", "AIO", "disk space", "O_DIRECT"]


@pytest.fixture
def run():
    runner = CliRunner(env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    return lambda *arguments: runner.invoke(app, ["doctor", *map(str, arguments)])


def test_here(run, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "SPEED_NBYTES", 4 << 20)
    result = run("--path", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["path"] == str(tmp_path)
    findings = {finding["name"]: finding for finding in report["findings"]}
    assert list(findings) == [*NAMES, "disk speed", "runs"]
    assert all(finding["verdict"] in ("good", "slower") for finding in findings.values())
    assert findings["memory"]["figures"]["total"] >= findings["memory"]["figures"]["free"] > 0
    assert findings["disk speed"]["figures"]["read"] > 0
    assert list(tmp_path.iterdir()) == []


def test_for_people_and_without_the_speed(run, tmp_path):
    result = run("--path", tmp_path, "--no-speed")
    assert result.exit_code == 0, result.output
    for name in NAMES:
        assert name in result.stdout
    assert "disk speed" not in result.stdout


def test_the_default_folder_is_where_pages_go(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    report = json.loads(run("--no-speed", "--json").stdout)
    assert report["path"] == str(tmp_path)
    own = tmp_path / f"tiermem-{os.getuid()}"
    own.mkdir()
    assert json.loads(run("--no-speed", "--json").stdout)["path"] == str(own)


def test_no_such_folder(run, tmp_path):
    result = run("--path", tmp_path / "missing")
    assert result.exit_code == 2
    assert "no folder" in result.stderr


def test_aio_used_up(monkeypatch):
    def refused(*_):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(machine, "open_queue", refused)
    monkeypatch.setattr(machine, "_number", lambda path: 65536)
    finding = machine.asynchronous_io()
    assert finding.verdict is Verdict.SLOWER
    assert finding.found == "refused (EAGAIN: fs.aio-max-nr is 65536, 65536 in use, 32 asked for)"
    assert "threads engine is used" in finding.consequence


@pytest.mark.parametrize(
    "error", [OSError(errno.EPERM, "Operation not permitted"), ImportError("no libaio.so.1")]
)
def test_aio_refused_or_missing(monkeypatch, error):
    def refused(*_):
        raise error

    monkeypatch.setattr(machine, "open_queue", refused)
    finding = machine.asynchronous_io()
    assert finding.verdict is Verdict.SLOWER
    assert str(error.args[-1]) in finding.found


def test_a_disk_that_can_not_be_used(run, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(machine, "measure", full)
    monkeypatch.setattr(machine, "File", full)
    result = run("--path", tmp_path, "--json")
    assert result.exit_code == 1
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}
    for name in ("direct io", "disk speed"):
        assert findings[name]["verdict"] == "bad"
        assert "Read-only file system" in findings[name]["found"]
    assert list(tmp_path.iterdir()) == []


def test_memory_that_looks_like_a_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_filesystem", lambda folder: "tmpfs")
    finding = machine.disk_space(tmp_path)
    assert finding.verdict is Verdict.SLOWER
    assert "is memory" in finding.consequence


def test_a_speed_through_the_page_cache_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "measure", lambda folder, nbytes: Speed(2e9, 1e9, False, "threads"))
    finding = machine.disk_speed(tmp_path)
    assert "reads 2.00 GB/s, writes 1.00 GB/s" in finding.found
    assert "through the page cache" in finding.found


def test_a_cgroups_limit_counts(monkeypatch):
    monkeypatch.setattr(machine, "look", lambda: Memory(1 << 30, 1 << 29, 2 << 20, 1 << 20))
    finding = machine.memory()
    assert finding.figures == {"total": 1 << 30, "free": 1 << 20, "limit": 2 << 20}
    assert "1.00 MiB of it for this process" in finding.found
    assert "is 819.20 KiB" in finding.consequence


def test_small_pages(monkeypatch, tmp_path):
    setting = tmp_path / "enabled"
    monkeypatch.setattr(machine, "HUGE_PAGES", setting)
    assert machine.huge_pages().verdict is Verdict.SLOWER
    setting.write_text("always madvise [never]\n")
    assert machine.huge_pages().figures == {"setting": "never"}
    setting.write_text("[always] madvise never\n")
    assert machine.huge_pages().verdict is Verdict.GOOD


def test_the_filesystems_type():
    assert machine._filesystem(Path("/proc")) == "proc"
