"""Writes the screenshots of the trace viewer that README.md and docs/viewer.md show, from the trace of a demo run.

Run: python scripts/screenshots.py [--trace demo/run.trace] [--compare BEFORE AFTER]. Needs Playwright and a Chromium.
"""

import argparse
import shutil
import subprocess
import sys
import threading
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from tiermem.viewer.server import Server
from tiermem.viewer.session import Mode, Session

IMAGES = Path(__file__).parent.parent / "docs" / "images"
SIZE = {"width": 1280, "height": 800}
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-lcd-text", "--force-color-profile=srgb"]


def settle(page: Page) -> None:
    """Wait until everything is there and drawn."""
    page.wait_for_function(
        "() => !tiermem.tiles.inFlight.size && !tiermem.tiles.wanted.length && !tiermem.pending && tiermem.frame"
    )
    page.wait_for_timeout(300)


def shoot(page: Page, name: str) -> None:
    """One screenshot."""
    settle(page)
    path = IMAGES / f"{name}.png"
    page.screenshot(path=path)
    if shutil.which("pngquant"):  # a third of the bytes, where it is installed
        subprocess.run(["pngquant", "--force", "--ext", ".png", "64", str(path)], check=True)


def main() -> None:
    """Each view of one run, the timeline in dark and light; and of a comparison, where there is a second trace."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, default=Path("demo/run.trace"))
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no Chromium here: scripts/browser.sh installs one")
    IMAGES.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        for theme in ("light", "dark"):
            page = browser.new_page(viewport=SIZE, color_scheme=theme)
            server = serve(Session([options.trace], Mode.SINGLE), page)
            for _ in range(4):
                page.keyboard.press("n")
            shoot(page, f"viewer-{theme}")
            if theme == "light":
                page.click("#tab-units")
                page.click("#units tbody tr:nth-child(4) button.name")
                shoot(page, "viewer-units")
                page.click("#tab-stalls")
                shoot(page, "viewer-stalls")
            page.close()
            server.stop()
        if options.compare:
            page = browser.new_page(viewport=SIZE, color_scheme="light")
            server = serve(Session(options.compare, Mode.COMPARE), page)
            page.click("#tab-compare")
            shoot(page, "viewer-compare")
            page.close()
            server.stop()
        browser.close()


def serve(session: Session, page: Page) -> Server:
    """Open ``session`` in ``page``."""
    server = Server(session)
    threading.Thread(target=server.run, daemon=True).start()
    page.goto(server.url)
    page.wait_for_selector("#app[aria-busy=false]")
    settle(page)
    return server


if __name__ == "__main__":
    main()
