"""advisories.toml says of each public advisory how it stands here, and by which test that would be noticed."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from functools import cache
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.arch.source import REPOSITORY

pytestmark = pytest.mark.arch

REQUIRED = {"ids", "software", "flaw", "here"}
STATES = {"held", "not offered", "floor", "open"}
FLOOR = re.compile(r"([a-z0-9-]+)>=(\d+(?:\.\d+)*)[ ;:,.]")


@cache
def advisories() -> tuple[dict[str, Any], ...]:
    """The entries of the file."""
    data = tomllib.loads((REPOSITORY / "advisories.toml").read_text(encoding="utf-8"))
    assert set(data) == {"advisory"}
    return tuple(data["advisory"])


@cache
def names_of_tests(path: str) -> frozenset[str]:
    """The names of a test file's tests; none if there is no such file."""
    file = REPOSITORY / path
    if not file.is_file():
        return frozenset()
    nodes = ast.parse(file.read_text(encoding="utf-8")).body
    names = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return frozenset(name for name in names if name.startswith("test_"))


def test_the_advisories_when_read_then_every_entry_has_its_keys_and_no_other() -> None:
    assert len(advisories()) > 70
    wrong = []
    for entry in advisories():
        texts = [entry.get("software"), entry.get("flaw"), entry.get("why", "x")]
        lists = [entry.get("ids"), entry.get("tests", ["x"])]
        is_right = (
            set(entry) >= REQUIRED
            and set(entry) <= REQUIRED | {"tests", "why"}
            and entry["here"] in STATES
            and all(isinstance(text, str) and text for text in texts)
            and all(isinstance(items, list) and items and all(isinstance(i, str) for i in items) for items in lists)
            and ("tests" if entry["here"] == "held" else "why") in entry
        )
        if not is_right:
            wrong.append(entry)
    assert not wrong


def test_the_advisories_when_read_then_each_is_there_once() -> None:
    times = Counter(name for entry in advisories() for name in entry["ids"])
    assert not [name for name, count in times.items() if count > 1]


def test_the_advisories_when_they_name_a_test_then_it_exists() -> None:
    missing = []
    for entry in advisories():
        for name in entry.get("tests", ()):
            path, _, function = name.partition("::")
            if not path.startswith("tests/") or function not in names_of_tests(path):
                missing.append(name)
    assert not missing


def test_the_advisories_when_a_floor_holds_them_then_the_project_demands_it() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lowest = {}
    for line in project["dependencies"]:
        requirement = Requirement(line)
        versions = [Version(one.version) for one in requirement.specifier if one.operator == ">="]
        lowest[requirement.name] = max(versions)
    floors = [entry for entry in advisories() if entry["here"] == "floor"]
    assert len(floors) > 5
    wrong = []
    for entry in floors:
        found = FLOOR.match(entry["why"])
        if found is None or found[1] not in lowest or lowest[found[1]] < Version(found[2]):
            wrong.append((entry["ids"][0], entry["why"]))
    assert not wrong
