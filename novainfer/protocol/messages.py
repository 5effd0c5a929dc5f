"""What gateways and a scheduler say to each other. One record per fact; see `codec` for the wire form.

Gateway -> scheduler: Hello, Heartbeat, AddRequest, CancelRequest, Told, CancelAlias, ClaimRequest, ReleaseClaim.
Scheduler -> gateway: EngineInfo, OutputBatch, RequestRejected, EngineStats, AliasCancelled, Claimed, Unlinked.
They travel as numbered packets (see `link`). Every token carries (epoch, request_id, choice, index): a consumer drops
older epochs and indexes that it has, and treats a gap as a fault.

Nobody changes a record. Those that are made for each request or step are not frozen: that would take three times as
long.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, fields
from operator import attrgetter

from novainfer.protocol.codec import Schema
from novainfer.protocol.columns import Column, column
from novainfer.sampling.params import SamplingParams

FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISH_CANCELLED = "cancelled"
FINISH_ERROR = "error"
FINISH_REFUSED = "refused"  # an error that is the request's own, found while it ran


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens a link; answered by EngineInfo, now and again whenever it changes. `gateway_id`: of one gateway process."""

    gateway_id: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A gateway lives, and has taken the packets below this number."""

    received: int


@dataclass(slots=True)
class AddRequest:
    """One accepted request, every default resolved; exactly what the gateway's journal holds.

    `emitted[c]` are the token ids of choice c that the journal already has: empty at first, filled when a
    request is resumed after a crash, so that the engine goes on at index len(emitted[c]).
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: list[int] = field(default_factory=list)
    tenant: str = ""
    cache_salt: str = ""
    use_prefix_cache: bool = True
    priority: int = 0
    deadline: float = 0.0  # seconds from acceptance, 0 = none
    emitted: list[list[int]] = field(default_factory=list)
    aliases: list[str] = field(default_factory=list)  # what else its tenant knows it by, at every gateway
    answer: str = ""  # how the gateway writes the answer, for a gateway that takes the request over
    num_cached_tokens: int = -1  # prompt tokens found in the prefix cache when it first began; -1: it has not yet
    ref: int = -1  # the gateway's number for choice 0, the next ones for the others; -1: its tokens are spelled out
    explain: bool = False  # it wants `Notes`
    embed: bool = False  # it wants its prompt's vector, and no token; see `TokenOutput`

    def numbered(self, ref: int) -> AddRequest:
        """The same with this number: `replace`, which asks for each field by itself, for what every request needs."""
        return AddRequest(*(*_before_ref(self), ref, self.explain, self.embed))


_before_ref = attrgetter(*[one.name for one in fields(AddRequest)][:-3])  # all but `ref` and what comes behind it


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """End a request, or one choice of it (`choice` >= 0). `complete`: a stop string was found, the answer is whole."""

    request_id: str
    choice: int = -1
    complete: bool = False


@dataclass(frozen=True, slots=True)
class Told:
    """The reader of a stream that has ended has all of it: nobody will ask for it any more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class CancelAlias:
    """End the tenant's requests with this alias, whichever gateway they came from; answered by AliasCancelled."""

    query: int
    tenant: str
    alias: str


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """Which of the tenant's streams with this alias lost their gateway, or have just ended? Answered by Claimed."""

    query: int
    tenant: str
    alias: str


@dataclass(frozen=True, slots=True)
class ReleaseClaim:
    """The gateway will not take over this request that it has claimed: whoever asks next may have it."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Unlinked:
    """The packet's link is not, or no longer, known to the scheduler of this epoch, nor are any requests of it."""

    epoch: int


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The engine as the workers report it; `ready` is False while ranks are missing."""

    epoch: int
    ready: bool
    vocab_size: int = 0  # width of the logits
    max_model_len: int = 0  # tokens
    block_size: int = 0  # tokens
    num_blocks: int = 0
    max_num_seqs: int = 0
    mode: str = ""  # see `novainfer.mode`
    hidden_size: int = 0  # numbers of an embedding
    max_num_batched_tokens: int = 0  # of one step


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities at one position: the token itself, then the alternatives by falling probability."""

    token_id: int
    logprob: float
    rank: int  # 1 = most probable
    top_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)


WAITED_ROWS, WAITED_BLOCKS, WAITED_TOKENS = "rows", "kv_blocks", "tokens"  # for what a choice may wait at the queue
WAITED_SHARE, WAITED_GRAMMAR, WAITED_WORKERS = "share", "grammar", "workers"


@dataclass(slots=True)
class Notes:
    """Where the time of one choice went, of a request that asks (`AddRequest.explain`), since its engine has it.

    queue_seconds: from its acceptance until its first step was put together; -1: it had none yet.
    prefill_steps: with tokens of its prompt, until its first token.   recomputed_tokens: that were lost and came again.
    waited_for: what it waited for longest before its first step; "": it did not wait.
    restarts: see `JournalEntry`, which writes it.
    """

    request_id: str
    choice: int
    queue_seconds: float = -1.0
    prefill_steps: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    waited_for: str = ""
    restarts: int = 0


