"""`novainfer run-batch` as a process of its own, beside a running server and with one of its own, with real kills."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from novainfer.entrypoints.batch_lines import seed_of
from tests.servers import RunningServer, assert_gone

pytestmark = pytest.mark.stage2

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
PATIENCE = 240  # seconds
OF_ITS_TIME = {"id", "created", "created_at"}  # what two equal answers need not have in common


def line(custom_id: str, url: str, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


def chat(custom_id: str, words: str = "Tell me something.", **body: Any) -> str:
    return line(custom_id, CHAT, messages=[{"role": "user", "content": words}], **{"max_tokens": 24, **body})


def mixed(count: int) -> list[str]:
    """Requests of all kinds, sampled with and without a seed."""
    found = []
    for number in range(count):
        found += [
            chat(f"chat-{number}", temperature=1.0),
            chat(f"seeded-{number}", temperature=1.0, seed=number, n=2),
            line(f"text-{number}", TEXT, prompt=["The gateway", f"{number} plus"], temperature=1.0, max_tokens=24),
            line(f"response-{number}", RESPONSES, input="Hello", temperature=1.0, max_output_tokens=24),
        ]
    return found


class Batch:
    """A process that runs; `kill` it or `wait` for it."""

    def __init__(self, *flags: str | Path, stdin: Any = subprocess.DEVNULL, **environ: str) -> None:
        command = [sys.executable, "-m", "novainfer.entrypoints.cli", "run-batch", *map(str, flags)]
        self.process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environ},
        )

    def wait(self) -> tuple[int, str, str]:
        """Exit status, standard output and standard error, once nobody can write to them any more."""
        output, errors = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, output, errors

    def until(self, is_so: Callable[[], bool]) -> None:
        """Block until it is, while the process lives."""
        while not is_so():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.02)
            assert self.process.poll() is None, self.wait()

    def tree(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]


def run(*flags: str | Path, stdin: str | None = None, **environ: str) -> tuple[int, str, str]:
    batch = Batch(*flags, stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE, **environ)
    if stdin is not None:
        assert batch.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            batch.process.stdin.write(stdin)
        with contextlib.suppress(BrokenPipeError):
            batch.process.stdin.close()
        batch.process.stdin = None
    return batch.wait()


def results(text: str) -> dict[str, dict[str, Any]]:
    """By custom_id, each of which is there once."""
    found = [json.loads(one) for one in text.splitlines()]
    by_id = {one["custom_id"]: one for one in found}
    assert len(by_id) == len(found)
    assert len({one["id"] for one in found}) == len(found)
    return by_id


def timeless(value: Any) -> Any:
    """The same without ids and times."""
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key not in OF_ITS_TIME and key != "cached_tokens"}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def bodies(path: Path) -> dict[str, Any]:
    found = results(path.read_text(encoding="utf-8"))
    assert all(one["response"]["status_code"] == 200 and one["error"] is None for one in found.values())
    return {custom_id: timeless(one["response"]["body"]) for custom_id, one in found.items()}


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@contextlib.contextmanager
def fed(path: Path) -> Iterator[Callable[[Sequence[str]], int]]:
    """A pipe as input, which does not end before the context does; what is called puts lines into it."""
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR)  # so that nobody waits for the other side
    try:
        yield lambda lines: os.writev(descriptor, [one.encode() for one in lines])
    finally:
        os.close(descriptor)


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A temporary directory for the processes, with a short name: Ray's sockets lie below it."""
    with tempfile.TemporaryDirectory(prefix="n") as folder:
        yield Path(folder)


def test_given_a_running_server_when_a_batch_has_run_then_each_answer_is_that_of_the_request_alone(
    server: RunningServer, tmp_path: Path
) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join(mixed(3)))
    status, output, errors = run("-i", source, "-o", target, "--url", f"{server.base_url}/v1/")
    assert (status, output) == (0, ""), errors
    found = results(target.read_text())
    assert found.keys() == {json.loads(one)["custom_id"] for one in mixed(3)}
    assert "12 answered, 0 failed" in errors
    with server.http() as http:
        for one in map(json.loads, mixed(3)):
            body = {"seed": seed_of(one["custom_id"])} | one["body"]
            alone = http.post(one["url"], json=body).json()
            response = found[one["custom_id"]]["response"]
            assert response["status_code"] == 200
            assert response["request_id"]
            assert timeless(response["body"]) == timeless(alone)


