"""The choice of a backend, what importing it loads, and life beside the Hugging Face package of the same name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import __version__
from kernels.backend import select_backend

pytestmark = pytest.mark.stage0


def _run(code: str, **env: str) -> str:
    """stdout of a fresh interpreter; fails with its stderr."""
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", **env}
    command, root = [sys.executable, "-c", code], Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=root, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_unknown_or_unfit_backends_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown kernel backend 'cutlass', expected one of cpu, triton, reference"):
        select_backend(torch.device("cpu"), "cutlass")
    with pytest.raises(ValueError, match="'cpu' cannot run on device 'cuda:0'"):
        select_backend(torch.device("cuda:0"), "cpu")


def test_each_backend_says_its_name(device: torch.device) -> None:
    assert select_backend(device, "reference").name == "reference"
    pytest.importorskip("triton")
    assert select_backend(device, "triton").name == "triton"


def test_backend_module_loads_neither_triton_nor_a_concrete_backend() -> None:
    out = _run(
        "import sys, kernels\n"
        "assert 'torch' not in sys.modules\n"
        "import torch, kernels.backend, kernels.reference_backend\n"
        "kernels.backend.select_backend(torch.device('meta'))\n"
        "print([m for m in sys.modules if m.split('.')[0] == 'triton' or m == 'kernels.cpu_backend'])"
    )
    assert out.strip() == "[]"


def test_triton_refuses_a_cpu_without_the_interpreter() -> None:
    pytest.importorskip("triton")
    code = (
        "import torch; from kernels.backend import select_backend\n"
        "try: select_backend(torch.device('cpu'), 'triton')\n"
        "except ValueError as error: print(error)"
    )
    assert "set TRITON_INTERPRET=1" in _run(code, TRITON_INTERPRET="0")


def test_transformers_generates_beside_a_package_called_kernels() -> None:
    code = (
        "import kernels, torch\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,\n"
        "    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32)\n"
        "model = LlamaForCausalLM(config).eval()\n"
        "ids = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, min_new_tokens=4, do_sample=False)\n"
        "print(tuple(ids.shape), kernels.__version__, kernels.__file__)"
    )
    out = _run(code)
    assert out.startswith(f"(1, 7) {__version__} ")
    assert os.path.join("kernels", "__init__.py") in out
