"""The two doors that a parameter comes in by, and what each made of a case: HTTP, and a scheduler's socket.

Between the cases goes a witness, an ordinary request whose tokens must be those that it gets when it is alone.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import httpx
import zmq

from novainfer.errors import ProtocolError
from novainfer.protocol.codec import Schema
from novainfer.protocol.link import Packet
from novainfer.protocol.messages import (
    GATEWAY_SCHEMA,
    AddRequest,
    AliasCancelled,
    CancelAlias,
    EngineInfo,
    EngineStats,
    Heartbeat,
    Hello,
    OutputBatch,
    RequestRejected,
)
from novainfer.sampling.params import SamplingParams
from novainfer.transport.addresses import RunDir
from novainfer.transport.channel import connect_dealer
from tests.safety.table import (
    ANY,
    CHAT,
    EOS,
    MESSAGES,
    PROMPT_IDS,
    RESPONSES,
    TURNS,
    Case,
    Missing,
    Outcome,
    Raw,
)
from tests.servers import RunningServer

_HEADER = struct.Struct("<QQQ")  # of a packet: link, number, origin

PATHS = {CHAT: "/v1/chat/completions", "text": "/v1/completions", RESPONSES: "/v1/responses", TURNS: "/v1/messages"}
JSON = {"content-type": "application/json"}
TOGETHER = 12  # HTTP requests in flight
WITNESS_EVERY = 40  # cases of one connection
BATCH = 60  # records sent to a scheduler before its answers are looked at
PATIENCE = 60_000  # milliseconds
WITNESS_TOKENS = 8


@dataclass
class Report:
    """What was sent and what went wrong, in words. witnesses: how many were compared.   deaths: of processes."""

    cases: int = 0
    witnesses: int = 0
    deaths: int = 0
    wrong: list[str] = field(default_factory=list)

    def check(self, case: Case, found: str) -> None:
        """`found` must be the case's outcome in the same words."""
        self.cases += 1
        if found != (wanted := in_words(case, found)):
            self.wrong.append(f"{case.label}: {found}, not {wanted}")


def in_words(case: Case, found: str) -> str:
    """The expected outcome; where any `param` will do, with the one that was found."""
    expected = case.expected
    if expected.outcome is not Outcome.REFUSED:
        return expected.outcome.value
    param = found.split()[2] if expected.param == ANY and found.startswith("refused") else expected.param
    return " ".join(map(str, (expected.outcome.value, expected.status, param)))


@contextmanager
def serving(folder: Path, *, optimised: bool = False) -> Iterator[tuple[RunningServer, RunDir]]:
    """A server of the demo model; `optimised`: every process of it under `python -O`."""
    run_dir = Path(tempfile.mkdtemp(prefix="nova-"))  # short, for the sake of the sockets in it
    environ = {**os.environ, "PYTHONOPTIMIZE": "1" if optimised else ""}
    server = RunningServer("--run-dir", str(run_dir), log=folder / f"server-{optimised}.log", environ=environ)
    try:
        yield server, RunDir(run_dir)
    finally:
        server.stop()
        shutil.rmtree(run_dir)


def pids(server: RunningServer) -> dict[str, int]:
    """Of every process of ours: another one is a death, but for the one that is replaced after each long text."""
    return {name: process.pid for name, process in server.processes().items() if not name.endswith(" text 1")}


def gone_since(server: RunningServer, before: dict[str, int]) -> list[str]:
    """The processes that `pids` told of, and that are not there any more, or are others now."""
    now = pids(server)
    return [name for name, pid in before.items() if now.get(name) != pid]


def send_over_http(server: RunningServer, door: str, every: Sequence[Case]) -> Report:
    """Send the cases to a gateway, several at once, and compare status, shape, param and code."""
    light = [case for case in every if not case.is_heavy]
    shares = [light[start::TOGETHER] for start in range(TOGETHER)]
    with server.http() as http:
        alone = _witness_over_http(http)
    with ThreadPoolExecutor(TOGETHER) as pool:
        reports = list(pool.map(lambda share: _send_in_turn(server, door, share, alone), shares))
    reports.append(_send_in_turn(server, door, [case for case in every if case.is_heavy], alone))
    report = Report()
    for part in reports:
        report.cases += part.cases
        report.witnesses += part.witnesses
        report.wrong += part.wrong
    return report


def _send_in_turn(server: RunningServer, door: str, share: Sequence[Case], alone: list[int]) -> Report:
    """A connection of its own: httpx may close one that another thread is about to use."""
    report = Report()
    with server.http() as http:
        for number, case in enumerate(share):
            if number % WITNESS_EVERY == 0:
                _compare_witness(http, report, alone)
            _send_one(http, door, case, report)
        _compare_witness(http, report, alone)
    return report


