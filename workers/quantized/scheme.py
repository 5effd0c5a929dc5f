"""From the `quantization_config` of a config.json to what has to be known to read the tensors, or to a refusal.

Read are GPTQ, AWQ (gemm), fp8 (e4m3) and compressed-tensors (pack-quantized, int-quantized, float-quantized). Whatever
is not known to leave the weights at scale * (integer - zero point), or scale * number, is refused: a wrong answer would
look like a right one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from novainfer.errors import UnsupportedModelError

GPTQ, AWQ, PACKED, PLAIN = "gptq", "awq", "pack-quantized", "int-quantized"
FP8, FLOAT = "fp8", "float-quantized"
QUANTIZATION_FIELDS = ("quantization_config", "compression_config")  # of a config.json
_SUPPORTED = (
    "supported are gptq (4 and 8 bits), awq (gemm, 4 bits), fp8 (e4m3) and compressed-tensors (pack-quantized and "
    "int-quantized, 4 and 8 bits; float-quantized, 8 bits)"
)
_MARKERS = {
    GPTQ: ("qweight",),
    AWQ: ("qweight",),
    PACKED: ("weight_packed",),
    PLAIN: ("weight_scale",),
    FP8: ("weight_scale_inv", "weight_scale"),
    FLOAT: ("weight_scale",),
}
_METHODS = {GPTQ: "gptq", AWQ: "awq", PACKED: "compressed", PLAIN: "compressed", FP8: "fp8", FLOAT: "compressed"}
# Of static activation quantisation, which is not done here.
_ACTIVATION_SUFFIXES = {
    FP8: (".input_scale", ".activation_scale"),
    **dict.fromkeys(
        (PACKED, PLAIN, FLOAT), (".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point")
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredScheme:
    """How a checkpoint stores its quantised weights."""

    form: str  # GPTQ, AWQ, PACKED, PLAIN, FP8 or FLOAT
    bits: int
    group: int | None  # columns that share a scale; None: a row has one
    per_tensor: bool = False  # all rows share one scale
    block: tuple[int, int] | None = None  # rows and columns that share a scale, in place of `group`; fp8 alone has them
    symmetric: bool  # zero points are all in the middle, or not stored
    zeros_minus_one: bool = False  # gptq's first form: zero points are stored less one
    needs_order: bool = False  # columns are not in the order of their groups: the checkpoint has to say which is whose
    ignored: tuple[str, ...] = ()  # modules that have to be stored as they are: names, or "re:" and a pattern
    skips_activations: bool = False  # the checkpoint wants activations quantised too

    @property
    def name(self) -> str:
        """As in `novainfer.mode.Mode.quantization`."""
        return f"{_METHODS[self.form]}-{'e4m3' if self.is_float else f'int{self.bits}'}"

    @property
    def is_float(self) -> bool:
        """Whether the weights are e4m3 numbers, not integers."""
        return self.form in (FP8, FLOAT)

    @property
    def markers(self) -> tuple[str, ...]:
        """The tensors, below a module's name, one of which tells a quantised module from others."""
        return _MARKERS[self.form] if self.block is None else _MARKERS[self.form][:1]

    @property
    def ignored_suffixes(self) -> tuple[str, ...]:
        """Of tensors that may be there and are not read."""
        return _ACTIVATION_SUFFIXES.get(self.form, ())

    def num_groups(self, columns: int) -> int:
        """Scales of a row of so many columns."""
        return 1 if self.group is None else -(-columns // self.group)

    def block_in(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of a weight [N, K] = shape that share a scale; the last ones may be fewer."""
        if self.block is not None:
            return self.block
        rows, columns = (max(size, 1) for size in shape)
        return rows if self.per_tensor else 1, self.group or columns

    def is_ignored(self, module: str) -> bool:
        """Whether the config says that a module is not quantised. Raises `UnsupportedModelError` for a bad pattern."""
        for entry in self.ignored:
            try:
                if entry == module or (entry.startswith("re:") and re.match(entry[3:], module)):
                    return True
                # fp8's lists name what a module is in, and what it ends with, too
                if self.form == FP8 and (f"{module}.".startswith(f"{entry}.") or module.endswith(f".{entry}")):
                    return True
            except re.error as error:
                raise unsupported(f"the pattern {entry!r} in its ignore list is none: {error}") from error
        return False


def unsupported(what: str) -> UnsupportedModelError:
    """Of something in a quantised checkpoint."""
    return UnsupportedModelError(f"quantized checkpoint: {what}; {_SUPPORTED}")


def read_scheme(hf_config: Any) -> StoredScheme | None:
    """The scheme of a transformers config; None where the weights are not quantised. Raises `UnsupportedModelError`."""
    for part in (hf_config, hf_config.get_text_config()):
        for name in QUANTIZATION_FIELDS:
            found = getattr(part, name, None)
            if found:
                if not isinstance(found, Mapping):
                    raise unsupported(f"its {name} is {found!r}")
                return _read(_Fields(found))
    return None


class _Fields:
    """A JSON object whose values are taken with their type, and checked."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def take(self, name: str, kind: type, default: Any = None) -> Any:
        """A value; `default` where there is none or null."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise unsupported(f"{name} is {value!r}")
        return value

    def part(self, name: str) -> _Fields | None:
        """An object in it."""
        value = self.take(name, dict)
        return None if value is None else _Fields(value)

    def require(self, what: str, name: str, *allowed: Any, default: Any = None) -> Any:
        """A value that has to be one of some."""
        value = self._values.get(name)
        value = default if value is None else value
        if not any(value == one and type(value) is type(one) for one in allowed):
            raise unsupported(f"{what} with {name} {value!r}")
        return value

    def refuse(self, what: str, *names: str) -> None:
        """Raises if one of the values is there and says something."""
        for name in names:
            if self._values.get(name):
                raise unsupported(f"{what} with {name}")


def _read(fields: _Fields) -> StoredScheme:
    method = str(fields.take("quant_method", str, ""))
    readers = {"gptq": _gptq, "awq": _awq, "fp8": _fp8, "compressed-tensors": _compressed}
    if method not in readers:
        raise unsupported(f"the method '{method}' is not supported")
    return readers[method](fields)


def _gptq(fields: _Fields) -> StoredScheme:
    """As AutoGPTQ's and GPTQModel's `QuantizeConfig` write it."""
    stored = fields.take("checkpoint_format", str) or fields.take("format", str, "gptq")
    if stored not in ("gptq", "gptq_v2"):
        raise unsupported(f"gptq in the format '{stored}'")
    fields.require("gptq", "pack_dtype", "int32", default="int32")
    fields.refuse("gptq", "is_marlin_format", "adapter", "rotation")
    for pattern in fields.take("dynamic", dict, {}):
        if not str(pattern).startswith("-:"):  # that takes modules out; others give them bits of their own
            raise unsupported("gptq with other settings for some modules ('dynamic')")
    return StoredScheme(
        form=GPTQ,
        bits=int(fields.require("gptq", "bits", 4, 8)),
        group=_group(fields.require("gptq", "group_size", 16, 32, 64, 128, 256, 512, 1024, -1)),
        symmetric=bool(fields.take("sym", bool, True)),
        zeros_minus_one=stored == "gptq",
        needs_order=bool(fields.take("desc_act", bool, False)),
    )


def _awq(fields: _Fields) -> StoredScheme:
    """As AutoAWQ's `AwqConfig` writes it."""
    version = str(fields.take("version", str) or fields.take("format", str, "gemm")).lower()
    if version != "gemm" or fields.take("backend", str) == "llm-awq":
        raise unsupported(f"awq in the version '{version}' of {fields.take('backend', str, 'autoawq')}")
    bits, group = ("bits", "group_size") if fields.take("bits", int) else ("w_bit", "q_group_size")
    return StoredScheme(
        form=AWQ,
        bits=int(fields.require("awq", bits, 4)),
        group=_group(fields.require("awq", group, 32, 64, 128, -1)),
        symmetric=not fields.take("zero_point", bool, True),
    )


def _fp8(fields: _Fields) -> StoredScheme:
    """As transformers' `FineGrainedFP8Config` writes it, or AutoFP8, whose scales are one for each tensor.

    scale_fmt says how scales were rounded; what they are stored as, the tensors say themselves.
    """
    fields.require("fp8", "fmt", "e4m3", "float8_e4m3fn", default="e4m3")
    fields.require("fp8", "activation_scheme", "dynamic", "static", default="dynamic")
    fields.require("fp8", "scale_fmt", "float", "ue8m0", default="float")
    fields.require("fp8", "expert_dtype", "fp8", default="fp8")
    fields.refuse("fp8", "modules_to_convert", "kv_cache_scheme", "kv_cache_quant_targets")
    block = _block(fields, "fp8", "weight_block_size")
    ignored = fields.take("modules_to_not_convert", list, []) + fields.take("ignored_layers", list, [])
    return StoredScheme(
        form=FP8,
        bits=8,
        group=None,
        per_tensor=block is None,
        block=block,
        symmetric=True,
        ignored=tuple(str(entry) for entry in ignored),
        skips_activations=True,
    )


def _compressed(fields: _Fields) -> StoredScheme:
    """As compressed-tensors' `QuantizationConfig` writes it: one scheme for all linear layers but the ignored ones."""
    what = "compressed-tensors"
    fields.refuse(what, "kv_cache_scheme", "transform_config")
    sparsity = fields.part("sparsity_config")
    if sparsity is not None:
        sparsity.require(what, "format", "dense", default="dense")
    fields.require(what, "quantization_status", "compressed", "frozen", default="compressed")
    groups = fields.take("config_groups", dict, {})
    if len(groups) != 1:
        raise unsupported(f"{what} with {len(groups)} config_groups")
    (name,) = groups
    group = _Fields(groups).part(name)
    weights = None if group is None else group.part("weights")
    if group is None or weights is None:
        raise unsupported(f"{what} without weights in its config_groups")
    group.require(what, "targets", ["Linear"])
    form = str(fields.require(what, "format", PACKED, PLAIN, FLOAT))
    group.require(what, "format", form, default=form)
    is_float = form == FLOAT
    weights.require(what, "type", "float" if is_float else "int", default="int")
    weights.refuse(what, "dynamic", *(() if is_float else ("block_structure",)))
    ordering = weights.take("actorder", str)
    if ordering not in (None, "weight", "static") and (is_float or ordering != "group"):
        raise unsupported(f"{what} with actorder {ordering!r}")
    size, block = weights.take("group_size", int), _block(weights, what, "block_structure")
    strategy = str(weights.take("strategy", str) or ("tensor" if size is None else "channel" if size < 0 else "group"))
    if strategy not in ("group", "channel", "tensor", *(("block",) if is_float else ())) or (
        strategy == "group" and (size is None or size <= 0)
    ):
        raise unsupported(f"{what} with strategy {strategy!r} and group_size {size}")
    if (strategy == "block") != (block is not None):
        raise unsupported(f"{what} with strategy {strategy!r} and block_structure {block}")
    return StoredScheme(
        form=form,
        bits=int(weights.require(what, "num_bits", *((8,) if is_float else (4, 8)))),
        group=size if strategy == "group" else None,
        per_tensor=strategy == "tensor",
        block=block,
        symmetric=bool(weights.require(what, "symmetric", True, *(() if is_float else (False,)), default=True)),
        needs_order=ordering == "group",
        ignored=tuple(str(entry) for entry in fields.take("ignore", list, [])),
        skips_activations=bool(group.take("input_activations", dict) or group.take("output_activations", dict)),
    )


def _block(fields: _Fields, what: str, name: str) -> tuple[int, int] | None:
    """Rows and columns."""
    sizes = fields.take(name, list)
    if sizes is None:
        return None
    if len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise unsupported(f"{what} with {name} {sizes}")
    return sizes[0], sizes[1]


def _group(size: int) -> int | None:
    """-1 stands for all columns."""
    return None if size == -1 else size
