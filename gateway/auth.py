"""API keys: kept as SHA-256, compared in constant time, every path closed unless it is named open.

The path that decides is `scope["path"]`, the same one that the router uses, so no spelling of a path can be open
for one and a route for the other.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.context import request_info
from gateway.errors import ApiError
from novainfer.config import ServerConfig
from novainfer.errors import ConfigError

OPEN_PATHS = frozenset({"/livez", "/readyz"})
_HEADERS = (b"x-api-key", b"api-key")

Headers = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class _Key:
    tenant: str
    digest: bytes


class KeyRing:
    """The keys that open this server; without any, everybody is the tenant ''."""

    def __init__(self, keys: Iterable[tuple[str | None, str]]) -> None:
        self._keys = tuple(_make_key(name, key) for name, key in keys)

    @classmethod
    def load(cls, config: ServerConfig) -> KeyRing:
        """Keys from the configuration and its key file; `ConfigError` if the file cannot be read or holds none."""
        keys: list[tuple[str | None, str]] = [(None, key) for key in config.api_key if key]
        if config.api_key_file is not None:
            keys += _read_file(Path(config.api_key_file))
        return cls(keys)

    def tenant(self, headers: Headers) -> str | None:
        """Whose key the headers carry; None if they carry none that is known."""
        if not self._keys:
            return ""
        offered = _offered_key(headers)
        digest = hashlib.sha256(b"" if offered is None else offered).digest()
        found: str | None = None
        for key in self._keys:  # all of them, so that the time says nothing
            if hmac.compare_digest(key.digest, digest):
                found = key.tenant
        return None if offered is None else found


class AuthMiddleware:
    """Answers 401 to everything that carries no key; tells the tenant to what comes after."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        tenant = self._keys.tenant(scope["headers"])
        if tenant is None:
            error = ApiError(
                401, "Incorrect or missing API key.", "invalid_api_key", None, {"www-authenticate": "Bearer"}
            )
            await error.response()(scope, receive, send)
            return
        request_info(scope).tenant = tenant
        await self._app(scope, receive, send)


def _make_key(name: str | None, key: str) -> _Key:
    digest = hashlib.sha256(key.encode()).digest()
    return _Key(name or f"key-{digest.hex()[:8]}", digest)


def _read_file(path: Path) -> list[tuple[str | None, str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path} cannot be read: {error}") from None
    keys: list[tuple[str | None, str]] = []
    for line in lines:
        text = line.strip()
        if text and not text.startswith("#"):
            name, colon, key = text.partition(":")
            keys.append((name.strip(), key.strip()) if colon else (None, text))
    if not keys or not all(key for _, key in keys):
        raise ConfigError(f"--api-key-file {path} has no key, or a line without one")
    return keys


def _offered_key(headers: Headers) -> bytes | None:
    """The one key sent; None for none and for several of one kind, which would be a guess."""
    authorization = [value for name, value in headers if name == b"authorization"]
    if authorization:
        scheme, _, key = authorization[0].strip().partition(b" ")
        return key.strip() or None if len(authorization) == 1 and scheme.lower() == b"bearer" else None
    keys = [value.strip() for name, value in headers if name in _HEADERS]
    return keys[0] or None if len(keys) == 1 else None
