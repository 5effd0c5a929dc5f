"""Tool calls: choose a tool by the question, fill its arguments, answer from its result."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.demo_model.content import COLOURS, Draw
from bench.demo_model.conversation import (
    Conversation,
    Message,
    Tool,
    assistant,
    tool_calls,
    tool_result,
    user,
)

Arguments = dict[str, Any]
_FINDINGS = ("is in the news today", "has a page of its own", "was found in the library", "is well known")
_CONDITIONS = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear")


@dataclass(frozen=True)
class Request:
    """One use of a tool: what the user says, the arguments, what comes back, and the final answer."""

    question: str
    arguments: Arguments
    result: str
    answer: str


@dataclass(frozen=True)
class ToolKind:
    """A tool in its usual variants; `parameters` holds, per variant, (name, type, description) of each."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: tuple[tuple[tuple[str, str, str], ...], ...]
    request: Callable[[Draw, list[str]], Request]


def _shown(draw: Draw, key: str, value: Any, extra: Arguments | None = None) -> str:
    """A tool result as bare text or as JSON, as tools differ in that."""
    if extra is None and draw.chance(0.4):
        return str(value)
    return json.dumps({**(extra or {}), key: value})


def _weather(draw: Draw, parameters: list[str]) -> Request:
    city, degrees, condition = draw.city(), draw.number(-9, 39), draw.choice(_CONDITIONS)
    ask = (
        "What is the weather in {c}?",
        "What's the weather like in {c}?",
        "How is the weather in {c}?",
        "Weather in {c}?",
        "What is the weather in {c} today?",
        "Is it raining in {c}?",
        "How warm is it in {c}?",
        "Tell me the weather in {c}.",
        "What is the temperature in {c}?",
        "weather in {c}",
    )
    question, arguments = draw.choice(ask).format(c=city), {parameters[0]: city}
    if len(parameters) > 1 and draw.chance(0.4):
        unit = draw.choice(("celsius", "fahrenheit"))
        question, arguments[parameters[1]] = f"{question.rstrip('?.')} in {unit}?", unit
    fields: Arguments = {"temperature": degrees, "condition": condition}
    if draw.chance(0.5):
        fields = {parameters[0]: city, **fields}
    text = (
        json.dumps(fields)
        if draw.chance(0.7)
        else draw.choice((f"{degrees} degrees, {condition}", f"{condition}, {degrees} degrees"))
    )
    return Request(question, arguments, text, f"It is {degrees} degrees and {condition} in {city}.")


def _calculator(draw: Draw, parameters: list[str]) -> Request:
    a, b, operator = draw.number(2, 9999), draw.number(2, 999), draw.choice("+-*/")
    while not draw.allows(f"calculator {a} {operator} {b}"):
        a = draw.number(2, 9999)
    word = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}[operator]
    ask = (
        "What is {a} {o} {b}?",
        "Calculate {a} {o} {b}.",
        "Compute {a} {o} {b}",
        "What is {a} {w} {b}?",
        "{a} {o} {b}",
        "How much is {a} {w} {b}?",
    )
    question = draw.choice(ask).format(a=a, b=b, o=operator, w=word)
    value = {"+": a + b, "-": a - b, "*": a * b, "/": round(a / b, 2)}[operator]
    return Request(
        question,
        {parameters[0]: f"{a} {operator} {b}"},
        _shown(draw, "result", value),
        f"The result is {value}.",
    )


def _time(draw: Draw, parameters: list[str]) -> Request:
    city, clock = draw.city(), f"{draw.number(0, 23):02d}:{draw.number(0, 59):02d}"
    ask = (
        "What time is it in {c}?",
        "What is the time in {c}?",
        "Tell me the time in {c}.",
        "What's the current time in {c}?",
        "time in {c}",
    )
    return Request(
        draw.choice(ask).format(c=city),
        {parameters[0]: city},
        _shown(draw, "time", clock),
        f"It is {clock} in {city}.",
    )


def _search(draw: Draw, parameters: list[str]) -> Request:
    query = " ".join(draw.words(draw.number(1, 3)))
    ask = (
        "Search the web for {q}.",
        "Search for {q}",
        "Look up {q}.",
        "Find information about {q}.",
        "Google {q}",
    )
    found = f"{query.capitalize()} {draw.choice(_FINDINGS)}."
    return Request(
        draw.choice(ask).format(q=query),
        {parameters[0]: query},
        _shown(draw, "text", found),
        f"I found this: {found}",
    )


