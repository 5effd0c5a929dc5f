"""A small client of a running server, for `novainfer chat`, `generate` and `models`. Standard library only."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from novainfer.errors import NovaInferError

DEFAULT_BASE_URL = "http://127.0.0.1:8000"


class ApiError(NovaInferError):
    """The server refused, failed, or could not be reached; the text is for a human."""


@dataclass(frozen=True, slots=True)
class ApiClient:
    """One server, by its root URL (a trailing `/v1` is taken off). Proxies are not used."""

    base_url: str
    api_key: str | None = None
    timeout: float = 600.0  # seconds without a byte

    @classmethod
    def from_options(cls, base_url: str | None, api_key: str | None) -> ApiClient:
        """Options first, then NOVAINFER_BASE_URL and NOVAINFER_API_KEY (the first key of a list)."""
        url = base_url or os.environ.get("NOVAINFER_BASE_URL") or DEFAULT_BASE_URL
        key = api_key or os.environ.get("NOVAINFER_API_KEY", "").split(",")[0].strip() or None
        return cls(url.rstrip("/").removesuffix("/v1"), key)

    def get(self, path: str) -> Any:
        """The JSON answer to a GET. Raises `ApiError`."""
        with self._request("GET", path, None) as response:
            return _parse(response.read())

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer to a POST. Raises `ApiError`."""
        with self._request("POST", path, body) as response:
            return _parse(response.read())

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The events of a server-sent stream, up to `[DONE]`. Closing the iterator disconnects, which cancels."""
        with self._request("POST", path, {**body, "stream": True}) as response:
            while line := response.readline():
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = _parse(data)
                if "error" in event:
                    raise ApiError(_error_text(event))
                yield event
        raise ApiError("the stream broke off before its end")

    def default_model(self) -> str:
        """The first model that the server offers."""
        models = self.get("/v1/models")["data"]
        if not models:
            raise ApiError(f"{self.base_url} offers no model")
        return str(models[0]["id"])

    @contextlib.contextmanager
    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        headers = {"Accept": "application/json, text/event-stream"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        payload = None
        if body is not None:
            payload, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        url = urlsplit(self.base_url)
        connection = self._connection()
        try:
            connection.request(method, url.path + path, payload, headers)
            response = connection.getresponse()
            if response.status >= 400:
                raise ApiError(_refusal(response))
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise ApiError(f"cannot talk to {self.base_url}: {error or type(error).__name__}") from None
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        url = urlsplit(self.base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ApiError(f"'{self.base_url}' is not an http(s) URL")
        if url.scheme == "https":
            return http.client.HTTPSConnection(url.hostname, url.port, timeout=self.timeout)
        return http.client.HTTPConnection(url.hostname, url.port, timeout=self.timeout)


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        raise ApiError("the server's answer is not JSON") from None


def _refusal(response: http.client.HTTPResponse) -> str:
    try:
        text = _error_text(json.loads(response.read()))
    except (ValueError, AttributeError):
        text = response.reason
    return f"{response.status}: {text}"


def _error_text(answer: dict[str, Any]) -> str:
    error = answer.get("error", answer)
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
