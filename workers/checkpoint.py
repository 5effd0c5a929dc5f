"""The checkpoint folder that a worker loads from. Reads no weights and loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from novainfer import checkpoint
from novainfer.errors import ConfigError, UnsupportedModelError


def find_checkpoint(model: str, revision: str | None = None) -> Path:
    """See `resolve_checkpoint`; here with the weights. Raises `UnsupportedModelError` if there is none."""
    try:
        folder = checkpoint.resolve_checkpoint(model, revision=revision, files=checkpoint.WEIGHT_FILES)
    except ConfigError as error:
        raise UnsupportedModelError(str(error)) from error
    if not (folder / "config.json").is_file():
        raise UnsupportedModelError(f"'{folder}' has no config.json, it is not a Hugging Face checkpoint")
    return folder


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of the checkpoint; empty if the file does not exist. Raises `UnsupportedModelError`."""
    try:
        return checkpoint.read_json(folder / name)
    except ConfigError as error:
        raise UnsupportedModelError(str(error)) from error
