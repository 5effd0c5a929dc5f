"""Configuration: one small frozen dataclass per component. Pure data, no file is opened here.

The command line, the environment (`NOVAINFER_*`) and YAML files are generated from these fields
(`entrypoints/options.py`). A value found out later (by profiling, from the checkpoint) makes a new object.
"""

from __future__ import annotations

import ipaddress
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from novainfer.errors import ConfigError
from novainfer.text.parts import REASONING_PARSERS, TOOL_CALL_PARSERS

DEMO_MODEL = "demo"  # the checkpoint in novainfer/assets/demo
MIB = 1024 * 1024
GIB = 1024 * MIB
OWN_ADDRESS = "auto"  # --cluster-host: that of this host's default route
NO_W8A8_ON_GPUS = "--quantization w8a8 runs on CPUs only so far; int8, int4 and fp8 run on GPUs"
NO_FP8_ON_CPUS = "--quantization fp8 runs on GPUs only, from Ada and Hopper on; int8, int4 and w8a8 run on CPUs"
NO_INT8_CACHE_ON_GPUS = "--kv-cache-dtype int8 runs on CPUs only so far; fp8 runs on GPUs"
NO_FP8_CACHE_ON_CPUS = "--kv-cache-dtype fp8 runs on GPUs only, from Ada and Hopper on; int8 runs on CPUs"
SPARES_ON_GPUS = "--spare-workers is for CPUs: a spare group would need GPUs of its own; leave it at 0"


