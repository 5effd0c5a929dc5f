"""The chat page: the files of `gateway/web`, and the redirect of a browser that asks for the server's root.

They hold nothing of the server's and are read once. Their policy lets the page load and run its own files alone; it may
connect anywhere, because the server that it talks to can be set in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from starlette.exceptions import HTTPException
from starlette.responses import Response

from gateway.auth import PAGE_PATHS
from gateway.errors import to_api_error
from gateway.routes.endpoint import Call, Handler

FOLDER = Path(__file__).resolve().parent.parent / "web"
_ROOT, _PAGE = "/", "/ui"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src *; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
# Not the machine's own table, which may say otherwise: browsers run no script of another type.
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",  # kept, but asked for again: a new release has new files
    }
)


@dataclass(frozen=True, slots=True)
class _File:
    data: bytes
    media_type: str
    etag: str


def load() -> dict[str, Handler]:
    """Path -> handler. Raises `OSError` if a file of the page is missing."""
    handlers: dict[str, Handler] = {path: partial(_send, _read(path)) for path in PAGE_PATHS - {_ROOT}}
    return {**handlers, _ROOT: _to_page}


def _read(path: str) -> _File:
    file = FOLDER / ("index.html" if path == _PAGE else path.removeprefix(f"{_PAGE}/"))
    data = file.read_bytes()
    return _File(data, _TYPES[file.suffix], f'"{hashlib.sha256(data).hexdigest()[:32]}"')


async def _send(file: _File, call: Call) -> Response:
    headers = {**_HEADERS, "etag": file.etag}
    if file.etag in call.info.fields.get(b"if-none-match", b"").decode("latin-1"):
        return Response(status_code=304, headers=headers)
    return Response(file.data, headers=headers, media_type=file.media_type)


async def _to_page(call: Call) -> Response:
    """For browsers; programs are told, as of any other path, that there is nothing."""
    if b"text/html" not in call.info.fields.get(b"accept", b""):
        raise to_api_error(HTTPException(404))
    # No path from the root: a proxy may have put us below a prefix.
    return Response(status_code=302, headers={**_HEADERS, "location": _PAGE.lstrip("/"), "vary": "accept"})
