"""The cluster files for `ray up`, checked with Ray's own schema and read for what has cost others an evening."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.deploy

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "deploy" / "ray"
CLUSTERS = sorted(path for path in FOLDER.glob("*.yaml") if path.name != "novainfer.yaml")
TOKEN = "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=~/.ray/auth_token"


def cluster(path: Path) -> dict[str, Any]:
    loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def commands(config: dict[str, Any]) -> list[str]:
    return [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]


def test_the_cluster_files_when_listed_then_there_is_one_for_each_provider() -> None:
    assert {path.stem: cluster(path)["provider"]["type"] for path in CLUSTERS} == {
        "aws": "aws",
        "gcp": "gcp",
        "onprem": "local",
    }


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_cluster_file_when_ray_reads_it_then_its_schema_holds(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    monkeypatch.setenv("HOME", str(tmp_path))
    prepared = prepare_config(cluster(path))
    validate_config(prepared)
    with pytest.raises(Exception, match="misspelt"):
        validate_config({**prepared, "misspelt": 1})


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_cluster_file_when_it_starts_something_then_with_the_token_and_room_for_sockets(path: Path) -> None:
    config = cluster(path)
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    started = [command for command in commands(config) if "ray start" in command or "serve.sh start" in command]
    assert len(started) == 3
    for command in started:
        assert command.startswith(f"{TOKEN} && ulimit -n $(ulimit -Hn) && ")
    assert any("RAY_AUTH_MODE=token" in command and "~/.bashrc" in command for command in config["setup_commands"])


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_cluster_file_when_it_copies_files_then_those_that_the_installation_needs_exist(path: Path) -> None:
    mounts = cluster(path)["file_mounts"]
    for source in mounts.values():
        assert source.startswith("~") or (REPOSITORY / source).exists()
    # Ray reads all of what is copied before each command: not the environment, nor the history.
    assert "." not in mounts.values()
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {name.split(".")[0].rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    copied = {target.removeprefix("~/novainfer-source/") for target in mounts}
    assert packages | {"pyproject.toml", project["project"]["readme"]} <= copied


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_cluster_file_when_it_names_head_and_workers_then_ranks_have_room_on_workers_alone(path: Path) -> None:
    config = cluster(path)
    head, worker = (
        next(c for c in config[f"{kind}_start_ray_commands"] if "ray start" in c) for kind in ("head", "worker")
    )
    assert "--head" in head
    assert "--num-cpus=0" in head
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in head
    assert "--address=$RAY_HEAD_IP:6379" in worker
    types = config.get("available_node_types", {})
    if types:
        assert types[config["head_node_type"]]["max_workers"] == 0
        assert types[config["head_node_type"]]["resources"]["CPU"] == 0
        assert sum(kind["max_workers"] for kind in types.values()) <= config["max_workers"]


def test_what_is_served_when_novainfer_reads_it_then_it_can_be() -> None:
    command = ("-m", "novainfer.entrypoints.cli", "serve", "--config", str(FOLDER / "novainfer.yaml"))
    cluster_flags = ("--ray-address", "auto", "--cluster-host", "auto", "--print-config")
    shown = subprocess.run([sys.executable, *command, *cluster_flags], capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "novainfer.yaml" in shown.stdout


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.sh")), ids=lambda path: path.name)
def test_a_script_when_the_shell_reads_it_then_it_is_one(script: Path) -> None:
    subprocess.run(["sh", "-n", str(script)], check=True)


def test_the_servers_script_when_misused_then_it_says_how_it_is_used(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", str(FOLDER / "serve.sh"), *arguments],
            env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )

    misused = run("begin")
    assert misused.returncode == 2
    assert "start CONFIG | wait | stop" in misused.stderr
    assert run("start").returncode != 0
    assert run("wait").returncode != 0
    assert run("stop").returncode == 0  # nothing runs, and nothing is to be stopped
