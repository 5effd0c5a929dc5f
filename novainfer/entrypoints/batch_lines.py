"""OpenAI's batch format: a line of the input is a `Job` or a `Fault`, an answer is a line of the output. Pure."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from typing import Any

from novainfer.sampling.params import MAX_SEED

SEEDED_URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
URLS = (*SEEDED_URLS, "/v1/embeddings")
INVALID, DUPLICATE, UNANSWERED = "invalid_line", "duplicate_custom_id", "no_answer"  # codes of lines without a response
_NO_SEED = (None, -1)
_EXCERPT = 200  # characters of an answer that is not JSON
_OUTPUT_NAMES, _PROMPT_NAMES = ("completion_tokens", "output_tokens"), ("prompt_tokens", "input_tokens")


@dataclass(frozen=True, slots=True)
class Job:
    """A request to send: a POST of `payload`, which is JSON, to `url`, a path."""

    custom_id: str
    url: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a line of the input is not sent. number: the line's, from 1."""

    code: str
    message: str
    number: int
    custom_id: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A line of the output, with its end, and what it counts for."""

    line: bytes
    is_ok: bool  # answered with 200
    prompt_tokens: int = 0
    output_tokens: int = 0


def digest_of(custom_id: str) -> bytes:
    """16 bytes that stand for an id: as many of them are kept as the input has lines."""
    return hashlib.blake2b(json.dumps(custom_id).encode(), digest_size=16).digest()


def seed_of(custom_id: str) -> int:
    """The seed of a request that has none: the same whenever its batch runs."""
    return int.from_bytes(hashlib.blake2b(json.dumps(custom_id).encode(), digest_size=8).digest(), "big") & MAX_SEED


def parse_line(line: bytes, number: int, *, seeds_from_ids: bool) -> Job | Fault:
    """What a line of the input asks for. That its custom_id is the first of its kind is not looked at."""
    try:
        data = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return Fault(INVALID, "the line is not JSON in UTF-8", number)
    if not isinstance(data, dict):
        return Fault(INVALID, "the line is not a JSON object", number)
    custom_id = data.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return Fault(INVALID, "custom_id must be there, a text that is not empty", number)
    url, body = data.get("url"), data.get("body")
    why = _why_wrong(data.get("method"), url, body)
    if why is not None or not isinstance(url, str) or not isinstance(body, dict):
        return Fault(INVALID, why or "", number, custom_id)
    if seeds_from_ids and url in SEEDED_URLS and body.get("seed") in _NO_SEED:
        body["seed"] = seed_of(custom_id)
    return Job(custom_id, url, json.dumps(body, separators=(",", ":")).encode())


def _why_wrong(method: object, url: object, body: object) -> str | None:
    if method != "POST":
        return f"method must be POST, not {_shown(method)}"
    if url not in URLS:
        return f"url must be one of {', '.join(URLS)}, not {_shown(url)}"
    if not isinstance(body, dict):
        return "body must be there, a JSON object"
    if body.get("stream"):
        return "body: a batch has whole answers, so stream must be false"
    return None


def _shown(value: object) -> str:
    return json.dumps(value)[:_EXCERPT]


def answered(job: Job, status: int, request_id: str | None, data: bytes) -> Outcome:
    """What came of a job. data: the answer's body, which is kept byte for byte where it is JSON of one line."""
    body, parsed = _body_text(data)
    if parsed is None and status == 200:
        return unanswered(job, f"the answer is not JSON: {_excerpt(data)}")
    usage = parsed.get("usage") if isinstance(parsed, dict) else None
    line = (
        f'{{"id": "{_new_id()}", "custom_id": {json.dumps(job.custom_id)}, "response": {{"status_code": {status}, '
        f'"request_id": {json.dumps(request_id)}, "body": {body}}}, "error": null}}\n'
    )
    return Outcome(line.encode(), status == 200, _count(usage, _PROMPT_NAMES), _count(usage, _OUTPUT_NAMES))


def unanswered(job: Job, why: str) -> Outcome:
    """The same where no answer came."""
    return _without_response(job.custom_id, {"code": UNANSWERED, "message": why})


def refused(fault: Fault) -> Outcome:
    """The output's line for a line of the input that is not sent."""
    message = f"line {fault.number}: {fault.message}"
    return _without_response(fault.custom_id, {"code": fault.code, "message": message, "line": fault.number})


def _without_response(custom_id: str | None, error: dict[str, Any]) -> Outcome:
    line = {"id": _new_id(), "custom_id": custom_id, "response": None, "error": error}
    return Outcome(json.dumps(line).encode() + b"\n", is_ok=False)


def kept_id(line: bytes) -> str | None:
    """The custom_id of a line of the output that was answered with 200; None: it has to be asked again.

    Raises `ValueError` for what is no line of a batch's output.
    """
    data = json.loads(line)
    if not isinstance(data, dict) or not {"custom_id", "response", "error"} <= data.keys():
        raise ValueError("no result of a batch")
    response, custom_id = data["response"], data["custom_id"]
    is_ok = isinstance(response, dict) and response.get("status_code") == 200 and data["error"] is None
    return custom_id if is_ok and isinstance(custom_id, str) else None


def _new_id() -> str:
    return f"batch_req_{os.urandom(12).hex()}"


def _body_text(data: bytes) -> tuple[str, Any]:
    """A body as JSON of one line, and what it says; None: it was no JSON."""
    try:
        text = data.decode()
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        error = {"message": f"The answer is not JSON: {_excerpt(data)}", "type": "server_error"}
        return json.dumps({"error": {**error, "param": None, "code": None}}), None
    return (json.dumps(parsed) if "\n" in text or "\r" in text else text), parsed


def _excerpt(data: bytes) -> str:
    return " ".join(data[: 4 * _EXCERPT].decode(errors="replace").split())[:_EXCERPT]


def _count(usage: object, names: tuple[str, ...]) -> int:
    found = [usage.get(name) for name in names] if isinstance(usage, dict) else []
    return next((count for count in found if type(count) is int), 0)
