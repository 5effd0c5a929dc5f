"""How peers are installed and ended, and how transformers' dialect is spoken."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bench import cases
from bench.peers import base, processes
from bench.peers.installing import Installation, fingerprint
from bench.peers.transformers_serve import TextTarget
from bench.serving import Load, Measured, send
from bench.workloads import Item
from novainfer.entrypoints.options import from_environment
from tests.unit.test_unit_bench import OK_PLAIN, answering, event

pytestmark = pytest.mark.unit

ONE = Load(request_rate=float("inf"), burstiness=1.0, max_concurrency=1)
# A server whose middle process ends at once: its grandchild has lost its parent.
FAMILY = """
import os, signal, sys, time
if os.fork() == 0:
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while time.process_time() < 0.05:  # the system counts in steps of up to 0.01
            pass
        print(os.getpid(), flush=True)
        time.sleep(600)
    os._exit(0)
os.wait()
time.sleep(600)
"""


def test_an_installation_when_a_command_fails_then_it_is_none(tmp_path: Path) -> None:
    installation = Installation(tmp_path / "peer", ("thing==1",))
    with pytest.raises(SystemExit, match="said why"), installation.made():
        installation.run("sh", "-c", "echo said why; exit 1")
    assert not installation.is_whole()


def test_an_installation_when_made_then_it_is_whole_for_this_recipe_only(tmp_path: Path) -> None:
    installation = Installation(tmp_path / "peer", ("thing==1",))
    assert not installation.is_whole()
    with installation.made():
        installation.run("true")
    assert installation.is_whole()
    assert not Installation(tmp_path / "peer", ("thing==2",)).is_whole()


def test_a_checkpoint_when_a_file_changes_then_its_fingerprint_does(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = fingerprint(tmp_path)
    assert fingerprint(tmp_path) == before
    (tmp_path / "config.json").write_text("{} ")
    assert fingerprint(tmp_path) != before


def test_peers_when_a_folder_is_chosen_then_they_lie_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOVAINFER_PEERS", "/somewhere")
    assert base.peers_root() == Path("/somewhere")
    assert from_environment({"NOVAINFER_PEERS": "/somewhere"}) == {}  # our own server takes it for no option of its
    monkeypatch.delenv("NOVAINFER_PEERS")
    assert base.peers_root() == Path.home() / ".cache" / "novainfer" / "peers"


def test_the_environment_of_a_peer_when_made_then_our_packages_and_proxies_are_not_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy")
    made = base.environment(EXTRA="1")
    assert not {"PYTHONPATH", "HTTPS_PROXY"} & set(made)
    assert (made["HF_HUB_OFFLINE"], made["EXTRA"]) == ("1", "1")


def test_the_environment_of_a_peer_when_our_packages_are_imported_then_nothing_that_they_set_is_in_it() -> None:
    code = (
        "import json, os; before = dict(os.environ); from bench.peers import base, registry; "
        "print(json.dumps([[key, value] for key, value in base.environment().items() if before.get(key) != value]))"
    )
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    added = json.loads(subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True).stdout)
    assert {name for name, _ in added} <= {"HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK"}


def test_a_process_tree_when_ended_then_orphans_that_ignore_sigterm_are_gone_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_TERM_TIMEOUT", 0.0)
    env = base.environment()
    with processes.running("x", [sys.executable, "-c", FAMILY], env=env, log=tmp_path / "log", has_pipes=True) as child:
        orphan = psutil.Process(int(child.stdout.readline()))
        assert child.is_alive()
        assert {child.process.pid, orphan.pid} <= {one.pid for one in processes.tree(child.process.pid)}
        assert processes.pss_bytes(child.process.pid) > 0
        assert processes.cpu_seconds(child.process.pid) > 0
    with contextlib.suppress(psutil.NoSuchProcess):
        assert orphan.wait(60) is None
    assert not psutil.pid_exists(child.process.pid)


def test_a_server_that_ends_before_it_is_ready_when_waited_for_then_its_last_words_are_told(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with processes.running("x", command, env=dict(os.environ), log=tmp_path / "log") as child:
        child.process.wait()
        with pytest.raises(SystemExit, match="no such model"):
            base.wait_for_http(child, "http://127.0.0.1:1/health")


def ask_transformers(*events: bytes) -> tuple[Measured, dict[str, object]]:
    seen: list[bytes] = []

    async def go() -> Measured:
        async with answering(OK_PLAIN + b"".join(events), seen) as target:
            return await send(TextTarget(target.base_url), "m", Item([1, 2, 3], 2), ONE)

    return asyncio.run(go()), json.loads(seen[0].split(b"\r\n\r\n")[1])


def choice(finish_reason: str | None, **more: object) -> bytes:
    return event({"choices": [{"text": "a", "finish_reason": finish_reason}], **more})


def test_transformers_when_asked_then_it_gets_text_and_its_stream_may_end_without_done() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    result, body = ask_transformers(choice(None), choice(None), choice("length", usage=usage))
    assert (result.error, result.output_len) == ("", 2)
    assert len(cases.inter_token_times([result])) == 1
    assert body["prompt"] == cases.text_of([1, 2, 3])
    assert json.loads(str(body["generation_config"])) == {"max_new_tokens": 2, "do_sample": False}
    assert "ignore_eos" not in body


def test_transformers_when_the_text_was_other_tokens_then_the_request_has_failed() -> None:
    result, _ = ask_transformers(choice("length", usage={"prompt_tokens": 4, "completion_tokens": 2}))
    assert "4 tokens, not 3" in result.error
