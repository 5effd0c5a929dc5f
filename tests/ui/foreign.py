"""Another server with OpenAI's API, for the page's server setting: it answers what a test gives it, to any origin."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# Status (0: the connection is closed without an answer), headers, and JSON, or a list of what a stream's events have.
Answer = tuple[int, dict[str, str], Any]
DONE = "[DONE]"


class Foreign(ThreadingHTTPServer):
    """Chats, and streams that are taken up again, get `answers`, one after another.

    asked, ids: the bodies of chats, and their request ids; fetched: the paths of streams.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: list[Answer] = []
        self.asked: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self.fetched: list[str] = []

    @property
    def url(self) -> str:
        """Its root."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Foreign

    def do_OPTIONS(self) -> None:
        self._send(204, {}, "")

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send(200, {}, json.dumps({"data": [{"id": "foreign"}]}))
        elif self.path.startswith("/v1/streams/"):
            self.server.fetched.append(self.path)
            self._answer()
        else:
            self._send(404, {}, "not here")

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.server.ids.append(self.headers["x-request-id"])
        self._answer()

    def _answer(self) -> None:
        status, headers, told = self.server.answers.pop(0)
        if not status:
            return
        if isinstance(told, list):
            events = [event if event == DONE else json.dumps(event) for event in told]
            text = "".join(f"id: {number}\r\ndata: {event}\r\n\r\n" for number, event in enumerate(events))
        else:
            text = json.dumps(told)
        self._send(status, headers, text)

    def _send(self, status: int, headers: dict[str, str], text: str) -> None:
        data = text.encode()
        allowed = {
            "access-control-allow-origin": "*",
            "access-control-allow-headers": "*, authorization",
            "access-control-expose-headers": "*",
        }
        self.send_response(status)
        for name, value in {**allowed, **headers, "content-length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Not on the terminal."""


@contextmanager
def foreign_server() -> Iterator[Foreign]:
    """One that runs."""
    with Foreign() as server:
        thread = threading.Thread(target=server.serve_forever, name="foreign")
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
