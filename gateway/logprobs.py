"""Log-probabilities in OpenAI's two shapes, and vLLM's for prompts: written as JSON, token by token."""

from __future__ import annotations

from functools import lru_cache
from json.encoder import encode_basestring, encode_basestring_ascii

from gateway.slices import Written
from novainfer.client.output import TokenLogprob, TokenText
from novainfer.errors import InvalidRequestError, OverloadedError

LOWEST = -9999.0  # stands for minus infinity, which JSON does not have
_KEPT = 2**15  # tokens whose JSON is kept
# An entry has some 85 bytes of JSON. 128k tokens with 20 alternatives each have 2.8 million.
MAX_OF_ANSWER = 2**22
MAX_HELD = 2**24


@lru_cache(_KEPT)
def _label(data: bytes, ascii_only: bool) -> str:
    """The token's text, quoted; one that is only part of a character is spelled as bytes. Tokens may share a text."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    quoted: str = encode_basestring_ascii(text) if ascii_only else encode_basestring(text)
    return quoted


@lru_cache(_KEPT)
def _around(data: bytes, ascii_only: bool) -> tuple[str, str]:
    """What stands before and after a token's log-probability in a chat."""
    return f'{{"token":{_label(data, ascii_only)},"logprob":', f',"bytes":[{",".join(map(str, data))}]'


def _id_label(token: TokenText) -> str:
    """The token's id as vLLM writes it, quoted."""
    return f'"token_id:{token.token_id}"'


class _Items(list[str]):
    """The items of a JSON list, each but the first with the comma before it."""

    def add(self, item: str) -> None:
        self.append(f",{item}" if self else item)


class LogprobRoom:
    """How many log-probabilities this gateway holds for whole answers, from their first token until they are sent."""

    def __init__(self, *, is_shared: bool = False) -> None:
        """is_shared: there are several tenants, of which none may hold more than half."""
        self._held = 0
        self._of_tenant: dict[str, int] = {}
        self._is_shared = is_shared

    def take(self, tenant: str, count: int, held: int) -> None:
        """For an answer that holds so many already. Raises `InvalidRequestError` where that would be too many, and
        `OverloadedError` where all, or those of the tenant, would be.
        """
        if held + count > MAX_OF_ANSWER:
            words = f"logprobs: a whole answer can tell {MAX_OF_ANSWER} log-probabilities: stream it, or ask for fewer."
            raise InvalidRequestError(words, param="logprobs")
        words = "Too many log-probabilities are held for answers. Please ask for fewer, or retry later."
        of_tenant = self._of_tenant.get(tenant, 0) + count
        if self._is_shared and of_tenant > MAX_HELD // 2:
            raise OverloadedError(words, retry_after=5.0, status=429)
        if self._held + count > MAX_HELD:
            raise OverloadedError(words, retry_after=5.0)
        self._held += count
        self._of_tenant[tenant] = of_tenant

    def give_back(self, tenant: str, count: int) -> None:
        """An answer is sent, or will not be."""
        self._held -= count
        self._of_tenant[tenant] = self._of_tenant.get(tenant, 0) - count


class ChatLogprobs:
    """`choices[].logprobs` of a chat. ascii_only: for streams, whose events are lines. as_ids: tokens are named so."""

    def __init__(self, *, ascii_only: bool = False, as_ids: bool = False) -> None:
        self._ascii_only = ascii_only
        self._as_ids = as_ids
        self._content = _Items()

    def add(self, entry: TokenLogprob) -> None:
        """The next token."""
        top = ",".join([f"{self._token(token, logprob)}}}" for token, logprob in entry.top])
        self._content.add(f'{self._token(entry.token, entry.logprob)},"top_logprobs":[{top}]}}')

    def __len__(self) -> int:
        """Tokens so far."""
        return len(self._content)

    def write(self) -> Written:
        """The object so far."""
        return Written(['{"content":[', *self._content, '],"refusal":null}'])

    def write_list(self, start: int = 0) -> Written:
        """The tokens from this one on, by themselves."""
        first, *rest = self._content[start:] or [""]
        return Written(["[", first.removeprefix(","), *rest, "]"])

    def _token(self, token: TokenText, logprob: float) -> str:
        before, after = _around(token.data, self._ascii_only)
        if self._as_ids:
            before = f'{{"token":{_id_label(token)},"logprob":'
        return f"{before}{_number(logprob)}{after}"


