"""Letters, words and counting. Answers that need the letters spell the word first."""

from __future__ import annotations

from bench.demo_model.content import Draw
from bench.demo_model.conversation import Conversation, exchange


def _quoted(draw: Draw, word: str) -> str:
    return f'"{word}"' if draw.chance(0.3) else word


def _spelled(word: str) -> str:
    return "-".join(word)


def spelling(draw: Draw) -> Conversation:
    """A word, letter by letter."""
    word = draw.word()
    ask = draw.choice(
        (
            "Spell {w}.",
            "Spell the word {w}.",
            "How do you spell {w}?",
            "Can you spell {w}?",
            "Please spell {w}.",
            "Spell {w} letter by letter.",
            "Spell: {w}",
            "Write {w} letter by letter.",
        )
    )
    return exchange(ask.format(w=_quoted(draw, word)), _spelled(word))


def reversing(draw: Draw) -> Conversation:
    """A short word backwards: its letters, then the same in reverse."""
    word = draw.word(longest=6)
    ask = draw.choice(
        (
            "Reverse the word {w}.",
            "Reverse {w}.",
            "Spell {w} backwards.",
            "What is {w} backwards?",
            "Write {w} in reverse.",
            "Write {w} backwards.",
        )
    )
    return exchange(ask.format(w=_quoted(draw, word)), f"{_spelled(word)} backwards is {_spelled(word[::-1])}")


def edge_letter(draw: Draw) -> Conversation:
    """The first or the last letter."""
    word, edge = draw.word(), draw.choice(("first", "last"))
    letter = word[0] if edge == "first" else word[-1]
    ask = draw.choice(
        (
            "What is the {e} letter of {w}?",
            "Which is the {e} letter of {w}?",
            "What is the {e} letter of the word {w}?",
            "Tell me the {e} letter of {w}.",
            "{w}: what is the {e} letter?",
        )
    )
    return exchange(ask.format(e=edge, w=_quoted(draw, word)), f"The {edge} letter of {word} is {letter}.")


def letter_count(draw: Draw) -> Conversation:
    """How long a word is."""
    word = draw.word()
    ask = draw.choice(
        (
            "How many letters are in {w}?",
            "How many letters does {w} have?",
            "How many letters are in the word {w}?",
            "Count the letters in {w}.",
            "How long is the word {w}?",
        )
    )
    return exchange(ask.format(w=_quoted(draw, word)), f"{_spelled(word)} has {len(word)} letters.")


def letter_occurrences(draw: Draw) -> Conversation:
    """How often a letter stands in a word."""
    word = draw.word()
    letter = draw.choice(word) if draw.chance(0.8) else draw.choice("aeiourst")
    ask = draw.choice(
        (
            "How many times does {x} appear in {w}?",
            "How many {x}'s are in {w}?",
            "How many {x} are in the word {w}?",
            "Count the letter {x} in {w}.",
        )
    )
    count = word.count(letter)
    times = "1 time" if count == 1 else f"{count} times"
    return exchange(ask.format(x=letter, w=_quoted(draw, word)), f"{_spelled(word)} has {letter} {times}.")


def counting(draw: Draw) -> Conversation:
    """Numbers in a row, up or down, for at most twenty."""
    while True:
        start, length = draw.number(0, 99), draw.number(3, 20)
        step = -1 if draw.chance(0.3) else 1
        if draw.chance(0.2):
            start = 1 if step == 1 else length
        end = start + step * (length - 1)
        if 0 <= end <= 110 and draw.allows(f"count {start} {end}"):
            break
    numbers = ", ".join(str(n) for n in range(start, end + step, step))
    ask = draw.choice(
        (
            "Count from {a} to {b}.",
            "Count from {a} to {b}, please.",
            "Please count from {a} to {b}.",
            "Count {a} to {b}",
            "Write the numbers from {a} to {b}.",
            "List the numbers from {a} to {b}.",
            "Can you count from {a} to {b}?",
        )
    )
    if step == -1 and draw.chance(0.5):
        ask = draw.choice(("Count down from {a} to {b}.", "Count backwards from {a} to {b}."))
    return exchange(ask.format(a=start, b=end), numbers)
