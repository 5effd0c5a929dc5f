"""The README's snippets, run as they stand against a server of this checkout (only its port differs)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import RunningServer

pytestmark = pytest.mark.stage2

REPOSITORY = Path(__file__).resolve().parents[2]
NODE_PACKAGES = REPOSITORY / "build" / "node" / "node_modules"
ADDRESS = "http://127.0.0.1:8000"


def snippet(language: str, needle: str) -> str:
    """The README's first code block in `language` that contains `needle`."""
    blocks = re.findall(rf"```{language}\n(.*?)```", (REPOSITORY / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return next(block for block in blocks if needle in block)


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_given_the_python_snippet_when_run_then_it_prints_an_answer(server: RunningServer, tmp_path: Path) -> None:
    code = snippet("python", "from openai import OpenAI").replace(ADDRESS, server.base_url)
    assert "23" in run([sys.executable, "-c", code], tmp_path)


def test_given_the_offline_snippet_when_run_then_it_prints_text_and_usage(tmp_path: Path) -> None:
    lines = run([sys.executable, "-c", snippet("python", "from novainfer import LLM")], tmp_path)
    assert lines.count("'completion_tokens'") == 3
    assert "31 + 17 = 48." in lines


def test_given_the_curl_snippet_when_run_then_it_prints_a_completion(server: RunningServer, tmp_path: Path) -> None:
    code = snippet("", "curl").replace(ADDRESS, server.base_url)
    assert '"object":"chat.completion"' in run(["sh", "-c", code.replace("curl ", "curl -sS --noproxy '*' ")], tmp_path)


@pytest.mark.skipif(
    shutil.which("node") is None or not (NODE_PACKAGES / "openai").is_dir(),
    reason="needs node, and the openai package that `make test` fetches where npm is there",
)
def test_given_the_node_snippet_when_run_then_it_prints_an_answer(server: RunningServer, tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(NODE_PACKAGES)
    (tmp_path / "chat.mjs").write_text(snippet("javascript", "import OpenAI").replace(ADDRESS, server.base_url))
    assert "8000" in run(["node", "chat.mjs"], tmp_path)
