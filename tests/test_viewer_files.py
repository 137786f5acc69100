"""The viewer's page with other data than one good trace: several runs, runs in progress, files, damage, malice."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.browser import (
    ROUNDED,
    SIZE,
    cards,
    check_figures,
    chromium,
    keep,
    number,
    rows,
    serving,
    settle,
    showing,
    summary_of,
    totals,
    view,
)
from tests.viewer_traces import MS, Writer
from tiermem.cli import app
from tiermem.trace import Event, Phase
from tiermem.viewer.session import Mode

pytestmark = pytest.mark.chromium

HOSTILE = [
    "<img src=x onerror=document.title='hijacked'>",
    "</script><script>document.title='hijacked'</script>",
    "{{script}}\u202e\x1b[2J&amp;",
]


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Writer(tmp_path_factory.mktemp("viewer") / "run.trace", seed=3).write(12).close()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Writer(tmp_path_factory.mktemp("viewer") / "other.trace", seed=4).write(8).close()


def test_two_runs_are_compared(browser, path: Path, other: Path) -> None:
    with serving(path, other, mode=Mode.COMPARE) as server, showing(browser, server.url) as page:
        settle(page)
        keep(page, "compare-timeline")
        page.click("#tab-compare")
        page.wait_for_selector("#compare-run")
        shown = {cells[0]: cells for cells in rows(page, "#compare-run")}
        before, after = summary_of(path), summary_of(other)
        mean = [figures["steps"]["mean_s"] for figures in (before, after)]
        assert [number(text) for text in shown["step, mean"][1:3]] == pytest.approx(mean, rel=ROUNDED)
        change = 100 * (mean[1] / mean[0] - 1)
        assert f"{abs(change):.1f} %" in shown["step, mean"][3]
        assert ("worse" if change > 0 else "better") in shown["step, mean"][3]
        for figures, column in ((before, 1), (after, 2)):
            for link in figures["links"]:
                cell = shown[f"{link['source']} → {link['target']}, bytes a step"][column]
                assert number(cell) == pytest.approx(link["nbytes"] / figures["steps"]["count"], rel=ROUNDED)
        waits = {cells[0]: cells for cells in rows(page, "#compare-waits")}
        assert len(waits) == 6
        assert sum(number(cells[1]) for cells in waits.values()) == pytest.approx(
            before["stall_s"] / before["steps"]["count"], rel=0.02
        )
        keep(page, "compare")


def test_a_run_in_progress_is_followed(browser, tmp_path: Path) -> None:
    writer = Writer(tmp_path / "live.trace").write(2)
    with serving(writer.path, follow=True) as server, showing(browser, server.url) as page:
        page.wait_for_selector("#state >> text=being written")
        page.evaluate("() => { document.body.dataset.same = 'yes'; }")
        width = view(page)[1] - view(page)[0]
        for steps in (3, 2):
            writer.write(steps)
            page.wait_for_selector(f".card >> text={writer.step + 1} steps")
        assert view(page)[1] - view(page)[0] > 2 * width
        settle(page)
        assert totals(page)["stalls"] == pytest.approx(summary_of(writer.path)["stall_s"], rel=ROUNDED)
        writer.close()
        page.wait_for_selector("#state >> text=closed")
        assert page.evaluate("() => document.body.dataset.same") == "yes"
    writer.trace.close()


def test_ranks_are_shown_together(browser, tmp_path: Path) -> None:
    paths = []
    for rank in range(2):
        writer = Writer(tmp_path / f"rank{rank}.trace", seed=rank, rank=rank, world=2).write(4)
        writer.record(Event.COLLECTIVE, writer.now - 3 * MS, 2 * MS, 0, 0, phase=Phase.BACKWARD)
        paths.append(writer.close())
    with serving(*paths, mode=Mode.RANKS) as server, showing(browser, server.url) as page:
        settle(page)
        assert "on one clock" in page.inner_text(".run-name")
        lanes = page.evaluate("() => tiermem.tabs.timeline.lanes.map(lane => [lane.run, lane.label])")
        for run in range(2):
            assert [run, "collectives"] in lanes
        page.click("#tab-stalls")
        assert {cells[0] for cells in rows(page, "#stalls")} == {"rank 0", "rank 1"}
        page.click("#tab-units")
        page.wait_for_selector("#units button.name")
        page.select_option(".units-tab select", "1")
        assert page.title() == "rank 0, rank 1 · tiermem trace"
        for number, path in enumerate(paths):
            page.select_option("#figures-of", str(number))
            page.wait_for_function(
                "number => document.querySelector('.units-tab select').value === number", arg=str(number)
            )
            assert cards(page)["waiting"] == pytest.approx(summary_of(path)["stall_share"], abs=0.006)
        keep(page, "ranks")


def test_names_never_become_markup(browser, tmp_path: Path) -> None:
    path = Writer(tmp_path / "<b>run.trace", names=HOSTILE, policy=HOSTILE[1]).write(2).close()
    out = tmp_path / "out.html"
    result = CliRunner().invoke(app, ["trace", "view", str(path), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert b"hijacked" not in out.read_bytes()
    with serving(path) as server:
        for url in (server.url, out.as_uri()):
            with showing(browser, url) as page:
                settle(page)
                for tab in ("stalls", "units", "timeline"):
                    page.click(f"#tab-{tab}")
                    settle(page)
                page.click("#tab-units")
                page.wait_for_selector("#units button.name")
                page.evaluate("() => tiermem.showUnit(0, 0)")
                page.wait_for_selector("#unit h3")
                assert page.inner_text("#unit h3") == HOSTILE[0]
                assert page.title() == "<b>run.trace · tiermem trace"
                assert page.locator("img, #app script, b >> text=run").count() == 0
                text = page.inner_text("body")
                assert "\u202e" not in text
                assert "\x1b" not in text


def test_the_page_as_a_file_needs_nothing_else(browser, path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    result = CliRunner().invoke(app, ["trace", "view", str(path), "--out", str(out)])
    assert "open it in any browser" in result.stdout
    requests: list[str] = []
    with showing(browser, out.as_uri(), offline=True) as page:
        page.on("request", lambda request: requests.append(request.url))
        settle(page)
        check_figures(page, path)
        page.keyboard.press("n")
        settle(page)
        assert page.inner_text("#range h3").startswith("Selected")
        assert requests == []


def test_a_finer_pyramid_in_a_file_shows_the_same(browser, path: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tiermem.viewer.tiles.MOST_SPANS", 100)
    out = tmp_path / "out.html"
    assert CliRunner().invoke(app, ["trace", "view", str(path), "--out", str(out)]).exit_code == 0
    with showing(browser, out.as_uri()) as page:
        settle(page)
        check_figures(page, path)
        for _ in range(9):
            page.keyboard.press("w")
            settle(page)
        spans = page.evaluate("() => tiermem.tabs.timeline.shown(0).map(each => each.tile.spans !== null)")
        assert spans
        assert all(spans)


def test_damage_is_told_and_what_is_whole_is_shown(browser, path: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.trace"
    cut.write_bytes(path.read_bytes()[:-1001])
    with serving(cut) as server, showing(browser, server.url) as page:
        settle(page)
        assert summary_of(cut)["damage"] in page.inner_text("#problems")
        assert page.inner_text("#state").startswith("damaged")
        assert cards(page)["step, mean"] > 0
        check_figures(page, cut)


def test_an_empty_trace_says_so(browser, tmp_path: Path) -> None:
    path = Writer(tmp_path / "run.trace", names=[]).close()
    with serving(path) as server, showing(browser, server.url) as page:
        assert "nothing is recorded" in page.inner_text("#problems")
        for name in ("timeline", "units", "stalls"):
            page.click(f"#tab-{name}")
            assert "Nothing is recorded in this trace." in page.inner_text("#panel .state")


def test_an_empty_trace_that_is_followed_fills(browser, tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.trace")
    with serving(writer.path, follow=True) as server, showing(browser, server.url) as page:
        assert "goes on by itself" in page.inner_text("#panel .state")
        writer.write(1)
        writer.trace.flush()
        page.wait_for_selector("#timeline")
        settle(page)
        assert totals(page)["stalls"] == pytest.approx(summary_of(writer.path)["stall_s"], rel=ROUNDED)
    writer.trace.close()


def test_long_and_empty_names_can_be_told_apart(browser, tmp_path: Path) -> None:
    names = ["encoder." + "very_long_module_name_" * 8 + str(number) for number in range(2)]
    path = Writer(tmp_path / "run.trace", names=["", *names]).write(1).close()
    with serving(path) as server, showing(browser, server.url) as page:
        page.click("#tab-units")
        page.wait_for_selector("#units button.name")
        assert "(no name)" in page.inner_text("#units tbody tr:first-child")
        for button in page.locator("#units button.name").all():
            box, cell = button.bounding_box(), button.locator("xpath=..").bounding_box()
            assert box["width"] > 30
            assert box["x"] + box["width"] <= cell["x"] + cell["width"]
        assert page.locator(f'#units button[title="{names[1]}"]').count() == 1


def test_a_model_of_very_many_units_and_deep_names_is_shown(browser, tmp_path: Path) -> None:
    names = [f"layers.{number}" for number in range(4000)]
    names[0] = "deep" + ".a" * 5000
    writer = Writer(tmp_path / "run.trace", names=names)
    writer.fetch(3999, 0, Phase.FORWARD)
    writer.fetch(1, 0, Phase.FORWARD)
    with serving(writer.close()) as server, showing(browser, server.url) as page:
        settle(page)
        assert "2000 units are too many" in page.inner_text("#problems")
        page.click("#tab-units")
        page.click("#units button.toggle")
        page.wait_for_selector("text=more: close a group, or search")
        page.fill("#unit-search", "layers.3999")
        assert [cells[0].strip("▾▸ \n\t") for cells in rows(page, "#units")] == ["layers", "3999"]


def test_the_command_serves_until_it_is_interrupted(browser, path: Path) -> None:
    code = "from tiermem.cli import main; main()"
    command = [sys.executable, "-c", code, "trace", "view", str(path), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        told = process.stdout.readline()
        address = re.search(r"http://\S+", told)
        assert address, told
        context = browser.new_context(viewport=SIZE)
        page = context.new_page()
        page.goto(address[0])
        page.wait_for_selector("#app[aria-busy=false]")
        settle(page)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
        assert process.stderr
        assert process.stderr.read() == ""
    page.click("#tab-units")
    page.wait_for_selector(".failure >> text=has gone")
    context.close()
