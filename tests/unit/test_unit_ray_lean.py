"""What a raylet's command line becomes, so that its agents idle."""

from __future__ import annotations

import shutil

import pytest

from workers import ray_lean
from workers.ray_lean import has_idle_agents, with_idle_agents

pytestmark = [pytest.mark.unit, pytest.mark.stage1]


def test_given_a_raylets_command_when_its_agents_shall_idle_then_they_and_their_ports_alone_are_replaced() -> None:
    command = [
        "raylet",
        "--node_manager_port=0",
        "--metrics-agent-port=0",
        "--metrics_export_port=1234",
        "--runtime_env_agent_port=0",
        '--labels={"a": "b=c"}',
        "--head",
        "--dashboard_agent_command=python agent.py --minimal --gcs-address=127.0.0.1:1",
        "--runtime_env_agent_command=python main.py --runtime-env-agent-port=0",
    ]
    assert with_idle_agents(command) == [
        "raylet",
        "--node_manager_port=0",
        "--metrics-agent-port=1",
        "--metrics_export_port=1",
        "--runtime_env_agent_port=1",
        '--labels={"a": "b=c"}',
        "--head",
        '--dashboard_agent_command=sh -c "exec cat" agent',
        '--runtime_env_agent_command=sh -c "exec cat" agent',
        "--dashboard_agent_listen_port=1",
    ]


@pytest.mark.parametrize(
    ("version", "idler", "expected"),
    [
        ("2.60.0", "/bin/cat", True),
        ("2.60.0", None, False),
        ("2.61.0", "/bin/cat", False),
        ("2.6.0", "/bin/cat", False),
    ],
)
def test_given_another_version_of_ray_or_no_idler_when_asked_then_agents_are_rays_own(
    monkeypatch: pytest.MonkeyPatch, version: str, idler: str | None, expected: bool
) -> None:
    monkeypatch.setattr(ray_lean, "version", lambda name: version)
    monkeypatch.setattr(shutil, "which", lambda name: idler)
    has_idle_agents.cache_clear()
    try:
        assert has_idle_agents() is expected
    finally:
        has_idle_agents.cache_clear()
