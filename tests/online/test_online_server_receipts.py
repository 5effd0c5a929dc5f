"""Receipts of a real server, computed again by `novainfer verify` in another process."""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import REPOSITORY
from tests.servers import RunningServer

pytestmark = pytest.mark.stage2

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUESTION = {"messages": [{"role": "user", "content": "What is NovaInfer?"}]}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, QUESTION | {"temperature": 0, "seed": 1}),
    (CHAT, QUESTION | {"temperature": 2.5, "top_k": 200, "seed": 7, "max_tokens": 40, "logprobs": True}),
    (CHAT, QUESTION | {"n": 3, "seed": 5, "presence_penalty": 0.6, "frequency_penalty": 0.3, "max_tokens": 30}),
    (CHAT, QUESTION | {"temperature": 0, "stop": ["e"], "min_tokens": 4, "seed": 1}),
    (TEXT, {"prompt": ["The gateway", "A worker"], "n": 2, "seed": 9, "repetition_penalty": 1.2, "stop": " a"}),
    (TEXT, {"prompt": "NovaInfer is", "seed": -7, "logit_bias": {"300": 2.5}, "ignore_eos": True, "max_tokens": 60}),
    (CHAT, QUESTION | {"response_format": {"type": "json_object"}, "seed": 3, "n": 2, "max_tokens": 50}),
]
NUM_CHOICES = 1 + 1 + 3 + 1 + 4 + 1 + 2


def receipts_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = answer["receipts"] if "receipts" in answer else [answer["receipt"]]
    return found


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any], *, stream: bool) -> str:
    """The whole body of a 200."""
    response = await client.post(path, json=body | {"stream": stream}, headers={"x-novainfer-receipt": "true"})
    assert response.status_code == 200, response.text
    assert "/native " in response.headers["x-novainfer-mode"]
    return response.text


@pytest.fixture(scope="module")
def bodies(server: RunningServer) -> list[tuple[str, str]]:
    """What the server answers to all requests at once: (whole, streamed)."""

    async def run() -> list[str]:
        limits: Any = {"base_url": server.base_url, "trust_env": False, "timeout": 240}
        async with httpx.AsyncClient(**limits) as client:
            asked = [(request, stream) for request in REQUESTS for stream in (False, True)]
            return await asyncio.gather(*(ask(client, *request, stream=stream) for request, stream in asked))

    texts = asyncio.run(run())
    return list(zip(texts[::2], texts[1::2], strict=True))


def verify(data: object, folder: Path | None, *flags: str) -> tuple[int, str]:
    """The exit status of `novainfer verify` for a file (without a folder: standard input), and all that it printed."""
    text = data if isinstance(data, str) else json.dumps(data)
    file = "-" if folder is None else str(folder / "receipt.json")
    if folder is not None:
        Path(file).write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "novainfer.entrypoints.cli", "verify", file, *flags],
        input=text,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_given_answers_of_every_kind_at_once_when_verified_then_all_are_equal(
    bodies: list[tuple[str, str]], tmp_path: Path
) -> None:
    receipts: list[dict[str, Any]] = []
    for whole, streamed in bodies:
        expected = receipts_of(json.loads(whole))
        last = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")][-1]
        assert receipts_of(last) == expected
        receipts += expected
    status, output = verify({"receipts": receipts}, tmp_path)
    assert status == 0, output
    assert output.count("equal (") == NUM_CHOICES
    assert "verified: every choice is equal" in output
    assert ("only indicative" in output) == ("best-effort" in receipts[0]["mode"])


@pytest.mark.parametrize("number", [1, 4])
def test_given_a_saved_response_or_stream_when_verified_then_it_is_equal(
    bodies: list[tuple[str, str]], number: int, tmp_path: Path
) -> None:
    whole, streamed = bodies[number]
    assert verify(whole, tmp_path)[0] == 0
    assert verify(streamed, None)[0] == 0


