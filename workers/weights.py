"""Streaming tensors out of safetensors files.

A tensor, or the slice of it that this rank needs, is read when a layer asks for it and belongs to the layer alone; a
file is closed as soon as its last tensor has been asked for. So a checkpoint never sits twice in memory. (Where ranks
that share out columns quantise them they look through the whole tensor once, as it is mapped.)
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from novainfer.errors import UnsupportedModelError
from workers.checkpoint import read_json

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
FLOAT_DTYPES = tuple(_FLOATS)

Progress = Callable[[int, int], None]  # (tensors read, all tensors)


class WeightReader:
    """The tensors of one checkpoint folder by name. Raises `UnsupportedModelError` for anything that does not fit."""

    def __init__(self, folder: Path, progress: Progress | None = None) -> None:
        self._files = _tensor_files(folder)  # tensor name -> file that holds it
        self._unread = set(self._files)
        self._unread_per_file = Counter(self._files.values())
        self._open: dict[Path, Any] = {}
        self._progress = progress

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._files)

    def unread(self) -> list[str]:
        """The names of those that nobody has asked for yet."""
        return sorted(self._unread)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, from its file's header."""
        return tuple(self._view(name).get_shape())

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        index: tuple[slice, ...] = (),
        dtypes: tuple[str, ...] = FLOAT_DTYPES,
    ) -> Tensor:
        """The slice `index` (by default all) of a tensor that must have `shape` and one of `dtypes`, in its own.

        It may be a view of the mapped file: copy it to where it belongs.
        """
        view = self._view(name)
        found = tuple(view.get_shape())
        if found != shape:
            raise UnsupportedModelError(f"tensor '{name}' has shape {list(found)}, the model needs {list(shape)}")
        if view.get_dtype() not in dtypes:
            raise UnsupportedModelError(f"tensor '{name}' has type {view.get_dtype()}, expected {' or '.join(dtypes)}")
        tensor: Tensor = view[index or (slice(None),)[: len(shape)]]
        self._mark_read(name)
        return tensor

    def finish(self, ignored_prefixes: Iterable[str] = (), ignored_suffixes: Iterable[str] = ()) -> None:
        """Close all files. Raises `UnsupportedModelError` if tensors are left that the model did not ask for."""
        self._open.clear()
        prefixes, suffixes = tuple(ignored_prefixes), tuple(ignored_suffixes)
        left = sorted(n for n in self._unread if not n.startswith(prefixes) and not n.endswith(suffixes))
        if left:
            names = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
            raise UnsupportedModelError(f"the checkpoint has tensors that this architecture does not use: {names}")
        if self._progress is not None:
            self._progress(len(self._files), len(self._files))

    def _view(self, name: str) -> Any:
        if name not in self._files:
            raise UnsupportedModelError(f"the checkpoint has no tensor '{name}'")
        try:
            return self._file(name).get_slice(name)
        except SafetensorError as error:  # an index that names another file
            raise UnsupportedModelError(f"'{self._files[name]}' has no tensor '{name}': {error}") from error

    def _file(self, name: str) -> Any:
        path = self._files[name]
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt", device="cpu")
            except Exception as error:
                raise UnsupportedModelError(f"'{path}' is not a readable safetensors file: {error}") from error
        return self._open[path]

    def _mark_read(self, name: str) -> None:
        path, is_first = self._files[name], name in self._unread
        if is_first:
            self._unread.remove(name)
            self._unread_per_file[path] -= 1
        if self._unread_per_file[path] == 0:  # also where a tensor is read once more, which has opened it again
            self._open.pop(path, None)
        if is_first and self._progress is not None:
            self._progress(len(self._files) - len(self._unread), len(self._files))


def stored_type(folder: Path) -> str:
    """torch's name for the type of the weights, from a file's header alone.

    As in transformers that is the type of the first file's first tensor of floats; those of eight bits and less are no
    type that a model computes in.
    """
    path = min(_tensor_files(folder).values(), default=folder)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            types = (file.get_slice(name).get_dtype() for name in file.keys())  # noqa: SIM118
            return next((_FLOATS[kind] for kind in types if kind in _FLOATS), "float32")
    except Exception as error:
        raise UnsupportedModelError(f"'{path}' is not a readable safetensors file: {error}") from error


def find_bad_tensor(folder: Path) -> str | None:
    """The name of a tensor that holds NaN or an infinity. Reads all of them."""
    for name, path in sorted(_tensor_files(folder).items()):
        with safe_open(path, framework="pt", device="cpu") as file:
            tensor: Tensor = file.get_tensor(name)
            if tensor.is_floating_point() and tensor.itemsize == 1:  # torch asks that of no fp8 number
                tensor = tensor.bfloat16()
            if not torch.isfinite(tensor).all():
                return name
    return None


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, from the single file's own header or from the index of a sharded checkpoint.

    The single file comes first, as in transformers: who saves one over a sharded checkpoint leaves its index behind.
    """
    path = folder / SINGLE_FILE
    if not path.is_file():
        return _sharded_files(folder)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return dict.fromkeys(file.keys(), path)
    except Exception as error:
        raise UnsupportedModelError(f"'{path}' is not a readable safetensors file: {error}") from error


def _sharded_files(folder: Path) -> dict[str, Path]:
    weight_map = read_json(folder, INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UnsupportedModelError(
            f"'{folder}' has neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors are supported"
        )
    if not all(isinstance(file, str) and file == os.path.basename(file) for file in weight_map.values()):
        raise UnsupportedModelError(f"'{folder / INDEX_FILE}' names something other than files beside it")
    files = {name: folder / file for name, file in weight_map.items()}
    missing = sorted({path.name for path in files.values() if not path.is_file()})
    if missing:
        raise UnsupportedModelError(f"files of the checkpoint are missing in '{folder}': {', '.join(missing)}")
    return files
