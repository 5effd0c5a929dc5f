"""`GET /server_info`: what this server is, as its gateway knows it. No key and no path is in it."""

from __future__ import annotations

import time
from typing import Any

from starlette.responses import Response

from gateway.routes.endpoint import Call, json_response
from gateway.service import GatewayService
from novainfer import __version__
from novainfer.errors import ConfigError
from novainfer.mode import AS_ACTIVATIONS, NOT_QUANTIZED, Mode
from novainfer.protocol.messages import EngineInfo
from novainfer.text.parts import NONE

_NO_DTYPE = "none"  # of ranks that compute nothing


async def server_info(call: Call) -> Response:
    """Model, mode, limits and features of this server; what its engine has yet to tell is null."""
    service = call.service
    reason = service.unready_reason()
    engine = service.client.limits
    info = {
        "version": __version__,
        "status": "ok" if reason is None else "unavailable",
        "reason": reason,
        "mode": engine.mode or None if engine is not None else None,
        "uptime_seconds": round(time.monotonic() - service.started, 3),  # of this gateway
        "model": _model(service, engine),
        "limits": _limits(service, engine),
        "parallel": {
            "tensor_parallel_size": service.config.parallel.tensor_parallel_size,
            "replicas": len(service.client.links),
            "num_gateways": service.config.server.num_gateways,
        },
        "features": _features(service),
    }
    return json_response(info)


def _model(service: GatewayService, engine: EngineInfo | None) -> dict[str, Any]:
    mode = _mode(engine)
    dtype = None if mode is None else _unless(mode.dtype, _NO_DTYPE)
    return {
        "names": list(service.model_names),
        "architecture": service.architecture,
        "dtype": dtype,
        "quantization": None if mode is None else _unless(mode.quantization, NOT_QUANTIZED),
        "kv_cache_dtype": None if mode is None else _unless(mode.kv_cache_dtype, AS_ACTIVATIONS) or dtype,
        "max_model_len": None if engine is None else engine.max_model_len,
        "vocab_size": None if engine is None else engine.vocab_size,
    }


def _limits(service: GatewayService, engine: EngineInfo | None) -> dict[str, Any]:
    names = ("max_num_seqs", "max_num_batched_tokens", "num_blocks", "block_size")  # of one engine
    told = {name: None if engine is None else getattr(engine, name) for name in names}
    return {**told, "max_live_requests": service.config.server.max_live_requests}


def _features(service: GatewayService) -> dict[str, Any]:
    config = service.config
    return {
        "prefix_caching": config.cache.enable_prefix_caching,
        "speculation": _unless(config.scheduler.speculation, "none"),
        "web_ui": config.server.web_ui,
        "tool_call_parser": _unless(service.parsers.calls, NONE),
        "reasoning_parser": _unless(service.parsers.reasoning, NONE),
    }


def _mode(engine: EngineInfo | None) -> Mode | None:
    """None while there is no engine, or none that says in our words how it computes."""
    try:
        return None if engine is None else Mode.parse(engine.mode)
    except ConfigError:
        return None


def _unless(value: str, nothing: str) -> str | None:
    return None if value == nothing else value
