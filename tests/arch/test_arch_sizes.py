"""Nothing grows too large to read: files, functions, argument lists; and everything public says what it is."""

from __future__ import annotations

import ast

import pytest

from tests.arch.source import PACKAGES, REPOSITORY, functions, parsed, python_files, short

pytestmark = pytest.mark.arch

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 7
SOURCE_SUFFIXES = {".py", ".cpp", ".h", ".inc", ".js", ".css", ".html"}


def test_a_source_file_when_counted_then_it_has_fewer_than_400_lines() -> None:
    long = {}
    for package in PACKAGES:
        for path in (REPOSITORY / package).rglob("*"):
            if path.suffix in SOURCE_SUFFIXES:
                lines = len(path.read_text(encoding="utf-8").splitlines())
                if lines >= MAX_FILE_LINES:
                    long[short(path)] = lines
    assert not long


def test_a_function_when_counted_then_it_has_fewer_than_60_lines() -> None:
    long = {}
    for path, function, _ in functions():
        assert function.end_lineno is not None
        # A Triton kernel takes its pointers and strides one by one: its body counts.
        first = function.body[0].lineno if is_triton_kernel(function) else function.lineno
        lines = function.end_lineno - first + 1
        if lines >= MAX_FUNCTION_LINES:
            long[f"{short(path)}::{function.name}"] = lines
    assert not long


def test_a_function_when_counted_then_it_has_at_most_7_parameters() -> None:
    wide = {}
    for path, function, is_method in functions():
        if is_triton_kernel(function):
            continue
        arguments = function.args
        count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
        count -= is_method and not has_decorator(function, "staticmethod")
        if count > MAX_PARAMETERS:
            wide[f"{short(path)}::{function.name}"] = count
    assert not wide


def test_everything_public_when_read_then_it_has_a_docstring() -> None:
    silent = []
    for path in python_files():
        tree = parsed(path)
        if tree.body and ast.get_docstring(tree) is None:
            silent.append(short(path))
        public = public_definitions(tree)
        silent += [f"{short(path)}::{node.name}" for node in public if ast.get_docstring(node) is None]
    assert not silent


def public_definitions(tree: ast.Module) -> list[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Public classes and functions of a module; of a method, the name may be enough."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]


def has_decorator(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> bool:
    return any(isinstance(item, ast.Name) and item.id == name for item in function.decorator_list)


def is_triton_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("triton" in ast.unparse(item) and "jit" in ast.unparse(item) for item in function.decorator_list)
