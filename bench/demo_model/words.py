"""Letters, words and counting."""

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
