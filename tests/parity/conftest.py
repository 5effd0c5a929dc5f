"""Checkpoints and transformers' answers, made once per test session and family."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.parity.builders import build_checkpoint
from tests.parity.harness import NUM_TOKENS, Generation, ragged_prompts, transformers_greedy


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's random checkpoint."""
    root = tmp_path_factory.mktemp("checkpoints")

    @cache
    def build(name: str) -> Path:
        return build_checkpoint(name, root / name)

    return build


@pytest.fixture(scope="session")
def expected(checkpoint: Callable[[str], Path]) -> Callable[[str], Generation]:
    """What transformers generates for the ragged prompts."""

    @cache
    def generate(name: str) -> Generation:
        return transformers_greedy(checkpoint(name), ragged_prompts(), NUM_TOKENS)

    return generate
