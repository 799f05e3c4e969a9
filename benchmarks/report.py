"""How soon a report can be used: a real browser opens it again and again, and clicks on an analysis.

    python benchmarks/report.py runs/demo [--rounds 7] [--page cka] [--every]

Beside the wall clock stands the processor time of the page's process, which others on the machine hardly change.

first paint   the first text or picture is on the screen
overview      the table of headline numbers, the map and the small pictures are drawn
analysis      from a click on an analysis in the navigation until all of its page is drawn
every page    with --every, the same for each page of the report, once: the slowest one

Each load is a new profile of the browser without a cache, 1440 × 900. Medians; there should be no console messages.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from shared import TINY, arguments, begin, peer

import sightline as sl

FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Again and again: are all charts of the open page drawn, and on the first page the table and the small pictures?
WATCH = """
window.whenDrawn = (name) => new Promise((done) => {
  const look = () => {
    const page = document.querySelector(`.page.open[data-page="${name}"]`);
    const now = (selector) => [...(page?.querySelectorAll(selector) ?? [])];
    const charts = now(".chart").every((chart) => chart.dataset.ready || chart.closest("[data-late]"));
    const filled = (place) => place.childElementCount || place.classList.contains("none");
    const small = now("[data-multiple] .miniature").every(filled);
    const rows = name !== "overview" || now(".numbers tbody tr").length > 0;
    if (page && charts && small && rows) done(performance.now());
    else setTimeout(look, 4);
  };
  look();
});
addEventListener("DOMContentLoaded", () => {
  const first = document.querySelector(".page").dataset.page;
  window.firstDrawn = window.whenDrawn(first);
});
"""


def main() -> None:
    parser = arguments(__doc__, rounds=7)
    parser.add_argument("run", type=Path, nargs="?", default=Path("runs/demo"))
    parser.add_argument("--page", default="cka")
    parser.add_argument("--every", action="store_true", help="also time every page, once")
    asked = begin(parser)
    with tempfile.TemporaryDirectory() as folder:
        if asked.smoke:
            asked.run = Path(folder) / "run"
            images = sl.load_images("shapes?size=16&train=0&val=0&test=8")
            sl.analyze({"a": TINY, "b": TINY}, images, ["cka"], out=asked.run, workers=0, show_progress=False).report(
                False
            )
        if not (asked.run / "report.html").is_file():
            sys.exit(f"{asked.run} has no report.html; give the folder of a run (make demo)")
        if CHROMIUM is None or not peer("playwright") or not peer("psutil"):
            print(f"no browser: {asked.run / 'report.html'} is there, and nobody opens it")
        else:
            measure(asked.run / "report.html", asked.rounds, asked.page, asked.every)


def measure(report: Path, rounds: int, page: str, every: bool) -> None:
    """Open it again and again."""
    from playwright.sync_api import sync_playwright

    times: dict[str, list[float]] = {"first paint": [], "overview": [], "analysis": []}
    work: dict[str, list[float]] = {"overview": [], "analysis": []}
    problems: list[str] = []
    with sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for _ in range(rounds):
            begun = processor()
            tab = opened(browser, report, problems)
            times["overview"].append(tab.evaluate("firstDrawn"))
            work["overview"].append(since(begun))
            paint = "performance.getEntriesByName('first-contentful-paint')[0]"
            tab.wait_for_function(paint)  # a busy machine paints after the script has drawn
            times["first paint"].append(tab.evaluate(f"{paint}.startTime"))
            begun = processor()
            times["analysis"].append(click(tab, page))
            work["analysis"].append(since(begun))
            tab.context.close()
        tab = opened(browser, report, problems)
        tab.evaluate("firstDrawn")
        names = tab.evaluate("[...document.querySelectorAll('.page')].map((page) => page.dataset.page)")
        pages = {name: click(tab, name) for name in names[1:] if every}
        browser.close()
    print(f"{report.stat().st_size / 1e6:.1f} MB, {rounds} loads")
    for name, took in times.items():
        own = f", {statistics.median(work[name]):.0f} ms of processor time" if name in work else ""
        print(f"{name:12} {statistics.median(took):6.0f} ms   ({min(took):.0f} to {max(took):.0f}){own}")
    if pages:
        slowest = max(pages, key=lambda name: pages[name])
        print(f"{'every page':12} {pages[slowest]:6.0f} ms   ({slowest}, the slowest of {len(pages)})")
    print(f"console      {len(problems)} messages", *problems, sep="\n")


def processor() -> dict[int, float]:
    """Milliseconds of processor time of each process that draws a page, until now."""
    import psutil

    spent = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # one that has just ended
            if "--type=renderer" in process.cmdline():
                spent[process.pid] = process.cpu_times()
    return {pid: 1000 * (times.user + times.system) for pid, times in spent.items()}


def since(begun: dict[int, float]) -> float:
    """What they have spent since then."""
    return sum(spent - begun.get(pid, 0.0) for pid, spent in processor().items())


def opened(browser: Any, report: Path, problems: list[str]) -> Any:
    tab = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
    tab.on("console", lambda message: problems.append(message.text))
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.add_init_script(WATCH)
    tab.goto(report.resolve().as_uri())
    return tab


def click(tab: Any, page: str) -> float:
    """Milliseconds from the click until the page is drawn."""
    script = """async (page) => {
        const began = performance.now();
        document.querySelector(`nav a[data-page="${page}"]`).click();
        return (await whenDrawn(page)) - began;
    }"""
    return float(tab.evaluate(script, page))


if __name__ == "__main__":
    main()
