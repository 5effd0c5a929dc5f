"""What a token's bits depend on beside the weights, as one short text. Pure data; the workers make it, all may read it.

`cpu avx512bf16 cpu/native bfloat16 tp1 exact`: device, hardware, kernel backend / model backend, type, ranks, promise.
Quantised weights follow the type: `bfloat16 int8`, or `bfloat16 gptq-int4` or `bfloat16 fp8-e4m3` where the checkpoint
brings them. A quantised KV cache follows these: `bfloat16 kv-int8`, `bfloat16 int8 kv-int8`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from novainfer.errors import ConfigError

EXACT = "exact"
BEST_EFFORT = "best-effort"
NOT_QUANTIZED = "none"
AS_ACTIVATIONS = "auto"
_NAME = re.compile(r"[\w.-]+", re.ASCII)
_PATTERN = re.compile(
    rf"(?P<device>[a-z]+) (?P<hardware>[\w.-]{{1,100}}) (?P<kernel_backend>[a-z]+)/(?P<model_backend>[a-z]+)"
    rf" (?P<dtype>[a-z0-9]+)"
    rf"(?: (?P<quantization>(?:(?:gptq|awq|compressed)-)?int[48]|(?:fp8|compressed)-e4m3|w8a8|fp8))?"
    rf"(?: kv-(?P<kv_cache_dtype>int8|fp8))? tp(?P<ranks>[1-9]\d{{0,3}})"
    rf" (?P<promise>{EXACT}|{BEST_EFFORT})",
    re.ASCII,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """How the workers compute. Equal modes of the same release, both exact, give equal tokens."""

    device: str
    hardware: str  # a GPU's name, or the instruction set of the CPU kernels ("torch-..." where torch computes)
    kernel_backend: str  # as in `ParallelConfig`, never auto
    model_backend: str  # as in `ModelConfig`, never auto
    dtype: str  # of weights, activations and, where `kv_cache_dtype` is auto, KV cache
    quantization: str = (
        NOT_QUANTIZED  # of the linears' weights: as in `ModelConfig`, or method-number of a checkpoint's
    )
    kv_cache_dtype: str = AS_ACTIVATIONS  # as in `CacheConfig`
    tensor_parallel_size: int
    is_exact: bool  # a token does not depend on the batch, the chunks of its prompt, or the cache

    @property
    def asked_quantization(self) -> str:
        """As in `ModelConfig`: what a checkpoint brings is not asked for."""
        return NOT_QUANTIZED if "-" in self.quantization else self.quantization

    def __str__(self) -> str:
        hardware = "-".join(_NAME.findall(self.hardware))
        promise = EXACT if self.is_exact else BEST_EFFORT
        backends = f"{self.kernel_backend}/{self.model_backend}"
        types = self.dtype if self.quantization == NOT_QUANTIZED else f"{self.dtype} {self.quantization}"
        if self.kv_cache_dtype != AS_ACTIVATIONS:
            types += f" kv-{self.kv_cache_dtype}"
        return f"{self.device} {hardware} {backends} {types} tp{self.tensor_parallel_size} {promise}"

    @classmethod
    def parse(cls, text: str) -> Mode:
        """Undo `str`. Raises `ConfigError` for a text that is no mode."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ConfigError(f"{text[:200]!r} is not a mode that this release knows")
        words = match.groupdict()
        words["quantization"] = words["quantization"] or NOT_QUANTIZED
        words["kv_cache_dtype"] = words["kv_cache_dtype"] or AS_ACTIVATIONS
        ranks, promise = int(words.pop("ranks")), words.pop("promise")
        return cls(**words, tensor_parallel_size=ranks, is_exact=promise == EXACT)
