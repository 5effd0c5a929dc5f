"""JSON schemas of `/v1/embeddings`."""

from __future__ import annotations

from gateway.openapi_parts import COUNT, STRING, ModelBounds, Schema, array, integer, object_of, string
from gateway.schemas import MAX_INPUTS

_VECTOR: Schema = {"anyOf": [array({"type": "number"}, 1), string(1)]}  # numbers, or base64

EMBEDDINGS: Schema = object_of(
    object={"const": "list"},
    data=array(object_of(object={"const": "embedding"}, index=COUNT, embedding=_VECTOR), 1, MAX_INPUTS),
    model=STRING,
    usage=object_of(prompt_tokens=COUNT, total_tokens=COUNT),
)


def embedding_fields(bounds: ModelBounds) -> dict[str, Schema]:
    """Of the request. How many texts a server can queue no schema can tell."""
    ids = array(integer(0, bounds.vocab_size - 1), 1, bounds.max_model_len)
    inputs = [string(1), ids, array(string(1), 1, MAX_INPUTS), array(ids, 1, MAX_INPUTS)]
    return {"input": {"anyOf": inputs}, "dimensions": integer(1, bounds.hidden_size)}
