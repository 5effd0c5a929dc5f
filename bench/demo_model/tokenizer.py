"""The demo model's tokenizer: byte-level BPE, digits apart, ChatML with tools in Hermes form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.demo_model.conversation import Conversation
from bench.demo_model.corpus import training_conversations

VOCAB_SIZE = 640
MAX_LENGTH = 2048
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
# Part of the visible text, so that a tool parser finds them after special tokens are dropped.
MARKUP_TOKENS = ("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# Digits stand alone, so that numbers have places.
# Upper-case runs fall into letters, so that upper case can be spelt.
_PIECES = r" ?\p{Lu}?[\p{Ll}\p{M}]+| ?\p{L}|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """{%- set first_is_system = messages and messages[0]['role'] == 'system' -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if first_is_system -%}{{- messages[0]['content'] + '\\n\\n' -}}{%- endif -%}
{{- 'You may call these tools:\\n<tools>\\n' + (tools | tojson) + '\\n</tools>\\n' -}}
{{- 'To call a tool, answer with\\n<tool_call>\\n{"name": "...", "arguments": {...}}\\n</tool_call>' -}}
{{- '<|im_end|>\\n' -}}
{%- elif first_is_system -%}
{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- '<|im_start|>assistant\\n' + (message['content'] or '') -}}
{%- for item in message['tool_calls'] or [] -%}
{%- set call = item['function'] or item -%}
{%- if message['content'] or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": ' + (call['name'] | tojson) + ', "arguments": ' -}}
{{- call['arguments'] if call['arguments'] is string else (call['arguments'] | tojson) -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message['role'] == 'tool' -%}
{%- if loop.first or loop.previtem['role'] != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' -}}
{%- if loop.last or loop.nextitem['role'] != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- elif not (loop.first and first_is_system) -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _to_json  # jinja's own filter escapes for HTML and sorts the keys
    return environment


_TEMPLATE = _environment().from_string(CHAT_TEMPLATE)


def render(conversation: Conversation, add_generation_prompt: bool = False) -> str:
    """The conversation as the model sees it."""
    return _TEMPLATE.render(
        messages=conversation.messages,
        tools=conversation.tools or None,
        add_generation_prompt=add_generation_prompt,
    )


def _training_text(seed: int, conversations: int) -> Iterator[str]:
    split = re.compile("|".join(re.escape(token) for token in (*CONTROL_TOKENS, *MARKUP_TOKENS)))
    stream = training_conversations(seed)
    for _ in range(conversations):
        yield from (part for part in split.split(render(next(stream))) if part)


def train_tokenizer(seed: int, conversations: int = 30_000) -> Tokenizer:
    """Learn the merges. Every byte is in the vocabulary, so any text survives a round trip."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = len(CONTROL_TOKENS) + len(MARKUP_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - added,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(seed, conversations), trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKUP_TOKENS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the corpus gave {tokenizer.get_vocab_size()} tokens instead of {VOCAB_SIZE}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json as transformers reads them."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
