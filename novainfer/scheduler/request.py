"""The scheduler's view of a request: one `Sequence` per choice. Only the scheduler's thread writes here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter

from novainfer.kv.manager import BlockTable
from novainfer.kv.prefix_index import root_key
from novainfer.protocol.columns import Column, column
from novainfer.protocol.messages import FINISH_LENGTH, FINISH_STOP, AddRequest, Logprobs, Notes, TokenOutput
from novainfer.sampling.params import SamplingParams
from novainfer.scheduler.drafts import DraftPace

NO_ROW = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request: its tokens, how far they are computed, and what it holds on the workers.

    A step in flight may have sampled tokens whose values are not here yet: `num_pending` of them. So the
    sequence has `num_tokens` = known + pending tokens, of which `num_computed_tokens` are computed by the
    steps submitted so far, and `num_confirmed_tokens` by the steps whose results have come back.
    Drafts that come true are added to all three when their step's result is here.
    """

    request: Request
    choice: int
    token_ids: Column  # prompt, then known output
    params: SamplingParams
    table: BlockTable
    stop_token_ids: frozenset[int]
    # The same as the request's, which every step would look up for every row.
    request_id: str
    tenant: str
    prompt_len: int
    end_len: int  # tokens when it has all of max_tokens
    ref: int  # its gateway's number for it; negative: it has none
    # Arrival, then choice: for memory no running sequence of a tenant is preempted before a younger one.
    age: tuple[int, int]
    row: int = NO_ROW
    num_pending: int = 0  # at least; with drafts there may be up to `num_ahead` more
    num_ahead: int = 0  # drafts in flight: each may become one more pending, and one more computed token
    num_computed_tokens: int = 0
    num_confirmed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens that the first admission found in the prefix cache
    generation: int = 0  # raised at each preemption: results of older steps no longer confirm KV
    num_preemptions: int = 0
    num_fair_preemptions: int = 0  # of those: for the sake of another tenant
    num_passed: int = 0  # others that started before it while it lacked blocks
    num_charged_tokens: int = 0  # tokens up to here were charged to its tenant, or were found in the cache
    last_step: int = 0  # the newest plan with a token of it
    # `Cohort` alone writes these three. While `joined` is not 0, the counters above lack the plans from `joined` on.
    joined: int = 0
    settled: int = 0  # step of the newest result that is in `token_ids`
    first_index: int = 0  # output index of the token of step n, less n
    work: int = 0  # units of service that it got: see `fairness`
    drafts: DraftPace | None = None  # None: it may have no drafts
    begun_at: float = 0.0  # see `timing`; 0: not measured
    first_token_at: float = 0.0
    finished: bool = False
    notes: Notes | None = None  # None: its client does not want to know
    embeds: bool = False  # it ends with its prompt's vector, which comes in place of its first token

    @property
    def num_tokens(self) -> int:
        """Known and pending tokens."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output(self) -> int:
        """Known output tokens."""
        return len(self.token_ids) - self.prompt_len

    @property
    def is_running(self) -> bool:
        return self.row != NO_ROW

    def lose_workers(self) -> None:
        """Forget what the workers held: only the known tokens are left, and all of them must be computed again."""
        self.table.clear()
        self.row = NO_ROW
        self.num_pending = self.num_ahead = self.num_computed_tokens = self.num_confirmed_tokens = 0
        self.begun_at = self.first_token_at = 0.0
        self.generation += 1

    def take(self, token_id: int) -> str | None:
        """Add a sampled token that was pending. Why the sequence ends with it, if it does."""
        self.token_ids.append(token_id)
        may_end = token_id in self.stop_token_ids or len(self.token_ids) >= self.end_len
        return self.finish_reason() if may_end else None

    def finish_reason(self) -> str | None:
        """Why it ends with its last known token, if it does."""
        num_output = self.num_output
        if num_output == 0:
            return None
        if self.token_ids[-1] in self.stop_token_ids and num_output > self.params.min_tokens:
            return FINISH_STOP
        return FINISH_LENGTH if len(self.token_ids) >= self.end_len else None

    def output(
        self,
        index: int,
        token_ids: list[int],
        reason: str | None,
        *,
        logprobs: list[Logprobs] | None = None,
        error: str | None = None,
    ) -> TokenOutput:
        """What its client gets: the tokens from output index `index` on, and its end if `reason` is given."""
        return TokenOutput(
            request_id=self.request_id,
            choice=self.choice,
            index=index,
            token_ids=token_ids,
            finish_reason=reason,
            stop_token_id=self.token_ids[-1] if reason == FINISH_STOP else None,
            logprobs=logprobs or [],
            num_cached_tokens=max(self.request.num_cached_tokens, 0),
            error=error,
            notes=None if reason is None else self.told_notes(),
        )

    def embedded(self, vector: bytes) -> TokenOutput:
        """What the client of one that embeds gets: see `TokenOutput.embedding`."""
        return replace(self.output(0, [], FINISH_STOP), stop_token_id=None, embedding=vector)

    def told_notes(self) -> Notes | None:
        """What is noted of it so far, as its client gets it."""
        return None if self.notes is None else replace(self.notes, preemptions=self.num_preemptions)

    def note_computed(self, start: int, end: int) -> None:
        """These of its tokens are computed next: note how many were before, here or by who had the request then.

        To be called before they are charged.
        """
        if self.notes is not None:
            emitted = self.request.message.emitted
            sent = emitted[self.choice] if self.choice < len(emitted) else []
            known = self.prompt_len + len(sent) - 1 if sent else 0
            self.notes.recomputed_tokens += max(min(end, max(self.num_charged_tokens, known)) - start, 0)

    @property
    def order(self) -> tuple[int, ...]:
        """Who of one tenant starts first: priority (lower first), what is resumed, arrival, choice. A total order."""
        message = self.request.message
        return (message.priority, not message.emitted, *self.age)

    @property
    def work_left(self) -> int:
        """Units of service until its end, if it uses all of max_tokens and nothing of it is cached."""
        num_output = self.num_output
        leads = self.choice == 0 or num_output > 0
        return (len(self.token_ids) if leads else 0) + 2 * (self.end_len - len(self.token_ids))


by_age = attrgetter("age")  # to sort sequences


@dataclass(slots=True, eq=False)
class Request:
    """An accepted request and its choices."""

    message: AddRequest
    arrival: int  # running number
    accepted_at: float  # on the scheduler's clock, seconds
    deadline: float  # the same; inf = none
    told_cached_tokens: int  # `num_cached_tokens`, as far as its choices do not tell
    sequences: list[Sequence] = field(default_factory=list)
    followers: list[Sequence] = field(default_factory=list)  # wait until choice 0 has computed the prompt
    prompt_computed: bool = False  # choice 0's blocks hold the whole prompt, by plans submitted before the next one

    @property
    def request_id(self) -> str:
        return self.message.request_id

    @property
    def prompt_len(self) -> int:
        return len(self.message.prompt_token_ids)

    @property
    def max_tokens(self) -> int:
        return self.message.params.max_tokens

    def has_name(self, tenant: str, alias: str) -> bool:
        """Whether the tenant knows it by this alias."""
        return self.message.tenant == tenant and alias in self.message.aliases

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache when it first began, in whichever engine; -1: it has not yet."""
        told = self.told_cached_tokens
        if told >= 0 or not self.sequences or not self.sequences[0].last_step:
            return told
        return self.sequences[0].num_cached_tokens

    @property
    def finished(self) -> bool:
        return False not in [sequence.finished for sequence in self.sequences]

    def part_from_choices(self) -> None:
        """Its choices have all ended: now they know a copy that does not know them, while who keeps the request still
        finds them. Else long prompts would stay in memory until a garbage collection finds the circle.
        """
        closed = Request(self.message, self.arrival, self.accepted_at, self.deadline, self.num_cached_tokens)
        closed.prompt_computed = self.prompt_computed
        for sequence in self.sequences:
            sequence.request = closed


