#!/usr/bin/env python3
"""The pictures of the README: docs/report.png and docs/report-cka.png from the demo, docs/study.png from a study.

make demo && .venv/bin/python scripts/pictures.py runs/demo [runs/papers]

A browser, such as Debian's `chromium`, has to be there.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

DOCS = Path(__file__).parents[1] / "docs"
SEEN = "[...document.querySelectorAll('.page.open .chart')].filter((chart) => !chart.closest('details:not([open])'))"
DRAWN = f"{SEEN}.every((chart) => chart.dataset.ready)"
WIDTH = 1280


def picture(browser: Any, report: Path, page: str, name: str, height: int, scheme: str, **chosen: str) -> None:
    """The top of a page as a PNG file; `chosen` are choices in its controls."""
    context = browser.new_context(viewport={"width": WIDTH, "height": height}, color_scheme=scheme)
    tab = context.new_page()
    tab.goto(f"{report.resolve().as_uri()}#/{page}")
    for control, label in chosen.items():
        tab.select_option(f".page.open select[name={control}]", label=label)
    while not tab.evaluate(DRAWN):
        tab.wait_for_timeout(50)
    tab.wait_for_timeout(500)  # the last chart is on the screen
    tab.evaluate("scrollTo(0, 0)")
    path = DOCS / name
    tab.screenshot(path=path)
    context.close()
    Image.open(path).convert("RGB").save(path, optimize=True)  # a palette would lose colours


def main() -> None:
    """All pictures whose runs are given."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("run", type=Path, help="folder of the demo")
    arguments.add_argument("study", type=Path, nargs="?", help="folder of a study; without it docs/study.png stays")
    given = arguments.parse_args()
    report = given.run / "report.html"
    with sync_playwright() as engine:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = engine.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        picture(browser, report, "overview", "report.png", 1180, "light")
        picture(browser, report, "cka", "report-cka.png", 1480, "dark", a="moco_v3", b="mae")
        if given.study is not None:
            picture(browser, given.study / "report.html", "findings/finding-S1", "study.png", 1500, "light")
        browser.close()


if __name__ == "__main__":
    main()
