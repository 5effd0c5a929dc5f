"""API keys as they are given, and as the children get them: digests. Only the supervisor's process sees a key."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from novainfer.config import KeyDigest, ServeConfig
from novainfer.errors import ConfigError


def seal_keys(config: ServeConfig) -> ServeConfig:
    """The configuration with digests in place of the keys and of the key file.

    A tenant is named by the file, else after its key's digest. Raises `ConfigError` if the file cannot be read, holds
    no key, or a word that nobody knows.
    """
    server = config.server
    digests = [_digest("", key) for key in server.api_key]
    if server.api_key_file is not None:
        digests += _read_file(Path(server.api_key_file))
    _check_tenants(digests)
    return replace(config, server=replace(server, api_key=(), api_key_file=None), keys=(*config.keys, *digests))


def _digest(name: str, key: str) -> KeyDigest:
    sha256 = hashlib.sha256(key.encode()).hexdigest()
    return KeyDigest(name or f"key-{sha256[:8]}", sha256)


def _read_file(path: Path) -> list[KeyDigest]:
    """One key a line: "KEY", or "NAME:KEY", which names the tenant; after it words as in `_LIMITS`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path} cannot be read: {error}") from None
    digests = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text and not text.startswith("#"):
            name, colon, rest = text.partition(":")
            key, *words = (rest if colon else text).split() or [""]
            if not key:
                raise ConfigError(f"--api-key-file {path} has a line without a key: {number}")
            # Neither the words nor the line are shown: they may hold a key.
            limits = _limits(words, f"--api-key-file {path}, line {number}")
            digests.append(replace(_digest(name.strip() if colon else "", key), **limits))
    if not digests:
        raise ConfigError(f"--api-key-file {path} has no key")
    return digests


_LIMITS: dict[str, Callable[[str], float]] = {
    "weight": float,
    "max-requests": int,
    "max-queued": int,
    "tokens-per-minute": int,
}


def _limits(words: list[str], where: str) -> dict[str, Any]:
    """The fields of a `KeyDigest` that the words of a line set, each word "name=value"."""
    found: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in _LIMITS or name.replace("-", "_") in found:
            known = ", ".join(f"{known}=" for known in _LIMITS)
            raise ConfigError(f"{where}: after the key come, once each: {known}")
        try:
            value = _LIMITS[name](text)
        except ValueError:
            value = 0
        if not 0 < value < 1e15:
            raise ConfigError(f"{where}: {name} must be a number above 0")
        found[name.replace("-", "_")] = value
    return found


def _check_tenants(digests: Sequence[KeyDigest]) -> None:
    """Several keys of one tenant share its limits, so they must say the same."""
    first: dict[str, KeyDigest] = {}
    for digest in digests:
        if replace(digest, sha256="") != replace(first.setdefault(digest.tenant, digest), sha256=""):
            raise ConfigError(f"the keys of '{digest.tenant}' have different limits")
