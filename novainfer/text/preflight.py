"""What can be said about a checkpoint's text files before any process is started: seconds sooner, and once.

Opens all but the tokenizer itself, which may be large. Used by the entrypoints.
"""

from __future__ import annotations

import logging
from pathlib import Path

from novainfer.checkpoint import read_json
from novainfer.errors import ConfigError
from novainfer.text.chat_template import ChatTemplate
from novainfer.text.generation_defaults import FILE, GenerationDefaults
from novainfer.text.templates import read_template, read_templates
from novainfer.text.tokenizer import find_tokenizer

logger = logging.getLogger(__name__)


def check_text_files(folder: Path, chat_template: str | None = None) -> None:
    """Raise `ConfigError` for a file in the tokenizer's `folder` that no gateway could use; log what has no effect.

    chat_template: the path of one that takes the place of the model's own. No template at all is no fault.
    """
    find_tokenizer(folder)
    if chat_template is None:
        config = read_json(folder / "tokenizer_config.json")
        where, sources = f"{folder}: ", read_templates(folder, config)
    else:
        where, sources = f"--chat-template {chat_template}: ", {"default": read_template(Path(chat_template))}
    try:
        ChatTemplate(sources, {})
    except ConfigError as error:
        raise ConfigError(f"{where}{error}") from None
    ignored = GenerationDefaults.read(folder).without_effect
    if ignored:
        logger.warning("%s: %s: not supported, without effect", folder / FILE, ", ".join(ignored))
