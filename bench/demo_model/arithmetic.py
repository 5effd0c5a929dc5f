"""Arithmetic tasks. The answer repeats the problem, so that the digits stand close to the result."""

from __future__ import annotations

from bench.demo_model.content import Draw
from bench.demo_model.conversation import Conversation, exchange

_ASK = {
    "+": (
        "What is {a} + {b}?",
        "{a} + {b}",
        "{a}+{b}",
        "{a} + {b} = ?",
        "{a}+{b}=",
        "Calculate {a} + {b}.",
        "Add {a} and {b}.",
        "What is {a} plus {b}?",
        "How much is {a} + {b}?",
        "Compute {a} + {b}",
        "What's {a} + {b}?",
    ),
    "-": (
        "What is {a} - {b}?",
        "{a} - {b}",
        "{a}-{b}",
        "{a} - {b} = ?",
        "{a}-{b}=",
        "Calculate {a} - {b}.",
        "Subtract {b} from {a}.",
        "What is {a} minus {b}?",
        "How much is {a} - {b}?",
        "Compute {a} - {b}",
        "What's {a} - {b}?",
    ),
    "x": (
        "What is {a} x {b}?",
        "{a} x {b}",
        "{a}*{b}",
        "{a} * {b} = ?",
        "{a} * {b}",
        "Calculate {a} * {b}.",
        "Multiply {a} by {b}.",
        "What is {a} times {b}?",
        "How much is {a} x {b}?",
        "Compute {a} * {b}",
        "What's {a} times {b}?",
    ),
}

_STORIES = {
    "+": (
        "{name} has {a} {thing}s and gets {b} more. How many {thing}s does {name} have now?",
        "There are {a} {thing}s on the table. {name} adds {b}. How many are there?",
    ),
    "-": (
        "{name} has {a} {thing}s and gives away {b}. How many {thing}s are left?",
        "There are {a} {thing}s on the table. {name} takes {b}. How many are left?",
    ),
}
_THINGS = ("apple", "book", "coin", "ball", "egg", "pencil", "stone", "ticket")


def result(operator: str, a: int, b: int) -> int:
    """`a operator b` for '+', '-' and 'x'."""
    return a + b if operator == "+" else a - b if operator == "-" else a * b


def statement(operator: str, a: int, b: int) -> str:
    """The equation as the model writes it, e.g. '12 + 34 = 46'."""
    return f"{a} {operator} {b} = {result(operator, a, b)}"


def _operand(draw: Draw, top: int) -> int:
    return draw.number(0, 9) if draw.chance(0.12) else draw.number(0, top)


def operands(draw: Draw, operator: str) -> tuple[int, int]:
    """Two numbers of this part. A sum is held out together with its mirror image, since a + b = b + a."""
    while True:
        if operator == "x":
            a, b = draw.number(0, 12), draw.number(0, 12)
            # Only one of a x b and b x a is ever held out: no model can know a product that it never saw.
            key = f"{a}x{b}" if a > b else "never"
        else:
            a, b = _operand(draw, 99), _operand(draw, 99)
            if operator == "-" and a < b and draw.chance(0.75):
                a, b = b, a
            low, high = (min(a, b), max(a, b)) if operator == "+" else (a, b)
            key = f"{low}{operator}{high}"
        if draw.allows(key):
            return a, b


def problem(draw: Draw, operator: str) -> Conversation:
    """One problem in one of many phrasings."""
    a, b = operands(draw, operator)
    return exchange(draw.choice(_ASK[operator]).format(a=a, b=b), f"{statement(operator, a, b)}.")


def addition(draw: Draw) -> Conversation:
    """Sums of two numbers below 100."""
    return problem(draw, "+")


def subtraction(draw: Draw) -> Conversation:
    """Differences of two numbers below 100; some are negative."""
    return problem(draw, "-")


def multiplication(draw: Draw) -> Conversation:
    """The table up to 12 x 12."""
    return problem(draw, "x")


def drill(draw: Draw) -> Conversation:
    """Several problems at once: the cheapest way, per token, to practise."""
    problems = [(op, *operands(draw, op)) for op in (draw.choice("++--x") for _ in range(draw.number(3, 8)))]
    question = "\n".join(f"{a} {op} {b}" for op, a, b in problems)
    return exchange(f"Solve:\n{question}", "\n".join(statement(op, a, b) for op, a, b in problems))


def word_problem(draw: Draw) -> Conversation:
    """A sum or a difference told as a little story."""
    operator = draw.choice("+-")
    a, b = operands(draw, operator)
    while (a < b and operator == "-") or min(a, b) < 2:
        a, b = operands(draw, operator)
    text = draw.choice(_STORIES[operator]).format(name=draw.name(), a=a, b=b, thing=draw.choice(_THINGS))
    return exchange(text, f"{statement(operator, a, b)}.")


def comparison(draw: Draw) -> Conversation:
    """Which of two numbers is larger or smaller."""
    a, b = operands(draw, "-")
    while a == b:
        a, b = operands(draw, "-")
    larger = draw.chance(0.5)
    adjective = draw.choice(("larger", "bigger", "greater")) if larger else "smaller"
    ask = draw.choice(
        ("Which is {adj}, {a} or {b}?", "Which number is {adj}: {a} or {b}?", "What is {adj}, {a} or {b}?")
    )
    best = max(a, b) if larger else min(a, b)
    return exchange(ask.format(adj=adjective, a=a, b=b), f"{best} is {adjective}.")
