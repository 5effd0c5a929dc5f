"""The quantised weight of one module, read from the tensors that GPTQ, AWQ, fp8 and compressed-tensors keep of it.

Words of 32 bits hold 32 / bits unsigned integers, the first one in the lowest bits.

| form | integers | zero points | scales |
|---|---|---|---|
| gptq | `qweight` [K / pack, N], words along K | `qzeros` [groups, N / pack], along N, less one in v1 | `scales` |
| awq | `qweight` [K, N / pack], along N, evens first | `qzeros` [groups, N / pack], likewise | `scales` |
| pack-quantized | `weight_packed` [N, K / pack], along K | `weight_zero_point` [N / pack, groups], along N | below |
| int-quantized | `weight` [N, K] int8 | `weight_zero_point` [N, groups] int8 | below |
| float-quantized | `weight` [N, K] e4m3 | none | below, or [N / rows, K / columns] of a block |
| fp8 | `weight` [N, K] e4m3 | none | `weight_scale_inv` [N / rows, K / columns], or one: `weight_scale`, too |

`scales` are [groups, N]; compressed-tensors' `weight_scale` is [N, groups], or [1] where all rows share one.
compressed-tensors' packed integers, zero points too, are stored with half of their range added.
`g_idx` and `weight_g_idx` [K] name each column's group, where that is not the column's number / the group's size.
Numbers are multiplied by their scales, by those named `weight_scale_inv` too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.quantized.scheme import AWQ, GPTQ, PACKED, PLAIN, StoredScheme, unsupported
from workers.weights import WeightReader

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in its word the integer of each of eight outputs is
_SCALE_DTYPES = ("F16", "BF16", "F32")
_ROWS_AT_ONCE = 1024  # bounds the memory that widening takes


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight [N, K], or a part of it: values[n, k] * scales[rows[n], groups[k]]."""

    values: Tensor  # [N, K] int16, zero points are taken off; or float8_e4m3fn
    scales: Tensor  # [R, G] bf16, fp16 or fp32
    groups: Tensor  # [K] int64
    rows: Tensor | None = None  # [N] int64; None: R is N, and each row has its own

    def widen(self, dtype: torch.dtype) -> Tensor:
        """[N, K] in dtype: products in float32, exact unless the scales are, then rounded once."""
        out = torch.empty(self.values.shape, dtype=dtype)
        for start in range(0, len(out), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            scales = self.scales[rows if self.rows is None else self.rows[rows]]
            out[rows] = self.values[rows].float() * scales.float().index_select(1, self.groups)
        return out


@dataclass(frozen=True, slots=True)
class Part:
    """Which rows and columns of a module's weight are wanted."""

    module: str
    shape: tuple[int, int]  # [N, K] of the whole weight
    rows: slice
    columns: slice


@dataclass(frozen=True, slots=True)
class QuantizedTensors:
    """Raises `UnsupportedModelError` for whatever does not fit together."""

    weights: WeightReader
    scheme: StoredScheme

    def holds(self, module: str) -> bool:
        """Whether the module is quantised. Raises `UnsupportedModelError` if the config says that it is not."""
        if self._marker(module) is None:
            return False
        if self.scheme.is_ignored(module):
            raise unsupported(f"'{module}' is in the ignore list and quantized")
        return True

    def modules(self) -> list[str]:
        """The names of all quantised ones."""
        suffixes = tuple(f".{marker}" for marker in self.scheme.markers)
        found = (name.rpartition(".")[0] for name in self.weights.names() if name.endswith(suffixes))
        return list(dict.fromkeys(found))

    def shape(self, module: str) -> tuple[int, int]:
        """[N, K] of a quantised module as its own tensors have it."""
        if self.scheme.form == PACKED:
            n, k = self.weights.read(f"{module}.weight_shape", (2,), dtypes=("I64", "I32")).tolist()
            if n < 1 or k < 1:
                raise unsupported(f"'{module}' has the shape {[n, k]}")
            return n, k
        is_plain = self.scheme.form == PLAIN or self.scheme.is_float
        found = self.weights.shape(f"{module}.weight" if is_plain else f"{module}.qweight")
        if len(found) != 2:
            raise unsupported(f"the weight of '{module}' has {len(found)} dimensions, not 2")
        first, second = found
        if is_plain:
            return first, second
        pack = 32 // self.scheme.bits
        return (second, first * pack) if self.scheme.form == GPTQ else (second * pack, first)

    def read(self, module: str, shape: tuple[int, int], index: tuple[slice, ...] = ()) -> StoredWeight:
        """The slice `index` of a weight that must have `shape` [N, K]."""
        rows, columns = (*index, slice(None), slice(None))[:2]
        part = Part(module, shape, slice(*rows.indices(shape[0])), slice(*columns.indices(shape[1])))
        if self.scheme.form in (GPTQ, AWQ):
            return self._autogptq(part)
        return self._float8(part) if self.scheme.is_float else self._compressed(part)

    def _marker(self, module: str) -> str | None:
        """The name of the tensor that tells that a module is quantised."""
        names = (f"{module}.{marker}" for marker in self.scheme.markers)
        return next((name for name in names if name in self.weights), None)

    def check_no_bias(self, module: str, rows: int) -> None:
        """GPTQ writers store a bias of zeros where a model has none; any other one is refused."""
        name = f"{module}.bias"
        if name in self.weights and self.weights.read(name, (rows,)).any():
            raise unsupported(f"'{name}' is not zero, and the model has no bias there")

    def _autogptq(self, part: Part) -> StoredWeight:
        """GPTQ and AWQ, which differ in what the words run along."""
        (n, k), scheme, pack = part.shape, self.scheme, 32 // self.scheme.bits
        is_awq = scheme.form == AWQ
        if n % pack or (not is_awq and k % pack):
            raise unsupported(f"'{part.module}' has {n} x {k} weights, which do not fill words of {pack}")
        groups = scheme.num_groups(k)
        words, within = _words(part.rows, pack)
        shape = (groups, n // pack)
        zeros = self._integers(f"{part.module}.qzeros", shape, (slice(None), words), is_awq)[:, within].T
        if scheme.zeros_minus_one:
            zeros = self._after_v1(part.module, zeros)
        self._check_symmetric(part.module, zeros, 1 << (scheme.bits - 1))
        name = f"{part.module}.qweight"
        if is_awq:
            integers = self._integers(name, (k, n // pack), (part.columns, words), is_awq)[:, within].T
        else:
            along, inside = _words(part.columns, pack)
            stored = self._words(name, (k // pack, n), (along, part.rows)).T
            integers = unpack(stored, scheme.bits)[:, inside]
        scales = self._scales(f"{part.module}.scales", (groups, n), (slice(None), part.rows)).T
        order = self._order(f"{part.module}.g_idx", k, part.columns)
        return _stored(integers, zeros, scales, order)

    def _after_v1(self, module: str, zeros: Tensor) -> Tensor:
        """Zero points of GPTQ's first form.

        What is stored for a zero point of 0 differs from writer to writer (some spoil its neighbours), and so does what
        readers make of it.
        """
        if (zeros == (1 << self.scheme.bits) - 1).any():
            raise unsupported(f"'{module}' has zero points of 0 less one, which have no one meaning (gptq_v2 has)")
        return zeros + 1

    def _compressed(self, part: Part) -> StoredWeight:
        (n, k), scheme, module = part.shape, self.scheme, part.module
        if scheme.form == PLAIN:
            integers = self.weights.read(f"{module}.weight", (n, k), (part.rows, part.columns), ("I8",))
        else:
            pack, half = 32 // scheme.bits, 1 << (scheme.bits - 1)
            if self.shape(module) != (n, k):
                raise unsupported(f"'{module}' has the shape {list(self.shape(module))}, the model needs {[n, k]}")
            words, within = _words(part.columns, pack)
            stored = self._words(f"{module}.weight_packed", (n, -(-k // pack)), (part.rows, words))
            integers = unpack(stored, scheme.bits)[:, within].to(torch.int16) - half
        groups = scheme.num_groups(k)
        zeros = self._zero_points(module, n, groups)[part.rows]
        self._check_symmetric(module, zeros, 0)
        scales = self._per_row(f"{module}.weight_scale", n, groups, _SCALE_DTYPES)[part.rows]
        return _stored(integers, zeros, scales, self._order(f"{module}.weight_g_idx", k, part.columns))

    def _float8(self, part: Part) -> StoredWeight:
        (n, k), module = part.shape, part.module
        values = self.weights.read(f"{module}.weight", (n, k), (part.rows, part.columns), ("F8_E4M3",))
        rows, columns = self.scheme.block_in(part.shape)
        name = self._marker(module) or f"{module}.{self.scheme.markers[0]}"
        shape: tuple[int, ...] = (-(-n // rows), -(-k // columns))
        if self.scheme.per_tensor:  # a list of one, or no list
            shape = () if self.weights.shape(name) == () else (1,)
        scales = self.weights.read(name, shape, (), _SCALE_DTYPES)
        if self.scheme.per_tensor:
            scales = scales.reshape(1, 1)
        groups = torch.arange(part.columns.start, part.columns.stop) // columns
        return StoredWeight(values, scales, groups, torch.arange(part.rows.start, part.rows.stop) // rows)

    def _zero_points(self, module: str, n: int, groups: int) -> Tensor:
        """[N, groups] of compressed-tensors; zeros where there are none."""
        name, scheme = f"{module}.weight_zero_point", self.scheme
        if name not in self.weights:
            if not scheme.symmetric:
                raise unsupported(f"'{module}' is not symmetric and has no zero points")
            return torch.zeros(n, groups, dtype=torch.int16)
        pack, half = 32 // scheme.bits, 1 << (scheme.bits - 1)
        if scheme.form == PACKED and not scheme.per_tensor and not scheme.symmetric:
            words = self._words(name, (-(-n // pack), groups), ())
            return unpack(words.T, scheme.bits).T[:n].to(torch.int16) - half
        return self._per_row(name, n, groups, ("I8",))

    def _per_row(self, name: str, n: int, groups: int, dtypes: tuple[str, ...]) -> Tensor:
        """[N, groups], also where all rows share one value."""
        if not self.scheme.per_tensor:
            return self.weights.read(name, (n, groups), (), dtypes)
        return self.weights.read(name, (1,), (), dtypes).reshape(1, 1).expand(n, 1)

    def _check_symmetric(self, module: str, zeros: Tensor, middle: int) -> None:
        if self.scheme.symmetric and (zeros != middle).any():
            raise unsupported(f"'{module}' is said to be symmetric and has other zero points than {middle}")

    def _order(self, name: str, k: int, columns: slice) -> Tensor:
        """[columns] int64: the group of each."""
        groups = self.scheme.num_groups(k)
        order = torch.arange(k) // (self.scheme.group or max(k, 1))
        if name in self.weights:
            given = self.weights.read(name, (k,), dtypes=("I32", "I64")).long()
            if self.scheme.form in (GPTQ, AWQ) or not (given == -1).all():  # which compressed-tensors takes for unset
                if given.min() < 0 or given.max() >= groups:
                    raise unsupported(f"'{name}' has groups outside of 0 to {groups - 1}")
                order = given
        elif self.scheme.needs_order:
            raise unsupported(f"the columns are reordered and there is no tensor '{name}'")
        return order[columns]

    def _scales(self, name: str, shape: tuple[int, int], index: tuple[slice, ...]) -> Tensor:
        return self.weights.read(name, shape, index, _SCALE_DTYPES)

    def _words(self, name: str, shape: tuple[int, int], index: tuple[slice, ...]) -> Tensor:
        return self.weights.read(name, shape, index, ("I32",))

    def _integers(self, name: str, shape: tuple[int, int], index: tuple[slice, ...], is_awq: bool) -> Tensor:
        """[A, B * pack] int16 of words [A, B] along the outputs."""
        integers = unpack(self._words(name, shape, index), self.scheme.bits)
        if is_awq:
            integers = integers.view(len(integers), -1, len(_AWQ_ORDER))[:, :, list(_AWQ_ORDER)].flatten(1)
        return integers.to(torch.int16)


def unpack(words: Tensor, bits: int) -> Tensor:
    """words [A, B] int32 -> their integers [A, B * 32 / bits] uint8, the lowest bits first; bits is 4 or 8."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=2).flatten(1)


def _words(part: slice, pack: int) -> tuple[slice, slice]:
    """The words that hold a run of integers, and where in those the run is."""
    first = part.start // pack
    return slice(first, -(-part.stop // pack)), slice(part.start - first * pack, part.stop - first * pack)


def _stored(integers: Tensor, zeros: Tensor, scales: Tensor, order: Tensor) -> StoredWeight:
    """Of integers [N, K] and their zero points [N, G]."""
    values = torch.empty(integers.shape, dtype=torch.int16).copy_(integers)
    if zeros.any():
        values -= zeros.to(torch.int16).index_select(1, order)
    return StoredWeight(values, scales.contiguous(), order)
