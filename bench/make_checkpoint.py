"""Checkpoints with random weights in a known model's shape: `python -m bench.make_checkpoint qwen3-0.6b FOLDER`.

In Hugging Face's format, so that any server can load them: weights in bfloat16, a byte-level BPE tokenizer whose every
id is a text of its own, a chat template. What such a model says means nothing; what it costs is the shape's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_SPECIALS = (END_OF_TEXT, IM_START, IM_END)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WEIGHT_STD = 0.02  # as these models are initialised for training: activations stay finite
_THREADS = 8  # draw and write at the same time; each holds one tensor
_MOST_WRITTEN = 1 << 30  # bytes by one call of the system, which takes less than 2 GiB
_ITEM_BYTES = 2  # of bfloat16
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen3 dense decoder with tied embeddings."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int

    def config(self) -> dict[str, Any]:
        """`config.json`."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.context,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "use_cache": True,
            "torch_dtype": "bfloat16",
            "eos_token_id": self.vocab - len(_SPECIALS) + _SPECIALS.index(IM_END),
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and size of each weight, a linear layer's as (out, in)."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for layer in range(self.layers):
            name = f"model.layers.{layer}"
            yield f"{name}.input_layernorm.weight", (self.hidden,)
            yield f"{name}.self_attn.q_proj.weight", (query, self.hidden)
            yield f"{name}.self_attn.k_proj.weight", (key, self.hidden)
            yield f"{name}.self_attn.v_proj.weight", (key, self.hidden)
            yield f"{name}.self_attn.o_proj.weight", (self.hidden, query)
            yield f"{name}.self_attn.q_norm.weight", (self.head_dim,)
            yield f"{name}.self_attn.k_norm.weight", (self.head_dim,)
            yield f"{name}.post_attention_layernorm.weight", (self.hidden,)
            yield f"{name}.mlp.gate_proj.weight", (self.intermediate, self.hidden)
            yield f"{name}.mlp.up_proj.weight", (self.intermediate, self.hidden)
            yield f"{name}.mlp.down_proj.weight", (self.hidden, self.intermediate)
        yield "model.norm.weight", (self.hidden,)

    def weight_bytes(self) -> int:
        """Of the file of weights, but for its header."""
        return sum(_ITEM_BYTES * math.prod(size) for _, size in self.tensors())


SHAPES = {
    "qwen3-0.6b": Shape(28, 1024, 3072, 16, 8, 128, 151936, 40960),
    "qwen3-8b": Shape(36, 4096, 12288, 32, 8, 128, 151936, 40960),
    # As wide as the 8B, and of an odd vocabulary: for tests of what depends on sizes.
    "wide": Shape(2, 4096, 12288, 32, 8, 128, 50257, 40960),
    "tiny-wide": Shape(1, 1040, 24, 1, 1, 16, 261, 2048),
    "tiny": Shape(2, 64, 128, 4, 2, 16, 1024, 2048),
}


def make_checkpoint(shape: Shape, folder: Path, seed: int = 0, device: torch.device = _CPU) -> None:
    """Write all files of a checkpoint; the same seed gives the same weights on the same kind of device, which draws."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(folder / "model.safetensors", shape, seed, device)
    _write(folder / "config.json", shape.config())
    _write(folder / "generation_config.json", {"eos_token_id": shape.config()["eos_token_id"]})
    make_tokenizer(shape.vocab).save(str(folder / "tokenizer.json"))
    names = {"eos_token": IM_END, "pad_token": END_OF_TEXT, "model_max_length": shape.context}
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _write_weights(path: Path, shape: Shape, seed: int, device: torch.device) -> None:
    """The file of weights, without ever holding all of them: each is drawn and written where it belongs by a thread.

    Every tensor has a generator of its own, so that it does not matter in which order they are drawn.
    """
    tensors = list(shape.tensors())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = [], 0
    for name, size in tensors:
        starts.append(end)
        end += _ITEM_BYTES * math.prod(size)
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [starts[-1], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the weights are aligned
    first = 8 + len(text)
    with path.open("wb") as file, ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(first + end)
        file.flush()

        def put(number: int) -> None:
            weight = _draw(tensors[number][1], seed * len(tensors) + number, device)
            _write_at(file.fileno(), weight, first + starts[number])

        list(pool.map(put, range(len(tensors))))  # raises what they raise


def _draw(size: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    """Norms are ones; bfloat16 on the CPU."""
    weight = torch.ones(size, dtype=torch.bfloat16, device=device)
    if len(size) > 1:
        weight.normal_(0.0, _WEIGHT_STD, generator=torch.Generator(device).manual_seed(seed))
    return weight.cpu()


def _write_at(file: int, tensor: torch.Tensor, offset: int) -> None:
    data: Any = tensor.flatten().view(torch.uint8).numpy()
    left = memoryview(data)
    while left:
        written = os.pwrite(file, left[:_MOST_WRITTEN], offset)
        left, offset = left[written:], offset + written


def make_tokenizer(size: int) -> Tokenizer:
    """So many ids: all bytes, then pairs and triples of ASCII characters, then the special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = [letter for letter in letters if letter.isascii()]
    room = size - len(letters) - len(_SPECIALS)
    merges = [(a, b) for a, b in product(plain, repeat=2)][:room]
    pairs = [a + b for a, b in merges]
    merges += [(pair, c) for pair, c in product(pairs, plain)][: room - len(merges)]
    if len(merges) < room:
        raise ValueError(f"{size} ids are more than pairs and triples can be")
    vocab = {text: number for number, text in enumerate([*letters, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _SPECIALS])
    return tokenizer


def _write(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.make_checkpoint", description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=torch.device, default=_CPU, help="that draws the weights: cpu, cuda")
    arguments = parser.parse_args()
    make_checkpoint(SHAPES[arguments.shape], arguments.folder, arguments.seed, arguments.device)
    print(f"{arguments.folder}: {arguments.shape}, random weights of seed {arguments.seed}")


if __name__ == "__main__":
    main()
