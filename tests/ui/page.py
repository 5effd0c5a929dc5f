"""The chat page as somebody who sits before it uses it."""

from __future__ import annotations

from tests.ui.browser import ENTER, Browser

_WRITTEN = "document.querySelector('#stop').hidden && document.querySelectorAll('.answer[aria-busy=false]').length"
TAB = "\ue004"


class Page:
    """In a browser, which is for what no method is there."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser

    def open(self, url: str, **settings: object) -> None:
        """Load it from the server at `url`, with nothing kept from before and these settings."""
        self.browser.devtools("Storage.clearDataForOrigin", origin=url, storageTypes="all")
        self.browser.open(f"{url}/ui")
        self.browser.run("sessionStorage.clear()")
        if settings:
            self.browser.click("#show-settings")
            for name, value in settings.items():
                self.browser.type(f"#{name}", str(value))
            self.browser.click("#show-settings")

    def wait_connected(self) -> None:
        """Until it knows the server's models."""
        self.browser.wait("document.querySelector('#model').options.length")

    def begin(self, question: str) -> None:
        """Send it, and wait for nothing."""
        self.browser.type("#message", question + ENTER)

    def ask(self, question: str) -> str:
        """Send it; the text of the answer once it has ended."""
        self.begin(question)
        return self.wait_written(question)

    def wait_written(self, question: str) -> str:
        """The text of the answer to the last question, which is this one, once it has ended."""
        last = "[...document.querySelectorAll('.question p')].at(-1)?.textContent === arguments[0]"
        self.browser.wait(f"{_WRITTEN} && {last}", question)
        return self.answer

    @property
    def answer(self) -> str:
        """The last answer's text."""
        return self.browser.text(".answer > .text")

    @property
    def facts(self) -> str:
        """What stands below it."""
        return self.browser.text(".answer .facts")
