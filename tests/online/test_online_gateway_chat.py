"""Chat completions through the real SDK: streams, whole answers, parameters, counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import logprobs
from novainfer.text.tokenizer import Tokenizer
from tests.fakes import oracle_tokens, write_sentencepiece
from tests.online.conftest import Pair
from tests.online.gateways import start_pair

pytestmark = pytest.mark.stage2

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TEXT = "the quick brown fox 你好 🎉 naïve\n"


def events(pair: Pair, body: dict[str, Any]) -> list[str]:
    """The data lines of a raw stream."""
    with pair.http.stream("POST", "/v1/chat/completions", json={"stream": True, **body}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        raw = response.read().decode()
    blocks = raw.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


def test_given_a_stream_when_read_by_the_sdk_then_text_is_exact_and_usage_counts_ids(pair: Pair) -> None:
    pair.say(TEXT)
    chunks = list(
        pair.sdk.chat.completions.create(
            model="alias", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert all(c.usage is None for c in chunks[:-1])
    usage = chunks[-1].usage
    assert chunks[-1].choices == []
    assert usage is not None
    assert usage.completion_tokens == len(pair.tokenizer.encode(TEXT)) + 1  # the end token was sampled too
    assert usage.prompt_tokens == len(pair.scheduler.added[0].prompt_token_ids)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 4
    assert len({c.id for c in chunks}) == 1


def test_given_a_raw_stream_when_read_then_frames_come_in_openai_order(pair: Pair) -> None:
    pair.say("hello world")
    lines = events(pair, {"messages": HELLO})
    assert lines[-1] == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {}
    assert choices[-1]["finish_reason"] == "stop"
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert all("usage" not in json.loads(line) for line in lines[:-1])


def test_given_line_separators_in_text_when_streamed_then_they_are_escaped(pair: Pair) -> None:
    text = 'a\u2028b\u2029c\u0085d\r\n\\"\x00'
    pair.say(text)
    lines = events(pair, {"messages": HELLO})
    assert "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines[:-1]) == text
    assert not any(char in line for line in lines for char in "\u2028\u2029\u0085")


def test_given_continuous_usage_when_streamed_then_every_chunk_counts(pair: Pair) -> None:
    lines = events(pair, {"messages": HELLO, "max_tokens": 5, "stream_options": {"continuous_usage_stats": True}})
    counts = [json.loads(line)["usage"]["completion_tokens"] for line in lines[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 5


def test_given_no_stream_when_answered_then_the_object_is_complete(pair: Pair) -> None:
    pair.say(TEXT)
    answer = pair.sdk.chat.completions.create(model="org/tiny", messages=HELLO)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "org/tiny")
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_given_a_chat_when_sent_then_the_engine_gets_the_rendered_prompt_and_resolved_params(pair: Pair) -> None:
    pair.sdk.chat.completions.create(
        model="alias",
        messages=HELLO,
        temperature=0,
        max_tokens=9,
        max_completion_tokens=3,
        logit_bias={"5": -100},
        stop="zzz",
        extra_body={
            "top_k": -1,
            "min_p": 0.1,
            "repetition_penalty": 1.5,
            "min_tokens": 1,
            "ignore_eos": True,
            "allowed_token_ids": [1, 2, 3],
            "banned_token_ids": [2],
            "bad_words": ["hello"],
            "stop_token_ids": [9],
            "cache_salt": "salt",
            "prefix_cache": False,
            "priority": 3,
        },
    )
    sent = pair.scheduler.added[0]
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert sent.prompt_token_ids == pair.tokenizer.encode(prompt)
    assert sent.eos_token_ids == list(pair.tokenizer.eos_token_ids)
    params = sent.params
    assert (params.temperature, params.max_tokens, params.top_k, params.min_p) == (0.0, 3, 0, 0.1)
    assert (params.logit_bias, params.stop, params.stop_token_ids) == ({5: -100.0}, ("zzz",), (9,))
    assert params.allowed_token_ids == (1, 2, 3)
    assert set(params.banned_token_ids) == {2, *(pair.tokenizer.encode(w)[0] for w in ("hello",))}
    assert (params.repetition_penalty, params.min_tokens, params.ignore_eos) == (1.5, 1, True)
    assert (sent.cache_salt, sent.use_prefix_cache, sent.priority) == ("salt", False, 3)
    assert params.seed is not None


def test_given_no_max_tokens_when_sent_then_a_chat_may_fill_the_context(pair: Pair) -> None:
    pair.say("hi")
    pair.sdk.chat.completions.create(model="alias", messages=HELLO)
    sent = pair.scheduler.added[0]
    assert sent.params.max_tokens == pair.scheduler.max_model_len - len(sent.prompt_token_ids)


def test_given_a_seed_when_repeated_then_the_answer_is_the_same_and_without_one_it_differs(pair: Pair) -> None:
    def ask(**more: Any) -> Any:
        return pair.post(
            "/v1/chat/completions", {"messages": HELLO, "max_tokens": 20, "return_token_ids": True, **more}
        )

    seeded = [ask(seed=7).json()["choices"][0]["token_ids"] for _ in range(2)]
    assert seeded[0] == seeded[1] == oracle_tokens(pair.scheduler.added[0], 0, 20, pair.tokenizer.vocab_size)
    assert ask().json()["choices"][0]["token_ids"] != ask().json()["choices"][0]["token_ids"]


def test_given_n_choices_when_streamed_and_whole_then_each_has_its_own_text_and_end(pair: Pair) -> None:
    body = {"messages": HELLO, "n": 3, "max_tokens": 12, "seed": 3}
    whole = pair.post("/v1/chat/completions", body).json()["choices"]
    texts, ends = ["", "", ""], ["", "", ""]
    for line in events(pair, body)[:-1]:
        choice = json.loads(line)["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
        ends[choice["index"]] += choice["finish_reason"] or ""
    assert [choice["index"] for choice in whole] == [0, 1, 2]
    assert texts == [choice["message"]["content"] for choice in whole]
    assert ends == ["length"] * 3
    assert len(set(texts)) == 3


@pytest.mark.parametrize("include", [False, True])
def test_given_a_stop_string_over_several_tokens_when_found_then_it_ends_there_and_frees_the_engine(
    pair: Pair, include: bool
) -> None:
    pair.say("one two three four five six")
    body = {"messages": HELLO, "stop": ["three f", "never"], "include_stop_str_in_output": include}
    whole = pair.post("/v1/chat/completions", body).json()["choices"][0]
    streamed = "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in events(pair, body)[:-1])
    expected = "one two three f" if include else "one two "
    assert (whole["message"]["content"], streamed) == (expected, expected)
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", "three f")
    pair.wait_idle()


def test_given_logprobs_when_asked_then_bytes_join_to_the_text_and_alternatives_are_counted(pair: Pair) -> None:
    pair.say(TEXT)
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 3, "max_tokens": 12}
    whole = pair.post("/v1/chat/completions", body).json()["choices"][0]
    content = whole["logprobs"]["content"]
    data = bytes(byte for entry in content for byte in entry["bytes"])
    # One entry for each sampled id, the end token among them.
    assert data.decode() == whole["message"]["content"] + "<|im_end|>"
    assert all(len(entry["top_logprobs"]) == 3 and entry["logprob"] == -0.5 for entry in content)
    streamed = [
        entry
        for line in events(pair, body)[:-1]
        for entry in (json.loads(line)["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content


def test_given_prompt_logprobs_when_asked_then_one_entry_per_prompt_token(pair: Pair) -> None:
    answer = pair.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1, "prompt_logprobs": 1}).json()
    entries = answer["prompt_logprobs"]
    assert entries[0] is None
    ids = pair.scheduler.added[0].prompt_token_ids
    assert [next(iter(entry)) for entry in entries[1:]] == [str(token_id) for token_id in ids[1:]]


def test_given_tools_and_kwargs_when_sent_then_only_what_the_template_uses_changes(pair: Pair) -> None:
    pair.say("fine")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body = {"messages": HELLO, "tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
    response = pair.post("/v1/chat/completions", body | {"add_generation_prompt": False})
    assert response.status_code == 200
    assert pair.tokenizer.decode(pair.scheduler.added[0].prompt_token_ids, skip_special_tokens=False).endswith(
        "<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("fields", "is_shown"),
    [({}, True), ({"tool_choice": "none"}, False), ({"skip_special_tokens": True}, False), ({"tools": []}, False)],
)
def test_given_tools_when_a_model_marks_its_calls_by_special_tokens_then_they_are_told_unless_asked_otherwise(
    pair: Pair, fields: dict[str, Any], is_shown: bool
) -> None:
    mark = next(iter(pair.tokenizer.special_ids - set(pair.tokenizer.eos_token_ids)))
    words = pair.tokenizer.encode("f()", add_special_tokens=False)
    pair.scheduler.script = lambda request, choice: [mark, *words]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    answer = pair.post("/v1/chat/completions", {"messages": HELLO, "tools": tools, **fields}).json()
    spelled = pair.tokenizer.token(mark) if is_shown else ""
    assert answer["choices"][0]["message"]["content"] == f"{spelled}f()"


def test_given_token_ids_when_streamed_then_the_prompts_stand_beside_the_choices_of_the_first_chunk(pair: Pair) -> None:
    body = {"messages": HELLO, "stream": True, "max_tokens": 3, "n": 2, "return_token_ids": True}
    with pair.http.stream("POST", "/v1/chat/completions", json=body) as response:
        chunks = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    told = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
    assert chunks[0]["prompt_token_ids"] == pair.scheduler.added[0].prompt_token_ids
    assert told == [pair.scheduler.added[0].prompt_token_ids] * 2
    assert all("prompt_token_ids" not in chunk["choices"][0] for chunk in chunks)


def test_given_the_seed_that_stands_for_none_when_sent_twice_then_each_prompt_has_one_of_its_own(pair: Pair) -> None:
    for _ in range(2):
        assert pair.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1, "seed": -1}).status_code == 200
    assert pair.post("/v1/completions", {"prompt": ["x", "x"], "max_tokens": 1, "seed": -1}).status_code == 200
    seeds = [request.params.seed for request in pair.scheduler.added]
    assert len({-1, *seeds}) == 5


def test_given_whole_answers_when_they_would_hold_too_many_logprobs_then_they_end_and_others_go_on(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = pair.gateway.service.logprob_room
    body = {"messages": HELLO, "max_tokens": 4, "logprobs": True, "top_logprobs": 1}
    monkeypatch.setattr(logprobs, "MAX_OF_ANSWER", 7)
    refused = pair.post("/v1/chat/completions", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
    assert pair.post("/v1/chat/completions", body | {"max_tokens": 3}).status_code == 200
    assert pair.post("/v1/chat/completions", body | {"stream": True}).text.endswith("data: [DONE]\n\n")
    monkeypatch.setattr(logprobs, "MAX_HELD", 8)
    room.take("another", 5, 0)
    refused = pair.post("/v1/chat/completions", body | {"max_tokens": 3})
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    room.give_back("another", 5)
    assert pair.post("/v1/chat/completions", body | {"max_tokens": 3}).status_code == 200
    room.take("another", 7, 0)  # nothing is held any more
    room.give_back("another", 7)


def test_given_a_conversation_with_calls_and_refusals_when_sent_back_then_it_is_answered(pair: Pair) -> None:
    """The arguments of the first call are what a model wrote, and no JSON: it shall see them and try again."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": '}}
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}
    calls = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "content": "no JSON", "tool_call_id": "1"}
    body = {"messages": [*HELLO, refusal, *HELLO, calls, result], "max_tokens": 1, "stream_options": None}
    assert pair.post("/v1/chat/completions", body).status_code == 200
    prompt = pair.tokenizer.decode(pair.scheduler.added[0].prompt_token_ids, skip_special_tokens=False)
    assert "<|im_start|>assistant\nI will not.<|im_end|>" in prompt


