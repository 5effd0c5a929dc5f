"""The chat page in a real browser: what it shows is what the API says, and nothing in it is more than text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from novainfer.text.tokenizer import Tokenizer
from tests.online.conftest import Pair
from tests.online.gateways import GatewayThread, start_pair
from tests.servers import RunningServer
from tests.ui.browser import ENTER, ESCAPE, SHIFT, needs_browser
from tests.ui.foreign import DONE, foreign_server
from tests.ui.page import TAB, Page

pytestmark = [pytest.mark.stage2, needs_browser]


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The demo model, in a server that may be hurt."""
    with RunningServer(log=tmp_path_factory.mktemp("server") / "log") as running:
        yield running
        running.stop()


def say(server: RunningServer, messages: list[dict[str, str]], **more: Any) -> tuple[str, int]:
    """The API's answer, and its number of tokens."""
    with server.http() as http:
        body = {"messages": messages, "temperature": 0, **more}
        answer = http.post("/v1/chat/completions", json=body).json()
    return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]


def words(text: str) -> list[str]:
    """Paragraphs and line breaks apart, which the page shows in its own way."""
    return text.split()


def test_given_the_demo_model_when_two_questions_are_asked_then_the_page_shows_what_the_api_says(
    own_server: RunningServer, page: Page
) -> None:
    server = own_server
    first, second = "Describe how NovaInfer handles a request.", "What is 23 plus 45?"
    page.open(server.base_url, temperature=0)
    page.wait_connected()
    messages = [{"role": "user", "content": first}]
    text, num_tokens = say(server, messages)
    assert words(page.ask(first)) == words(text)
    assert f"{num_tokens} tokens \u00b7 " in page.facts
    assert "tokens/s \u00b7 first after " in page.facts
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": second}]
    text, _ = say(server, messages)
    assert words(page.ask(second)) == words(text)
    page.browser.wait("document.querySelector('#state-word').textContent === 'ready'")
    page.browser.wait("/^[0-9]+$/.test(document.querySelector('#state-rate').textContent)")
    assert page.browser.console() == []
    page.browser.open(f"{server.base_url}/ui")
    assert page.browser.run("return document.querySelector('#temperature').value") == "0"


def test_given_a_stream_when_its_gateway_dies_then_the_page_shows_the_same_text_as_undisturbed(
    own_server: RunningServer, page: Page
) -> None:
    server = own_server
    question = "Describe how NovaInfer handles a request."
    messages = [{"role": "user", "content": question}]
    text, num_tokens = say(server, messages, max_tokens=1500, ignore_eos=True)
    page.open(server.base_url, temperature=0, max_tokens=1500, more='{"ignore_eos": true}')
    page.wait_connected()
    gateway = server.processes()["gateway 0"]
    page.begin(question)
    page.browser.wait("document.querySelector('.answer > .text').textContent.length")
    gateway.kill()
    assert words(page.wait_written(question)) == words(text)
    assert f"{num_tokens} tokens" in page.facts
    asked = page.browser.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert any("/v1/streams/chatcmpl-" in url and "after=" in url for url in asked)


@pytest.mark.parametrize("way", ["button", "key"])
def test_given_an_answer_that_is_written_when_it_is_stopped_then_the_engine_is_told_and_what_came_stays(
    pair: Pair, page: Page, way: str
) -> None:
    pair.say("one two three")
    pair.scheduler.tokens_before_pause = 5
    page.open(pair.gateway.url)
    page.begin("count")
    page.browser.wait("document.querySelector('.answer > .text').textContent.length")
    if way == "button":
        page.browser.click("#stop")
    else:
        page.browser.press("#message", ESCAPE)
    assert "one two three".startswith(page.wait_written("count"))
    pair.wait_idle()
    pair.scheduler.tokens_before_pause = None
    assert len(pair.scheduler.cancelled) == 1
    assert "stopped" in page.facts
    assert page.ask("go on") == "one two three"


