"""Lines of a batch: what is sent, what is refused and why, and what the output says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from novainfer.entrypoints.batch_lines import (
    INVALID,
    UNANSWERED,
    URLS,
    Fault,
    Job,
    answered,
    digest_of,
    kept_id,
    parse_line,
    refused,
    seed_of,
    unanswered,
)
from novainfer.sampling.params import MAX_SEED

pytestmark = [pytest.mark.unit, pytest.mark.stage2]

CHAT = "/v1/chat/completions"
JOB = Job("a", CHAT, b"{}")


def line(**changes: Any) -> bytes:
    whole = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"messages": []}} | changes
    return json.dumps({key: value for key, value in whole.items() if value is not ...}).encode()


def fault(data: bytes, number: int = 7) -> Fault:
    found = parse_line(data, number, seeds_from_ids=True)
    assert isinstance(found, Fault)
    return found


def job(data: bytes, *, seeds_from_ids: bool = True) -> Job:
    found = parse_line(data, 1, seeds_from_ids=seeds_from_ids)
    assert isinstance(found, Job)
    return found


@pytest.mark.parametrize("url", URLS)
def test_given_a_line_when_parsed_then_its_body_goes_to_its_url(url: str) -> None:
    found = job(line(url=url, body={"x": "é\ud800", "seed": 3}))
    assert (found.custom_id, found.url) == ("a", url)
    assert json.loads(found.payload) == {"x": "é\ud800", "seed": 3}


@pytest.mark.parametrize("seed", [{}, {"seed": None}, {"seed": -1}], ids=["none", "null", "-1"])
def test_given_a_body_without_a_seed_when_parsed_then_it_gets_that_of_its_id_unless_that_is_off(
    seed: dict[str, Any],
) -> None:
    data = line(body={"messages": [], **seed})
    assert json.loads(job(data).payload)["seed"] == seed_of("a") != seed_of("b")
    assert 0 <= seed_of("a") <= MAX_SEED
    assert json.loads(job(data, seeds_from_ids=False).payload) == {"messages": [], **seed}
    assert "seed" not in json.loads(job(line(url="/v1/embeddings")).payload)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON in UTF-8"),
        (b"[" * 100_000, "not JSON"),
        (b'{"custom_id": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (line(custom_id=...), "custom_id"),
        (line(custom_id=""), "custom_id"),
        (line(custom_id=5), "custom_id"),
        (line(custom_id=["a"]), "custom_id"),
    ],
)
def test_given_a_line_without_an_id_when_parsed_then_the_fault_names_its_number_alone(data: bytes, words: str) -> None:
    found = fault(data)
    assert (found.code, found.number, found.custom_id) == (INVALID, 7, None)
    assert words in found.message
    outcome = refused(found)
    told = json.loads(outcome.line)
    assert not outcome.is_ok
    assert told["custom_id"] is None
    assert told["response"] is None
    assert told["error"] == {"code": INVALID, "message": f"line 7: {found.message}", "line": 7}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": ...}, "method must be POST, not null"),
        ({"method": "GET"}, 'method must be POST, not "GET"'),
        ({"url": ...}, "url must be one of"),
        ({"url": "/v1/models"}, 'not "/v1/models"'),
        ({"url": [CHAT]}, "url must be one of"),
        ({"url": {"a": 1}}, "url must be one of"),
        ({"url": f"http://elsewhere{CHAT}"}, "url must be one of"),
        ({"body": ...}, "body must be there"),
        ({"body": "{}"}, "body must be there"),
        ({"body": {"stream": True}}, "stream must be false"),
    ],
)
def test_given_a_line_with_something_wrong_when_parsed_then_the_fault_says_what_and_whose_it_is(
    changes: dict[str, Any], words: str
) -> None:
    found = fault(line(**changes))
    assert (found.code, found.custom_id) == (INVALID, "a")
    assert words in found.message
    assert json.loads(refused(found).line)["custom_id"] == "a"


def test_given_an_answer_when_written_then_its_body_is_kept_to_the_byte_and_its_tokens_count() -> None:
    body = b'{"usage":{"prompt_tokens":3,"completion_tokens":4},"x":1.50,"text":"\xc3\xa9"}'
    outcome = answered(JOB, 200, "req-1", body)
    assert (outcome.is_ok, outcome.prompt_tokens, outcome.output_tokens) == (True, 3, 4)
    assert body in outcome.line
    told = json.loads(outcome.line)
    assert told["id"].startswith("batch_req_")
    assert told["custom_id"] == "a"
    assert told["response"] == {"status_code": 200, "request_id": "req-1", "body": json.loads(body)}
    assert told["error"] is None
    assert kept_id(outcome.line) == "a"
    other = answered(JOB, 200, None, b'{"usage": {"input_tokens": 5, "output_tokens": 6}}')
    assert (other.prompt_tokens, other.output_tokens) == (5, 6)


@pytest.mark.parametrize("usage", [None, 5, [], {"prompt_tokens": "3", "completion_tokens": True}])
def test_given_an_answer_of_several_lines_or_odd_usage_when_written_then_it_is_one_line(usage: object) -> None:
    outcome = answered(JOB, 200, None, json.dumps({"usage": usage, "a": "b"}, indent=1).encode())
    assert (outcome.prompt_tokens, outcome.output_tokens) == (0, 0)
    assert outcome.line.count(b"\n") == 1
    assert json.loads(outcome.line)["response"]["body"] == {"usage": usage, "a": "b"}


def test_given_an_answer_that_is_not_json_when_written_then_a_200_is_no_answer_and_others_say_what_came() -> None:
    page = b"<html>\nBad Gateway \xff</html>"
    told = json.loads(answered(JOB, 502, None, page).line)
    assert told["response"]["status_code"] == 502
    assert "<html> Bad Gateway" in told["response"]["body"]["error"]["message"]
    none = json.loads(answered(JOB, 200, None, page).line)
    assert (none["response"], none["error"]["code"]) == (None, UNANSWERED)


def test_given_lines_of_an_output_when_resumed_then_those_with_200_are_kept_and_strangers_are_refused() -> None:
    assert kept_id(answered(JOB, 400, None, b"{}").line) is None
    assert kept_id(answered(JOB, 503, None, b"{}").line) is None
    assert kept_id(unanswered(JOB, "gone").line) is None
    assert kept_id(refused(Fault(INVALID, "x", 1, "a")).line) is None
    for stranger in (b"{}", b"[]", b"text", b'{"custom_id": "a", "response": {}}'):
        with pytest.raises(ValueError):
            kept_id(stranger)


def test_given_ids_that_look_alike_when_digested_then_they_differ() -> None:
    ids = ["a", "A", "a ", "\ud800", "\\ud800", "é", "e\u0301", "\x00"]
    assert len({digest_of(one) for one in ids}) == len({seed_of(one) for one in ids}) == len(ids)