def test_given_unknown_and_null_fields_when_sent_then_they_are_named_or_absent(pair: Pair) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "store": True, "zeta": 1, "stop": None, "seed": None, "suffix": None}
    response = pair.post("/v1/chat/completions", body | {"bad\nname": 1, "metadata": {}})
    assert response.status_code == 200
    assert response.headers["x-novainfer-ignored"] == "store,zeta,(unprintable),metadata"
    with pair.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as stream:
        assert stream.headers["x-novainfer-ignored"] == "store,zeta"
        stream.read()
    assert "x-novainfer-ignored" not in pair.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1}).headers


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[httpx.Client]:
    """A client of a gateway whose tokenizer drops a text's first space; each answer is "▁hello"."""
    tokenizer = Tokenizer.load(write_sentencepiece(tmp_path / "model", ["▁hello"]))
    scheduler, gateway = start_pair(tmp_path / "model", tmp_path / "run", tokenizer.vocab_size)
    hello = tokenizer.token_id("▁hello")
    assert hello is not None
    scheduler.script = lambda request, choice: [hello]
    with gateway.http() as http:
        yield http
    gateway.close()
    scheduler.close()


@pytest.mark.parametrize(("goes_on", "text"), [(True, " hello"), (False, "hello")])
def test_given_a_last_message_to_go_on_with_when_answered_then_the_space_between_is_the_answers(
    llama: httpx.Client, goes_on: bool, text: str
) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "The capital is"}]
    body = {"messages": messages, "continue_final_message": goes_on}
    assert llama.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == text
    with llama.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("content") or "" for delta in deltas) == text