@dataclass(slots=True)
class TokenOutput:
    """New tokens of one choice; `index` is the output index of `token_ids[0]`. Terminal if `finish_reason`.

    logprobs: those of its last tokens; tokens that a request brought along from another gateway have none.
    notes: with the end of a choice whose request asked for them.
    embedding: with the end ('stop') of one that wants it: [hidden_size] float32, little-endian, not normalised.
    """

    request_id: str
    choice: int
    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_token_id: int | None = None
    logprobs: list[Logprobs] = field(default_factory=list)
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    error: str | None = None  # text for the finish reasons "error" and "refused"
    notes: Notes | None = None
    embedding: bytes = b""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens start, start+1, ... (never of token 0, which has none)."""

    request_id: str
    start: int
    entries: list[Logprobs]


@dataclass(slots=True)
class OutputBatch:
    """All that one step has for one gateway, in one message.

    Choice refs[i] (see `AddRequest.ref`) gets token_ids[i] at output index base + offsets[i]: most tokens, for which
    there is no more to say. The offsets of the same choices are the same in the next step, whose base is one more. Of
    one choice they come before its `outputs`. Choice begun_refs[i] gets its first token with this batch, or one before;
    begun_cached[i] prompt tokens of its request were found in the prefix cache. notes: of choices that asked for
    them, where they have changed: a gateway may end one before the scheduler does.
    """

    epoch: int
    step: int
    outputs: list[TokenOutput]
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    refs: Column = field(default_factory=column)
    offsets: Column = field(default_factory=column)
    token_ids: Column = field(default_factory=column)
    begun_refs: list[int] = field(default_factory=list)
    begun_cached: list[int] = field(default_factory=list)
    base: int = 0
    notes: list[Notes] = field(default_factory=list)

    @property
    def has_even_columns(self) -> bool:
        """Whether those that belong together are of one length."""
        num = len(self.refs)
        return num == len(self.offsets) == len(self.token_ids) and len(self.begun_refs) == len(self.begun_cached)


@dataclass(frozen=True, slots=True)
class RequestRejected:
    """The request was not accepted: `status` is the HTTP status to answer (400, 429, 503)."""

    request_id: str
    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float = 0.0  # seconds


@dataclass(frozen=True, slots=True)
class AliasCancelled:
    """The answer to the gateway's CancelAlias with the same `query`: whether there was such a request."""

    query: int
    found: bool


@dataclass(frozen=True, slots=True)
class Claimed:
    """The answer to the gateway's ClaimRequest with the same `query`.

    `emitted` holds their tokens so far. Whoever sends one of them as a request takes it over, or says ReleaseClaim.
    is_owned: there is one that has a gateway, as far as the scheduler knows, or that is claimed already; then there are
    no `requests`.   num_tokens[i][c]: how many tokens choice c of request i has ended with, -1 while it goes on.
    """

    query: int
    requests: list[AddRequest]
    is_owned: bool
    num_tokens: list[list[int]] = field(default_factory=list)


TIME_BUCKETS = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480, 960,
)  # fmt: skip


@dataclass(slots=True)
class Spread:
    """How often a time was of which length. counts: one per bucket of `TIME_BUCKETS` (upper bounds, seconds), and one
    for what is above; not summed up. total: seconds.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(TIME_BUCKETS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        """One more."""
        self.counts[bisect_left(TIME_BUCKETS, seconds)] += 1
        self.total += seconds


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges and running totals of one scheduler, sent several times a second and on Hello.

    `step` moving, or `num_running == num_waiting == 0`, is what health means.
    """

    epoch: int
    step: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    accepted_total: int = 0
    finished_total: dict[str, int] = field(default_factory=dict)  # by finish reason
    prompt_tokens_total: int = 0
    cached_prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    preemptions_total: int = 0
    seconds_since_progress: float = 0.0
    drafted_total: int = 0  # tokens guessed, see `StepPlan.num_drafts`
    drafts_accepted_total: int = 0
    queue_seconds: float = 0.0  # estimate: in how many seconds what waits now will have started
    choices_accepted_total: int = 0  # = all of finished_total + num_running + num_waiting
    # Of choices, see `novainfer.scheduler.timing`.
    queue_time: Spread = field(default_factory=Spread)
    prefill_time: Spread = field(default_factory=Spread)
    decode_time: Spread = field(default_factory=Spread)
    inference_time: Spread = field(default_factory=Spread)


GATEWAY_SCHEMA = Schema(
    "gateway",
    {
        1: Hello,
        2: AddRequest,
        3: CancelRequest,
        4: CancelAlias,
        5: Heartbeat,
        6: ClaimRequest,
        7: Told,
        8: ReleaseClaim,
        16: EngineInfo,
        17: OutputBatch,
        18: RequestRejected,
        19: EngineStats,
        20: AliasCancelled,
        21: Claimed,
        22: Unlinked,
    },
)
