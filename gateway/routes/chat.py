"""`POST /v1/chat/completions`."""

from __future__ import annotations

import json
from typing import Any

from gateway.asked_calls import asked_calls, calls_or
from gateway.asked_grammar import OUTPUTS, Asked, asked_grammar, make_grammar, thoughts_before
from gateway.routes.endpoint import Call
from gateway.routes.generate import Form, Manner, generate
from gateway.schemas import ROLES, ChatRequest, TemplateRequest, TokenizeRequest, without_prompt
from gateway.service import GatewayService
from gateway.text_jobs import RenderJob
from gateway.told_parts import telling_of
from novainfer.errors import InvalidRequestError
from novainfer.text.parts import BARRED, NONE

Rendered = ChatRequest | TokenizeRequest | TemplateRequest


async def chat_completions(call: Call) -> None:
    """Answer a chat, whole or as a stream."""
    call.limit_time()
    await answer_chat(call, *await call.parse(ChatRequest))


async def answer_chat(call: Call, request: ChatRequest, headers: dict[str, str], form: Form | None = None) -> None:
    """Answer it, in another form than a chat's if one is given. The caller must not hold the request."""
    service = call.service
    wants_receipt = call.wants_receipt(request)
    model = service.check_model(request.model)
    refuse_unsupported(request)
    calls, grammatical = _asked(request, service)
    asked = calls or grammatical
    with service.admit_generation(call.info, request, 1):
        (token_ids,) = await call.encode(chat_job(request, service.max_model_len))
        grammar, parsers = "", service.parsers
        if asked is not None:
            thoughts = thoughts_before(service, request, token_ids)
            grammar = await make_grammar(call, asked, thoughts)
            if thoughts == BARRED:  # what looks like one is what was asked for
                parsers = parsers._replace(reasoning=NONE)
            if calls is None:  # all of the answer is
                parsers = parsers._replace(calls=NONE)
        telling = telling_of(request, parsers, service.tokenizer, token_ids, calls_lead=grammatical is not None)
        if (telling is None or telling.calls == NONE) and not grammar:
            request = _with_marks_of_calls(request)
        request = without_prompt(request, grammar)
        prompts = [(token_ids, "")]
        await generate(call, request, prompts, headers, Manner(model, wants_receipt, telling, form))


def _asked(request: ChatRequest, service: GatewayService) -> tuple[Asked | None, Asked | None]:
    """The calls that an answer has to be, or may be in place of a form, and that form. Raises `InvalidRequestError`."""
    form_of_calls, tokenizer = service.parsers.calls, service.tokenizer
    calls, form = asked_calls(request, form_of_calls, tokenizer), asked_grammar(request)
    if calls is None:
        return None if form is None else calls_or(request, form, form_of_calls, tokenizer), form
    if form is not None and form.param == OUTPUTS:  # which is about all of the answer, calls too
        words = f"A tool_choice that demands a call cannot be combined with {form.param}."
        raise InvalidRequestError(words, param="tool_choice")
    return calls, None  # there will be no answer that could have a form


def chat_job(request: Rendered, max_model_len: int) -> RenderJob:
    """The work of rendering the template and tokenising the prompt. Raises `InvalidRequestError`."""
    messages = request.messages or []
    _check_messages(messages)
    add_prompt = request.add_generation_prompt
    if add_prompt is None:
        add_prompt = not request.continue_final_message
    tools = request.tools if request.tool_choice != "none" else []
    chat = {"messages": messages, "tools": tools, "template_kwargs": _template_kwargs(request)}
    return RenderJob(
        "messages",
        json.dumps(chat, ensure_ascii=False, separators=(",", ":")).encode(),
        add_generation_prompt=add_prompt,
        continue_final_message=request.continue_final_message,
        # The template writes the special tokens itself.
        add_special_tokens=not isinstance(request, TemplateRequest) and bool(request.add_special_tokens),
        max_model_len=max_model_len,
        as_text=isinstance(request, TemplateRequest),
    )


def _with_marks_of_calls(request: ChatRequest) -> ChatRequest:
    """Calls that no parser knows are text, some between special tokens: told, unless the client says otherwise."""
    if not request.tools or request.tool_choice == "none" or "skip_special_tokens" in request.model_fields_set:
        return request
    return request.model_copy(update={"skip_special_tokens": False})


def refuse_unsupported(request: ChatRequest) -> None:
    """Refuse what would need other media, rather than answer without it."""
    if request.modalities != ["text"]:
        raise InvalidRequestError("Only the modality 'text' is supported.", param="modalities")


def refuse_tool_choice(request: TokenizeRequest | TemplateRequest) -> None:
    """Refuse one that a prompt by itself says nothing of."""
    if request.tool_choice not in (None, "auto", "none"):
        raise InvalidRequestError("Only tool_choice 'auto' and 'none' are supported yet.", param="tool_choice")


def _check_messages(messages: list[dict[str, Any]]) -> None:
    """What OpenAI asks of them and a template does not."""
    for number, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise InvalidRequestError(f"A message's role must be one of {', '.join(sorted(ROLES))}.", param="messages")
        # A call that came as text has no id: who tells what came of it may have none to name.
        if not isinstance(message.get("tool_call_id"), str | None):
            raise InvalidRequestError(f"messages[{number}].tool_call_id must be a string.", param="messages")


def _template_kwargs(request: Rendered) -> dict[str, Any]:
    extras = {"reasoning_effort": request.reasoning_effort, "documents": request.documents}
    return {**{name: value for name, value in extras.items() if value is not None}, **request.chat_template_kwargs}
