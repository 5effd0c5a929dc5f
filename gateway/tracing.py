"""OpenTelemetry spans of generations, for `--otlp-traces-endpoint`. Nothing of it is imported without that.

One server span for each generation, made when it has ended from the times that are known by then: it costs nothing
while tokens flow. Its parent is the client's (W3C `traceparent`), its attributes are those of the GenAI conventions.
"""

from __future__ import annotations

import time
from typing import Any

from gateway.context import RequestInfo
from gateway.generation import Generation
from gateway.metrics import FAILED
from novainfer import __version__

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
}
_NS = 1_000_000_000


class Tracing:
    """Sends spans from a thread of its own, several at a time; what cannot be sent is dropped, and the SDK says so."""

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": "novainfer", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("novainfer", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, generation: Generation, info: RequestInfo, model: str) -> None:
        """Of a generation that has been closed."""
        from opentelemetry.trace import SpanKind, StatusCode

        carrier = {
            str(name, "ascii"): str(value, "latin-1")
            for name, value in info.received
            if name in (b"traceparent", b"tracestate")
        }
        operation = _OPERATIONS.get(info.handler, "text_completion")
        figures = generation.figures()
        began = time.time_ns() - int((time.perf_counter() - info.started) * _NS)
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes=_attributes(generation, info, operation, model),
            start_time=began,
        )
        if figures["first_token_ms"]:
            span.add_event("gen_ai.first_token", timestamp=began + int(figures["first_token_ms"] * 1e6))
        if generation.outcome == FAILED:
            span.set_status(StatusCode.ERROR)
        span.end()

    def close(self) -> None:
        """Send what is left, for some seconds at most."""
        self._provider.shutdown()


def _attributes(generation: Generation, info: RequestInfo, operation: str, model: str) -> dict[str, Any]:
    prompt, figures = generation.prompts[0], generation.figures()
    params = prompt.params
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "novainfer",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.max_tokens": prompt.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.usage.input_tokens": figures["prompt_tokens"],
        "gen_ai.usage.output_tokens": figures["generation_tokens"],
        "gen_ai.response.finish_reasons": [str(output.finish_reason or "none") for output in generation.outputs],
        "novainfer.request_id": info.request_id,
        "novainfer.tenant": info.tenant,
        "novainfer.outcome": generation.outcome,
        "novainfer.cached_tokens": figures["cached_tokens"],
        "novainfer.mode": generation.engine.mode,
        "http.route": info.handler,
    }
    if figures["first_token_ms"]:
        found["gen_ai.server.time_to_first_token"] = figures["first_token_ms"] / 1000
    return found
