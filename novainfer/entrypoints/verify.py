"""`novainfer verify`: compute answers again from their receipts, and compare."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from novainfer.checkpoint import WEIGHT_FILES, model_digest, resolve_checkpoint
from novainfer.errors import ConfigError, EngineError, NovaInferError
from novainfer.mode import Mode
from novainfer.receipt import ChoiceReceipt, Receipt, token_hash
from novainfer.sampling.params import SamplingParams

MAX_FILE_BYTES = 256 * 1024 * 1024
EXIT_EQUAL, EXIT_DIFFERENT = 0, 1
_BLOCK_SIZE = 16  # tokens


def verify_command(arguments: argparse.Namespace) -> int:
    """0 if every choice comes out as its receipt says, 1 if one does not. Raises `ConfigError` if that is unknown."""
    try:
        receipts = find_receipts(_read(arguments.receipt))
        return _verify(receipts, arguments)
    except (NovaInferError, OSError, RuntimeError) as error:  # status 1 is kept for answers that differ
        raise ConfigError(f"cannot verify: {error}") from error


def find_receipts(text: str) -> list[Receipt | None]:
    """The receipts in `text`, one a prompt: a receipt itself, the body of a response, or a saved event stream.

    None stands for a prompt that has none. Raises `ConfigError` or `InvalidRequestError` for anything else.
    """
    is_stream = text.startswith(("data:", ":"))
    events = [line[5:].strip() for line in text.split("\n") if line.startswith("data:")] if is_stream else [text]
    found: list[Any] = []
    for document in (_parse(event) for event in events if event != "[DONE]"):
        if isinstance(document.get("receipts"), list):
            found += document["receipts"]
        elif "receipt" in document:
            found.append(document["receipt"])
        elif "object" not in document and not is_stream:  # no answer of the API
            found.append(document)
    receipts = [None if data is None else Receipt.from_json(data) for data in found]
    if not any(receipts):
        raise ConfigError('the file holds no receipt: ask for one with `"receipt": true`')
    return receipts


def _read(name: str) -> str:
    with sys.stdin.buffer if name == "-" else Path(name).open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"the file has more than {MAX_FILE_BYTES} bytes")
    return data.decode("utf-8", "replace")


def _parse(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError("the file is neither JSON nor an event stream") from None
    if not isinstance(data, dict):
        raise ConfigError("the file does not hold a JSON object")
    return data


def _verify(receipts: Sequence[Receipt | None], arguments: argparse.Namespace) -> int:
    from novainfer.entrypoints.llm import LLM  # loads torch

    given = [receipt for receipt in receipts if receipt is not None]
    first = given[0]
    if any(_origin(receipt) != _origin(first) for receipt in given):
        raise ConfigError("the receipts are of different models or modes, so not of one answer")
    mode = Mode.parse(first.mode)
    folder = _checkpoint(arguments.model or first.model, first.model_digest)
    with LLM(str(folder), **_options(first, mode, arguments)) as llm:
        is_same_mode = llm.mode == first.mode
        if not is_same_mode and not arguments.any_mode:
            raise ConfigError(
                f"this machine computes in the mode '{llm.mode}', the receipt is of '{first.mode}', whose tokens may "
                f"differ; --any-mode compares all the same"
            )
        answers = iter(_recompute(llm, given))
    is_equal = True
    for number, receipt in enumerate(receipts):
        if receipt is None:
            print(f"prompt {number}: no receipt")
        else:
            is_equal = _compare(number, receipt, next(answers)) and is_equal
    print("verified: every choice is equal" if is_equal else "NOT verified: a choice is different")
    if not is_same_mode:
        print(f"only indicative: computed in the mode '{llm.mode}', the receipt is of '{first.mode}'")
    elif not mode.is_exact:
        print(f"only indicative: in the mode '{first.mode}' tokens may depend on what ran beside them")
    return EXIT_EQUAL if is_equal else EXIT_DIFFERENT


def _origin(receipt: Receipt) -> tuple[object, ...]:
    return receipt.model, receipt.model_digest, receipt.mode, receipt.max_model_len


def _checkpoint(model: str, digest: str) -> Path:
    """The model's folder. Raises `ConfigError` if it is not what the digest says."""
    folder = resolve_checkpoint(model, files=WEIGHT_FILES)
    found = model_digest(folder)
    if found != digest:
        raise ConfigError(f"the model '{model}' has the digest {found}, the receipt is of {digest}")
    return folder


def _options(receipt: Receipt, mode: Mode, arguments: argparse.Namespace) -> dict[str, Any]:
    """The engine of the receipt's mode; with --any-mode, whatever this machine has."""
    options: dict[str, Any] = {
        "dtype": mode.dtype,
        "quantization": mode.asked_quantization,
        "kv_cache_dtype": mode.kv_cache_dtype,
        "model_backend": mode.model_backend,
        "max_model_len": receipt.max_model_len,
        # Room for one sequence of the full length: what does not fit beside another waits, and comes out the same.
        "block_size": _BLOCK_SIZE,
        "num_blocks": -(-receipt.max_model_len // _BLOCK_SIZE),
    }
    if arguments.any_mode:
        return options | {"device": arguments.device or "auto"}
    return options | {
        "device": arguments.device or mode.device,
        "kernel_backend": mode.kernel_backend,
        "tensor_parallel_size": mode.tensor_parallel_size,
    }


def _recompute(llm: Any, receipts: Sequence[Receipt]) -> list[list[ChoiceReceipt]]:
    """What each receipt's choices should say, by an `LLM`."""
    ids = [
        llm.add_request(
            list(receipt.prompt_token_ids),
            _bounded(receipt),
            eos_token_ids=receipt.eos_token_ids,
            after_prompt=receipt.after_prompt,
        )
        for receipt in receipts
    ]
    results: dict[str, list[ChoiceReceipt]] = {}
    while not llm.is_finished():
        results |= {result["request_id"]: [_choice(choice) for choice in result["choices"]] for result in llm.step()}
    return [results[request_id] for request_id in ids]


def _bounded(receipt: Receipt) -> SamplingParams:
    """The receipt's parameters without what no token depends on: one token more than it counts shows any difference."""
    params = receipt.params
    longest = max(choice.num_tokens for choice in receipt.choices)
    bound = max(params.min_tokens, min(params.max_tokens, longest + 1))
    return replace(params, max_tokens=bound, logprobs=None, prompt_logprobs=None)


def _choice(result: dict[str, Any]) -> ChoiceReceipt:
    if result["error"] is not None:
        raise EngineError(result["error"])
    return ChoiceReceipt(len(result["token_ids"]), token_hash(result["token_ids"]), result["finish_reason"])


def _compare(prompt: int, receipt: Receipt, recomputed: list[ChoiceReceipt]) -> bool:
    for number, (claimed, found) in enumerate(zip(receipt.choices, recomputed, strict=True)):
        name = f"prompt {prompt}, choice {number}"
        if claimed == found:
            print(f"{name}: equal ({_words(found)})")
        else:
            print(f"{name}: DIFFERENT: the receipt says {_words(claimed)}; computed again: {_words(found)}")
    return list(receipt.choices) == recomputed


def _words(choice: ChoiceReceipt) -> str:
    return f"{choice.num_tokens} tokens, {choice.token_hash}, {choice.finish_reason}"
