"""The processes that render and tokenise for one gateway: `python -m gateway.text_child`, started by it.

The one that is started is the *zygote*: it reads tokenizer and templates, has one thread and takes no work. For each
order it forks a *text process*, which has them too, at once and in the same memory. That one does one job after the
other; it may be killed at any moment. No process here outlives the gateway.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from setproctitle import setproctitle

from gateway.text_jobs import (
    MAX_TEXT_CHARS,
    DecodeJob,
    Done,
    EncodeJob,
    Failed,
    GrammarJob,
    Job,
    Ready,
    Refused,
    Rendered,
    RenderJob,
    Reply,
    pack_ids,
    receive,
    to_frame,
    unpack_ids,
)
from novainfer.errors import ConfigError, InvalidRequestError, ProtocolError, words_of
from novainfer.sampling.grammars import BUILD_SECONDS, Thoughts, check_grammar, make_grammar
from novainfer.text.chat_template import ChatTemplate
from novainfer.text.parts import BARRED, BEGUN
from novainfer.text.reasoning import CLOSE, OPEN
from novainfer.text.templates import read_template
from novainfer.text.tokenizer import Tokenizer
from novainfer.transport.parent import die_with_parent
from novainfer.transport.zygote import Zygote

# Above what a text process has at its start. 8 MiB of digits, each a token, take 3 GiB (and the tokenizer, 15 s).
MEMORY_BYTES = 4 * 1024**3


class TextWork:
    """What a text process does. A pure function of the job, but for the time of day that a template may ask for."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template

    @classmethod
    def load(cls, folder: Path, chat_template: Path | None) -> TextWork:
        """The tokenizer in `folder` with its templates, or the one in `chat_template`. Raises `ConfigError`."""
        override = None if chat_template is None else read_template(chat_template)
        tokenizer = Tokenizer.load(folder)
        return cls(tokenizer, ChatTemplate.of(tokenizer, override))

    def do(self, job: Job, say: Callable[[Rendered], None]) -> Reply:
        """The reply to a job; on the way there `say` tells how far it is. Raises nothing."""
        try:
            return Done(self._parts(job, say))
        except InvalidRequestError as error:
            return Refused(error.message, error.param, error.code)
        except MemoryError:
            return Refused("The text of this request needs too much memory.", job.param)
        except Exception as error:
            traceback.print_exc()
            return Failed(type(error).__name__)

    def _parts(self, job: Job, say: Callable[[Rendered], None]) -> list[bytes]:
        if isinstance(job, DecodeJob):
            return self._decode(job)
        if isinstance(job, GrammarJob):
            return [self._grammar(job)]
        if isinstance(job, RenderJob) and job.as_text:
            return [self._render(job, say).encode()]
        texts = [str(text, "utf-8") for text in job.texts] if isinstance(job, EncodeJob) else [self._render(job, say)]
        return [pack_ids(self._encode(text, job)) for text in texts]

    def _render(self, job: RenderJob, say: Callable[[Rendered], None]) -> str:
        text = self._template.render(
            **json.loads(job.chat),
            add_generation_prompt=job.add_generation_prompt,
            continue_final_message=job.continue_final_message,
        )
        say(Rendered(len(text)))
        return text

    def _encode(self, text: str, job: RenderJob | EncodeJob) -> list[int]:
        """Refuses a text without tokenising it if it is far too long."""
        if job.max_model_len and not self._tokenizer.fits(text, job.max_model_len):
            raise InvalidRequestError(
                f"This model's maximum context length is {job.max_model_len} tokens. However, your text of {len(text)} "
                "characters makes far more.",
                param=job.param,
                code="context_length_exceeded",
            )
        return self._tokenizer.encode(text, add_special_tokens=job.add_special_tokens)

    def _grammar(self, job: GrammarJob) -> bytes:
        tokenizer, thoughts = self._tokenizer, None
        if job.thoughts != BARRED:
            are_special = len(tokenizer.special_ids_of((OPEN, CLOSE))) == 2
            thoughts = Thoughts(OPEN, CLOSE, are_special=are_special, is_inside=job.thoughts == BEGUN)
        try:
            grammar = make_grammar(job.kind, str(job.source, "utf-8"), thoughts)
            check_grammar(grammar, tokenizer.special_texts, BUILD_SECONDS)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{job.param}: {error.message}", param=job.param) from None
        return grammar.encode()

    def _decode(self, job: DecodeJob) -> list[bytes]:
        parts: list[bytes] = []
        size = 0
        for ids in job.token_ids:
            text = self._tokenizer.decode(unpack_ids(ids), skip_special_tokens=job.skip_special_tokens)
            size += len(text)
            if size > MAX_TEXT_CHARS:
                message = f"The text of these tokens has more than {MAX_TEXT_CHARS} characters."
                raise InvalidRequestError(message, param=job.param)
            parts.append(text.encode())
        return parts


def serve(connection: socket.socket, work: TextWork) -> None:
    """Do one job after the other until the other end is closed."""

    def say(message: Ready | Rendered) -> None:
        connection.sendall(to_frame(message))

    try:
        say(Ready(pid=os.getpid()))
        while True:
            job = receive(connection)
            connection.sendall(_reply_frame(work.do(job, say), job.param))
    except (EOFError, ConnectionError):
        return


def _reply_frame(reply: Reply, param: str) -> bytes:
    try:
        return to_frame(reply)
    except ProtocolError:
        words = "This model's maximum context length is far exceeded: the text of this request makes too many tokens."
        return to_frame(Refused(words, param, "context_length_exceeded"))


def limit_memory(more: int) -> None:
    """From now on this process may have `more` bytes above what it has; then it gets a `MemoryError`, or aborts."""
    try:
        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5]) * resource.getpagesize()
    except OSError:  # another system, which does not count this
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = used + more
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def main(argv: list[str] | None = None) -> int:
    """Run the zygote to its end; the exit status is 2 if tokenizer or template cannot be read."""
    parser = argparse.ArgumentParser(prog="text_child", description="Text processes of a NovaInfer gateway.")
    parser.add_argument("--control", type=int, required=True, help="file descriptor of the gateway's orders")
    parser.add_argument("--index", type=int, required=True, help="number of the gateway")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the tokenizer")
    parser.add_argument("--chat-template", type=Path, help="file with a template that replaces the model's")
    options = parser.parse_args(argv)
    die_with_parent()
    title = f"novainfer: gateway {options.index} text"
    setproctitle(f"{title} zygote")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the supervisor decides
    control = socket.socket(fileno=options.control)
    try:
        work = TextWork.load(options.tokenizer, options.chat_template)
    except ConfigError as error:
        with suppress(OSError):  # the gateway reads the same files, and may have ended over it before us
            control.sendall(to_frame(Ready(words_of(error))))
        return 2
    with suppress(OSError):  # here, too: then there is no order either
        control.sendall(to_frame(Ready()))

    def become(lane: int, connection: socket.socket) -> None:
        setproctitle(f"{title} {lane}")
        limit_memory(MEMORY_BYTES)
        serve(connection, work)

    return Zygote(control, become).run()


if __name__ == "__main__":
    sys.exit(main())
