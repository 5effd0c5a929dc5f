"""The chat page's files as HTTP has them: what they may do, who gets them, and that they can be switched off."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from gateway.auth import PAGE_PATHS
from gateway.routes.pages import FOLDER
from novainfer.text.tokenizer import Tokenizer
from tests.online.conftest import Pair
from tests.online.gateways import start_pair

pytestmark = pytest.mark.stage2

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = sorted(PAGE_PATHS - {"/"})


@pytest.mark.parametrize("path", FILES)
def test_given_a_file_of_the_page_when_asked_for_then_it_comes_with_its_policy_and_is_not_sent_twice(
    pair: Pair, path: str
) -> None:
    name = "index.html" if path == "/ui" else path.removeprefix("/ui/")
    answer = pair.http.get(path)
    assert answer.content == (FOLDER / name).read_bytes()
    kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    assert answer.headers["content-type"].split(";")[0] == kinds[Path(name).suffix]
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert {policy[source] for source in ("script-src", "style-src", "img-src")} == {"'self'"}
    assert policy["require-trusted-types-for"] == "'script'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-cache"
    again = pair.http.get(path, headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", answer.headers["etag"])
    assert pair.http.get(path, headers={"if-none-match": '"another"'}).status_code == 200
    head = pair.http.head(path)
    assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", answer.headers["etag"])


def test_given_the_root_when_a_browser_asks_then_it_is_led_to_the_page_and_a_program_is_told_that_nothing_is_there(
    pair: Pair,
) -> None:
    page = pair.http.get("/", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert (page.status_code, page.headers["location"], page.headers["vary"]) == (302, "ui", "accept")
    program = pair.http.get("/")
    assert (program.status_code, program.json()["error"]["code"]) == (404, "not_found")
    assert pair.http.post("/", headers={"accept": "text/html"}).status_code == 405


def test_given_no_web_ui_when_its_files_are_asked_for_then_there_are_none_and_none_is_open(
    tiny_model: Path, tmp_path: Path
) -> None:
    size = Tokenizer.load(tiny_model).vocab_size
    scheduler, gateway = start_pair(tiny_model, tmp_path / "run", size, web_ui=False, api_key=("key",))
    with gateway.http(accept="text/html") as http:
        for path in PAGE_PATHS:
            assert http.get(path).status_code == 401
            assert http.get(path, headers={"x-api-key": "key"}).status_code == 404
    gateway.close()
    scheduler.close()


def test_the_page_when_its_files_are_read_then_each_is_open_and_packed_and_nothing_comes_from_elsewhere() -> None:
    names = {path.name for path in FOLDER.iterdir()}
    assert {"index.html", *(path.removeprefix("/ui/") for path in FILES if path != "/ui")} == names
    packed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["gateway"]
    assert {path.name for glob in packed for path in FOLDER.parent.glob(glob)} == names
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r"https?://[\w.:]+", text)) <= {"http://www.w3.org", "http://127.0.0.1:8000"}
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text), path.name