def _message(draw: Draw, parameters: list[str]) -> Request:
    name, text = draw.name(), " ".join(draw.words(draw.number(1, 4)))
    ask = (
        "Send {n} the message: {t}",
        "Tell {n}: {t}",
        'Write "{t}" to {n}.',
        "Send a message to {n}: {t}",
        "Message {n}: {t}",
    )
    question = draw.choice(ask).format(n=name, t=text)
    done = _shown(draw, "status", draw.choice(("sent", "ok", "done")))
    return Request(question, {parameters[0]: name, parameters[1]: text}, done, f"I sent the message to {name}.")


def _timer(draw: Draw, parameters: list[str]) -> Request:
    minutes = draw.number(2, 90)
    while not draw.allows(f"timer {minutes}"):
        minutes = draw.number(2, 90)
    ask = (
        "Set a timer for {m} minutes.",
        "Start a timer of {m} minutes.",
        "Wake me in {m} minutes.",
        "Timer {m} minutes",
    )
    done = _shown(draw, "status", draw.choice(("started", "ok", "done")))
    return Request(
        draw.choice(ask).format(m=minutes),
        {parameters[0]: minutes},
        done,
        f"The timer is set to {minutes} minutes.",
    )


_CITY = (
    ("city", "string", "The city"),
    ("location", "string", "The city and state, e.g. San Francisco, CA"),
    ("city", "string", "Name of the city"),
)
_UNIT = ("unit", "string", "")
TOOL_KINDS = (
    ToolKind(
        ("get_weather", "get_weather", "get_current_weather", "weather"),
        (
            "Get the weather in a city",
            "Get the current weather in a given location",
            "Current weather",
            "Get weather for a city",
        ),
        (*((c,) for c in _CITY), (_CITY[0], _UNIT), (_CITY[1], _UNIT)),
        _weather,
    ),
    ToolKind(
        ("calculator", "calculator", "calculate"),
        ("Evaluate an expression", "A calculator", "Evaluate a mathematical expression", "Do arithmetic"),
        (
            (("expression", "string", "The expression"),),
            (("expression", "string", "The expression to evaluate, e.g. 2 + 3"),),
        ),
        _calculator,
    ),
    ToolKind(
        ("get_time", "get_current_time"),
        ("Get the time in a city", "Current time", "Get the current time in a given location"),
        tuple((c,) for c in _CITY),
        _time,
    ),
    ToolKind(
        ("search_web", "web_search", "search"),
        ("Search the web", "Find pages", "Search the internet"),
        ((("query", "string", "The query"),), (("query", "string", "What to search for"),)),
        _search,
    ),
    ToolKind(
        ("send_message", "send_email"),
        ("Send a message", "Send a message to a person"),
        (
            (("to", "string", "Who gets it"), ("text", "string", "The text")),
            (("recipient", "string", ""), ("message", "string", "")),
        ),
        _message,
    ),
    ToolKind(
        ("set_timer", "start_timer"),
        ("Set a timer", "Start a timer"),
        ((("minutes", "integer", "How many minutes"),), (("minutes", "integer", ""),)),
        _timer,
    ),
)


@dataclass(frozen=True)
class Offer:
    """One tool as offered in one conversation."""

    kind: ToolKind
    name: str
    parameters: list[str]
    schema: Tool


def _schema(name: str, description: str, parameters: tuple[tuple[str, str, str], ...], described: bool) -> Tool:
    properties: dict[str, Any] = {}
    for key, kind, text in parameters:
        properties[key] = {"type": kind, "description": text} if described and text else {"type": kind}
        if key == "unit":
            properties[key] = {"type": kind, "enum": ["celsius", "fahrenheit"]}
    required = [key for key, _, _ in parameters if key != "unit"]
    schema = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": {k: v for k, v in function.items() if v != ""}}


def _offer(draw: Draw, kind: ToolKind) -> Offer:
    parameters, name = draw.choice(kind.parameters), draw.choice(kind.names)
    description = "" if draw.chance(0.1) else draw.choice(kind.descriptions)
    return Offer(
        kind,
        name,
        [key for key, _, _ in parameters],
        _schema(name, description, parameters, draw.chance(0.6)),
    )


