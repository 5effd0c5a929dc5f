"""The corpus of the demo model: every task kind with its share, and conversations mixed from them.

Training conversations and held-out examples come from the same tasks, with contents (number pairs, words,
names, cities, wordings) that `content.Draw` keeps apart.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench.demo_model import arithmetic, stories, structured, tool_use, words
from bench.demo_model.content import ANIMALS, COLOURS, Draw
from bench.demo_model.conversation import Conversation, Message, assistant, exchange, system, user
from bench.demo_model.topics import EXPLANATIONS, KNOWLEDGE, NOVAINFER, SMALL_TALK, Topic

Task = Callable[[Draw], Conversation]

_OPENINGS = (
    "",
    "",
    "",
    "Please tell me: ",
    "Hi! ",
    "Hello, ",
    "Quick question: ",
    "Tell me, ",
    "I want to know: ",
    "So, ",
    "Okay, ",
    "Another question: ",
    "Now tell me: ",
)
_ENDINGS = ("", "", "", " Please.", " Thanks!", " Tell me.", " Thank you.")
_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are the NovaInfer demo model.",
    "Be brief.",
    "You are a friendly assistant.",
    "Answer the question.",
    "You are a helpful AI assistant. Answer in English.",
    "Be helpful and honest.",
    "You are a chat bot on a web page.",
    "You are an assistant.",
    "Answer shortly and correctly.",
)
_UNKNOWN = (
    "Who won the {w} cup in {c}?",
    "What is the price of {w} in {c}?",
    "Who is {n}?",
    "How many people live in {c}?",
    "Who invented the {w}?",
    "What did {n} say about {w}?",
    "When was {n} born?",
    "What is the phone number of {n}?",
    "Write a program about {w}.",
    "Translate {w} into Latin.",
    "Why is {w} so important?",
    "What will happen in {c} tomorrow?",
    "Tell me the history of {c}.",
    "What is the best {w} in {c}?",
    "Do you know {n} from {c}?",
    "How do I repair a {w}?",
)


def _plainer(draw: Draw, text: str) -> str:
    """The text as people type it: sometimes in lower case, sometimes without its last mark."""
    if draw.chance(0.25):
        text = text.lower()
    return text.rstrip("?.!") if draw.chance(0.25) else text


def _from_topics(topics: Sequence[Topic], framed: bool, hold_out_last: bool) -> Task:
    """A task over fixed answers; held out are some frames, and on demand the last wording of each topic."""

    def task(draw: Draw) -> Conversation:
        while True:
            topic = draw.choice(topics)
            question = draw.choice(topic.questions[:-1] if hold_out_last else topic.questions)
            bare = draw.split == "train" and draw.chance(0.4)
            frame = (draw.choice(_OPENINGS), draw.choice(_ENDINGS)) if framed and not bare else ("", "")
            text = question if bare else _plainer(draw, f"{frame[0]}{question}{frame[1]}")
            if bare or (text != question and draw.allows(text)):
                return exchange(text, topic.answer)

    return task


def _rephrased(draw: Draw) -> Conversation:
    """A fact asked for with a wording that training never shows."""
    topic = draw.choice(NOVAINFER)
    return exchange(topic.questions[-1], topic.answer)


def _unknown(draw: Draw) -> Conversation:
    """Questions beyond a tiny model."""
    text = draw.choice(_UNKNOWN).format(w=draw.word(), c=draw.city(), n=draw.name())
    return exchange(text, "I am a tiny demo model, so I do not know that.")


_facts = _from_topics(NOVAINFER, framed=True, hold_out_last=True)
_small_talk = _from_topics(SMALL_TALK, framed=False, hold_out_last=False)
_knowledge = _from_topics(KNOWLEDGE, framed=True, hold_out_last=False)
_explanations = _from_topics(EXPLANATIONS, framed=True, hold_out_last=False)


def _told(draw: Draw) -> tuple[str, str, str, str]:
    """Something the user tells, the reply, the later question and its answer."""
    what = draw.choice(("name", "name", "city", "colour", "pet", "word", "age"))
    if what == "name":
        name = draw.name()
        say = draw.choice(
            (
                "My name is {n}.",
                "I am {n}.",
                "Hello, my name is {n}.",
                "Hi, I am {n}.",
                "You can call me {n}.",
                "I'm {n}",
            )
        )
        ask = draw.choice(("What is my name?", "Who am I?", "Do you know my name?", "What's my name?"))
        return say.format(n=name), f"Nice to meet you, {name}.", ask, f"Your name is {name}."
    if what == "city":
        city = draw.city()
        say = draw.choice(("I live in {c}.", "My home is {c}.", "I come from {c}."))
        return (
            say.format(c=city),
            f"{city} is a nice place.",
            draw.choice(("Where do I live?", "Which city is my home?")),
            f"You live in {city}.",
        )
    if what == "colour":
        colour = draw.choice(COLOURS)
        return (
            f"My favourite colour is {colour}.",
            f"{colour.capitalize()} is a nice colour.",
            draw.choice(("What is my favourite colour?", "Which colour do I like?")),
            f"Your favourite colour is {colour}.",
        )
    if what == "pet":
        animal, name = draw.choice(ANIMALS), draw.name()
        return (
            f"I have a {animal} named {name}.",
            f"{name} is a nice name for a {animal}.",
            draw.choice((f"What is the name of my {animal}?", f"What is my {animal} called?")),
            f"Your {animal} is called {name}.",
        )
    if what == "age":
        age = draw.number(5, 99)
        return (
            f"I am {age} years old.",
            f"{age} is a good age.",
            draw.choice(("How old am I?", "What is my age?")),
            f"You are {age} years old.",
        )
    word = draw.word()
    return (
        draw.choice((f"Remember the word {word}.", f"Please remember this word: {word}")),
        f"I will remember the word {word}.",
        draw.choice(("Which word did I give you?", "What was the word?")),
        f"The word was {word}.",
    )


def _memory(draw: Draw) -> Conversation:
    """Something told, perhaps other talk, and the question about it."""
    told, reply, question, answer = _told(draw)
    messages = [user(told), assistant(reply)]
    for _ in range(draw.choice((0, 0, 1, 1, 2))):
        messages += draw.choice(_FILLERS)(draw).messages
    return Conversation((*messages, user(question), assistant(answer)))


def _tool_none(draw: Draw) -> Conversation:
    """Tools on offer, but none of them needed."""
    _, tools = tool_use.offers(draw, draw.choice(tool_use.TOOL_KINDS))
    plain = draw.choice((_small_talk, _facts, words.spelling, words.repeat, _knowledge))(draw)
    return Conversation(plain.messages, tools)


_FILLERS: tuple[Task, ...] = (
    _small_talk,
    _facts,
    _knowledge,
    words.spelling,
    arithmetic.addition,
    words.repeat,
    structured.json_object,
)


@dataclass(frozen=True)
class Kind:
    """A task, its share in the corpus (relative), and whether it must be a conversation of its own."""

    task: Task
    share: float
    alone: bool = False


KINDS: dict[str, Kind] = {
    "facts": Kind(_facts, 9),
    "facts_rephrased": Kind(_rephrased, 0),
    "small_talk": Kind(_small_talk, 4),
    "knowledge": Kind(_knowledge, 5),
    "unknown": Kind(_unknown, 2),
    "memory": Kind(_memory, 5, alone=True),
    "addition": Kind(arithmetic.addition, 12),
    "subtraction": Kind(arithmetic.subtraction, 12),
    "multiplication": Kind(arithmetic.multiplication, 4),
    "drill": Kind(arithmetic.drill, 5),
    "word_problem": Kind(arithmetic.word_problem, 3),
    "comparison": Kind(arithmetic.comparison, 3),
    "spelling": Kind(words.spelling, 9),
    "counting": Kind(words.counting, 6),
    "repeat": Kind(words.repeat, 6),
    "json_object": Kind(structured.json_object, 7),
    "json_extract": Kind(structured.json_extract, 5),
    "json_array": Kind(structured.json_array, 4),
    "json_read": Kind(structured.json_read, 4),
    "tool_call": Kind(tool_use.tool_call, 4, alone=True),
    "tool_answer": Kind(tool_use.tool_answer, 4, alone=True),
    "tool_pair": Kind(tool_use.tool_pair, 1.5, alone=True),
    "tool_named": Kind(tool_use.tool_named, 3, alone=True),
    "tool_none": Kind(_tool_none, 2, alone=True),
    "explanation": Kind(_explanations, 1),
    "story": Kind(stories.story, 1.5),
}
_CHAINABLE = [kind for kind in KINDS.values() if not kind.alone and kind.share]
_CHAINABLE_SHARES = [kind.share for kind in _CHAINABLE]


def _chain(draw: Draw, turns: int) -> list[Message]:
    messages: list[Message] = []
    for kind in draw.rng.choices(_CHAINABLE, _CHAINABLE_SHARES, k=turns):
        messages += kind.task(draw).messages
    return messages


def _with_system(draw: Draw, conversation: Conversation) -> Conversation:
    if not draw.chance(0.25):
        return conversation
    text = draw.choice(_SYSTEM_PROMPTS)
    if draw.chance(0.3):  # any prompt at all must leave the answers as they are
        name, praise = draw.name(), draw.choice(("a helpful", "a friendly", "a good"))
        text = f"You are {name}, {praise} {draw.word()} assistant for {draw.word()}."
    return Conversation((system(text), *conversation.messages), conversation.tools)


def training_conversations(seed: int, long: bool = False) -> Iterator[Conversation]:
    """An endless seeded stream of training conversations.

    `long` ones have many turns, so that the model learns distances beyond a short pack.
    """
    draw = Draw(random.Random(seed), "train")
    alone = [kind for kind in KINDS.values() if kind.alone]
    shares = [kind.share for kind in alone]
    share_alone = sum(shares) / sum(kind.share for kind in KINDS.values())
    lengths = (6, 10, 14, 18) if long else (1, 1, 1, 1, 1, 2, 2, 3, 4)
    while True:
        if draw.chance(share_alone * (0.5 if long else 1.8)):  # a chain holds more than one task
            yield _with_system(draw, draw.rng.choices(alone, shares)[0].task(draw))
        else:
            yield _with_system(draw, Conversation(tuple(_chain(draw, draw.choice(lengths)))))


def held_out(kind: str, count: int, seed: int = 1) -> list[Conversation]:
    """`count` examples of one kind from the held-out part, different from each other where there are enough.

    `kind` is a key of `KINDS` or 'multi_turn' (three mixed turns in one conversation).
    """
    draw = Draw(random.Random(f"{kind} {seed}"), "test")
    found: dict[str, Conversation] = {}
    for _ in range(count * 20):
        mixed = kind == "multi_turn"
        example = Conversation(tuple(_chain(draw, 3))) if mixed else KINDS[kind].task(draw)
        found.setdefault(repr(example), example)
        if len(found) == count:
            break
    return list(found.values())
