"""Which tokens a row's grammar allows: against all texts of small languages, and however the row came to its tokens."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import models

from kernels.backend import select_backend
from novainfer.checkpoint import resolve_checkpoint
from novainfer.config import DEMO_MODEL
from novainfer.errors import ConfigError
from novainfer.protocol.columns import column
from novainfer.protocol.step import GIVEN_UP, NOT_FOLLOWED, RULED_OUT, NewRow, StepPlan
from novainfer.sampling.grammars import JSON, make_grammar, new_matcher
from novainfer.sampling.grammars import REGEX as REGEX_KIND
from novainfer.text.tokenizer import Tokenizer
from novainfer.text.vocabulary import Vocabulary
from tests.builders import CPU, VOCAB_SIZE, limits, new_row
from tests.fakes import write_sentencepiece, write_tokenizer
from workers import grammars as worker_grammars
from workers.grammars import Grammars, unset_bits
from workers.request_states import RequestStates
from workers.row_sampling import RowGrammar
from workers.sampler import Sampler

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

pytestmark = pytest.mark.stage0

EOS, TURN = 9, 12
DEMO_SIZE = 4096
# Two ways to write "b", tokens that are the beginning of others, one without bytes; ids from 13 on have none either.
TOKENS = [b"a", b"b", b"c", b"ab", b"bc", b"abc", b"ca", b"", b"aa", b"<eos>", b"d", b"b", b"<turn>"]
VOCABULARY = Vocabulary(TOKENS + [b""] * (VOCAB_SIZE - len(TOKENS)), (EOS, TURN), (EOS,))
CHOICE = 'start: "abc" | "abca" | "b" | "caab"'
REGEX = "start: /(ab|b)*c?/"
HOSTILE = "start: A\nA: /(.*a.{32})/ & ~/(.*b.{32})/"
AMBIGUOUS = 'start: s\ns: s s | "a" | "b"'
NESTED = 'start: "a" start "c" | "b"'
LONGEST = 10  # of the texts that are tried
LANGUAGES = {
    CHOICE: {"abc", "abca", "b", "caab"},
    REGEX: {
        "".join(parts) + end for n in range(LONGEST) for parts in itertools.product(("ab", "b"), repeat=n)
        for end in ("", "c") if len("".join(parts)) < LONGEST
    },
    NESTED: {"a" * n + "b" + "c" * n for n in range(LONGEST)},
}  # fmt: skip


def load() -> Vocabulary:
    return VOCABULARY


def allowed(grammars: Grammars, grammar: RowGrammar, output: list[int]) -> set[int]:
    """The ids that may follow."""
    logits = torch.zeros(VOCAB_SIZE)
    grammars.mask(logits, grammar, lambda start: output[start:])
    return set(torch.isfinite(logits).nonzero().flatten().tolist())


def row_grammar(text: str, *end_ids: int) -> RowGrammar:
    return RowGrammar(text, frozenset(end_ids))


def by_hand(language: Iterable[str], text: str) -> set[int]:
    """The same by looking at every token and every text."""
    found = {
        i
        for i, token in enumerate(TOKENS)
        if token and i not in (EOS, TURN) and any(one.startswith(text + token.decode()) for one in language)
    }
    return found | ({EOS} if text in language else set())


@pytest.mark.parametrize("text", LANGUAGES)
def test_given_a_small_language_when_texts_are_written_then_exactly_the_tokens_that_go_on_are_allowed(
    text: str,
) -> None:
    grammars, language = Grammars(load), LANGUAGES[text]
    rng = random.Random(1)
    ends = 0
    for _ in range(30):
        grammar, output, said = row_grammar(text), list[int](), ""
        while len(said) < LONGEST // 2:
            found = allowed(grammars, grammar, output)
            assert found == by_hand(language, said), said
            token_id = rng.choice(sorted(found))
            if token_id == EOS:
                ends += 1
                break
            output.append(token_id)
            said += TOKENS[token_id].decode()
    assert ends > 3


@pytest.mark.parametrize("text", LANGUAGES)
def test_given_a_row_that_comes_back_when_it_has_any_of_its_tokens_then_the_same_ones_are_allowed(text: str) -> None:
    grammars, rng = Grammars(load), random.Random(2)
    for _ in range(10):
        steps: list[set[int]] = []
        grammar, output = row_grammar(text), list[int]()
        while len(steps) < 8:  # behind the end of text, too, as with ignore_eos
            steps.append(allowed(grammars, grammar, output))
            output.append(rng.choice(sorted(steps[-1])))
        for cut in range(len(steps)):
            again = row_grammar(text)
            assert [allowed(grammars, again, output[:length]) for length in range(cut, len(steps))] == steps[cut:]


def test_given_a_grammar_that_gets_too_complex_when_a_row_comes_back_then_it_allows_the_same_or_gives_up() -> None:
    grammars = Grammars(load)
    text = HOSTILE
    rng = random.Random(3)
    steps: list[set[int]] = []
    grammar, output = row_grammar(text), list[int]()
    while not steps or steps[-1]:
        steps.append(allowed(grammars, grammar, output))
        output.append(rng.choice(sorted(steps[-1] - {EOS}) or [0]))
    assert 3 < len(steps) < 1000
    assert allowed(grammars, row_grammar(text), []) == steps[0]  # others with the same one do not notice
    for cut in (0, 1, len(steps) // 2, len(steps) - 2, len(steps) - 1):
        again = row_grammar(text)
        found = [allowed(grammars, again, output[:length]) for length in range(cut, len(steps))]
        told = [one for one in found if one]
        assert told == steps[cut : cut + len(told)]
        assert not any(found[len(told) :])
        assert again.fault


def test_given_many_tokens_when_a_row_comes_back_then_their_masks_are_not_made_again() -> None:
    grammar = row_grammar("start: /[abc]*/")
    assert allowed(Grammars(load), grammar, [0, 1] * 5000) == by_hand(["abc", "b", "caab", "aab", "bc", ""], "") - {10}
    assert (grammar.num_seen, grammar.num_masks) == (10_000, 1)
    assert grammar.seconds < 0.2


@pytest.mark.parametrize("output", [[0], [0, 1] * 5000], ids=["at a mask", "amid a catch-up"])
def test_given_a_row_that_takes_too_much_time_when_it_samples_then_it_is_given_up(
    output: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar, grammars = row_grammar("start: /[abc]*/"), Grammars(load)
    allowed(grammars, grammar, [])
    grammar.seconds = 2.0
    assert allowed(grammars, grammar, output) == set()
    assert (grammar.fault, grammar.refusal) == ("The grammar is too dear to follow", GIVEN_UP)
    assert grammar.num_seen <= 64
    assert allowed(grammars, grammar, [*output, 0]) == set()


@pytest.mark.parametrize("schema", ['{"type": "string", "minLength": 1500}', '{"type": "string", "maxLength": 4000}'])
def test_given_a_long_text_that_is_bounded_when_it_is_written_then_it_comes_to_its_end(schema: str) -> None:
    tokens = [bytes([i]) for i in range(32, 127)]
    grammars = Grammars(lambda: Vocabulary([*tokens, b"<eos>"], (95,), (95,)))
    grammar = row_grammar(make_grammar(JSON, schema, None))
    rng, output, quote = random.Random(5), list[int](), tokens.index(b'"')
    logits = torch.zeros(96)
    while len(output) < 5000 and 95 not in output[-1:]:
        grammars.mask(logits.zero_(), grammar, lambda start: output[start:])
        found = torch.isfinite(logits).nonzero().flatten().tolist()
        assert found, (len(output), grammar.fault)
        plain = [i for i in found if i not in (95, quote, tokens.index(b"\\"))]
        output.append(rng.choice(plain) if plain and len(output) < 4500 else quote if quote in found else found[0])
    assert 1500 < len(output) < 5000
    assert validated(b"".join(tokens[i] for i in output[:-1]), schema)


def validated(text: bytes, schema: str) -> bool:
    """Of a schema with a bound for a string's length alone."""
    bounds, length = json.loads(schema), len(json.loads(text))
    return bool(bounds.get("minLength", 0) <= length <= bounds.get("maxLength", math.inf))


