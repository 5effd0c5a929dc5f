"""Where a checkpoint lies on disk, and its small JSON files. Reads no weights and loads no torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import novainfer
from novainfer.config import DEMO_MODEL
from novainfer.errors import UnsupportedModelError

DOWNLOAD_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"]


def find_checkpoint(model: str, revision: str | None = None) -> Path:
    """The folder of a checkpoint: the embedded demo model, a local folder, or a hub id (downloaded if need be).

    With HF_HUB_OFFLINE=1 only the hub's local cache is searched. Raises `UnsupportedModelError` if there is none.
    """
    folder = Path(novainfer.__file__).parent / "assets" / "demo" if model == DEMO_MODEL else Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UnsupportedModelError(f"'{folder}' has no config.json, it is not a Hugging Face checkpoint")
        return folder
    if model == DEMO_MODEL or folder.is_absolute() or model.startswith((".", "~")) or model.count(os.sep) != 1:
        raise UnsupportedModelError(f"there is no checkpoint folder '{folder}'")
    return _download(model, revision)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of the checkpoint (config.json, generation_config.json); empty if the file does not exist."""
    path = folder / name
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedModelError(f"'{path}' is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise UnsupportedModelError(f"'{path}' does not hold a JSON object")
    return data


def _download(repo: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=DOWNLOAD_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).split("\n")[0]
        raise UnsupportedModelError(
            f"'{repo}' is neither a local folder nor a model the hub gave us: {reason}"
        ) from error
