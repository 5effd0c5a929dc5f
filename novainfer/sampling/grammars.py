"""What an answer has to be, as a grammar: of a JSON schema, a regex, some texts, or Lark. Made and looked at here.

One form travels (`SamplingParams.grammar`): a Lark text as llguidance reads it. Who lets a request in has it built here
first, with the limits under which the workers build it again, so that none of them meets what it cannot do, or what
would hold it up. llguidance is imported when it is first needed: not every platform has it.
"""

from __future__ import annotations

import json
import math
import random
import re
import threading
import time
from array import array
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from novainfer.errors import InvalidRequestError
from novainfer.sampling.grammar_checks import check_lark, check_names, check_regex, check_schema, no_schema, words_for
from novainfer.sampling.params import MAX_GRAMMAR_BYTES
from novainfer.sampling.schema_rewrites import rewrite

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

JSON, REGEX, CHOICE, LARK = "json", "regex", "choice", "grammar"
KINDS = (JSON, REGEX, CHOICE, LARK)
CALLS = "calls"  # of tools: a JSON object with "schema" of a call, its "marks", "are_special" and "is_many"
INSTEAD = "instead"  # in that, if need be: the schema of what may be said in place of calls
_MOST_CALLS = 16
BUILD_SECONDS = 0.05  # of CPU time, for a grammar, and once more for a text of it: most that a server takes
# The deepest grammars of `MAX_GRAMMAR_BYTES` have taken up to 32 MiB, those with as many names as they may have, 10. A
# worker has more than who let the request in, so that it builds whatever was built before. Only what is used is taken.
TRIAL_STACK_BYTES = 64 * 1024**2
WORKER_STACK_BYTES = 4 * TRIAL_STACK_BYTES
_stack_size = threading.Lock()  # it is the process's
_TRIED_BYTES = 300  # of a text that it allows
MAX_CHOICES = 4096

# A step of a worker waits for the masks of its rows: 50,000 of fuel are 3.5 ms. 8,000 items are half a millisecond, or
# tens of them in grammars that are made for it: what one costs grows with how many there are in its row. Such a row is
# given up by the time that it takes (`workers.grammars`). An optional property is 4 items in a row: 200 are possible.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 8_000,
    "max_items_in_row": 850,
    "max_lexer_states": 100_000,  # of half a kB to 2 kB, made as they are met: each row has its own
    "max_grammar_size": 50_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,  # they would hold the grammar
}
# A mask holds every token with which the text can go on, also where only one text can follow: the model spells it.
_HEADER = '%llguidance {"no_forcing": true}\n'
# Between the tokens of JSON: a space, or a line break and what a line is indented by. There are models that would write
# white space for ever where they may.
_JSON_OPTIONS = {"lenient": False, "whitespace_pattern": r"(\x20|\x0D?\x0A[\x20\x09]{0,64})"}
_SPACE, _NO_SPACE = r"/[ \t\r\n]{1,8}/", ""  # between a thought and what follows; in Lark
_OPTIONS = re.compile(r"^\s*%llguidance", re.MULTILINE)
_MANY_ITEMS = re.compile(r"Current row has \d+ items|Too many items")
_TOO_COMPLEX = (
    "The grammar is too complex, or too ambiguous: at one place there are too many ways to go on "
    "(fewer optional properties, or fewer alternatives that begin alike, would help)"
)
_ONE_OF = (
    "oneOf is only supported where its alternatives, none a $ref, exclude each other: by their types, or as objects by "
    "a property that all of them require and of which each has other texts (const or enum); else use anyOf"
)
NO_TEXT = "No text fits the grammar"  # a fault
_NUM_BYTES = 256


class Thoughts(NamedTuple):
    """How the answer may think first. opening, closing: the marks.

    are_special: the marks are special tokens, not text. is_inside: the prompt has begun the thought.
    """

    opening: str
    closing: str
    are_special: bool
    is_inside: bool


def llguidance() -> ModuleType:
    """The library. Raises `InvalidRequestError` where there is none: then only requests with grammars are refused."""
    try:
        return import_module("llguidance")
    except ImportError:
        raise InvalidRequestError("This server has no llguidance, which grammars need.") from None


