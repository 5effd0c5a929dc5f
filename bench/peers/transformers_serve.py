"""`transformers serve` with continuous batching, over HTTP with text.

Its completions take no token ids and no `ignore_eos`, its streams end without `[DONE]`. So prompts are texts of as many
tokens (which is checked), and a generation config without an end-of-text id stands for `ignore_eos`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cases import text_of
from bench.http_stream import RequestError, Target
from bench.peers import base
from bench.peers.installing import Installation
from bench.peers.processes import running

VERSION = "5.23.0"
_REQUIREMENTS = ("torch==2.13.0", f"transformers[serving]=={VERSION}")
_TOKENS_PER_BLOCK = 32


class TextTarget(Target):
    """Says and hears our requests in its dialect."""

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """As `Target`; the answer is whole with the event that names a finish reason."""
        translated = {
            "model": body["model"],
            "prompt": text_of(body["prompt"]),
            "stream": True,
            "generation_config": json.dumps({"max_new_tokens": body["max_tokens"], "do_sample": False}),
        }
        async for event in super().events(path, translated):
            usage = event.get("usage")
            if usage and usage["prompt_tokens"] != len(body["prompt"]):
                raise RequestError(f"the text was {usage['prompt_tokens']} tokens, not {len(body['prompt'])}")
            yield event
            if any(choice.get("finish_reason") for choice in event.get("choices", ())):
                return


@dataclass(frozen=True, slots=True)
class TransformersServe:
    """`transformers serve --continuous-batching`."""

    name: str = "transformers"
    precision: str = "bf16"
    package: str = "transformers"

    def install(self, folder: Path) -> None:
        """As `Peer`."""
        installation = _installation(folder)
        if installation.is_whole():
            return
        with installation.made():
            installation.make_environment(_REQUIREMENTS)

    def version(self, folder: Path) -> str | None:
        """As `Peer`."""
        return VERSION if _installation(folder).is_whole() else None

    @contextlib.contextmanager
    def start(self, folder: Path, checkpoint: Path, port: int) -> Iterator[base.Running]:
        """As `Peer`."""
        num_blocks = base.KV_TOKENS // _TOKENS_PER_BLOCK
        options = (
            *("--continuous-batching", "--cb-block-size", str(_TOKENS_PER_BLOCK), "--cb-num-blocks", str(num_blocks)),
            *("--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "bfloat16"),
        )
        command = (folder / "venv" / "bin" / "transformers", "serve", checkpoint, *options)
        with running(self.name, command, env=base.environment(), log=folder / "server.log") as child:
            base_url = f"http://127.0.0.1:{port}"
            ready = base.wait_for_http(child, f"{base_url}/health")
            driver = base.HttpDriver(TextTarget(base_url), str(checkpoint))
            yield base.Running(driver, base_url, child.process.pid, ready)


def _installation(folder: Path) -> Installation:
    return Installation(folder, _REQUIREMENTS)