def test_given_a_changed_hash_or_seed_when_verified_then_status_1_names_the_choice(
    bodies: list[tuple[str, str]], tmp_path: Path
) -> None:
    flipped = receipts_of(json.loads(bodies[2][0]))[0]
    digest = flipped["choices"][1]["token_hash"]
    flipped["choices"][1]["token_hash"] = digest[:-1] + ("0" if digest[-1] != "0" else "1")
    reseeded = receipts_of(json.loads(bodies[1][0]))[0]
    reseeded["params"]["seed"] += 1
    longer = receipts_of(json.loads(bodies[0][0]))[0]
    longer["choices"][0]["num_tokens"] += 1
    status, output = verify({"receipts": [flipped, reseeded, longer]}, tmp_path)
    assert status == 1, output
    wrong = {line.split(":")[0] for line in output.splitlines() if ": DIFFERENT:" in line}
    assert wrong == {"prompt 0, choice 1", "prompt 1, choice 0", "prompt 2, choice 0"}
    assert output.count(": equal (") == 2
    assert verify(reseeded, tmp_path)[0] == 1


def test_given_a_changed_checkpoint_when_verified_then_status_2_with_the_reason(
    bodies: list[tuple[str, str]], tmp_path: Path
) -> None:
    model = shutil.copytree(REPOSITORY / "novainfer" / "assets" / "demo", tmp_path / "model")
    assert verify(bodies[0][0], tmp_path, "--model", str(model))[0] == 0
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    status, output = verify(bodies[0][0], tmp_path, "--model", str(model))
    assert status == 2
    assert "has the digest" in output


def test_given_a_tokenizer_of_another_vocabulary_when_verified_then_the_text_differs_unless_the_servers_is_named(
    bodies: list[tuple[str, str]], tmp_path: Path
) -> None:
    demo = REPOSITORY / "novainfer" / "assets" / "demo"
    model = shutil.copytree(demo, tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    vocab, added = tokenizer["model"]["vocab"], {token["content"] for token in tokenizer["added_tokens"]}
    plain = [token for token in vocab if token not in added]
    vocab |= dict(zip(plain, [vocab[token] for token in reversed(plain)], strict=True))
    (model / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    status, output = verify(bodies[0][0], tmp_path, "--model", str(model))
    assert (status, "the answer's text is not that of these tokens" in output) == (1, True), output
    assert verify(bodies[0][0], tmp_path, "--model", str(model), "--tokenizer", str(demo))[0] == 0


def test_given_an_answer_that_says_something_else_when_verified_then_status_1_shows_where(
    bodies: list[tuple[str, str]], tmp_path: Path
) -> None:
    answer = json.loads(bodies[5][0])
    answer["choices"][0]["text"] = "a lie"
    status, output = verify(answer, tmp_path)
    assert status == 1, output
    assert "prompt 0, choice 0: DIFFERENT: the answer's text is not that of these tokens: from character 0 on" in output


def test_given_a_prompt_without_a_receipt_when_verified_then_only_the_others_are(
    bodies: list[tuple[str, str]], tmp_path: Path
) -> None:
    answer = json.loads(bodies[4][0])
    answer["receipts"][1] = None
    status, output = verify(answer, tmp_path)
    assert status == 0, output
    assert "prompt 1: no receipt, so nothing of it was compared" in output
    assert "verified: every choice with a receipt is equal, and so is what the answer says" in output


def test_given_a_receipt_of_another_mode_when_verified_then_status_2_unless_any_mode_will_do(
    bodies: list[tuple[str, str]], tmp_path: Path
) -> None:
    receipt = copy.deepcopy(receipts_of(json.loads(bodies[0][0]))[0])
    words = receipt["mode"].split()
    receipt["mode"] = " ".join([words[0], "another-processor", *words[2:]])
    status, output = verify(receipt, tmp_path)
    assert status == 2
    assert "this machine computes in the mode" in output
    status, output = verify(receipt, tmp_path, "--any-mode")
    assert status == 0, output
    assert "only indicative" in output


@pytest.mark.parametrize("text", ["", "{}", '{"object": "x", "choices": []}'])
def test_given_a_file_without_a_receipt_when_verified_then_status_2(text: str, tmp_path: Path) -> None:
    assert verify(text, tmp_path)[0] == 2
