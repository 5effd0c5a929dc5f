"""`POST /v1/responses`: a chat in the form of OpenAI's Responses. The server keeps no answers and no conversations."""

from __future__ import annotations

from gateway.response_chat import as_chat
from gateway.response_echo import Echo
from gateway.response_events import ResponseForm
from gateway.routes.chat import answer_chat
from gateway.routes.endpoint import RECEIPT_HEADER, Call
from gateway.schemas import ChatRequest, ResponseRequest
from novainfer.errors import InvalidRequestError


async def responses(call: Call) -> None:
    """Answer a chat in the form of Responses, whole or as a stream."""
    call.limit_time()
    chat, headers, echo = await _parse(call)
    asked = [chat]
    del chat  # what is spent of it shall not be held while it is answered
    try:
        await answer_chat(call, asked.pop(), headers, ResponseForm(echo))
    except InvalidRequestError as error:
        raise echo.in_words(error) from None


async def _parse(call: Call) -> tuple[ChatRequest, dict[str, str], Echo]:
    request, headers = await call.parse(ResponseRequest)
    if call.receipt_header():  # `novainfer verify` reads no such answers: it would vouch for nothing of this one
        words = "Receipts come with /v1/chat/completions and /v1/completions alone."
        raise InvalidRequestError(words, param=RECEIPT_HEADER)
    chat, echo = as_chat(request)
    return chat, headers, echo
