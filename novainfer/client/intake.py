"""What a scheduler says of tokens, taken into a gateway's journal; what is new there goes to the requests' readers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from novainfer.client.journal import Journal, JournalEntry, LiveChoice
from novainfer.client.stream import Backlog, ShortWay, Sink, StreamItem
from novainfer.errors import ProtocolError
from novainfer.protocol.messages import OutputBatch, PromptLogprobs, TokenOutput

log = logging.getLogger(__name__)


class Intake:
    """The tokens of one session.

    backlog: while it is behind, tokens of short ways are held back, and told together in `flush`.
    ended: called with the id of a request that has its last output.   broken: with that of one that cannot go on.
    """

    def __init__(
        self,
        journal: Journal,
        sinks: Mapping[str, Sink],
        backlog: Backlog,
        ended: Callable[[str], None],
        broken: Callable[[str], None],
    ) -> None:
        self.num_tokens = 0
        self._journal = journal
        self._sinks = sinks
        self._backlog = backlog
        self._ended = ended
        self._broken = broken
        self._held: dict[int, int] = {}  # by reference: the first place in its choice that was not told

    def take(self, batch: OutputBatch) -> None:
        """All of one message. Raises `ProtocolError` for one that no scheduler sends."""
        for item in batch.prompt_logprobs:
            self._take(item, batch.epoch)
        if not batch.has_even_columns:
            raise ProtocolError("a batch's columns are of different lengths")
        for notes in batch.notes:  # before their choices may end
            entry = self._journal.get(notes.request_id)
            if entry is not None and entry.noted is not None:
                entry.noted.take(notes)
        self.num_tokens += len(batch.token_ids) + sum([len(output.token_ids) for output in batch.outputs])
        for ref, cached in zip(batch.begun_refs, batch.begun_cached, strict=False):
            if (live := self._journal.choices.get(ref)) is not None and live.entry.num_cached_tokens < 0:
                live.entry.num_cached_tokens = cached
        if self._backlog.is_behind or len(set(batch.refs)) < len(batch.refs):
            self._hold_tokens(batch)
            if not self._backlog.is_behind:
                self.flush()
        else:
            self.flush()
            self._pour_tokens(batch)
        for output in batch.outputs:
            self._take(output, batch.epoch)

    def flush(self) -> None:
        """Tell what is held back."""
        while self._held:
            self._flush(next(iter(self._held)))

    def _pour_tokens(self, batch: OutputBatch) -> None:
        """The plain tokens of a step: nearly all that there is. Between two of a choice others have their turn, so that
        all that is looked at is out of the caches: of one with a short way nothing but that is.
        """
        ways, base = self._journal.ways, batch.base
        taken: list[tuple[ShortWay, int]] = []
        for ref, offset, token_id in zip(batch.refs, batch.offsets, batch.token_ids, strict=False):
            index = base + offset
            way = ways.get(ref)
            if way is not None and way.is_open and len(way.emitted) == index:
                way.emitted.append(token_id)
                taken.append((way, token_id))
            elif (live := self._journal.choices.get(ref)) is not None:
                self._take_token(live, index, token_id, batch.epoch)
        if taken:
            type(taken[0][0]).pour(taken)

    def _take_token(self, live: LiveChoice, index: int, token_id: int, epoch: int) -> None:
        if live.goes_on(index, epoch):
            request_id = live.entry.request.request_id
            live.emitted.append(token_id)
            self._sinks[request_id].push_token(request_id, live.choice, index, token_id)
        else:
            self._take(_plain_output(live, index, [token_id]), epoch)

    def _hold_tokens(self, batch: OutputBatch) -> None:
        """Plain tokens of several steps, or of one while more wait behind it: of each choice they are told together."""
        ways, choices, held, base = self._journal.ways, self._journal.choices, self._held, batch.base
        others: dict[int, list[tuple[int, list[int]]]] = {}  # that do not just go on: first index and ids of each run
        for ref, offset, token_id in zip(batch.refs, batch.offsets, batch.token_ids, strict=False):
            index = base + offset
            way = ways.get(ref)
            if way is not None and way.is_open and len(way.emitted) == index:
                emitted = way.emitted
            elif (live := choices.get(ref)) is None:
                continue
            elif live.goes_on(index, batch.epoch):
                emitted = live.emitted
            else:
                runs = others.setdefault(ref, [])
                if runs and runs[-1][0] + len(runs[-1][1]) == index:
                    runs[-1][1].append(token_id)
                else:
                    runs.append((index, [token_id]))
                continue
            emitted.append(token_id)
            if ref not in held:
                held[ref] = index
        for ref, runs in others.items():
            for index, token_ids in runs:
                live = self._journal.choices.get(ref)
                if live is not None:
                    self._take(_plain_output(live, index, token_ids), batch.epoch)

    def _flush(self, ref: int) -> None:
        """Tell what is held back of one choice."""
        index = self._held.pop(ref)
        live, way = self._journal.choices.get(ref), self._journal.ways.get(ref)
        if live is None:
            return
        token_ids = live.emitted[index:]
        if way is not None and way.is_open:
            way.pour_run(token_ids)
        else:
            self._sinks[live.entry.request.request_id].push(_plain_output(live, index, token_ids))

    def _take(self, output: StreamItem, epoch: int) -> None:
        entry = self._journal.get(output.request_id)
        if entry is None:
            return
        if isinstance(output, TokenOutput) and entry.request.ref + output.choice in self._held:
            self._flush(entry.request.ref + output.choice)
        try:
            self._dispatch(entry, output, epoch)
        except ProtocolError as error:
            log.error("request ended by a fault in its stream: %s", error)
            self._broken(output.request_id)

    def _dispatch(self, entry: JournalEntry, output: StreamItem, epoch: int) -> None:
        fresh: StreamItem | None
        if isinstance(output, PromptLogprobs):
            fresh = entry.accept_prompt_logprobs(output, epoch)
        else:
            fresh = entry.accept(output, epoch)
        if fresh is None:
            return
        self._journal.end_ways(entry)
        self._sinks[output.request_id].push(fresh)
        if entry.finished:
            self._ended(output.request_id)


def _plain_output(live: LiveChoice, index: int, token_ids: list[int]) -> TokenOutput:
    """Tokens of a choice of which there is no more to tell."""
    entry = live.entry
    cached = max(entry.num_cached_tokens, 0)
    return TokenOutput(entry.request.request_id, live.choice, index, token_ids, num_cached_tokens=cached)
