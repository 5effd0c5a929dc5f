"""Which tokens a row's grammar allows: on rank 0, right before the row samples.

A row's matcher is a function of its grammar and its output tokens. It reads those that it has not seen from the row, so
that a row may come back with any number of them: after a preemption, in another worker, at another gateway's order. The
masks before them are not made again. A token that is told is always the same; where a grammar comes to a limit (of
llguidance, which counts what earlier masks made; or of time), its row ends with an error, and that may be at another
token after it came back. Rows with the same text share what was built of it. Where they have brought that to its
limits, each begins again once with what is built for it alone: then it goes as far as it would without the others.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary, ref

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from novainfer.errors import words_of
from novainfer.protocol.step import GIVEN_UP, RULED_OUT
from novainfer.sampling.grammars import NO_TEXT, WORKER_STACK_BYTES, fault_of, new_matcher, new_tokenizer, start_deep
from workers.row_sampling import RowGrammar, to_device

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from novainfer.text.vocabulary import Vocabulary

Words = npt.NDArray[np.int32]
_log = logging.getLogger(__name__)
_AT_ONCE = 64  # tokens of a row that catches up, between looks at the clock
# A row is given up when it has taken more CPU time than this, with so much for each mask and each token. An ordinary
# mask takes 0.01 to 1 ms, an ordinary token some microseconds.
_SECONDS = 0.25
_MASK_SECONDS = 0.002
_TOKEN_SECONDS = 0.0001
_REBUILD_SECONDS = 0.3  # once a step has waited longer for rows that begin again, no more of them do in it
_KEPT = 4  # grammars that no row has any more
_SHARED_FAULTS = re.compile(
    "lexer error|PoisonError"
)  # in llguidance's words, where no copy can use the lexer any more
_MISFIT = "doesn't satisfy the grammar"  # llguidance's words of a token that it did not allow: how did the row get it?


class Form:
    """A grammar that rows have, built once. Each row goes on from a copy of its matcher, which is at the beginning.

    Copies share their lexer, which remembers what was asked of it: once it is at its limits, it is of use to nobody.
    matcher: None: not built, or that cannot be. seconds: of CPU time that it took. fault: why there is none, in words.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.matcher: LLMatcher | None = None
        self.seconds = 0.0
        self.fault = ""
        self.is_done = threading.Event()

    def build(self, tokenizer: LLTokenizer | None) -> None:
        """Raises nothing. tokenizer: None: there is none."""
        began = time.thread_time()
        try:
            if tokenizer is not None:
                self.matcher = new_matcher(tokenizer, self.text)
        except BaseException as error:  # the library's panics are no `Exception`
            self.fault = words_of(error)
            _log.warning("a grammar cannot be built: %s", self.fault)
        self.seconds = time.thread_time() - began
        self.is_done.set()


class Grammars:
    """What rank 0 knows of grammars. The tokenizer is read when the first row needs it: on few servers one ever does.

    A thread with much stack reads it, and builds the rows' grammars beside their prompts, in the order they came. A
    grammar is there as long as a row has it, and the last few that rows have used; those whose rows have gone before
    their turn are not built.
    load: the vocabulary, with as many tokens as there are logits. Raises `ConfigError`.
    """

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._load = load
        self._tokenizer: LLTokenizer | None = None
        self._builder: threading.Thread | None = None
        self._unbuilt: SimpleQueue[ref[Form]] = SimpleQueue()
        self._forms: WeakValueDictionary[str, Form] = WeakValueDictionary()
        self._last: deque[Form] = deque(maxlen=_KEPT)
        self._waited = 0.0  # seconds of this step, for rows that begin again

    def begin_step(self) -> None:
        """To be called before the first row of a step is looked at."""
        self._waited = 0.0

    def expect(self, grammar: RowGrammar) -> None:
        """A row with this grammar has come: it is built while the row's prompt is computed."""
        if grammar.form is None:
            grammar.form = self._find_form(grammar.text)

    def mask(self, logits: Tensor, grammar: RowGrammar, output: Callable[[int], list[int]]) -> bool:
        """Set the ids of logits [V] that may not come next to -inf, in place; all of them where nobody can tell.

        Whether that is known. output: the row's output tokens from an index on.
        """
        words = self._words(grammar, output)
        if words is None:
            logits.fill_(-math.inf)
        else:
            logits.masked_fill_(_is_forbidden(words, len(logits), logits.device), -math.inf)
        return words is not None

    def _words(self, grammar: RowGrammar, output: Callable[[int], list[int]]) -> Words | None:
        """The allowed ids as bits; None: the row is given up, or there is no tokenizer."""
        while True:
            words = self._follow(grammar, output)
            if grammar.form is None or not _SHARED_FAULTS.search(grammar.fault):
                return words
            self._forget(grammar.form)
            if grammar.is_second or self._waited > _REBUILD_SECONDS:
                return None
            self._begin_again(grammar)  # others may have used it up

    def _follow(self, grammar: RowGrammar, output: Callable[[int], list[int]]) -> Words | None:
        """As `_words`, with the form that the row has."""
        if grammar.fault:
            return None
        try:
            matcher = self._matcher_of(grammar)
            if matcher is None or self._tokenizer is None:
                return None
            return _mask_after(grammar, matcher, output(grammar.num_seen), self._tokenizer.vocab_size)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library's panics are no `Exception`
            grammar.fault = words_of(error)
            _log.warning("a grammar cannot be followed any further: %s", grammar.fault)
            return None

    def _matcher_of(self, grammar: RowGrammar) -> LLMatcher | None:
        """The row's own, at its beginning if it had none. None: there can be none."""
        if grammar.matcher is None:
            self.expect(grammar)
            form = grammar.form
            assert form is not None
            form.is_done.wait()
            self._keep(form)
            grammar.fault = form.fault
            if form.matcher is not None:
                grammar.seconds += form.seconds
                grammar.matcher = form.matcher.deep_copy()
        return grammar.matcher

    def _find_form(self, text: str) -> Form:
        form = self._forms.get(text)
        if form is None:
            self._forms[text] = form = self._new_form(text)
        return form

    def _new_form(self, text: str) -> Form:
        form = Form(text)
        if self._builder is None:
            self._builder = start_deep(self._build, WORKER_STACK_BYTES, "grammars")
        self._unbuilt.put(ref(form))
        return form

    def _begin_again(self, grammar: RowGrammar) -> None:
        """With a form that no other row gets: it would use that up, too."""
        began = time.monotonic()
        form = self._new_form(grammar.text)
        form.is_done.wait()
        self._waited += time.monotonic() - began
        grammar.begin_again(form)

    def _keep(self, form: Form) -> None:
        """Rows with its text may find it, also when this one is gone."""
        if self._forms.get(form.text) is form and form not in self._last:
            self._last.append(form)

    def _forget(self, form: Form) -> None:
        if self._forms.get(form.text) is form:
            del self._forms[form.text]
        self._last = deque((other for other in self._last if other is not form), _KEPT)

    def _build(self) -> None:
        """What the thread does, to the process's end."""
        try:
            vocabulary = self._load()
            eos_ids = list(vocabulary.eos_token_ids)
            self._tokenizer = new_tokenizer(vocabulary.tokens, list(vocabulary.special_ids), eos_ids)
        except BaseException as error:  # whatever the files or the library do: only such rows are bad
            _log.warning("no row can follow a grammar here: %s", words_of(error))
        while True:
            self._build_next()

    def _build_next(self) -> None:
        """A function of its own, so that the thread holds no form while it waits."""
        form = self._unbuilt.get()()
        if form is not None:
            form.build(self._tokenizer)


