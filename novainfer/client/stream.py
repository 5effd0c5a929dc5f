"""What a reader of live requests sees: their outputs, where whatever piled up while it was away is merged."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from novainfer.errors import EngineError, InvalidRequestError
from novainfer.protocol.merge import merge_outputs, merge_prompt_logprobs
from novainfer.protocol.messages import FINISH_ERROR, FINISH_REFUSED, PromptLogprobs, TokenOutput

StreamItem = TokenOutput | PromptLogprobs


class Sink(Protocol):
    """Where a request's outputs go."""

    def push(self, item: StreamItem) -> None:
        """One more output."""
        ...

    def push_token(self, request_id: str, choice: int, index: int, token_id: int) -> None:
        """One more token with nothing else to tell: `push` of a `TokenOutput`, in short."""
        ...

    def end(self, request_id: str, error: Exception | None = None) -> None:
        """The last word on a request."""
        ...


class ShortWay(ABC):
    """Takes further plain tokens of one live choice, past its stream.

    is_open: it takes a token now: nothing waits before it. emitted: the journal's tokens of the choice; there it stands
    already when it is poured.
    """

    __slots__ = ("emitted", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        self.emitted: list[int] = []

    @classmethod
    @abstractmethod
    def pour(cls, taken: list[tuple[Any, int]]) -> None:
        """All that one step has for ways of this class, a token for each. Raises nothing: others' tokens are behind."""

    @abstractmethod
    def pour_run(self, token_ids: list[int]) -> None:
        """Several tokens for this one, held back while its gateway was behind. Raises nothing, either."""


@dataclass(slots=True)
class Backlog:
    """Of what comes from the engine. is_behind: more has piled up than the output that is being handled."""

    is_behind: bool = False


class RequestStream:
    """The outputs of one or several requests that were submitted together.

    `take_ready` gives `TokenOutput` and `PromptLogprobs` (of one choice always in order) until `finished`. It raises
    what ended a request early: `InvalidRequestError`, `OverloadedError`, `EngineError`.
    Tokens that arrive while nobody reads are merged, so a slow reader costs memory for its tokens and nothing else.
    `close` must be called in the end, read or not; it cancels what is still live.
    """

    __slots__ = (
        "_backlog",
        "_cancel",
        "_error",
        "_live",
        "_order",
        "_pending",
        "_request_ids",
        "_shorten",
        "_told",
        "_waiter",
        "_ways",
        "direct",
    )

    def __init__(
        self,
        request_ids: Iterable[str],
        cancel: Callable[[str, int, bool], None],
        told: Callable[[str], None] = lambda request_id: None,
        backlog: Backlog | None = None,
        shorten: Callable[[str, int, ShortWay], None] = lambda request_id, choice, way: None,
    ) -> None:
        """`cancel`, `told`, `shorten`: see `GatewaySession`."""
        self._request_ids = list(request_ids)
        self._live = set(self._request_ids)
        self._cancel = cancel
        self._told = told
        self._shorten = shorten
        self._backlog = Backlog() if backlog is None else backlog
        self._ways: list[ShortWay] = []
        self._order: deque[tuple[str, int]] = deque()  # keys of _pending, oldest first
        self._pending: dict[tuple[str, int], list[StreamItem]] = {}
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.direct: Callable[[str, int, int, int], bool] | None = None  # see `push_token`

    def take_ready(self) -> list[StreamItem]:
        """All that can be had without waiting; [] when nothing is there. Raises what ended a request early."""
        if not self._order and self._error is not None:
            raise self._error
        return [self._next() for _ in range(len(self._order))]

    @property
    def finished(self) -> bool:
        """Everything was read and nothing follows."""
        return not self._order and not self._live and self._error is None

    async def wait(self) -> None:
        """Return once something can be taken, the stream has ended, or `wake` was called."""
        if not self._order and self._error is None and self._live:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _next(self) -> StreamItem:
        item = _merge(self._pending.pop(self._order.popleft()))
        if isinstance(item, TokenOutput):
            if item.finish_reason == FINISH_ERROR:
                raise EngineError(item.error or "The engine failed on this request.")
            if item.finish_reason == FINISH_REFUSED:
                raise InvalidRequestError(item.error or "The engine cannot follow this request.")
        return item

    def push_token(self, request_id: str, choice: int, index: int, token_id: int) -> None:
        """Add a token with nothing else to tell (the client's reader task).

        `direct` may take it at once, if nothing waits before it; it says whether it did, and does not raise. While much
        has piled up, tokens are merged instead.
        """
        direct = self.direct
        if direct is None or not self.is_flowing or not direct(request_id, choice, index, token_id):
            self.push(TokenOutput(request_id, choice, index, [token_id]))

    @property
    def is_flowing(self) -> bool:
        """A token may go directly to the reader: nothing waits before it."""
        return self.direct is not None and not self._order and not self._backlog.is_behind

    def shorten(self, request_id: str, choice: int, way: ShortWay) -> None:
        """Let a choice's further tokens go there while that is open. All are closed when something has to wait here."""
        self._ways.append(way)
        self._shorten(request_id, choice, way)

    def open_ways(self) -> None:
        """The reader would take what comes, at once."""
        for way in self._ways:
            way.is_open = not self._order

    def close_ways(self) -> None:
        """It would not: what comes waits here."""
        for way in self._ways:
            way.is_open = False

    def push(self, item: StreamItem) -> None:
        """Add an output (the client's reader task)."""
        self.close_ways()
        choice = item.choice if isinstance(item, TokenOutput) else -1
        key = (item.request_id, choice)
        waiting = self._pending.get(key)
        if waiting is None:
            self._pending[key] = [item]
            self._order.append(key)
        else:
            waiting.append(item)
        self.wake()

    def end(self, request_id: str, error: Exception | None = None) -> None:
        """One request has ended; an error ends the whole stream."""
        self._live.discard(request_id)
        self._error = self._error or error
        self.wake()

    def cancel(self, request_id: str, choice: int = -1) -> None:
        """End one request, or one choice of it, because the reader has all that it wants."""
        self._cancel(request_id, choice, True)

    def close(self) -> None:
        """Cancel what is live; what has ended needs no keeping. Idempotent."""
        self.close_ways()
        self._ways.clear()  # they may know the reader, and that one us: no circle is left
        for request_id in self._request_ids:
            if request_id in self._live:
                self._cancel(request_id, -1, False)
            else:
                self._told(request_id)

    def forget_error(self) -> None:
        """After `close`, once the reader has it: its traceback knows us, and the two would wait for a collection."""
        self._error = None

    def wake(self) -> None:
        """End a wait, though nothing may be there."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _merge(items: list[StreamItem]) -> StreamItem:
    """What has piled up of one choice, or of one prompt, as one."""
    if len(items) == 1:
        return items[0]
    parts = [item for item in items if isinstance(item, PromptLogprobs)]
    if parts:
        return merge_prompt_logprobs(parts)
    return merge_outputs([item for item in items if isinstance(item, TokenOutput)])
