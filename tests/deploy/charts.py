"""The chart, rendered by Helm's own engine with each of its value sets."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
CHART = REPOSITORY / "deploy" / "helm" / "novainfer"
SCHEMAS = REPOSITORY.parent / "shared" / "schemas"  # of custom resources, where they are at hand
VALUE_SETS = {path.name.removesuffix("-values.yaml"): path for path in sorted((CHART / "ci").glob("*-values.yaml"))}
VERSIONS = [f"1.{minor}" for minor in range(30, 38)]
OWN_KINDS = {"RayCluster", "ServiceMonitor", "PrometheusRule", "ScaledObject", "HTTPRoute"}
RELEASE, NAMESPACE = "rel", "serving"

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """A pod template, and whose it is."""

    owner: Manifest
    labels: dict[str, str]
    annotations: dict[str, str]
    spec: dict[str, Any]
    serves: bool  # the HTTP port is its

    @property
    def container(self) -> dict[str, Any]:
        """The only one."""
        (only,) = self.spec["containers"]
        assert isinstance(only, dict)
        return only


@dataclass(frozen=True)
class Rendered:
    """All objects of one rendering."""

    values: dict[str, Any]
    objects: list[Manifest]
    notes: str = field(default="", repr=False)

    def of(self, kind: str) -> list[Manifest]:
        """Those of a kind."""
        return [one for one in self.objects if one["kind"] == kind]

    def pods(self) -> list[Pod]:
        """The pods that will run: of Deployments and RayClusters."""
        found = [_pod(one, one["spec"]["template"], serves=True) for one in self.of("Deployment")]
        for one in self.of("RayCluster"):
            found.append(_pod(one, one["spec"]["headGroupSpec"]["template"], serves=True))
            found += [_pod(one, group["template"], serves=False) for group in one["spec"]["workerGroupSpecs"]]
        return found

    def servers(self) -> list[Pod]:
        """Those of them with the HTTP port."""
        return [pod for pod in self.pods() if pod.serves]


def _pod(owner: Manifest, template: Manifest, *, serves: bool) -> Pod:
    meta = template["metadata"]
    return Pod(owner, meta.get("labels", {}), meta.get("annotations", {}), template["spec"], serves)


def values_of(name: str) -> dict[str, Any]:
    """A value set, on top of the chart's own values."""
    loaded = yaml.safe_load(VALUE_SETS[name].read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def render(values: dict[str, Any], release: str = RELEASE) -> Rendered:
    """What `helm install` would send. Raises what Helm says."""
    import helm_python as helm

    chart = helm.Chart.load(str(CHART))
    whole = helm.values_from_yaml(yaml.safe_dump(values))
    chart.validate_schema(whole)
    files = chart.render(whole, name=release, namespace=NAMESPACE)
    objects = [
        one
        for path, text in files.items()
        if path.endswith(".yaml")
        for one in yaml.safe_load_all(text)
        if one is not None
    ]
    notes = next((text for path, text in files.items() if path.endswith("NOTES.txt")), "")
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    return Rendered({**defaults, **values}, objects, notes)


@cache
def rendered(name: str) -> Rendered:
    """A value set, rendered once."""
    return render(values_of(name))