def _mask_after(grammar: RowGrammar, matcher: LLMatcher, ids: list[int], vocab_size: int) -> Words | None:
    """The ids that may come after the row's next output tokens, as bits; None: the row is given up."""
    _catch_up(grammar, matcher, ids)
    words = np.zeros(-(-vocab_size // 32), np.int32)
    if not grammar.fault:
        began = time.thread_time()
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        grammar.num_masks += 1
        _judge(grammar, matcher, began)
    if grammar.fault:
        return None
    if grammar.end_ids and matcher.is_accepting():
        bits = words.view(np.uint32)
        for token_id in grammar.end_ids:
            if token_id < vocab_size:
                bits[token_id >> 5] |= np.uint32(1 << (token_id & 31))
    return words


def _catch_up(grammar: RowGrammar, matcher: LLMatcher, ids: list[int]) -> None:
    """Consume the row's next output tokens."""
    for start in range(0, max(len(ids), 1), _AT_ONCE):
        some = ids[start : start + _AT_ONCE]
        began = time.thread_time()
        if not matcher.is_stopped():  # behind its end there may be more, where that does not end the row
            count = matcher.try_consume_tokens(some)
            if count < len(some) and not matcher.is_stopped():
                matcher.consume_token(some[count])  # it does not fit: the matcher is in error
        grammar.num_seen += len(some)
        _judge(grammar, matcher, began)
        if grammar.fault:
            return


def _judge(grammar: RowGrammar, matcher: LLMatcher, began: float) -> None:
    """Count the CPU time since `began`. Give the row up if its matcher is in error, or has taken too much of it."""
    grammar.seconds += time.thread_time() - began
    if grammar.fault:
        return
    if matcher.is_error():
        grammar.fault = fault_of(matcher)
        if _MISFIT not in grammar.fault:
            grammar.refusal = RULED_OUT if grammar.fault == NO_TEXT else GIVEN_UP
    elif grammar.seconds > _SECONDS + _MASK_SECONDS * grammar.num_masks + _TOKEN_SECONDS * grammar.num_seen:
        grammar.fault, grammar.refusal = "The grammar is too dear to follow", GIVEN_UP
    if grammar.fault:
        _log.warning("a grammar cannot be followed any further: %s", grammar.fault)


def _is_forbidden(words: Words, count: int, device: torch.device) -> Tensor:
    """[count] bool, from the allowed ids as bits of words [>= count / 32]."""
    if device.type == "cpu":
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:count]
        return torch.from_numpy(bits == 0)
    return unset_bits(to_device(words, device), count)


def unset_bits(words: Tensor, count: int) -> Tensor:
    """[count] bool: which of the first bits of words [>= count / 32] int32 are 0, the lowest of each first."""
    bits = words[:, None] >> torch.arange(32, dtype=torch.int32, device=words.device)
    return (bits & 1).view(-1)[:count] == 0
