"""Compiles every Triton kernel for Hopper as its wrapper launches it, without a GPU. Run with TRITON_INTERPRET=0.

Prints one JSON object: kernel name -> sorted list of the tensor core instructions in its code. With the argument
`versions` it compiles nothing: kernel name -> how many versions of it steps of many sizes take.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_triton
from triton.runtime.jit import JITFunction

from kernels.backend import (
    AttentionInput,
    AttentionMetadata,
    AttentionParams,
    DecodeInputs,
    HeadNorms,
    PersistentRows,
)
from kernels.linear.schemes import FLOAT8, INT4, INT8, IntegerWeight
from kernels.paged_attention import triton_decode
from kernels.triton_backend import TritonBackend
from tests.kernels.builders import sampling_tensors

_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl", "maxnreg")
_SHARED_BYTES = 227 * 1024  # of a program at most
_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
    torch.float8_e4m3fn: "*fp8e4nv",
}
_instructions: dict[str, set[str]] = {}
_versions: dict[str, set[str]] = {}


def _specialised(
    kernel: JITFunction, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], Any], dict[str, Any]]:
    """What Triton makes a version of the kernel for: types, constants, alignments and options of this call."""
    options = {name: keywords.pop(name) for name in _OPTIONS if name in keywords}
    values = dict(zip((param.name for param in kernel.params), args, strict=False)) | keywords
    signature, constants, attributes = {}, {}, {}
    for position, param in enumerate(kernel.params):
        value = values[param.name]
        is_tensor = isinstance(value, torch.Tensor)
        is_integer = isinstance(value, int) and not param.do_not_specialize
        if param.is_constexpr or (is_integer and value == 1):  # a launch makes a constant of 1
            signature[param.name], constants[(position,)] = "constexpr", value
            continue
        signature[param.name] = _POINTERS[value.dtype] if is_tensor else "fp32" if isinstance(value, float) else "i32"
        number = value.data_ptr() if is_tensor else value if is_integer else 1
        if number % 16 == 0 and not param.do_not_specialize_on_alignment:  # and passes on what aligns loads
            attributes[(position,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes, options


def _note(kernel: JITFunction, *args: Any, grid: Any, warmup: bool = False, **keywords: Any) -> None:
    """Takes the place of a launch: remembers the version."""
    _versions.setdefault(kernel.__name__, set()).add(repr(_specialised(kernel, args, keywords)))


def _compile(kernel: JITFunction, *args: Any, grid: Any, warmup: bool = False, **keywords: Any) -> None:
    """Takes the place of a launch: compiles with the argument types and constants of this call."""
    signature, constants, attributes, options = _specialised(kernel, args, keywords)
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = compile_triton(source, target=GPUTarget("cuda", 90, 32), options=options)
    if compiled.metadata.shared > _SHARED_BYTES:
        raise ValueError(f"{kernel.__name__} needs {compiled.metadata.shared} bytes of shared memory")
    ptx = compiled.asm["ptx"]
    if early := _reads_too_early(ptx):
        raise ValueError(f"{kernel.__name__} reads sums that a product may not have written yet: {early[:3]}")
    found = _instructions.setdefault(kernel.__name__, set())
    found.update(re.findall(r"wgmma\.mma_async\S*|mma\.sync\.aligned\.m16n8k16", ptx))


def _reads_too_early(ptx: str) -> list[str]:
    """Instructions that read what a product wrote which nothing has waited for: only further products may."""
    groups: list[set[str]] = []  # registers of products that have been committed and not waited for
    current: set[str] = set()
    early = []
    for line in ptx.splitlines():
        code = line.split("//")[0].strip()
        if code.startswith("wgmma.mma_async"):
            current.update(re.findall(r"%\w+", code[code.index("{") : code.index("}")]))
        elif code.startswith("wgmma.commit_group"):
            groups.append(current)
            current = set()
        elif re.match(r"bra|ret", code):  # what follows is reached from elsewhere
            groups, current = [], set()
        elif found := re.match(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", code):
            groups = groups[len(groups) - int(found[1]) :] if int(found[1]) else []
        elif (current or groups) and current.union(*groups).intersection(re.findall(r"%\w+", code)):
            early.append(code)
    return early


def _launch_everything(backend: TritonBackend) -> None:
    """One call of every method that launches kernels, on CPU tensors that nothing reads."""
    cpu, dtype = torch.device("cpu"), torch.bfloat16
    caches = backend.allocate_kv_cache(2, 16, 2, 64, dtype, cpu)
    heads, kv_heads = torch.zeros(9, 6, 64, dtype=dtype), torch.zeros(9, 2, 64, dtype=dtype)
    positions = torch.zeros(9, dtype=torch.int64)
    starts, lengths = torch.tensor([0, 1, 9], dtype=torch.int32), torch.tensor([500, 500], dtype=torch.int32)
    metadata = AttentionMetadata(starts, lengths, torch.zeros(2, 40, dtype=torch.int32), 1, 8, 500)
    backend.paged_attention(heads, *caches, metadata, AttentionParams(0.1, sliding_window=400, soft_cap=2.0))
    backend.paged_attention(heads, *caches, metadata, AttentionParams(0.1, sinks=torch.zeros(6)))
    small = backend.allocate_kv_cache(2, 16, 2, 64, dtype, cpu, torch.float8_e4m3fn)
    backend.paged_attention(heads, *small, metadata, AttentionParams(0.1))
    backend.store_kv(kv_heads, kv_heads, *small, positions)
    given = AttentionInput(
        6, HeadNorms(torch.zeros(64, dtype=dtype), torch.zeros(64, dtype=dtype), 1e-6, 0.0), positions,
        torch.zeros(4, 2, 24), *caches, positions,
    )  # fmt: skip
    backend.attention_input(torch.zeros(9, 10, 64, dtype=dtype), given)
    backend.attention_input(
        torch.zeros(9, 10, 64, dtype=dtype), replace(given, key_cache=small[0], value_cache=small[1])
    )
    backend.store_kv(kv_heads, kv_heads, *caches, positions)
    backend.rotary(heads, kv_heads, positions, torch.zeros(4, 2, 32))
    backend.add_rms_norm(heads[0], heads[1], torch.zeros(64, dtype=dtype), 1e-6)
    backend.act_mul(torch.zeros(3, 64, dtype=dtype), "gelu")
    weight, bias = torch.zeros(100, 1104, dtype=dtype), torch.zeros(100, dtype=dtype)
    layers = [backend.pack_linear(weight, bias, scheme) for scheme in (None, INT8, INT4, FLOAT8)]
    integers = torch.arange(1104).remainder(16).to(torch.int8).expand(100, -1)
    for group in (128, 32, 16):  # four bits with offsets, the least tile of four bits and of eight
        brought = IntegerWeight(integers, torch.zeros(100, -(-1104 // group), dtype=torch.float16), group)
        packed = backend.pack_integers(brought, bias, dtype)
        assert packed is not None
        layers.append(packed)
    for layer in layers:
        for rows in (1, 200):
            layer(torch.zeros(rows, 1104, dtype=dtype))
            backend.gate_up(layer, torch.zeros(rows, 1104, dtype=dtype), "silu")
    whole = torch.zeros(100, 1104)
    for scheme in (None, INT8, INT4, FLOAT8):
        backend.pack_linear(whole, None, scheme)(torch.zeros(200, 1104))
    sampling = sampling_tensors(cpu, 2)
    backend.choose(torch.zeros(2, 9000), sampling)
    step, tokens = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    table = torch.zeros(2, 40, dtype=torch.int32)
    persistent = PersistentRows(table, table, torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int64))
    backend.prepare_decodes(step, persistent, 16, DecodeInputs(tokens, tokens, table[0], tokens, table, sampling))
    backend.append_tokens(step, tokens, table)


def _launch_fast_prefill(backend: TritonBackend) -> None:
    """The tiles that go another way where bits may depend on the batch; their instructions are kept apart."""
    exact = _instructions.pop("_prefill_kernel")
    cpu, dtype = torch.device("cpu"), torch.bfloat16
    for head_dim in (64, 128):
        caches = backend.allocate_kv_cache(2, 16, 2, head_dim, dtype, cpu)
        starts, lengths = torch.tensor([0, 9], dtype=torch.int32), torch.tensor([500], dtype=torch.int32)
        metadata = AttentionMetadata(starts, lengths, torch.zeros(1, 40, dtype=torch.int32), 0, 9, 500)
        backend.paged_attention(torch.zeros(9, 8, head_dim, dtype=dtype), *caches, metadata, AttentionParams(0.1))
    _instructions["_prefill_kernel fast"] = _instructions.pop("_prefill_kernel")
    _instructions["_prefill_kernel"] = exact


def _steps_of_many_sizes(backend: TritonBackend) -> None:
    """One layer's calls of steps that differ in rows, decodes among them and length, as a server makes them."""
    cpu, dtype = torch.device("cpu"), torch.bfloat16
    caches = backend.allocate_kv_cache(2, 16, 2, 64, dtype, cpu)
    weight, layer = torch.zeros(64, dtype=dtype), backend.pack_linear(torch.zeros(96, 1104, dtype=dtype))
    for num_seqs, decodes, longest in ((1, 0, 7), (1, 1, 9), (2, 1, 40), (5, 5, 500), (16, 3, 256), (64, 64, 3000)):
        tokens = decodes + 7 * (num_seqs - decodes)
        starts = torch.arange(num_seqs + 1, dtype=torch.int32)
        table = torch.zeros(num_seqs, -(-longest // 16), dtype=torch.int32)
        lengths = torch.full((num_seqs,), longest, dtype=torch.int32)
        metadata = AttentionMetadata(starts, lengths, table, decodes, 7, longest)
        heads, places = torch.zeros(tokens, 10, 64, dtype=dtype), torch.zeros(tokens, dtype=torch.int64)
        given = AttentionInput(
            6, HeadNorms(weight, weight, 1e-6, 0.0), places, torch.zeros(4, 2, 32), *caches, places
        )  # fmt: skip
        query = backend.attention_input(heads, given)
        backend.paged_attention(query, *caches, metadata, AttentionParams(0.1))
        backend.add_rms_norm(heads[:, 0].contiguous(), heads[:, 1].contiguous(), weight, 1e-6)
        backend.gate_up(layer, torch.zeros(tokens, 1104, dtype=dtype), "silu")
        layer(torch.zeros(tokens, 1104, dtype=dtype))
        backend.choose(torch.zeros(num_seqs, 9000), sampling_tensors(cpu, num_seqs))


if __name__ == "__main__":
    triton_decode.has_dependent_launch = lambda device: True  # it asks a device
    if sys.argv[1:] == ["versions"]:
        JITFunction.run = _note
        _steps_of_many_sizes(TritonBackend(torch.device("cuda")))
        print(json.dumps({name: len(found) for name, found in _versions.items()}))
        sys.exit()
    JITFunction.run = _compile
    _launch_everything(TritonBackend(torch.device("cuda")))
    _launch_fast_prefill(TritonBackend(torch.device("cuda"), exact=False))
    print(json.dumps({name: sorted(found) for name, found in _instructions.items()}))
