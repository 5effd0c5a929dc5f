"""Spans of a real server, as an OTLP collector gets them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.servers import RunningServer

pytest.importorskip("opentelemetry.exporter", reason="the extra 'otel' is not installed (make test-deploy)")

pytestmark = pytest.mark.deploy

PATIENCE = 60  # seconds; only a failing test waits that long
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "xylophone"


class Collector(ThreadingHTTPServer):
    """Keeps the spans that it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.news = threading.Condition()
        self.spans: list[Any] = []

    def wait_for(self, number: int) -> list[Any]:
        """So many spans, in the order of their ends."""
        with self.news:
            assert self.news.wait_for(lambda: len(self.spans) >= number, timeout=PATIENCE)
            return sorted(self.spans, key=lambda span: span.end_time_unix_nano)


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        with self.server.news:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    self.server.spans += scope.spans
            self.server.news.notify_all()
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Silence."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def attributes(span: Any) -> dict[str, Any]:
    found = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


def test_given_a_collector_when_generations_end_then_each_is_a_span_of_its_clients_trace_without_its_text(
    collector: Collector, tmp_path: Path
) -> None:
    endpoint = f"http://127.0.0.1:{collector.server_address[1]}/v1/traces"
    with RunningServer("--otlp-traces-endpoint", endpoint, log=tmp_path / "log") as server:
        parent = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "x-request-id": "my-own-id"}
        with server.http(**parent) as http:
            body = {
                "messages": [{"role": "user", "content": SECRET}],
                "max_tokens": 7,
                "ignore_eos": True,
                "top_p": 0.5,
            }
            assert http.post("/v1/chat/completions", json=body).status_code == 200
        with server.http() as http:
            body = {"prompt": SECRET, "max_tokens": 2, "n": 2, "ignore_eos": True}
            assert http.post("/v1/completions", json=body).status_code == 200
        server.stop()
        chat, text = collector.wait_for(2)
    assert (chat.name, text.name) == ("chat demo", "text_completion demo")
    assert (chat.trace_id.hex(), chat.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert text.trace_id.hex() != TRACE_ID
    known = attributes(chat)
    assert known["gen_ai.operation.name"] == "chat"
    assert known["gen_ai.provider.name"] == "novainfer"
    assert known["gen_ai.usage.output_tokens"] == 7
    assert known["gen_ai.request.top_p"] == 0.5
    assert known["gen_ai.response.finish_reasons"] == ["length"]
    assert known["novainfer.request_id"] == "my-own-id"
    assert known["novainfer.outcome"] == "finished"
    first = next(event for event in chat.events if event.name == "gen_ai.first_token")
    assert chat.start_time_unix_nano < first.time_unix_nano < chat.end_time_unix_nano
    assert attributes(text)["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert SECRET not in str(chat) + str(text)


def test_an_endpoint_that_is_none_when_served_then_the_error_says_so() -> None:
    command = [sys.executable, "-m", "novainfer.entrypoints.cli", "serve", "--otlp-traces-endpoint", "localhost:4317"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--otlp-traces-endpoint must be an http" in done.stderr
