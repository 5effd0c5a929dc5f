"""A checkpoint's config as transformers understands it, kept so that the next start need not import transformers.

That takes most of a second of a processor, and a start has nothing else to do but such things. Kept are configs
of families with a decoder of our own, if they make the same decoder as the original. Loads neither torch nor
transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kernels.native.build import cache_dir
from novainfer.config import ModelConfig, ServeConfig

_IS_KEPT = "NOVA_CONFIG_IS_KEPT"  # in the environment of the ranks' zygote
_MOST_FILES = 32  # of some kilobytes
_FOREIGN = ("auto_map", "configuration_files")  # of a config.json: other files say what it means
_DIGEST_BYTES = 16
# Who decides what is read in a config.
_SOURCES = ("kept_config.py", "models/families.py", "models/loader.py", "models/rope.py", "quantized/scheme.py")


class KeptConfig:
    """Its values are attributes, as a `PreTrainedConfig`'s are."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        vars(self).update(values)

    def get_text_config(self) -> KeptConfig:
        """Of a checkpoint that does not only read text, the part that does."""
        text = vars(self).get("text_config")
        return self if text is None else KeptConfig(text)


def kept_path(folder: Path, config: ModelConfig) -> Path | None:
    """Where the config of the checkpoint in `folder`, as it is now, is or may be kept; None if it is not to be.

    The name is a digest of config.json and of who reads it.
    """
    if config.model_backend == "transformers" or not config.weight_cache_gib:
        return None
    try:
        text = (folder / "config.json").read_bytes()
        if not json.loads(text).keys().isdisjoint(_FOREIGN):
            return None
        digest = hashlib.blake2b(f"transformers {version('transformers')}".encode(), digest_size=_DIGEST_BYTES)
        for part in (text, *((Path(__file__).parent / name).read_bytes() for name in _SOURCES)):
            digest.update(b"\0" + part)
    except (OSError, ValueError, RecursionError, AttributeError):  # the last: it is no object
        return None
    return cache_dir() / "configs" / f"{digest.hexdigest()}.json"


def read_kept(path: Path | None) -> KeptConfig | None:
    """What is kept there; None if there is nothing, or it is damaged."""
    if path is None:
        return None
    try:
        checksum, text = path.read_bytes().split(b"\n", 1)
        return KeptConfig(json.loads(text)) if checksum == _checksum(text) else None
    except (OSError, ValueError):
        return None


def keep(path: Path, values: Mapping[str, Any]) -> None:
    """For the next start; what goes wrong costs that one its time, and no more."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        text = json.dumps(values).encode()
        unfinished.write_bytes(_checksum(text) + b"\n" + text)
        unfinished.replace(path)
        for old in sorted(path.parent.iterdir(), key=lambda one: one.stat().st_mtime)[:-_MOST_FILES]:
            old.unlink(missing_ok=True)


def tell_zygote(folder: Path, config: ServeConfig) -> None:
    """For the zygote that this process will have started: whether its ranks will ask for transformers at all."""
    os.environ.pop(_IS_KEPT, None)
    if config.parallel.executor == "model" and read_kept(kept_path(folder, config.model)) is not None:
        os.environ[_IS_KEPT] = "1"


def is_transformers_wanted() -> bool:
    """In the zygote: whether a rank will need it, as far as is known."""
    return _IS_KEPT not in os.environ


def _checksum(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES).hexdigest().encode()
