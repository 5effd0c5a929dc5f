"""What a scheduler and its workers say to each other: plans out, results back.

The workers keep one persistent *row* per running choice: its tokens, its block table, its sampling state. A
`StepPlan` is a delta against those rows. Per row the workers hold `num_tokens` (known tokens, prompt and output)
and `num_computed_tokens`; a plan entry (row, n) computes the next n of them. A row samples when this brings
num_computed_tokens up to num_tokens; the sampled token is appended on the workers themselves, so the next plan
may schedule it before its value has reached the scheduler (two steps are in flight).

A decode may be allowed drafts: guesses at the tokens after the last one, found in the row's own text, and computed
along with it. Those that are what sampling gives count, and so does the token sampled after them; the others are
forgotten. So a step may yield more tokens than its plan names, never other ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from novainfer.errors import EngineError, ProtocolError
from novainfer.protocol.codec import Schema
from novainfer.protocol.columns import Column, column
from novainfer.protocol.messages import Logprobs
from novainfer.sampling.params import SamplingParams

KEY_BYTES = 32  # of a chain key

# Why there is no token for a row though its logits were finite; see `StepResult.refused`. Of the first two its request
# is to blame.
RULED_OUT = "ruled out"  # by all of its rules together: a grammar, allowed and banned tokens
GIVEN_UP = "given up"  # a grammar that is too complex, or takes too much time
NOT_FOLLOWED = "not followed"  # a grammar that nobody can follow here


@dataclass(frozen=True, slots=True)
class NewRow:
    """A choice takes a row (first time, or again after preemption or a crash).

    token_ids: all known tokens; the first `prompt_len` are the prompt, the rest count as output (penalties,
    min_tokens, sampling index). num_computed_tokens < len(token_ids): their KV is already in `block_ids`.
    """

    row: int
    token_ids: Column
    prompt_len: int
    num_computed_tokens: int
    block_ids: list[int]
    params: SamplingParams  # seed resolved
    choice: int
    stop_token_ids: list[int] = field(default_factory=list)  # not sampled before min_tokens outputs
    embed: bool = False  # where it would sample it gives the hidden state instead; see `StepResult.embeddings`


@dataclass(frozen=True, slots=True)
class IndexedBlock:
    """A full KV block that the prefix index may hand out: `token_ids` after the prefix with the chain key `parent`."""

    block: int
    parent: bytes
    token_ids: Column  # [block_size]


@dataclass(slots=True)
class StepPlan:
    """One step for all ranks. Applied in this order: freed, copies, new rows, new blocks, then the rows run.

    `rows[i]` computes `num_new_tokens[i]` tokens. Rows that compute one token (decodes) come first.
    grown_rows/grown_blocks: block ids appended to rows' block tables, in order; a row may stand there several times.
    copy_src/copy_dst: whole KV blocks to copy before anything is computed (copy-on-write).
    unindexed/indexed: the blocks that left and entered the scheduler's prefix index since its last plan, no block in
    both; rank 0 keeps the account for a scheduler that has lost it (see `Adopt`). indexed_parents/indexed_ids: what
    `IndexedBlock` says of those that entered, one after the other; see `indexed_blocks`. In nearly every
    step rows fill blocks: a record for each would cost the scheduler more than all else that it says of them.
    is_first: of those that this scheduler sends to ranks that have just said hello. Otherwise a rank that lost the
    first one would begin with the second, and add up with ranks that are a step behind.
    num_drafts: empty, or for each decode how many drafts it may have; it has slots for them.
    """

    epoch: int
    step: int
    rows: Column
    num_new_tokens: Column
    freed_rows: list[int] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    grown_rows: Column = field(default_factory=column)
    grown_blocks: Column = field(default_factory=column)
    copy_src: list[int] = field(default_factory=list)
    copy_dst: list[int] = field(default_factory=list)
    unindexed: list[int] = field(default_factory=list)
    indexed: Column = field(default_factory=column)
    indexed_parents: bytes = b""
    indexed_ids: Column = field(default_factory=column)
    is_first: bool = False
    num_drafts: list[int] = field(default_factory=list)

    def indexed_blocks(self) -> list[IndexedBlock]:
        """Those that entered the index, in order. Raises `ProtocolError` if what is said of them is not for each."""
        count, parents, ids = len(self.indexed), self.indexed_parents, self.indexed_ids
        size = len(ids) // count if count else 0
        if len(parents) != count * KEY_BYTES or len(ids) != count * size or (count and not size):
            raise ProtocolError(f"step {self.step}: {len(parents)} bytes and {len(ids)} ids for {count} indexed blocks")
        return [
            IndexedBlock(block, parents[i * KEY_BYTES : (i + 1) * KEY_BYTES], ids[i * size : (i + 1) * size])
            for i, block in enumerate(self.indexed)
        ]


@dataclass(frozen=True, slots=True)
class RowPromptLogprobs:
    """Log-probabilities of a row's prompt tokens start, start+1, ... computed in this step."""

    row: int
    start: int
    entries: list[Logprobs]


@dataclass(slots=True)
class StepResult:
    """From rank 0: what the step sampled. `rows` are the plan's rows that sampled, in the plan's order.

    A row with drafts stands there once for each of its tokens. num_drafted: empty, or for each entry of the plan's
    `num_drafts` how many drafts there were. refused: those of the bad rows whose logits were finite, and why.
    embeddings: of the rows that want one, the last token's hidden state after the final norm, [hidden_size] float32,
    little-endian; their token is 0 and means nothing.
    """

    epoch: int
    step: int
    rows: Column
    token_ids: Column  # [len(rows)]
    logprobs: list[Logprobs | None] = field(default_factory=list)  # empty, or [len(rows)]
    prompt_logprobs: list[RowPromptLogprobs] = field(default_factory=list)
    bad_rows: list[int] = field(default_factory=list)  # rows without a token: that request's error
    num_drafted: list[int] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    embeddings: dict[int, bytes] = field(default_factory=dict)

    def embedding_of(self, row: int) -> bytes:
        """That of a row which wants one, and is not bad. Raises `EngineError` if there is none."""
        if row not in self.embeddings:
            raise EngineError(f"step {self.step}: row {row} has no embedding")
        return self.embeddings[row]


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """A rank has loaded its weights and KV cache and waits for plans; said again and again while none comes.

    group: the epoch in which its group was started.   epoch: that of the newest scheduler that it has heard from: its
    last plan's, or the one of the `Adopt` that this hello answers.
    held: rank 0's in an answer to `Adopt`: the indexed blocks, by their last entry into the index.
    """

    epoch: int
    group: int
    rank: int
    world_size: int
    num_blocks: int
    block_size: int
    vocab_size: int  # width of the logits
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    held: list[IndexedBlock] = field(default_factory=list)
    mode: str = ""  # see `novainfer.mode`; the same on every rank
    can_draft: bool = False  # plans may have `num_drafts`
    hidden_size: int = 0  # of the model


@dataclass(frozen=True, slots=True)
class WorkerFault:
    """A rank cannot go on; the whole tensor-parallel group must be replaced."""

    group: int
    rank: int
    message: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Leave the step loop and exit."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """A new scheduler takes the group over: work in this epoch, forget all rows, keep the KV blocks, say hello."""

    epoch: int


WORKER_SCHEMA = Schema("worker", {1: StepPlan, 2: Shutdown, 3: Adopt, 16: StepResult, 17: WorkerHello, 18: WorkerFault})
