"""Stories from templates: longer answers, so that streaming can be seen."""

from __future__ import annotations

from bench.demo_model.content import Draw
from bench.demo_model.conversation import Conversation, exchange
from bench.demo_model.texts import load_text

_PLOTS: dict[str, str] = load_text("plots")
_ANIMALS = ("fox", "cat", "dog", "bear", "rabbit", "mouse", "owl", "horse", "wolf", "frog", "duck", "dragon")
_ASK = (
    "Tell me {s} about a {animal} named {name}, a {thing} and {place}.",
    "Write {s} about a {animal} named {name}, a {thing} and {place}.",
    "Please tell me {s} with a {animal} named {name}, a {thing} and {place}.",
)


def story(draw: Draw) -> Conversation:
    """A story about an animal, a name, a place and a thing that the user gives."""
    plot = draw.choice(tuple(_PLOTS))
    parts = {"animal": draw.choice(_ANIMALS), "name": draw.name(), "place": draw.city(), "thing": draw.word()}
    return exchange(draw.choice(_ASK).format(s=plot, **parts), _PLOTS[plot].format(**parts))
