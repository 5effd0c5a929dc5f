"""The JSON schema of what `GET /server_info` answers."""

from __future__ import annotations

from gateway.openapi_parts import COUNT, STRING, Schema, array, object_of

_MAYBE_STRING: Schema = {"type": ["string", "null"]}
_MAYBE_COUNT: Schema = {"type": ["integer", "null"], "minimum": 0}
SERVER_INFO = object_of(
    version=STRING,
    status={"enum": ["ok", "unavailable"]},
    reason=_MAYBE_STRING,
    mode=_MAYBE_STRING,
    uptime_seconds={"type": "number", "minimum": 0},
    model=object_of(
        names=array(STRING, 1),
        architecture=_MAYBE_STRING,
        dtype=_MAYBE_STRING,
        quantization=_MAYBE_STRING,
        kv_cache_dtype=_MAYBE_STRING,
        max_model_len=_MAYBE_COUNT,
        vocab_size=_MAYBE_COUNT,
    ),
    limits=object_of(
        **dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "num_blocks", "block_size"), _MAYBE_COUNT),
        max_live_requests=COUNT,
    ),
    parallel=object_of(tensor_parallel_size=COUNT, replicas=COUNT, num_gateways=COUNT),
    features=object_of(
        prefix_caching={"type": "boolean"},
        web_ui={"type": "boolean"},
        **dict.fromkeys(("speculation", "tool_call_parser", "reasoning_parser"), _MAYBE_STRING),
    ),
)
