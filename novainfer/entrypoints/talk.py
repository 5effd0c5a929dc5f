"""`novainfer chat`, `generate` and `models`: what a person at a terminal wants from a running server."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from novainfer.entrypoints.api_client import ApiClient, ApiError

CHAT_HELP = """Type a message and press Enter. /reset forgets the conversation, /exit or Ctrl-D leaves,
Ctrl-C stops an answer."""


def sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


def models_command(arguments: argparse.Namespace) -> int:
    """Print the served models, one a line."""
    client = ApiClient.from_options(arguments.base_url, arguments.api_key)
    for model in client.get("/v1/models")["data"]:
        length = model.get("max_model_len")
        print(model["id"] + (f"  (context {length} tokens)" if length else ""))
    return 0


def generate_command(arguments: argparse.Namespace) -> int:
    """Complete one prompt (an argument, or standard input) and print the text as it comes."""
    prompt = sys.stdin.read() if arguments.prompt in (None, "-") else arguments.prompt
    if arguments.offline:
        return _generate_offline(arguments, prompt)
    client = ApiClient.from_options(arguments.base_url, arguments.api_key)
    body = {"model": arguments.model or client.default_model(), "prompt": prompt, **sampling(arguments)}
    _print_stream(event["choices"][0]["text"] for event in client.stream("/v1/completions", body) if event["choices"])
    return 0


def _generate_offline(arguments: argparse.Namespace, prompt: str) -> int:
    from novainfer import LLM, SamplingParams

    options = sampling(arguments)
    if "stop" in options:
        options["stop"] = tuple(options["stop"])
    llm = LLM(arguments.model or "demo")
    try:
        print(llm.generate(prompt, SamplingParams(**options), use_tqdm=False)[0]["text"])
    finally:
        llm.exit()
    return 0


def chat_command(arguments: argparse.Namespace) -> int:
    """One answer if a message was given, else a conversation until end of input."""
    client = ApiClient.from_options(arguments.base_url, arguments.api_key)
    model = arguments.model or client.default_model()
    conversation = Conversation(client, model, sampling(arguments), arguments.system)
    if arguments.message is not None:
        conversation.say(arguments.message)
        return 0
    if sys.stdin.isatty():
        print(CHAT_HELP)
    for line in _lines():
        if line == "/exit":
            break
        if line == "/reset":
            conversation.reset()
        elif line:
            try:
                conversation.say(line)
            except ApiError as error:
                print(f"error: {error}", file=sys.stderr)
                if not sys.stdin.isatty():
                    return 1
    return 0


class Conversation:
    """The messages so far; an answer that was stopped stays out of them together with its question."""

    def __init__(self, client: ApiClient, model: str, options: dict[str, Any], system: str | None) -> None:
        self._client = client
        self._body = {"model": model, **options}
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self._opening)

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages = list(self._opening)

    def say(self, text: str) -> None:
        """Send a message, print the answer as it comes, and remember both."""
        messages = [*self.messages, {"role": "user", "content": text}]
        stream = self._client.stream("/v1/chat/completions", {**self._body, "messages": messages})
        with contextlib.closing(stream):
            try:
                answer = _print_stream(_contents(event["choices"][0]["delta"] for event in stream if event["choices"]))
            except KeyboardInterrupt:
                print("\n(stopped)")
                return
        self.messages = [*messages, {"role": "assistant", "content": answer}]


def _lines() -> Iterator[str]:
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            yield input(prompt).strip()
        except EOFError:
            return


def _contents(deltas: Iterable[dict[str, Any]]) -> Iterator[str]:
    """The content of each; reasoning goes to standard error."""
    thinks = False
    for delta in deltas:
        content, reasoning = delta.get("content") or "", delta.get("reasoning_content") or ""
        if thinks and content:
            print("\n", file=sys.stderr, flush=True)
        print(reasoning, end="", file=sys.stderr, flush=True)
        thinks = bool(reasoning) or (thinks and not content)
        yield content


def _print_stream(pieces: Iterable[str]) -> str:
    text = ""
    for piece in pieces:
        print(piece, end="", flush=True)
        text += piece
    print(flush=True)
    return text
