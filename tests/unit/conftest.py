"""Fixtures of several files."""

from __future__ import annotations

import pytest

from novainfer.entrypoints.answer_faults import Echo
from novainfer.text.tokenizer import Tokenizer
from tests.fakes import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A small one."""
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def echo(tokenizer: Tokenizer) -> Echo:
    """Of a short prompt."""
    return Echo(tokenizer, tokenizer.encode("hello world"))
