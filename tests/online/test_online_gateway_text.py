"""The processes that render and tokenise: the slow ones are killed, the dead ones replaced, and nobody else notices."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from gateway import text_child, text_process
from gateway.routes.endpoint import LONG_BODY
from gateway.text_child import TextWork
from gateway.text_jobs import DecodeJob, Done, Refused, pack_ids
from gateway.text_process import Lane
from novainfer.text.chat_template import ChatTemplate
from novainfer.text.tokenizer import Tokenizer
from tests.fakes import CHATML, ScriptedScheduler, write_tokenizer
from tests.online.conftest import Pair
from tests.online.gateways import GatewayThread, start_pair
from tests.online.test_online_gateway_cancel import raw_request

pytestmark = pytest.mark.stage2

CHAT = "/v1/chat/completions"
FOREVER = 1000.0
DEMO = Path(__file__).resolve().parents[2] / "novainfer" / "assets" / "demo"
# What a message can make of this template: no call and no output in the loops, which look at the clock.
TEMPLATE = (
    """{%- if messages[0].content == 'cubic' %}
{%- for a in messages %}{% for b in messages %}{% for c in messages %}{% endfor %}{% endfor %}{% endfor %}
{%- elif messages[0].content == 'large' %}{{ '%6000000000d' | format(messages | length) }}
{%- endif %}{% if number is defined %}{{ number }} {{ other | tojson }}{% endif %}"""
    + CHATML
)


def said(*contents: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text} for text in contents], "max_tokens": 1}


SHORT = said("hello")
LONG = {**SHORT, "user": "x" * LONG_BODY}
CUBIC = said("cubic", *["x"] * 2000)


def all_processes(scheduler: ScriptedScheduler, gateway: GatewayThread, count: int = 3) -> dict[str, psutil.Process]:
    """The zygote and the text processes, of which one may just be being replaced."""
    found: list[dict[str, psutil.Process]] = []
    scheduler.wait_for(lambda: found.append(gateway.text_processes()) is None and len(found[-1]) == count)
    return found[-1]


def looked_at(texts: Texts) -> list[tuple[int, list[Any], str]]:
    """Threads, ports and mapped files of each process; nothing if one was being replaced, as after each long text."""
    seen = []
    for process in texts.processes().values():
        try:
            threads, ports = len(os.listdir(f"/proc/{process.pid}/task")), process.net_connections("inet")
            seen.append((threads, ports, Path(f"/proc/{process.pid}/maps").read_text()))
        except (OSError, psutil.NoSuchProcess):
            return []
    return seen if all(mapped for _, _, mapped in seen) else []


class Texts(Pair):
    """A pair whose template can be made to do its worst."""

    @property
    def lanes(self) -> list[Lane]:
        return self.gateway.service.text._lanes

    def processes(self) -> dict[str, psutil.Process]:
        return all_processes(self.scheduler, self.gateway)

    def process(self, title: str) -> psutil.Process:
        return self.processes()[title]

    def lost(self) -> dict[str, int]:
        """The figures of /metrics."""
        head = "novainfer_text_processes_lost_total{reason="
        lines = [line for line in self.http.get("/metrics").text.splitlines() if line.startswith(head)]
        found = {line.split('"')[1]: int(float(line.rpartition(" ")[2])) for line in lines}
        return {reason: count for reason, count in found.items() if count}

    def wait_until_given(self, before: float = 0.0, lane: int = 0) -> float:
        """Block until the process of a lane has been given a job, not the one of `before`. When, on its clock."""
        began: list[float] = []

        def is_given() -> bool:
            turn = self.lanes[lane].turn
            began.append(0.0 if turn is None else turn.began)
            return began[-1] not in (0.0, before)

        self.scheduler.wait_for(is_given)
        return began[-1]

    def wait_until_queued(self, count: int) -> None:
        """Block until so many wait for it."""
        self.scheduler.wait_for(lambda: self.lanes[0]._lock.num_waiting == count)


@pytest.fixture(scope="module")
def hostile_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tokenizer(tmp_path_factory.mktemp("hostile"), template=TEMPLATE)
    path = str(folder / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.save(path)
    return folder


@pytest.fixture
def texts(hostile_model: Path, tmp_path: Path) -> Iterator[Texts]:
    tokenizer = Tokenizer.load(hostile_model)
    scheduler, gateway = start_pair(hostile_model, tmp_path / "run", tokenizer.vocab_size)
    with gateway.openai() as sdk, gateway.http() as http:
        texts = Texts(scheduler, gateway, tokenizer, sdk, http)
        assert ask(texts, SHORT).status_code == ask(texts, LONG).status_code == 200  # both processes are there
        scheduler.added.clear()
        yield texts
    gateway.close()
    scheduler.close()


@pytest.fixture
def shared(hostile_model: Path, tmp_path: Path) -> Iterator[Texts]:
    """A gateway with two tenants, `a` and `b`, whose keys are called so."""
    (tmp_path / "keys").write_text("a:a\nb:b\n")
    tokenizer = Tokenizer.load(hostile_model)
    scheduler, gateway = start_pair(
        hostile_model, tmp_path / "run", tokenizer.vocab_size, api_key_file=str(tmp_path / "keys")
    )
    with gateway.openai() as sdk, gateway.http(**{"x-api-key": "a"}) as http:
        texts = Texts(scheduler, gateway, tokenizer, sdk, http)
        assert ask(texts, SHORT, "a").status_code == 200  # the process is there
        scheduler.added.clear()
        yield texts
    gateway.close()
    scheduler.close()


@pytest.fixture
def stoppable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is stopped counts as one that is slow."""
    monkeypatch.setattr(text_process, "STOPPED_LIMIT", FOREVER)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def ask(texts: Texts, body: dict[str, Any], key: str = "none") -> httpx.Response:
    with texts.gateway.http(**{"x-api-key": key}) as http:
        return http.post(CHAT, json=body)


