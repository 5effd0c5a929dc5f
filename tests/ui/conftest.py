"""One browser for all tests of the page, and scripted gateways to talk to (see tests/online)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.online.conftest import module_pair, pair, tiny_model
from tests.ui.browser import Browser
from tests.ui.page import Page

__all__ = ["module_pair", "pair", "tiny_model"]


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Chromium; it takes a second or two to start."""
    running = Browser(tmp_path_factory.mktemp("browser"))
    yield running
    running.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """The page, yet to be opened; no test may leave an error of its scripts, or of its policy, in the console."""
    yield Page(browser)
    browser.open("about:blank")
    assert [entry for entry in browser.console() if entry["source"] != "network"] == []
