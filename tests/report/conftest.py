"""What the tests of the report share."""

from collections.abc import Iterator
from typing import Any

import pytest
from support.browser import CHROMIUM, FLAGS


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser without a window."""
    reason = "no Playwright: pip install 'sightline[dev]' to test the report"
    playwright = pytest.importorskip("playwright.sync_api", reason=reason)
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()