def test_given_short_texts_that_get_stuck_when_long_ones_come_then_they_are_answered_meanwhile(
    texts: Texts, pool: ThreadPoolExecutor, stoppable: None
) -> None:
    texts.process("0").suspend()
    stuck = pool.submit(ask, texts, SHORT)
    texts.wait_until_given()
    assert ask(texts, LONG).status_code == 200
    assert texts.http.get("/livez").status_code == 200
    assert not stuck.done()
    texts.process("0").resume()
    assert stuck.result().status_code == 200
    assert texts.lost() == {}


def test_given_grammars_that_get_stuck_when_other_texts_come_then_they_are_answered_meanwhile(
    texts: Texts, pool: ThreadPoolExecutor, stoppable: None
) -> None:
    form = {**SHORT, "max_tokens": 3, "structured_outputs": {"choice": ["hello"]}}
    assert all_processes(texts.scheduler, texts.gateway).keys() == {"zygote", "0", "1"}
    assert ask(texts, form).status_code == 200
    all_processes(texts.scheduler, texts.gateway, 4)["2"].suspend()
    stuck = [pool.submit(ask, texts, body) for body in (form, {**LONG, **form})]
    texts.wait_until_given(lane=2)
    texts.scheduler.wait_for(lambda: texts.lanes[2]._lock.num_waiting == 1)
    assert ask(texts, SHORT).status_code == ask(texts, LONG).status_code == 200
    assert not any(answer.done() for answer in stuck)
    all_processes(texts.scheduler, texts.gateway, 4)["2"].resume()
    assert [answer.result().status_code for answer in stuck] == [200, 200]
    assert texts.lost() == {}


def test_given_a_template_that_takes_too_long_when_its_time_is_over_then_it_is_killed_and_those_behind_it_go_on(
    texts: Texts, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_process, "RENDER_LIMIT", FOREVER)
    slow = pool.submit(ask, texts, CUBIC)
    texts.wait_until_given()
    behind = [pool.submit(ask, texts, SHORT) for _ in range(2)]
    texts.wait_until_queued(2)
    first = texts.process("0")
    monkeypatch.setattr(text_process, "RENDER_LIMIT", 0.3)
    error = slow.result().json()["error"]
    assert (slow.result().status_code, error["param"]) == (400, "messages")
    assert "template took too long" in error["message"]
    assert [answer.result().status_code for answer in behind] == [200, 200]
    assert not first.is_running()
    assert texts.lost() == {"time": 1}


def test_given_a_job_that_takes_too_long_when_its_time_is_over_then_504_and_the_next_is_answered(
    texts: Texts, stoppable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_process, "JOB_LIMIT", 0.3)
    texts.process("0").suspend()
    reply = texts.post("/v1/completions", {"prompt": "hello", "max_tokens": 1})
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "request_timeout")
    monkeypatch.undo()
    assert texts.post("/v1/completions", {"prompt": "hello", "max_tokens": 1}).status_code == 200
    assert texts.lost() == {"time": 1}


