"""Frames that no peer of ours sends: mutants of every record of every schema, and what decoding them does.

`python -m tests.safety.frames [COUNT]` decodes that many in this process and prints how it went. Only `ProtocolError`
may come out, and the memory must not grow with the frames.
"""

from __future__ import annotations

import argparse
import math
import pickle
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack
import psutil

from novainfer.errors import ProtocolError
from novainfer.protocol.codec import Schema
from novainfer.protocol.columns import Column, column
from novainfer.protocol.messages import GATEWAY_SCHEMA
from novainfer.protocol.step import WORKER_SCHEMA
from novainfer.protocol.supervision import ORDERS_SCHEMA, SUPERVISOR_SCHEMA

SCHEMAS = (GATEWAY_SCHEMA, WORKER_SCHEMA, SUPERVISOR_SCHEMA, ORDERS_SCHEMA)
_EXAMPLES: dict[type, Any] = {
    int: 7, float: 0.5, str: "text", bool: True, bytes: b"\0" * 16, Column: column([7, 7]),
}  # fmt: skip
_HEADERS = tuple(
    bytes([tag]) + length
    for tag in (0xC6, 0xC9, 0xDB, 0xDD, 0xDF)  # bin, ext, str, array, map; each with a length of 32 bits
    for length in (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\xff\xff\xff", b"\x00\x10\x00\x00")
)
_BAD_KEYS = (b"\x81\x91\x01\x02", b"\x81\x80\x02", b"\x81\xc0\x02", b"\x81\xc4\x01a\x02", b"\x81\xcb" + b"\xff" * 8)
_BAD_TEXTS = (b"\xa1\xff", b"\xa3\xed\xa0\x80", b"\xa2\xc3\x28", b"\xa4\xf8\x88\x80\x80")
_EXTENSIONS = (b"\xd4\x01\x00", b"\xd6\xff\x00\x00\x00\x00", b"\xc7\x00\x05", b"\xd8\x05" + b"x" * 16)


class _Payload:
    """Unpickled, it would end the process."""

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return sys.exit, (99,)


_PICKLES = tuple(pickle.dumps(_Payload(), protocol) for protocol in range(6))
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63 - 1, -(2**63), 2**63, 2**64 - 1, 0.0, -0.0, 1.5, math.nan, math.inf,
    "", "a", "\0", "x" * 70_000, b"", b"\xff", b"x" * 70_000, [], [[]], [[[]]], [None], ["a"], [1] * 5000, {}, {1: 2},
    {"a": 1}, {b"a": 1}, {1.5: 1}, {None: 1}, {1: {}}, msgpack.ExtType(5, b""), msgpack.ExtType(127, b"x" * 300),
    msgpack.Timestamp(0, 0), *_PICKLES,
)  # fmt: skip


def example(kind: Any) -> Any:
    """A value of an annotation that fills every part of it."""
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return kind(**{f.name: example(hints[f.name]) for f in fields(kind)})
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return example(args[0])
    if origin in (list, tuple):
        return origin([example(args[0])] * 2)
    return {example(args[0]): example(args[1])} if origin is dict else _EXAMPLES[kind]


def valid_frames(schema: Schema) -> list[bytes]:
    """One frame of every record of a schema."""
    return [schema.encode(example(record)) for record in schema.records]


@dataclass
class Mutator:
    """An endless source of hostile frames; the same for the same seed."""

    frames: list[bytes]
    random: random.Random

    def __iter__(self) -> Iterator[bytes]:
        ways = (*(self._flip, self._cut, self._splice, self._insert, self._change) * 2, *(self._change,) * 4, self._odd)
        while True:
            frame = self.random.choice(ways)(self.random.choice(self.frames))
            yield self._flip(frame) if self.random.random() < 0.05 and frame else frame

    def _flip(self, frame: bytes) -> bytes:
        changed = bytearray(frame)
        for _ in range(self.random.randint(1, 6)):
            changed[self.random.randrange(len(changed))] ^= 1 << self.random.randrange(8)
        return bytes(changed)

    def _cut(self, frame: bytes) -> bytes:
        end = self.random.randrange(len(frame))
        return frame[:end] if self.random.random() < 0.7 else frame + frame[end:]

    def _splice(self, frame: bytes) -> bytes:
        other = self.random.choice(self.frames)
        return frame[: self.random.randrange(len(frame))] + other[self.random.randrange(len(other)) :]

    def _insert(self, frame: bytes) -> bytes:
        """Something that starts a value, in place of any byte."""
        at = self.random.randrange(len(frame))
        group = self.random.choice((_HEADERS, _BAD_KEYS, _BAD_TEXTS, _EXTENSIONS, _PICKLES))
        return frame[:at] + self.random.choice(group) + frame[at + self.random.randint(0, 2) :]

    def _change(self, frame: bytes) -> bytes:
        """A field of the record with another value, without it, or with one more."""
        tree = msgpack.unpackb(frame, strict_map_key=False)
        node = tree
        while (lists := [item for item in node if isinstance(item, list) and item]) and self.random.random() < 0.6:
            node = self.random.choice(lists)
        at = self.random.randrange(len(node))
        way = self.random.random()
        if way < 0.7:
            node[at] = self.random.choice(_VALUES)
        elif way < 0.85:
            del node[at]
        else:
            node.append(self.random.choice(_VALUES))
        packed: bytes = msgpack.packb(tree)
        return packed

    def _odd(self, frame: bytes) -> bytes:
        """No record at all, or one that is nested without end."""
        depth = self.random.choice((50, 500, 1023, 1024, 10_000))
        deep = self.random.choice((b"\x91", b"\x81\x01", b"\xdd\x00\x00\x00\x01")) * depth
        whole = (b"", *_PICKLES, *_HEADERS, deep, frame[:2] + deep + b"\xc0", deep + b"\xc0", b"\xc1", b"\x00" * 100)
        return self.random.choice(whole)


@dataclass
class Harvest:
    """What decoding gave. grown: bytes of memory beyond those after the first frames."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    grown: int = 0


def decode_many(schema: Schema, frames: Iterator[bytes], count: int) -> Harvest:
    """Decode `count` frames. What still is a record must survive another trip through the codec."""
    harvest = Harvest()
    process = psutil.Process()
    settled = 0
    started = time.perf_counter()
    for number in range(count):
        frame = next(frames)
        try:
            message = schema.decode(frame)
            harvest.outcomes["record"] += 1
            schema.decode(schema.encode(message))
        except ProtocolError:
            harvest.outcomes["ProtocolError"] += 1
        except Exception as error:
            harvest.wrong.append(f"{type(error).__name__}: {error}: {frame[:80].hex()}")
        if number == count // 4:
            settled = process.memory_info().rss
    harvest.seconds = time.perf_counter() - started
    harvest.grown = process.memory_info().rss - settled
    return harvest


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", nargs="?", type=int, default=1_000_000, help="frames in all")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    is_wrong = False
    for schema in SCHEMAS:
        frames = iter(Mutator(valid_frames(schema), random.Random(options.seed)))
        harvest = decode_many(schema, frames, options.count // len(SCHEMAS))
        total = sum(harvest.outcomes.values())
        rate, grown = total / harvest.seconds, harvest.grown / 2**20
        print(
            f"{schema.name}: {dict(harvest.outcomes)}, {rate:.0f} frames/s, {grown:.1f} MiB, {len(harvest.wrong)} wrong"
        )
        for line in harvest.wrong[:20]:
            print(" ", line)
        is_wrong |= bool(harvest.wrong)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
