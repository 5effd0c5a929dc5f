"""The journal takes every token once, in order, from the newest engine; and can always say how to go on."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from novainfer.client.journal import Journal, JournalEntry
from novainfer.errors import ProtocolError
from novainfer.protocol.messages import AddRequest, Logprobs, PromptLogprobs, TokenOutput
from novainfer.sampling.params import SamplingParams

pytestmark = [pytest.mark.unit, pytest.mark.stage2]


def entry_of(n: int = 1, **fields: object) -> JournalEntry:
    request = AddRequest("r", [1, 2], SamplingParams(n=n, seed=1), **fields)  # type: ignore[arg-type]
    return JournalEntry(request, accepted_at=100.0, epoch=1)


def tokens(index: int, ids: list[int], choice: int = 0, finish: str | None = None) -> TokenOutput:
    logprobs = [Logprobs(token_id, -1.0, 1) for token_id in ids]
    return TokenOutput("r", choice, index, ids, finish, logprobs=logprobs)


def test_given_an_overlap_when_accepted_then_only_new_tokens_and_their_logprobs_come_back() -> None:
    entry = entry_of()
    entry.accept(tokens(0, [5, 6]), 1)
    fresh = entry.accept(tokens(1, [6, 7, 8]), 1)
    assert fresh is not None
    assert (fresh.index, fresh.token_ids, [lp.token_id for lp in fresh.logprobs]) == (2, [7, 8], [7, 8])
    assert entry.emitted == [[5, 6, 7, 8]]


def test_given_known_tokens_when_they_come_again_then_nothing_comes_back() -> None:
    entry = entry_of()
    entry.accept(tokens(0, [5, 6]), 1)
    assert entry.accept(tokens(0, [5, 6]), 1) is None
    assert entry.accept(tokens(0, [5]), 2) is None


def test_given_an_end_without_tokens_when_accepted_then_it_counts() -> None:
    entry = entry_of()
    fresh = entry.accept(tokens(0, [], finish="length"), 1)
    assert fresh is not None
    assert entry.finished
    assert entry.accept(tokens(0, [1]), 1) is None


def test_given_a_gap_or_a_different_token_when_accepted_then_protocol_error() -> None:
    entry = entry_of()
    entry.accept(tokens(0, [5]), 1)
    with pytest.raises(ProtocolError, match="lost"):
        entry.accept(tokens(2, [7]), 1)
    with pytest.raises(ProtocolError, match="differs"):
        entry.accept(tokens(0, [9, 9]), 1)
    with pytest.raises(ProtocolError, match="choice"):
        entry.accept(tokens(0, [9], choice=1), 1)
    assert entry.emitted == [[5]]


def test_given_a_newer_epoch_when_an_older_one_speaks_then_it_is_dropped() -> None:
    entry = entry_of()
    entry.accept(tokens(0, [5]), 3)
    assert entry.accept(tokens(1, [6]), 2) is None
    assert entry.emitted == [[5]]


def test_given_prompt_logprobs_when_they_come_again_after_a_restart_then_each_is_taken_once() -> None:
    entry = entry_of()
    parts = [Logprobs(i, -1.0, 1) for i in range(1, 6)]
    assert entry.accept_prompt_logprobs(PromptLogprobs("r", 1, parts[:2]), 1) is not None
    fresh = entry.accept_prompt_logprobs(PromptLogprobs("r", 1, parts), 2)
    assert fresh is not None
    assert (fresh.start, [e.token_id for e in fresh.entries]) == (3, [3, 4, 5])
    with pytest.raises(ProtocolError, match="missing"):
        entry.accept_prompt_logprobs(PromptLogprobs("r", 9, parts), 2)


def test_given_a_resume_when_asked_then_it_holds_what_was_emitted_and_the_time_left() -> None:
    entry = entry_of(n=2, deadline=10.0, tenant="t")
    entry.accept(tokens(0, [5, 6]), 1)
    entry.accept(tokens(0, [7], choice=1, finish="stop"), 1)
    resumed = entry.resume_request(now=104.0)
    assert (resumed.emitted, resumed.deadline, resumed.tenant) == ([[5, 6], [7]], 6.0, "t")
    assert entry.finished_choices == [1]
    assert entry.resume_request(now=200.0).deadline > 0


def test_given_a_cancel_when_all_choices_end_then_the_entry_is_finished() -> None:
    entry = entry_of(n=2)
    entry.accept(tokens(0, [7], finish="stop"), 1)
    entry.cancel(1)
    assert entry.finish_reasons == ["stop", "cancelled"]


def test_given_ids_when_added_and_removed_then_the_journal_holds_each_once() -> None:
    journal, entry = Journal(), entry_of()
    journal.add(entry)
    with pytest.raises(ValueError, match="already"):
        journal.add(entry_of())
    assert ([*journal], len(journal), journal.get("r")) == ([entry], 1, entry)
    assert journal.remove("r") is entry
    assert journal.remove("r") is None


@settings(deadline=None)
@given(seed=st.integers(0, 2**32))
def test_given_loss_after_a_crash_and_duplicates_when_resumed_then_the_stream_is_exact(seed: int) -> None:
    chance = random.Random(seed)
    oracle = [chance.randrange(100) for _ in range(chance.randrange(1, 30))]
    entry, seen, epoch = entry_of(), [], 1
    while not entry.finished:
        position = len(entry.resume_request().emitted[0])  # a new engine starts here
        crash_at = chance.randint(position, len(oracle))
        while position < crash_at:
            end = chance.randint(position + 1, crash_at)
            message = tokens(position, oracle[position:end], finish="length" if end == len(oracle) else None)
            for _ in range(chance.randint(1, 2)):
                fresh = entry.accept(message, epoch)
                seen += fresh.token_ids if fresh else []
            position = end
        epoch += 1
    assert seen == oracle == entry.emitted[0]


def test_given_tokens_found_in_the_cache_when_another_engine_goes_on_then_their_number_is_the_one_first_told() -> None:
    entry = entry_of()
    assert entry.resume_request().num_cached_tokens == -1
    for index, cached in enumerate((16, 48)):
        entry.accept(replace(tokens(index, [5]), num_cached_tokens=cached), 1 + index)
    assert entry.resume_request().num_cached_tokens == 16
