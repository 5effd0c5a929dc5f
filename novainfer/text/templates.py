"""The chat templates of a checkpoint as it stores them: in one file or several, or inside of another. Compiles none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from novainfer.checkpoint import read_json
from novainfer.errors import ConfigError


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Sources by name; 'default' is the one used unless tools are given and there is a 'tool_use' one.

    config: what tokenizer_config.json says. Raises `ConfigError` for a file that cannot be read.
    """
    named: dict[str, str] = {}
    inline = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(inline, str):
        named["default"] = inline
    elif isinstance(inline, list):
        for item in inline:
            if isinstance(item, dict) and isinstance(item.get("template"), str):
                named[str(item.get("name"))] = item["template"]
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        named[path.stem] = read_template(path)
    if (folder / "chat_template.jinja").is_file():
        named["default"] = read_template(folder / "chat_template.jinja")
    return named


def read_template(path: Path) -> str:
    """The source in `path`. Raises `ConfigError`."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the chat template {path} is not UTF-8: its byte {error.start} is not text") from None
    except OSError as error:
        raise ConfigError(f"the chat template {path} cannot be read: {error.strerror}") from None
