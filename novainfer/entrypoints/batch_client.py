"""Whole answers over kept connections (HTTP/1.1, asyncio), asked for again while a server is full or away."""

from __future__ import annotations

import asyncio
import math
import random
import re
import ssl
from dataclasses import dataclass
from time import monotonic
from urllib.parse import urlsplit

import h11

from novainfer.errors import ConfigError, NovaInferError

FULL = frozenset({429, 502, 503})  # not now; 502 is a proxy's word for a server that is away
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between tries, where the server names none
LEAST_PAUSE = 0.05
_JITTER = 0.25  # of a pause
_READ_BYTES = 1 << 18
_VISIBLE = re.compile(r"[!-~]*", re.ASCII)


class NoAnswer(NovaInferError):
    """The server could not be reached, or the connection broke before all of the answer was there.

    late: for so many seconds it had the request and did not answer in time; 0: it was something else.
    """

    late: float = 0.0


class _Stale(Exception):
    """The server has closed a kept connection before it had the request."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer. headers: names in lower case."""

    status: int
    headers: dict[str, str]
    data: bytes


class KeptClient:
    """Connections to one server, by its root URL. For one event loop.

    timeout: seconds that one try may take (0 = no limit). retry_for: seconds of pauses until a request is given up, and
    for which nobody could connect until none is tried twice.
    """

    def __init__(self, base_url: str, api_key: str | None, *, timeout: float, retry_for: float) -> None:
        """Raises `ConfigError` for what is no URL, or a key that cannot be sent."""
        url = urlsplit(base_url)
        try:
            port = url.port
        except ValueError:
            port = -1
        if url.scheme not in ("http", "https") or not url.hostname or port == -1 or not _VISIBLE.fullmatch(base_url):
            raise ConfigError(f"'{base_url}' is not an http(s) URL")
        if not _VISIBLE.fullmatch(api_key or ""):
            raise ConfigError("the API key holds a character that no header may hold")
        self.base_url = base_url
        self._path = url.path
        self._context = ssl.create_default_context() if url.scheme == "https" else None
        self._address = url.hostname, port or (443 if self._context else 80)
        host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
        self._headers = [("Host", host if port is None else f"{host}:{port}"), ("Accept", "application/json")]
        if api_key:
            self._headers.append(("Authorization", f"Bearer {api_key}"))
        self._timeout = timeout or None
        self._retry_for = retry_for
        self._idle: list[_Connection] = []
        self._unreachable_since: float | None = None
        self._num_answers = 0
        self.num_retries = 0
        self.trouble: str | None = None  # why the last try failed, until one does not

    async def ask_patiently(self, path: str, payload: bytes) -> Answer:
        """The answer to a POST; that of a full server, or `NoAnswer`, once there is no patience left.

        A full server is given up when no request of this client has been answered during so many seconds of pauses.
        """
        refused, broken, tries, answers = 0.0, 0.0, 0, self._num_answers
        while True:
            try:
                answer = await self.ask("POST", path, payload)
            except NoAnswer as error:
                self.trouble = str(error)
                if broken >= self._retry_for or self._is_gone():
                    raise
                broken += error.late  # what takes too long once would take as long again, for ever
                if broken < self._retry_for:
                    broken += await self._pause(_backoff(tries), broken)
            else:
                if answer.status not in FULL or answer.headers.get("x-should-retry") == "false":
                    self.trouble = None
                    self._num_answers += 1
                    return answer
                self.trouble = f"{answer.status} from {self.base_url}"
                if answers != self._num_answers:
                    answers, refused = self._num_answers, 0.0
                if refused >= self._retry_for:
                    return answer
                asked = _asked_pause(answer.headers)
                refused += await self._pause(_backoff(tries) if asked is None else asked, refused)
            tries += 1

    async def _pause(self, seconds: float, waited: float) -> float:
        """Sleep about so long, at most what is left of the patience. Returns how long."""
        self.num_retries += 1
        seconds = min(seconds * random.uniform(1.0, 1.0 + _JITTER), self._retry_for - waited)
        seconds = max(seconds, LEAST_PAUSE)
        await asyncio.sleep(seconds)
        return seconds

    async def ask(self, method: str, path: str, payload: bytes = b"") -> Answer:
        """One try. Raises `NoAnswer`."""
        headers = self._headers
        if method == "POST":
            headers = [*headers, ("Content-Type", "application/json"), ("Content-Length", str(len(payload)))]
        request = h11.Request(method=method, target=self._path + path, headers=headers)
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                return await self._exchange(request, payload)
        except (OSError, EOFError, h11.RemoteProtocolError) as error:  # TimeoutError is an OSError
            words = "no answer in time" if limit.expired() else str(error) or type(error).__name__
            failed = NoAnswer(f"cannot talk to {self.base_url}: {words}")
            failed.late = (self._timeout or 0.0) * limit.expired()
            raise failed from None

    def close(self) -> None:
        """Close the connections that are free; the others are their requests' matter."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange(self, request: h11.Request, payload: bytes) -> Answer:
        while self._idle:
            connection = self._idle.pop()
            try:
                return await self._over(connection, request, payload)
            except _Stale:
                continue
        return await self._over(await self._connect(), request, payload)

    async def _over(self, connection: _Connection, request: h11.Request, payload: bytes) -> Answer:
        try:
            answer = await connection.exchange(request, payload)
        except BaseException:
            connection.close()
            raise
        if connection.is_kept():
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    async def _connect(self) -> _Connection:
        try:
            reader, writer = await asyncio.open_connection(*self._address, ssl=self._context)
        except OSError:
            self._unreachable_since = self._unreachable_since or monotonic()
            raise
        self._unreachable_since = None
        return _Connection(reader, writer)

    def _is_gone(self) -> bool:
        since = self._unreachable_since
        return since is not None and monotonic() - since >= self._retry_for


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT)
        self._is_new = True

    async def exchange(self, request: h11.Request, payload: bytes) -> Answer:
        """Send it and read the answer. Raises `_Stale`, `OSError`, `EOFError`, `h11.RemoteProtocolError`."""
        if self._reader.at_eof():
            raise _Stale
        parts = [self._http.send(request), self._http.send(h11.Data(payload)), self._http.send(h11.EndOfMessage())]
        # Not waited for: a server that will not read all of it has answered, and closes.
        self._writer.write(b"".join([part for part in parts if part]))
        try:
            data = await self._reader.read(_READ_BYTES)
        except OSError:
            if self._is_new:
                raise
            raise _Stale from None
        if not data:
            raise EOFError("it closed the connection without an answer") if self._is_new else _Stale
        self._is_new = False
        return await self._read_answer(data)

    async def _read_answer(self, data: bytes) -> Answer:
        head: h11.Response | None = None
        body = []
        self._http.receive_data(data)
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(_READ_BYTES))
            elif isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.Data):
                body.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage) and head is not None:
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
                return Answer(head.status_code, headers, b"".join(body))
            elif isinstance(event, h11.ConnectionClosed):
                raise EOFError("it closed the connection without an answer")

    def is_kept(self) -> bool:
        """Whether another request may go over it."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        if self._writer.is_closing() or self._reader.at_eof():
            return False
        self._http.start_next_cycle()
        return True

    def close(self) -> None:
        self._writer.transport.abort()


def _backoff(tries: int) -> float:
    return min(FIRST_PAUSE * 2.0 ** min(tries, 10), LONGEST_PAUSE)


def _asked_pause(headers: dict[str, str]) -> float | None:
    """Seconds that the server asks for; None: nothing that we can read (a date, say)."""
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * unit
        except ValueError:
            continue
        if math.isfinite(seconds) and seconds >= 0:
            return seconds
    return None
