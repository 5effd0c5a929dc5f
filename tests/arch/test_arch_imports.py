"""Which package may import which: every module imported in a process of its own, and every source read."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import pytest

from tests.arch.source import module_name, parsed, python_files, short

pytestmark = pytest.mark.arch

HEAVY = {"torch", "triton", "ray", "transformers"}
ENTRYPOINTS = "novainfer.entrypoints"
# package -> top-level names that must not be loaded when all of its modules are
FORBIDDEN = {
    "novainfer": HEAVY | {"gateway", "workers", "kernels", ENTRYPOINTS},
    "gateway": HEAVY | {"workers", "kernels", ENTRYPOINTS},
    "workers": {"gateway", ENTRYPOINTS},
    "kernels": {"novainfer", "gateway", "workers", "ray", "transformers"},
}
_IMPORT_ALL = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
print(json.dumps(sorted(sys.modules)))
"""


def modules(package: str) -> list[str]:
    names = [module_name(path) for path in python_files()]
    return [name for name in names if name.split(".")[0] == package and not name.startswith(ENTRYPOINTS)]


def is_within(module: str, name: str) -> bool:
    return module == name or module.startswith(name + ".")


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_a_package_when_all_its_modules_are_imported_then_nothing_forbidden_is_loaded(package: str) -> None:
    names = modules(package)
    assert len(names) > 3
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_ALL, json.dumps(names)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout.splitlines()[-1])
    found = {name for name in FORBIDDEN[package] if any(is_within(module, name) for module in loaded)}
    assert not found


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_a_package_when_its_source_is_read_then_no_import_is_forbidden_not_even_a_late_one(package: str) -> None:
    wrong = []
    for path in python_files():
        if module_name(path) not in modules(package):
            continue
        wrong += [
            f"{short(path)} imports {name}"
            for name in imported_names(parsed(path))
            if any(is_within(name, forbidden) for forbidden in FORBIDDEN[package])
            and not (path.parent.name == "novainfer" and is_within(name, "novainfer.entrypoints.llm"))
        ]
    assert not wrong


def imported_names(tree: ast.Module) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def test_any_package_when_it_imports_then_by_absolute_names() -> None:
    relative = [
        short(path)
        for path in python_files()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative


def test_transformers_beside_our_package_kernels_when_it_looks_for_the_hub_package_then_it_finds_none() -> None:
    code = (
        "import kernels; assert kernels.__version__\n"
        "from transformers.utils import is_kernels_available\n"
        "assert not is_kernels_available()\n"
        "from transformers import AutoModelForCausalLM, LlamaConfig\n"
        "import torch\n"
        "config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,\n"
        "    num_attention_heads=2, num_key_value_heads=1, bos_token_id=0, eos_token_id=None, pad_token_id=0)\n"
        "model = AutoModelForCausalLM.from_config(config)\n"
        "output = model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False)\n"
        "assert output.shape == (1, 4)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
