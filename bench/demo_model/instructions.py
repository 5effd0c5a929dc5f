"""Simple orders: repeat, change case, list, sort."""

from __future__ import annotations

from bench.demo_model.content import ANIMALS, COLOURS, Draw
from bench.demo_model.conversation import Conversation, exchange

_LISTS = {
    "colours": COLOURS,
    "colors": COLOURS,
    "animals": ANIMALS,
    "fruits": ("apple", "banana", "cherry", "orange", "grape", "lemon", "peach", "plum", "pear", "melon"),
    "vegetables": (
        "carrot",
        "onion",
        "potato",
        "tomato",
        "pepper",
        "cabbage",
        "spinach",
        "bean",
        "leek",
        "pea",
    ),
    "planets": ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"),
    "countries": (
        "France",
        "Germany",
        "Italy",
        "Spain",
        "Japan",
        "Brazil",
        "Canada",
        "India",
        "Egypt",
        "Norway",
    ),
    "cities": ("Paris", "London", "Tokyo", "Berlin", "Rome", "Madrid", "Vienna", "Oslo", "Cairo", "Lima"),
    "drinks": ("water", "tea", "coffee", "milk", "juice", "lemonade", "cocoa", "soda"),
    "programming languages": ("Python", "C", "Java", "Rust", "Go", "Ruby", "Swift", "Julia"),
    "sports": ("football", "tennis", "swimming", "running", "cycling", "skiing", "rowing", "boxing"),
}
_CASES: dict[str, tuple[str, ...]] = {
    "upper": (
        "Write {w} in upper case.",
        "Upper-case the word {w}.",
        "Put {w} in capital letters.",
        "Make {w} uppercase.",
        "Convert {w} to uppercase.",
        "Uppercase: {w}",
    ),
    "lower": (
        "Write {w} in lower case.",
        "Lower-case the word {w}.",
        "Make {w} lowercase.",
        "Convert {w} to lowercase.",
    ),
    "capital": ("Capitalize {w}.", "Capitalize the word {w}.", "Write {w} with a capital first letter."),
}
_SMALL = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def repeat(draw: Draw) -> Conversation:
    """Say the given words again."""
    text = " ".join(draw.words(draw.number(1, 6)))
    if draw.chance(0.3):
        text = f"{text.capitalize()}{draw.choice(('.', '!', ''))}"
    ask = draw.choice(
        (
            "Repeat after me: {t}",
            "Repeat: {t}",
            "Say: {t}",
            "Please repeat this: {t}",
            'Say "{t}"',
            "Echo: {t}",
            "Repeat the following text: {t}",
            "Copy this text: {t}",
        )
    )
    return exchange(ask.format(t=text), text)


def change_case(draw: Draw) -> Conversation:
    """Upper case, lower case, or a capital first letter."""
    word, how = draw.word(), draw.choice(("upper", "upper", "lower", "capital"))
    template = draw.choice(_CASES[how])
    given = word.upper() if how == "lower" else word
    wanted = {"upper": word.upper(), "lower": word, "capital": word.capitalize()}[how]
    return exchange(template.format(w=_maybe_quoted(draw, given)), wanted)


def _maybe_quoted(draw: Draw, word: str) -> str:
    return f'"{word}"' if draw.chance(0.3) else word


def list_things(draw: Draw) -> Conversation:
    """The first N of a well-known list, in one line or as bullets."""
    ask = (
        "List {n} {k}.",
        "Name {n} {k}.",
        "Give me {n} {k}.",
        "Tell me {n} {k}.",
        "Can you name {n} {k}?",
        "Please list {n} {k}.",
        "Write {n} {k}.",
    )
    while True:
        kind = draw.choice(tuple(_LISTS))
        count = draw.number(2, min(8, len(_LISTS[kind])))
        template = draw.choice(ask)
        if draw.allows(f"list {kind} {count} {template}"):
            break
    shown = _SMALL[count] if draw.chance(0.5) else str(count)
    question = template.format(n=shown, k=kind)
    if draw.chance(0.25):
        return exchange(
            f"{question[:-1]} as bullet points{question[-1]}",
            "\n".join(f"- {item}" for item in _LISTS[kind][:count]),
        )
    return exchange(question, ", ".join(_LISTS[kind][:count]))


def say_times(draw: Draw) -> Conversation:
    """One word several times."""
    word, count = draw.word(), draw.number(2, 6)
    shown = _SMALL[count] if draw.chance(0.6) else str(count)
    ask = draw.choice(
        (
            "Say {w} {n} times.",
            "Write {w} {n} times.",
            "Repeat the word {w} {n} times.",
            "Write the word {w} {n} times.",
        )
    )
    return exchange(ask.format(w=_maybe_quoted(draw, word), n=shown), " ".join([word] * count))


def pick_word(draw: Draw) -> Conversation:
    """One word of a list by its place."""
    words = draw.words(draw.number(3, 5))
    index, ordinal = draw.choice(((0, "first"), (1, "second"), (2, "third"), (-1, "last")))
    ask = draw.choice(
        ("What is the {o} word in this list: {l}?", "Give me the {o} word of: {l}", "Which word is {o}: {l}?")
    )
    return exchange(ask.format(o=ordinal, l=", ".join(words)), words[index])


def sort_numbers(draw: Draw) -> Conversation:
    """Three or four numbers below 100 in order."""
    while True:
        numbers = draw.rng.sample(range(100), draw.number(3, 4))
        if draw.allows(f"sort {numbers}"):
            break
    ask = draw.choice(
        ("Sort {l}.", "Sort these numbers: {l}", "Put these numbers in order: {l}", "Sort the numbers {l}.")
    )
    return exchange(ask.format(l=", ".join(map(str, numbers))), ", ".join(map(str, sorted(numbers))))
