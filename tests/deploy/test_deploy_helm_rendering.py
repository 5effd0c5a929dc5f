"""The chart as Helm, Kubernetes and the operators see it: linted, rendered, and validated against their schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.deploy.charts import (
    CHART,
    NAMESPACE,
    OWN_KINDS,
    SCHEMAS,
    VALUE_SETS,
    VERSIONS,
    Manifest,
    render,
    rendered,
    values_of,
)

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed (make test-deploy)")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
jsonschema = pytest.importorskip("jsonschema")

pytestmark = pytest.mark.deploy

SCHEMA_FILES = {
    "RayCluster": "raycluster_v1.json",
    "ServiceMonitor": "servicemonitor_v1.json",
    "PrometheusRule": "prometheusrule_v1.json",
    "ScaledObject": "scaledobject_v1alpha1.json",
    "HTTPRoute": "httproute_v1.json",
}
BAD_VALUES: dict[str, dict[str, Any]] = {
    "an unknown value": {"modle": "x"},
    "an unknown value of a model": {"models": [{"name": "a", "tensorparallel": 2}]},
    "no model": {"models": []},
    "a model without a name": {"models": [{"model": "demo"}]},
    "a name that is no label": {"models": [{"name": "Qwen/Qwen3"}]},
    "an empty model": {"models": [{"name": "a", "model": ""}]},
    "no rank": {"models": [{"name": "a", "tensorParallelSize": 0}]},
    "fewer pods than none": {"models": [{"name": "a", "replicas": -1}]},
    "a device of another maker": {"models": [{"name": "a", "device": "tpu"}]},
    "flags in one string": {"models": [{"name": "a", "extraArgs": "--max-num-seqs=1"}]},
    "an unknown mode": {"mode": "ray"},
    "the tag latest": {"image": {"tag": "latest"}},
    "the tag latest of a model": {"models": [{"name": "a", "image": {"tag": "latest"}}]},
    "a secret's text": {"models": [{"name": "a", "hfToken": {"token": "hf_x"}}]},
    "a port too high": {"service": {"port": 70000}},
    "a negative drain": {"drainTimeout": -1},
    "no time for load balancers": {"preStopSeconds": 0},
    "a size that is none": {"models": [{"name": "a", "cache": {"size": "many"}}]},
    "an autoscaler of another kind": {"models": [{"name": "a", "autoscaling": {"kind": "vpa"}}]},
    "an autoscaler that leaves no pod": {"models": [{"name": "a", "autoscaling": {"minReplicas": 0}}]},
    "a share above one": {"models": [{"name": "a", "autoscaling": {"kvCacheUsage": 1.5}}]},
    "an interval without a unit": {"metrics": {"serviceMonitor": {"interval": "15"}}},
}
IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "less time than the drain takes": ({"terminationGracePeriodSeconds": 60}, "must be at least 125"),
    "two models of one name": ({"models": [{"name": "a"}, {"name": "a"}]}, "two are named a"),
    "a host of no model": (
        {"ingress": {"enabled": True, "hosts": [{"host": "h", "model": "b"}]}},
        "no model named b",
    ),
    "one volume for two pods": (
        {"models": [{"name": "a", "replicas": 2, "cache": {"size": "1Gi"}}]},
        "ReadWriteMany",
    ),
    "one volume for pods that may become several": (
        {"models": [{"name": "a", "autoscaling": {"kind": "hpa"}, "cache": {"size": "1Gi"}}]},
        "ReadWriteMany",
    ),
    "one volume for the pods of a RayCluster": (
        {"mode": "kuberay", "models": [{"name": "a", "cache": {"size": "1Gi"}}]},
        "ReadWriteMany",
    ),
    "an autoscaled RayCluster": (
        {"mode": "kuberay", "models": [{"name": "a", "autoscaling": {"kind": "keda"}}]},
        "nothing can scale a RayCluster",
    ),
}


def validator(kind: str) -> Any:
    file = SCHEMAS / SCHEMA_FILES[kind]
    if not file.exists():
        pytest.skip(f"the schema of {kind} is not at hand")
    schema = json.loads(file.read_text(encoding="utf-8"))
    return jsonschema.validators.validator_for(schema)(schema)


def own_objects() -> list[tuple[str, Manifest]]:
    return [(name, one) for name in VALUE_SETS for one in rendered(name).objects if one["kind"] in OWN_KINDS]


def test_the_value_sets_when_counted_then_there_are_enough() -> None:
    assert len(VALUE_SETS) >= 8
    assert {one["kind"] for _, one in own_objects()} == OWN_KINDS


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", VALUE_SETS)
def test_a_value_set_when_linted_for_a_kubernetes_then_helm_has_no_complaint(name: str, version: str) -> None:
    values = helm.values_from_yaml(VALUE_SETS[name].read_text())
    found = helm.lint(str(CHART), values, strict=True, kube_version=f"v{version}.0")
    assert not found["errors"], found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", VALUE_SETS)
def test_a_value_set_when_rendered_then_every_object_is_one_of_that_kubernetes(name: str, version: str) -> None:
    checked = 0
    for one in rendered(name).objects:
        if one["kind"] not in OWN_KINDS:
            kubernetes_validate.validate(one, version, strict=True)
            checked += 1
    assert checked


@pytest.mark.parametrize("kind", sorted(OWN_KINDS))
def test_a_custom_resource_when_rendered_then_its_operator_knows_every_field(kind: str) -> None:
    check = validator(kind)
    found = [one for _, one in own_objects() if one["kind"] == kind]
    assert found
    for one in found:
        errors = [f"{'/'.join(map(str, error.path))}: {error.message}" for error in check.iter_errors(one)]
        assert not errors


@pytest.mark.parametrize("what", BAD_VALUES)
def test_bad_values_when_rendered_then_the_schema_refuses_them(what: str) -> None:
    with pytest.raises(Exception, match=r"(?m)^- at "):
        render(BAD_VALUES[what])


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_values_that_cannot_work_when_rendered_then_the_chart_says_why(what: str) -> None:
    values, words = IMPOSSIBLE[what]
    with pytest.raises(Exception, match=words):
        render(values)


def test_the_schema_when_compared_with_the_values_then_it_knows_each_and_no_other() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(schema["properties"]) - {"global"} == set(values)
    assert set(schema["$defs"]["model"]["properties"]) == set(values["modelDefaults"])


@pytest.mark.parametrize("release", ["novainfer", "a", "x" * 53])
@pytest.mark.parametrize("name", VALUE_SETS)
def test_a_release_when_its_name_is_odd_then_all_names_are_short_enough_and_none_is_there_twice(
    name: str, release: str
) -> None:
    objects = render(values_of(name), release).objects
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(names) == len(set(names))
    for kind, text in names:
        assert len(text) <= (44 if kind == "RayCluster" else 63)
        assert not text.endswith("-")


def test_a_model_with_an_image_of_its_own_when_rendered_then_it_has_that_and_the_others_the_charts() -> None:
    images = {pod.labels["app.kubernetes.io/component"]: pod.container["image"] for pod in rendered("models").pods()}
    assert images.pop("small") == "novainfer:0.1.0-cpu"
    assert set(images.values()) == {"novainfer:0.1.0"}


def test_the_notes_when_installed_then_they_say_how_to_chat() -> None:
    notes = rendered("keda").notes
    assert "port-forward" in notes
    assert f"-n {NAMESPACE}" in notes
    assert '"model": "chat"' in notes