def test_given_ids_that_end_a_row_when_they_are_beyond_the_vocabulary_then_they_are_passed_over() -> None:
    for token_id in (VOCAB_SIZE, VOCAB_SIZE + 64, 10**6):
        assert allowed(Grammars(load), row_grammar('start: "b"', token_id), [1]) == {EOS}


def test_given_a_text_that_is_whole_when_more_is_sampled_then_it_is_an_end_of_text() -> None:
    grammars = Grammars(load)
    for output in ([1], [1, EOS], [1, EOS, EOS, EOS]):
        assert allowed(grammars, row_grammar('start: "b"'), output) == {EOS}
        assert allowed(grammars, row_grammar('start: "b"', TURN), output) == {EOS, TURN}  # the request's own
    assert allowed(grammars, row_grammar('start: "b" | "bc"', TURN), [1]) == {2, EOS, TURN}
    assert allowed(grammars, row_grammar('start: "bc"', TURN), [1]) == {2}
    assert allowed(grammars, row_grammar('start: "b" <turn> "c"'), [1]) == {TURN}


def test_given_a_vocabulary_without_an_end_of_text_when_a_text_is_whole_then_the_requests_own_is_allowed() -> None:
    grammars = Grammars(lambda: Vocabulary(VOCABULARY.tokens, (), ()))
    assert allowed(grammars, row_grammar('start: "b"'), []) == {1, 11}
    assert allowed(grammars, row_grammar('start: "b"'), [1]) == set()
    assert allowed(grammars, row_grammar('start: "b"', TURN), [1]) == {TURN}


