"""`python -m tests.run`: which tests its switches choose."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.run import TWO_WORKERS, command, marker_expression

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("suite", "parity", "hf", "expression"),
    [
        ("all", "auto", "auto", "not deploy"),
        ("all", "always", "always", "not deploy"),
        ("all", "never", "auto", "(not parity) and not deploy"),
        ("all", "never", "never", "((not parity) and not hf) and not deploy"),
        ("deploy", "auto", "auto", "deploy"),
        ("stage1", "auto", "auto", "stage1"),
        ("stage1", "always", "auto", "(stage1) or parity"),
        ("stage1", "always", "never", "((stage1) or parity) and not hf"),
        ("stage2", "never", "always", "((stage2) and not parity) or hf"),
    ],
)
def test_switches_when_given_then_they_become_one_marker_expression(
    suite: str, parity: str, hf: str, expression: str
) -> None:
    assert marker_expression(suite, parity=parity, hf=hf) == expression


def test_a_command_line_when_built_then_unknown_options_go_to_pytest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    built = command(["--suite", "stage0", "--model-path", str(tmp_path), "-x", "tests/kernels"])
    chosen = ("-m", "stage0", "--model-path", str(tmp_path), "-x", "tests/kernels")
    assert built == [sys.executable, "-m", "pytest", *TWO_WORKERS, *chosen]


def test_a_folder_without_a_checkpoint_when_given_then_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        command(["--model-path", str(tmp_path)])