def body_of(case: Case) -> bytes:
    """The JSON text, with what JSON has no word for written as some clients do."""
    given: dict[str, Any] = {"prompt": PROMPT_IDS}
    if case.door in (CHAT, TURNS):
        given = {"messages": MESSAGES}
    elif case.door == RESPONSES:
        given = {"input": MESSAGES}
    most = "max_output_tokens" if case.door == RESPONSES else "max_tokens"
    base: dict[str, Any] = {most: 1, "temperature": 1.0, "seed": 1, **given}
    body = {**base, **case.row.beside, case.row.name: case.value}
    if case.value is Missing.MISSING:
        del body[case.row.name]
    elif isinstance(case.value, Raw):
        body[case.row.name] = "raw"
        return json.dumps(body).replace(f'"{case.row.name}": "raw"', f'"{case.row.name}": {case.value.text}').encode()
    return json.dumps(body).encode()


def _send_one(http: httpx.Client, door: str, case: Case, report: Report) -> None:
    reply = http.post(PATHS[door], content=body_of(case), headers=JSON)
    found = _answer(case, reply)
    report.check(case, found)
    expected = case.expected
    is_coded = found.startswith("refused") and door != TURNS
    if is_coded and reply.json()["error"]["code"] != expected.code and expected.code:
        report.wrong.append(f"{case.label}: the code is {reply.json()['error']['code']}")


def _answer(case: Case, reply: httpx.Response) -> str:
    if reply.status_code == 200:
        return "accepted" if _is_whole(case, reply) else f"accepted, with a wrong answer: {reply.text[:200]}"
    error = reply.json().get("error", {})
    shape: dict[str, Any] = {"message": str, "type": str}
    if case.door != TURNS:
        shape |= {"param": (str, type(None)), "code": (str, type(None))}
    if set(error) != set(shape) or not all(isinstance(error[name], kind) for name, kind in shape.items()):
        return f"an answer of the wrong shape: {reply.text[:200]}"
    if not 0 < len(error["message"]) < 2048:
        return f"a message of {len(error['message'])} characters"
    if case.door == TURNS:  # where nothing but the message says what is wrong
        return f"refused {reply.status_code} {case.expected.param}"
    return f"refused {reply.status_code} {error['param']}"


def _is_whole(case: Case, reply: httpx.Response) -> bool:
    """Whether every choice came, and ended for a reason of its own."""
    if reply.headers["content-type"].startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
        if case.door == RESPONSES:
            return '"status":"completed"' in events[-1] or '"status":"incomplete"' in events[-1]
        if case.door == TURNS:
            return events[-1] == '{"type":"message_stop"}' and "event: error" not in events
        return events[-1] == "[DONE]" and not any('"error"' in event for event in events)
    answer = reply.json()
    if case.door == RESPONSES:
        return answer["status"] in ("completed", "incomplete") and answer["usage"]["output_tokens"] >= 1
    if case.door == TURNS:
        ends = ("end_turn", "max_tokens", "stop_sequence")
        return answer["stop_reason"] in ends and answer["usage"]["output_tokens"] >= 1
    wanted = _num_choices(case)
    reasons = [choice["finish_reason"] for choice in answer["choices"]]
    counted: int = answer["usage"]["completion_tokens"]
    return len(reasons) == wanted <= counted and set(reasons) <= {"stop", "length"}


def _num_choices(case: Case) -> int:
    """How many an accepted case asks for."""
    if case.row.name == "n" and isinstance(case.value, int):
        return case.value
    prompts = case.value if case.row.name == "prompt" and isinstance(case.value, list) else [0]
    return 1 if isinstance(prompts[0], int) else len(prompts)


def _witness_over_http(http: httpx.Client) -> list[int]:
    body = {"prompt": PROMPT_IDS, "max_tokens": WITNESS_TOKENS, "temperature": 1.0, "seed": 7, "return_token_ids": True}
    ids: list[int] = http.post(PATHS["text"], json=body).json()["choices"][0]["token_ids"]
    return ids


def _compare_witness(http: httpx.Client, report: Report, alone: list[int]) -> None:
    report.witnesses += 1
    if (ids := _witness_over_http(http)) != alone:
        report.wrong.append(f"the witness got {ids}, and {alone} when it was alone")


def is_record(schema: Schema, frame: bytes) -> bool:
    """Whether a peer would take it for a message."""
    try:
        schema.decode(frame)
    except ProtocolError:
        return False
    return True


