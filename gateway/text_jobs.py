"""What a gateway and its text processes tell each other: a closed schema of jobs and replies, each after its length.

Prompts and token ids travel as bytes (UTF-8, native int32), so that only the size of a whole message bounds them.
"""

from __future__ import annotations

import socket
import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from novainfer.errors import ProtocolError
from novainfer.protocol.codec import MAX_MESSAGE_BYTES, Schema

LENGTH = struct.Struct("<I")  # before each message
MAX_TEXT_CHARS = 16 * 1024 * 1024  # that one job may make of token ids


@dataclass(frozen=True, slots=True)
class RenderJob:
    """Render a chat and tokenise the prompt, or give its text where `as_text`.

    chat: a JSON object, as the client sent them: 'messages', 'tools', 'template_kwargs' (its integers know no bounds).
    param: the request's field that is at fault if this cannot be done.   max_model_len: 0 = do not look.
    """

    param: str
    chat: bytes
    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool
    max_model_len: int
    as_text: bool = False


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """Tokenise texts."""

    param: str
    texts: list[bytes]
    add_special_tokens: bool
    max_model_len: int = 0


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """Text of lists of token ids."""

    param: str
    token_ids: list[bytes]
    skip_special_tokens: bool


@dataclass(frozen=True, slots=True)
class GrammarJob:
    """Make a grammar, and look at it. kind, source: as `grammars.make_grammar` has them.

    thoughts: ALLOWED before what it says, BEGUN, or BARRED (see `novainfer.text.parts`).
    """

    param: str
    kind: str
    source: bytes
    thoughts: str


@dataclass(frozen=True, slots=True)
class Ready:
    """A text process's first word, with its `pid`; also the zygote's, with a `fault` if it cannot be one."""

    fault: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Rendered:
    """The template is done with; now its text is tokenised."""

    num_chars: int


@dataclass(frozen=True, slots=True)
class Done:
    """The result: token ids or text, one entry for each prompt; or the text of a grammar."""

    parts: list[bytes]


@dataclass(frozen=True, slots=True)
class Refused:
    """An `InvalidRequestError`."""

    message: str
    param: str | None
    code: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """An error that nobody thought of; its traceback is in the log."""

    kind: str


Job = RenderJob | EncodeJob | DecodeJob | GrammarJob
Reply = Done | Refused | Failed

TEXT_SCHEMA = Schema(
    "text",
    {1: RenderJob, 2: EncodeJob, 3: DecodeJob, 4: Ready, 5: Rendered, 6: Done, 7: Refused, 8: Failed, 9: GrammarJob},
)


def pack_ids(token_ids: Iterable[int]) -> bytes:
    """Token ids (below 2**31) as they travel."""
    return array("i", token_ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The opposite."""
    ids = array("i")
    ids.frombytes(data)
    return ids.tolist()


def to_frame(message: object) -> bytes:
    """The message with its length. Raises `ProtocolError` if it is too large to travel."""
    data = TEXT_SCHEMA.encode(message)
    return LENGTH.pack(_checked(len(data))) + data


def frame_size(head: memoryview) -> int:
    """How many bytes follow. Raises `ProtocolError` if those are too many."""
    return _checked(LENGTH.unpack(head)[0])


def _checked(size: int) -> int:
    if size > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"text: message of {size} bytes is too large")
    return size


def receive(connection: socket.socket) -> Any:
    """The next message of a blocking socket. Raises `EOFError` at its end, and `ProtocolError`."""
    return TEXT_SCHEMA.decode(_receive_exactly(connection, frame_size(_receive_exactly(connection, LENGTH.size))))


def _receive_exactly(connection: socket.socket, size: int) -> memoryview:
    data = memoryview(bytearray(size))
    left = data
    while left:
        count = connection.recv_into(left)
        if not count:
            raise EOFError
        left = left[count:]
    return data
