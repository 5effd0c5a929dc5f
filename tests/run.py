"""The one entry to the tests: `python -m tests.run --suite stage0|stage1|stage2|all|deploy`.

`deploy` is all of tests/deploy: it needs Prometheus, Helm's engine and, for some tests, root (`make test-deploy`).

Runs pytest once, in place of this process, so that the last line and the exit status are pytest's own. Two of its
workers share the files out: tests of servers mostly wait for them. `-n 0` runs all in one process.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

SUITES = ("stage0", "stage1", "stage2", "all", "deploy")
WHEN = ("auto", "always", "never")
TWO_WORKERS = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")


def marker_expression(suite: str, *, parity: str, hf: str) -> str:
    """pytest's `-m`: the suite's tests, with or without those that are compared with transformers.

    auto = only where they belong: with everything.
    """
    expression = "" if suite == "all" else suite
    for marker, when in (("parity", parity), ("hf", hf)):
        if when == "always" and expression:
            expression = f"({expression}) or {marker}"
        elif when == "never":
            expression = f"({expression}) and not {marker}" if expression else f"not {marker}"
    if suite == "all":
        return f"({expression}) and not deploy" if expression else "not deploy"
    return expression


def command(arguments: Sequence[str]) -> list[str]:
    """The pytest command line for our arguments; what we do not know goes to pytest."""
    parser = argparse.ArgumentParser(prog="python -m tests.run", description="Unknown options go to pytest.")
    parser.add_argument("--suite", choices=SUITES, default="all", help="which layer")
    parser.add_argument("--model-path", help="checkpoint folder of the tests marked hf (default: demo model)")
    parser.add_argument("--run-parity", choices=WHEN, default="auto", help="tests against transformers")
    parser.add_argument("--run-hf", choices=WHEN, default="auto", help="the same on --model-path")
    options, rest = parser.parse_known_args(arguments)
    built = [sys.executable, "-m", "pytest", *TWO_WORKERS]
    expression = marker_expression(options.suite, parity=options.run_parity, hf=options.run_hf)
    if expression:
        built += ["-m", expression]
    if options.model_path:
        folder = Path(options.model_path)
        if not (folder / "config.json").is_file():
            parser.error(f"--model-path: {folder} has no config.json")
        built += ["--model-path", str(folder.resolve())]
    return [*built, *rest]


def main() -> None:
    """Replace this process by pytest."""
    built = command(sys.argv[1:])
    print("running:", shlex.join(built), flush=True)
    os.chdir(Path(__file__).resolve().parent.parent)
    os.execv(built[0], built)


if __name__ == "__main__":
    main()