def option(default: Any, help_text: str, *, choices: tuple[str, ...] = (), secret: bool = False) -> Any:
    """A config field: its default, the sentence that documents it, and what the command line needs."""
    metadata = {"help": help_text, "choices": choices, "secret": secret}
    if isinstance(default, (list, dict)):
        raise TypeError("a config default must be immutable")
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which checkpoint, and how it is read."""

    model: str = option(DEMO_MODEL, "Local folder, Hugging Face hub id, or 'demo' for the embedded model.")
    revision: str | None = option(None, "Hub revision (branch, tag or commit).")
    tokenizer: str | None = option(None, "Folder or hub id of the tokenizer, where it is not the model's.")
    chat_template: str | None = option(None, "File with a Jinja chat template that replaces the model's.")
    tool_call_parser: str = option(
        "auto",
        "How a chat's answer writes calls, to be told as tool_calls where a request has tools; auto = as the chat "
        "template shows, none = they stay in the content.",
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str = option(
        "auto",
        "Tell what a chat's answer has between <think> and </think> as reasoning_content; auto = if the template or "
        "the tokenizer has these marks, none = it stays in the content.",
        choices=REASONING_PARSERS,
    )
    served_model_name: tuple[str, ...] = option((), "Names that clients may use; default: the model as given.")
    dtype: str = option(
        "auto",
        "Type of weights, activations and (see --kv-cache-dtype) KV cache; auto = the checkpoint's.",
        choices=("auto", "float32", "float16", "bfloat16"),
    )
    quantization: str = option(
        "none",
        "Round weights to small numbers while loading: less memory, faster decoding, somewhat less exact; w8a8 (CPUs "
        "only) and fp8 (GPUs only) round activations to 8 bits too: prompts are faster.",
        choices=("none", "int8", "int4", "w8a8", "fp8"),
    )
    max_model_len: int | None = option(None, "Longest prompt + output in tokens; default: the model's own limit.")
    model_backend: str = option(
        "auto",
        "'native' = our decoder, 'transformers' = its modelling with our paged attention; auto = native if known.",
        choices=("auto", "native", "transformers"),
    )
    weight_cache_gib: float = option(
        16.0,
        "On CPUs: GiB of disk for weights as the kernels read them, which the next start maps in place of making them "
        "again; those of the models that were used last are kept (0 = none).",
    )
    trust_remote_code: bool = option(False, "Run Python code that comes with the checkpoint.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = option(16, "Tokens in a KV block.")
    num_blocks: int | None = option(None, "Number of KV blocks; default: what the memory allows.")
    gpu_memory_utilization: float = option(0.9, "Share of a GPU's memory to use for weights, work space and KV.")
    kv_cache_memory_mib: int | None = option(
        None,
        "Memory for the KV cache in MiB, on a CPU all taken in the first minutes; default on a CPU: a quarter of what "
        "is free, at most 4096, taken as it is used.",
    )
    kv_cache_dtype: str = option(
        "auto",
        "auto = the type of the activations; int8 (CPUs only), fp8 (GPUs only) = keys and values rounded to 8 bits: "
        "room for about twice the tokens of 16 bits, somewhat less exact.",
        choices=("auto", "int8", "fp8"),
    )
    enable_prefix_caching: bool = option(True, "Reuse the KV blocks of equal prompt prefixes.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Batching and queueing."""

    max_num_seqs: int = option(64, "Sequences that run at once.")
    max_num_batched_tokens: int | None = option(
        None,
        "Token budget of one step, prefill chunks and decodes together; default: 2048, on a CPU what it computes in "
        "about half a second, 256 to 2048.",
    )
    max_waiting: int = option(1024, "Requests that may wait; more are refused with 503 and Retry-After.")
    queue_timeout: float = option(
        600.0, "Seconds that a request may wait without a first step (0 = no limit); then it gets 503."
    )
    speculation: str = option(
        "none",
        "prompt-lookup = guess tokens where a text repeats itself, and compute several in one step (the same tokens, "
        "sooner; on CPUs).",
        choices=("none", "prompt-lookup"),
    )
    steps_in_flight: int = option(2, "Steps submitted before the first one's tokens are known.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Workers and devices."""

    tensor_parallel_size: int = option(1, "Ranks that one model is split over.")
    replicas: int | None = option(
        None,
        "Engines, each with a scheduler and ranks of its own, behind the same gateways; more can be added and removed "
        "while they serve (novainfer replicas). Default: one, for good.",
    )
    device: str = option("auto", "Where workers run.", choices=("auto", "cpu", "cuda"))
    executor: str = option(
        "model",
        "What ranks do: compute with the model, or (null) nothing, answering at once with tokens that mean nothing, to "
        "measure the rest.",
        choices=("model", "null"),
    )
    null_step_ms: float = option(0.0, "With --executor null: milliseconds that a step takes.")
    kernel_backend: str = option(
        "auto",
        "Kernels: auto = triton on a GPU, native C++ on a CPU.",
        choices=("auto", "triton", "cpu", "reference"),
    )
    deterministic: bool = option(
        False,
        "On GPUs: tokens do not depend on the batch, at some cost in speed (linear layers are our own, not the "
        "vendor's). On CPUs they never do.",
    )
    enforce_eager: bool = option(
        False,
        "On GPUs: launch every kernel of a step from the host, and record no CUDA graphs.",
    )
    spare_workers: int = option(
        0,
        "Worker groups, 0 or 1, that stand by with the weights loaded, to take over at once from one that dies "
        "(on CPUs only).",
    )
    threads_per_worker: int | None = option(None, "CPU threads of one rank; default: the cores divided by the ranks.")
    ray_address: str | None = option(
        None,
        "Join this Ray cluster (auto finds one), with the ranks on this host (but see --cluster-host); "
        "default: a local one of our own.",
    )
    cluster_host: str | None = option(
        None,
        "IP address of this host that ranks on other hosts of the Ray cluster reach it at (tcp:// with CURVE keys), "
        "or auto: that of its default route; default: the ranks stay on this host, over ipc.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP side and the life of the processes."""

    host: str = option("127.0.0.1", "Address the HTTP port listens on.")
    port: int = option(8000, "HTTP port; 0 = any free one.")
    num_gateways: int = option(1, "Gateway processes that share the port.")
    api_key: tuple[str, ...] = option((), "Key that clients must send; may be given several times.", secret=True)
    api_key_file: str | None = option(
        None, "File with one API key a line: 'name:key', then e.g. 'weight=2 max-requests=8' for its share and limits."
    )
    cors_origins: tuple[str, ...] = option((), "Origins allowed to call from a browser; default: none.")
    web_ui: bool = option(True, "Serve a chat page at /ui, whose files are open without a key.")
    strict_params: bool = option(False, "Refuse request fields that this server does not know.")
    max_body_mib: int = option(8, "Largest request body in MiB.")
    max_live_requests: int = option(2048, "Requests that one gateway holds at once; more get 503.")
    max_requests_per_key: int = option(0, "Live requests of one API key in one gateway (0 = no limit); more get 429.")
    max_queued_tokens: int | None = option(
        None,
        "Tokens (prompt and max_tokens) of requests that wait; more get 503. Default: 8 times what the KV cache holds.",
    )
    request_timeout: float = option(
        0.0, "Seconds that a request may take in all (0 = no limit); clients shorten it with 'x-request-timeout'."
    )
    client_stall_timeout: float = option(30.0, "Seconds after which a client that reads nothing is disconnected.")
    drain_timeout: float = option(30.0, "Seconds that accepted streams may take to finish after SIGTERM.")
    start_timeout: float = option(600.0, "Seconds from start until every process must be ready.")
    hang_timeout: float = option(
        4.0, "Seconds of silence after which a rank or the scheduler counts as hung; one second if it was stopped."
    )
    max_restarts: int = option(5, "Deaths in a row, no step in between, that are mended; one more ends the server.")
    orphan_grace: float = option(30.0, "Seconds that a request outlives its gateway, to be fetched by its id.")
    stall_timeout: float = option(60.0, "Seconds that a rank may spend on one layer before it counts as hung.")
    run_dir: str | None = option(None, "Directory for sockets (0700); default: a new temporary one.")
    metrics_compat: str = option(
        "none", "vllm: /metrics has its figures under vLLM's names, too.", choices=("none", "vllm")
    )
    otlp_traces_endpoint: str | None = option(
        None, "Send a trace span for each generation to this OTLP/HTTP URL (needs the extra 'otel'); default: none."
    )
    log_level: str = option("info", "Log level.", choices=("debug", "info", "warning", "error"))
    log_format: str = option("text", "Lines of the log: text, or a JSON object each.", choices=("text", "json"))
    log_requests: bool = option(
        False, "A line of the log for each generation's end: its id, tenant, tokens and times, none of its text."
    )


@dataclass(frozen=True, slots=True)
class KeyDigest:
    """An API key as every process but the supervisor knows it: whose it is, and its SHA-256 in hexadecimal.

    The rest is its tenant's, the same for each of its keys: its weight against other tenants, and limits (0 = none).
    """

    tenant: str
    sha256: str
    weight: float = 1.0
    max_requests: int = 0  # live at once
    max_queued: int = 0  # of those: without a first token
    tokens_per_minute: int = 0  # prompt and output


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Everything `novainfer serve` needs, in one object; also what the offline `LLM` builds."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    keys: tuple[KeyDigest, ...] = ()  # no option: the supervisor's `seal_keys` makes them; empty = open to everybody

    def to_json(self) -> str:
        """For a child process; `from_json` gives an equal object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ServeConfig:
        data = json.loads(text)
        parts: dict[str, Any] = {}
        for name, component in COMPONENTS.items():
            values = {key: tuple(v) if isinstance(v, list) else v for key, v in data[name].items()}
            parts[name] = component(**values)
        return cls(**parts, keys=tuple(KeyDigest(**entry) for entry in data["keys"]))


COMPONENTS: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "server": ServerConfig,
}


def check(config: ServeConfig) -> None:
    """Raise `ConfigError` for values that can never work together; called before any process starts."""
    positive: dict[str, float] = {
        "block_size": config.cache.block_size,
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_waiting": config.scheduler.max_waiting,
        "tensor_parallel_size": config.parallel.tensor_parallel_size,
        "num_gateways": config.server.num_gateways,
        "max_live_requests": config.server.max_live_requests,
        "max_body_mib": config.server.max_body_mib,
        "hang_timeout": config.server.hang_timeout,
        "stall_timeout": config.server.stall_timeout,
        "start_timeout": config.server.start_timeout,
        "client_stall_timeout": config.server.client_stall_timeout,
    }
    for name, value in positive.items():
        if value <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0, not {value}")
    optional: dict[str, int | None] = {
        "max_model_len": config.model.max_model_len,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "num_blocks": config.cache.num_blocks,
        "kv_cache_memory_mib": config.cache.kv_cache_memory_mib,
        "threads_per_worker": config.parallel.threads_per_worker,
        "replicas": config.parallel.replicas,
        "max_queued_tokens": config.server.max_queued_tokens,
    }
    for name, limit in optional.items():
        if limit is not None and limit <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0, not {limit}")
    if config.parallel.spare_workers not in (0, 1):
        raise ConfigError(f"--spare-workers must be 0 or 1, not {config.parallel.spare_workers}")
    if config.parallel.device == "cuda":
        _check_gpus(config)
    elif config.parallel.device == "cpu":
        _check_cpus(config)
    if config.parallel.cluster_host is not None:
        _check_cluster_host(config.parallel.cluster_host, config.parallel.ray_address)
    _check_not_negative(config)
    if not 0.05 <= config.cache.gpu_memory_utilization <= 1.0:
        raise ConfigError("--gpu-memory-utilization must be between 0.05 and 1")
    if config.scheduler.steps_in_flight not in (1, 2):
        raise ConfigError("--steps-in-flight must be 1 or 2")
    step_tokens = config.scheduler.max_num_batched_tokens
    if step_tokens is not None and step_tokens < config.scheduler.max_num_seqs:
        raise ConfigError("--max-num-batched-tokens must be at least --max-num-seqs: each decode needs one token")
    if not all(key.strip() for key in config.server.api_key):
        raise ConfigError("--api-key must not be empty")
    if not 0 <= config.server.port <= 65535:
        raise ConfigError("--port must be between 0 and 65535")


def _check_not_negative(config: ServeConfig) -> None:
    if config.server.max_restarts < 0 or not 0 <= config.server.orphan_grace < float("inf"):
        raise ConfigError("--max-restarts and --orphan-grace can be neither negative nor infinite")
    if not 0 <= config.model.weight_cache_gib < float("inf"):
        raise ConfigError("--weight-cache-gib can be neither negative nor infinite")
    for name, number in {
        "drain_timeout": config.server.drain_timeout,
        "max_requests_per_key": config.server.max_requests_per_key,
        "queue_timeout": config.scheduler.queue_timeout,
        "request_timeout": config.server.request_timeout,
    }.items():
        if number < 0:
            raise ConfigError(f"--{name.replace('_', '-')} must not be below 0: {number}")


def _check_gpus(config: ServeConfig) -> None:
    if config.parallel.spare_workers:
        raise ConfigError(SPARES_ON_GPUS)
    if config.model.quantization == "w8a8":
        raise ConfigError(NO_W8A8_ON_GPUS)
    if config.cache.kv_cache_dtype == "int8":
        raise ConfigError(NO_INT8_CACHE_ON_GPUS)


def _check_cpus(config: ServeConfig) -> None:
    if config.parallel.kernel_backend not in ("auto", "cpu"):
        return
    if config.model.quantization == "fp8":
        raise ConfigError(NO_FP8_ON_CPUS)
    if config.cache.kv_cache_dtype == "fp8":
        raise ConfigError(NO_FP8_CACHE_ON_CPUS)


def _check_cluster_host(host: str, ray_address: str | None) -> None:
    if ray_address is None:
        raise ConfigError("--cluster-host needs --ray-address: a local Ray has no other hosts")
    if host == OWN_ADDRESS:
        return
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(f"--cluster-host must be an IP address of this host, not {host!r}") from None
    if address.is_unspecified:
        raise ConfigError(
            f"--cluster-host {host} is not an address that other hosts can connect to: name one that they can"
        )
