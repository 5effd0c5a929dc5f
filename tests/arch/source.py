"""The product's source files, parsed once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("novainfer", "gateway", "workers", "kernels")


@cache
def python_files() -> tuple[Path, ...]:
    """Every Python file of the product."""
    return tuple(path for package in PACKAGES for path in sorted((REPOSITORY / package).rglob("*.py")))


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def short(path: Path) -> str:
    """The path as a person would give it."""
    return str(path.relative_to(REPOSITORY))


def functions() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """(file, function, whether it is a method) for every function of the product, nested ones too."""
    for path in python_files():
        methods = {
            item
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.ClassDef)
            for item in node.body
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node, node in methods


def module_name(path: Path) -> str:
    """The import name of a file."""
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
