"""`novainfer replicas`: list, add, drain and restart the replicas of a running server, by a socket in its directory."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import zmq

from novainfer.errors import ConfigError, EngineError
from novainfer.protocol.supervision import CONTROL_SCHEMA, LIST, Refused, ReplicaCommand, ReplicaList
from novainfer.transport.addresses import RunDir
from novainfer.transport.channel import connect_req
from novainfer.transport.replicas import NAME

_PATIENCE = 10.0  # seconds for an answer
_LOOK_SECONDS = 0.5  # between two looks, while a command is being carried out
_SERVING = "serving"


def replicas_command(arguments: argparse.Namespace) -> int:
    """Carry one command out; returns the exit status. Raises `ConfigError`, `EngineError`."""
    run_dir = RunDir.create(arguments.run_dir) if arguments.run_dir else _only_run_dir()
    listing = ask(run_dir, ReplicaCommand(arguments.action, arguments.replicas))
    if arguments.wait and arguments.action != LIST:
        listing = _wait(run_dir, listing)
    print(_table(listing))
    return 0


def ask(run_dir: RunDir, command: ReplicaCommand) -> ReplicaList:
    """The server's answer. Raises `ConfigError` if it refuses, `EngineError` if there is no answer."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = connect_req(context, run_dir.control())
    try:
        socket.send(CONTROL_SCHEMA.encode(command))
        if not socket.poll(int(_PATIENCE * 1000)):
            raise EngineError(f"no server with replicas answers in {run_dir.path}")
        answer = CONTROL_SCHEMA.decode(socket.recv())
    finally:
        socket.close(linger=0)
        context.term()
    if isinstance(answer, ReplicaList):
        return answer
    raise ConfigError(answer.message if isinstance(answer, Refused) else f"an answer of a strange kind: {answer}")


def _wait(run_dir: RunDir, listing: ReplicaList) -> ReplicaList:
    """Until all that are left serve."""
    while any(state != _SERVING for state in listing.states):
        time.sleep(_LOOK_SECONDS)
        listing = ask(run_dir, ReplicaCommand(LIST))
    return listing


def _only_run_dir() -> RunDir:
    found = [path.parent for path in Path(tempfile.gettempdir()).glob(f"{RunDir.PREFIX}*/{NAME}")]
    if len(found) != 1:
        words = f"{len(found)} servers with --replicas have" if found else "no server with --replicas has"
        raise ConfigError(f"{words} a run directory in {tempfile.gettempdir()}: name it with --run-dir")
    return RunDir.create(str(found[0]))


def _table(listing: ReplicaList) -> str:
    rows = [("replica", "state", "live requests")]
    rows += [
        (str(number), state, str(live))
        for number, state, live in zip(listing.replicas, listing.states, listing.num_live, strict=True)
    ]
    return "\n".join(f"{number:>7}  {state:<22}{live:>13}" for number, state, live in rows)
