"""What is derived from the chart, and the compose file: up to date, and every path in them there."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.charts import OWN_KINDS, REPOSITORY, VERSIONS
from tests.deploy.prometheus import DASHBOARDS

pytestmark = pytest.mark.deploy

DEPLOY = REPOSITORY / "deploy"
PLAIN = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def compose() -> dict[str, Any]:
    loaded = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def test_the_plain_manifests_when_rendered_again_then_they_are_the_same() -> None:
    pytest.importorskip("helm_python", reason="helm-python-sdk is not installed (make test-deploy)")
    written = {path: path.read_text(encoding="utf-8") for path in PLAIN}
    assert runpy.run_path(str(DEPLOY / "kubernetes" / "render.py"))["rendered"]() == written


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.stem)
def test_a_plain_manifest_when_applied_then_kubernetes_knows_every_field(path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed").validate
    objects = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    assert objects
    for one in objects:
        if one["kind"] not in OWN_KINDS:
            for version in VERSIONS:
                validate(one, version, strict=True)


def test_the_compose_file_when_read_then_what_it_mounts_is_there() -> None:
    config = compose()
    for service in config["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in config["volumes"]
        assert ":latest" not in service["image"]
    build = config["services"]["server"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).exists()


def test_the_compose_file_when_published_then_only_to_this_host() -> None:
    ports = [port for service in compose()["services"].values() for port in service["ports"]]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_compose_files_server_when_started_then_its_flags_exist_and_it_has_time_to_drain() -> None:
    server = compose()["services"]["server"]
    arguments = [argument.replace("${MODEL:-demo}", "demo") for argument in server["command"]]
    command = [sys.executable, "-m", "novainfer.entrypoints.cli", *arguments, "--print-config"]
    subprocess.run(command, check=True, capture_output=True)
    drain = next(int(a.split("=")[1]) for a in arguments if a.startswith("--drain-timeout"))
    assert int(server["stop_grace_period"].removesuffix("s")) >= drain + 50


def test_grafana_when_it_starts_then_it_finds_prometheus_and_the_dashboards() -> None:
    services = compose()["services"]
    mounted = dict(volume.split(":")[:2][::-1] for volume in services["grafana"]["volumes"])
    providers = yaml.safe_load((DEPLOY / "compose/grafana/dashboards/novainfer.yaml").read_text())["providers"]
    sources = yaml.safe_load((DEPLOY / "compose/grafana/datasources/prometheus.yaml").read_text())["datasources"]
    folder = mounted[providers[0]["options"]["path"]]
    assert {path.name for path in (DEPLOY / folder).iterdir()} == {path.name for path in DASHBOARDS}
    home = Path(services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert json.loads((DEPLOY / folder / home.name).read_text())["title"] == "NovaInfer / overview"
    assert sources[0]["url"] == "http://prometheus:9090"
    scraped = yaml.safe_load((DEPLOY / "compose/prometheus.yml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"][0]["targets"] == ["server:8000"]
