"""Schemathesis against a real server, by the description that the server gives of itself.

`python -m tests.safety.fuzz --cases N [--seed S]`: N examples of every operation, in all phases, right and wrong ones.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.safety.doors import gone_since, pids
from tests.servers import RunningServer

REPOSITORY = Path(__file__).resolve().parents[2]
KEY = "sk-of-the-fuzzer"
# Ours instead of it: it knows no rules between fields.
REPLACED = "positive_data_acceptance"


def command(url: str, folder: Path, *, cases: int, seed: int) -> list[str]:
    """The command line of schemathesis."""
    return [
        sys.executable, "-m", "schemathesis.cli", "--config-file", str(_config(folder)), "run", f"{url}/openapi.json",
        "--header", f"Authorization: Bearer {KEY}", "--mode", "all", "--phases", "examples,coverage,fuzzing,stateful",
        "--checks", "all", "--exclude-checks", REPLACED, "--max-examples", str(cases), "--seed", str(seed),
        "--generation-allow-x00", "true", "--generation-database", "none",
        "--continue-on-failure", "--no-color", "--warnings", "off", "--request-timeout", "60",
    ]  # fmt: skip


def _config(folder: Path) -> Path:
    """An empty one: what a person has at home does not count here."""
    path = folder / "schemathesis.toml"
    path.write_text("")
    return path


def fuzz(folder: Path, *, cases: int, seed: int) -> tuple[int, str]:
    """Its exit status (of ours: 1 if a process of the server died) and what it had to say."""
    server = RunningServer("--api-key", KEY, log=folder / "server.log")
    try:
        before = pids(server)
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))),
            "SCHEMATHESIS_HOOKS": "tests.safety.fuzz_hooks",
            "SAFETY_FUZZ_URL": server.base_url,
            "SAFETY_FUZZ_KEY": KEY,
        }
        line = command(server.base_url, folder, cases=cases, seed=seed)
        done = subprocess.run(line, cwd=folder, env=environ, capture_output=True, text=True, check=False)
        gone = gone_since(server, before)
    finally:
        server.stop()
    text = done.stdout + done.stderr + (f"\nprocesses of the server died: {gone}" if gone else "")
    return done.returncode or int(bool(gone)), text


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000, help="examples of every operation")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        status, text = fuzz(Path(folder), cases=options.cases, seed=options.seed)
    print(text)
    return status


if __name__ == "__main__":
    sys.exit(main())
