"""The description says what the server does: schemathesis asks it everything that follows from its own words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.app import ROUTES
from gateway.auth import OPEN_PATHS
from gateway.openapi import describe
from gateway.openapi_parts import ModelBounds
from novainfer.sampling.params import INT_BOUNDS
from tests.safety.fuzz import fuzz
from tests.safety.table import CHAT, CONTEXT, RESPONSES, TEXT, TURNS, VOCAB, cases

pytestmark = pytest.mark.stage2

CASES = 40  # examples of an operation
BODIES = {CHAT: "ChatRequest", TEXT: "CompletionRequest", RESPONSES: "ResponseRequest", TURNS: "MessagesRequest"}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return describe(ROUTES, ModelBounds(VOCAB, VOCAB, CONTEXT), title="x", version="1")


def test_given_the_description_when_read_then_ids_are_unique_and_only_the_open_routes_want_no_key(
    document: dict[str, Any],
) -> None:
    operations = {path: operation for path, by in document["paths"].items() for operation in by.values()}
    assert len({operation["operationId"] for operation in operations.values()}) == len(operations) == len(ROUTES)
    assert {path for path, operation in operations.items() if operation.get("security") == []} == OPEN_PATHS
    assert document["security"]
    unready = operations["/readyz"]["responses"]["503"]["content"]["application/json"]["schema"]["$ref"]
    assert set(document["components"]["schemas"][unready.rsplit("/", 1)[1]]["properties"]) == {"status"}
    for operation in operations.values():
        for link in operation["responses"]["200"].get("links", {}).values():
            assert link["operationId"] in {other["operationId"] for other in operations.values()}


@pytest.mark.parametrize("door", [CHAT, TEXT, RESPONSES, TURNS])
def test_given_the_table_of_parameters_when_the_description_is_read_then_it_has_each_and_says_where_null_may_be(
    document: dict[str, Any], door: str
) -> None:
    schema = document["components"]["schemas"][BODIES[door]]
    rows = {case.row.name: case.row for case in cases(door) if case.row.name != "an_unknown_field"}
    told = {**schema["properties"], "guided_json": schema["patternProperties"]["^guided_"]}
    assert set(rows) == {*schema["properties"], "guided_json"}
    for name, row in rows.items():
        may_be_null = {"type": "null"} in told[name].get("anyOf", []) or None in told[name].get("enum", [])
        assert may_be_null == row.null, name
    if door == RESPONSES:
        assert told["max_output_tokens"]["anyOf"][0]["maximum"] == CONTEXT - 1
        return
    if door == TURNS:
        assert told["max_tokens"]["maximum"] == CONTEXT - 1
        return
    assert told["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": INT_BOUNDS["n"][1]}
    assert told["max_tokens"]["anyOf"][0]["maximum"] == CONTEXT - 1


def test_given_fields_that_two_doors_share_when_the_description_is_read_then_it_says_the_same_of_them(
    document: dict[str, Any],
) -> None:
    chat, tokenize = (
        document["components"]["schemas"][name]["properties"] for name in ("ChatRequest", "TokenizeRequest")
    )
    for name in ("chat_template_kwargs", "tools"):
        assert chat[name] == tokenize[name]
    assert {key: chat["messages"][key] for key in ("type", "items")}.items() <= tokenize["messages"]["anyOf"][0].items()


def test_given_a_server_when_it_is_asked_all_that_follows_from_its_description_then_it_keeps_its_word(
    tmp_path: Path,
) -> None:
    status, text = fuzz(tmp_path, cases=CASES, seed=1)
    assert status == 0, text
    assert "Coverage" in text
    assert "Stateful" in text