class CompletionLogprobs:
    """`choices[].logprobs` of a text completion, or the part of it that an echoed prompt has.

    num_top: how many alternatives are told of a token, of which more may be known (None = all). as_ids: tokens are
    named by their ids.
    """

    def __init__(self, *, ascii_only: bool = False, num_top: int | None = None, as_ids: bool = False) -> None:
        self._ascii_only = ascii_only
        self._as_ids = as_ids
        self._num_top = num_top
        self._tokens, self._logprobs, self._tops, self._offsets = self._lists = [_Items() for _ in range(4)]

    def add(self, entry: TokenLogprob) -> None:
        """The next token."""
        tops: dict[str, float] = {}
        for token, logprob in (*entry.top[: self._num_top], (entry.token, entry.logprob)):
            label = self._label(token)
            tops[label] = max(logprob, tops.get(label, logprob))  # the likeliest of the tokens with this text
        self._tokens.add(self._label(entry.token))
        self._logprobs.add(_number(entry.logprob))
        self._tops.add("{" + ",".join([f"{label}:{_number(logprob)}" for label, logprob in tops.items()]) + "}")
        self._offsets.add(str(entry.text_offset))

    def add_prompt(self, token: TokenText, offset: int, entry: TokenLogprob | None) -> None:
        """The next token of the prompt; the first has no log-probability."""
        if entry is not None:
            self.add(entry)
            return
        self._tokens.add(self._label(token))
        self._logprobs.add("null")
        self._tops.add("null")
        self._offsets.add(str(offset))

    def _label(self, token: TokenText) -> str:
        return _id_label(token) if self._as_ids else _label(token.data, self._ascii_only)

    def pack(self) -> None:
        """It is complete, and will be written often."""
        for items in self._lists:
            items[:] = ["".join(items)] if items else []

    def write(self, before: CompletionLogprobs | None = None) -> Written:
        """The object so far, after the one of the prompt `before` it."""
        parts = Written()
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        for number, (name, items) in enumerate(zip(names, self._lists, strict=True)):
            first = before._lists[number] if before is not None else []
            comma = [","] if first and items else []
            parts += [f'{"," if number else "{"}"{name}":[', *first, *comma, *items, "]"]
        parts.append("}")
        return parts


class PromptLogprobs:
    """vLLM's `prompt_logprobs`: for each prompt token a map of token id to its log-probability.

    num_top: how many alternatives are told of a token, of which more may be known (None = all).
    """

    def __init__(self, num_top: int | None = None) -> None:
        self._num_top = num_top
        self._items = _Items()

    def add_prompt(self, token: TokenText, offset: int, entry: TokenLogprob | None) -> None:
        """The next token of the prompt; the first has no log-probability."""
        if entry is None:
            self._items.add("null")
            return
        top = entry.top[: self._num_top]
        ranks = {t.token_id: _ranked(t, logprob, rank) for rank, (t, logprob) in enumerate(top, 1)}
        ranks[token.token_id] = _ranked(token, entry.logprob, entry.rank)
        self._items.add("{" + ",".join(ranks.values()) + "}")

    def write(self) -> Written:
        """The list, in one part."""
        return Written([f"[{''.join(self._items)}]"])


def _ranked(token: TokenText, logprob: float, rank: int) -> str:
    label = _label(token.data, False)
    return f'"{token.token_id}":{{"logprob":{_number(logprob)},"rank":{rank},"decoded_token":{label}}}'


def _number(logprob: float) -> str:
    return repr(logprob if logprob > LOWEST else LOWEST)  # NaN compares false too