def test_given_a_client_that_leaves_when_its_text_is_being_prepared_then_the_process_is_killed_for_the_others(
    texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_process, "RENDER_LIMIT", FOREVER)
    connection = raw_request(texts, CUBIC)
    texts.wait_until_given()
    connection.close()
    assert ask(texts, SHORT).status_code == 200
    assert texts.lost() == {"unwanted": 1}
    assert len(texts.scheduler.added) == 1
    texts.wait_idle()


def test_given_a_client_that_leaves_when_its_text_still_waits_then_no_process_sees_it(
    texts: Texts, pool: ThreadPoolExecutor, stoppable: None
) -> None:
    process = texts.process("0")
    process.suspend()
    first = pool.submit(ask, texts, SHORT)
    texts.wait_until_given()
    connection = raw_request(texts, CUBIC)
    texts.wait_until_queued(1)
    connection.close()
    texts.wait_until_queued(0)
    process.resume()
    assert first.result().status_code == 200
    assert texts.process("0") == process
    assert texts.lost() == {}
    texts.wait_idle()


def test_given_texts_that_wait_when_their_lane_has_no_room_then_503_until_one_is_done(
    texts: Texts, pool: ThreadPoolExecutor, stoppable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = texts.lanes[0]
    texts.process("0").suspend()
    held = [pool.submit(ask, texts, SHORT)]
    texts.wait_until_given()
    monkeypatch.setattr(text_process, "MAX_HELD_BYTES", 2 * lane.num_bytes)
    held.append(pool.submit(ask, texts, SHORT))
    texts.wait_until_queued(1)
    for path, body in ((CHAT, SHORT), ("/tokenize", {"messages": SHORT["messages"]})):
        refused = texts.post(path, body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
    assert texts.http.post(CHAT, json=LONG).status_code == 200, "the other lane has room of its own"
    texts.process("0").resume()
    assert [answer.result().status_code for answer in held] == [200, 200]
    assert ask(texts, SHORT).status_code == 200
    assert lane.num_bytes == 0


def test_given_a_tenant_with_many_texts_when_another_has_one_then_it_is_next_and_has_room(
    shared: Texts, pool: ThreadPoolExecutor, stoppable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = shared.lanes[0]
    shared.process("0").suspend()
    asked = [pool.submit(ask, shared, SHORT, "a")]
    shared.wait_until_given()
    for number, tenant in enumerate("aab", 1):
        if tenant == "b":  # the other one has half of what may wait
            monkeypatch.setattr(text_process, "MAX_HELD_BYTES", 2 * lane.num_bytes)
            refused = ask(shared, SHORT, "a")
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        asked.append(pool.submit(ask, shared, SHORT, tenant))
        shared.wait_until_queued(number)
    shared.process("0").resume()
    assert [answer.result().status_code for answer in asked] == [200] * 4
    assert [request.tenant for request in shared.scheduler.added] == ["a", "a", "b", "a"]
    assert lane.num_bytes == 0


def test_given_a_process_that_is_killed_when_it_works_then_its_job_is_done_by_the_next(
    texts: Texts, pool: ThreadPoolExecutor, stoppable: None
) -> None:
    texts.process("0").suspend()
    asked: Future[httpx.Response] = pool.submit(ask, texts, SHORT)
    texts.wait_until_given()
    texts.process("0").kill()
    assert asked.result().status_code == 200
    assert texts.lost() == {"died": 1}


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_given_a_process_that_is_stopped_when_it_has_a_job_then_that_is_done_by_the_next(
    texts: Texts, path: str
) -> None:
    process = texts.process("0")
    process.suspend()
    assert texts.post(path, {**SHORT, "prompt": "hello"}).status_code == 200
    assert texts.process("0") != process
    assert texts.lost() == {"died": 1}


def test_given_a_template_that_gets_no_cpu_when_its_time_is_over_by_the_clock_then_it_goes_on(
    texts: Texts, pool: ThreadPoolExecutor, stoppable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_process, "RENDER_LIMIT", 0.8)
    process = texts.process("0")
    process.suspend()
    asked = pool.submit(ask, texts, SHORT)
    began, lane = texts.wait_until_given(), texts.lanes[0]

    def is_late() -> bool:
        timer = lane.turn.timer if lane.turn is not None else None
        return asked.done() or (timer is not None and timer.when() > began + 2.0)

    texts.scheduler.wait_for(is_late)
    process.resume()
    assert asked.result().status_code == 200
    assert texts.process("0") == process
    assert texts.lost() == {}


def test_given_no_file_left_when_a_process_is_needed_then_503_until_there_are_some(texts: Texts) -> None:
    assert texts.http.post(CHAT, json=LONG).status_code == 200  # this connection stays
    all_processes(texts.scheduler, texts.gateway)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
        with pytest.raises(OSError, match="Too many open files"):
            files.extend(os.dup(0) for _ in range(4096))
        answers = [texts.http.post(CHAT, json=LONG) for _ in range(2)]
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [answer.status_code for answer in answers] == [200, 503]
    assert answers[1].json()["error"]["code"] == "overloaded"
    assert int(answers[1].headers["retry-after"]) >= 1
    assert ask(texts, LONG).status_code == 200


@pytest.mark.parametrize("title", ["0", "zygote"])
def test_given_a_process_that_is_killed_when_it_is_idle_then_nobody_notices(texts: Texts, title: str) -> None:
    processes = texts.processes()
    process = processes[title]
    process.kill()
    psutil.wait_procs([process] if title == "0" else list(processes.values()))
    for body in (SHORT, LONG):
        assert ask(texts, body).status_code == 200
    assert texts.process(title) != process


def test_given_a_zygote_that_hangs_when_a_process_is_needed_then_it_is_killed_and_started_again(
    texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_process, "START_LIMIT", 0.3)
    zygote = texts.process("zygote")
    zygote.suspend()
    texts.process("0").kill()
    reply = ask(texts, SHORT)
    assert reply.status_code in (200, 500)  # the next one may be as slow, on a busy machine
    assert not zygote.is_running()
    monkeypatch.undo()
    assert ask(texts, SHORT).status_code == 200


def test_given_a_text_whose_processes_die_when_sent_then_it_is_a_400_and_the_next_is_answered(
    texts: Texts, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_process, "RENDER_LIMIT", FOREVER)
    asked = pool.submit(ask, texts, CUBIC)
    given = 0.0
    for _ in range(text_process.JOB_ATTEMPTS):
        given = texts.wait_until_given(given)
        texts.process("0").kill()
    error = asked.result().json()["error"]
    assert (asked.result().status_code, error["param"]) == (400, "messages")
    assert "died" in error["message"]
    assert ask(texts, SHORT).status_code == 200
    assert texts.lost() == {"died": text_process.JOB_ATTEMPTS}


def test_given_a_template_that_takes_much_memory_when_rendered_then_400_by_the_same_process(texts: Texts) -> None:
    process = texts.process("0")
    reply = ask(texts, said("large"))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")
    assert "MemoryError" in reply.json()["error"]["message"]
    assert texts.process("0") == process


def test_given_a_long_text_when_it_is_prepared_then_its_process_is_replaced_to_free_the_memory(texts: Texts) -> None:
    processes = texts.processes()
    for _ in range(2):
        assert ask(texts, LONG).status_code == 200
    assert psutil.wait_procs([processes["1"]], timeout=20)[1] == []
    assert texts.process("0") == processes["0"]
    assert texts.lost() == {}


def test_given_a_limit_when_more_memory_is_taken_then_memory_error() -> None:
    code = (
        "from gateway.text_child import limit_memory\n"
        "limit_memory(2**26)\n"
        "held = bytearray(2**25)\n"
        "try:\n    bytearray(2**26)\nexcept MemoryError:\n    print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"


def test_given_ids_whose_text_is_too_long_when_decoded_then_the_field_is_refused(
    hostile_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = TextWork.load(hostile_model, None)
    ids = [pack_ids(Tokenizer.load(hostile_model).encode("hello"))] * 3
    job = DecodeJob("tokens", ids, skip_special_tokens=True)
    assert work.do(job, lambda _: None) == Done([b"hello"] * 3)
    monkeypatch.setattr(text_child, "MAX_TEXT_CHARS", 14)
    reply = work.do(job, lambda _: None)
    assert isinstance(reply, Refused)
    assert reply.param == "tokens"


def test_given_texts_that_were_prepared_when_the_processes_are_looked_at_then_they_have_one_thread_no_port_and_no_more(
    texts: Texts,
) -> None:
    found: list[list[tuple[int, list[Any], str]]] = []
    texts.scheduler.wait_for(lambda: found.append(looked_at(texts)) is None and bool(found[-1]))
    for threads, ports, mapped in found[-1]:
        assert threads == 1
        assert ports == []
        assert "tokenizers" in mapped
        assert not [name for name in ("pydantic", "zmq", "uvloop", "torch") if name in mapped]


def test_given_a_gateway_when_it_is_closed_then_its_text_processes_are_gone(
    hostile_model: Path, tmp_path: Path
) -> None:
    scheduler, gateway = start_pair(hostile_model, tmp_path / "run", 400)
    processes = all_processes(scheduler, gateway)
    gateway.close()
    scheduler.close()
    assert [process for process in processes.values() if process.is_running()] == []


def test_given_what_chats_and_prompts_can_say_when_prepared_then_all_of_it_counts_as_in_this_process(
    texts: Texts,
) -> None:
    tokenizer = texts.tokenizer
    given = {"number": 2**70, "other": {"x": 1e-7, "y": [None, -0.0, "\u2028"]}}
    for special in (False, True):
        body = {**SHORT, "chat_template_kwargs": given, "add_special_tokens": special}
        text = ChatTemplate.of(tokenizer).render(SHORT["messages"], template_kwargs=given)
        wanted = tokenizer.encode(text, add_special_tokens=special)
        assert texts.post("/tokenize", body).json()["tokens"] == wanted
        assert texts.post(CHAT, body).status_code == 200
        assert texts.scheduler.added[-1].prompt_token_ids == wanted
        body = {"prompt": "hello", "add_special_tokens": special, "max_tokens": 1}
        assert texts.post("/v1/completions", body).status_code == 200
        assert texts.scheduler.added[-1].prompt_token_ids == tokenizer.encode("hello", add_special_tokens=special)
    ids = tokenizer.encode("hello")
    assert texts.post("/detokenize", {"tokens": ids}).json()["prompt"] == "<|endoftext|>hello"
    echoed = texts.post("/v1/completions", {"prompt": ids, "echo": True, "max_tokens": 1}).json()["choices"][0]["text"]
    assert echoed.startswith("hello")


CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hello!"}]},
    {
        "messages": [
            {"role": "system", "content": "<b> \u2028 é 你 🎉"},
            {"role": "user", "content": "1 + 1"},
        ]
    },
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
    {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"n": 10**30, "x": 1e-7, "y": -0.0}}}],
        "chat_template_kwargs": {"enable_thinking": False, "number": 2**70},
    },
    {
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "So "}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
]
PROMPTS: list[Any] = ["Hello!", " a  b\n\u0000é", "你好 🎉" * 10]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptedScheduler, httpx.Client]]:
    vocab_size = Tokenizer.load(DEMO).vocab_size
    scheduler, gateway = start_pair(DEMO, tmp_path_factory.mktemp("run"), vocab_size)
    with gateway.http() as http:
        yield scheduler, http
    gateway.close()
    scheduler.close()


