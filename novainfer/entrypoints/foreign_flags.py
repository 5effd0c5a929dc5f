"""Flags of other servers that are none of ours: which say what is done anyway, and what to say of the others.

A start line that was written for vLLM, SGLang or llama.cpp then works, or fails with what to do; the name that looks
most alike would often be a wrong hint.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

log = logging.getLogger(__name__)

_LORA = "there are no LoRA adapters: merge one into its checkpoint, and serve that"
_EXPERTS = "experts are split as all layers are, with --tensor-parallel-size"
_LOGGED = "requests are logged with --log-requests alone"
# Accepted, and why they change nothing.
WITHOUT_EFFECT = {
    "--disable-log-requests": _LOGGED,
    "--disable-log-stats": "figures are not logged: /metrics has them",
    "--enable-auto-tool-choice": "calls are told wherever the model's form of them is known: see --tool-call-parser",
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--enable-prompt-tokens-details": "usage always has the cached tokens",
    "--jinja": "chats always go through the model's template",
    "--no-enable-expert-parallel": _EXPERTS,
    "--no-enable-log-requests": _LOGGED,
    "--no-enable-lora": _LORA,
}
_DATA = "several engines behind one port are --replicas"
_LAYERS = "layers are not shared out among ranks: --tensor-parallel-size splits each of them"
_LENGTH = "the name of this is --max-model-len"
_TLS = "there is no TLS: put a proxy before the server"
_DRAFTS = "there are no draft models: --speculation guesses without one"
_HOST = "nothing is moved to the host's memory: --gpu-memory-utilization and --num-blocks say how much is used"
_DEFAULTS = "the checkpoint's generation_config.json is always read; what a request says goes before it"
# Refused, and why.
ABSENT = {
    "--alias": "the name of this is --served-model-name",
    "--code-revision": "--revision is of the whole checkpoint",
    "--context-length": _LENGTH,
    "--cpu-offload-gb": _HOST,
    "--ctx-size": _LENGTH,
    "--data-parallel-size": _DATA,
    "-dp": _DATA,
    "--distributed-executor-backend": "workers are always Ray's",
    "--enable-expert-parallel": _EXPERTS,
    "--enable-log-requests": "the name of this is --log-requests",
    "--enable-lora": _LORA,
    "--enable-reasoning": "see --reasoning-parser, which is on by default where the model thinks",
    "--generation-config": _DEFAULTS,
    "--limit-mm-per-prompt": "only text is served",
    "--lora-modules": _LORA,
    "--max-lora-rank": _LORA,
    "--max-loras": _LORA,
    "--mem-fraction-static": "the name of this is --gpu-memory-utilization",
    "--no-enable-chunked-prefill": "prompts are always computed in chunks",
    "--override-generation-config": _DEFAULTS,
    "--pipeline-parallel-size": _LAYERS,
    "-pp": _LAYERS,
    "--seed": "each request has its own seed, or is given one",
    "--speculative-config": _DRAFTS,
    "--speculative-model": _DRAFTS,
    "--ssl-certfile": _TLS,
    "--ssl-keyfile": _TLS,
    "--swap-space": _HOST,
    "--tokenizer-revision": "--revision is of the tokenizer, too",
    "--tp-size": "the name of this is --tensor-parallel-size",
}


def why_refused(flag: str) -> str | None:
    """What to say of a flag of others that is not taken, or stands where only options do; None: it is unknown."""
    known = ABSENT | WITHOUT_EFFECT
    return known.get(flag) or (known.get(f"--{flag[5:]}") if flag.startswith("--no-") else None)


def flag_without_effect(name: str, value: object) -> str | None:
    """The flag of others that an option with that value stands for, where it changes nothing; else None."""
    flag = name.replace("_", "-")
    said = f"--{flag}" if value is True else f"--no-{flag}" if value is False else ""
    return said if said in WITHOUT_EFFECT else None


def log_without_effect(flags: Iterable[str]) -> None:
    """Say in the log why these flags of others change nothing."""
    for flag in flags:
        log.info("%s has no effect: %s", flag, WITHOUT_EFFECT[flag])