class SchedulerDoor:
    """A gateway of our own making. Use as a context manager."""

    def __init__(self, run_dir: RunDir) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = connect_dealer(self._context, run_dir.gateways(0), b"probe")
        self._queries = 0
        self._link = time.monotonic_ns()
        self._num_sent = self._num_taken = 0
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, list[str]] = {}  # the reasons of a request's choices
        self.rejected: dict[str, RequestRejected] = {}
        self.stats: EngineStats | None = None

    def __enter__(self) -> SchedulerDoor:
        try:
            self.relink()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._socket.close()
        self._context.term()

    def send(self, message: object) -> None:
        """A record of the schema."""
        self.send_frame(GATEWAY_SCHEMA.encode(message))

    def send_frame(self, frame: bytes) -> None:
        """Any bytes as the next packet. One that is no record is dropped, and its number is still to come."""
        self._socket.send_multipart([_HEADER.pack(self._link, self._num_sent, 0), frame])
        self._num_sent += is_record(GATEWAY_SCHEMA, frame)

    def relink(self) -> None:
        """A new link, whatever has become of the old one."""
        self._say_hello()
        while not isinstance(self._receive(), EngineInfo):
            pass

    def send_mutant(self, frame: bytes) -> None:
        """Any bytes in a link of their own. Afterwards `relink`."""
        self._say_hello()
        self.send_frame(frame)

    def _say_hello(self) -> None:
        self._link += 1
        self._num_sent = self._num_taken = 0
        self.send(Hello("a probe"))

    def barrier(self) -> None:
        """Wait until all that was sent has been read."""
        self._queries += 1
        self.send(CancelAlias(self._queries, "nobody", "nothing"))
        while self._receive() != AliasCancelled(self._queries, False):
            pass

    def settle(self) -> None:
        """Wait until all that was sent has been read, and nothing runs or waits."""
        self.barrier()
        self.stats = None
        while self.stats is None or self.stats.num_running or self.stats.num_waiting:
            self._receive()

    def _receive(self) -> object:
        assert self._socket.poll(PATIENCE), "the scheduler has nothing more to say"
        packet = Packet.of(self._socket.recv_multipart())
        message = packet.message
        if packet.link != self._link:
            return None
        self._num_taken += 1
        if isinstance(message, OutputBatch):
            for output in message.outputs:
                self.tokens.setdefault(f"{output.request_id}/{output.choice}", []).extend(output.token_ids)
                if output.finish_reason is not None:
                    self.ended.setdefault(output.request_id, []).append(output.finish_reason)
        elif isinstance(message, RequestRejected):
            self.rejected[message.request_id] = message
        elif isinstance(message, EngineStats):
            self.stats = message
            self.send(Heartbeat(self._num_taken))
        return message


def send_to_scheduler(run_dir: RunDir, every: Sequence[Case]) -> Report:
    """Send the cases past the gateway, and compare what became of each. In the end every KV block must be free."""
    report = Report()
    with SchedulerDoor(run_dir) as door:
        alone = _witness_at_scheduler(door, "alone")
        for start in range(0, len(every), BATCH):
            for case in every[start : start + BATCH]:
                _send_record(door, case)
            door.send(witness(f"witness-{start}"))
            door.settle()
            report.witnesses += 1
            if door.tokens.get(f"witness-{start}/0") != alone:
                report.wrong.append(f"witness {start} got other tokens than alone")
            for case in every[start : start + BATCH]:
                report.check(case, _fate(door, case))
            assert door.stats is not None
            if door.stats.num_free_blocks != door.stats.num_blocks:
                report.wrong.append(f"after {start}: KV blocks are held: {door.stats}")
    return report


def witness(name: str) -> AddRequest:
    """The ordinary request."""
    return AddRequest(name, PROMPT_IDS, SamplingParams(max_tokens=WITNESS_TOKENS, seed=7), [EOS])


def _witness_at_scheduler(door: SchedulerDoor, name: str) -> list[int]:
    door.send(witness(name))
    door.settle()
    return door.tokens[f"{name}/0"]


_PARAMS = {f.name for f in fields(SamplingParams)}


def _id_of(case: Case) -> Any:
    return case.value if case.row.name == "request_id" else f"case-{case.number}"


def _unchecked(values: dict[str, Any]) -> SamplingParams:
    """Parameters that their own constructor would not take."""
    params = SamplingParams()
    for name, value in values.items():
        object.__setattr__(params, name, value)
    return params


def _encoded(case: Case) -> bytes | None:
    """The record; None where the codec cannot write it."""
    own = {**case.row.beside, case.row.name: case.value}
    params = {"max_tokens": 1, "seed": 1, **{name: value for name, value in own.items() if name in _PARAMS}}
    values: dict[str, Any] = {"request_id": _id_of(case), "prompt_token_ids": PROMPT_IDS, "eos_token_ids": [EOS]}
    values |= {name: value for name, value in own.items() if name not in _PARAMS}
    try:
        return GATEWAY_SCHEMA.encode(AddRequest(params=_unchecked(params), **values))
    except (OverflowError, UnicodeEncodeError):
        return None


def _send_record(door: SchedulerDoor, case: Case) -> None:
    frame = _encoded(case)
    if frame is not None:
        door.send_frame(frame)


def _fate(door: SchedulerDoor, case: Case) -> str:
    request_id = _id_of(case)
    if _encoded(case) is None:
        return "unencodable"
    if not isinstance(request_id, str):
        return "dropped"
    if request_id in door.rejected:
        return f"refused {door.rejected[request_id].status} {door.rejected[request_id].param}"
    reasons = door.ended.get(request_id, [])
    if not reasons:
        return "dropped"
    late = {"error"} if case.row.name == "deadline" and 0 < case.value < 1 else set()
    is_whole = len(reasons) == _num_choices(case) and set(reasons) <= {"stop", "length"} | late
    return "accepted" if is_whole else f"ended with {reasons}"
