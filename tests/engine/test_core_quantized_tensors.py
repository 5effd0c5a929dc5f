"""The tensors of quantised checkpoints: exactly the weights that their formats define, whole and in slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kernels.cpu_backend import CpuBackend
from kernels.linear.quantized import QuantizedLinear
from novainfer.errors import UnsupportedModelError
from tests.quantized import Format, scheme_of
from workers.quantized.linears import QuantizedLinears, ReorderedLinear
from workers.quantized.tensors import QuantizedTensors, StoredWeight
from workers.weights import WeightReader

pytestmark = pytest.mark.stage0

BF16, F32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")
FORMATS = [
    *(
        Format(form=form, bits=bits, group=group, symmetric=symmetric, reordered=reordered)
        for form in ("gptq", "gptq_v2")
        for bits, group in ((4, 32), (4, -1), (8, 64), (8, 128))
        for symmetric in (True, False)
        for reordered in (False, True)
    ),
    *(Format(form="awq", group=group, symmetric=symmetric) for group in (32, 64, -1) for symmetric in (True, False)),
    *(
        Format(form=form, bits=bits, group=group, symmetric=symmetric, per_tensor=per_tensor, scale_dtype=dtype)
        for form in ("pack-quantized", "int-quantized")
        for bits in (4, 8)
        for group, per_tensor, dtype in ((32, False, BF16), (-1, False, F32), (-1, True, BF16))
        for symmetric in (True, False)
    ),
    Format(form="pack-quantized", group=32, reordered=True, scale_dtype=BF16),
    Format(form="pack-quantized", bits=8, group=64, symmetric=True, reordered=True),
]
IDS = [str(how) for how in FORMATS]
# [N, K]: not a multiple of 16 rows or of a group's columns; GPTQ fills words both ways, AWQ along the rows alone.
SHAPES = {
    "gptq": (40, 136),
    "gptq_v2": (24, 160),
    "awq": (40, 100),
    "pack-quantized": (37, 75),
    "int-quantized": (37, 75),
}
SLICES = [(slice(5, 19), slice(None)), (slice(None), slice(32, 64)), (slice(3, 21), slice(13, 71))]


def reader(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> QuantizedTensors:
    save_file(tensors, folder / "model.safetensors")
    return QuantizedTensors(WeightReader(folder), scheme_of(config))


def written(how: Format, shape: tuple[int, int] | None = None, name: str = "m") -> tuple[dict[str, Tensor], Tensor]:
    return how.write(name, shape or SHAPES[how.form], torch.Generator().manual_seed(3))


def exact(stored: StoredWeight) -> Tensor:
    return stored.values.double() * stored.scales.double()[:, stored.groups]


@pytest.mark.parametrize("how", FORMATS, ids=IDS)
def test_a_weight_when_read_whole_and_in_slices_then_it_is_the_one_that_the_format_defines(
    how: Format, tmp_path: Path
) -> None:
    tensors, expected = written(how)
    quantized = reader(tmp_path, tensors, how.config())
    shape = (expected.shape[0], expected.shape[1])
    assert quantized.modules() == ["m"]
    assert quantized.shape("m") == shape
    assert torch.equal(exact(quantized.read("m", shape)), expected)
    for index in SLICES:
        assert torch.equal(exact(quantized.read("m", shape, index)), expected[index])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):  # scale * integer of a float32 scale is rounded first
        assert torch.equal(quantized.read("m", shape).widen(dtype), expected.float().to(dtype))
    assert quantized.weights.unread() == []


@pytest.mark.parametrize("how", FORMATS, ids=IDS)
def test_a_weight_when_made_a_layer_then_it_holds_exactly_these_or_is_widened_for_a_reason(
    how: Format, tmp_path: Path
) -> None:
    tensors, expected = written(how)
    stored = reader(tmp_path, tensors, how.config()).read("m", (expected.shape[0], expected.shape[1]))
    linears = QuantizedLinears(reader(tmp_path, tensors, how.config()), CpuBackend(), torch.float32, CPU)
    linear = linears.pack([stored], None)
    if how.scale_dtype == F32:
        assert linear is None
        assert list(linears.widened) == ["scales in float32"]
        return
    if how.bits == 8 and not how.symmetric:
        assert linear is None
        assert list(linears.widened) == ["integers less their zero points take more than 8 bits"]
        return
    assert isinstance(linear, ReorderedLinear if how.reordered and how.group != -1 else QuantizedLinear)
    assert not linears.widened
    identity = torch.eye(expected.shape[1])
    assert torch.equal(linear.in_float32(identity).T.double(), expected)
    inner = linear._linear if isinstance(linear, ReorderedLinear) else linear
    assert isinstance(inner, QuantizedLinear)
    padded = -(-expected.shape[0] // 16) * 16
    integers = padded * -(-expected.shape[1] // 8) * 8
    assert inner.weight_nbytes < (
        integers / 2 + padded * 20 if how.bits == 4 and how.symmetric else integers + padded * 20
    )


@pytest.mark.parametrize("group", [16, 256, 512, 1024])
@pytest.mark.parametrize("reordered", [False, True])
def test_gptq_in_small_and_large_groups_when_made_a_layer_then_it_holds_exactly_these(
    group: int, reordered: bool, tmp_path: Path
) -> None:
    how = Format(form="gptq", group=group, symmetric=True, reordered=reordered)
    tensors, expected = written(how, (16, 2 * group + 8))
    quantized = reader(tmp_path, tensors, how.config())
    shape = (16, 2 * group + 8)
    part = (slice(3, 9), slice(group - 8, 2 * group))
    assert torch.equal(exact(quantized.read("m", shape, part)), expected[part])
    linear = QuantizedLinears(quantized, CpuBackend(), F32, CPU).pack([quantized.read("m", shape)], None)
    assert isinstance(linear, ReorderedLinear if reordered else QuantizedLinear)
    assert torch.equal(linear.in_float32(torch.eye(shape[1])).T.double(), expected)


def test_parts_of_a_layer_when_joined_then_rows_of_all_in_their_order(tmp_path: Path) -> None:
    how = Format(form="gptq", symmetric=True, reordered=True)
    (first, one), (second, two) = written(how, (24, 96), "a"), how.write("b", (8, 96), torch.Generator().manual_seed(9))
    quantized = reader(tmp_path, first | second, how.config())
    linears = QuantizedLinears(quantized, CpuBackend(), torch.bfloat16, CPU)
    bias = torch.randn(20)
    parts = [quantized.read("b", (8, 96)), quantized.read("a", (24, 96), (slice(3, 15),))]
    linear = linears.pack(parts, bias)
    assert linear is not None
    actual = linear.in_float32(torch.eye(96, dtype=torch.bfloat16)).T
    assert torch.equal(actual, (torch.cat((two, one[3:15])).float() + bias[:, None]).bfloat16().float())


@pytest.mark.parametrize(
    ("columns", "group", "kept"),
    [
        (slice(0, 48), 32, True),  # half of a group at the end
        (slice(48, 96), 32, True),  # at the beginning: groups of 16
        (slice(40, 96), 64, True),  # groups of 8
        (slice(12, 60), 32, False),
        (slice(100, 128), 64, True),  # within one group
    ],
)
def test_columns_that_cut_a_group_when_made_a_layer_then_smaller_groups_or_widened(
    columns: slice, group: int, kept: bool, tmp_path: Path
) -> None:
    how = Format(form="pack-quantized", group=group, symmetric=True)
    tensors, expected = written(how, (20, 160))
    quantized = reader(tmp_path, tensors, how.config())
    linears = QuantizedLinears(quantized, CpuBackend(), torch.float32, CPU)
    linear = linears.pack([quantized.read("m", (20, 160), (slice(None), columns))], None)
    assert (linear is not None) == kept
    if linear is None:
        assert list(linears.widened) == ["groups that are cut into runs of less than 8 columns"]
    else:
        identity = torch.eye(columns.stop - columns.start)
        assert torch.equal(linear.in_float32(identity).T.double(), expected[:, columns])


def test_parts_that_differ_when_joined_then_widened_for_that_reason(tmp_path: Path) -> None:
    how = Format(form="gptq", symmetric=True, reordered=True)
    first, second = written(how, (16, 96), "a")[0], written(how, (16, 96), "b")[0]
    second["b.g_idx"] = second["b.g_idx"].flip(0).contiguous()
    quantized = reader(tmp_path, first | second, how.config())
    linears = QuantizedLinears(quantized, CpuBackend(), torch.float32, CPU)
    a, b = quantized.read("a", (16, 96)), quantized.read("b", (16, 96))
    assert linears.pack([a, b], None) is None
    assert linears.pack([a, torch.zeros(16, 96)], None) is None
    assert set(linears.widened) == {
        "the parts of the layer have their columns in different orders",
        "only a part of the layer is quantized",
    }


def test_float32_scales_that_sixteen_bits_hold_when_made_a_layer_then_it_stays_packed(tmp_path: Path) -> None:
    how = Format(form="pack-quantized", symmetric=True, scale_dtype=BF16)
    tensors, expected = written(how)
    tensors["m.weight_scale"] = tensors["m.weight_scale"].float()
    quantized = reader(tmp_path, tensors, how.config())
    linears = QuantizedLinears(quantized, CpuBackend(), torch.float32, CPU)
    linear = linears.pack([quantized.read("m", SHAPES["pack-quantized"])], None)
    assert linear is not None
    assert torch.equal(linear.in_float32(torch.eye(75)).T.double(), expected)


def test_reordered_layer_when_multiplied_then_rows_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    how = Format(form="gptq_v2", group=32, reordered=True)
    tensors, expected = written(how)
    quantized = reader(tmp_path, tensors, how.config())
    for dtype in (torch.float32, torch.bfloat16):
        linear = QuantizedLinears(quantized, CpuBackend(), dtype, CPU).pack([quantized.read("m", (24, 160))], None)
        assert isinstance(linear, ReorderedLinear)
        x = torch.randn(100, 160).to(dtype)
        whole = linear(x)
        error = (whole.double() - x.double() @ expected.T).norm() / whole.double().norm()
        assert error < (1e-6 if dtype == torch.float32 else 5e-3)
        for rows in (1, 2, 7, 33):
            assert torch.equal(linear(x[-rows:]), whole[-rows:])


GPTQ = Format(form="gptq", symmetric=True)
AWQ = Format(form="awq", symmetric=True)
PACKED = Format(form="pack-quantized", symmetric=False, scale_dtype=BF16)
PLAIN = Format(form="int-quantized", bits=8, group=-1, symmetric=True)


@pytest.mark.parametrize(
    ("how", "changes", "reason"),
    [
        (GPTQ, {"qzeros": None}, "no tensor 'm.qzeros'"),
        (GPTQ, {"scales": None}, "no tensor 'm.scales'"),
        (GPTQ, {"scales": torch.ones(4, 40).half()}, r"'m.scales' has shape \[4, 40\], the model needs \[5, 40\]"),
        (GPTQ, {"scales": torch.ones(5, 40, dtype=torch.float64)}, "type F64, expected F16 or BF16 or F32"),
        (GPTQ, {"qweight": torch.zeros(17, 40, dtype=torch.int64)}, "type I64, expected I32"),
        (GPTQ, {"qweight": torch.zeros(34, 40, dtype=torch.int32)}, r"has shape \[34, 40\]"),
        (GPTQ, {"qzeros": torch.full((5, 5), 0x66666666, dtype=torch.int32)}, "said to be symmetric"),
        (GPTQ, {"qzeros": torch.full((5, 5), -1, dtype=torch.int32)}, "zero points of 0 less one"),
        (GPTQ, {"g_idx": torch.full((136,), 5, dtype=torch.int32)}, "groups outside of 0 to 4"),
        (GPTQ, {"g_idx": torch.arange(136, dtype=torch.int32) // 32 - 1}, "groups outside of 0 to 4"),
        (GPTQ, {"g_idx": torch.full((136,), -1, dtype=torch.int32)}, "groups outside of 0 to 4"),
        (GPTQ, {"g_idx": torch.zeros(135, dtype=torch.int32)}, r"has shape \[135\]"),
        (GPTQ, {"g_idx": torch.zeros(136)}, "type F32, expected I32 or I64"),
        (Format(form="gptq", reordered=True), {"g_idx": None}, "reordered and there is no tensor 'm.g_idx'"),
        (AWQ, {"qzeros": None}, "no tensor 'm.qzeros'"),
        (AWQ, {"qzeros": torch.zeros(4, 5, dtype=torch.int32)}, "said to be symmetric"),
        (AWQ, {"qweight": torch.zeros(100, 4, dtype=torch.int32)}, r"has shape \[100, 4\]"),
        (PACKED, {"weight_scale": None}, "no tensor 'm.weight_scale'"),
        (PACKED, {"weight_scale": torch.ones(37, 1)}, r"has shape \[37, 1\], the model needs \[37, 3\]"),
        (PACKED, {"weight_zero_point": None}, "not symmetric and has no zero points"),
        (PACKED, {"weight_zero_point": torch.zeros(37, 3, dtype=torch.int8)}, r"has shape \[37, 3\]"),
        (PACKED, {"weight_shape": torch.tensor([37, 76])}, r"the shape \[37, 76\], the model needs \[37, 75\]"),
        (PACKED, {"weight_shape": torch.tensor([37, -1])}, r"the shape \[37, -1\]"),
        (PACKED, {"weight_shape": None}, "no tensor 'm.weight_shape'"),
        (PACKED, {"weight_packed": torch.zeros(37, 9, dtype=torch.int32)}, r"has shape \[37, 9\]"),
        (PACKED, {"weight_g_idx": torch.full((75,), 3)}, "groups outside of 0 to 2"),
        (PLAIN, {"weight": torch.zeros(37, 75)}, "type F32, expected I8"),
        (PLAIN, {"weight_zero_point": torch.ones(37, 1, dtype=torch.int8)}, "said to be symmetric"),
        (PLAIN, {"weight_scale": torch.ones(37)}, r"has shape \[37\], the model needs \[37, 1\]"),
    ],
)
def test_tensors_that_do_not_fit_together_when_read_then_refused_by_name(
    how: Format, changes: dict[str, Tensor | None], reason: str, tmp_path: Path
) -> None:
    tensors, expected = written(how)
    shape = (expected.shape[0], expected.shape[1])
    assert torch.equal(exact(reader(tmp_path, tensors, how.config()).read("m", shape)), expected)
    for name, tensor in changes.items():
        tensors.pop(f"m.{name}", None)
        if tensor is not None:
            tensors[f"m.{name}"] = tensor
    with pytest.raises(UnsupportedModelError, match=reason):
        reader(tmp_path, tensors, how.config()).read("m", shape)


def test_sizes_that_fill_no_words_when_read_then_refused(tmp_path: Path) -> None:
    tensors, _ = written(GPTQ)
    quantized = reader(tmp_path, tensors, GPTQ.config())
    for shape in ((36, 136), (40, 132)):
        with pytest.raises(UnsupportedModelError, match="which do not fill words of 8"):
            quantized.read("m", shape)


def test_order_that_was_never_set_when_read_then_columns_lie_in_groups(tmp_path: Path) -> None:
    tensors, expected = written(PACKED)
    tensors["m.weight_g_idx"] = torch.full((75,), -1)
    assert torch.equal(exact(reader(tmp_path, tensors, PACKED.config()).read("m", (37, 75))), expected)


def test_a_module_that_is_ignored_when_quantized_all_the_same_then_refused(tmp_path: Path) -> None:
    tensors, _ = written(PLAIN)
    for entry, is_held in (("m", False), ("re:m$", False), ("re:x", True), ("mm", True)):
        quantized = reader(tmp_path, tensors, PLAIN.config() | {"ignore": [entry]})
        if is_held:
            assert quantized.holds("m")
            continue
        with pytest.raises(UnsupportedModelError, match="'m' is in the ignore list and quantized"):
            quantized.holds("m")
    with pytest.raises(UnsupportedModelError, match="the pattern 're:\\(' in its ignore list"):
        reader(tmp_path, tensors, PLAIN.config() | {"ignore": ["re:("]}).holds("m")
