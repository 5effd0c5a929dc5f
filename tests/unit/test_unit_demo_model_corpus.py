"""The demo model's corpus: true answers, held-out content kept apart, exact loss masks."""

from __future__ import annotations

import json
import random
import re
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from bench.demo_model.content import Draw
from bench.demo_model.conversation import Conversation, exchange, tool_calls, tool_result, user
from bench.demo_model.corpus import KINDS, held_out, training_conversations
from bench.demo_model.data import batches, encode
from bench.demo_model.tokenizer import CHAT_TEMPLATE, CONTROL_TOKENS, MARKUP_TOKENS, VOCAB_SIZE, render
from bench.demo_model.topics import NOVAINFER

pytestmark = pytest.mark.unit

ASSETS = Path(__file__).parents[2] / "novainfer" / "assets" / "demo"
SHIPPED = Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
EQUATION = re.compile(r"(\d+) ([-+x]) (\d+) = (-?\d+)")


@pytest.fixture(scope="module")
def training() -> list[Conversation]:
    return list(islice(training_conversations(5), 1500))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return SHIPPED


def assistant_texts(conversations: list[Conversation]) -> list[str]:
    return [m["content"] for c in conversations for m in c.messages if m["role"] == "assistant"]


def equations(conversations: list[Conversation]) -> list[tuple[int, str, int, int]]:
    found = [e for text in assistant_texts(conversations) for e in EQUATION.findall(text)]
    return [(int(a), op, int(b), int(c)) for a, op, b, c in found]


def test_given_one_seed_when_streamed_twice_then_conversations_are_equal() -> None:
    first, second, other = (list(islice(training_conversations(seed), 50)) for seed in (3, 3, 4))
    assert first == second
    assert first != other


def test_given_training_text_when_it_states_equations_then_each_is_true(training: list[Conversation]) -> None:
    stated = equations(training)
    assert len(stated) > 500
    for a, op, b, c in stated:
        assert c == {"+": a + b, "-": a - b, "x": a * b}[op]


def test_given_held_out_sums_when_training_is_searched_then_neither_order_occurs(
    training: list[Conversation],
) -> None:
    held = {frozenset((a, b)) for a, _, b, _ in equations(held_out("addition", 100))}
    seen = {frozenset((a, b)) for a, op, b, _ in equations(training) if op == "+"}
    assert len(held) > 90
    assert not held & seen


@pytest.mark.parametrize("draw_one", [Draw.word, Draw.name, Draw.city])
def test_given_both_parts_when_drawn_from_then_they_share_nothing(draw_one) -> None:  # type: ignore[no-untyped-def]
    train, test = Draw(random.Random(1), "train"), Draw(random.Random(2), "test")
    seen = {draw_one(train).lower() for _ in range(2000)}
    held = {draw_one(test).lower() for _ in range(300)}
    assert len(held) > 3
    assert not seen & held


def test_given_last_wordings_of_facts_when_training_is_searched_then_none_occurs(
    training: list[Conversation],
) -> None:
    last = {topic.questions[-1] for topic in NOVAINFER}
    asked = {m["content"] for c in training for m in c.messages if m["role"] == "user"}
    assert not last & asked
    assert {topic.questions[0] for topic in NOVAINFER} & asked


@pytest.mark.parametrize("kind", [*KINDS, "multi_turn"])
def test_given_any_kind_when_held_out_then_it_ends_with_a_full_assistant_turn(kind: str) -> None:
    examples = held_out(kind, 12)
    assert len(examples) >= 5
    assert examples == held_out(kind, 12)
    for example in examples:
        last = example.messages[-1]
        assert last["role"] == "assistant"
        assert last["content"] or last["tool_calls"]


@pytest.mark.parametrize("kind", ["json_object", "json_extract", "json_array"])
def test_given_json_tasks_when_answered_then_the_answer_is_json(kind: str) -> None:
    for text in assistant_texts(held_out(kind, 50)):
        assert isinstance(json.loads(text), list if kind == "json_array" else dict)


@pytest.mark.parametrize("kind", ["tool_call", "tool_answer", "tool_pair", "tool_named"])
def test_given_tool_tasks_when_a_tool_is_called_then_it_was_offered_with_these_parameters(kind: str) -> None:
    for example in held_out(kind, 50):
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in example.tools}
        calls = [call["function"] for m in example.messages for call in m.get("tool_calls", [])]
        assert calls
        for call in calls:
            schema = offered[call["name"]]
            assert set(schema["required"]) <= set(call["arguments"]) <= set(schema["properties"])


def test_given_a_tool_round_when_rendered_then_it_has_hermes_form() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": "é"}}}
    turns = (user("go"), tool_calls(("f", {"x": "<1>"})), tool_result("one"), tool_result("two"))
    text = render(Conversation(turns, (tool,)), add_generation_prompt=True)
    assert f"<tools>\n{json.dumps([tool], ensure_ascii=False)}\n</tools>\n" in text
    assert text.endswith(
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "f", "arguments": {"x": "<1>"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n"
        "<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_given_a_conversation_when_encoded_then_exactly_the_assistant_text_counts(
    tokenizer: Tokenizer,
) -> None:
    turns = (*exchange("What is 1 + 1?", "1 + 1 = 2.").messages, *exchange("Hi", "Hello!").messages)
    encoded = encode(tokenizer, [render(Conversation(turns))])[0]
    counted = tokenizer.decode(list(encoded.ids[encoded.counts]), skip_special_tokens=False)
    assert counted == "1 + 1 = 2.<|im_end|>Hello!<|im_end|>"


def test_given_a_batch_when_masked_then_tokens_see_only_their_own_document(tokenizer: Tokenizer) -> None:
    batch = next(batches(tokenizer, seed=1, num_packs=2, length=320))
    mask = batch.attention_mask()
    assert mask.shape == (2, 1, 320, 320)
    assert int(batch.documents.max()) > 0
    assert bool(torch.diagonal(mask, dim1=2, dim2=3).all())
    query, key = mask[0, 0].nonzero(as_tuple=True)
    assert bool((key <= query).all())
    assert bool((batch.documents[0][key] == batch.documents[0][query]).all())


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_given_any_text_when_encoded_then_decoding_gives_it_back(text: str) -> None:
    assert SHIPPED.decode(SHIPPED.encode(text).ids, skip_special_tokens=False) == text


def test_given_digits_when_encoded_then_each_is_one_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("12345").tokens == list("12345")
    assert not [token for token in tokenizer.get_vocab() if re.search(r"\d.|.\d", token)]


def test_given_the_shipped_folder_when_read_then_its_files_agree_with_the_code(tokenizer: Tokenizer) -> None:
    config = json.loads((ASSETS / "config.json").read_text())
    settings_ = json.loads((ASSETS / "tokenizer_config.json").read_text())
    generation = json.loads((ASSETS / "generation_config.json").read_text())
    assert config["vocab_size"] == tokenizer.get_vocab_size() == VOCAB_SIZE
    assert settings_["chat_template"] == CHAT_TEMPLATE
    assert tokenizer.token_to_id("<|im_end|>") in generation["eos_token_id"]
    assert all(tokenizer.token_to_id(token) is not None for token in (*CONTROL_TOKENS, *MARKUP_TOKENS))
    assert sum(path.stat().st_size for path in ASSETS.rglob("*")) < 12_000_000
