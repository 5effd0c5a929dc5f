"""The rules that values of a configuration must keep together."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace

import pytest

from novainfer.config import COMPONENTS, KeyDigest, ServeConfig, ServerConfig, check
from novainfer.entrypoints.options import build_config
from novainfer.errors import ConfigError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("block_size", 0, "--block-size must be above 0"),
        ("max_model_len", -1, "--max-model-len must be above 0"),
        ("num_blocks", 0, "--num-blocks must be above 0"),
        ("gpu_memory_utilization", 1.5, "between 0.05 and 1"),
        ("steps_in_flight", 3, "must be 1 or 2"),
        ("max_num_batched_tokens", 8, "each decode needs one token"),
        ("port", 65536, "between 0 and 65535"),
        ("tensor_parallel_size", 0, "--tensor-parallel-size must be above 0"),
        ("spare_workers", 2, "--spare-workers must be 0 or 1, not 2"),
        ("spare_workers", -1, "--spare-workers must be 0 or 1, not -1"),
        ("start_timeout", 0.0, "--start-timeout must be above 0"),
        ("weight_cache_gib", -1.0, "--weight-cache-gib can be neither negative nor infinite"),
        ("weight_cache_gib", float("inf"), "--weight-cache-gib can be neither negative nor infinite"),
        ("weight_cache_gib", float("nan"), "--weight-cache-gib can be neither negative nor infinite"),
    ],
)
def test_a_value_that_cannot_work_when_checked_then_the_error_names_its_flag(
    name: str, value: float, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check(build_config({name: value}))


def test_given_spare_workers_when_checked_with_gpus_then_they_are_refused() -> None:
    check(build_config({"spare_workers": 1, "device": "cpu"}))
    with pytest.raises(ConfigError, match="--spare-workers is for CPUs"):
        check(build_config({"spare_workers": 1, "device": "cuda"}))


def test_given_quantisation_when_checked_with_a_device_without_it_then_it_is_refused() -> None:
    check(build_config({"quantization": "int8", "device": "cpu"}))
    check(build_config({"quantization": "int4", "device": "cuda"}))
    with pytest.raises(ConfigError, match="--quantization w8a8 runs on CPUs only so far"):
        check(build_config({"quantization": "w8a8", "device": "cuda"}))
    check(build_config({"quantization": "fp8", "device": "cuda"}))
    check(build_config({"quantization": "fp8", "device": "cpu", "kernel_backend": "triton"}))
    for backend in ("auto", "cpu"):
        with pytest.raises(ConfigError, match="--quantization fp8 runs on GPUs only"):
            check(build_config({"quantization": "fp8", "device": "cpu", "kernel_backend": backend}))
    check(build_config({"kv_cache_dtype": "int8", "device": "cpu"}))
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8 runs on CPUs only so far"):
        check(build_config({"kv_cache_dtype": "int8", "device": "cuda"}))
    check(build_config({"kv_cache_dtype": "fp8", "device": "cuda"}))
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8 runs on GPUs only"):
        check(build_config({"kv_cache_dtype": "fp8", "device": "cpu"}))


@pytest.mark.parametrize(
    ("host", "ray_address", "words"),
    [
        ("192.0.2.1", None, "needs --ray-address"),
        ("0.0.0.0", "auto", "not an address that other hosts can connect to"),
        ("::", "auto", "not an address that other hosts can connect to"),
        ("*", "auto", "must be an IP address"),
        ("", "auto", "must be an IP address"),
        ("192.0.2.1:6379", "auto", "must be an IP address"),
        ("node.example.com", "auto", "must be an IP address"),
    ],
)
def test_a_cluster_host_that_cannot_be_reached_when_checked_then_the_error_says_why(
    host: str, ray_address: str | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=f"--cluster-host.*{words}"):
        check(build_config({"cluster_host": host, "ray_address": ray_address}))


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "auto"])
def test_a_cluster_host_when_checked_with_a_cluster_then_it_can_work(host: str) -> None:
    check(build_config({"cluster_host": host, "ray_address": "auto"}))


def test_the_defaults_when_checked_then_they_can_work() -> None:
    check(ServeConfig())


def test_a_config_when_someone_writes_to_it_then_it_refuses() -> None:
    with pytest.raises(FrozenInstanceError):
        ServeConfig().server.port = 1  # type: ignore[misc]


def test_a_config_when_sent_as_json_then_it_comes_back_equal_with_its_tuples() -> None:
    config = ServeConfig()
    config = replace(
        config, server=replace(config.server, api_key=("a", "b"), drain_timeout=1.5), keys=(KeyDigest("team", "00"),)
    )
    assert ServeConfig.from_json(config.to_json()) == config


def test_every_component_when_made_then_no_argument_is_positional_and_all_have_defaults() -> None:
    for component in COMPONENTS.values():
        assert all(item.kw_only for item in fields(component))
        component()


@pytest.mark.parametrize("name", ["drain_timeout", "max_requests_per_key"])
def test_given_a_negative_number_when_checked_then_it_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="below 0"):
        check(ServeConfig(server=ServerConfig(**{name: -5})))
