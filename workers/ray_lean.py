"""The start of a local Ray instance without what nobody here uses."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from typing import Any

from novainfer.errors import EngineError
from novainfer.transport.processes import RAY_SERVERS, children_named

logger = logging.getLogger(__name__)

_NODE_PATIENCE = 30.0  # seconds for a raylet to appear; then Ray's own words tell what is wrong
_NODE_INTERVAL = 0.02
# A raylet starts two agents, each a Python process that imports Ray, waits for their ports before it is there, and ends
# if one of them ends. They set up environments of workers, and gather figures for the dashboard: neither is used here.
_AGENTS = ("--dashboard_agent_command", "--runtime_env_agent_command")
_AGENT_PORTS = ("--metrics-agent-port", "--metrics_export_port", "--runtime_env_agent_port")
_MORE_PORT = "dashboard_agent_listen_port"  # known to the raylet, and not told by Ray's Python
_NO_PORT = 1  # where nobody listens, and nobody but root could
_IDLE_VERSION = "2.60."  # of Ray; what another one waits for has not been seen
# Ends with its standard input, which is then a pipe from the raylet; a shell minds no arguments that a raylet adds.
_IDLER = ("sh", "-c", "exec cat", "agent")
_PIPES = {"RAY_enable_pipe_based_agent_to_parent_health_check": "1"}
# While an instance starts. Figures would go to an agent. And an agent would have to set up what Ray may want in every
# worker by itself: what a job of Ray's that we run in says of its workers, or a hook; ours have our environment anyway.
_ENVIRONMENT: dict[str, str | None] = {
    "RAY_enable_metrics_collection": "0",
    "RAY_JOB_CONFIG_JSON_ENV_VAR": None,
    "RAY_RUNTIME_ENV_HOOK": None,
}


@cache
def has_idle_agents() -> bool:
    """Whether the agents of a raylet that is started here are processes that wait for its end and do nothing else."""
    return version("ray").startswith(_IDLE_VERSION) and None not in map(shutil.which, ("sh", "cat"))


def with_idle_agents(command: Sequence[str]) -> list[str]:
    """A raylet's command line, with agents that do nothing and ports that are known, so that it waits for none."""
    changed = []
    for argument in command:
        name, _, value = argument.partition("=")
        if name in _AGENTS:
            value = subprocess.list2cmdline(_IDLER)
        elif name in _AGENT_PORTS:
            value = str(_NO_PORT)
        changed.append(f"{name}={value}" if "=" in argument else argument)
    return [*changed, f"--{_MORE_PORT}={_NO_PORT}"]


def _is_registered(gcs_address: str, node_id: str) -> bool:
    """Whether Ray's control store knows the node; asking it for the node itself takes seconds while it does not."""
    try:
        import ray._private.services
        import ray._private.state

        module: Any = ray._private.state
        services: Any = ray._private.services
        state = module.GlobalState()
        state._initialize_global_state(services._get_gcs_client_options(gcs_address))
        return any(node["NodeID"] == node_id and node["Alive"] for node in state.node_table())
    except (AttributeError, ImportError, KeyError, TypeError):  # another version of Ray: then that question has to do
        return True


@contextmanager
def lean() -> Iterator[None]:
    """Let `ray.init` start no dashboard, autoscaler, log forwarder or agents: most of its start time, all of it unused.

    It also waits half a minute for a raylet that has died meanwhile; it shall not.

    `include_dashboard=False` still starts the dashboard's process and waits for it. There is no public switch, so its
    private ones are turned for the time of the call; a Ray version that has them no more starts everything. For good,
    Ray's own words (a raylet's state when it died) go to our debug log instead of standard output.
    """
    with _environment(), _private_switches():
        yield


@contextmanager
def _environment() -> Iterator[None]:
    """Of this process; as it was, afterwards."""
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    _set(_ENVIRONMENT)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _private_switches() -> Iterator[None]:
    try:
        import ray._private.node
        import ray._private.parameter
        import ray._private.services
        import ray._private.worker
    except ImportError:
        yield
        return
    parameter: Any = ray._private.parameter
    worker: Any = ray._private.worker
    services: Any = ray._private.services
    params = parameter.RayParams
    get_node: Any = getattr(services, "get_node", None)  # what it asks for again and again
    start_process: Any = getattr(services, "start_ray_process", None)

    def lean_params(**kwargs: Any) -> Any:
        return params(**kwargs, no_monitor=True, include_log_monitor=False)

    def no_api_server(self: Any, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        self._webui_url = ""

    def get_living_node(gcs_address: str, node_id: str) -> Any:
        deadline = time.monotonic() + _NODE_PATIENCE
        while time.monotonic() < deadline and not _is_registered(gcs_address, node_id):
            if len(children_named(RAY_SERVERS)) < len(RAY_SERVERS):
                raise EngineError("Ray has died while it was started")
            time.sleep(_NODE_INTERVAL)
        return get_node(gcs_address, node_id)

    def start_lean_process(command: list[str], process_type: str, **how: Any) -> Any:
        if process_type == "raylet" and has_idle_agents():
            command, how["env_updates"] = with_idle_agents(command), {**(how.get("env_updates") or {}), **_PIPES}
        return start_process(command, process_type, **how)

    worker.print_to_stdstream = _log_words
    modules: dict[str, Any] = sys.modules
    optional = "ray.dashboard.optional_deps"  # if it cannot be imported, the agents start as in a minimal installation
    modules[optional] = None
    try:
        with (
            _replaced(parameter, "RayParams", lean_params),
            _replaced(ray._private.node.Node, "start_api_server", no_api_server),
            _replaced(services, "get_node", get_living_node),
            _replaced(services, "start_ray_process", start_lean_process),
            _replaced(worker, "_maybe_modify_runtime_env", lambda environment, *_: environment),  # does, below `uv run`
        ):
            yield
    finally:
        del modules[optional]


def _log_words(data: dict[str, Any], ignore_prefix: bool) -> None:
    logger.debug("Ray: %s", "\n".join(data["lines"]))


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute, for a while; one that is not there stays away."""
    if not hasattr(owner, name):
        yield
        return
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
