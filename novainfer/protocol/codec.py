"""The closed schema on every socket: records <-> msgpack arrays. No pickle, no ext types, no maps of names.

A record is `[tag, field, field, ...]`, positional. Fields with a default may be missing at the end; an unknown tag, an
extra field or a value of the wrong type is a `ProtocolError`. Decoders are built once per class from its annotations. A
column (`columns`), which may be a field beside others and nothing else, travels as its bytes.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack

from novainfer.errors import ProtocolError
from novainfer.protocol.columns import Column, column_from

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_TEXT_BYTES = 16 * 1024 * 1024  # of one string
_MAX_ITEMS = 16 * 1024 * 1024
_LIMITS = {
    "max_str_len": MAX_TEXT_BYTES,
    "max_bin_len": MAX_MESSAGE_BYTES,
    "max_array_len": _MAX_ITEMS,
    "max_map_len": 1024 * 1024,
    "max_ext_len": 0,
}

Decoder = Callable[[Any], Any]
Encoder = Callable[[Any], Any]
_SCALARS = (int, float, str, bool, bytes)


class Schema:
    """The set of records that may travel over one boundary, each under a fixed small tag.

    records: their classes.
    """

    def __init__(self, name: str, records: dict[int, type]) -> None:
        self.name = name
        self.records = tuple(records.values())
        self._encoders = {record: (tag, record_encoder(record)) for tag, record in records.items()}
        self._decoders = {tag: record_decoder(record) for tag, record in records.items()}

    def encode(self, message: object) -> bytes:
        """Pack one record of this schema. Raises KeyError for a class that does not belong to it."""
        tag, encoder = self._encoders[type(message)]
        packed: bytes = msgpack.packb([tag, *encoder(message)], default=_refuse)
        return packed

    def decode(self, data: bytes | memoryview) -> Any:
        """Unpack one record; raises `ProtocolError` for anything that is not exactly one valid record."""
        if len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"{self.name}: message of {len(data)} bytes is too large")
        try:
            wire = _unpack(data)
        except ProtocolError:
            raise
        except Exception as error:  # msgpack raises many kinds for malformed bytes
            raise ProtocolError(f"{self.name}: not msgpack ({type(error).__name__})") from None
        if type(wire) is not list or not wire or type(wire[0]) is not int:
            raise ProtocolError(f"{self.name}: a message is an array that starts with its tag")
        decoder = self._decoders.get(wire[0])
        if decoder is None:
            raise ProtocolError(f"{self.name}: unknown tag {wire[0]}")
        return decoder(wire[1:])


def _refuse(value: Any) -> bytes:
    """Asked by msgpack for what it does not know itself."""
    if isinstance(value, int):
        raise OverflowError("an integer has more than 64 bits")
    raise TypeError(f"{type(value).__name__} cannot travel")


def _refuse_ext(code: int, data: bytes) -> Any:
    raise ProtocolError(f"msgpack extension type {code} is not allowed")


_unpack = partial(msgpack.unpackb, use_list=True, strict_map_key=False, ext_hook=_refuse_ext, **_LIMITS)


def record_encoder(record: type) -> Encoder:
    """A function that turns a `record` into the sequence of its wire fields, nested records as sequences, columns
    as their bytes.
    """
    hints = get_type_hints(record)
    names = [f.name for f in fields(record)]
    columns = [i for i, name in enumerate(names) if hints[name] is Column and len(names) > 1]
    kinds = [(i, hints[name]) for i, name in enumerate(names) if i not in columns]
    nested = [(i, encoder) for i, kind in kinds if (encoder := _value_encoder(kind)) is not None]
    if len(names) == 1:
        only = names[0]
        return lambda value: [nested[0][1](getattr(value, only)) if nested else getattr(value, only)]
    all_fields = attrgetter(*names)
    if not (nested or columns):
        return all_fields

    def encode(value: Any) -> list[Any]:
        wire = list(all_fields(value))
        for i in columns:
            wire[i] = wire[i].tobytes()
        for i, encoder in nested:
            if wire[i]:  # neither None nor empty
                wire[i] = encoder(wire[i])
        return wire

    return encode


def _value_encoder(annotation: Any) -> Encoder | None:
    """None where msgpack takes the value as it is. Raises TypeError for a column, which is nobody's item."""
    if annotation is Column:
        raise TypeError("a column is a field of a record that has others")
    if is_dataclass(annotation) and isinstance(annotation, type):
        return record_encoder(annotation)
    if get_origin(annotation) is dict:
        return None
    for arg in get_args(annotation):
        inner = _value_encoder(arg)
        if inner is not None and get_origin(annotation) in (list, tuple):
            item = inner
            if type(None) in get_args(arg):
                return lambda values: [None if value is None else item(value) for value in values]
            return lambda values: [*map(item, values)]
        if inner is not None:
            return inner
    return None


