"""The compiled kernels as Python callables. Knows C types; must not know what the kernels compute."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.native.build import NativeBuildError, library_path, runs_here, supported_isas
from kernels.weights import WeightMemory

_log = logging.getLogger(__name__)

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in isa.cpp
LANES = 16  # columns of a packed panel

_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "pack_linear": (_POINTER, _POINTER, _INTEGER, _INTEGER, _INTEGER, _INTEGER, _INTEGER),
    "code_linear": (_POINTER, _POINTER, _INTEGER, _INTEGER, _INTEGER, _INTEGER, _INTEGER),
    "linear": (_POINTER, _POINTER, _INTEGER, _POINTER, _INTEGER, _INTEGER),
    "quantize": (_POINTER, _POINTER, _INTEGER, _POINTER, _POINTER, _INTEGER),
    "pack_integers": (_POINTER, _POINTER, _POINTER, _INTEGER),
    "quantized_linear": (_POINTER, _POINTER, _INTEGER, _POINTER, _INTEGER, _INTEGER),
    "store_kv": (_POINTER, _INTEGER),
    "paged_attention": (_POINTER, _INTEGER),
    "rms_norm": (_POINTER, _INTEGER),
    "rotary": (_POINTER, _INTEGER),
    "act_mul": (_POINTER, _INTEGER),
    "sample": (_POINTER, _INTEGER),
    "screen": (_POINTER, _POINTER, _POINTER, _INTEGER, _INTEGER),
    "run_program": (_POINTER, _INTEGER, _POINTER, _INTEGER, _INTEGER),
    "find_drafts": (_POINTER, _INTEGER),
}


class NativeLibrary:
    """The kernels of one instruction set. Calls release the GIL; the caller keeps tensors alive and of the right size.

    Each kernel returns 0, or 1 if an index in its arguments points outside its table; then it has done nothing.
    """

    def __init__(self, isa: str, path: Path | None = None) -> None:
        """path: the library; None: this checkout's, built first where needed."""
        self.isa = isa
        self.weight_memory = WeightMemory()
        self._library = ctypes.CDLL(str(path or library_path(isa)))
        self.pack_linear = self._function("pack_linear")
        self.code_linear = self._function("code_linear")
        self.linear = self._function("linear")
        self.quantize = self._function("quantize")
        self.pack_integers = self._function("pack_integers")
        self.quantized_linear = self._function("quantized_linear")
        self.store_kv = self._function("store_kv")
        self.paged_attention = self._function("paged_attention")
        self.rms_norm = self._function("rms_norm")
        self.rotary = self._function("rotary")
        self.act_mul = self._function("act_mul")
        self.sample = self._function("sample")
        self.screen = self._function("screen")
        self.run_program = self._function("run_program")
        self.find_drafts = self._function("find_drafts")

    def _function(self, name: str) -> Callable[..., int]:
        function = getattr(self._library, f"nova_{self.isa}_{name}")
        function.argtypes = _SIGNATURES[name]
        function.restype = _INTEGER
        return function  # type: ignore[no-any-return]


def load_library(isa: str | None = None) -> NativeLibrary:
    """The library of `isa`, of $NOVAINFER_CPU_ISA, or the best one that can be had here; built first where needed.

    Raises NativeBuildError if none can be built or loaded, or if the processor does not have the instruction set.
    """
    return _load(isa or os.environ.get("NOVAINFER_CPU_ISA") or None)


@functools.cache
def _load(isa: str | None) -> NativeLibrary:
    available = supported_isas()
    if isa is not None and not runs_here(isa):
        raise NativeBuildError(f"this processor does not run '{isa}', only {', '.join(available)}")
    failures: list[NativeBuildError] = []
    for name in available if isa is None else (isa,):
        try:
            library = NativeLibrary(name)
        except NativeBuildError as error:  # a compiler may be older than the processor
            failures.append(error)
        except OSError as error:
            raise NativeBuildError(f"cannot load the native kernels: {error}") from error
        else:
            if failures:
                _log.warning(
                    "using slower native kernels, for %s, since the best cannot be built: %s", name, failures[0]
                )
            return library
    raise failures[0]


def panel_shape(steps: int, columns: int, dtype: torch.dtype) -> tuple[int, ...]:
    """The shape of one packed panel of `steps` x `columns` elements: [steps, columns], bf16 with its steps in pairs."""
    return (-(-steps // 2), columns, 2) if dtype == torch.bfloat16 else (steps, columns)


def last_dim_contiguous(x: Tensor) -> Tensor:
    """x itself where its last dimension is contiguous in memory, else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
