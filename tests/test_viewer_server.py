"""The viewer's server, its page as text, and the commands around them; no browser needed."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.viewer_traces import Writer
from tiermem.cli import app
from tiermem.cli.top import frame, watch
from tiermem.viewer.page import SCRIPTS, served, template
from tiermem.viewer.run import Run
from tiermem.viewer.server import Server
from tiermem.viewer.session import Mode, Session

STATIC = Path(__file__).parent.parent / "tiermem" / "viewer" / "static"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Writer(tmp_path / "run.trace", seed=1).write(3).close()


@pytest.fixture
def server(path: Path):
    session = Session([path], Mode.SINGLE)
    server = Server(session)
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server
    server.stop()
    thread.join()
    server.close()
    session.close()


def ask(server: Server, path: str) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(server.url).port, timeout=30)
    connection.request("GET", path)
    answer = connection.getresponse()
    found = answer.status, answer.read(), dict(answer.getheaders())
    connection.close()
    return found


def test_nothing_is_told_without_the_secret(server: Server) -> None:
    for path in ("/", "/session", "/wrong/session", f"/{server.secret[:-1]}/session", "//", "/%00/"):
        status, content, _ = ask(server, path)
        assert status == 403
        assert b"blocks" not in content
    assert server.answer("/ä/session")[0] == 403


def test_what_there_is_not_is_not_found(server: Server) -> None:
    for path in (
        "nothing",
        "tile/0/0",
        "tile/1/0/0",
        "tile/0/99/0",
        "tile/0/0/-1",
        "tile/0/1e3/0",
        "units/7",
        "session?seen=x",
        "../../etc/passwd",
        "static/main.js",
        "session/0",
    ):
        assert ask(server, f"/{server.secret}/{path}")[0] == 404
    assert server.answer(f"/{server.secret}/tile/0/٣/0")[0] == 404


def test_the_answers_are_kept_by_nobody_and_taken_for_nothing_else(server: Server) -> None:
    for path in ("", "session", "tile/0/20/0", "units/0"):
        status, content, headers = ask(server, f"/{server.secret}/{path}")
        assert status == 200
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        if path:
            json.loads(content)


def test_the_server_listens_on_this_machine_only(server: Server) -> None:
    assert urlsplit(server.url).hostname == "127.0.0.1"
    assert server._http.server_address[0] == "127.0.0.1"


def test_the_page_fetches_nothing_and_allows_only_its_own_script() -> None:
    page = served()
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)|@import|url\(""", page)
    assert not re.search(r"https?://", page)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    for tag, kind in (("script", "script-src"), ("style", "style-src")):
        inside = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert inside
        digest = base64.b64encode(hashlib.sha256(inside[1].encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy[1]


def test_every_script_is_in_the_page_behind_what_it_imports() -> None:
    assert {path.stem for path in STATIC.glob("*.js")} == set(SCRIPTS)
    for number, name in enumerate(SCRIPTS):
        text = (STATIC / f"{name}.js").read_text()
        imported = re.findall(r'from "\./(\w+)\.js"', text)
        assert set(imported) <= set(SCRIPTS[:number]), name
    assert not re.search(r"^(import|export)\b", "".join(template()), re.MULTILINE)


def lightness_and_tint(colour: str, matrix: np.ndarray) -> np.ndarray:
    """A colour as somebody sees it, in CIE L*a*b*."""
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(matrix @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(to_xyz @ seen / np.array([0.9505, 1, 1.089]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


# Machado, Oliveira and Fernandes, "A physiologically-based model for simulation of color vision deficiency" (2009),
# at full severity, on linear RGB.
VISION = {
    "usual": np.eye(3),
    "protanopia": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
    "deuteranopia": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    "tritanopia": np.array([[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]]),
}
TOLD_APART = (
    ("forward", "backward"),
    ("backward", "optimizer"),
    ("forward", "optimizer"),
    ("optimizer", "stall"),
    ("forward", "stall"),
    ("backward", "stall"),
    ("up", "down"),
    ("device", "host"),
    ("host", "disk"),
    ("device", "disk"),
)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("vision", VISION)
def test_colours_are_told_apart_whatever_the_colour_vision(theme: str, vision: str) -> None:
    style = (STATIC / "colours.css").read_text()
    colours = dict(re.findall(r"--(\w+): (#\w{6})", style.split(":root[data-theme")[0]))
    if theme == "dark":
        colours |= dict(re.findall(r"--(\w+): (#\w{6})", style.split(":root[data-theme")[1].split("}")[0]))
    seen = {name: lightness_and_tint(colour, VISION[vision]) for name, colour in colours.items()}
    for one, other in TOLD_APART:
        assert np.linalg.norm(seen[one] - seen[other]) > 15, (one, other)
    for name in ("text", "dim"):
        for behind in ("ground", "panel"):
            assert abs(seen[name][0] - seen[behind][0]) > 40
    # What is drawn stands out from what it is drawn on.
    for name in ("forward", "backward", "optimizer", "stall", "up", "down", "host"):
        assert np.linalg.norm(seen[name] - seen["ground"]) > 25, name


def test_both_ways_to_dark_have_the_same_colours() -> None:
    style = (STATIC / "colours.css").read_text()
    chosen = re.search(r':root\[data-theme="dark"\] \{(.*?)\}', style, re.DOTALL)
    system = re.search(r':root:not\(\[data-theme="light"\]\) \{(.*?)\}', style, re.DOTALL)
    assert chosen
    assert system
    assert chosen[1].split() == system[1].split()


def invoke(*arguments: object):
    runner = CliRunner(env={"COLUMNS": "160", "TERMINAL_WIDTH": "160"})
    return runner.invoke(app, ["trace", *map(str, arguments)])


def test_what_can_not_be_viewed_is_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("hello")
    for arguments, told in (
        (("view", tmp_path / "missing"), "can't open the trace"),
        (("view", tmp_path / "other"), "not a tiermem trace"),
        (("view", path, "--compare", tmp_path / "other", "--out", "x"), "not a tiermem trace"),
        (("view", path, path, "--compare", path), "one trace"),
        (("view", path, "--follow", "--out", "x"), "--follow"),
        (("view", path, "--out", tmp_path / "none" / "out.html"), "there is no folder"),
        (("top", tmp_path / "other"), "not a tiermem trace"),
    ):
        result = invoke(*arguments)
        assert (result.exit_code, result.stdout) == (2, ""), arguments
        assert told in result.stderr


def test_a_port_that_is_taken_is_refused(path: Path, server: Server) -> None:
    result = invoke("view", path, "--no-browser", "--port", urlsplit(server.url).port)
    assert result.exit_code == 2
    assert "Address already in use" in result.stderr


def test_a_file_appears_whole_or_not_at_all(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.html"
    out.write_text("before")

    def full(_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("tiermem.viewer.page._data", full)
    result = invoke("view", path, "--out", out)
    assert result.exit_code == 2
    assert "No space left" in result.stderr
    assert out.read_text() == "before"
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


def test_a_file_that_would_be_too_large_leaves_the_finest_out(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiermem.viewer.tiles.MOST_SPANS", 10)
    invoke("view", path, "--out", tmp_path / "whole.html")
    monkeypatch.setattr("tiermem.viewer.page.MOST_NBYTES", 50_000)
    invoke("view", path, "--out", tmp_path / "small.html")
    whole, small = ((tmp_path / f"{name}.html").stat().st_size for name in ("whole", "small"))
    assert small < 100_000 + len(served()) < whole


def test_a_trace_that_is_read_is_never_overwritten(path: Path, tmp_path: Path) -> None:
    other, link = tmp_path / "other.trace", tmp_path / "link"
    other.write_bytes(path.read_bytes())
    link.symlink_to(other)
    for command in (
        ("view", other, "--out", other),
        ("view", path, "--compare", other, "--out", link),
        ("export", other, "--out", link),
    ):
        result = invoke(*command)
        assert result.exit_code != 0
        assert "would be overwritten" in result.output + str(result.exception)
    assert other.read_bytes() == path.read_bytes()


def test_the_top_fits_a_small_terminal(tmp_path: Path) -> None:
    names = [f"base_model.model.transformer.h.{number}.attn.c_attn.lora_A.default" for number in range(2)]
    run = Run(Writer(tmp_path / "run.trace", names=names).write(3).close())
    with open(tmp_path / "out", "w") as out:
        Console(file=out, width=80).print(frame(run))
    lines = (tmp_path / "out").read_text().splitlines()
    assert any("waiting takes" in line for line in lines[:6])
    head = next(number for number, line in enumerate(lines) if line.startswith("last stalls"))
    assert lines[head].split() == ["last", "stalls", "waited", "kind", "phase", "why"]
    assert "attn.c_attn.lora_A.default"[-20:] in lines[head + 1]
    assert "prefetched" in lines[head + 1]


def test_the_top_of_a_run(path: Path) -> None:
    result = invoke("top", path, "--once")
    assert result.exit_code == 0
    with Run(path).trace as trace:
        peak = f"{trace.budgets['host'] / (1 << 20):.2f} MiB"
    for text in ("closed, 3 steps", "disk → host", "host → disk", "last stalls", "blocks.", "waiting", peak):
        assert text in result.stdout


def test_the_top_goes_on_with_the_run_and_ends_with_it(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.trace", names=["a\x1b[2J", "b"]).write(1)
    run = Run(writer.path)
    console = Console(file=open(tmp_path / "out", "w"), width=160)  # noqa: SIM115

    class Ends:
        """Standard input of nobody; each wait is a step of the run, the third its end."""

        waits = 0

        def wait(self, _: float) -> None:
            self.waits += 1
            if self.waits < 3:
                writer.write(1)
            else:
                writer.close()

    ends = Ends()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiermem.cli.top.time.sleep", ends.wait)
        patch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115
        watch(run, console, 1.0)
    console.file.close()
    text = (tmp_path / "out").read_text()
    assert ends.waits == 3
    assert "closed, 3 steps" in text
    assert "a\ufffd[2J" in text
    assert "\x1b[2J" not in text


def test_the_wheel_has_the_page(tmp_path: Path) -> None:
    code = "from tiermem.viewer.page import served; print(len(served()))"
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=True)
    assert int(found.stdout) > 50_000
    settings = (STATIC.parent.parent.parent / "pyproject.toml").read_text()
    assert '"tiermem.viewer" = ["static/*"]' in settings
