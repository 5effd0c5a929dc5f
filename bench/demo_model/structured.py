"""JSON tasks: write an object or an array, extract fields, read a field."""

from __future__ import annotations

import json

from bench.demo_model.content import ANIMALS, COLOURS, JOBS, Draw
from bench.demo_model.conversation import Conversation, exchange

_SENTENCES = (
    ("{name} is {age} years old and lives in {city}.", ("name", "age", "city")),
    ("{name} lives in {city} and works as a {job}.", ("name", "city", "job")),
    ("My name is {name}, I am {age} and I come from {city}.", ("name", "age", "city")),
    ("{name}, a {job} from {city}, is {age} years old.", ("name", "job", "city", "age")),
    ("{name} has a {colour} {animal}.", ("name", "colour", "animal")),
    ("The {animal} of {name} is {colour} and {age} years old.", ("animal", "name", "colour", "age")),
    ("{name} is a {job} and likes {colour}.", ("name", "job", "colour")),
)


def _record(draw: Draw) -> dict[str, str | int | bool]:
    return {
        "name": draw.name(),
        "age": draw.number(1, 99),
        "city": draw.city(),
        "job": draw.choice(JOBS),
        "colour": draw.choice(COLOURS),
        "animal": draw.choice(ANIMALS),
        "item": draw.word(),
        "count": draw.number(0, 99),
        "price": draw.number(1, 999),
        "active": draw.chance(0.5),
    }


def _joined(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _plain(value: str | int | bool) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def json_object(draw: Draw) -> Conversation:
    """An object with given keys and values."""
    record = _record(draw)
    keys = draw.rng.sample(sorted(record), draw.number(1, 4))
    if draw.chance(0.5):
        keys = ["name", *[key for key in keys if key != "name"]][:4]
    if draw.chance(0.25):  # a key that no list knows
        record["new"] = draw.number(0, 99)
        new = draw.word()
        record[new] = record.pop("new")
        keys.append(new)
    style = draw.choice(("{k} {v}", "{k} {v}", "{k} = {v}", "{k}: {v}"))
    fields = [style.format(k=key, v=_plain(record[key])) for key in keys]
    ask = draw.choice(
        (
            "Give me JSON with {f}",
            "Give me a JSON object with {f}.",
            "Write JSON with {f}.",
            "Return a JSON object with {f}.",
            "Make a JSON object with {f}",
            "Answer in JSON with {f}.",
            "JSON with {f}",
            "Create JSON: {f}",
        )
    )
    return exchange(ask.format(f=_joined(fields)), json.dumps({key: record[key] for key in keys}))


def json_extract(draw: Draw) -> Conversation:
    """Fields out of a sentence."""
    record = _record(draw)
    sentence, known = draw.choice(_SENTENCES)
    keys = list(known) if draw.chance(0.4) else draw.rng.sample(known, draw.number(1, len(known)))
    text, names = sentence.format(**record), _joined(keys)
    ask = draw.choice(
        (
            "{t} Extract {k} as JSON.",
            "Extract {k} as JSON: {t}",
            "{t} Give me {k} as JSON.",
            "{t} Return {k} in JSON.",
            "Extract {k} from this text as JSON: {t}",
            "Text: {t}\nReturn JSON with {k}.",
        )
    )
    return exchange(ask.format(t=text, k=names), json.dumps({key: record[key] for key in keys}))


def json_array(draw: Draw) -> Conversation:
    """An array of words or of numbers in a row."""
    if draw.chance(0.5):
        words = draw.words(draw.number(2, 5))
        ask = draw.choice(
            ("Give me a JSON list with {w}.", "Make a JSON array with the words {w}.", "JSON array of {w}")
        )
        return exchange(ask.format(w=_joined(words)), json.dumps(words))
    while True:
        start, length = draw.number(0, 60), draw.number(2, 10)
        if draw.allows(f"array {start} {length}"):
            break
    ask = draw.choice(
        (
            "Give me a JSON array of the numbers {a} to {b}.",
            "Make a JSON list of the numbers from {a} to {b}.",
            "JSON array from {a} to {b}",
        )
    )
    numbers = list(range(start, start + length))
    return exchange(ask.format(a=start, b=numbers[-1]), json.dumps(numbers))


def json_read(draw: Draw) -> Conversation:
    """The value of one key."""
    record = _record(draw)
    keys = draw.rng.sample(sorted(record), draw.number(2, 4))
    key, text = draw.choice(keys), json.dumps({key: record[key] for key in keys})
    ask = draw.choice(
        (
            "What is the {k} in {t}?",
            "Read the {k} from this JSON: {t}",
            "{t}\nWhat is the {k}?",
            "Which {k} does {t} have?",
        )
    )
    return exchange(ask.format(k=key, t=text), _plain(record[key]))
