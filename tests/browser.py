"""A headless Chromium for the tests of the viewer's page, and the numbers that a page shows."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from typer.testing import CliRunner

from tiermem.cli import app
from tiermem.viewer.server import Server
from tiermem.viewer.session import Mode, Session

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SIZE = {"width": 1280, "height": 860}
SCREENSHOTS = os.environ.get("TIERMEM_SCREENSHOTS")


@contextmanager
def chromium() -> Iterator[Browser]:
    """The machine's own Chromium: `make test` installs Debian's where there is none."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "no Chromium: run scripts/browser.sh"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


@contextmanager
def serving(*paths: Path, mode: Mode = Mode.SINGLE, follow: bool = False) -> Iterator[Server]:
    """A server for the traces at ``paths``."""
    session = Session(paths, mode, follow)
    server = Server(session)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()
        server.close()
        session.close()


@contextmanager
def showing(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    """The page at ``url``, opened; any error in it fails the test."""
    context = browser.new_context(viewport=SIZE, **options)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(url)
    page.wait_for_selector("#app[aria-busy=false]")
    yield page
    context.close()
    assert errors == []


def settle(page: Page) -> None:
    """Wait until all tiles asked for are here, they are drawn, and the totals are of what is drawn."""
    page.wait_for_function(
        "() => { const t = tiermem.tiles; return !t.inFlight.size && !t.wanted.length && !tiermem.pending; }"
    )
    page.evaluate("() => tiermem.tabs.timeline.details.showRange()")


def keep(page: Page, name: str) -> None:
    """A screenshot, where they are wanted: TIERMEM_SCREENSHOTS names the folder."""
    settle(page)
    if SCREENSHOTS:
        page.screenshot(path=f"{SCREENSHOTS}/{name}.png")


ROUNDED = 0.006  # what three digits may be off
UNITS = {
    "": 1,
    "%": 0.01,
    "s": 1,
    "ms": 1e-3,
    "µs": 1e-6,
    "ns": 1e-9,
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "MB/s": 1e6,
    "GB/s": 1e9,
}


def number(text: str) -> float:
    """A figure as it is shown, in seconds, bytes, bytes per second, or as a share of 1."""
    found = re.fullmatch(r"(-?[\d,.]+)\s*(\S*)", text.strip())
    assert found, text
    return float(found[1].replace(",", "")) * UNITS[found[2]]


def rows(page: Page, selector: str) -> list[list[str]]:
    """The texts of a table's body, row by row."""
    found: list[list[str]] = page.eval_on_selector_all(
        f"{selector} tbody tr", "trs => trs.map(tr => [...tr.children].map(cell => cell.innerText.trim()))"
    )
    return found


def summary_of(path: Path) -> dict[str, Any]:
    """What `tiermem trace summary --json` prints."""
    result = CliRunner().invoke(app, ["trace", "summary", str(path), "--json", "--top", "1000"])
    return json.loads(result.stdout)


def cards(page) -> dict[str, float]:
    titles, figures = page.locator(".card:not(.gauges) h2"), page.locator(".card > .figure")
    names, values = page.locator(".gauge .what"), page.locator(".gauge .figure")
    texts = [*titles.all_inner_texts(), *names.all_inner_texts()]
    found = [*figures.all_inner_texts(), *values.all_inner_texts()]
    return {text: number(figure) for text, figure in zip(texts, found, strict=True)}


def totals(page) -> dict[str, float]:
    """The panel of totals: seconds by what is computed, bytes by link."""
    return {cells[0]: number(cells[1]) for cells in rows(page, "#range")}


def view(page) -> tuple[float, float]:
    return tuple(page.evaluate("() => [tiermem.view.begin, tiermem.view.end]"))


def place(page, time: float) -> float:
    """The pixel of the window where a time, ns of the axis, is drawn."""
    left = page.locator("#timeline").bounding_box()["x"]
    return left + page.evaluate("time => tiermem.tabs.timeline.axis(0).axis(time)", time)


def middle(page, key: str) -> float:
    """The pixel of the window in the middle of a lane."""
    top = page.locator("#timeline").bounding_box()["y"]
    return top + page.evaluate(
        "key => { const l = tiermem.tabs.timeline.lanes.find(l => l.row?.key === key); return l.y + l.height / 2; }",
        key,
    )


def check_figures(page, path: Path) -> None:
    """What is shown of a run is what its summary says."""
    figures = summary_of(path)
    shown = cards(page)
    assert shown["step, mean"] == pytest.approx(figures["steps"]["mean_s"], rel=ROUNDED)
    assert shown["waiting"] == pytest.approx(figures["stall_share"], abs=0.0006)
    for link in figures["links"]:
        name = f"{link['source']} → {link['target']}"
        assert shown[name] == pytest.approx(link["bandwidth"], rel=ROUNDED)
    assert shown["host"] == pytest.approx(figures["tiers"]["host"]["final"], rel=ROUNDED)
    assert shown["pages found there"] == pytest.approx(figures["requests"]["hit_rate"], abs=0.0006)
    verdict = page.inner_text("#verdict")
    assert figures["verdict"][1:] in verdict
    ranged = totals(page)
    for phase in ("forward", "backward"):
        assert ranged[phase] == pytest.approx(figures["phases"][phase]["compute_s"], rel=ROUNDED)
    assert ranged["optimizer"] == pytest.approx(figures["optimizer_s"], rel=ROUNDED)
    assert ranged["stalls"] == pytest.approx(figures["stall_s"], rel=ROUNDED)
    for link in figures["links"]:
        name = f"{link['source']} → {link['target']}"
        assert ranged[name] == pytest.approx(link["nbytes"], rel=ROUNDED)
    page.click("#tab-stalls")
    stalls = rows(page, "#stalls")
    slowest = figures["slowest_stalls"]
    assert len(stalls) == min(len(slowest), 500)
    for cells, stall in zip(stalls, slowest, strict=False):
        assert number(cells[0]) == pytest.approx(stall["at_s"], abs=0.001)
        assert number(cells[1]) == pytest.approx(stall["seconds"], rel=ROUNDED)
    assert sorted(cells[4] for cells in stalls) == sorted(stall["reason"] for stall in slowest[:500])
    page.click("#tab-units")
    page.wait_for_selector("#units button.name")
    named = {cells[0].lstrip("▾▸ \n\t"): cells for cells in rows(page, "#units")}
    top = [named[name] for name in ("blocks", "(resident)") if name in named]
    assert sum(number(cells[3]) for cells in top) == figures["requests"]["faults"]
    assert sum(number(cells[4]) for cells in top) == figures["requests"]["late"]
    page.click("#tab-timeline")