@pytest.mark.parametrize("chat", CHATS, ids=range(len(CHATS)))
def test_given_a_chat_of_the_demo_model_when_prepared_then_its_ids_are_those_of_this_process(
    demo: tuple[ScriptedScheduler, httpx.Client], chat: dict[str, Any]
) -> None:
    tokenizer = Tokenizer.load(DEMO)
    text = ChatTemplate.of(tokenizer).render(
        chat["messages"],
        tools=chat.get("tools"),
        add_generation_prompt=chat.get("add_generation_prompt", True),
        continue_final_message=chat.get("continue_final_message", False),
        template_kwargs=chat.get("chat_template_kwargs"),
    )
    content = json.dumps(chat).encode()
    reply = demo[1].post("/tokenize", content=content, headers={"content-type": "application/json"})
    assert reply.json()["tokens"] == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("special", [True, False])
def test_given_prompts_of_the_demo_model_when_prepared_then_ids_and_text_are_those_of_this_process(
    demo: tuple[ScriptedScheduler, httpx.Client], special: bool
) -> None:
    scheduler, http = demo
    tokenizer = Tokenizer.load(DEMO)
    scheduler.added.clear()
    body = {"max_tokens": 1, "echo": True, "add_special_tokens": special}
    assert http.post("/v1/completions", json={**body, "prompt": PROMPTS}).status_code == 200
    ids = [tokenizer.encode(prompt, add_special_tokens=special) for prompt in PROMPTS]
    assert [request.prompt_token_ids for request in scheduler.added] == ids
    choices = http.post("/v1/completions", json={**body, "prompt": ids, "max_tokens": 1}).json()["choices"]
    for choice, each in zip(choices, ids, strict=True):
        assert choice["text"].startswith(tokenizer.decode(each))
        assert http.post("/detokenize", json={"tokens": each}).json()["prompt"] == tokenizer.decode(
            each, skip_special_tokens=False
        )
