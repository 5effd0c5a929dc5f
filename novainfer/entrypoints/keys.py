"""API keys as they are given, and as the children get them: digests. Only the supervisor's process sees a key."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from novainfer.config import KeyDigest, ServeConfig
from novainfer.errors import ConfigError


def seal_keys(config: ServeConfig) -> ServeConfig:
    """The configuration with digests in place of the keys and of the key file.

    A tenant is named by the file, else after its key's digest. Raises `ConfigError` if the file cannot be read or holds
    no key.
    """
    server = config.server
    digests = [_digest("", key) for key in server.api_key]
    if server.api_key_file is not None:
        digests += _read_file(Path(server.api_key_file))
    return replace(config, server=replace(server, api_key=(), api_key_file=None), keys=(*config.keys, *digests))


def _digest(name: str, key: str) -> KeyDigest:
    sha256 = hashlib.sha256(key.encode()).hexdigest()
    return KeyDigest(name or f"key-{sha256[:8]}", sha256)


def _read_file(path: Path) -> list[KeyDigest]:
    """One key a line; "name:key" names the tenant."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path} cannot be read: {error}") from None
    keys: list[tuple[str, str]] = []
    for line in lines:
        text = line.strip()
        if text and not text.startswith("#"):
            name, colon, key = text.partition(":")
            keys.append((name.strip(), key.strip()) if colon else ("", text))
    if not keys or not all(key for _, key in keys):
        raise ConfigError(f"--api-key-file {path} has no key, or a line without one")
    return [_digest(name, key) for name, key in keys]
