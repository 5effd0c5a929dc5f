"""What may not be written anywhere: pickle on a socket, unfinished work, paths of one machine."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.arch.source import REPOSITORY, parsed, python_files, short

pytestmark = pytest.mark.arch

PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
PICKLING_CALLS = {"recv_pyobj", "send_pyobj", "eval", "exec"}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK|WIP)\b")
HOME = re.compile(r"(?<![\w.])/(home|Users|root)/\w+")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".cpp", ".h", ".inc", ".yaml", ".yml", ".service", ".js", ".html", ".css"}
SKIPPED_FOLDERS = {".git", ".venv", ".setup", "build", "dist", "node_modules", "novainfer.egg-info"}


def text_files() -> list[Path]:
    found = []
    for path in sorted(REPOSITORY.iterdir()):
        if path.is_dir() and path.name not in SKIPPED_FOLDERS and not path.name.endswith("_cache"):
            found += [item for item in path.rglob("*") if item.suffix in TEXT_SUFFIXES and item.is_file()]
        elif path.suffix in TEXT_SUFFIXES:
            found.append(path)
    return [path for path in found if path != Path(__file__)]


def test_product_code_when_read_then_nothing_is_pickled_or_evaluated() -> None:
    wrong = []
    for path in python_files():
        for node in ast.walk(parsed(path)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0]]
            if PICKLES & set(names):
                wrong.append(f"{short(path)}:{node.lineno} imports {names}")  # type: ignore[attr-defined]
            if isinstance(node, ast.Call) and call_name(node) in PICKLING_CALLS | {"torch.load"}:
                wrong.append(f"{short(path)}:{node.lineno} calls {call_name(node)}")
    assert not wrong


def call_name(call: ast.Call) -> str:
    """`torch.load` for that very call, else the last part of a dotted name, or a bare name."""
    if isinstance(call.func, ast.Attribute):
        dotted = ast.unparse(call.func)
        if dotted == "torch.load" or call.func.attr in {"recv_pyobj", "send_pyobj"}:
            return dotted if dotted == "torch.load" else call.func.attr
        return ""
    return call.func.id if isinstance(call.func, ast.Name) else ""


def test_product_code_when_read_then_no_function_is_a_stub() -> None:
    stubs = []
    for path in python_files():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Raise) and "NotImplementedError" in ast.unparse(node):
                stubs.append(f"{short(path)}:{node.lineno}")
    assert not stubs


def test_product_code_when_read_then_user_input_is_not_checked_by_assert() -> None:
    """`python -O` removes assertions; kernels may assert shapes, which only a programmer can get wrong."""
    wrong = [
        f"{short(path)}:{node.lineno}"
        for path in python_files()
        if short(path).startswith(("gateway/", "novainfer/"))
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Assert)
    ]
    assert not wrong


def test_every_text_when_read_then_nothing_is_left_for_later_and_no_path_is_one_machines() -> None:
    files = text_files()
    assert len(files) > 50
    wrong = []
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if UNFINISHED.search(line) or HOME.search(line):
                wrong.append(f"{short(path)}:{number}: {line.strip()[:80]}")
    assert not wrong


PUBLISHERS = {"PUB", "SUB", "XPUB", "XSUB", "RADIO", "DISH"}


def test_product_code_when_read_then_sockets_of_zeromq_are_made_in_one_place_and_none_is_for_whoever_subscribes() -> (
    None
):
    """The place checks that an address is local or has keys, and bounds what a message may be."""
    made, wrong = [], []
    for path in python_files():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Attribute) and node.attr in PUBLISHERS and ast.unparse(node.value) == "zmq":
                wrong.append(f"{short(path)}:{node.lineno}")
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("context.socket"):
                made.append(short(path))
    assert set(made) == {"novainfer/transport/channel.py"}
    assert not wrong


# Reads no code, and compares the digest of what it found.
WITHOUT_REVISION = {"novainfer/entrypoints/verify.py"}
LOOK_UPS = {"resolve_checkpoint", "find_checkpoint", "snapshot_download"}


def test_product_code_when_read_then_every_file_of_a_checkpoint_is_of_one_revision_and_no_remote_code_is_forced() -> (
    None
):
    seen, wrong = 0, []
    for path in python_files():
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.Call):
                continue
            words = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if words.get("trust_remote_code") == "True":
                wrong.append(f"{short(path)}:{node.lineno} trusts remote code")
            if ast.unparse(node.func).split(".")[-1] in LOOK_UPS and short(path) not in WITHOUT_REVISION:
                seen += 1
                given = words.get("revision", ast.unparse(node.args[1]) if len(node.args) > 1 else "")
                if not given.endswith("revision"):
                    wrong.append(f"{short(path)}:{node.lineno} names no revision")
    assert seen > 5
    assert not wrong


@pytest.mark.parametrize("arguments", [["check"], ["format", "--check"]], ids=" ".join)
def test_every_file_when_linted_then_there_is_nothing_to_say(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", "."]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