def test_given_a_conversation_when_answers_are_asked_for_again_and_questions_changed_then_the_model_sees_what_is_shown(
    pair: Pair, page: Page
) -> None:
    def seen() -> str:
        return pair.tokenizer.decode(pair.scheduler.added[-1].prompt_token_ids, skip_special_tokens=False)

    def turns(*texts: str) -> str:
        roles = ["system", *["user", "assistant"] * len(texts)]
        return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in zip(roles, texts, strict=False))

    page.open(pair.gateway.url, system="Be kind.", seed=7, max_tokens=20, top_p=0.5)
    pair.say("A")
    assert page.ask("a") == "A"
    params = pair.scheduler.added[-1].params
    assert (params.seed, params.max_tokens, params.top_p) == (7, 20, 0.5)
    pair.say("B")
    page.browser.press("#message", f"b{SHIFT}{ENTER}{SHIFT}c{ENTER}")
    assert page.wait_written("b\nc") == "B"
    assert seen().startswith(turns("Be kind.", "a", "A", "b\nc"))
    pair.say("B again")
    page.browser.click(".exchange:last-child .answer .actions button")
    page.browser.wait("[...document.querySelectorAll('.answer > .text')].at(-1).textContent === 'B again'")
    page.wait_written("b\nc")
    assert seen().startswith(turns("Be kind.", "a", "A", "b\nc"))
    pair.say("D")
    page.browser.click(".exchange:last-child .question .actions button")
    assert page.browser.run("return document.querySelector('#message').value") == "b\nc"
    assert page.ask("d") == "D"
    assert seen().startswith(turns("Be kind.", "a", "A", "d"))
    page.browser.click("#clear")
    assert page.ask("e") == "D"
    assert seen().startswith(turns("Be kind.", "e"))


HOSTILE = '<img src=x onerror="document.title=1">\n\n<b>x</b>\n```html\n<script>document.title=2</script>\n```\nend'


def test_given_a_model_that_writes_markup_when_it_is_shown_then_it_is_text_and_fenced_code_stands_by_itself(
    pair: Pair, page: Page
) -> None:
    pair.say(HOSTILE)
    page.open(pair.gateway.url)
    page.ask("<i>q</i>")
    blocks = "[...document.querySelector('.answer > .text').children].map((one) => [one.tagName, one.textContent])"
    assert page.browser.run(f"return {blocks}") == [
        ["P", '<img src=x onerror="document.title=1">'],
        ["P", "<b>x</b>"],
        ["PRE", "<script>document.title=2</script>\n"],
        ["P", "end"],
    ]
    told = "#log :is(.question, .text) :is(img, b, i, script)"
    assert page.browser.run("return document.querySelectorAll(arguments[0]).length", told) == 0
    assert page.browser.run("return document.title") == "NovaInfer"


def test_given_text_in_any_pieces_when_it_is_shown_then_it_is_as_in_one_piece(pair: Pair, page: Page) -> None:
    page.open(pair.gateway.url)
    text = "a\nb\n\n  c `d`\n````py\n```\n\ne\n````\n~~~\nf\n~~~\n``` g ` h\n\n\ni"
    shown = page.browser.run(
        """const { TextView } = await import(new URL("ui/text.js", document.baseURI));
        const shown = (size) => {
            const view = new TextView();
            for (let at = 0; at < arguments[0].length; at += size) view.append(arguments[0].slice(at, at + size));
            view.finish();
            return [...view.root.children].map((one) => [one.tagName, one.textContent]);
        };
        return [1, 2, 3, 7, 1000].map(shown);""",
        text,
    )
    expected = [["P", "a\nb"], ["P", "  c `d`"], ["PRE", "```\n\ne\n"], ["PRE", "f\n"], ["P", "``` g ` h"], ["P", "i"]]
    assert shown == [expected] * 5


@pytest.fixture
def locked(tiny_model: Path, tmp_path: Path) -> Iterator[GatewayThread]:
    """A gateway that wants a key."""
    size = Tokenizer.load(tiny_model).vocab_size
    scheduler, gateway = start_pair(tiny_model, tmp_path / "run", size, api_key=("right",))
    yield gateway
    gateway.close()
    scheduler.close()


def test_given_a_server_with_keys_when_the_page_is_opened_then_it_asks_until_one_is_right_and_keeps_it_in_the_tab(
    locked: GatewayThread, page: Page
) -> None:
    page.open(locked.url)
    asks = "document.querySelector('#key').open && document.querySelector('#key-words').innerText"
    for why, key in (("wants an API key", "wrong"), ("refused this API key", "right")):
        page.browser.wait(f"{asks}.includes(arguments[0])", why)
        page.browser.type("#key-value", key + ENTER)
    page.wait_connected()
    page.ask("hello")
    assert "tokens" in page.facts
    assert page.browser.run("return Object.values(sessionStorage)") == ["right"]
    assert "right" not in page.browser.run("return JSON.stringify(localStorage)")
    page.browser.open(f"{locked.url}/ui")
    page.wait_connected()


