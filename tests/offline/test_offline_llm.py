"""The offline `LLM` on a real checkpoint: its interface, and that a token depends on its request alone."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from novainfer import LLM, SamplingParams
from novainfer.client.output import ChoiceDelta, describe_prompt
from novainfer.errors import ConfigError, InvalidRequestError
from novainfer.protocol.messages import Logprobs
from tests.fakes import write_sentencepiece
from tests.parity.builders import build_checkpoint

pytestmark = pytest.mark.stage1

PROMPTS = [[3 + (7 * i + j * j) % 90 for j in range(5 + 9 * i)] for i in range(8)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12),
    SamplingParams(temperature=1.0, seed=1, max_tokens=12),
    SamplingParams(temperature=0.8, top_k=5, seed=2, max_tokens=12, logprobs=3),
    SamplingParams(temperature=1.2, top_p=0.7, min_p=0.02, seed=3, max_tokens=12),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=12),
    SamplingParams(temperature=0.9, presence_penalty=0.5, frequency_penalty=0.7, seed=4, max_tokens=12),
    SamplingParams(temperature=1.0, logit_bias={5: 4.0, 9: -100.0}, seed=5, n=3, max_tokens=12),
    SamplingParams(temperature=1.0, allowed_token_ids=tuple(range(40, 80)), seed=6, min_tokens=5, max_tokens=12),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("qwen3", tmp_path_factory.mktemp("llm") / "model")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), num_blocks=128, max_num_seqs=16) as model:
        yield model


def tokens(results: list[dict[str, Any]]) -> list[list[list[int]]]:
    return [[choice["token_ids"] for choice in result["choices"]] for result in results]


@pytest.fixture(scope="module")
def solo(llm: LLM) -> list[list[list[int]]]:
    """Each request alone."""
    return [
        tokens(llm.generate([prompt], params, use_tqdm=False))[0]
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]


def test_given_text_or_ids_when_generated_then_always_a_list_of_dicts(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    one = llm.generate("hello", greedy, use_tqdm=False)
    many = llm.generate(["hello", "you"], greedy, use_tqdm=False)
    ids = llm.generate([llm.tokenizer.encode("hello")], greedy, use_tqdm=False)
    assert len(one) == len(ids) == 1
    assert one[0]["token_ids"] == many[0]["token_ids"] == ids[0]["token_ids"]
    assert one[0]["finish_reason"] in ("length", "stop")
    usage = one[0]["usage"]
    assert usage["completion_tokens"] == len(one[0]["token_ids"])
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_given_mixed_requests_when_batched_then_each_equals_its_solo_run(llm: LLM, solo: list[list[list[int]]]) -> None:
    assert tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == solo
    assert tokens(llm.generate(PROMPTS[::-1], PARAMS[::-1], use_tqdm=False)) == solo[::-1]


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 4, "max_num_seqs": 4},
        {"max_num_batched_tokens": 7, "max_num_seqs": 7},
        {"max_num_batched_tokens": 16, "max_num_seqs": 16, "steps_in_flight": 1},
        {"enable_prefix_caching": False},
        {"num_blocks": 14, "max_num_seqs": 6},
        {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    ],
    ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()),
)
def test_given_any_chunking_cache_or_memory_when_run_then_the_same_tokens(
    checkpoint: Path, solo: list[list[list[int]]], options: dict[str, Any]
) -> None:
    with LLM(str(checkpoint), **{"num_blocks": 128, **options}) as other:
        assert tokens(other.generate(PROMPTS, PARAMS, use_tqdm=False)) == solo
        assert tokens(other.generate(PROMPTS, PARAMS, use_tqdm=False)) == solo  # now with what is cached


def test_given_bf16_when_batched_then_each_equals_its_solo_run(checkpoint: Path) -> None:
    with LLM(str(checkpoint), dtype="bfloat16", num_blocks=128, max_num_seqs=16) as model:
        alone = [
            tokens(model.generate([prompt], params, use_tqdm=False))[0]
            for prompt, params in zip(PROMPTS, PARAMS, strict=True)
        ]
        assert tokens(model.generate(PROMPTS, PARAMS, use_tqdm=False)) == alone


def test_given_a_callback_when_stepping_then_every_token_is_seen_in_order(llm: LLM) -> None:
    seen: list[ChoiceDelta] = []
    request_id = llm.add_request(
        "count", SamplingParams(temperature=0.0, max_tokens=6), on_token=lambda _, delta: seen.append(delta)
    )
    done: list[dict[str, Any]] = []
    while not llm.is_finished():
        done.extend(llm.step())
    assert [result["request_id"] for result in done] == [request_id]
    assert [t for delta in seen for t in delta.token_ids] == done[0]["token_ids"]
    assert "".join(delta.text for delta in seen) == done[0]["text"]
    assert seen[-1].finish_reason == done[0]["finish_reason"]


def test_given_a_callback_that_raises_when_stepping_then_the_others_have_all_their_tokens(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    expected = tokens(llm.generate(PROMPTS[:2], greedy, use_tqdm=False))

    def fail(request_id: str, delta: ChoiceDelta) -> None:
        raise RuntimeError("the caller's own fault")

    before = llm.add_request(PROMPTS[0], greedy)
    llm.add_request(PROMPTS[2], greedy, fail)
    after = llm.add_request(PROMPTS[1], greedy)
    results, num_raised = {}, 0
    while not llm.is_finished():
        try:
            results.update({result["request_id"]: result for result in llm.step()})
        except RuntimeError:
            num_raised += 1
    assert num_raised == 1
    assert tokens([results[before], results[after]]) == expected
    assert results.keys() == {before, after}


def test_given_a_callback_that_cancels_when_it_has_the_last_token_then_no_result_and_no_error(llm: LLM) -> None:
    seen: list[str] = []

    def enough(request_id: str, delta: Any) -> None:
        seen.append(request_id)
        llm.cancel(request_id)

    request_id = llm.add_request("count", SamplingParams(temperature=0.0, max_tokens=1), on_token=enough)
    while not llm.is_finished():
        assert llm.step() == []
    assert seen == [request_id]


def test_given_a_queued_request_when_it_ends_while_others_are_generated_then_its_result_is_not_lost(llm: LLM) -> None:
    queued = llm.add_request("count", SamplingParams(temperature=0.0, max_tokens=2))
    llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
    assert not llm.is_finished()
    results: list[dict[str, Any]] = []
    while not llm.is_finished():
        results += llm.step()
    assert [result["request_id"] for result in results] == [queued]


def test_given_a_callback_that_raises_when_generating_then_no_prompt_of_the_call_is_left(llm: LLM) -> None:
    def fail(request_id: str, delta: ChoiceDelta) -> None:
        raise RuntimeError("the caller's own fault")

    llm.add_request(PROMPTS[0], SamplingParams(max_tokens=4), fail)
    with pytest.raises(RuntimeError):
        llm.generate(PROMPTS[1:3], SamplingParams(max_tokens=8), use_tqdm=False)
    assert llm.is_finished()


def test_given_a_cancelled_prompt_when_its_logprobs_were_asked_for_then_those_it_had_are_told(llm: LLM) -> None:
    entries = [Logprobs(token_id, -1.0, 1) for token_id in PROMPTS[0][1:3]]
    described = describe_prompt(llm.tokenizer, PROMPTS[0], entries)
    assert [item is None for item in described] == [True, False, False] + [True] * (len(PROMPTS[0]) - 3)


def test_given_a_top_p_of_zero_when_generated_then_the_tokens_are_the_greedy_ones(llm: LLM) -> None:
    sampled = [SamplingParams(temperature=1.5, top_p=0.0, seed=seed, max_tokens=12) for seed in range(len(PROMPTS))]
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    found, wanted = (tokens(llm.generate(PROMPTS, params, use_tqdm=False)) for params in (sampled, greedy))
    assert found == wanted


def test_given_one_stop_string_when_not_in_a_list_then_it_is_one(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12)
    text = llm.generate("hello", params, use_tqdm=False)[0]["text"]
    stop = text[2:5]
    for given in (stop, [stop], (stop,)):
        result = llm.generate("hello", replace(params, stop=given), use_tqdm=False)[0]
        assert (result["text"], result["stop_reason"]) == (text[: text.index(stop)], stop)


HELLO = [{"role": "user", "content": "Hello"}]
WRONG_CALLS: list[Callable[[LLM], object]] = [
    lambda llm: llm.generate(["a", None]),
    lambda llm: llm.generate([1, 2, 3]),
    lambda llm: llm.generate(["half a pair: \ud83d"]),
    lambda llm: llm.generate("a", {"max_tokens": 3}),
    lambda llm: llm.generate(["a"], [{"max_tokens": 3}]),
    lambda llm: llm.generate(["a", "b"], [SamplingParams(), SamplingParams(n="2")]),
    lambda llm: llm.generate("a", SamplingParams(stop=[None])),
    lambda llm: SamplingParams(stop=7),
    lambda llm: SamplingParams(stop_token_ids=7),
    lambda llm: SamplingParams(banned_token_ids="7"),
    lambda llm: SamplingParams(logit_bias=[1]),
    lambda llm: llm.chat("hi"),
    lambda llm: llm.chat([[]]),
    lambda llm: llm.chat(HELLO, tools=[{"name": "f"}]),
    lambda llm: llm.chat(HELLO, tools="f"),
    lambda llm: llm.chat(HELLO, chat_template_kwargs={"messages": []}),
    lambda llm: llm.chat(HELLO, chat_template_kwargs=["x"]),
    lambda llm: llm.chat(HELLO, add_generation_prompt=True, continue_final_message=True),
]


@pytest.mark.parametrize("call", WRONG_CALLS)
def test_given_a_wrong_call_when_made_then_invalid_request_and_nothing_is_queued(
    llm: LLM, call: Callable[[LLM], object]
) -> None:
    with pytest.raises(InvalidRequestError):
        call(llm)
    assert llm.is_finished()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"dtype": "int4"}, "one of auto, float32"),
        ({"block_size": "16"}, "block_size needs a whole number"),
        ({"max_model_len": 1.5}, "max_model_len needs a whole number"),
        ({"executor": "local", "num_blocks": -1}, "must be above 0"),
    ],
)
def test_given_a_wrong_option_when_made_then_the_command_lines_own_words(option: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM("demo", **option)


def test_given_a_stop_string_when_it_appears_then_the_text_ends_before_it(llm: LLM) -> None:
    free = llm.generate("abc", SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)[0]
    stop = free["text"][3:5]
    assert stop
    cut = llm.generate("abc", SamplingParams(temperature=0.0, max_tokens=12, stop=(stop,)), use_tqdm=False)[0]
    assert cut["text"] == free["text"][: free["text"].index(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    assert llm.is_finished()


def test_given_logprobs_when_asked_then_one_entry_a_token_and_they_are_probabilities(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=4, prompt_logprobs=2)
    result = llm.generate([PROMPTS[2]], params, use_tqdm=False)[0]
    assert [entry["token_id"] for entry in result["logprobs"]] == result["token_ids"]
    for entry in result["logprobs"]:
        values = [item["logprob"] for item in entry["top"]]
        assert values == sorted(values, reverse=True)
        assert entry["rank"] == 1
        assert entry["logprob"] == values[0] <= 0.0
    assert result["prompt_logprobs"][0] is None
    assert [e["token_id"] for e in result["prompt_logprobs"][1:]] == PROMPTS[2][1:]


def test_given_one_token_and_prompt_logprobs_when_scored_then_every_prompt_token_has_its_entry(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    result = llm.generate([PROMPTS[3]], params, use_tqdm=False)[0]
    assert [entry["token_id"] for entry in result["prompt_logprobs"][1:]] == PROMPTS[3][1:]


def test_given_more_prompts_than_a_server_would_queue_when_generated_then_all_are_answered(llm: LLM) -> None:
    results = llm.generate([[3 + i % 50] for i in range(1200)], SamplingParams(max_tokens=1), use_tqdm=False)
    assert len(results) == 1200
    assert llm.is_finished()


def test_given_prompt_logprobs_when_the_prompt_is_chunked_then_the_same_numbers(checkpoint: Path, llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1)
    whole = llm.generate([PROMPTS[5]], params, use_tqdm=False)[0]["prompt_logprobs"]
    with LLM(str(checkpoint), num_blocks=64, max_num_batched_tokens=5, max_num_seqs=5) as other:
        assert other.generate([PROMPTS[5]], params, use_tqdm=False)[0]["prompt_logprobs"] == whole


def test_given_a_wrong_request_among_good_ones_when_generated_then_nothing_runs(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError):
        llm.generate([[1, 2], [10**6]], SamplingParams(max_tokens=2), use_tqdm=False)
    assert llm.is_finished()
    assert llm.step() == []


@pytest.mark.parametrize("bad", [replace(PARAMS[0], temperature=-1.0), replace(PARAMS[0], max_tokens=10**6)])
def test_given_wrong_params_when_added_then_invalid_request(llm: LLM, bad: SamplingParams) -> None:
    with pytest.raises(InvalidRequestError):
        llm.add_request("x", bad)


NONSENSE = [
    ({"max_position_embeddings": 0}, "max_position_embeddings must be a whole number between 1 and"),
    ({"max_position_embeddings": 10**9}, "max_position_embeddings must be a whole number between 1 and"),
    ({"hidden_size": 10**8}, "hidden_size must be"),
    ({"vocab_size": -5}, "vocab_size must be"),
    ({"num_hidden_layers": "two"}, "num_hidden_layers must be"),
    ({"rope_scaling": {"rope_type": "linear", "factor": -2.0}}, r"rope_scaling\.factor must be a number above 0"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}}, "rope_theta must be"),
    ({"vocab_size": 40}, "the model only 40"),
]


@pytest.mark.parametrize(("changes", "words"), NONSENSE)
def test_given_a_config_that_no_model_can_have_when_loaded_then_one_line_says_what_is_wrong(
    checkpoint: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    if "vocab_size" in changes:  # weights that go with it
        tensors = load_file(folder / "model.safetensors")
        rows = max(changes["vocab_size"], 0)
        save_file(
            {n: t[:rows].clone() if t.shape[0] == config["vocab_size"] else t for n, t in tensors.items()},
            folder / "model.safetensors",
        )
    with pytest.raises(ConfigError, match=words) as caught:
        LLM(str(folder))
    assert "\n" not in str(caught.value)


def test_given_a_length_that_is_nonsense_when_a_sane_one_is_asked_for_then_it_is_served(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 10**9}))
    with LLM(str(folder), max_model_len=64, num_blocks=8) as llm:
        assert llm.generate("hello", SamplingParams(max_tokens=1), use_tqdm=False)[0]["token_ids"]


def test_given_weights_that_are_no_numbers_when_loaded_then_the_tensor_is_named(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.gate_proj.weight"
    tensors[name][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"not finite: tensor '{name}'"):
        LLM(str(folder), num_blocks=16)


def test_given_a_misspelt_option_when_made_then_the_nearest_is_named() -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(max_model_length=5)
    with pytest.raises(ConfigError, match="unknown option 'enable_lora': there are no LoRA adapters"):
        LLM(enable_lora=True)


def test_given_conversations_when_chatting_then_each_is_answered_through_the_template() -> None:
    def asked(question: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": question}]

    greedy = SamplingParams(temperature=0.0, max_tokens=32)
    with LLM("demo") as demo:
        one = demo.chat(asked("What is 31 + 17?"), greedy, use_tqdm=False)
        two = demo.chat([asked("What is 31 + 17?"), asked("Count from 5 to 9.")], greedy, use_tqdm=False)
    assert [result["text"] for result in one + two] == ["31 + 17 = 48.", "31 + 17 = 48.", "5, 6, 7, 8, 9"]


CHATS = [
    ({}, "user:Hello;assistant:Hi;>"),
    ({"add_generation_prompt": False}, "user:Hello;assistant:Hi;"),
    ({"continue_final_message": True}, "user:Hello;assistant:Hi"),
    ({"chat_template_kwargs": {"mark": "#"}}, "user:Hello;assistant:Hi;>#"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "[f]user:Hello;assistant:Hi;>"),
]


def test_given_a_template_of_ones_own_when_chatting_then_it_and_all_that_is_said_beside_the_messages_are_heard(
    tmp_path: Path,
) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(
        "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
        "{% for message in messages %}{{ message.role }}:{{ message.content }};{% endfor %}"
        "{% if add_generation_prompt %}>{{ mark }}{% endif %}"
    )
    messages = [*HELLO, {"role": "assistant", "content": "Hi"}]
    with LLM("demo", chat_template=path, num_blocks=64) as demo:
        for arguments, prompt in CHATS:
            (result,) = demo.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False, **arguments)
            assert result["prompt_token_ids"] == demo.tokenizer.encode(prompt, add_special_tokens=False)
        path.write_text("{% if %}")
        assert demo.chat(HELLO, SamplingParams(max_tokens=1), use_tqdm=False)  # read once, at the start
    with pytest.raises(ConfigError, match="the chat template cannot be compiled"):
        LLM("demo", chat_template=path)


def test_given_a_last_message_to_go_on_with_when_chatting_then_the_space_before_the_next_word_is_told(
    tmp_path: Path,
) -> None:
    """A decoder like SentencePiece's drops it from the start of a text: here that is the message's."""
    words = write_sentencepiece(tmp_path / "words", ["▁hello"])
    messages = [*HELLO, {"role": "assistant", "content": "Hi"}]
    with LLM("demo", tokenizer=words, num_blocks=64) as demo:
        (hello,) = (i for i in range(259, 270) if demo.tokenizer.token(i) == "▁hello")
        params = SamplingParams(allowed_token_ids=(hello,), max_tokens=2)
        (goes_on,) = demo.chat(messages, params, use_tqdm=False, continue_final_message=True)
        (begins,) = demo.chat(messages, params, use_tqdm=False)
    assert (goes_on["text"], begins["text"]) == (" hello hello", "hello hello")


def test_given_an_end_token_beyond_the_logits_when_loaded_then_requests_run_all_the_same(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [config["vocab_size"] + 5]}))
    try:
        with LLM(str(checkpoint)) as small:
            results = small.generate([[3, 4, 5]], SamplingParams(temperature=0.0, max_tokens=3), use_tqdm=False)
    finally:
        (checkpoint / "generation_config.json").unlink()
    assert results[0]["finish_reason"] == "length"


def test_given_a_grammar_when_generated_then_texts_follow_it_and_a_wrong_one_is_refused_before_anything_runs() -> None:
    with LLM("demo", num_blocks=64, max_num_seqs=8) as model:
        form = SamplingParams(temperature=1.5, seed=2, n=3, max_tokens=20, grammar="start: /[0-9]{3}-(a|b)+/")
        results = model.generate(["One, two", "Hello!"], [form, replace(form, seed=5)], use_tqdm=False)
        texts = [choice["text"] for result in results for choice in result["choices"]]
        assert all(re.fullmatch("[0-9]{3}-[ab]+", text) for text in texts), texts
        assert model.generate("Hello!", replace(form, seed=5), use_tqdm=False)[0]["choices"] == results[1]["choices"]
        for wrong in ("start: nothing", "start: <|nope|>", 5, '{"grammars": []}'):
            with pytest.raises(InvalidRequestError) as caught:
                model.generate(["a", "b"], [SamplingParams(), SamplingParams(grammar=wrong)])  # type: ignore[arg-type]
            assert caught.value.param == "grammar"
        assert model.is_finished()