def test_given_tokens_that_do_not_fit_when_the_row_samples_then_nothing_is_allowed_in_any_cut() -> None:
    grammars = Grammars(load)
    for output in ([10], [0, 10], [0, 3, 5]):
        grammar = row_grammar(CHOICE)
        assert allowed(grammars, grammar, output) == set()
        assert allowed(grammars, grammar, [*output, 0]) == set()
        assert allowed(grammars, row_grammar(CHOICE), [*output, 0]) == set()
        assert (grammar.fault == "", grammar.refusal) == (False, "")  # not what its request is to blame for
    assert allowed(grammars, row_grammar("start: nothing"), []) == set()


def test_given_a_vocabulary_that_cannot_be_read_when_rows_sample_then_it_is_tried_once_and_nothing_is_allowed() -> None:
    tries: list[int] = []

    def fails() -> Vocabulary:
        tries.append(1)
        raise ConfigError("no tokenizer.json")

    grammars = Grammars(fails)
    assert [allowed(grammars, row_grammar(CHOICE), []) for _ in range(3)] == [set()] * 3
    assert len(tries) == 1


def test_given_a_row_with_a_grammar_when_it_comes_then_the_vocabulary_is_read_meanwhile() -> None:
    began, may_go_on = threading.Event(), threading.Event()

    def slow() -> Vocabulary:
        began.set()
        may_go_on.wait(20)
        return VOCABULARY

    sampler = Sampler(select_backend(CPU), Grammars(slow))
    rows = [new_row(0, [5], [0], grammar='start: "b"'), new_row(1, [5], [1])]
    states = states_with(*rows)
    sampler.expect(rows[1:], states)
    assert not began.is_set()
    sampler.expect(rows, states)
    sampler.expect(rows, states)
    assert began.wait(20)
    may_go_on.set()
    assert sampler.sample(torch.zeros(1, VOCAB_SIZE), np.array([0]), states).token_ids.tolist() == [1]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The texts that were built, each with the name of the thread that did it."""
    texts: list[tuple[str, str]] = []

    def build(tokenizer: LLTokenizer, text: str) -> LLMatcher:
        texts.append((text, threading.current_thread().name))
        return new_matcher(tokenizer, text)

    monkeypatch.setattr(worker_grammars, "new_matcher", build)
    return texts


def test_given_many_rows_of_one_request_when_they_sample_then_its_grammar_is_built_once_and_not_by_the_step(
    built: list[tuple[str, str]],
) -> None:
    sampler = Sampler(select_backend(CPU), Grammars(load))
    count = limits().max_num_seqs
    rows = [new_row(i, [5], [i], grammar=REGEX, temperature=2.0, seed=i) for i in range(count)]
    states, order = states_with(*rows), np.arange(count)
    texts = [""] * count
    for _ in range(4):
        sampler.expect(rows, states)
        tokens = sampler.sample(torch.zeros(count, VOCAB_SIZE), order, states).token_ids
        states.append(order, tokens)
        texts = [text + TOKENS[token].decode() for text, token in zip(texts, tokens.tolist(), strict=True)]
    assert len(set(texts)) > 2
    assert all(re.fullmatch("(ab|b)*(a|c?(<eos>)*)", text) for text in texts), texts
    assert built == [(REGEX, "grammars")]


def test_given_a_grammar_that_rows_share_when_one_brings_it_to_its_limits_then_the_others_go_on(
    built: list[tuple[str, str]],
) -> None:
    grammars, rng = Grammars(load), random.Random(3)
    hostile, honest, late = row_grammar(HOSTILE), row_grammar(HOSTILE), row_grammar(HOSTILE)
    for grammar in (hostile, honest, late):
        grammars.expect(grammar)
    assert allowed(grammars, honest, []) == allowed(grammars, hostile, [])
    output = list[int]()
    while found := allowed(grammars, hostile, output):
        output.append(rng.choice(sorted(found - {EOS})))
    assert hostile.refusal == GIVEN_UP
    fresh = Grammars(load)
    for grammar, told in ((honest, [0, 0]), (late, [0, 0, 2, 0])):
        assert allowed(grammars, grammar, told) == allowed(fresh, row_grammar(HOSTILE), told) != set()
    assert allowed(grammars, row_grammar(HOSTILE), [2]) != set()
    assert len(built) <= 6


def test_given_dear_rows_with_one_grammar_when_they_use_it_up_then_each_goes_as_far_as_it_would_alone() -> None:
    vocabulary = Vocabulary.load(resolve_checkpoint(DEMO_MODEL), DEMO_SIZE)
    grammars, logits = Grammars(lambda: vocabulary), torch.zeros(DEMO_SIZE)
    text = make_grammar(REGEX_KIND, "(.*a.{22}b|.*b.{23}a|.*c.{24}d).*zzzzq", None)
    rows = [(row_grammar(text), random.Random(seed), list[int]()) for seed in range(5)]
    innocent, plain = rows[-1][0], vocabulary.tokens.index(b"x")
    for _ in range(1900):
        grammars.begin_step()
        for grammar, rng, output in rows:
            assert grammars.mask(logits.zero_(), grammar, lambda start, told=output: told[start:]), grammar.fault
            found = set(torch.isfinite(logits).nonzero().flatten().tolist()) - set(vocabulary.eos_token_ids)
            output.append(rng.choice(sorted(found & {plain} if grammar is innocent else found)))
    assert all(grammar.is_second for grammar, *_ in rows)
    assert len({grammar.form for grammar, *_ in rows}) == len(rows)


def test_given_many_rows_that_begin_again_in_one_step_when_that_takes_long_then_the_rest_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_grammars, "_REBUILD_SECONDS", 0.0)
    grammars, rng = Grammars(load), random.Random(3)
    dear, *others = rows = [row_grammar(HOSTILE) for _ in range(4)]
    for grammar in rows:
        allowed(grammars, grammar, [])
    output = list[int]()
    while found := allowed(grammars, dear, output):
        output.append(rng.choice(sorted(found - {EOS})))
    grammars.begin_step()
    assert [allowed(grammars, grammar, [0, 0]) != set() for grammar in others[:2]] == [True, False]
    assert others[1].refusal == GIVEN_UP
    grammars.begin_step()
    assert allowed(grammars, others[2], [0, 0]) != set()


def test_given_rows_that_are_gone_before_their_turn_when_another_samples_then_it_waits_for_its_own_grammar_alone(
    built: list[tuple[str, str]],
) -> None:
    may_go_on = threading.Event()

    def slow() -> Vocabulary:
        may_go_on.wait(20)
        return VOCABULARY

    sampler, count = Sampler(select_backend(CPU), Grammars(slow)), limits().max_num_seqs
    rows = [new_row(i, [5], [i], grammar=f'start: "b"~{i + 1}') for i in range(count)]
    states = states_with(*rows)
    sampler.expect(rows, states)
    last = count - 1
    states.apply(
        StepPlan(epoch=1, step=1, rows=column(), num_new_tokens=column(), freed_rows=list(range(last)), new_rows=[])
    )
    may_go_on.set()
    assert sampler.sample(torch.zeros(1, VOCAB_SIZE), np.array([last]), states).token_ids.tolist() == [1]
    states.clear()
    states.apply(StepPlan(epoch=2, step=0, rows=column(), num_new_tokens=column(), new_rows=rows[:1]))
    sampler.expect(rows[:1], states)
    assert sampler.sample(torch.zeros(1, VOCAB_SIZE), np.array([0]), states).token_ids.tolist() == [1]
    assert [text for text, _ in built] == [f'start: "b"~{count}', 'start: "b"~1']


def test_given_a_grammar_that_took_long_to_build_when_its_row_samples_then_it_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_grammars, "_SECONDS", -1.0)
    grammars, grammar = Grammars(load), row_grammar(CHOICE)
    monkeypatch.setattr(worker_grammars, "_MASK_SECONDS", 0.0)
    assert allowed(grammars, grammar, []) == set()
    assert grammar.form is not None
    assert grammar.seconds >= grammar.form.seconds > 0
    assert grammar.refusal == GIVEN_UP


class Panic(BaseException):
    """As the library's, which is no `Exception`."""


