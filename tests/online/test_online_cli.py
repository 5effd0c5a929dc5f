"""The other commands of `novainfer` beside a running server, and what `serve` and `doctor` refuse."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from novainfer.checkpoint import resolve_checkpoint
from tests.servers import RunningServer

pytestmark = pytest.mark.stage2


def cli(server: RunningServer, *arguments: str, stdin: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-m", "novainfer.entrypoints.cli", *arguments, "--base-url", server.base_url],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_clients_when_a_server_runs_then_they_print_its_models_and_answers(server: RunningServer) -> None:
    assert cli(server, "models").startswith("demo")
    greedy = ("--temperature", "0", "--max-tokens", "8")
    with server.sdk() as sdk:
        chat = sdk.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "Hello"}], temperature=0, max_tokens=8
        )
        text = sdk.completions.create(model="demo", prompt="Hello", temperature=0, max_tokens=8)
    assert cli(server, "chat", "Hello", *greedy) == f"{chat.choices[0].message.content}\n"
    assert cli(server, "chat", *greedy, stdin="Hello\n/reset\nHello\n") == f"{chat.choices[0].message.content}\n" * 2
    assert cli(server, "generate", "-", *greedy, stdin="Hello") == f"{text.choices[0].text}\n"


def test_a_second_server_when_the_port_is_taken_then_it_says_so_and_exits_with_2(server: RunningServer) -> None:
    port = server.base_url.rsplit(":", 1)[1]
    done = subprocess.run(
        [sys.executable, "-m", "novainfer.entrypoints.cli", "serve", "--port", port, "--enable-auto-tool-choice"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "supervisor: --enable-auto-tool-choice has no effect: calls are told" in done.stderr


def test_the_doctor_when_asked_about_the_demo_model_then_it_finds_nothing_that_would_fail() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "novainfer.entrypoints.cli", "doctor", "--port", "0", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    verdicts = {verdict["subject"]: verdict for verdict in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    assert "qwen3" in verdicts["model"]["finding"]
    assert all(verdict["fix"] for verdict in verdicts.values() if verdict["status"] != "ok")


def test_the_doctor_when_the_model_is_missing_then_it_exits_with_1_and_says_what_to_do() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "novainfer.entrypoints.cli", "doctor", "/nowhere/model", "--port", "0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "FAIL  model:" in done.stdout
    assert "fix: give a checkpoint folder" in done.stdout


@pytest.mark.parametrize("flags", [[], ["--replicas", "2"]], ids=["one", "replicas"])
def test_a_checkpoint_that_a_rank_cannot_load_when_served_then_the_last_line_says_why(
    tmp_path: Path, flags: list[str]
) -> None:
    folder = Path(shutil.copytree(resolve_checkpoint("demo"), tmp_path / "model"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    done = subprocess.run(
        [sys.executable, "-m", "novainfer.entrypoints.cli", "serve", str(folder), "--port", "0", *flags],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "the server has ended: " in last
    assert f"'{weights}' is not a readable safetensors file" in last
    assert "Traceback" not in done.stderr
