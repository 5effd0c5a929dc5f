"""Embeddings: which vector a checkpoint's files ask for, and what is made of the hidden state that the engine gives."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from operator import mul
from pathlib import Path
from typing import Any

from novainfer.checkpoint import read_json
from novainfer.errors import ConfigError, InvalidRequestError

FLOAT_BYTES = 4
# sentence-transformers' modules, by the last part of their class's name.
_MODULES_FILE = "modules.json"
_POOLING, _NORMALIZE = "Pooling", "Normalize"
_KNOWN = frozenset({"Transformer", _POOLING, _NORMALIZE})
_DEFAULT_FOLDER = "1_Pooling"
_MODE_PREFIX, _LAST_TOKEN = "pooling_mode_", "lasttoken"


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a checkpoint makes one vector of a text. refusal: why it cannot be made here, empty: it can."""

    normalizes: bool = True
    refusal: str = ""

    def check(self) -> None:
        """Raises `InvalidRequestError` if this server cannot make such vectors."""
        if self.refusal:
            raise InvalidRequestError(self.refusal, param="model", code="unsupported_pooling")


def read_pooling(folder: Path) -> Pooling:
    """What the sentence-transformers files of a checkpoint say; the last token, normalised, where there are none."""
    try:
        modules = _read_modules(folder)
        kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
        strange = [kind for kind in kinds if kind not in _KNOWN]
        if strange:
            return Pooling(refusal=f"This model's embeddings need a module of the kind '{strange[0]}', unknown here.")
        paths = [str(module.get("path", "")) for module, kind in zip(modules, kinds, strict=True) if kind == _POOLING]
        modes = _modes(read_json(folder / (paths[0] if paths else _DEFAULT_FOLDER) / "config.json"))
    except ConfigError as error:
        return Pooling(refusal=f"This model's files do not say how to make embeddings: {error}")
    says_nothing = not modules and not modes
    if len(paths) > 1 or not (modes == [_LAST_TOKEN] or says_nothing):
        how = f"pooled by '{', '.join(modes)}'" if modes else "of a pooling that its files do not name"
        words = f"This model's embeddings are {how}; only '{_LAST_TOKEN}' is supported."
        return Pooling(refusal=words)
    return Pooling(normalizes=_NORMALIZE in kinds if modules else True)


def _read_modules(folder: Path) -> list[dict[str, Any]]:
    path = folder / _MODULES_FILE
    if not path.is_file():
        return []
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, list) or not all(isinstance(module, dict) for module in data):
        raise ConfigError(f"{path} does not hold a list of objects")
    return data


def _modes(config: dict[str, Any]) -> list[str]:
    """Those that are on. Each has a flag; newer files name one, or a list."""
    named = config.get("pooling_mode")
    if isinstance(named, str | list):
        return [named] if isinstance(named, str) else list(map(str, named))
    return [name.removeprefix(_MODE_PREFIX) for name, on in config.items() if name.startswith(_MODE_PREFIX) and on]


def check_dimensions(dimensions: int | None, hidden_size: int) -> None:
    """Raises `InvalidRequestError` unless a vector of this model can be cut to so many numbers; None: all."""
    if dimensions is not None and not (type(dimensions) is int and 1 <= dimensions <= hidden_size):
        words = f"dimensions must be between 1 and {hidden_size}, the size of this model's embeddings."
        raise InvalidRequestError(words, param="dimensions")


def finish_vector(hidden: bytes, dimensions: int | None, *, normalize: bool) -> bytes:
    """The first `dimensions` (None: all) numbers of a hidden state, of length 1 if `normalize`, unless all are 0.

    Both are float32, little-endian. Sum and square root are exact but for one rounding each, so the bits are the same
    on every machine.
    """
    kept = hidden if dimensions is None else hidden[: dimensions * FLOAT_BYTES]
    if not normalize:
        return kept
    values = numbers_of(kept)
    norm = math.sqrt(math.fsum(map(mul, values, values)))
    if norm == 0.0:
        return kept
    return struct.pack(f"<{len(values)}f", *[value / norm for value in values])


def numbers_of(vector: bytes) -> tuple[float, ...]:
    """The numbers of a vector, float32, little-endian."""
    return struct.unpack(f"<{len(vector) // FLOAT_BYTES}f", vector)
