"""One scripted scheduler and gateway for a module; a test that changes their settings gets them back as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from novainfer.text.tokenizer import Tokenizer
from tests.fakes import ScriptedScheduler, write_thinker, write_tokenizer
from tests.online.gateways import GatewayThread, start_pair


@dataclass
class Pair:
    """A gateway, the scheduler behind it, clients for it, and its tokenizer."""

    scheduler: ScriptedScheduler
    gateway: GatewayThread
    tokenizer: Tokenizer
    sdk: openai.OpenAI
    http: httpx.Client

    def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        return self.http.post(path, json=body, headers=headers)

    def say(self, text: str) -> None:
        """Every choice of every request answers `text` and ends."""
        ids = self.tokenizer.encode(text)
        self.scheduler.script = lambda request, choice: ids

    def wait_idle(self) -> None:
        """Block until neither side holds a request."""
        self.scheduler.wait_for(lambda: not self.scheduler.live)
        self.scheduler.wait_for(lambda: self.gateway.client.num_live == 0 and self.gateway.service.limits.num_live == 0)


@contextmanager
def running_pair(model: Path, run: Path) -> Iterator[Pair]:
    """A pair with this checkpoint's tokenizer; `run`: a folder for its sockets."""
    tokenizer = Tokenizer.load(model)
    scheduler, gateway = start_pair(model, run, tokenizer.vocab_size)
    with gateway.openai() as sdk, gateway.http() as http:
        yield Pair(scheduler, gateway, tokenizer, sdk, http)
    gateway.close()
    scheduler.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder without weights."""
    return write_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def module_pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with running_pair(tiny_model, tmp_path_factory.mktemp("run")) as pair:
        yield pair


@pytest.fixture
def pair(module_pair: Pair) -> Iterator[Pair]:
    """The module's pair; afterwards nothing may be held anywhere."""
    scheduler = module_pair.scheduler
    scheduler.added.clear()
    scheduler.cancelled.clear()
    yield module_pair
    scheduler.tokens_before_pause = None
    scheduler.script = lambda request, choice: None
    scheduler.reject = lambda request: None
    scheduler.step_seconds = scheduler.seconds_since_progress = 0.0
    module_pair.wait_idle()


@pytest.fixture(scope="module", params=[False, True], ids=["plain marks", "special marks"])
def module_thinker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A pair with a model that thinks and calls tools."""
    model = write_thinker(tmp_path_factory.mktemp("model"), are_special=request.param)
    with running_pair(model, tmp_path_factory.mktemp("run")) as pair:
        yield pair


@pytest.fixture
def thinker(module_thinker: Pair) -> Iterator[Pair]:
    """The module's; it answers as fast as it can again."""
    yield module_thinker
    module_thinker.scheduler.step_seconds = 0.0
    module_thinker.scheduler.script = lambda request, choice: None
    module_thinker.scheduler.reject = lambda request: None
    module_thinker.scheduler.tokens_before_pause = None
    module_thinker.wait_idle()
