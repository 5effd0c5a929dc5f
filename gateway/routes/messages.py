"""`POST /v1/messages`: a chat in the form of Anthropic's Messages; and what its prompt costs, without an answer."""

from __future__ import annotations

from gateway.message_chat import Words, as_chat, as_prompt
from gateway.message_events import MessageForm
from gateway.message_schemas import CountTokensRequest, MessagesRequest
from gateway.routes.chat import answer_chat, chat_job
from gateway.routes.endpoint import RECEIPT_HEADER, Call, json_response
from gateway.schemas import ChatRequest
from gateway.text_jobs import RenderJob
from novainfer.errors import InvalidRequestError


async def messages(call: Call) -> None:
    """Answer a chat in the form of Messages, whole or as a stream."""
    call.limit_time()
    chat, headers, words = await _parse(call)
    asked = [chat]
    del chat  # what is spent of it shall not be held while it is answered
    try:
        await answer_chat(call, asked.pop(), headers, MessageForm(words))
    except InvalidRequestError as error:
        raise words.of(error) from None


async def count_tokens(call: Call) -> None:
    """The number of tokens of a message's prompt."""
    job, headers, words = await _parse_count(call)
    with call.service.admit(call.info):
        try:
            (token_ids,) = await call.encode(job)
        except InvalidRequestError as error:
            raise words.of(error) from None
        await call.answer(json_response({"input_tokens": len(token_ids)}, headers))


async def _parse(call: Call) -> tuple[ChatRequest, dict[str, str], Words]:
    request, headers = await call.parse(MessagesRequest)
    if call.receipt_header():  # `novainfer verify` reads no such answers: it would vouch for nothing of this one
        words = "Receipts come with /v1/chat/completions and /v1/completions alone."
        raise InvalidRequestError(words, param=RECEIPT_HEADER)
    chat, words_of = as_chat(request)
    return chat, headers, words_of


async def _parse_count(call: Call) -> tuple[RenderJob, dict[str, str], Words]:
    request, headers = await call.parse(CountTokensRequest)
    call.service.check_model(request.model)
    prompt, words = as_prompt(request)
    return chat_job(prompt, call.service.max_model_len), headers, words
