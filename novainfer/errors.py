"""Every error that may cross a boundary. Pure data; used by all processes."""

from __future__ import annotations


class NovaInferError(Exception):
    """Base of all errors raised on purpose."""


class InvalidRequestError(NovaInferError):
    """The request is wrong; only this request ends, with HTTP 400.

    `param` names the offending field in the API's words, `code` is OpenAI's machine-readable reason.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class OverloadedError(NovaInferError):
    """The engine cannot take the request now: 429 for the caller's own limit, else 503.

    `retry_after` is in seconds.
    """

    def __init__(self, message: str, *, retry_after: float, status: int = 503) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after
        self.status = status


class DeadlineError(NovaInferError):
    """The request has taken all the time that it or the server allows it (HTTP 504)."""


class EngineError(NovaInferError):
    """The engine failed while it worked on an accepted request (HTTP 500)."""


class PeerLostError(EngineError):
    """A rank cannot reach another rank of its group, or its scheduler: the fault is not its own."""


class ProtocolError(NovaInferError):
    """A peer sent bytes that are not a message of the closed schema."""


class ConfigError(NovaInferError):
    """The configuration cannot work; the process does not start."""


class UnsupportedModelError(NovaInferError):
    """The checkpoint cannot be served; the text says why."""


def words_of(error: BaseException) -> str:
    """What went wrong, as one line for a log. Errors that are raised on purpose need no name of a class before them."""
    text = " ".join(str(error).split())
    return text if text and isinstance(error, NovaInferError) else f"{type(error).__name__}: {text}".rstrip(": ")
