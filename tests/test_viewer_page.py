"""The viewer's page in a real browser: what it shows, and what the mouse and the keys do to it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.browser import (
    ROUNDED,
    check_figures,
    chromium,
    keep,
    middle,
    number,
    place,
    rows,
    serving,
    settle,
    showing,
    summary_of,
    totals,
    view,
)
from tests.viewer_traces import MS, Writer
from tiermem.trace import Event, Tier
from tiermem.trace.reader import TraceFile
from tiermem.trace.tally import merge

pytestmark = pytest.mark.chromium


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Writer(tmp_path_factory.mktemp("viewer") / "run.trace", seed=3).write(12).close()


@pytest.fixture(scope="module")
def url(path: Path):
    with serving(path) as server:
        yield server.url


@pytest.fixture
def page(browser, url: str):
    with showing(browser, url) as page:
        settle(page)
        yield page


def test_what_is_shown_is_what_the_summary_says(page, path: Path) -> None:
    check_figures(page, path)
    keep(page, "timeline")


@pytest.mark.slow
def test_the_demo_is_shown_as_its_summary_says(browser, disk: Path) -> None:
    code = "from tiermem.cli import main; main()"
    command = [sys.executable, "-c", code, "demo", "--folder", str(disk), "--steps", "2", "--json"]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    with serving(disk / "run.trace") as server, showing(browser, server.url) as page:
        settle(page)
        check_figures(page, disk / "run.trace")
        keep(page, "demo")


def test_keys_and_wheel_zoom_and_pan(page) -> None:
    begin, end = whole = view(page)
    page.keyboard.press("w")
    assert view(page)[1] - view(page)[0] == pytest.approx(0.7 * (end - begin))
    before = view(page)
    page.keyboard.press("d")
    assert view(page)[0] == pytest.approx(before[0] + 0.2 * (before[1] - before[0]), rel=1e-6)
    page.keyboard.press("a")
    assert view(page) == pytest.approx(before)
    page.keyboard.press("s")
    assert view(page) == pytest.approx(whole)
    x, y = place(page, begin + 0.25 * (end - begin)), middle(page, "forward")
    page.mouse.move(x, y)
    page.mouse.wheel(0, -600)
    page.wait_for_function("before => tiermem.view.end < before", arg=end)
    # What is under the pointer stays there.
    assert place(page, begin + 0.25 * (end - begin)) == pytest.approx(x, abs=1)
    zoomed = view(page)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 100, y, steps=4)
    page.mouse.up()
    assert view(page)[0] < zoomed[0]
    assert place(page, begin + 0.25 * (end - begin)) == pytest.approx(x + 100, abs=2)
    page.keyboard.press("0")
    assert view(page) == pytest.approx(whole)


def test_a_selected_range_has_the_totals_of_the_trace_in_it(page, path: Path) -> None:
    begin, end = view(page)
    low, high = begin + 0.3 * (end - begin), begin + 0.5 * (end - begin)
    y = middle(page, "forward")
    page.keyboard.down("Shift")
    page.mouse.move(place(page, low), y)
    page.mouse.down()
    page.mouse.move(place(page, high), y, steps=5)
    page.mouse.up()
    page.keyboard.up("Shift")
    low, high = page.evaluate("() => tiermem.view.selection")
    settle(page)
    shown = totals(page)
    with TraceFile(path) as trace:
        records, zero = trace.records, trace.monotonic_ns
        start, stop = records["start"] - zero, records["start"] - zero + records["duration"]

        def inside(wanted: Any) -> float:
            a, b = merge(np.clip(start[wanted], low, high), np.clip(stop[wanted], low, high))
            return float((b - a).sum()) / 1e9

        up = (records["event"] == Event.LANDED) & (records["source"] == Tier.DISK)
        part = np.clip(np.minimum(stop, high) - np.maximum(start, low), 0, None)[up]
        carried = float((part / records["duration"][up] * records["nbytes"][up]).sum())
        moving = (records["event"] == Event.LANDED) | (records["event"] == Event.WRITEBACK)
        stalls = records["event"] == Event.STALL
        work = (records["event"] == Event.COMPUTE) | (records["event"] == Event.OPTIMIZER)
        overlap = (
            inside(moving | stalls) + inside(work | stalls) - inside(moving | work | stalls) - inside(stalls)
        )
    assert shown["stalls"] == pytest.approx(inside(stalls), rel=ROUNDED)
    assert shown["disk → host"] == pytest.approx(carried, rel=ROUNDED)
    assert shown["links busy"] == pytest.approx(inside(moving), rel=ROUNDED)
    assert shown["of that, behind computation"] == pytest.approx(overlap, rel=ROUNDED)
    keep(page, "selection")
    page.keyboard.press("Escape")
    assert page.evaluate("() => tiermem.view.selection") is None


def test_steps_are_gone_through_by_keys(page, path: Path) -> None:
    page.keyboard.press("n")
    page.keyboard.press("n")
    page.keyboard.press("p")
    with TraceFile(path) as trace:
        steps = trace.records[trace.records["event"] == Event.STEP]
        first = steps[0]
        wanted = [
            int(first["start"]) - trace.monotonic_ns,
            int(first["start"] + first["duration"]) - trace.monotonic_ns,
        ]
    assert page.evaluate("() => tiermem.view.selection") == pytest.approx(wanted, abs=2)
    settle(page)
    assert number(page.inner_text("#range h3").split(": ")[1].split(" from")[0]) == pytest.approx(
        first["duration"] / 1e9, rel=ROUNDED
    )


def test_a_span_that_is_clicked_says_what_it_was(page, path: Path) -> None:
    with TraceFile(path) as trace:
        stall = max(trace.records[trace.records["event"] == Event.STALL], key=lambda each: each["duration"])
        begin = int(stall["start"]) - trace.monotonic_ns
        unit = trace.unit_name(int(stall["unit"]))
    page.evaluate("([a, b]) => tiermem.view.show(a, b)", [begin - 40 * MS, begin + 40 * MS])
    settle(page)
    page.mouse.click(place(page, begin + int(stall["duration"]) / 2), middle(page, "stall"))
    text = page.inner_text("#span")
    for part in (unit, "disk → host", "4.00 MiB"):
        assert part in text
    takes = re.search(r"takes\s+(\S+ \S+)", text)
    assert takes
    assert number(takes[1]) == pytest.approx(stall["duration"] / 1e9, rel=ROUNDED)
    keep(page, "span")
    page.click("#span button")
    assert page.inner_text("#unit h3") == unit


def test_lanes_are_in_their_colours_from_tile_to_tile(page) -> None:
    def colours(key: str) -> dict[str, int]:
        """Pixels by colour on a line of the lane that its names are not on."""
        found: dict[str, int] = page.evaluate(
            """key => {
              const { lanes, canvas, width } = tiermem.tabs.timeline;
              const y = lanes.find(lane => lane.row?.key === key).y + 2;
              const data = canvas.getContext('2d').getImageData(200, y, width - 200, 1).data;
              const found = {};
              for (let i = 0; i < data.length; i += 4) {
                const hex = [...data.slice(i, i + 3)].map(v => v.toString(16).padStart(2, '0')).join('');
                found['#' + hex] = (found['#' + hex] ?? 0) + 1;
              }
              return found;
            }""",
            key,
        )
        return found

    style = "names => names.map(name => getComputedStyle(document.body).getPropertyValue(name).trim())"
    wanted = page.evaluate(style, ["--backward", "--ground"])
    for _ in range(9):
        page.keyboard.press("w")
        settle(page)
        page.evaluate("() => new Promise(requestAnimationFrame)")
        found = colours("backward")
        assert found.get("#ffffff", 0) + found.get("#14181d", 0) == 0
        assert sum(found.get(colour, 0) for colour in wanted) > 0.8 * sum(found.values())


def test_units_are_searched_by_module_and_parameter(page) -> None:
    page.keyboard.press("/")
    page.wait_for_selector("#units button.name")
    everything = [cells[0] for cells in rows(page, "#units")]
    assert len(everything) == 7
    page.fill("#unit-search", "blocks.3.wei")
    assert [cells[0].strip("▾ \n\t") for cells in rows(page, "#units")] == ["blocks", "3"]
    page.click("#units button.name >> text=3")
    assert page.inner_text("#unit h3") == "blocks.3"
    assert [cells[1] for cells in rows(page, "#unit")] == ["parameter", "gradient", "exp_avg"]
    assert "used again last (Belady)" in page.inner_text("#unit")
    keep(page, "units")
    page.fill("#unit-search", "nowhere")
    assert "No module or parameter" in page.inner_text("#units")


def test_groups_of_units_close_and_sum_up(page) -> None:
    page.click("#tab-units")
    page.wait_for_selector("#units button.name")
    all_rows = rows(page, "#units")
    assert sum(number(cells[2]) for cells in all_rows[1:]) == number(all_rows[0][2])
    page.click("#units button.toggle")
    assert len(rows(page, "#units")) == 1
    page.keyboard.press("Enter")  # the button has kept the focus
    assert len(rows(page, "#units")) == 7


def test_the_rows_of_units_are_coloured_by_tier(page) -> None:
    page.click("#tab-units")
    page.wait_for_selector("#units button.name")
    settle(page)
    page.wait_for_timeout(100)
    colours = page.evaluate(
        """() => {
          const canvas = document.querySelectorAll('#units canvas')[1];
          const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
          const found = {};
          for (let i = 0; i < data.length; i += 4) {
            const key = '#' + [data[i], data[i + 1], data[i + 2]].map(v => v.toString(16).padStart(2, '0')).join('');
            found[key] = (found[key] ?? 0) + 1;
          }
          const style = getComputedStyle(document.documentElement);
          return ['host', 'disk'].map(name => found[style.getPropertyValue('--' + name).trim()] ?? 0);
        }"""
    )
    assert min(colours) > 200


def test_a_click_on_a_stall_goes_there(page, path: Path) -> None:
    page.keyboard.press("3")
    stalls = summary_of(path)["slowest_stalls"]
    page.click("#stalls tbody tr:nth-child(2)")
    assert page.get_attribute("#tab-timeline", "aria-selected") == "true"
    begin = stalls[1]["at_s"] * 1e9
    assert page.evaluate("() => tiermem.view.selection") == pytest.approx(
        [begin, begin + stalls[1]["seconds"] * 1e9], abs=1000
    )
    low, high = view(page)
    assert low < begin < high < begin + 10 * stalls[1]["seconds"] * 1e9
    text = page.inner_text("#span")
    assert all(part in text for part in (stalls[1]["unit"], stalls[1]["reason"], "disk → host"))
    takes = re.search(r"takes\s+(\S+ \S+)", text)
    assert takes
    assert number(takes[1]) == pytest.approx(stalls[1]["seconds"], rel=ROUNDED)


def test_stalls_are_sorted_searched_and_chosen_by_cause(page, path: Path) -> None:
    page.keyboard.press("3")
    stalls = summary_of(path)["slowest_stalls"]
    page.click("#stalls th >> text=at")
    page.click("#stalls th >> text=at")
    shown = [number(cells[0]) for cells in rows(page, "#stalls")]
    assert shown == sorted(shown, reverse=True) or shown == sorted(shown)
    page.fill("#stall-search", "blocks.2")
    assert {cells[2] for cells in rows(page, "#stalls")} == {"blocks.2"}
    page.fill("#stall-search", "")
    page.click(".causes button >> text=not prefetched")
    wanted = [stall for stall in stalls if stall["reason"] == "not prefetched"]
    assert len(rows(page, "#stalls")) == len(wanted)
    keep(page, "stalls")


def test_dark_and_light(browser, url: str) -> None:
    def ground(page) -> str:
        return page.evaluate("() => getComputedStyle(document.body).backgroundColor")

    with showing(browser, url, color_scheme="dark") as page:
        dark = ground(page)
        keep(page, "dark")
        page.click("#theme")
        assert ground(page) != dark
        page.reload()
        page.wait_for_selector("#app[aria-busy=false]")
        assert ground(page) != dark
        page.click("#theme")
        assert ground(page) == dark
    with showing(browser, url, color_scheme="light") as page:
        assert ground(page) != dark


def test_everything_is_reached_by_keyboard(page) -> None:
    page.keyboard.press("?")
    assert page.locator("#keys").is_visible()
    page.keyboard.press("Escape")
    reached = []
    for _ in range(8):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("() => document.activeElement.id"))
    for name in ("theme", "help", "tab-timeline", "tab-units", "tab-stalls", "timeline"):
        assert name in reached
    page.focus("#tab-timeline")
    page.keyboard.press("ArrowRight")
    assert page.get_attribute("#tab-units", "aria-selected") == "true"
    page.keyboard.press("3")
    page.focus("#stalls tbody tr:first-child button")
    page.keyboard.press("Enter")
    assert page.get_attribute("#tab-timeline", "aria-selected") == "true"
    assert page.evaluate("() => document.activeElement.id") == "timeline"
