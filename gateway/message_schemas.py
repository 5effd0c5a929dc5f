"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`, field by field, as `schemas` has the others.

What their objects mean is said where they become those of a chat (`message_chat`).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from gateway.nested import MESSAGE
from gateway.schema_fields import MAX_TOOLS, Int, Items, TemplateKwargs, empty
from gateway.schemas import MAX_MESSAGES, GenerationRequest, RequestBody

_UNIONS = {"stop": "it is a string or a list of strings", "system": "it is a string or a list of objects"}
_OF_CHATS = frozenset(
    {
        "add_generation_prompt", "container", "continue_final_message", "documents", "echo", "explain", "function_call",
        "functions", "input", "logprobs", "max_completion_tokens", "max_new_tokens", "mcp_servers", "modalities", "n",
        "n_predict", "prompt", "prompt_logprobs", "reasoning_effort", "receipt", "response_format", "return_token_ids",
        "return_tokens_as_token_ids", "stream_options", "top_logprobs",
    }
)  # fmt: skip


class ConversationRequest(RequestBody):
    """What makes the prompt, and what goes with it."""

    unsupported = _OF_CHATS
    unions = _UNIONS
    form = MESSAGE

    messages: Annotated[Items[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Items[dict[str, Any]] | None = None
    tools: Annotated[Items[dict[str, Any]], Field(max_length=MAX_TOOLS)] = empty(list)
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    chat_template_kwargs: TemplateKwargs = empty(dict)


class MessagesRequest(ConversationRequest, GenerationRequest):
    """`POST /v1/messages`."""

    max_tokens: Int
    stop_sequences: Items[str] | None = None


class CountTokensRequest(ConversationRequest):
    """`POST /v1/messages/count_tokens`."""

    model: Annotated[str, Field(max_length=1024)] | None = None
