"""bf16 weights in twelve bits: the bits of a result are those of plain weights, whatever the numbers are."""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.linear.cpu import PackedLinear
from kernels.native.library import NativeLibrary
from kernels.weights import Deferred
from novainfer.errors import EngineError
from tests.kernels.native_cases import ISAS
from workers.weight_file import WeightFile

CODED = [isa for isa in ISAS if isa in ("avx512bf16", "avx512vnni", "avx512f")]
pytestmark = [
    pytest.mark.stage0,
    pytest.mark.skipif(not CODED, reason="this processor has no vectors of 512 bits"),
]

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 17, 23, 32, 33, 100, 256, 260)


@pytest.fixture(params=CODED)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    """With codes, and without effect on other tests."""
    return NativeLibrary(request.param)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Also of zeros and of what is no number."""
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(kind), b.view(kind))


def before_a_wall(x: Tensor) -> Tensor:
    """A copy [n, k] whose last number is the last one before memory that nobody may touch."""
    page = mmap.PAGESIZE
    pages = -(-x.nbytes // page)
    memory = mmap.mmap(-1, (pages + 1) * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + pages * page), ctypes.c_size_t(page), 0) == 0
    copy = torch.frombuffer(memory, dtype=x.dtype, offset=pages * page - x.nbytes, count=x.numel()).view(x.shape)
    return copy.copy_(x)


def normal(n: int, k: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)).bfloat16() * 0.02


def with_rare(weight: Tensor, *values: float) -> Tensor:
    """Some numbers far from the others, in no order."""
    places = torch.randperm(weight.numel(), generator=torch.Generator().manual_seed(1))[: weight.numel() // 500]
    weight.view(-1)[places] = torch.tensor(values).bfloat16().repeat(len(places) // len(values) + 1)[: len(places)]
    return weight


def plain_and_coded(library: NativeLibrary, weight: Tensor, bias: Tensor | None = None) -> list[PackedLinear]:
    coded = PackedLinear(library, weight, bias)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "code_linear", lambda *_: 0)
        plain = PackedLinear(library, weight, bias)
    assert (plain.is_coded, coded.is_coded) == (False, True)
    return [plain, coded]


@pytest.mark.parametrize(
    ("n", "k"), [(32, 256), (160, 96), (1000, 608), (77, 4096), (48, 1056), (16, 12320), (2100, 64)]
)
def test_coded_given_any_shape_and_rows_when_multiplied_then_the_bits_of_plain_weights(
    library: NativeLibrary, n: int, k: int
) -> None:
    plain, coded = plain_and_coded(library, normal(n, k), torch.randn(n))
    assert coded.weight_nbytes < 0.9 * plain.weight_nbytes
    x = torch.randn(max(ROWS), k).bfloat16()
    for rows in ROWS:
        assert same_bits(coded(x[:rows]), plain(x[:rows])), rows
        assert same_bits(coded(x[-rows:], torch.float32), plain(x[-rows:], torch.float32)), rows
        assert same_bits(coded.in_float32(x[:rows]), plain.in_float32(x[:rows])), rows


@pytest.mark.parametrize(
    "values",
    [(1e-30,), (1e30, -1e30), (0.0, -0.0), (1e-40, -1e-40), (1e38, 3e38), (1e-30, 1e20, -1e-25, 0.0, -1e10)],
)
def test_coded_given_rare_numbers_when_multiplied_then_the_bits_of_plain_weights(
    library: NativeLibrary, values: tuple[float, ...]
) -> None:
    plain, coded = plain_and_coded(library, with_rare(normal(320, 1024), *values))
    x = torch.randn(40, 1024).bfloat16()
    for rows in (1, 4, 8, 9, 16, 40):
        assert same_bits(coded(x[:rows], torch.float32), plain(x[:rows], torch.float32))


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3e38, 1e-40, math.inf, math.nan])
def test_coded_given_one_number_everywhere_when_multiplied_then_the_bits_of_plain_weights(
    library: NativeLibrary, value: float
) -> None:
    plain, coded = plain_and_coded(library, torch.full((70, 256), value).bfloat16())
    x = torch.randn(20, 256).bfloat16()
    for rows in (1, 5, 11, 20):
        assert same_bits(coded(x[:rows], torch.float32), plain(x[:rows], torch.float32))


def test_coded_given_memory_that_ends_with_its_numbers_when_packed_and_multiplied_then_nothing_else_is_read(
    library: NativeLibrary,
) -> None:
    for n, k in ((1, 32), (33, 256), (70, 1056)):
        weight, x = before_a_wall(normal(n, k)), torch.randn(37, k).bfloat16()
        linear = PackedLinear(library, weight)
        expected = linear(x)
        for rows in (1, 4, 7, 8, 9, 16, 19, 37):
            assert same_bits(linear(before_a_wall(x[:rows])), expected[:rows]), (n, k, rows)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_coded_given_a_number_that_is_none_when_multiplied_then_its_column_alone_has_it(
    library: NativeLibrary, value: float
) -> None:
    weight = normal(320, 1024)
    clean = PackedLinear(library, weight)
    weight[70, 500] = value
    spoilt = PackedLinear(library, weight)
    assert spoilt.is_coded
    x = torch.randn(20, 1024).bfloat16()
    for rows in (1, 20):
        result, expected = spoilt(x[:rows]), clean(x[:rows])
        assert not result[:, 70].isfinite().any()
        others = [column for column in range(320) if column != 70]
        assert same_bits(result[:, others], expected[:, others])


def test_weight_given_as_a_part_of_another_when_coded_then_as_its_copy(library: NativeLibrary) -> None:
    whole = normal(100, 512)
    part = whole[10:90, 128:384]
    x = torch.randn(5, 256).bfloat16()
    ours, copy = PackedLinear(library, part), PackedLinear(library, part.contiguous())
    assert ours.is_coded
    assert same_bits(ours(x), copy(x))


def test_weights_given_numbers_of_all_sizes_or_an_odd_depth_when_packed_then_they_stay_plain(
    library: NativeLibrary,
) -> None:
    spread = torch.randn(64, 256) * torch.exp2(40 * torch.randn(64, 256))
    for weight in (spread.bfloat16(), normal(64, 250), normal(64, 272), normal(64, 256).float()):
        assert not PackedLinear(library, weight).is_coded


def test_weights_given_codes_when_multiplied_on_any_number_of_threads_then_the_same_bits(
    library: NativeLibrary,
) -> None:
    before, linear = torch.get_num_threads(), PackedLinear(library, normal(1000, 1024))
    x = torch.randn(64, 1024).bfloat16()
    try:
        for rows in (1, 8, 16, 64):
            found = []
            for threads in (1, 2, 3, 7):
                torch.set_num_threads(threads)
                found.append(linear(x[:rows]))
            assert all(same_bits(one, found[0]) for one in found), rows
    finally:
        torch.set_num_threads(before)


def test_codes_when_kept_in_a_file_then_the_next_process_needs_no_weight(
    library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.weight_file._LEAST_BYTES", 0)
    weight, x = normal(320, 1024), torch.randn(9, 1024).bfloat16()
    file = WeightFile(tmp_path, "key", 1 << 30)
    with library.weight_memory.keeping(file):
        first = [PackedLinear(library, weight), PackedLinear(library, normal(48, 250))]
    while file.write_next():
        pass

    def make() -> Tensor:
        raise AssertionError("read once more")

    for thread in threading.enumerate():
        if thread.name == "packed weights":
            thread.join()
    again = WeightFile(tmp_path, "key", 1 << 30)
    assert again.mapped_bytes > 0
    with library.weight_memory.keeping(again):
        deferred = [Deferred((320, 1024), torch.bfloat16, make), Deferred((48, 250), torch.bfloat16, make)]
        second = [PackedLinear(library, one) for one in deferred]
    assert [one.is_coded for one in second] == [one.is_coded for one in first] == [True, False]
    assert same_bits(second[0](x), first[0](x))
    assert same_bits(second[1](x[:, :250]), first[1](x[:, :250]))


def test_codes_of_another_layer_when_kept_in_its_place_then_error_and_no_file(
    library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.weight_file._LEAST_BYTES", 0)
    for weight in (normal(1024, 320), normal(640, 320), normal(320, 640).half()):
        file = WeightFile(tmp_path, "key", 1 << 30)
        with library.weight_memory.keeping(file):
            PackedLinear(library, normal(320, 640))
        while file.write_next():
            pass
        for thread in threading.enumerate():
            if thread.name == "packed weights":
                thread.join()
        again = WeightFile(tmp_path, "key", 1 << 30)
        assert again.mapped_bytes > 0
        with library.weight_memory.keeping(again), pytest.raises(EngineError, match="tensor 0"):
            PackedLinear(library, weight)
        assert not list(tmp_path.iterdir())


def test_coded_when_multiplied_then_near_float64(library: NativeLibrary) -> None:
    weight, x = normal(96, 1024), torch.randn(17, 1024).bfloat16()
    linear = PackedLinear(library, weight)
    assert linear.is_coded
    expected = x.double() @ weight.double().T
    assert float((linear(x, torch.float32).double() - expected).norm() / expected.norm()) < 3e-6
