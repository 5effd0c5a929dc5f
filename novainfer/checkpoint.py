"""Where a checkpoint lies on disk, and its small JSON files. Opens no weights; used by every process."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from novainfer.config import DEMO_MODEL
from novainfer.errors import ConfigError

WEIGHT_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    "config.json",
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_DEMO_FOLDER = Path(__file__).resolve().parent / "assets" / "demo"


def resolve_checkpoint(name: str, *, revision: str | None = None, files: tuple[str, ...] = TOKENIZER_FILES) -> Path:
    """The local folder of `name`: 'demo', a folder, or a hub id (its `files` are fetched, or found in the hub's cache).

    Raises `ConfigError` when there is no such folder and the hub has (or, offline, its cache has) none.
    """
    if name == DEMO_MODEL and not Path(name).is_dir():
        return _existing(_DEMO_FOLDER, "the embedded demo model is missing from this installation")
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path
    if not _HUB_ID.fullmatch(name):
        raise ConfigError(f"model '{name}' is neither a folder nor a Hugging Face hub id")
    return _from_hub(name, revision, files)


def _existing(path: Path, otherwise: str) -> Path:
    if not path.is_dir():
        raise ConfigError(otherwise)
    return path


def _from_hub(name: str, revision: str | None, files: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download  # only hub ids need it, and it takes time to import

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
    except Exception as error:  # network, permission, no such repository, offline: all mean "not available"
        reason = str(error).split("\n")[0]
        raise ConfigError(f"model '{name}' is no local folder and the hub gave none: {reason}") from None


def model_digest(folder: Path) -> str:
    """'sha256:' and the SHA-256 of what decides the tokens: config.json and every safetensors file, by name and size.

    Reads all of it; the GIL is free meanwhile. Raises `ConfigError` if the folder has no such files or one of them
    cannot be read.
    """
    digest = hashlib.sha256()
    weights = sorted(folder.glob("*.safetensors"), key=lambda path: path.name)
    if not weights:
        raise ConfigError(f"{folder} has no safetensors files")
    for path in (folder / "config.json", *weights):
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"{path.name}\0{size}\0".encode())
                hashlib.file_digest(file, lambda: digest)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    return "sha256:" + digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, or {} where there is no such file; `ConfigError` where it cannot be read."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return data
