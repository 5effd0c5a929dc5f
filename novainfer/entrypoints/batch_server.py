"""A server for one batch: `novainfer serve` as a child process, on a loopback port and with a key that nobody knows.

The child gets its configuration, and so the key, through a pipe. That stays open: when the batch's process is gone,
however it went, the server stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Never

from novainfer.config import ServeConfig
from novainfer.entrypoints.children import python_module
from novainfer.entrypoints.serve import serve
from novainfer.errors import ConfigError, NovaInferError

STOP_PATIENCE = 60.0  # seconds
_READY = re.compile(rb"NovaInfer is ready on (http://\S+)")


class ServerEnded(NovaInferError):
    """Our server has ended by itself. status: its exit status, below 0 for a signal."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the server of this batch has ended (exit status {status})")
        self.status = status


class OwnServer:
    """A server that is ready. `url`: its root; `api_key`: what opens it."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, api_key: str) -> None:
        self.url = url
        self.api_key = api_key
        self._process = process

    async def ended(self) -> Never:
        """Raises `ServerEnded` once it has."""
        raise ServerEnded(await self._process.wait())


@contextlib.asynccontextmanager
async def own_server(config: ServeConfig, without_effect: Sequence[str]) -> AsyncIterator[OwnServer]:
    """Start a server and wait until it is ready; it has ended, and left nothing, afterwards. Raises `ServerEnded`."""
    key = secrets.token_urlsafe(32)
    private = replace(config.server, host="127.0.0.1", port=0, api_key=(key,), api_key_file=None, web_ui=False)
    order = {"config": replace(config, server=private).to_json(), "without_effect": list(without_effect)}
    process = await asyncio.create_subprocess_exec(
        *python_module(__name__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "NOVAINFER_API_KEY"},
        process_group=0,  # Ctrl-C is for us: the server goes after its last request
    )
    try:
        url = await _ready_url(process, json.dumps(order).encode() + b"\n")
        yield OwnServer(process, url, key)
    finally:
        await _stop(process)


async def _ready_url(process: asyncio.subprocess.Process, order: bytes) -> str:
    if process.stdin is None or process.stdout is None:
        raise NovaInferError("the server has no pipes")
    process.stdin.write(order)
    while line := await process.stdout.readline():
        match = _READY.search(line)
        if match is not None:
            return match[1].decode()
    raise ServerEnded(await process.wait())


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_PATIENCE):
            await process.wait()
    except TimeoutError:
        process.kill()  # its children die with it
        await process.wait()


def main() -> int:
    """The child: serve as standard input says, until SIGTERM or its end."""
    data = b""
    while not data.endswith(b"\n"):
        more = os.read(0, 1 << 16)
        if not more:
            return 1
        data += more
    order = json.loads(data)
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    try:
        return serve(ServeConfig.from_json(order["config"]), order["without_effect"])
    except ConfigError as error:
        print(f"novainfer: {error}", file=sys.stderr)
        return 2


def _end_with_parent() -> None:
    while os.read(0, 1):
        continue
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
