"""Embeddings beside the engine: what a checkpoint's files ask for, the last arithmetic, messages that carry them."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from novainfer.embedding import Pooling, check_dimensions, finish_vector, numbers_of, read_pooling
from novainfer.engine.gateways import GatewayLink
from novainfer.errors import InvalidRequestError
from novainfer.protocol.codec import MAX_MESSAGE_BYTES
from novainfer.protocol.link import Packet
from novainfer.protocol.messages import GATEWAY_SCHEMA, AddRequest, OutputBatch, TokenOutput
from novainfer.sampling.params import SamplingParams

pytestmark = [pytest.mark.unit, pytest.mark.stage0]

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
LAST = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}
MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False, "include_prompt": True}

Write = Callable[[object, object], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes modules.json and 1_Pooling/config.json, unless they are None."""

    def write(modules: object, pooling: object) -> Path:
        (tmp_path / "1_Pooling").mkdir()
        for name, data in (("modules.json", modules), ("1_Pooling/config.json", pooling)):
            if data is not None:
                (tmp_path / name).write_text(data if isinstance(data, str) else json.dumps(data))
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("modules", "pooling", "normalizes"),
    [
        (None, None, True),
        (None, LAST, True),
        ([TRANSFORMER, POOLING, NORMALIZE], LAST, True),
        ([TRANSFORMER, POOLING], LAST, False),
        ([TRANSFORMER, POOLING], {"pooling_mode": "lasttoken"}, False),
    ],
)
def test_given_files_that_pool_the_last_token_when_read_then_they_say_whether_it_is_normalised(
    write: Write, modules: object, pooling: object, normalizes: bool
) -> None:
    found = read_pooling(write(modules, pooling))
    assert found == Pooling(normalizes=normalizes)
    found.check()


@pytest.mark.parametrize(
    ("modules", "pooling", "word"),
    [
        ([TRANSFORMER, POOLING, NORMALIZE], MEAN, "mean_tokens"),
        (None, MEAN, "mean_tokens"),
        (None, {**LAST, "pooling_mode_cls_token": True}, "cls_token"),
        (None, {"pooling_mode": ["lasttoken", "max_tokens"]}, "max_tokens"),
        ([TRANSFORMER, POOLING, DENSE], LAST, "'Dense'"),
        ([TRANSFORMER, POOLING, POOLING], LAST, "lasttoken"),
        ([TRANSFORMER, POOLING, NORMALIZE], None, "do not name"),
        ([TRANSFORMER, POOLING], {"word_embedding_dimension": 64}, "do not name"),
        ([TRANSFORMER], None, "do not name"),
        ("{", LAST, "cannot be read"),
        ({}, LAST, "a list"),
        ([1], LAST, "a list"),
        (None, "[" * 10_000, "cannot be read"),
    ],
)
def test_given_files_that_ask_for_something_else_when_read_then_embeddings_are_refused_and_nothing_else(
    write: Write, modules: object, pooling: object, word: str
) -> None:
    found = read_pooling(write(modules, pooling))
    with pytest.raises(InvalidRequestError, match=word) as caught:
        found.check()
    assert (caught.value.param, caught.value.code) == ("model", "unsupported_pooling")


def pack(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def test_given_a_hidden_state_when_finished_then_it_is_cut_first_and_has_length_one() -> None:
    hidden = pack(3.0, 4.0, 12.0)
    assert finish_vector(hidden, None, normalize=False) == hidden
    assert finish_vector(hidden, 2, normalize=False) == pack(3.0, 4.0)
    assert finish_vector(hidden, None, normalize=True) == pack(3 / 13, 4 / 13, 12 / 13)
    assert numbers_of(finish_vector(hidden, 2, normalize=True)) == numbers_of(pack(0.6, 0.8))
    assert finish_vector(hidden, 1, normalize=True) == pack(1.0)


@pytest.mark.parametrize("values", [(0.0, -0.0, 0.0), (1e-45, 0.0, 1e-45), (3e38, -3e38, 3e38)])
def test_given_numbers_at_the_ends_of_float32_when_normalised_then_the_vector_is_sound(
    values: tuple[float, ...],
) -> None:
    found = numbers_of(finish_vector(pack(*values), None, normalize=True))
    length = math.sqrt(math.fsum(value * value for value in found))
    assert length == (pytest.approx(1.0, abs=1e-6) if any(values) else 0.0)


@pytest.mark.parametrize("dimensions", [0, -1, 65, 2**70, True, 2.0, "8"])
def test_given_dimensions_that_a_model_has_not_when_checked_then_they_are_refused(dimensions: int) -> None:
    for good in (None, 1, 64):
        check_dimensions(good, 64)
    with pytest.raises(InvalidRequestError, match="between 1 and 64") as caught:
        check_dimensions(dimensions, 64)
    assert caught.value.param == "dimensions"


def test_given_a_request_for_an_embedding_when_numbered_then_it_is_still_one() -> None:
    request = AddRequest("r", [1], SamplingParams.for_embedding(), explain=True, embed=True)
    numbered = request.numbered(7)
    assert (numbered.ref, numbered.explain, numbered.embed) == (7, True, True)
    assert GATEWAY_SCHEMA.decode(GATEWAY_SCHEMA.encode(numbered)) == numbered


def test_given_no_credit_when_many_embeddings_wait_then_they_come_in_messages_that_can_travel() -> None:
    sent: list[Packet] = []
    link = GatewayLink(lambda packet: sent.append(packet) is None, gateway_id="g", link=1, now=0.0, window=1)
    vector = bytes(MAX_MESSAGE_BYTES // 8)
    outputs = [TokenOutput(f"r{i}", 0, 0, [], "stop", embedding=vector) for i in range(11)]
    for output in outputs:
        link.say(OutputBatch(1, 1, [output]))
    assert len(sent) == 1
    link.acknowledge(1)
    batches = [packet.message for packet in sent]
    assert all(isinstance(batch, OutputBatch) for batch in batches)
    assert [output for batch in batches for output in batch.outputs] == outputs  # type: ignore[attr-defined]
    assert all(len(GATEWAY_SCHEMA.encode(batch)) < MAX_MESSAGE_BYTES for batch in batches)
    assert [packet.number for packet in sent] == [*range(len(sent))]
