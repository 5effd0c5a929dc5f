"""Topics with one fixed answer each, and a little general knowledge made from tables."""

from __future__ import annotations

from dataclasses import dataclass

from bench.demo_model.texts import load_text


@dataclass(frozen=True)
class Topic:
    """One answer and the ways to ask for it."""

    answer: str
    questions: tuple[str, ...]


def _topics(name: str) -> tuple[Topic, ...]:
    return tuple(Topic(entry["answer"], tuple(entry["questions"])) for entry in load_text(name)["topic"])


def _capitals() -> list[Topic]:
    ask = (
        "What is the capital of {}?",
        "Capital of {}?",
        "Which city is the capital of {}?",
        "Name the capital of {}.",
        "Tell me the capital of {}.",
    )
    table: dict[str, str] = load_text("knowledge")["capitals"]
    return [
        Topic(f"The capital of {country} is {city}.", tuple(question.format(country) for question in ask))
        for country, city in table.items()
    ]


def _opposites() -> list[Topic]:
    ask = (
        "What is the opposite of {}?",
        "Opposite of {}?",
        "Name the opposite of {}.",
        "What is the contrary of {}?",
    )
    table: dict[str, str] = load_text("knowledge")["opposites"]
    both = [*table.items(), *((b, a) for a, b in table.items())]
    return [Topic(f"The opposite of {a} is {b}.", tuple(question.format(a) for question in ask)) for a, b in both]


def _calendar() -> list[Topic]:
    days, months = load_text("knowledge")["days"], load_text("knowledge")["months"]
    topics = []
    for names in (days, months):
        for here, after in zip(names, [*names[1:], names[0]], strict=True):
            follows = tuple(
                q.format(here) for q in ("What comes after {}?", "What is after {}?", "Which one follows {}?")
            )
            precedes = tuple(q.format(after) for q in ("What comes before {}?", "What is before {}?"))
            topics += [
                Topic(f"{after} comes after {here}.", follows),
                Topic(f"{here} comes before {after}.", precedes),
            ]
    ask_days = ("Name the days of the week.", "List the days of the week.", "What are the days of the week?")
    ask_months = ("Name the months of the year.", "List the months.", "What are the months of the year?")
    return [*topics, Topic(", ".join(days), ask_days), Topic(", ".join(months), ask_months)]


NOVAINFER = _topics("novainfer")
SMALL_TALK = _topics("small_talk")
EXPLANATIONS = _topics("explanations")
KNOWLEDGE = (*_capitals(), *_opposites(), *_calendar())
