"""Where a checkpoint lies on disk, and its small JSON files. Opens no weights; used by every process."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from novainfer.config import DEMO_MODEL, ModelConfig
from novainfer.errors import ConfigError

WEIGHT_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py")
_OTHER_FORMATS = ("consolidated*.safetensors", "original/*", "metal/*", "onnx/*")  # the same weights once more
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    "config.json",
    "modules.json",
    "*_*/config.json",  # of sentence-transformers' modules
)
# The sizes in a config.json, by all the names that they have, and the largest that is no slip of the pen.
_SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 2**20),
    **dict.fromkeys(("intermediate_size", "n_inner", "moe_intermediate_size", "ffn_dim"), 2**24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 2**14),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads", "head_dim"), 2**16),
    "vocab_size": 2**26,
}
_LENGTHS = ("max_position_embeddings", "n_positions")
_LONGEST = 2**26  # tokens
_ROTARY_NUMBERS = (
    "rope_theta",
    "factor",
    "attention_factor",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
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
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=list(files), ignore_patterns=list(_OTHER_FORMATS))
        )
    except Exception as error:  # network, permission, no such repository, offline: all mean "not available"
        reason = str(error).split("\n")[0]
        raise ConfigError(
            f"model '{name}' is not a local folder, and could not be had from the hub: {reason}"
        ) from None


def model_digest(folder: Path) -> str:
    """'sha256:' and the SHA-256 of what decides the tokens: config.json and every safetensors file, by name and size.

    Reads all of it; the GIL is free meanwhile. Raises `ConfigError` if the folder has no such files or one of them
    cannot be read.
    """
    digest = hashlib.sha256()
    weights = sorted(folder.glob("*.safetensors"), key=lambda path: path.name)
    # The same weights in their writer's own format lie in some folders, and no more in those that we fetch.
    weights = [path for path in weights if not path.name.startswith("consolidated")] or weights
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


def check_model(config: ModelConfig) -> Path:
    """The folder of the model, whose config.json holds numbers that a model can have. Raises `ConfigError`.

    For every door: it takes no time, where a size that is nonsense costs minutes and all the memory.
    """
    folder = resolve_checkpoint(config.model, revision=config.revision)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json: it is not a Hugging Face checkpoint")
    values = _text_values(folder)
    try:
        for name, highest in _SIZES.items():
            if values.get(name) is not None:
                _check_number(name, values[name], 1, highest)
        for name in _LENGTHS:
            # Too long a model is served as far as it is asked for.
            if values.get(name) is not None:
                _check_number(name, values[name], 1, float("inf") if config.max_model_len else _LONGEST)
        for name in ("rope_theta", "rope_scaling", "rope_parameters"):
            _check_positive(name, values.get(name))
    except ValueError as error:
        raise ConfigError(f"{folder / 'config.json'}: {error}") from None
    return folder


def check_split(folder: Path, num_ranks: int) -> None:
    """Raise `ConfigError` if config.json says that the model's attention heads cannot be dealt out to so many ranks."""
    values = _text_values(folder)
    heads = values.get("num_attention_heads", values.get("n_head"))
    kv_heads = values.get("num_key_value_heads")
    if not isinstance(heads, int):  # another number in each layer, or an unusual name: the ranks will see
        return
    fault = split_fault(heads, kv_heads if isinstance(kv_heads, int) else heads, num_ranks)
    if fault is not None:
        raise ConfigError(f"--tensor-parallel-size {num_ranks} does not fit this model: {fault}")


def split_fault(num_heads: int, num_kv_heads: int, num_ranks: int) -> str | None:
    """Why the heads of an attention cannot be dealt out to so many ranks; None if they can.

    Where there are fewer key/value heads than ranks, neighbouring ranks hold the same one.
    """
    if num_heads % num_ranks:
        return f"{num_heads} attention heads cannot be split evenly over {num_ranks} ranks"
    if num_ranks > num_kv_heads and num_ranks % num_kv_heads:
        return f"{num_kv_heads} key/value heads cannot be replicated evenly over {num_ranks} ranks"
    if num_ranks <= num_kv_heads and num_kv_heads % num_ranks:
        return f"{num_kv_heads} key/value heads cannot be split evenly over {num_ranks} ranks"
    return None


def _text_values(folder: Path) -> dict[str, Any]:
    """config.json, with what it says of the language model in a multimodal one."""
    found = read_json(folder / "config.json")
    text = found.get("text_config")
    return {**found, **text} if isinstance(text, dict) else found


def _check_number(name: str, value: object, lowest: int, highest: float) -> None:
    if isinstance(value, list):  # one for each layer
        for item in value:
            _check_number(name, item, lowest, highest)
    elif isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        limit = f"between {lowest} and {highest}" if highest != float("inf") else f"at least {lowest}"
        raise ValueError(f"{name} must be a whole number {limit}, not {value!r}")


def _check_positive(name: str, value: object) -> None:
    """All numbers in it that rotary embeddings divide by, or take the logarithm of."""
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, dict) or key in _ROTARY_NUMBERS:
                _check_positive(f"{name}.{key}", item)
    elif value is not None and not (isinstance(value, (int, float)) and 0 < value < float("inf")):
        raise ValueError(f"{name} must be a number above 0, not {value!r}")


def vocab_size(folder: Path) -> int | None:
    """How many token ids the model in `folder` has, as far as its config.json says it in the usual way."""
    found = read_json(folder / "config.json")
    text = found.get("text_config")
    size = found.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    return size if isinstance(size, int) else None


def architecture(folder: Path) -> str | None:
    """The name of the model's class in config.json (`Qwen3ForCausalLM`, say); None if it says none."""
    found = read_json(folder / "config.json").get("architectures")
    name = found[0] if isinstance(found, list) and found else None
    return name if isinstance(name, str) else None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, or {} where there is no such file; `ConfigError` where it cannot be read."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # the last: nested too deeply
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return data
