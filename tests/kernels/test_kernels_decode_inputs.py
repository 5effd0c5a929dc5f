"""Inputs of a step that decodes, out of rows on the device: every number as the rows have it, padding as promised."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels.backend import DecodeInputs, KernelBackend, PersistentRows
from kernels.reference_backend import ReferenceBackend
from kernels.triton_backend import TritonBackend
from tests.kernels.builders import sampling_tensors

pytestmark = pytest.mark.stage0

ROWS, LONGEST, BLOCK_SIZE = 5, 16 * 300, 16
FLOAT_NAMES, INTEGER_NAMES = ("temperature", "top_p", "min_p"), ("top_k", "choice", "seed")
# (row, position, index of the token to sample); the last block of a table of many, the first token, padding
PLACES = [(3, LONGEST - 2, 40), (-1, -1, -1), (0, 0, 0), (4, 33, 7), (-1, 70, 2)]


@pytest.fixture(params=["triton", "reference"])
def backend(request: pytest.FixtureRequest, device: torch.device) -> KernelBackend:
    return TritonBackend(device) if request.param == "triton" else ReferenceBackend()


def rows_on(device: torch.device) -> PersistentRows:
    generator = torch.Generator().manual_seed(0)
    integers = torch.randint(0, 2**31, (3, ROWS), generator=generator)
    integers[2] = torch.tensor([-(2**63), 2**63 - 1, 0, -5, 2**40])
    return PersistentRows(
        token_ids=torch.randint(0, 1000, (ROWS, LONGEST), generator=generator, dtype=torch.int32).to(device),
        block_table=torch.randint(0, 2**31, (ROWS, 300), generator=generator, dtype=torch.int32).to(device),
        floats=torch.rand(3, ROWS, generator=generator).to(device),
        integers=integers.to(device),
    )


def poisoned(size: int, device: torch.device) -> DecodeInputs:
    sampling = sampling_tensors(device, size)
    inputs = DecodeInputs(
        *(torch.full((size,), -77, dtype=dtype, device=device) for dtype in (torch.int64,) * 2),
        torch.full((size,), -77, dtype=torch.int32, device=device),
        torch.full((size,), -77, dtype=torch.int64, device=device),
        torch.full((size, 300), -77, dtype=torch.int32, device=device),
        sampling,
    )
    for name in (*FLOAT_NAMES, *INTEGER_NAMES, "index"):
        getattr(sampling, name).fill_(-77)
    return inputs


def test_places_when_prepared_then_each_has_its_rows_numbers_and_padding_none(
    backend: KernelBackend, device: torch.device
) -> None:
    rows, out = rows_on(device), poisoned(len(PLACES), device)
    step = torch.tensor(PLACES, device=device).T.contiguous()
    backend.prepare_decodes(step, rows, BLOCK_SIZE, out)
    for place, (row, position, index) in enumerate(PLACES):
        got = (out.input_ids[place], out.positions[place], out.seq_lens[place], out.slot_mapping[place])
        if row < 0:
            assert [int(x) for x in got] == [0, 0, 0, -1]
            assert out.sampling.temperature[place] == 0.0
            continue
        block, offset = divmod(position, BLOCK_SIZE)
        slot = int(rows.block_table[row, block]) * BLOCK_SIZE + offset
        assert [int(x) for x in got] == [int(rows.token_ids[row, position]), position, position + 1, slot]
        assert torch.equal(out.block_table[place, : block + 1], rows.block_table[row, : block + 1])
        for names, numbers in ((FLOAT_NAMES, rows.floats), (INTEGER_NAMES, rows.integers)):
            for name, number in zip(names, numbers[:, row], strict=True):
                assert getattr(out.sampling, name)[place] == number
        assert int(out.sampling.index[place]) == index


def test_tokens_when_appended_then_they_stand_behind_the_positions_and_nothing_else_has_changed(
    backend: KernelBackend, device: torch.device
) -> None:
    rows = rows_on(device)
    expected = rows.token_ids.clone()
    for token, (row, position, _) in enumerate(PLACES, 2000):
        if row >= 0:
            expected[row, position + 1] = token
    step = torch.tensor(PLACES, device=device).T.contiguous()
    backend.append_tokens(step, torch.arange(2000, 2000 + len(PLACES), device=device), rows.token_ids)
    assert torch.equal(rows.token_ids, expected)