def make_grammar(kind: str, source: str, thoughts: Thoughts | None) -> str:
    """The Lark text of a `source`: a JSON schema, a regex, a JSON list of texts, or Lark itself.

    thoughts: None: the answer has none. Raises `InvalidRequestError`. To be given to `check_grammar`.
    """
    if kind == REGEX:
        check_regex(source)
    elif kind == LARK:
        check_lark(source)
    if kind == LARK and thoughts is None:
        grammar = source
    else:
        space = _NO_SPACE if thoughts is None else _SPACE
        rules = _thinking(thoughts) + _BODIES[kind](source, space)
        grammar = "\n".join(rules) + "\n"
    try:
        size = len(grammar.encode())
    except UnicodeEncodeError:
        raise InvalidRequestError("The grammar has half of a surrogate pair, which is no text.") from None
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(f"The grammar has more than {MAX_GRAMMAR_BYTES} bytes.")
    return grammar


def _thinking(thoughts: Thoughts | None) -> list[str]:
    if thoughts is None:
        return ["start: body"]
    start = "start: thought body" if thoughts.is_inside else "start: (opening thought)? body"
    if thoughts.are_special:
        opening, thought = thoughts.opening, rf"thought: /(.|\n)*/ {thoughts.closing}"
    else:
        opening, thought = json.dumps(thoughts.opening), rf"thought[suffix={json.dumps(thoughts.closing)}]: /(.|\n)*/"
    return [start, *([] if thoughts.is_inside else [f"opening: {opening}"]), thought]