def test_given_hostile_lines_when_run_through_standard_streams_then_each_has_its_error_and_the_rest_goes_on(
    server: RunningServer,
) -> None:
    lines = [
        chat("good"),
        "not json\n",
        "\n",
        chat("good"),
        "[" * 100_000 + "\n",
        line("nowhere", "/v1/files"),
        line("streams", CHAT, messages=[], stream=True),
        line("wrong", CHAT, messages=[]),
        line("stranger", CHAT, messages=[{"role": "user", "content": "x"}], model="gpt-4"),
        line("large", TEXT, prompt="x" * 9 * 2**20),
        line("half", TEXT, prompt="\ud800"),
        chat("last").rstrip("\n"),
    ]
    status, output, errors = run("-i", "-", "-o", "-", "--url", server.base_url, stdin="".join(lines))
    assert status == 1, errors
    found = [json.loads(one) for one in output.splitlines()]
    assert len(found) == 11
    statuses = {one["custom_id"]: one["response"]["status_code"] for one in found if one["response"] is not None}
    assert statuses == {"good": 200, "wrong": 400, "stranger": 404, "large": 413, "half": 400, "last": 200}
    faults = {(one["error"]["line"], one["custom_id"]): one["error"]["code"] for one in found if one["error"]}
    assert faults == {
        (2, None): "invalid_line",
        (4, "good"): "duplicate_custom_id",
        (5, None): "invalid_line",
        (6, "nowhere"): "invalid_line",
        (7, "streams"): "invalid_line",
    }
    wrong = next(one for one in found if one["custom_id"] == "wrong")["response"]["body"]["error"]
    assert (wrong["type"], wrong["param"]) == ("invalid_request_error", "messages")
    assert "2 answered, 9 failed" in errors


def test_given_a_batch_that_was_killed_when_resumed_then_it_has_the_results_of_one_that_was_not(
    server: RunningServer, tmp_path: Path
) -> None:
    source, whole, torn = tmp_path / "in", tmp_path / "whole", tmp_path / "torn"
    lines = mixed(6)
    source.write_text("".join(lines))
    assert run("-i", source, "-o", whole, "--url", server.base_url)[0] == 0
    with fed(tmp_path / "pipe") as feed:
        batch = Batch("-i", tmp_path / "pipe", "-o", torn, "--url", server.base_url)
        feed(lines[:9])
        batch.until(lambda: num_lines(torn) == 9)
        feed([chat("never", max_tokens=1500, ignore_eos=True)] * 2 + lines[9:])
        batch.until(lambda: num_lines(torn) >= 12)
        batch.process.send_signal(signal.SIGKILL)
        assert batch.wait()[0] == -signal.SIGKILL
    assert num_lines(torn) < len(lines) + 1
    kept = [one for one in torn.read_bytes().splitlines(keepends=True) if b"duplicate" not in one]
    torn.write_bytes(b"".join(kept[:-1]) + kept[-1][:-40])  # as if the disk had been slower
    status, _, errors = run("-i", source, "-o", torn, "--url", server.base_url, "--resume")
    assert status == 0, errors
    assert f"({len(kept) - 1} more were there)" in errors
    assert torn.read_bytes().startswith(b"".join(kept[:-1]))
    assert bodies(torn) == bodies(whole)
    before = torn.read_bytes()
    status, _, errors = run("-i", source, "-o", torn, "/nowhere/model", "--resume")  # starts no server
    assert (status, torn.read_bytes()) == (0, before), errors
    assert f"0 answered ({len(lines)} more were there), 0 failed" in errors
    server.wait_until_nothing_is_held()


