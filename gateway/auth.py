"""API keys: known as SHA-256 alone, compared in constant time, every path closed unless it is named open.

The path that decides is `scope["path"]`, the same one that the router uses, so no spelling of a path can be open
for one and a route for the other.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.context import request_info
from gateway.errors import ApiError
from novainfer.config import KeyDigest, ServeConfig
from novainfer.errors import ConfigError

OPEN_PATHS = frozenset({"/livez", "/readyz"})
# The chat page's files, the same for everybody, open with `--web-ui`. Each is named: a prefix would open what is added.
PAGE_PATHS = frozenset(
    {
        "/",
        "/ui",
        "/ui/app.js",
        "/ui/chat.js",
        "/ui/answer.js",
        "/ui/api.js",
        "/ui/settings.js",
        "/ui/state.js",
        "/ui/text.js",
        "/ui/style.css",
        "/ui/icon.svg",
    }
)
_HEADERS = (b"x-api-key", b"api-key")

Headers = Iterable[tuple[bytes, bytes]]


class KeyRing:
    """The keys that open this server; without any, everybody is the tenant ''."""

    def __init__(self, keys: Iterable[KeyDigest]) -> None:
        self._keys = tuple((key.tenant, bytes.fromhex(key.sha256)) for key in keys)

    @classmethod
    def of(cls, config: ServeConfig) -> KeyRing:
        """The configuration's digests. `ConfigError` if it holds keys: they are not sealed, and would open nothing."""
        if config.server.api_key or config.server.api_key_file is not None:
            raise ConfigError("a gateway takes digests of API keys, not keys or a key file")
        return cls(config.keys)

    def tenant(self, headers: Headers) -> str | None:
        """Whose key the headers carry; None if they carry none that is known."""
        if not self._keys:
            return ""
        offered = _offered_key(headers)
        digest = hashlib.sha256(b"" if offered is None else offered).digest()
        found: str | None = None
        for tenant, known in self._keys:  # all of them, so that the time says nothing
            if hmac.compare_digest(known, digest):
                found = tenant
        return None if offered is None else found


class AuthMiddleware:
    """Answers 401 to everything that carries no key; tells the tenant to what comes after."""

    def __init__(self, app: ASGIApp, keys: KeyRing, open_paths: frozenset[str] = OPEN_PATHS) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """An application, as of ASGI; no coroutine of its own, which each turn of its task would go through."""
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            return self._app(scope, receive, send)
        tenant = self._keys.tenant(scope["headers"])
        if tenant is None:
            error = ApiError(
                401, "Incorrect or missing API key.", "invalid_api_key", None, {"www-authenticate": "Bearer"}
            )
            return error.response(scope["path"])(scope, receive, send)
        request_info(scope).tenant = tenant
        return self._app(scope, receive, send)


def _offered_key(headers: Headers) -> bytes | None:
    """The one key sent; None for none and for several of one kind, which would be a guess."""
    authorization = [value for name, value in headers if name == b"authorization"]
    if authorization:
        scheme, _, key = authorization[0].strip().partition(b" ")
        return key.strip() or None if len(authorization) == 1 and scheme.lower() == b"bearer" else None
    keys = [value.strip() for name, value in headers if name in _HEADERS]
    return keys[0] or None if len(keys) == 1 else None