def record_decoder(record: type) -> Decoder:
    """A function that turns a list of wire fields into `record`, checking every type."""
    hints = get_type_hints(record)
    names = [f.name for f in fields(record)]
    decoders = [_value_decoder(hints[name], f"{record.__name__}.{name}") for name in names]
    # The type of each field's values, where there is one. Mostly all are of it: then only what has something inside is
    # decoded, beside fields that have values of several types. No value has the type _Never.
    kinds = [_wire_kind(hints[name]) for name in names]
    scalars = [hints[name] if hints[name] in _SCALARS else _Never for name in names]
    mixed = [i for i, kind in enumerate(kinds) if kind is _Never]
    # Of a list or map that is empty there is nothing to decode, whatever it holds; nor of what may be None, and is. A
    # tuple that is empty is the same one always.
    inner = [
        (i, decoders[i], get_origin(hints[name]) in (list, dict), kinds[i] is _Never, get_origin(hints[name]) is tuple)
        for i, name in enumerate(names)
        if hints[name] not in _SCALARS
    ]
    needed = [i for i, f in enumerate(fields(record)) if f.default is MISSING and f.default_factory is MISSING]
    required, count = (needed[-1] + 1 if needed else 0), len(names)
    by_name = any(f.kw_only for f in fields(record))

    def decode(wire: Any) -> Any:
        if type(wire) is not list or not required <= len(wire) <= count:
            raise ProtocolError(f"{record.__name__}: wrong number of fields")
        found = [*map(type, wire)]
        if len(found) == count:
            for i in mixed:
                found[i] = _Never
        if found == kinds:
            values = wire.copy()
            for i, decoder, may_be_empty, may_be_none, is_tuple in inner:
                value = values[i]
                if is_tuple and not value:
                    values[i] = ()
                elif value or not (may_be_none if value is None else may_be_empty):
                    values[i] = decoder(value)
        else:  # a shorter record ends the zip early
            values = [
                value if type(value) is plain else decoder(value)
                for value, plain, decoder in zip(wire, scalars, decoders, strict=False)
            ]
        return record(**dict(zip(names, values, strict=False))) if by_name else record(*values)

    return decode


class _Never:
    """The type of no decoded value."""


def _wire_kind(annotation: Any) -> type:
    """Of the field's values, if they are all of one type; else `_Never`."""
    if annotation in _SCALARS:
        return annotation  # type: ignore[no-any-return]
    if annotation is Column:
        return bytes
    if get_origin(annotation) in (list, tuple) or is_dataclass(annotation):
        return list
    return dict if get_origin(annotation) is dict else _Never


def _value_decoder(annotation: Any, where: str) -> Decoder:
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return _optional_decoder(annotation, where)
    if origin in (list, tuple):
        return _sequence_decoder(annotation, where)
    if annotation is Column:
        return _column_decoder(where)
    if origin is dict:
        return _dict_decoder(annotation, where)
    if is_dataclass(annotation) and isinstance(annotation, type):
        return record_decoder(annotation)
    if annotation is float:
        return _float_decoder(where)
    if annotation in _SCALARS:
        return _scalar_decoder(annotation, where)
    raise TypeError(f"{where}: {annotation!r} cannot travel")


def _scalar_decoder(kind: type, where: str) -> Decoder:
    def decode(value: Any) -> Any:
        if type(value) is not kind:
            raise ProtocolError(f"{where}: {type(value).__name__} is not {kind.__name__}")
        return value

    return decode


def _float_decoder(where: str) -> Decoder:
    def decode(value: Any) -> Any:
        if type(value) is float:
            return value
        if type(value) is not int:
            raise ProtocolError(f"{where}: {type(value).__name__} is not a number")
        try:
            return float(value)
        except OverflowError:
            raise ProtocolError(f"{where}: the number is too large") from None

    return decode


def _optional_decoder(annotation: Any, where: str) -> Decoder:
    args = [arg for arg in get_args(annotation) if arg is not type(None)]
    if len(args) != 1:
        raise TypeError(f"{where}: only `X | None` unions can travel")
    inner = _value_decoder(args[0], where)
    return lambda value: None if value is None else inner(value)


def _sequence_decoder(annotation: Any, where: str) -> Decoder:
    args = get_args(annotation)
    make = get_origin(annotation)
    if make is tuple and (len(args) != 2 or args[1] is not Ellipsis):
        raise TypeError(f"{where}: only `tuple[X, ...]` can travel")
    item_type = args[0]
    inner = _value_decoder(item_type, where)
    is_plain, only = item_type in (int, str, bytes), frozenset((item_type,))

    def decode(value: Any) -> Any:
        if type(value) is not list:
            raise ProtocolError(f"{where}: not an array")
        if is_plain:  # long token id lists: one pass in C
            if not only.issuperset(map(type, value)):
                raise ProtocolError(f"{where}: not an array of {item_type.__name__}")
            return value if make is list else tuple(value)
        return make(inner(item) for item in value)

    return decode


def _column_decoder(where: str) -> Decoder:
    def decode(value: Any) -> Any:
        if type(value) is not bytes:
            raise ProtocolError(f"{where}: {type(value).__name__} is not a column")
        try:
            return column_from(value)
        except ValueError:
            raise ProtocolError(f"{where}: {len(value)} bytes are no column") from None

    return decode


def _dict_decoder(annotation: Any, where: str) -> Decoder:
    key_type, value_type = get_args(annotation)
    key, item = _value_decoder(key_type, where), _value_decoder(value_type, where)

    def decode(value: Any) -> Any:
        if type(value) is not dict:
            raise ProtocolError(f"{where}: not a map")
        return {key(k): item(v) for k, v in value.items()}

    return decode
