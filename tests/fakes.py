"""Stand-ins for tests: a tiny tokenizer, and a scheduler that speaks the real protocol but needs no model."""

from __future__ import annotations

import hashlib
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers
import zmq
from tokenizers import decoders, models, pre_tokenizers, trainers

from novainfer.engine.gateways import GatewayLink
from novainfer.protocol.link import Packet, packets_in
from novainfer.protocol.messages import (
    FINISH_CANCELLED,
    FINISH_LENGTH,
    FINISH_STOP,
    AddRequest,
    AliasCancelled,
    CancelAlias,
    CancelRequest,
    EngineInfo,
    EngineStats,
    Heartbeat,
    Hello,
    Logprobs,
    OutputBatch,
    PromptLogprobs,
    RequestRejected,
    TokenOutput,
    Told,
    Unlinked,
)
from novainfer.transport.addresses import Endpoint
from tests.serving_thread import ServingThread

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_PARTS = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
LLAMA = decoders.Sequence(LLAMA_PARTS)
_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CORPUS = ["hello world, the quick brown fox jumps over the lazy dog. 0123456789 naïve café 你好 🎉\n"] * 4


def write_tokenizer(folder: Path, *, template: str | None = CHATML) -> Path:
    """A byte-level BPE tokenizer of some 400 tokens with a ChatML template, as a checkpoint holds it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=_SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}')
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
THINKER = (
    CHATML
    + '{% if tools %}{% set form = \'<tool_call>{"name": name, "arguments": object}</tool_call>\' %}{% endif %}'
    + "{% if thinks %}<think>\n{% endif %}"
)


def write_thinker(folder: Path, *, are_special: bool) -> Path:
    """The same of a model that thinks and calls tools; are_special: between special tokens."""
    write_tokenizer(folder, template=THINKER)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([tokenizers.AddedToken(mark, special=are_special, normalized=False) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_sentencepiece(folder: Path, words: list[str], decoder: decoders.Decoder | None = LLAMA) -> Path:
    """A tokenizer of bytes and these words, with a ChatML template, as a checkpoint holds it."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if decoder is not None:
        tokenizer.decoder = decoder
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def oracle_token(seed: int, prompt: list[int], choice: int, index: int, vocab_size: int) -> int:
    """The token that a scripted engine gives: a function of what a token may depend on. Never a special one."""
    text = f"{seed}|{','.join(map(str, prompt))}|{choice}|{index}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return len(_SPECIALS) + int.from_bytes(digest, "big") % (vocab_size - len(_SPECIALS))


def oracle_tokens(request: AddRequest, choice: int, count: int, vocab_size: int) -> list[int]:
    """The first `count` tokens of a choice."""
    seed = request.params.seed or 0
    return [oracle_token(seed, request.prompt_token_ids, choice, i, vocab_size) for i in range(count)]


@dataclass
class _Live:
    identity: bytes
    request: AddRequest
    counts: list[int]
    done: list[bool] = field(default_factory=list)


HIDDEN_SIZE = 8  # of the scripted scheduler's model


def scripted_vector(prompt: Sequence[int]) -> bytes:
    """The embedding of a prompt, as the scripted scheduler gives it."""
    return struct.pack(f"<{HIDDEN_SIZE}f", *[(7 * i + 3 * sum(prompt) + len(prompt)) % 23 - 11.5 for i in range(8)])


