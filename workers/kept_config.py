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
from novainfer.config import ModelConfig

_IS_KEPT = "NOVA_CONFIG_IS_KEPT"  # in the environment of the ranks' zygote
_MOST = 32  # files of some kilobytes
_FOREIGN = ("auto_map", "configuration_files")  # of a config.json: other files say what it means
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


def read_kept(folder: Path, config: ModelConfig) -> KeptConfig | None:
    """Of the checkpoint in `folder`; None if none is kept, or it is not wanted."""
    if not _may_be_kept(config):
        return None
    try:
        checksum, text = _path(folder).read_bytes().split(b"\n", 1)
        return KeptConfig(json.loads(text)) if checksum == _checksum(text) else None
    except (OSError, ValueError):
        return None


def keep(folder: Path, config: ModelConfig, values: Mapping[str, Any]) -> None:
    """For the next start; what goes wrong costs that one its time, and no more."""
    if not _may_be_kept(config) or any(name in values for name in _FOREIGN):
        return
    with suppress(OSError):
        path = _path(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        text = json.dumps(values).encode()
        unfinished.write_bytes(_checksum(text) + b"\n" + text)
        unfinished.replace(path)
        for old in sorted(path.parent.iterdir(), key=lambda one: one.stat().st_mtime)[:-_MOST]:
            old.unlink(missing_ok=True)


def tell_zygote(folder: Path, config: ModelConfig) -> None:
    """For the zygote that this process will have started: whether its ranks will ask for transformers at all."""
    os.environ.pop(_IS_KEPT, None)
    if read_kept(folder, config) is not None:
        os.environ[_IS_KEPT] = "1"


def is_transformers_wanted() -> bool:
    """In the zygote: whether a rank will need it, as far as is known."""
    return _IS_KEPT not in os.environ


def _may_be_kept(config: ModelConfig) -> bool:
    return config.model_backend != "transformers" and config.weight_cache_gib > 0


def _checksum(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).hexdigest().encode()


def _path(folder: Path) -> Path:
    """The same for the same file, read by the same code. Raises OSError."""
    digest = hashlib.blake2b(f"transformers {version('transformers')}".encode(), digest_size=16)
    for source in (folder / "config.json", *(Path(__file__).parent / name for name in _SOURCES)):
        digest.update(b"\0" + source.read_bytes())
    return cache_dir() / "configs" / f"{digest.hexdigest()}.json"
