"""OpenVINO GenAI's continuous batching, in a process of its own that speaks JSON lines: token ids, no HTTP, no text.

So it does less than a server, and has no chat API. The checkpoint is exported once, by optimum-intel, which keeps bf16.
Where the processor multiplies no bf16 numbers it computes in float32, keys and values as well.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import serving, workloads
from bench.peers import base
from bench.peers.installing import Installation, fingerprint, run_logged
from bench.peers.processes import Child, running

VERSION = "2026.4.1.0"
_REQUIREMENTS = (
    "torch==2.13.0",
    f"openvino-genai=={VERSION}",
    "openvino==2026.4.1",
    "optimum-intel==2.2.0",
    "nncf==3.4.0",
)
_TOKENS_PER_BLOCK = 32  # of its CPU plugin
_WORKER = Path(__file__).with_name("openvino_worker.py")


@dataclass(frozen=True, slots=True)
class JsonLinesDriver:
    """Hands a whole load to the worker and gets all times back."""

    child: Child

    def run(self, items: Sequence[workloads.Item], max_concurrency: int) -> list[serving.Measured]:
        """As `Driver`; the worker starts and times the requests, so none of it is a client's."""
        job = {
            "items": [(item.prompt_token_ids, item.max_tokens) for item in items],
            "max_concurrency": max_concurrency,
        }
        print(json.dumps(job), file=self.child.stdin, flush=True)
        results: list[dict[str, Any]] = json.loads(self.read_line())
        return [
            serving.Measured(len(item.prompt_token_ids), **result) for item, result in zip(items, results, strict=True)
        ]

    def chat(self, text: str) -> float | None:
        """As `Driver`: there is none."""
        return None

    def read_line(self) -> str:
        """The worker's next line. Raises SystemExit if it has ended."""
        line = self.child.stdout.readline()
        if not line:
            raise SystemExit(f"{self.child.name} has ended:\n{self.child.last_lines()}")
        return line


@dataclass(frozen=True, slots=True)
class OpenVino:
    """`ContinuousBatchingPipeline` with its defaults and a prefix cache."""

    name: str = "openvino"
    precision: str = "bf16"
    package: str = "openvino"

    def install(self, folder: Path) -> None:
        """As `Peer`."""
        installation = _installation(folder)
        if installation.is_whole():
            return
        with installation.made():
            installation.make_environment(_REQUIREMENTS)
            # a CUDA build of it, which optimum-intel's requirements may bring, breaks transformers
            installation.pip("uninstall", "--yes", "torchvision")

    def version(self, folder: Path) -> str | None:
        """As `Peer`."""
        return VERSION if _installation(folder).is_whole() else None

    @contextlib.contextmanager
    def start(self, folder: Path, checkpoint: Path, port: int) -> Iterator[base.Running]:
        """As `Peer`; exports the checkpoint before the clock runs. There is no port."""
        model = exported(folder, checkpoint)
        properties = {"INFERENCE_NUM_THREADS": base.num_cores()}
        settings = {"num_kv_blocks": base.KV_TOKENS // _TOKENS_PER_BLOCK, "properties": properties}
        # -P: what lies beside the worker is ours and must not be found
        command = (_installation(folder).python, "-P", _WORKER, model, json.dumps(settings))
        log = folder / "server.log"
        with running(self.name, command, env=base.environment(), log=log, has_pipes=True) as child:
            driver = JsonLinesDriver(child)
            driver.read_line()
            yield base.Running(driver, "", child.process.pid, time.perf_counter() - child.began)


def exported(folder: Path, checkpoint: Path) -> Path:
    """The checkpoint in OpenVINO's format, made when it is not there. Raises SystemExit."""
    model = folder / "models" / fingerprint(checkpoint)
    if not model.is_dir():
        half = model.with_suffix(".half")
        shutil.rmtree(half, ignore_errors=True)
        tool = folder / "venv" / "bin" / "optimum-cli"
        options = ("--model", checkpoint, "--task", "text-generation-with-past")
        run_logged((tool, "export", "openvino", *options, half), folder / "convert.log", cwd=folder)
        half.rename(model)
    return model


def _installation(folder: Path) -> Installation:
    return Installation(folder, (*_REQUIREMENTS, "without torchvision"))
