"""Frames that no peer of ours sends: at the codec, and at the sockets of a scheduler that works meanwhile."""

from __future__ import annotations

import json
import random
from itertools import islice

import httpx
import pytest
import zmq

from novainfer.protocol.codec import Schema
from novainfer.protocol.messages import GATEWAY_SCHEMA
from novainfer.protocol.step import WORKER_SCHEMA
from novainfer.transport.addresses import RunDir
from novainfer.transport.channel import connect_dealer
from tests.safety.doors import PATHS, SchedulerDoor, gone_since, is_record, pids
from tests.safety.frames import SCHEMAS, Mutator, decode_many, valid_frames
from tests.servers import RunningServer

pytestmark = pytest.mark.stage2

FRAMES = 5000  # of each schema
SENT = 1500  # to each socket
MOST_GROWTH = 4 * 2**20  # bytes
STREAM = {
    "prompt": [21, 22, 23],
    "max_tokens": 1000,
    "ignore_eos": True,
    "seed": 3,
    "stream": True,
    "return_token_ids": True,
}


def mutants(schema: Schema, seed: int) -> Mutator:
    return Mutator(valid_frames(schema), random.Random(seed))


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.name)
def test_given_mutated_frames_when_decoded_then_only_protocol_errors_come_and_no_memory_goes(schema: Schema) -> None:
    harvest = decode_many(schema, iter(mutants(schema, 1)), FRAMES)
    assert harvest.wrong == []
    assert sum(harvest.outcomes.values()) == FRAMES
    assert min(harvest.outcomes["record"], harvest.outcomes["ProtocolError"]) > FRAMES // 100
    assert harvest.grown < MOST_GROWTH


def tokens(reply: httpx.Response) -> list[int]:
    """All token ids of a stream that ended as it should."""
    events = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert events[-1] == "[DONE]"
    return [i for event in events[:-1] for c in json.loads(event)["choices"] for i in c.get("token_ids", [])]


def test_given_mutated_frames_when_sent_to_a_busy_scheduler_then_nothing_dies_and_a_stream_goes_on(
    target: tuple[RunningServer, RunDir],
) -> None:
    server, run_dir = target
    before = pids(server)
    # A rank is believed: what is a record, of whichever group, is not for this test.
    to_workers = [frame for frame in islice(mutants(WORKER_SCHEMA, 2), SENT) if not is_record(WORKER_SCHEMA, frame)]
    dropped = "dropped a message of b'stranger'"
    already = server.errors.count(dropped)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = connect_dealer(context, run_dir.workers(0), b"stranger")
    with server.http() as http, SchedulerDoor(run_dir) as door:
        alone = tokens(http.post(PATHS["text"], json=STREAM))
        with http.stream("POST", PATHS["text"], json=STREAM) as reply:
            assert reply.status_code == 200
            for frame in islice(mutants(GATEWAY_SCHEMA, 2), SENT):
                door.send_mutant(frame)
            for frame in to_workers:
                stranger.send(frame)
            stranger.send_multipart([to_workers[0]] * 3)
            door.relink()
            door.barrier()
            assert tokens(reply) == alone
        while server.errors.count(dropped) < already + len(to_workers):
            http.post(PATHS["text"], json={**STREAM, "stream": False, "max_tokens": 1})
        door.settle()
    stranger.close()
    context.term()
    assert len(alone) == 1000
    assert not gone_since(server, before)
    server.wait_until_nothing_is_held()
