"""`novainfer verify`: compute answers again from their receipts, and compare with those and with what they say."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from novainfer.checkpoint import WEIGHT_FILES, model_digest, resolve_checkpoint
from novainfer.entrypoints.answer_faults import Echo, Recomputed, answer_faults, choice_faults
from novainfer.entrypoints.answer_ways import ways_of
from novainfer.entrypoints.saved_answer import SavedAnswer, read_answer
from novainfer.errors import ConfigError, EngineError, NovaInferError
from novainfer.mode import Mode
from novainfer.receipt import ChoiceReceipt, Receipt, token_hash
from novainfer.sampling.params import SamplingParams
from novainfer.text.model_parsers import parsers_of
from novainfer.text.parts import Parsers
from novainfer.text.tokenizer import Tokenizer

MAX_FILE_BYTES = 256 * 1024 * 1024
EXIT_EQUAL, EXIT_DIFFERENT = 0, 1
_BLOCK_SIZE = 16  # tokens


def verify_command(arguments: argparse.Namespace) -> int:
    """0 if every choice comes out as its receipt and the answer beside it say, 1 if one does not.

    Raises `ConfigError` if that cannot be told.
    """
    try:
        return _verify(read_answer(_read(arguments.receipt)), arguments)
    except (NovaInferError, OSError, RuntimeError) as error:  # status 1 is kept for answers that differ
        raise ConfigError(f"cannot verify: {error}") from error


def _read(name: str) -> str:
    with sys.stdin.buffer if name == "-" else Path(name).open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"the file has more than {MAX_FILE_BYTES} bytes")
    return data.decode("utf-8", "replace")


def _verify(answer: SavedAnswer, arguments: argparse.Namespace) -> int:
    from novainfer.entrypoints.llm import LLM  # loads torch

    given = [receipt for receipt in answer.receipts if receipt is not None]
    first = given[0]
    if any(_origin(receipt) != _origin(first) for receipt in given):
        raise ConfigError("the receipts are of different models or modes, so not of one answer")
    if answer.choices and any(receipt.params.n != first.params.n for receipt in given):
        raise ConfigError("the receipts have different numbers of choices, so are not of one answer")
    mode = Mode.parse(first.mode)
    folder = _checkpoint(arguments.model or first.model, first.model_digest)
    with LLM(str(folder), **_options(first, mode, arguments)) as llm:
        is_same_mode = llm.mode == first.mode
        if not is_same_mode and not arguments.any_mode:
            raise ConfigError(
                f"this machine computes in the mode '{llm.mode}', the receipt is of '{first.mode}', whose tokens may "
                f"differ; --any-mode compares all the same"
            )
        names = arguments.tool_call_parser, arguments.reasoning_parser
        parsers = parsers_of(llm.tokenizer, *names, arguments.chat_template)
        is_equal = _report(answer, _recompute(llm, given), (llm.tokenizer, parsers))
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
        "tokenizer": arguments.tokenizer,
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


def _recompute(llm: Any, receipts: Sequence[Receipt]) -> list[list[Recomputed]]:
    """What each receipt's choices should say, and the answer beside them, by an `LLM`."""
    ids = [
        llm.add_request(
            list(receipt.prompt_token_ids),
            _bounded(receipt),
            eos_token_ids=receipt.eos_token_ids,
            after_prompt=receipt.after_prompt,
        )
        for receipt in receipts
    ]
    results: dict[str, list[Recomputed]] = {}
    while not llm.is_finished():
        results |= {result["request_id"]: [_choice(choice) for choice in result["choices"]] for result in llm.step()}
    return [results[request_id] for request_id in ids]


def _bounded(receipt: Receipt) -> SamplingParams:
    """The receipt's parameters without what no token depends on: one token more than it counts shows any difference."""
    params = receipt.params
    longest = max(choice.num_tokens for choice in receipt.choices)
    bound = max(params.min_tokens, min(params.max_tokens, longest + 1))
    return replace(params, max_tokens=bound, logprobs=None, prompt_logprobs=None)


def _choice(result: dict[str, Any]) -> Recomputed:
    if result["error"] is not None:
        raise EngineError(result["error"])
    ids = result["token_ids"]
    receipt = ChoiceReceipt(len(ids), token_hash(ids), result["finish_reason"])
    return Recomputed(receipt, result["text"], ids, result["stop_reason"])


def _with_ways(receipt: Receipt, found: Recomputed, told: tuple[Tokenizer, Parsers]) -> Recomputed:
    return replace(found, ways=tuple(ways_of(receipt, found.token_ids, found.receipt.finish_reason, told)))


def _report(answer: SavedAnswer, recomputed: list[list[Recomputed]], told: tuple[Tokenizer, Parsers]) -> bool:
    """Print how each choice compares, and what was compared; whether all is equal."""
    found, is_equal = iter(recomputed), True
    for number, receipt in enumerate(answer.receipts):
        if receipt is None:
            print(f"prompt {number}: no receipt, so nothing of it was compared")
        else:
            echo = Echo(told[0], receipt.prompt_token_ids)
            choices = next(found)
            if answer.is_chat:
                choices = [_with_ways(receipt, choice, told) for choice in choices]
            is_equal = _compare(number, receipt, choices, answer, echo) and is_equal
    for fault in answer_faults(answer):
        print(f"the answer: DIFFERENT: {fault}")
        is_equal = False
    if not answer.choices:
        print("only tokens were compared: there is no answer beside the receipt")
    which = "every choice" if all(answer.receipts) else "every choice with a receipt"
    also = ", and so is what the answer says" if answer.choices else ""
    print(f"verified: {which} is equal{also}" if is_equal else "NOT verified: a choice or the answer is different")
    return is_equal


def _compare(prompt: int, receipt: Receipt, recomputed: list[Recomputed], answer: SavedAnswer, echo: Echo) -> bool:
    """Print how the choices of one prompt compare: with the receipt, and if that is right, with the answer."""
    is_equal = True
    for number, (claimed, found) in enumerate(zip(receipt.choices, recomputed, strict=True)):
        faults, note = [], ""
        if claimed != found.receipt:
            faults = [f"the receipt says {_words(claimed)}; computed again: {_words(found.receipt)}"]
        elif answer.choices:
            faults, note = choice_faults(answer, prompt * receipt.params.n + number, found, echo)
        verdict = f"DIFFERENT: {'; '.join(faults)}" if faults else f"equal ({_words(found.receipt)}){note}"
        print(f"prompt {prompt}, choice {number}: {verdict}")
        is_equal = is_equal and not faults
    return is_equal


def _words(choice: ChoiceReceipt) -> str:
    return f"{choice.num_tokens} tokens, {choice.token_hash}, {choice.finish_reason}"
