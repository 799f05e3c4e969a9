"""A real browser on the report: one tab, and all that went wrong in it."""

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from support.results import SampleRun

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
NEEDS_BROWSER = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no browser: apt-get install chromium to test the report"),
]


def needs_browser(test: Any) -> Any:
    """One test that needs a browser, among others that need none."""
    for mark in NEEDS_BROWSER:
        test = mark(test)
    return test


class Reader:
    """One tab, and all that went wrong in it."""

    def __init__(self, browser: Any, run: SampleRun, **options: Any) -> None:
        self.context = browser.new_context(**({"viewport": {"width": 1280, "height": 1000}} | options))
        self.tab = self.context.new_page()
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.tab.on("console", lambda message: self.problems.append(message.text))
        self.tab.on("pageerror", lambda error: self.problems.append(str(error)))
        self.tab.on("dialog", lambda dialog: self.problems.append("dialog"))
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.file = (run.path / "report.html").as_uri()

    def open(self, page: str) -> None:
        self.tab.goto(f"{self.file}#/{page}")
        drawn = "c => c.dataset.ready || c.closest('[data-late]')"
        self.until(f"[...document.querySelectorAll('.page.open .chart')].every({drawn})")

    def until(self, condition: str) -> None:
        """Wait for a condition; asked from here, because the page's policy forbids evaluating text."""
        end = time.monotonic() + 20
        while not self.tab.evaluate(condition):
            assert time.monotonic() < end, condition
            time.sleep(0.03)

    def choose(self, **values: str) -> None:
        before = self.drawn()
        for name, label in values.items():
            self.tab.select_option(f"select[name={name}]", label=label)
        self.until(f"document.querySelector('.heat').dataset.ready >= {before + len(values)}")

    def drawn(self) -> int:
        return int(self.tab.evaluate("document.querySelector('.heat').dataset.ready"))

    def cells(self) -> list[dict[str, Any]]:
        """The cells of the heat map, each with its colour and the middle of its place on the screen."""
        return self.tab.evaluate(
            """[...document.querySelectorAll(".heat .mark-rect path[fill]")].map(path => {
                const {left, top, width, height} = path.getBoundingClientRect(), {row, column} = path.__data__.datum;
                return {row, column, x: left + width / 2, y: top + height / 2, fill: path.getAttribute("fill")};
            }).filter(cell => cell.row)"""
        )

    def hover(self, row: str, column: str) -> dict[str, str]:
        self.tab.locator(".heat").scroll_into_view_if_needed()
        cell = next(c for c in self.cells() if (c["row"], c["column"]) == (row, column))
        self.tab.mouse.move(cell["x"], cell["y"])
        self.until("!document.getElementById('tip').hidden")
        terms, details = (self.tab.locator(f"#tip {tag}").all_text_contents() for tag in ("dt", "dd"))
        return dict(zip(terms, details, strict=True))

    def download(self, selector: str, position: int) -> bytes:
        with self.tab.expect_download() as waiting:
            self.tab.locator(f"{selector} .downloads button").nth(position).click()
        return Path(waiting.value.path()).read_bytes()