def chunk(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": None}], **more}


REFUSED = {"error": {"message": "What is explain?", "type": "invalid_request_error", "param": "explain", "code": None}}
BUSY = {"error": {"message": "Too many requests.", "type": "rate_limit_error", "param": None, "code": None}}
EXPLAIN = {"summary": "It waited.", "total_ms": 2000, "gateway_ms": 0, "queue_ms": 1500, "prefill_ms": 100,
           "decode_ms": 400, "longest_gap_ms": 30, "preemptions": 2, "restarts": 0}  # fmt: skip
CALL = {"index": 0, "id": "c", "function": {"name": "look", "arguments": '{"up":'}}
STREAM = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"reasoning_content": "Hmm."}),
    chunk({"content": "Well"}),
    chunk({"tool_calls": [CALL]}),
    chunk({"tool_calls": [{"index": 0, "function": {"arguments": ' "<b>"}'}}]}),
    {"id": "x", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}, "explain": EXPLAIN},
    DONE,
]


def choose(page: Page, url: str) -> None:
    """In the settings, which stay open: talk to this server."""
    page.browser.click("#show-settings")
    page.browser.type("#server", url + TAB)
    page.browser.wait("document.querySelector('#model').value === 'foreign'")


def test_given_another_server_when_it_answers_in_all_ways_then_the_page_shows_each(pair: Pair, page: Page) -> None:
    page.open(pair.gateway.url)
    with foreign_server() as foreign:
        choose(page, f"{foreign.url}/v1")
        foreign.answers = [(200, {}, STREAM), (429, {"retry-after": "7"}, BUSY), (400, {}, REFUSED), (200, {}, STREAM)]
        assert page.ask("one") == "Well"
        assert page.browser.run("return document.querySelector('.reasoning .text').textContent") == "Hmm."
        assert '"up": "<b>"' in page.browser.text(".call pre")
        assert "9 tokens" in page.facts
        page.browser.click(".why summary")
        assert page.browser.text(".why").startswith("Why so long?\n\nIt waited.")
        assert "in the queue 1.50 s" in page.browser.text(".why")
        assert "preempted 2 times" in page.browser.text(".why")
        grown = "return [...document.querySelectorAll('.bar i')].map((part) => part.style.flexGrow)"
        assert page.browser.run(grown) == ["0", "1500", "100", "400"]
        page.ask("two")
        assert page.browser.text(".answer .error") == "Too many requests. (429) Try again in 7 s."
        assert page.ask("three") == "Well"
        assert [body.get("explain") for body in foreign.asked] == [True, True, True, None]
        assert [message["content"] for message in foreign.asked[-1]["messages"]] == ["one", "Well", "three"]
        assert page.browser.run("return document.querySelector('#state').hidden")
    page.ask("is there anybody?")
    assert "--cors-origins http://127.0.0.1:" in page.browser.text(".answer .error")


GONE = {"error": {"message": "There is none.", "type": "invalid_request_error", "param": None, "code": None}}
HELD = {"error": {"message": "It is read.", "type": "invalid_request_error", "param": None, "code": "stream_in_use"}}


def test_given_connections_that_break_when_the_rest_is_there_then_it_is_fetched_and_else_the_page_says_so(
    pair: Pair, page: Page
) -> None:
    page.open(pair.gateway.url)
    with foreign_server() as foreign:
        choose(page, foreign.url)
        rest = [chunk({"content": "c"}), DONE]
        foreign.answers = [(0, {}, None), (200, {}, [chunk({"content": "a"})]), (409, {}, HELD), (200, {}, rest)]
        assert page.ask("one") == "ac"
        assert foreign.fetched == [f"/v1/streams/{foreign.ids[0]}", *["/v1/streams/x?after=0"] * 2]
        foreign.answers = [(200, {}, [chunk({"content": "a"})]), (404, {}, GONE)]
        assert page.ask("two") == "a"
        assert "There is nothing left of this answer to fetch." in page.browser.text(".answer .error")
        failed = {"error": {"message": "The engine failed.", "type": "server_error", "param": None, "code": None}}
        foreign.answers = [(200, {}, [chunk({"content": "a"}), failed])]
        assert page.ask("three") == "a"
        assert page.browser.text(".answer .error") == "The engine failed."


def test_given_a_narrow_screen_when_the_page_is_shown_then_nothing_lies_beside_it_and_all_can_be_reached(
    pair: Pair, page: Page
) -> None:
    pair.say("x" * 120)
    page.browser.devtools("Emulation.setDeviceMetricsOverride", width=360, height=640, deviceScaleFactor=1, mobile=True)
    try:
        page.open(pair.gateway.url, temperature=1)
        page.ask("y" * 100)
        assert page.browser.run("return document.scrollingElement.scrollWidth") == 360
        assert page.browser.run("return document.scrollingElement.scrollHeight") == 640
    finally:
        page.browser.devtools("Emulation.clearDeviceMetricsOverride")