def test_given_lines_that_failed_when_resumed_then_they_are_asked_again(server: RunningServer, tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(chat("good") + chat("other", model="later") + "broken\n")
    flags = ("-i", source, "-o", target, "--url", server.base_url)
    assert run(*flags)[0] == 1
    assert run(*flags)[0] == 2
    assert num_lines(target) == 3
    first = next(one for one in target.read_bytes().splitlines() if b"chatcmpl" in one)
    source.write_text(chat("good") + chat("other"))
    status, _, errors = run(*flags, "--resume")
    assert status == 0, errors
    assert target.read_bytes().splitlines()[0] == first
    assert results(target.read_text()).keys() == {"good", "other"}


def test_given_a_server_that_dies_and_comes_back_when_a_batch_runs_then_it_waits_and_misses_nothing(
    server: RunningServer, start_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    source, whole, target = tmp_path / "in", tmp_path / "whole", tmp_path / "out"
    lines = [chat(f"long-{number}", max_tokens=400, ignore_eos=True, temperature=1.0) for number in range(6)]
    source.write_text("".join(lines))
    assert run("-i", source, "-o", whole, "--url", server.base_url)[0] == 0
    first = start_server()
    port = first.base_url.rsplit(":", 1)[1]
    with fed(tmp_path / "pipe") as feed:
        batch = Batch("-i", tmp_path / "pipe", "-o", target, "--url", first.base_url)
        feed(lines[:1])
        batch.until(lambda: num_lines(target) == 1)
        feed(lines[1:3])
        first.kill()
        feed(lines[3:])
        start_server("--port", port)
        batch.until(lambda: num_lines(target) == len(lines))
        batch.process.send_signal(signal.SIGTERM)
        assert batch.wait()[0] == 128 + signal.SIGTERM
    assert bodies(target) == bodies(whole)


def test_given_a_server_that_is_not_there_when_patience_is_over_then_each_line_says_so(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_text(chat("a") + chat("b"))
    status, output, errors = run("-i", source, "-o", "-", "--url", "http://127.0.0.1:9", "--retry-for", "0.2")
    assert status == 1, errors
    found = results(output)
    assert {one["error"]["code"] for one in found.values()} == {"no_answer"}
    assert all(one["response"] is None and "cannot talk to" in one["error"]["message"] for one in found.values())


def test_given_a_server_with_keys_when_the_key_is_wrong_then_nothing_is_sent_and_with_the_right_one_it_works(
    start_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    closed = start_server("--api-key", "sk-right")
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(chat("a"))
    flags = ("-i", source, "-o", target, "--url", closed.base_url)
    for wrong in ((), ("--api-key", "sk-wrong"), ("--concurrency", "2")):
        status, _, errors = run(*flags, *wrong)
        assert (status, num_lines(target)) == (2, 0), errors
        assert "wants another key" in errors
    assert run(*flags, "--api-key", "sk-right")[0] == 0
    assert run(*flags, "--overwrite", NOVAINFER_API_KEY="sk-right")[0] == 0
    assert results(target.read_text()).keys() == {"a"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "required: -i/--input-file, -o/--output-file"),
        (("-i", "-"), "required: -o/--output-file"),
        (("-i", "-", "-o", "-", "--concurrency", "0"), "--concurrency"),
        (("-i", "-", "-o", "-", "--timeout", "nan"), "--timeout"),
        (("-i", "-", "-o", "-", "--resume"), "--resume needs a file"),
        (("-i", "-", "-o", "x", "--resume", "--overwrite"), "exclude each other"),
        (("-i", "none", "-o", "-"), "cannot read none"),
        (("-i", "-", "-o", "-", "--url", ""), "--url is given but empty"),
        (("-i", "-", "-o", "-", "--url", "nonsense"), "not an http(s) URL"),
        (("-i", "-", "-o", "-", "--url", "http://x", "demo"), "MODEL is for a server that is started here"),
        (("-i", "-", "-o", "-", "--url", "http://x", "--max-num-seqs", "4"), "--max-num-seqs is for a server"),
        (("-i", "-", "-o", "-", "--url", "http://x", "--enable-auto-tool-choice"), "is for a server"),
        (("-i", "-", "-o", "-", "--max-num-seqs", "0"), "--max-num-seqs must be above 0"),
        (("-i", "-", "-o", "-", "/nowhere/model"), "/nowhere/model"),
        (("-i", "-", "-o", "-", "--enable-lora"), "merge one into its checkpoint"),
    ],
)
def test_given_wrong_usage_when_called_then_it_says_so_and_exits_with_2(flags: tuple[str, ...], words: str) -> None:
    status, output, errors = run(*flags, stdin=chat("a"))
    assert (status, output) == (2, ""), errors
    assert words in errors
    assert "Traceback" not in errors


def test_given_a_model_when_a_batch_runs_without_a_server_then_it_has_one_of_its_own_and_leaves_nothing(
    server: RunningServer, tmp_path: Path, short_tmp: Path
) -> None:
    source, theirs, ours = tmp_path / "in", tmp_path / "theirs", tmp_path / "ours"
    source.write_text("".join(mixed(4)))
    assert run("-i", source, "-o", theirs, "--url", server.base_url)[0] == 0
    flags = ("-i", source, "-o", ours, "demo", "--max-num-seqs", "4", "--max_model_len=512", "--served-model-name", "x")
    status, output, errors = run(*flags, TMPDIR=str(short_tmp), NOVAINFER_API_KEY="sk-of-another-server")
    assert (status, output) == (0, ""), errors
    assert not list(short_tmp.iterdir())
    ours.write_text(ours.read_text().replace('"model":"x"', '"model":"demo"'))
    assert bodies(ours) == bodies(theirs)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda one: one.name)
def test_given_a_batch_with_its_own_server_when_it_is_ended_then_nothing_is_left_and_it_can_be_resumed(
    tmp_path: Path, short_tmp: Path, number: signal.Signals
) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(chat("a") + chat("b", max_tokens=8))
    with fed(tmp_path / "pipe") as feed:
        batch = Batch("-i", tmp_path / "pipe", "-o", target, "demo", TMPDIR=str(short_tmp))
        feed([chat("a")])
        batch.until(lambda: num_lines(target) == 1)
        feed([chat("b", max_tokens=1500, ignore_eos=True)])
        tree = batch.tree()
        batch.process.send_signal(number)
        status, _, errors = batch.wait()
    assert_gone(tree)
    assert status == (-number if number == signal.SIGKILL else 128 + number), errors
    assert not list(short_tmp.iterdir())
    assert results(target.read_text()).keys() == {"a"}
    if number == signal.SIGTERM:
        assert "stopped by SIGTERM; --resume goes on from here" in errors
        assert run("-i", source, "-o", target, "demo", "--resume", TMPDIR=str(short_tmp))[0] == 0
        assert bodies(target).keys() == {"a", "b"}


def test_given_a_batch_whose_own_server_is_starting_when_it_is_ended_then_nothing_is_left(
    tmp_path: Path, short_tmp: Path
) -> None:
    (tmp_path / "in").write_text(chat("a"))
    batch = Batch("-i", tmp_path / "in", "-o", tmp_path / "out", "demo", TMPDIR=str(short_tmp))
    batch.until(lambda: len(batch.tree()) > 3)
    tree = batch.tree()
    batch.process.send_signal(signal.SIGINT)
    status, _, errors = batch.wait()
    assert_gone(tree)
    assert status == 128 + signal.SIGINT, errors
    assert not list(short_tmp.iterdir())


def test_given_a_batch_when_its_own_server_dies_then_it_ends_and_says_so(tmp_path: Path, short_tmp: Path) -> None:
    target = tmp_path / "out"
    with fed(tmp_path / "pipe") as feed:
        batch = Batch("-i", tmp_path / "pipe", "-o", target, "demo", TMPDIR=str(short_tmp))
        feed([chat("a")])
        batch.until(lambda: num_lines(target) == 1)
        tree = batch.tree()
        psutil.Process(batch.process.pid).children()[0].kill()
        status, _, errors = batch.wait()
    assert_gone(tree)
    assert status == 1
    assert "the server of this batch has ended (exit status -9)" in errors


def test_given_an_empty_input_when_a_batch_runs_then_there_is_nothing_to_do(server: RunningServer) -> None:
    status, output, errors = run("-i", "-", "-o", "-", "--url", server.base_url, stdin="\n\n")
    assert (status, output) == (0, ""), errors
    assert "0 answered, 0 failed" in errors
