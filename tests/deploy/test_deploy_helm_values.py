"""What single values of the chart come to, where a rendering of the whole would not show it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.charts import VALUE_SETS, Manifest, render, rendered

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed (make test-deploy)")

pytestmark = pytest.mark.deploy


def only(objects: list[Manifest]) -> Manifest:
    (one,) = objects
    return one


@pytest.mark.parametrize("name", VALUE_SETS)
def test_objects_when_rendered_then_no_two_have_one_name(name: str) -> None:
    names = [(one["kind"], one["metadata"]["name"]) for one in rendered(name).objects]
    assert len(set(names)) == len(names)


def test_several_hosts_of_a_model_when_routed_then_one_route_has_them_all() -> None:
    hosts = [{"host": host, "model": model} for host, model in (("a.x", "a"), ("b.x", "b"), ("c.x", "a"), ("a.x", "a"))]
    models = [{"name": "a", "model": "demo"}, {"name": "b", "model": "demo"}]
    route = {"enabled": True, "parentRefs": [{"name": "public"}], "hosts": hosts}
    found = render({"models": models, "httpRoute": route}).of("HTTPRoute")
    assert sorted(one["spec"]["hostnames"] for one in found) == [["a.x", "c.x"], ["b.x"]]


def test_a_strategy_without_rolling_when_rendered_then_it_has_no_fields_of_rolling() -> None:
    values = {"models": [{"name": "a", "strategy": {"type": "Recreate"}}]}
    assert only(render(values).of("Deployment"))["spec"]["strategy"] == {"type": "Recreate"}


@pytest.mark.parametrize("name", [name for name in VALUE_SETS if rendered(name).of("Deployment")])
def test_a_deployment_when_its_pod_starts_then_it_may_take_longer_than_the_startup_probe(name: str) -> None:
    for one in rendered(name).of("Deployment"):
        probe = one["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
        assert one["spec"]["progressDeadlineSeconds"] > probe["failureThreshold"] * probe["periodSeconds"]


def test_ranks_of_a_ray_cluster_when_they_run_then_their_probes_ask_for_nothing_that_is_not_there() -> None:
    for cluster in rendered("kuberay").of("RayCluster"):
        for group in cluster["spec"]["workerGroupSpecs"]:
            container = only(group["template"]["spec"]["containers"])
            probes = [container[kind]["exec"]["command"] for kind in ("livenessProbe", "readinessProbe")]
            assert probes == [["true"], ["true"]]


def test_a_ray_cluster_when_its_values_change_then_its_pods_are_made_anew_and_its_node_can_be_drained() -> None:
    chart = rendered("kuberay")
    assert only(chart.of("RayCluster"))["spec"]["upgradeStrategy"] == {"type": "Recreate"}
    assert chart.of("PodDisruptionBudget") == []  # of what has no scale it would let nobody go


def test_the_tests_pod_when_the_registry_and_the_network_are_closed_then_it_gets_its_image_and_its_answer() -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"name": "gateways"}}}]
    values: dict[str, Any] = {
        "imagePullSecrets": ["registry"],
        "models": [{"name": "a", "image": {"pullPolicy": "Never"}}],
        "networkPolicy": {"enabled": True, "from": peers},
    }
    chart = render(values)
    pod = only(chart.of("Pod"))
    assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert only(pod["spec"]["containers"])["imagePullPolicy"] == "Never"
    policy = only(chart.of("NetworkPolicy"))["spec"]
    http = policy["ingress"][0]["from"]
    assert http == [{"podSelector": policy["podSelector"]}, *peers]
    labels = pod["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
