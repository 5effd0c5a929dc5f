"""Embedding requests: a generation whose prompts end with a vector each, and the answer that tells these."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Scope, Send

from gateway.context import RequestInfo
from gateway.errors import ApiError
from gateway.generation import Generation, PromptState
from gateway.schemas import EmbeddingRequest
from gateway.service import GatewayService, deadline_of
from gateway.slices import PART_BYTES, Slices, to_json
from novainfer.client.output import ChoiceDelta
from novainfer.embedding import FLOAT_BYTES, check_dimensions, finish_vector, numbers_of
from novainfer.errors import InvalidRequestError
from novainfer.protocol.messages import AddRequest, EngineInfo, PromptLogprobs, TokenOutput
from novainfer.sampling.params import SamplingParams

MAX_VECTOR_BYTES = 64 * 1024 * 1024  # of all vectors of one request, as the engine gives them
MOST_AT_ONCE = 64  # inputs of one request that the engine has: it shall not take all places of the queue
_CONFLICT = 409


class EmbeddingGeneration(Generation):
    """No token of it is told; `vectors` has the hidden state of each prompt that has ended, by its place."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As `Generation`, right after its requests were submitted."""
        super().__init__(*args, **kwargs)
        self.vectors: dict[int, bytes] = {}

    def all_vectors(self) -> list[bytes]:
        """In the inputs' order, once it has ended. Raises `ApiError` if it was cancelled."""
        if len(self.vectors) < len(self.prompts):
            raise ApiError(_CONFLICT, "The request was cancelled.", "cancelled")
        return [self.vectors[number] for number in range(len(self.prompts))]

    def _apply(self, item: TokenOutput | PromptLogprobs) -> ChoiceDelta | None:
        if isinstance(item, TokenOutput) and item.embedding:
            self.vectors[self._prompt_of[item.request_id]] = item.embedding
        return super()._apply(item)


def check_numbers(request: EmbeddingRequest, num_inputs: int, engine: EngineInfo) -> None:
    """Raises `InvalidRequestError` if the model has not so many numbers, or the answer would tell too many."""
    check_dimensions(request.dimensions, engine.hidden_size)
    most = MAX_VECTOR_BYTES // max(engine.hidden_size * FLOAT_BYTES, 1)
    if num_inputs > most:
        raise InvalidRequestError(f"input: of this model at most {most} embeddings fit one answer.", param="input")


def start_embeddings(
    service: GatewayService,
    request: EmbeddingRequest,
    inputs: list[list[int]],
    response_id: str,
    info: RequestInfo,
    *,
    first: int,
) -> EmbeddingGeneration:
    """Submit one engine request for each list of token ids; first: the number of the first one among all of `request`.

    Raises `OverloadedError`; then nothing was submitted.
    """
    params = SamplingParams.for_embedding()
    states = [
        PromptState(f"{response_id}-{number}", token_ids, params, [], is_alone=True)
        for number, token_ids in enumerate(inputs, first)
    ]
    adds = [
        AddRequest(
            request_id=state.request_id,
            prompt_token_ids=state.token_ids,
            params=params,
            tenant=info.tenant,
            cache_salt=request.cache_salt,
            use_prefix_cache=request.prefix_cache,
            priority=request.priority,
            deadline=deadline_of(info),
            aliases=[response_id, info.request_id],
            embed=True,
        )
        for state in states
    ]
    stream = service.client.submit(*adds)
    return EmbeddingGeneration(
        states, stream, service.tokenizer, service.metrics, engine=service.engine_info(), info=info, after_prompt=False
    )


def check_input(token_ids: list[int], engine: EngineInfo) -> None:
    """Raises `InvalidRequestError` if the model cannot read these tokens."""
    if not token_ids:
        raise InvalidRequestError("An input is empty: it has no token.", param="input")
    if min(token_ids) < 0 or max(token_ids) >= engine.vocab_size:
        raise InvalidRequestError(f"input holds a token id outside 0..{engine.vocab_size - 1}.", param="input")
    if len(token_ids) > engine.max_model_len:
        raise InvalidRequestError(
            f"This model's maximum context length is {engine.max_model_len} tokens. However, an input has "
            f"{len(token_ids)}.",
            param="input",
            code="context_length_exceeded",
        )


@dataclass(slots=True)
class EmbeddingsResponse:
    """The whole answer, an application as of ASGI. Written while it is sent: as text the vectors take five times the
    memory.

    vectors: of each input, as the engine gives them. as_base64: a vector is told as its bytes, else as numbers.
    """

    vectors: list[bytes]
    model: str
    num_tokens: int
    dimensions: int | None
    normalize: bool
    as_base64: bool
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, vectors: list[bytes], num_tokens: int, request: EmbeddingRequest, model: str, *, normalizes: bool
    ) -> EmbeddingsResponse:
        """num_tokens: of all inputs. normalizes: as the checkpoint does."""
        return cls(
            vectors=vectors,
            model=model,
            num_tokens=num_tokens,
            dimensions=request.dimensions,
            normalize=normalizes if request.normalize is None else request.normalize,
            as_base64=request.encoding_format == "base64",
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, as fast as the client takes it."""
        headers = [
            *((name.encode(), value.encode()) for name, value in self.headers.items()),
            (b"content-type", b"application/json"),
        ]
        slices, waiting, size = Slices(), list[str](), 0
        is_begun = False
        for text in self._texts():
            waiting.append(text)
            size += len(text)
            if size >= PART_BYTES:
                if not is_begun:
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                    is_begun = True
                await send({"type": "http.response.body", "body": "".join(waiting).encode(), "more_body": True})
                waiting, size = [], 0
            await slices.pause()
        body = "".join(waiting).encode()
        if not is_begun:
            length = (b"content-length", b"%d" % len(body))
            await send({"type": "http.response.start", "status": 200, "headers": [*headers, length]})
        await send({"type": "http.response.body", "body": body})

    def _texts(self) -> Iterator[str]:
        """The body, in pieces."""
        before = '{"object":"list","data":['
        for index, hidden in enumerate(self.vectors):
            yield f'{before}{{"object":"embedding","index":{index},"embedding":'
            vector = finish_vector(hidden, self.dimensions, normalize=self.normalize)
            yield f'"{base64.b64encode(vector).decode()}"' if self.as_base64 else to_json(numbers_of(vector))
            before = "},"
        usage = {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens}
        yield f'}}],"model":{to_json(self.model)},"usage":{to_json(usage)}}}'