def _json_body(source: str, space: str) -> list[str]:
    try:
        schema = json.loads(source)
        if isinstance(schema, dict):
            rewrite(schema)
        check_schema(schema)
        text = json.dumps(schema | {"x-guidance": _JSON_OPTIONS}, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise no_schema(error) from None
    body = f"%json {text}"
    return [f"body: SPACE? {body}", f"SPACE: {space}"] if space else [f"body: {body}"]


def _regex_body(source: str, space: str) -> list[str]:
    if not source:
        raise InvalidRequestError("A regex must not be empty.")
    quoted = json.loads(llguidance().LLMatcher.grammar_from_regex(source))["grammars"][0]["lark_grammar"]
    return _terminal(quoted.removeprefix("start: "), space)


def _choice_body(source: str, space: str) -> list[str]:
    texts = json.loads(source)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError("A choice is a list of one or more texts.")
    if len(texts) > MAX_CHOICES:
        raise InvalidRequestError(f"A choice has at most {MAX_CHOICES} texts.")
    quoted = [json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in texts]
    return _terminal("(" + " | ".join(quoted) + ")", space)


def _lark_body(source: str, space: str) -> list[str]:
    return ["body: SPACE? inner", f"SPACE: {space}", f"inner: %lark {{\n{source}\n}}"]


def _terminal(body: str, space: str) -> list[str]:
    """One lexeme, white space included: two would compete for what either may begin with."""
    return ["body: BODY", f"BODY: ({space})? {body}" if space else f"BODY: {body}"]


def _calls_body(source: str, space: str) -> list[str]:
    asked = json.loads(source)
    before, behind = asked["marks"] if asked["are_special"] else map(json.dumps, asked["marks"])
    more = f' ("\\n" call){{0,{_MOST_CALLS - 1}}}' if asked["is_many"] else ""
    said, rules = f"call{more}", list[str]()
    if INSTEAD in asked:
        said = f"({said} | answer)"
        rules += _rule_of("answer", asked[INSTEAD])
    rules += _rule_of("object", asked["schema"])
    body = [f"body: SPACE? {said}", f"SPACE: {space}"] if space else [f"body: {said}"]
    return [*body, f'call: {before} "\\n" object "\\n" {behind}', *rules]


def _rule_of(name: str, schema: dict[str, Any]) -> list[str]:
    (body,) = _json_body(json.dumps(schema), _NO_SPACE)
    return [body.replace("body:", f"{name}:", 1)]


_BODIES = {CALLS: _calls_body, JSON: _json_body, REGEX: _regex_body, CHOICE: _choice_body, LARK: _lark_body}


@lru_cache(maxsize=64)
def check_grammar(grammar: str, special_tokens: tuple[str, ...] = (), seconds: float = math.inf) -> None:
    """Raise `InvalidRequestError`, with llguidance's words, for a grammar that is none, or too large, or too dear.

    special_tokens: which it may name. seconds: of CPU time to build it, or to write a text of it, after
    which it is too dear; nothing here stops the first.
    """
    if _OPTIONS.search(grammar):
        raise InvalidRequestError("A grammar cannot set llguidance's options.")
    check_names(grammar)
    faults: list[Exception] = []

    def check() -> None:
        try:
            _build_and_try(grammar, special_tokens, seconds)
        except Exception as error:
            faults.append(error)

    start_deep(check, TRIAL_STACK_BYTES, "grammar").join()
    if faults:
        raise faults[0]


def start_deep(work: Callable[[], None], stack_bytes: int, name: str) -> threading.Thread:
    """A thread with more stack than others, which is at work: llguidance builds what leads to what by recursion."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    with _stack_size:
        before = threading.stack_size(stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


def _build_and_try(grammar: str, special_tokens: tuple[str, ...], seconds: float) -> None:
    tokenizer = _byte_tokenizer(special_tokens)
    began = time.thread_time()
    matcher = new_matcher(tokenizer, grammar)
    if time.thread_time() - began > seconds and not matcher.is_error():
        raise InvalidRequestError("The grammar is too dear: it takes too long to build.")
    began = time.thread_time()
    _try_out(matcher, tokenizer.vocab_size, began + seconds)
    if matcher.is_error():
        raise InvalidRequestError(fault_of(matcher) + ".")
    if warnings := matcher.get_grammar_warnings():  # something would be ignored
        raise InvalidRequestError(words_for(warnings[0]) + ".")
    if time.thread_time() - began > seconds:
        raise InvalidRequestError("The grammar is too dear: too complex, or too ambiguous, to be followed quickly.")


def _try_out(matcher: LLMatcher, vocab_size: int, end: float) -> None:
    """Write a text of some bytes that it allows: many a grammar is too complex behind its first ones.

    In turn the largest byte and any. end: on the clock of the thread's CPU time; then it is too dear.
    """
    mask = array("I", bytes(-(-vocab_size // 32) * 4))
    chance = random.Random(0)
    for count in range(_TRIED_BYTES):
        if matcher.is_error() or matcher.is_stopped() or time.thread_time() > end:
            return
        matcher.unsafe_compute_mask_ptr(mask.buffer_info()[0], 4 * len(mask))
        allowed = [i for i in range(_NUM_BYTES) if mask[i >> 5] >> (i & 31) & 1]
        if matcher.is_error() or not allowed:
            return
        allowed = [i for i in allowed if i > ord(" ")] or allowed
        matcher.consume_token(chance.choice(allowed) if count % 2 else allowed[-1])


@lru_cache(maxsize=2)
def _byte_tokenizer(special_tokens: tuple[str, ...]) -> LLTokenizer:
    """A small stand-in for a model's: each byte is a token. The end of text is the first after them."""
    tokens = [*(bytes([i]) for i in range(_NUM_BYTES)), b"", *(token.encode() for token in special_tokens)]
    return new_tokenizer(tokens, list(range(_NUM_BYTES, len(tokens))), [_NUM_BYTES])


class _Wrapped:
    """A vocabulary, as llguidance's `TokenizerWrapper` asks for it."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int | None) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokens of a text: none, as with `_HEADER` nobody needs them."""
        return []


def new_tokenizer(tokens: list[bytes], special_token_ids: list[int], eos_token_ids: list[int]) -> LLTokenizer:
    """Of the bytes of each token [V]; a token without any is never allowed.

    eos_token_ids: what ends a text. Without any the tokenizer gets one of its own behind the others.
    """
    library = llguidance()
    wrapper = library.TokenizerWrapper(_Wrapped(tokens, special_token_ids, next(iter(eos_token_ids), None)))
    tokenizer: LLTokenizer = library.LLTokenizer(wrapper, eos_token=eos_token_ids or None, slices=[])
    return tokenizer


def new_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Of a Lark text, at its beginning. Raises nothing: the matcher knows of its faults."""
    matcher: LLMatcher = llguidance().LLMatcher(tokenizer, _HEADER + grammar, log_level=0, limits=parser_limits())
    return matcher


@lru_cache(maxsize=1)
def parser_limits() -> LLParserLimits:
    """The same wherever a grammar is built, or used."""
    limits: LLParserLimits = llguidance().LLParserLimits(**_LIMITS)
    return limits


def fault_of(matcher: LLMatcher) -> str:
    """Why a matcher is in error, in words without a full stop."""
    words = words_for(matcher.get_error())
    if words.startswith("NoExtension"):
        return NO_TEXT
    if words.startswith("oneOf"):
        return _ONE_OF
    return _TOO_COMPLEX if _MANY_ITEMS.search(words) else words
