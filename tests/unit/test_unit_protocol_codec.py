"""The wire: every record comes back equal, and nothing else decodes."""

from __future__ import annotations

from dataclasses import dataclass

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from novainfer.errors import ProtocolError
from novainfer.protocol.codec import Schema
from novainfer.protocol.columns import Column, column
from novainfer.protocol.messages import (
    GATEWAY_SCHEMA,
    AddRequest,
    AliasCancelled,
    CancelAlias,
    CancelRequest,
    EngineInfo,
    EngineStats,
    Hello,
    Logprobs,
    OutputBatch,
    PromptLogprobs,
    RequestRejected,
    TokenOutput,
)
from novainfer.protocol.step import (
    WORKER_SCHEMA,
    Adopt,
    IndexedBlock,
    NewRow,
    RowPromptLogprobs,
    StepPlan,
    StepResult,
    WorkerFault,
    WorkerHello,
)
from novainfer.sampling.params import SamplingParams

pytestmark = pytest.mark.unit

PARAMS = SamplingParams(
    n=2, seed=-5, logit_bias={3: -1.5}, allowed_token_ids=(1, 2), stop=("a", "é"), logprobs=0, min_p=0.25
)
LOGPROBS = Logprobs(5, -0.5, 1, [5, 6], [-0.5, -1.5])
MESSAGES = [
    Hello("g"),
    AddRequest("r", [1, 2, 2**31], PARAMS, [7], tenant="t", emitted=[[1], []], deadline=2.5, aliases=["chat"]),
    CancelRequest("r", 1),
    CancelAlias(7, "t", "chat"),
    AliasCancelled(7, True),
    EngineInfo(3, True, 100, 2048, 16, 10, 4),
    OutputBatch(1, 2, [], [], column([7, 2**40]), column([-3, 5]), column([1, 2]), [7], [0], 9),
    OutputBatch(1, 2, [TokenOutput("r", 0, 5, [9], "stop", 9, [LOGPROBS])], [PromptLogprobs("r", 1, [LOGPROBS])]),
    RequestRejected("r", 503, "full", retry_after=1.0),
    EngineStats(1, 2, 3, 4, 5, 6, finished_total={"stop": 3}),
]
NEW_ROW = NewRow(3, column([1, 2]), 2, 0, [9], PARAMS, 1, [7])
STEPS = [
    StepPlan(1, 2, column([0, 3]), column([1, 7]), [4], [NEW_ROW], column([0]), column([8]), [1], [2]),
    StepPlan(1, 2, column([0]), column([1]), unindexed=[3], indexed=column([4]), indexed_parents=b"\0\xff"),
    WorkerHello(2, 1, 0, 1, 10, 16, 100, 512, 8, 256, [IndexedBlock(4, b"\0\xff", column([1, 2]))]),
    WorkerFault(1, 0, "out of memory"),
    Adopt(3),
    StepResult(1, 2, column([0]), column([5]), [None, LOGPROBS], [RowPromptLogprobs(3, 1, [LOGPROBS])], [0]),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_given_a_gateway_message_when_sent_then_it_arrives_equal(message: object) -> None:
    assert GATEWAY_SCHEMA.decode(GATEWAY_SCHEMA.encode(message)) == message


@pytest.mark.parametrize("message", STEPS, ids=lambda m: type(m).__name__)
def test_given_a_step_message_when_sent_then_it_arrives_equal(message: object) -> None:
    assert WORKER_SCHEMA.decode(WORKER_SCHEMA.encode(message)) == message


def test_given_a_steady_decode_step_when_encoded_then_a_few_bytes_a_row() -> None:
    plan = StepPlan(1, 1000, column(range(64)), column([1] * 64))
    assert len(WORKER_SCHEMA.encode(plan)) < 64 * 16 + 40


@pytest.mark.parametrize(
    "wire",
    [
        [],
        [99],
        ["1", "g"],
        [1],
        [1, 5],
        [1, "g", "extra"],
        [3, "r", True],
        [3, "r", 1.0],
        [3, b"r"],
        [2, "r", [1, "2"], []],
        [2, "r", [1, True], []],
        [2, "r", [1], [2, 1.5]],
        [2, "r", [1], [1, "16"]],
        [17, 1, 2, [["r", 0, 0, 5]]],
        [17, 1, 2, [], [], b"1234567", b"", b""],
        [17, 1, 2, [], [], [1], [1], [1]],
        [17, 1, 2, [], [], "12345678", b"", b""],
        {"1": 2},
        1,
        None,
    ],
    ids=repr,
)
def test_given_a_wrong_value_when_decoded_then_protocol_error(wire: object) -> None:
    with pytest.raises(ProtocolError):
        GATEWAY_SCHEMA.decode(msgpack.packb(wire))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x92\x01" + b"\x91" * 5000,
        b"\x92\x01\xd4\x01\x00",
        b"\x92\x01\xa1\xff",
        b"\x92\x01\xa1gX",
        b"cos\nsystem\n(S'true'\ntR.",
    ],
    ids=range(9),
)
def test_given_hostile_bytes_when_decoded_then_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        GATEWAY_SCHEMA.decode(data)


@settings(max_examples=400, deadline=None)
@given(index=st.integers(0, len(MESSAGES) - 1), data=st.data())
def test_given_mutated_frames_when_decoded_then_equal_or_protocol_error(index: int, data: st.DataObject) -> None:
    frame = bytearray(GATEWAY_SCHEMA.encode(MESSAGES[index]))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = GATEWAY_SCHEMA.decode(bytes(frame))
    except ProtocolError:
        return
    assert GATEWAY_SCHEMA.decode(GATEWAY_SCHEMA.encode(decoded)) is not None


def test_given_an_older_peer_s_shorter_record_when_decoded_then_defaults_fill_it() -> None:
    assert GATEWAY_SCHEMA.decode(msgpack.packb([3, "r"])) == CancelRequest("r", -1)


def test_given_a_class_outside_the_schema_when_encoded_then_key_error() -> None:
    with pytest.raises(KeyError):
        Schema("empty", {}).encode(Hello("g"))


@dataclass
class Alone:
    values: Column


@dataclass
class InAList:
    name: str
    values: list[Column]


@dataclass
class Perhaps:
    name: str
    values: Column | None


@pytest.mark.parametrize("record", [Alone, InAList, Perhaps])
def test_given_a_column_elsewhere_than_beside_other_fields_when_a_schema_has_it_then_refused(record: type) -> None:
    with pytest.raises(TypeError, match="a column is a field of a record that has others"):
        Schema("wrong", {1: record})