def make_request(message: AddRequest, arrival: int, now: float, *, may_draft: bool = False) -> Request:
    """Build the sequences of an accepted message; resumed ones start with the tokens already emitted."""
    deadline = now + message.deadline if message.deadline > 0 else float("inf")
    request = Request(message, arrival, now, deadline, message.num_cached_tokens)
    params = message.params
    eos = () if params.ignore_eos else tuple(message.eos_token_ids)
    stop_token_ids = frozenset((*params.stop_token_ids, *eos))
    root = root_key(message.tenant, message.cache_salt)
    may_draft = may_draft and not (params.penalises or params.grammar or message.embed)
    use_cache = message.use_prefix_cache and params.prompt_logprobs is None
    prompt = column(message.prompt_token_ids)
    for choice in range(params.n):
        emitted = message.emitted[choice] if choice < len(message.emitted) else []
        request.sequences.append(
            Sequence(
                request=request,
                choice=choice,
                token_ids=prompt + column(emitted) if emitted else prompt[:],
                # The prompt's log-probabilities are the same for every choice: computed once, with choice 0.
                params=params if choice == 0 else replace(params, prompt_logprobs=None),
                table=BlockTable(root, use_cache),
                stop_token_ids=stop_token_ids,
                request_id=message.request_id,
                tenant=message.tenant,
                prompt_len=len(message.prompt_token_ids),
                end_len=len(message.prompt_token_ids) + params.max_tokens,
                ref=message.ref + choice if message.ref >= 0 else -1,
                age=(arrival, choice),
                drafts=DraftPace() if may_draft else None,
                notes=Notes(message.request_id, choice) if message.explain else None,
                embeds=message.embed,
            )
        )
    return request


def as_it_is_now(sequence: Sequence, requests: Mapping[str, Request]) -> Sequence:
    """It, or the same choice of its request, if that was sent again since. requests: those that are live, by id."""
    request = requests.get(sequence.request_id)
    if request is None or sequence.choice >= len(request.sequences):
        return sequence
    return request.sequences[sequence.choice]
