"""Triton's paged attention: against float64, and bitwise against itself where the exactness contract says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from kernels.backend import AttentionParams, KernelBackend, select_backend
from kernels.paged_attention import triton_decode
from kernels.triton_backend import TritonBackend
from tests.kernels.builders import Context, Heads, assert_close

pytestmark = pytest.mark.stage0
LENGTHS = [1, 15, 16, 17, 63, 100, 300]
PLAIN = AttentionParams(0.3)
SINKS = torch.tensor([0.5, 9.0, -200.0])  # as the others, above all scores, of no weight


@pytest.fixture
def triton_backend(device: torch.device) -> KernelBackend:
    return select_backend(device, "triton")


def _decodes(lengths: list[int]) -> list[tuple[int, int, int]]:
    return [(seq, length - 1, length) for seq, length in enumerate(lengths)]


@pytest.mark.parametrize(
    ("heads", "params"),
    [
        (Heads(group=1, dim=32), PLAIN),
        (Heads(group=3, dim=80), PLAIN),
        (Heads(group=4, kv=1, dim=16), AttentionParams(0.5, sliding_window=20)),
        (Heads(group=1, kv=1, dim=16), AttentionParams(0.5, sliding_window=290, soft_cap=2.0)),
        (Heads(group=3, kv=1, block_size=128), AttentionParams(0.5, soft_cap=0.7)),
        (Heads(group=4, kv=1, dtype=torch.bfloat16), AttentionParams(0.3, sliding_window=100)),
        (Heads(group=1, kv=1, dim=80, dtype=torch.float16), PLAIN),
        (Heads(group=3, kv=1, is_float8=True), PLAIN),
        (Heads(group=1, kv=1, dim=16, dtype=torch.bfloat16, is_float8=True), AttentionParams(0.5, sliding_window=20)),
        (Heads(group=1, kv=2, dim=16), AttentionParams(0.5, sinks=SINKS[:2])),
        (Heads(group=3, kv=1, dtype=torch.bfloat16), AttentionParams(0.3, sliding_window=100, sinks=SINKS)),
    ],
)
def test_decode_of_odd_lengths_equals_float64(
    triton_backend: KernelBackend, device: torch.device, heads: Heads, params: AttentionParams
) -> None:
    context = Context(LENGTHS, heads, device)
    spans = _decodes(LENGTHS)
    got = context.attend(triton_backend, spans, len(spans), params)
    assert_close(got, context.oracle(spans, params), heads.dtype)


@pytest.mark.parametrize(
    ("heads", "params"),
    [
        (Heads(group=3, kv=1, dim=32), PLAIN),
        (Heads(group=1, kv=2, dim=80), AttentionParams(0.3, sliding_window=30, soft_cap=2.0)),
        (Heads(group=4, kv=1, dim=16, block_size=64), AttentionParams(0.5, sliding_window=270)),
        (Heads(group=4, kv=1, dim=32, dtype=torch.bfloat16), PLAIN),
        (Heads(group=2, kv=1, dim=16, dtype=torch.bfloat16, is_float8=True), PLAIN),
        (Heads(group=3, kv=1, dim=16), AttentionParams(0.5, soft_cap=3.0, sinks=SINKS)),
    ],
)
def test_mixed_decode_and_prefill_equal_float64(
    triton_backend: KernelBackend, device: torch.device, heads: Heads, params: AttentionParams
) -> None:
    context = Context([300, 17, 63, 15, 100], heads, device)
    spans = [(1, 16, 17), (0, 298, 299), (0, 279, 300), (2, 0, 63), (3, 0, 15), (4, 99, 100)]
    got = context.attend(triton_backend, spans, 2, params)
    assert_close(got, context.oracle(spans, params), heads.dtype)


@pytest.mark.parametrize(
    ("heads", "params"),
    [
        (Heads(group=3, kv=1), PLAIN),
        (Heads(group=1, kv=1, dtype=torch.bfloat16), AttentionParams(0.3, sliding_window=40)),
        (Heads(group=3, kv=1, dtype=torch.bfloat16), AttentionParams(0.3, sinks=SINKS)),
        (Heads(group=1, kv=1, is_float8=True), PLAIN),
    ],
)
def test_a_prompt_in_any_chunking_gives_the_same_bits(
    triton_backend: KernelBackend, device: torch.device, heads: Heads, params: AttentionParams
) -> None:
    context = Context([275, 20], heads, device)
    whole = context.attend(triton_backend, [(0, 250, 275)], 0, params)
    for size in (7, 16):
        chunks = [(0, first, min(first + size, 275)) for first in range(250, 275, size)]
        rows = context.attend(triton_backend, [(1, 19, 20), *chunks], 1, params)[1:]
        assert torch.equal(rows, whole), size
    decodes = [(0, position, position + 1) for position in (250, 255, 256, 274)]
    rows = context.attend(triton_backend, decodes, len(decodes), params)
    assert torch.equal(rows, whole[[0, 5, 6, 24]])


def test_decode_of_a_row_does_not_depend_on_the_batch(triton_backend: KernelBackend, device: torch.device) -> None:
    context = Context(LENGTHS, Heads(group=4, kv=1, dtype=torch.bfloat16), device)
    spans = _decodes(LENGTHS)
    together = context.attend(triton_backend, spans, len(spans), PLAIN)
    for row in (0, 3, 6):
        alone = context.attend(triton_backend, [spans[row]], 1, PLAIN)
        assert torch.equal(alone[0], together[row])


def test_decode_over_several_launches_gives_the_same_bits(
    triton_backend: KernelBackend, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = Context([300, 17, 280], Heads(kv=1), device)
    spans = _decodes(context.seq_lens)
    once = context.attend(triton_backend, spans, 3, PLAIN)
    monkeypatch.setattr(triton_decode, "_scratch_bytes", lambda device: 1)
    assert torch.equal(context.attend(triton_backend, spans, 3, PLAIN), once)


def test_a_list_of_work_when_made_then_it_names_every_chunk_that_is_seen_in_order(device: torch.device) -> None:
    seq_lens = torch.tensor([1, 256, 257, 0, 1500], dtype=torch.int32, device=device)
    work = triton_decode.WorkList.of(seq_lens, 2000, 0)
    assert work.starts.tolist() == [0, 1, 2, 4, 5, 11]
    assert work.items[:11].tolist() == [0, 1, 2, 2, 3, 4, 4, 4, 4, 4, 4]
    assert len(work.items) == 5 * 8
    work = triton_decode.WorkList.of(seq_lens, 2000, 300)  # 1,200 and on of the last, from 0 or less of the others
    assert work.starts.tolist() == [0, 1, 2, 4, 5, 7]
    assert work.items[:7].tolist() == [0, 1, 2, 2, 3, 4, 4]


def test_decodes_when_no_program_is_left_for_each_item_then_each_does_several_with_the_same_bits(
    triton_backend: KernelBackend, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = Context([600, 17, 280], Heads(kv=1, dim=16), device)
    spans = _decodes(context.seq_lens)
    many = context.attend(triton_backend, spans, 3, PLAIN)
    monkeypatch.setattr(triton_decode, "_PROGRAMS_PER_PROCESSOR", 1)
    monkeypatch.setattr(triton_decode, "num_processors", lambda device: 2)
    assert torch.equal(context.attend(triton_backend, spans, 3, PLAIN), many)


def test_padding_rows_of_length_zero_become_zero(triton_backend: KernelBackend, device: torch.device) -> None:
    context = Context([300, 17], Heads(kv=1), device)
    query, metadata = context.step([(0, 299, 300), (1, 16, 17)], 2)
    metadata = replace(metadata, seq_lens=torch.tensor([300, 0], dtype=torch.int32, device=device))
    out = torch.full_like(query, float("nan"))
    triton_backend.paged_attention(query, *context.caches(triton_backend), metadata, PLAIN, out)
    assert not out[0].isnan().any()
    assert torch.equal(out[1], torch.zeros_like(out[1]))


def test_decodes_without_a_token_before_prompts_change_no_bit(
    triton_backend: KernelBackend, device: torch.device
) -> None:
    context = Context([300, 17, 40], Heads(group=2, kv=1), device)
    query, metadata = context.step([(0, 299, 300), (1, 0, 17), (2, 31, 40)], 1)
    caches = context.caches(triton_backend)
    wanted = triton_backend.paged_attention(query, *caches, metadata, PLAIN)
    # Places for 20 decodes, of which one has a token; two prompts, and a place for a third.
    places = torch.tensor([0, *[1] * 19, 1, 2, 0], device=device)
    is_used = torch.tensor([1, *[0] * 19, 1, 1, 0], dtype=torch.int32, device=device)
    starts = metadata.query_start_loc.tolist()
    padded = replace(
        metadata,
        query_start_loc=torch.tensor([0, *[1] * 20, *starts[2:], starts[-1]], dtype=torch.int32, device=device),
        seq_lens=metadata.seq_lens[places] * is_used,
        block_table=metadata.block_table[places],
        num_decodes=20,
        has_empty_decodes=True,
    )
    more = torch.cat([query, torch.full_like(query[:6], float("nan"))])
    out = torch.full_like(more, float("nan"))
    triton_backend.paged_attention(more, *caches, padded, PLAIN, out)
    assert torch.equal(out[: len(query)], wanted)
    new = triton_backend.paged_attention(more, *caches, padded, PLAIN)  # with tokens that are nobody's behind
    assert torch.equal(new[: len(query)], wanted)
    assert torch.equal(new[len(query) :], torch.zeros_like(new[len(query) :]))


def test_strided_query_and_output_are_read_and_written_in_place(
    triton_backend: KernelBackend, device: torch.device
) -> None:
    context = Context([20, 9], Heads(group=2, kv=1, dim=16), device)
    spans = [(1, 8, 9), (0, 5, 20)]
    query, metadata = context.step(spans, 1)
    fused = torch.full((query.shape[0], 5, 16), float("nan"), device=device)
    fused[:, 1:3] = query
    target = torch.full((query.shape[0], 5, 16), 7.0, device=device)
    caches = context.caches(triton_backend)
    triton_backend.paged_attention(fused[:, 1:3], *caches, metadata, PLAIN, target[:, 2:4])
    assert_close(target[:, 2:4], context.oracle(spans, PLAIN), torch.float32)
    assert bool((target[:, :2] == 7.0).all())
    assert bool((target[:, 4:] == 7.0).all())


def test_blocks_left_of_the_window_may_be_gone(triton_backend: KernelBackend, device: torch.device) -> None:
    params = AttentionParams(0.3, sliding_window=20)
    context = Context([300], Heads(kv=1), device)
    spans = [(0, 299, 300), (0, 290, 300)]
    wanted = context.oracle(spans, params)
    context.block_table[0, : (290 - 19) // 16] = -1  # what the table holds for freed blocks must not matter
    query, metadata = context.step(spans, 1)
    whole = Context([300], Heads(kv=1), device).caches(triton_backend)
    assert_close(triton_backend.paged_attention(query, *whole, metadata, params), wanted, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)  # tiles of 64 rows, and of 128
@pytest.mark.parametrize(
    "params",
    [
        PLAIN,
        AttentionParams(0.3, sliding_window=40, soft_cap=3.0),
        AttentionParams(0.3, soft_cap=0.7, sinks=SINKS),
        AttentionParams(0.3, sliding_window=100, sinks=SINKS),
        AttentionParams(-0.3),
    ],
    ids=["plain", "window and cap", "cap and sinks", "window and sinks", "below zero"],
)
@pytest.mark.parametrize("is_float8", [False, True], ids=["as computed", "fp8"])
def test_the_faster_prefill_equals_float64(
    is_float8: bool, params: AttentionParams, dtype: torch.dtype, device: torch.device
) -> None:
    backend = TritonBackend(device, exact=False)
    context = Context([330, 20], Heads(group=3, kv=1, dim=16, dtype=dtype, is_float8=is_float8), device)
    spans = [(0, 270, 330), (1, 0, 20)]  # behind more than one of decode's chunks
    assert_close(context.attend(backend, spans, 0, params), context.oracle(spans, params), dtype)


def test_a_value_of_e4m3_that_is_none_when_seen_then_its_row_alone_is_none(
    triton_backend: KernelBackend, device: torch.device
) -> None:
    context = Context([20, 20], Heads(kv=1, dim=16, is_float8=True), device)
    context.values[0][7, 0, 3] = float("nan")
    got = context.attend(triton_backend, _decodes([20, 20]), 2, PLAIN)
    assert got[0, 0].isnan().nonzero().flatten().tolist() == [3]
    assert not got[1].isnan().any()


def test_layers_with_sinks_when_compared_then_the_rest_decides() -> None:
    assert AttentionParams(0.3, sinks=SINKS) == AttentionParams(0.3, sinks=SINKS + 1)
    assert AttentionParams(0.3, sinks=SINKS) != AttentionParams(0.4, sinks=SINKS)


def test_wrong_shapes_are_refused(triton_backend: KernelBackend, device: torch.device) -> None:
    context = Context([20], Heads(group=2, kv=2, dim=16), device)
    query, metadata = context.step([(0, 10, 20)], 0)
    key_cache, value_cache = context.caches(triton_backend)
    attend = triton_backend.paged_attention
    with pytest.raises(ValueError, match="3 query heads do not divide into 2"):
        attend(query[:, :3], key_cache, value_cache, metadata, PLAIN)
    with pytest.raises(ValueError, match="value_cache must have shape"):
        attend(query, key_cache, value_cache[:-1], metadata, PLAIN)
    with pytest.raises(ValueError, match=r"key_cache must be torch\.float16"):
        attend(query.half(), key_cache, value_cache, metadata, PLAIN)
    with pytest.raises(ValueError, match="query_start_loc must have shape"):
        attend(query, key_cache, value_cache, replace(metadata, seq_lens=metadata.seq_lens.repeat(2)), PLAIN)
    with pytest.raises(ValueError, match="contiguous in its last dimension"):
        attend(query.transpose(0, 2).contiguous().transpose(0, 2), key_cache, value_cache, metadata, PLAIN)
    with pytest.raises(ValueError, match="sinks must have shape"):
        attend(query, key_cache, value_cache, metadata, AttentionParams(0.3, sinks=SINKS[:2]))
    with pytest.raises(ValueError, match="power of two and at least 16"):
        triton_backend.allocate_kv_cache(2, 24, 1, 16, torch.float32, device)