@pytest.mark.parametrize("name", ["deep_copy", "unsafe_compute_mask_ptr", "try_consume_tokens", "is_accepting", "new"])
def test_given_a_library_that_panics_when_a_row_is_followed_then_that_row_alone_is_given_up(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panics:
        def __init__(self, matcher: LLMatcher) -> None:
            self._matcher = matcher

        def __getattr__(self, attribute: str) -> Any:
            return panic if attribute == name else getattr(self._matcher, attribute)

        def deep_copy(self) -> Panics:
            return panic() if name == "deep_copy" else Panics(self._matcher.deep_copy())

    def panic(*_: Any) -> Any:
        raise Panic("a bug")

    def build(tokenizer: LLTokenizer, text: str) -> Any:
        if text != CHOICE:
            return new_matcher(tokenizer, text)
        return panic() if name == "new" else Panics(new_matcher(tokenizer, text))

    monkeypatch.setattr(worker_grammars, "new_matcher", build)
    grammars, grammar = Grammars(load), row_grammar(CHOICE, TURN)
    for _ in range(2):
        assert allowed(grammars, grammar, [1]) == set()
        assert ("a bug" in grammar.fault, grammar.refusal) == (True, "")
    assert allowed(grammars, row_grammar(REGEX), []) != set()


def states_with(*rows: NewRow) -> RequestStates:
    states = RequestStates(limits(), CPU)
    states.apply(StepPlan(epoch=1, step=0, rows=column(), num_new_tokens=column(), new_rows=list(rows)))
    return states


def test_given_rows_with_and_without_grammars_when_sampled_then_each_is_as_alone_and_logprobs_are_of_raw_logits() -> (
    None
):
    kernels = select_backend(CPU)
    logits = 3 * torch.randn(5, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    rows = [
        new_row(0, [1, 2], [0]),
        new_row(1, [5, 5], [1], grammar=CHOICE, logprobs=2),
        new_row(2, [5, 0, 1], [2], prompt_len=1, grammar=CHOICE, temperature=1.0, seed=4),
        new_row(3, [5, 1], [3], prompt_len=1, grammar='start: "b"', stop_token_ids=[TURN]),
        new_row(4, [5], [4], grammar='start: "b"', banned_token_ids=(1, 11)),
    ]
    order = np.arange(5)
    sampled = Sampler(kernels, Grammars(load)).sample(logits.clone(), order, states_with(*rows))
    tokens = sampled.token_ids.tolist()
    assert tokens[0] == int(logits[0].argmax())
    first = sorted(by_hand(LANGUAGES[CHOICE], ""))
    assert tokens[1] == first[int(logits[1, first].argmax())]
    assert tokens[2] in by_hand(LANGUAGES[CHOICE], "ab") == {2, 6}
    assert tokens[3] == max((EOS, TURN), key=lambda i: float(logits[3, i]))
    assert sampled.is_bad.tolist() == [False] * 4 + [True]
    assert sampled.logprobs is not None
    record = sampled.logprobs.records([2])[0]
    assert record.logprob == pytest.approx(float(logits[1].log_softmax(0)[tokens[1]]))
    for row in rows:
        at = np.array([row.row])
        alone = Sampler(kernels, Grammars(load)).sample(logits[at].clone(), at, states_with(row))
        assert alone.token_ids.tolist() == tokens[row.row : row.row + 1]


def test_given_rows_without_a_token_when_sampled_then_those_whose_request_is_to_blame_are_told_apart() -> None:
    logits = torch.zeros(6, VOCAB_SIZE)
    logits[1] = torch.nan
    rows = [
        new_row(0, [5], [0], grammar='start: "b"', allowed_token_ids=(5,)),
        new_row(1, [5], [1], grammar='start: "b"', allowed_token_ids=(5,)),
        new_row(2, [5], [2], grammar="start: X\nX: /c*a/ & /c*b/"),
        new_row(3, [5], [3], grammar=AMBIGUOUS),
        new_row(4, [5, 0, 10], [4], prompt_len=1, grammar=CHOICE),
        new_row(5, [5], [5]),
    ]
    states = states_with(*rows)
    ambiguous = states.sampling.rules[3]
    assert ambiguous is not None
    assert ambiguous.grammar is not None
    ambiguous.grammar.seconds = 2.0
    sampler = Sampler(select_backend(CPU), Grammars(load))
    sampled = sampler.sample(logits.clone(), np.arange(6), states)
    assert sampled.is_bad.tolist() == [True] * 5 + [False]
    assert sampled.refused() == {0: RULED_OUT, 2: RULED_OUT, 3: GIVEN_UP, 4: NOT_FOLLOWED}
    rest = sampled.only(np.array([False, True, True, False, False, True]))
    assert rest.refused() == {2: RULED_OUT}
    without = Sampler(select_backend(CPU), Grammars(fails))
    assert without.sample(logits[:1].clone(), np.array([0]), states_with(rows[0])).refused() == {0: NOT_FOLLOWED}


def fails() -> Vocabulary:
    raise ConfigError("no tokenizer.json")


def test_given_words_when_unpacked_by_the_device_then_the_bits_are_those_that_the_host_sees() -> None:
    words = np.random.default_rng(0).integers(-(2**31), 2**31, 7, np.int64).astype(np.int32)
    for count in (1, 31, 32, 200, 224):
        by_host = np.unpackbits(words.view(np.uint8), bitorder="little")[:count] == 0
        assert unset_bits(torch.from_numpy(words), count).tolist() == by_host.tolist()


def test_given_a_row_with_a_new_owner_when_it_samples_then_its_grammar_begins_anew() -> None:
    sampler = Sampler(select_backend(CPU), Grammars(load))
    states = states_with(new_row(0, [5], [0], grammar='start: "ab"'))
    row = np.array([0])

    def step() -> int:
        token_ids = sampler.sample(torch.zeros(1, VOCAB_SIZE), row, states).token_ids
        states.append(row, token_ids)
        return int(token_ids[0])

    assert [step(), step(), step()] == [0, 1, EOS]
    other = new_row(0, [5, 5, 1], [1], prompt_len=2, grammar='start: "bc"')
    plan = StepPlan(epoch=1, step=1, rows=column(), num_new_tokens=column(), freed_rows=[0], new_rows=[other])
    states.apply(plan)
    assert [step(), step()] == [2, EOS]
    states.clear()
    states.apply(StepPlan(epoch=2, step=0, rows=column(), num_new_tokens=column(), new_rows=[other]))
    assert step() == 2


def unigram(folder: Path) -> Path:
    """A tokenizer whose vocabulary is a list of pieces with scores."""
    write_sentencepiece(folder, ["▁a", "b"])
    pieces = [("<unk>", 0.0), ("▁the", -1.0), ("é", -2.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.model = models.Unigram(pieces, 0, byte_fallback=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("kind", ["bytes", "pieces", "unigram", "demo"])
def test_given_a_tokenizer_when_its_vocabulary_is_read_then_it_has_the_bytes_and_ids_that_the_tokenizer_says(
    kind: str, tmp_path: Path
) -> None:
    makers = {"bytes": write_tokenizer, "unigram": unigram, "pieces": lambda at: write_sentencepiece(at, ["▁a", "b"])}
    folder = resolve_checkpoint(DEMO_MODEL) if kind == "demo" else makers[kind](tmp_path / "model")
    tokenizer = Tokenizer.load(folder)
    size = tokenizer.vocab_size + 5
    vocabulary = Vocabulary.load(folder, size)
    assert vocabulary.tokens == [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)] + [b""] * 5
    assert set(vocabulary.special_ids) == tokenizer.special_ids
    assert vocabulary.eos_token_ids == tokenizer.eos_token_ids
    assert len(Vocabulary.load(folder, 7).tokens) == 7


def test_given_a_tokenizer_that_cannot_be_read_when_its_vocabulary_is_asked_for_then_the_error_names_it(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Vocabulary.load(tmp_path, 5)
    for text in ("{", "{}", '{"model": {"vocab": 5}}'):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ConfigError, match="cannot be read"):
            Vocabulary.load(tmp_path, 5)