class ScriptedScheduler(ServingThread):
    """Answers gateways until closed.

    script(request, choice) may give the tokens of a choice (it then ends with 'stop' if they run out); otherwise they
    come from `oracle_token` until max_tokens. reject(request) may refuse. While `paused` is set no token is made, and
    while `send_stats` is not no figures are told.
    """

    def __init__(
        self, endpoint: Endpoint, *, vocab_size: int, max_model_len: int = 256, send_stats: bool = True
    ) -> None:
        super().__init__(endpoint)
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.epoch = 1
        self.ready = True
        self.mode = "cpu avx2 cpu/native float32 tp1 exact"
        self.script: Callable[[AddRequest, int], list[int] | None] = lambda request, choice: None
        self.reject: Callable[[AddRequest], RequestRejected | None] = lambda request: None
        self.tokens_before_pause: int | None = None
        self.step_seconds = 0.0
        self.send_stats = send_stats
        self.paused = threading.Event()
        self.added: list[AddRequest] = []
        self.cancelled: list[CancelRequest] = []
        self.hellos: list[str] = []
        self.told: list[str] = []
        self.message_sizes: list[int] = []  # packets in each message
        self.live: dict[str, _Live] = {}
        self.step = 0
        self.seconds_since_progress = 0.0
        self._commands: list[Callable[[], None]] = []
        self.links: dict[bytes, GatewayLink] = {}
        self._next_stats = 0.0
        self._start()

    # -- for tests ----------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Forget everything and come back with the next epoch."""

        def forget() -> None:
            self.live.clear()
            self.links.clear()
            self.epoch += 1

        self.run_in_thread(forget)

    def run_in_thread(self, command: Callable[[], None]) -> None:
        """Run `command` where the socket lives, and wait for it."""
        done = threading.Event()
        self._commands.append(lambda: (command(), done.set())[0])
        assert done.wait(20)

    def fail(self, request_id: str, error: str) -> None:
        """End a request of one choice with this error, after the tokens that it has (from the socket's thread)."""
        live = self.live.pop(request_id)
        output = TokenOutput(request_id, 0, live.counts[0], [], "error", error=error)
        self._send(live.identity, OutputBatch(self.epoch, self.step, [output]))

    def send_all(self, message: object) -> None:
        """Send a message to every gateway (from the socket's thread)."""
        for identity in list(self.links):
            self._send(identity, message)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _turn(self) -> bool:
        moved = self._receive()
        while self._commands:
            self._commands.pop(0)()
        if not self.paused.is_set():
            moved = self._make_tokens() or moved
        self._publish_stats()
        if moved and self.step_seconds:
            time.sleep(self.step_seconds)  # the pace of an engine, not a wait for something
        return moved

    def _receive(self) -> bool:
        moved = False
        while True:
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return moved
            moved = True
            self.message_sizes.append(len(frames) // 2)
            for packet in packets_in(frames):
                self._take(identity, packet)

    def _take(self, identity: bytes, packet: Packet) -> None:
        link = self.links.get(identity)
        if isinstance(packet.message, Hello) and (link is None or link.link != packet.link):
            self.hellos.append(packet.message.gateway_id)
            for request_id in [r for r, live in self.live.items() if live.identity == identity]:
                del self.live[request_id]
            link = self.links[identity] = self._new_link(identity, packet)
            self._send_info()
            self._next_stats = 0.0
        if link is None or link.link != packet.link:
            self._send_packet(identity, Packet(packet.link, 0, Unlinked(self.epoch)))
        elif link.is_new(packet, time.monotonic()):
            self._handle(identity, packet.message)

    def _new_link(self, identity: bytes, packet: Packet) -> GatewayLink:
        def send(answer: Packet) -> None:
            self._send_packet(identity, answer)

        return GatewayLink(send, gateway_id=self.hellos[-1], link=packet.link, now=time.monotonic())

    def _handle(self, identity: bytes, message: object) -> None:
        if isinstance(message, Heartbeat):
            self.links[identity].acknowledge(message.received)
        elif isinstance(message, AddRequest):
            self._add(identity, message)
        elif isinstance(message, CancelRequest):
            self._cancel(message)
        elif isinstance(message, Told):
            self.told.append(message.request_id)
        elif isinstance(message, CancelAlias):
            requests = [live.request for live in self.live.values()]
            found = [r for r in requests if r.tenant == message.tenant and message.alias in r.aliases]
            for request in found:
                self._cancel(CancelRequest(request.request_id))
            self._send(identity, AliasCancelled(message.query, bool(found)))

    def _add(self, identity: bytes, request: AddRequest) -> None:
        self.added.append(request)
        refusal = self.reject(request)
        if refusal is not None:
            self._send(identity, refusal)
        elif request.request_id not in self.live:
            counts = [len(ids) for ids in request.emitted] or [0] * request.params.n
            self.live[request.request_id] = _Live(identity, request, counts, [False] * request.params.n)
            self._send_prompt_logprobs(identity, request)

    def _cancel(self, message: CancelRequest) -> None:
        self.cancelled.append(message)
        live = self.live.get(message.request_id)
        if live is None:
            return
        outputs = []
        for c in range(len(live.counts)):
            if message.choice in (-1, c) and not live.done[c]:
                live.done[c] = True
                outputs.append(TokenOutput(message.request_id, c, live.counts[c], [], FINISH_CANCELLED))
        self._send(live.identity, OutputBatch(self.epoch, self.step, outputs))
        if all(live.done):
            del self.live[message.request_id]

    def _make_tokens(self) -> bool:
        batches: dict[bytes, list[TokenOutput]] = {}
        for request_id, live in list(self.live.items()):
            for choice in range(len(live.counts)):
                output = self._next_token(live, choice)
                if output is not None:
                    batches.setdefault(live.identity, []).append(output)
            if all(live.done):
                del self.live[request_id]
        self.step += bool(batches)
        for identity, outputs in batches.items():
            self._send(identity, OutputBatch(self.epoch, self.step, outputs))
        return bool(batches)

    def _next_token(self, live: _Live, choice: int) -> TokenOutput | None:
        index, request = live.counts[choice], live.request
        if request.embed and self.tokens_before_pause is None:
            live.done[choice] = True
            vector = scripted_vector(request.prompt_token_ids)
            return TokenOutput(request.request_id, choice, 0, [], FINISH_STOP, num_cached_tokens=4, embedding=vector)
        paused = self.tokens_before_pause is not None and index >= self.tokens_before_pause
        if live.done[choice] or paused:
            return None
        scripted = self.script(request, choice)
        if scripted is None:
            token = oracle_token(request.params.seed or 0, request.prompt_token_ids, choice, index, self.vocab_size)
        elif index < len(scripted):
            token = scripted[index]
        else:
            token = request.eos_token_ids[0]
        live.counts[choice] += 1
        stops = set(request.params.stop_token_ids) | set([] if request.params.ignore_eos else request.eos_token_ids)
        reason = FINISH_STOP if token in stops else None
        if reason is None and index + 1 >= request.params.max_tokens:
            reason = FINISH_LENGTH
        live.done[choice] = reason is not None
        return TokenOutput(
            request.request_id,
            choice,
            index,
            [token],
            finish_reason=reason,
            stop_token_id=token if reason == FINISH_STOP else None,
            logprobs=[] if request.params.logprobs is None else [self._logprob(token, request.params.logprobs)],
            num_cached_tokens=4,
        )

    def _logprob(self, token: int, top: int) -> Logprobs:
        others = [(token + i) % self.vocab_size for i in range(top)]
        return Logprobs(token, -0.5, 1, others, [-0.5 - i for i in range(top)])

    def _send_prompt_logprobs(self, identity: bytes, request: AddRequest) -> None:
        top = request.params.prompt_logprobs
        if top is None:
            return
        entries = [self._logprob(token, top) for token in request.prompt_token_ids[1:]]
        half = len(entries) // 2
        parts = ((1, entries[:half]), (1 + half, entries[half:]))
        for start, part in parts[:1] if self.tokens_before_pause == 0 else parts:  # the prompt is half computed
            piece = PromptLogprobs(request.request_id, start, part)
            self._send(identity, OutputBatch(self.epoch, self.step, [], [piece]))

    def _publish_stats(self) -> None:
        if not self.send_stats or time.monotonic() < self._next_stats:
            return
        self._next_stats = time.monotonic() + 0.5
        self.send_all(
            EngineStats(
                self.epoch, self.step, len(self.live), 0, 100, 100 - len(self.live),
                finished_total={"stop": 1}, seconds_since_progress=self.seconds_since_progress,
            )
        )  # fmt: skip

    def _send_info(self) -> None:
        limits = (self.vocab_size, self.max_model_len, 16, 100, 8, self.mode, HIDDEN_SIZE) if self.ready else ()
        self.send_all(EngineInfo(self.epoch, self.ready, *limits))

    def _send(self, identity: bytes, message: object) -> None:
        if identity in self.links:
            self.links[identity].say(message)

    def _send_packet(self, identity: bytes, packet: Packet) -> bool:
        try:
            self._socket.send_multipart([identity, *packet.frames()])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True