def offers(draw: Draw, wanted: ToolKind) -> tuple[Offer, tuple[Tool, ...]]:
    """The wanted tool in one of its variants, and the list of one to three tools that holds it."""
    others = [kind for kind in TOOL_KINDS if kind is not wanted]
    count = draw.choice((1, 1, 2, 2, 3))
    mine = _offer(draw, wanted)
    offers = [mine, *(_offer(draw, kind) for kind in draw.rng.sample(others, count - 1))]
    draw.rng.shuffle(offers)
    return mine, tuple(offer.schema for offer in offers)


def tool_call(draw: Draw) -> Conversation:
    """A question and the call that it needs."""
    mine, tools = offers(draw, draw.choice(TOOL_KINDS[:2]) if draw.chance(0.4) else draw.choice(TOOL_KINDS))
    request = mine.kind.request(draw, mine.parameters)
    return Conversation((user(request.question), tool_calls((mine.name, request.arguments))), tools)


def tool_answer(draw: Draw) -> Conversation:
    """The whole round: question, call, result, answer."""
    mine, tools = offers(draw, draw.choice(TOOL_KINDS[:2]) if draw.chance(0.4) else draw.choice(TOOL_KINDS))
    request = mine.kind.request(draw, mine.parameters)
    call = tool_calls((mine.name, request.arguments))
    return Conversation((user(request.question), call, tool_result(request.result), assistant(request.answer)), tools)


def tool_pair(draw: Draw) -> Conversation:
    """Two calls of one tool in one turn."""
    mine, tools = offers(draw, draw.choice((TOOL_KINDS[0], TOOL_KINDS[2])))
    first, second = draw.city(), draw.city()
    while second == first:
        second = draw.city()
    what = "weather" if mine.kind is TOOL_KINDS[0] else "time"
    ask = draw.choice(
        (
            "What is the {x} in {a} and {b}?",
            "Tell me the {x} in {a} and in {b}.",
            "What is the {x} in {a} and in {b}?",
        )
    )
    calls = tool_calls((mine.name, {mine.parameters[0]: first}), (mine.name, {mine.parameters[0]: second}))
    messages: list[Message] = [user(ask.format(x=what, a=first, b=second)), calls]
    if draw.chance(0.5):
        clocks = [f"{draw.number(0, 23):02d}:{draw.number(0, 59):02d}" for _ in range(2)]
        degrees = [draw.number(-9, 39) for _ in range(2)]
        sky = [draw.choice(_CONDITIONS) for _ in range(2)]
        if what == "time":
            results, said = [_shown(draw, "time", clock) for clock in clocks], clocks
        else:
            results = [json.dumps({"temperature": d, "condition": s}) for d, s in zip(degrees, sky, strict=True)]
            said = [f"{d} degrees and {s}" for d, s in zip(degrees, sky, strict=True)]
        messages += [tool_result(text) for text in results]
        messages.append(assistant(f"It is {said[0]} in {first}, and {said[1]} in {second}."))
    return Conversation(tuple(messages), tools)


def tool_named(draw: Draw) -> Conversation:
    """A tool that nobody has seen before, named by the user: names are copied, not remembered."""
    verb, noun, key = draw.choice(("get", "set", "find", "open", "read", "make")), draw.word(), draw.word()
    while key == noun:
        key = draw.word()
    value: str | int = (
        draw.number(0, 99) if draw.chance(0.4) else draw.choice(COLOURS) if draw.chance(0.3) else draw.word()
    )
    name = f"{verb}_{noun}"
    mine = _schema(
        name,
        f"{verb.capitalize()} the {noun}",
        ((key, "integer" if isinstance(value, int) else "string", ""),),
        False,
    )
    other = _offer(draw, draw.choice(TOOL_KINDS)).schema
    tools = draw.choice(((mine,), (mine, other), (other, mine)))
    ask = draw.choice(
        (
            "Call {n} with {k} {v}.",
            "Use {n} with {k} {v}",
            "Please {verb} the {noun} with {k} {v}.",
            "Call {n} with {k} = {v}",
        )
    )
    question = ask.format(n=name, k=key, v=value, verb=verb, noun=noun)
    return Conversation((user(question), tool_calls((name, {key: value}))), tools)
