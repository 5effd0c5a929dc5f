"""Text completions and the tokenizer routes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from gateway import params
from gateway.params import MAX_PROMPT_LOGPROBS
from novainfer.text.tokenizer import Tokenizer
from tests.fakes import CHATML, write_tokenizer
from tests.online.conftest import Pair
from tests.online.gateways import start_pair

pytestmark = pytest.mark.stage2


def test_given_text_when_completed_then_default_length_is_sixteen(pair: Pair) -> None:
    answer = pair.sdk.completions.create(model="alias", prompt="hello")
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"
    assert pair.scheduler.added[0].prompt_token_ids == pair.tokenizer.encode("hello")


@pytest.mark.parametrize("kind", ["text", "texts", "ids", "id_lists"])
def test_given_each_form_of_prompt_when_completed_then_choices_come_in_order(pair: Pair, kind: str) -> None:
    ids = [pair.tokenizer.encode(text) for text in ("hello", "the quick fox")]
    prompt = {"text": "hello", "texts": ["hello", "the quick fox"], "ids": ids[0], "id_lists": ids}[kind]
    body = {"prompt": prompt, "n": 2, "max_tokens": 4, "seed": 1, "return_token_ids": True}
    answer = pair.post("/v1/completions", body).json()
    count = 2 if kind in ("text", "ids") else 4
    assert [choice["index"] for choice in answer["choices"]] == list(range(count))
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [ids[i // 2] for i in range(count)]
    assert answer["usage"]["completion_tokens"] == 4 * count
    streamed = ["" for _ in range(count)]
    with pair.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                streamed[choice["index"]] += choice["text"]
    assert streamed == [choice["text"] for choice in answer["choices"]]


@pytest.mark.parametrize("prompt", ["hello world, the fox", "<|im_start|>user\nhello<|im_end|>\n<|im_start|>"])
def test_given_echo_with_logprobs_when_completed_then_prompt_and_output_line_up(pair: Pair, prompt: str) -> None:
    ids = pair.tokenizer.encode(prompt)
    pair.say(" jumps")
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 1, "temperature": 0}
    answer = pair.post("/v1/completions", body).json()["choices"][0]
    logprobs = answer["logprobs"]
    assert answer["text"] == prompt + " jumps"
    assert logprobs["tokens"] == [*(pair.tokenizer.token_bytes(i).decode() for i in ids), " jumps"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(
        len(top) == 2 and token in top
        for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True)
    )
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert answer["text"][offset : offset + len(token)] == token
    with pair.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        chunks = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == answer["text"]
    tokens = [token for chunk in chunks for token in (chunk["choices"][0]["logprobs"] or {"tokens": []})["tokens"]]
    assert tokens == logprobs["tokens"]


def test_given_tokens_that_are_to_be_named_by_their_ids_when_answered_then_they_are_whole_and_streamed(
    pair: Pair,
) -> None:
    pair.say(" jumps")
    asked = {"temperature": 0, "max_tokens": 1, "return_tokens_as_token_ids": True, "return_token_ids": True}
    text = {**asked, "prompt": "hello world", "echo": True, "logprobs": 2}
    chat = {**asked, "messages": [{"role": "user", "content": "hello"}], "logprobs": True, "top_logprobs": 2}
    for path, body in (("/v1/completions", text), ("/v1/chat/completions", chat)):
        response = pair.post(path, body)
        assert "x-novainfer-ignored" not in response.headers
        choice = response.json()["choices"][0]
        with pair.http.stream("POST", path, json={**body, "stream": True}) as streamed:
            chunks = [json.loads(line[6:]) for line in streamed.iter_lines() if line.startswith("data: {")]
        told = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
        ids = [*choice.get("prompt_token_ids", []), *choice["token_ids"]]
        names = [f"token_id:{token_id}" for token_id in ids]
        if body is text:
            assert choice["logprobs"]["tokens"] == names == [name for part in told for name in part["tokens"]]
            tops = [name for top in choice["logprobs"]["top_logprobs"][1:] for name in top]
        else:
            assert [entry["token"] for entry in choice["logprobs"]["content"]] == names
            assert [entry for part in told for entry in part["content"]] == choice["logprobs"]["content"]
            tops = [top["token"] for entry in choice["logprobs"]["content"] for top in entry["top_logprobs"]]
        assert tops
        assert all(name.startswith("token_id:") for name in tops)


@pytest.mark.parametrize("prompts", [["hello world, the fox"], ["hello", "the quick fox"]])
def test_given_an_echo_and_no_token_when_completed_then_the_prompts_alone_are_scored(
    pair: Pair, prompts: list[str]
) -> None:
    body = {"prompt": prompts, "echo": True, "logprobs": 2, "temperature": 0, "n": 2, "return_token_ids": True}
    one = pair.post("/v1/completions", {**body, "max_tokens": 1}).json()["choices"]
    answer = pair.post("/v1/completions", {**body, "max_tokens": 0}).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(prompts)))
    for number, (choice, more) in enumerate(zip(answer["choices"], one, strict=True)):
        assert (choice["text"], choice["token_ids"]) == (prompts[number // 2], [])
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
        assert choice["logprobs"] == {name: entries[:-1] for name, entries in more["logprobs"].items()}
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == sum(len(pair.tokenizer.encode(text)) for text in prompts)
    with pair.http.stream("POST", "/v1/completions", json={**body, "max_tokens": 0, "stream": True}) as response:
        chunks = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    told = [choice for chunk in chunks for choice in chunk["choices"]]
    for whole in answer["choices"]:
        parts = [choice for choice in told if choice["index"] == whole["index"]]
        assert "".join(part["text"] for part in parts) == whole["text"]
        assert [part["logprobs"] for part in parts if part["logprobs"]] == [whole["logprobs"]]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]


@pytest.mark.parametrize(
    ("more", "param"),
    [({"echo": False}, "max_tokens"), ({"min_tokens": 1}, "min_tokens"), ({"receipt": True}, "receipt")],
)
def test_given_no_token_and_what_needs_one_when_sent_then_400(pair: Pair, more: dict[str, Any], param: str) -> None:
    response = pair.post("/v1/completions", {"prompt": "hello", "echo": True, "max_tokens": 0, **more})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert pair.scheduler.added == []


@pytest.mark.parametrize(("of_texts", "of_prompt"), [(1, 5), (5, 1), (0, 2)])
def test_given_an_echo_with_logprobs_and_prompt_logprobs_when_completed_then_each_tells_as_many_as_it_was_asked_for(
    pair: Pair, of_texts: int, of_prompt: int
) -> None:
    body = {"prompt": "hello world, the fox", "echo": True, "logprobs": of_texts, "prompt_logprobs": of_prompt}
    choice = pair.post("/v1/completions", {**body, "max_tokens": 2}).json()["choices"][0]
    # The token itself is the first of the alternatives here; it is told in any case.
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} == {max(of_texts, 1)}
    assert {len(ranks) for ranks in choice["prompt_logprobs"][1:]} == {of_prompt}


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"echo": True, "logprobs": 20}, "logprobs"),
        ({"echo": True, "logprobs": 20, "stream": True}, "logprobs"),
        ({"prompt_logprobs": 20}, "prompt_logprobs"),
    ],
    ids=["echo", "streamed echo", "prompt_logprobs"],
)
def test_given_choices_that_would_repeat_too_many_logprobs_of_prompts_when_sent_then_400_names_the_limit(
    pair: Pair, asked: dict[str, Any], param: str
) -> None:
    length = MAX_PROMPT_LOGPROBS // (128 * 21 * 2) + 1
    body = {"prompt": [[5] * length] * 2, "n": 128, "max_tokens": 1, **asked}
    error = pair.post("/v1/completions", body).json()["error"]
    assert f"At most {MAX_PROMPT_LOGPROBS} " in error["message"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert not pair.scheduler.added


def test_given_a_prompt_near_the_contexts_end_when_no_length_is_asked_for_then_what_is_left_is_generated(
    pair: Pair,
) -> None:
    context = pair.scheduler.max_model_len
    for left, wanted in ((1, 1), (10, 10), (16, 16), (17, 16)):
        usage = pair.post("/v1/completions", {"prompt": [5] * (context - left)}).json()["usage"]
        assert usage["completion_tokens"] == wanted
    both = pair.post("/v1/completions", {"prompt": [[5], [5] * (context - 1)]}).json()["usage"]
    assert both["completion_tokens"] == 16 + 1
    refused = pair.post("/v1/completions", {"prompt": [5] * context}).json()["error"]
    assert (refused["code"], refused["param"]) == ("context_length_exceeded", "prompt")
    refused = pair.post("/v1/completions", {"prompt": [5] * (context - 10), "max_tokens": 11}).json()["error"]
    assert (refused["code"], refused["param"]) == ("context_length_exceeded", "max_tokens")


def test_given_choices_that_would_repeat_too_much_text_when_sent_then_400(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(params, "MAX_REPEATED_CHARS", 40)
    for asked in ({"echo": True}, {"return_token_ids": True}):
        body = {"prompt": "hello", "max_tokens": 1, **asked}
        assert pair.post("/v1/completions", body).status_code == 200
        error = pair.post("/v1/completions", {**body, "n": 41}).json()["error"]
        assert (error["param"], "40 characters" in error["message"]) == ("n", True)
    assert len(pair.scheduler.added) == 2


def test_given_an_echo_that_no_message_can_carry_when_streamed_then_400_for_that_request_alone(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "model")
    backend = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    word = "\x01" * 12_000  # six bytes each as JSON
    backend.add_tokens([tokenizers.AddedToken(word, normalized=False)])
    backend.save(str(model / "tokenizer.json"))
    body: dict[str, Any] = {"prompt": [backend.token_to_id(word)] * 240, "echo": True, "max_tokens": 1}
    scheduler, gateway = start_pair(model, tmp_path / "run", backend.get_vocab_size())
    scheduler.tokens_before_pause = 1
    try:
        with gateway.http() as http:
            with http.stream("POST", "/v1/completions", json={"prompt": "hello", "stream": True}) as other:
                refused = http.post("/v1/completions", json={**body, "stream": True})
                whole = http.post("/v1/completions", json=body)
                scheduler.tokens_before_pause = None
                assert other.read().endswith(b"data: [DONE]\n\n")
            shorter = http.post("/v1/completions", json={**body, "prompt": body["prompt"][:230], "stream": True})
    finally:
        gateway.close()
        scheduler.close()
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "echo")
    assert whole.json()["choices"][0]["text"].startswith(word * 240)
    assert shorter.text.endswith("data: [DONE]\n\n")
    assert len(scheduler.hellos) == 1, "the link never broke"


def test_given_equal_prompts_when_no_seed_was_chosen_then_their_answers_differ(pair: Pair) -> None:
    texts = [c["text"] for c in pair.post("/v1/completions", {"prompt": ["hello"] * 2}).json()["choices"]]
    seeded = [c["text"] for c in pair.post("/v1/completions", {"prompt": ["hello"] * 2, "seed": 1}).json()["choices"]]
    assert texts[0] != texts[1]
    assert seeded[0] == seeded[1]


def test_given_more_answers_than_a_request_may_ask_for_when_sent_then_400(pair: Pair) -> None:
    response = pair.post("/v1/completions", {"prompt": ["hello"] * 100, "n": 128})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")


def test_given_prompt_logprobs_when_completed_then_they_stand_in_the_choice(pair: Pair) -> None:
    answer = pair.post("/v1/completions", {"prompt": "hello world", "prompt_logprobs": 0, "max_tokens": 1}).json()
    assert answer["choices"][0]["prompt_logprobs"][0] is None
    assert len(answer["choices"][0]["prompt_logprobs"]) == len(pair.tokenizer.encode("hello world"))
    assert answer["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("below", ["", "/v1"])
def test_given_text_when_tokenized_and_back_then_it_is_the_same(pair: Pair, below: str) -> None:
    text = "hello 你好 <|im_end|>"
    answer = pair.post(f"{below}/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == pair.tokenizer.encode(text)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 256)
    assert answer["token_strs"][-1] == "<|im_end|>"
    assert pair.post(f"{below}/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}


def test_given_messages_when_tokenized_then_they_are_rendered(pair: Pair) -> None:
    answer = pair.post("/tokenize", {"messages": [{"role": "user", "content": "hello"}]}).json()
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert answer["tokens"] == pair.tokenizer.encode(rendered)
    text = pair.post("/apply-template", {"messages": [{"role": "user", "content": "hello"}]})
    assert (text.status_code, text.json()) == (200, {"prompt": rendered})


@pytest.mark.parametrize("body", [{}, {"messages": []}, {"prompt": "x"}, {"messages": [{"role": "user"}]}])
def test_given_no_chat_when_its_prompt_is_asked_for_then_400(pair: Pair, body: dict[str, object]) -> None:
    reply = pair.post("/apply-template", body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")


def test_given_a_message_to_be_continued_when_tokenized_then_it_is_what_a_chat_would_send(pair: Pair) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "The"}]
    body = {"messages": messages, "continue_final_message": True}
    answer = pair.post("/tokenize", body).json()
    assert pair.post("/v1/chat/completions", {**body, "max_tokens": 1}).status_code == 200
    assert answer["tokens"] == pair.scheduler.added[-1].prompt_token_ids


PROMPTS = ("/tokenize", "/apply-template")  # tell what a chat's is


def test_given_what_a_chat_tells_its_template_when_tokenized_then_it_counts_and_is_not_named_as_ignored(
    tmp_path: Path,
) -> None:
    template = (
        "{{ enable_thinking }} {{ reasoning_effort }} {{ documents }} {{ tools | length if tools else 0 }}" + CHATML
    )
    model = write_tokenizer(tmp_path / "model", template=template)
    scheduler, gateway = start_pair(model, tmp_path / "run", Tokenizer.load(model).vocab_size)
    chat = {"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {"name": "f"}}]}
    asked: list[dict[str, Any]] = [
        {},
        {"think": False},
        {"reasoning_effort": "low"},
        {"documents": [{"a": 1}]},
        {"tool_choice": "none"},
    ]
    wrong: list[dict[str, Any]] = [{"reasoning_effort": 1}, {"documents": "x"}, {"tool_choice": "required"}]
    try:
        with gateway.http() as http:
            told = [http.post("/tokenize", json={**chat, **more}) for more in asked]
            texts = [http.post("/apply-template", json={**chat, **more}) for more in asked]
            for more in asked:
                http.post("/v1/chat/completions", json={**chat, **more, "max_tokens": 1})
            refused = [http.post(path, json={**chat, **more}) for path in PROMPTS for more in wrong]
    finally:
        gateway.close()
        scheduler.close()
    assert not any("x-novainfer-ignored" in answer.headers for answer in (*told, *texts))
    tokenizer = Tokenizer.load(model)
    tokens = [answer.json()["tokens"] for answer in told]
    assert tokens == [request.prompt_token_ids for request in scheduler.added]
    assert all(tokens.count(one) == 1 for one in tokens)
    assert [tokenizer.encode(answer.json()["prompt"], add_special_tokens=False) for answer in texts] == tokens
    params = [(answer.status_code, answer.json()["error"]["param"]) for answer in refused]
    assert params == [(400, name) for more in wrong for name in more] * len(PROMPTS)


@pytest.mark.parametrize("body", [{}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, {"prompt": 1}])
def test_given_neither_or_both_when_tokenized_then_400(pair: Pair, body: dict[str, object]) -> None:
    assert pair.post("/tokenize", body).status_code == 400


@pytest.mark.parametrize("tokens", [[-1], [10**6], ["x"], [True], None])
def test_given_bad_ids_when_detokenized_then_400(pair: Pair, tokens: object) -> None:
    assert pair.post("/detokenize", {"tokens": tokens}).status_code == 400


def test_given_ids_that_the_model_has_beyond_its_tokenizer_when_they_come_or_are_detokenized_then_they_have_no_text(
    tiny_model: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(tiny_model)
    padding = tokenizer.vocab_size
    scheduler, gateway = start_pair(tiny_model, tmp_path / "run", padding + 2)
    ids = [padding, *tokenizer.encode("hello"), padding + 1]
    scheduler.script = lambda request, choice: ids
    try:
        with gateway.http() as http:
            answer = http.post("/v1/completions", json={"prompt": "x"}).json()["choices"][0]["text"]
            text = http.post("/detokenize", json={"tokens": ids}).json()
            refused = http.post("/detokenize", json={"tokens": [padding + 2]}).status_code
    finally:
        gateway.close()
        scheduler.close()
    assert (answer, text, refused) == ("hello", {"prompt": "hello"}, 400)


def test_given_a_server_when_its_description_is_read_then_every_route_and_body_is_in_it(pair: Pair) -> None:
    document = pair.http.get("/openapi.json").json()
    paths = document["paths"]
    assert set(paths["/v1/models/{model_id}"]) == {"get"}
    body = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][body.rsplit("/", 1)[1]]
    assert schema["required"] == ["messages"]
    assert {"temperature", "stream", "n", "stop"} <= set(schema["properties"])
    assert set(paths["/v1/completions"]["post"]["responses"]["200"]["content"]) == {
        "application/json",
        "text/event-stream",
    }
