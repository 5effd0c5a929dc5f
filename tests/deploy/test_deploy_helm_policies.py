"""What every rendering of the chart holds to, whatever the values."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from novainfer.entrypoints.fleet import REPLICA_TIMEOUT
from novainfer.entrypoints.supervisor import DRAIN_MARGIN, STOP_TIMEOUT, WORKERS_TIMEOUT
from tests.deploy.charts import VALUE_SETS, Manifest, Pod, Rendered, rendered
from tests.deploy.prometheus import DASHBOARDS, NAME, REPOSITORY, rule_queries

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed (make test-deploy)")

pytestmark = pytest.mark.deploy

STANDARD_LABELS = {
    "helm.sh/chart",
    "app.kubernetes.io/name",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/version",
    "app.kubernetes.io/part-of",
    "app.kubernetes.io/managed-by",
}
SELECTOR_LABELS = {"app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component"}
END_SECONDS = DRAIN_MARGIN + max(STOP_TIMEOUT + WORKERS_TIMEOUT, REPLICA_TIMEOUT)  # once streams have ended
HOST_FIELDS = ("hostNetwork", "hostPID", "hostIPC")
SECRET_NAMES = re.compile(r"(token|secret|password|api_key)", re.IGNORECASE)


def name_of(one: Manifest) -> str:
    return str(one["metadata"]["name"])


def mounts(pod: Pod) -> dict[str, dict[str, Any]]:
    return {mount["mountPath"]: mount for mount in pod.container["volumeMounts"]}


def volumes(pod: Pod) -> dict[str, dict[str, Any]]:
    return {volume["name"]: volume for volume in pod.spec["volumes"]}


def flags(pod: Pod) -> dict[str, str]:
    """Of `novainfer serve`."""
    found = [argument for argument in pod.container["args"] if argument.startswith("--")]
    return dict(flag.split("=", 1) for flag in found if "=" in flag)


def backends(chart: Rendered) -> Iterator[tuple[str, Any]]:
    for ingress in chart.of("Ingress"):
        for rule in ingress["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                yield path["backend"]["service"]["name"], path["backend"]["service"]["port"]["name"]
    for route in chart.of("HTTPRoute"):
        for rule in route["spec"]["rules"]:
            for backend in rule["backendRefs"]:
                yield backend["name"], backend["port"]


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


# -- the policies: each says what is wrong, of a whole rendering -------------------------------------------------------


def images_have_a_version(chart: Rendered) -> list[str]:
    images = [pod.container["image"] for pod in chart.pods()]
    return [image for image in images if ":" not in image.rsplit("/", 1)[-1] or image.endswith(":latest")]


def a_version_is_not_pulled_again(chart: Rendered) -> list[str]:
    return [name_of(pod.owner) for pod in chart.pods() if pod.container["imagePullPolicy"] == "Always"]


def resources_are_asked_for_and_memory_is_limited(chart: Rendered) -> list[str]:
    found = [(name_of(pod.owner), pod.container["resources"]) for pod in chart.pods()]
    return [n for n, r in found if not {"cpu", "memory"} <= r["requests"].keys() or "memory" not in r["limits"]]


def gpus_are_as_many_as_ranks(chart: Rendered) -> list[str]:
    wrong = []
    for pod in chart.pods():
        gpus = pod.container["resources"]["limits"].get("nvidia.com/gpu")
        model = next(
            m for m in chart.values["models"] if pod.labels["app.kubernetes.io/component"].startswith(m["name"])
        )
        if gpus is not None and gpus != model.get("tensorParallelSize", 1):
            wrong.append(name_of(pod.owner))
    return wrong


def the_probes_are_three_different_ones(chart: Rendered) -> list[str]:
    wrong = []
    for pod in chart.servers():
        c = pod.container
        paths = [c[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
        if paths != ["/readyz", "/readyz", "/livez"]:
            wrong.append(name_of(pod.owner))
    return wrong


def a_load_may_take_as_long_as_the_server_waits_for_it(chart: Rendered) -> list[str]:
    wrong = []
    for pod in chart.servers():
        probe = pod.container["startupProbe"]
        if probe["periodSeconds"] * probe["failureThreshold"] < int(flags(pod)["--start-timeout"]):
            wrong.append(name_of(pod.owner))
    return wrong


def one_slow_answer_takes_no_pod_out(chart: Rendered) -> list[str]:
    probes = [(name_of(pod.owner), pod.container["readinessProbe"]) for pod in chart.servers()]
    return [name for name, probe in probes if probe["failureThreshold"] < 2 or probe["timeoutSeconds"] < 2]


def there_is_time_for_prestop_drain_and_end(chart: Rendered) -> list[str]:
    wrong = []
    for pod in chart.servers():
        pre_stop = pod.container["lifecycle"]["preStop"]["sleep"]["seconds"]
        least = pre_stop + int(flags(pod)["--drain-timeout"]) + END_SECONDS
        if pod.spec["terminationGracePeriodSeconds"] < least or pre_stop < 1:
            wrong.append(name_of(pod.owner))
    return wrong


def objects_have_the_standard_labels(chart: Rendered) -> list[str]:
    ours = [one for one in chart.objects if not name_of(one).endswith("-extra")]
    return [name_of(one) for one in ours if not one["metadata"].get("labels", {}).keys() >= STANDARD_LABELS]


def selectors_are_minimal_and_fit(chart: Rendered) -> list[str]:
    wrong = []
    for one in chart.of("Deployment"):
        selector = one["spec"]["selector"]["matchLabels"]
        if set(selector) != SELECTOR_LABELS or not matches(selector, one["spec"]["template"]["metadata"]["labels"]):
            wrong.append(name_of(one))
    return wrong


def deployments_do_not_take_each_others_pods(chart: Rendered) -> list[str]:
    servers = chart.servers()
    services = [one["spec"]["selector"] for one in chart.of("Service")]
    return [str(s) for s in services if sum(matches(s, pod.labels) for pod in servers) != 1]


def services_do_not_lead_to_ranks(chart: Rendered) -> list[str]:
    ranks = [pod for pod in chart.pods() if not pod.serves]
    services = chart.of("Service")
    return [name_of(s) for s in services for pod in ranks if matches(s["spec"]["selector"], pod.labels)]


def service_ports_exist_in_the_pods(chart: Rendered) -> list[str]:
    wrong = []
    for one in chart.of("Service"):
        pods = [pod for pod in chart.servers() if matches(one["spec"]["selector"], pod.labels)]
        names = {port["name"] for pod in pods for port in pod.container["ports"]}
        wrong += [name_of(one) for port in one["spec"]["ports"] if port["targetPort"] not in names]
    return wrong


def the_http_port_is_the_servers(chart: Rendered) -> list[str]:
    wrong = []
    for pod in chart.servers():
        port = next(port["containerPort"] for port in pod.container["ports"] if port["name"] == "http")
        if str(port) != flags(pod)["--port"] or flags(pod)["--host"] != "0.0.0.0":
            wrong.append(name_of(pod.owner))
    return wrong


def a_new_configuration_makes_new_pods(chart: Rendered) -> list[str]:
    found = [pod for pod in chart.pods() if "config" in volumes(pod)]
    return [name_of(pod.owner) for pod in found if len(pod.annotations.get("checksum/config", "")) != 64]


def pods_run_as_nobody_in_particular(chart: Rendered) -> list[str]:
    contexts = [(name_of(pod.owner), pod.spec["securityContext"]) for pod in chart.pods()]
    return [
        name
        for name, context in contexts
        if not context["runAsNonRoot"]
        or context["runAsUser"] == 0
        or context["seccompProfile"]["type"] != "RuntimeDefault"
    ]


def containers_can_do_nothing_special(chart: Rendered) -> list[str]:
    contexts = [(name_of(pod.owner), pod.container["securityContext"]) for pod in chart.pods()]
    return [
        name
        for name, context in contexts
        if context["allowPrivilegeEscalation"]
        or context["capabilities"] != {"drop": ["ALL"]}
        or "privileged" in context
    ]


def the_root_file_system_is_read_only_and_what_is_written_has_a_place(chart: Rendered) -> list[str]:
    return [
        name_of(pod.owner)
        for pod in chart.pods()
        if not pod.container["securityContext"]["readOnlyRootFilesystem"]
        or not {"/tmp", "/dev/shm", "/data"} <= mounts(pod).keys()
    ]


def pods_see_nothing_of_their_host(chart: Rendered) -> list[str]:
    return [
        name_of(pod.owner)
        for pod in chart.pods()
        if any(pod.spec.get(field) for field in HOST_FIELDS) or any("hostPath" in v for v in pod.spec["volumes"])
    ]


def nobody_gets_a_token_of_the_cluster(chart: Rendered) -> list[str]:
    pods = [name_of(pod.owner) for pod in chart.pods() if pod.spec["automountServiceAccountToken"]]
    return pods + [name_of(one) for one in chart.of("ServiceAccount") if one["automountServiceAccountToken"]]


def service_accounts_exist_or_were_there(chart: Rendered) -> list[str]:
    known = {name_of(one) for one in chart.of("ServiceAccount")} | {chart.values["serviceAccount"].get("name")}
    return [name_of(pod.owner) for pod in chart.pods() if pod.spec["serviceAccountName"] not in known]


def secrets_come_from_secrets(chart: Rendered) -> list[str]:
    entries = [entry for pod in chart.pods() for entry in pod.container["env"]]
    wrong = [entry["name"] for entry in entries if SECRET_NAMES.search(entry["name"]) and "value" in entry]
    return (
        wrong
        + [name_of(one) for one in chart.of("Secret")]
        + [f for p in chart.servers() for f in flags(p) if f == "--api-key"]
    )


def every_mount_has_its_volume_and_every_volume_its_mount(chart: Rendered) -> list[str]:
    wrong = []
    for pod in chart.pods():
        if {mount["name"] for mount in mounts(pod).values()} != volumes(pod).keys():
            wrong.append(name_of(pod.owner))
    return wrong


def every_claim_and_map_of_ours_exists(chart: Rendered) -> list[str]:
    maps = {name_of(one) for one in chart.of("ConfigMap")}
    claims = {name_of(one) for one in chart.of("PersistentVolumeClaim")} | {
        model.get("cache", {}).get("existingClaim") for model in chart.values["models"]
    }
    wrong = []
    for pod in chart.pods():
        for volume in pod.spec["volumes"]:
            claim, config = volume.get("persistentVolumeClaim"), volume.get("configMap")
            if (claim and claim["claimName"] not in claims) or (config and config["name"] not in maps):
                wrong.append(volume["name"])
    return wrong


def shared_memory_is_memory_and_bounded(chart: Rendered) -> list[str]:
    shm = [(name_of(pod.owner), volumes(pod)["shm"]["emptyDir"]) for pod in chart.pods()]
    return [name for name, volume in shm if volume["medium"] != "Memory" or not volume["sizeLimit"]]


def no_empty_directory_can_fill_its_host(chart: Rendered) -> list[str]:
    return [
        v["name"]
        for pod in chart.pods()
        for v in pod.spec["volumes"]
        if "emptyDir" in v and not v["emptyDir"]["sizeLimit"]
    ]


def a_file_of_options_is_read_and_only_there(chart: Rendered) -> list[str]:
    wrong = []
    for pod in chart.pods():
        path = next((e["value"] for e in pod.container["env"] if e["name"] == "NOVAINFER_CONFIG"), None)
        if (path is not None) != ("config" in volumes(pod)) or (
            path and not any(path.startswith(m) for m in mounts(pod))
        ):
            wrong.append(name_of(pod.owner))
    return wrong


def disruption_budgets_find_their_pods(chart: Rendered) -> list[str]:
    budgets = [one["spec"]["selector"]["matchLabels"] for one in chart.of("PodDisruptionBudget")]
    return [
        pod.labels["app.kubernetes.io/component"]
        for pod in chart.servers()
        if pod.owner["kind"] == "Deployment" and not any(matches(b, pod.labels) for b in budgets)
    ]


def autoscalers_have_a_target_whose_size_nobody_else_sets(chart: Rendered) -> list[str]:
    deployments = {name_of(one): one for one in chart.of("Deployment")}
    wrong = []
    for one in chart.of("HorizontalPodAutoscaler") + chart.of("ScaledObject"):
        target = deployments.get(one["spec"]["scaleTargetRef"]["name"])
        if target is None or "replicas" in target["spec"]:
            wrong.append(name_of(one))
    return wrong


def autoscalers_ask_for_series_of_one_model_in_one_namespace(chart: Rendered) -> list[str]:
    queries = [t["metadata"]["query"] for one in chart.of("ScaledObject") for t in one["spec"]["triggers"]]
    return [query for query in queries if 'namespace="' not in query or 'model_name="' not in query]


def the_service_monitor_finds_every_service_and_its_port(chart: Rendered) -> list[str]:
    wrong = []
    for one in chart.of("ServiceMonitor"):
        selector = one["spec"]["selector"]["matchLabels"]
        for service in chart.of("Service"):
            ports = {port["name"] for port in service["spec"]["ports"]}
            if not matches(selector, service["metadata"]["labels"]) or one["spec"]["endpoints"][0]["port"] not in ports:
                wrong.append(name_of(service))
    return wrong


def a_server_with_keys_is_scraped_with_one(chart: Rendered) -> list[str]:
    has_keys = any("--api-key-file" in flags(pod) for pod in chart.servers())
    return [
        name_of(one)
        for one in chart.of("ServiceMonitor")
        if has_keys and "authorization" not in one["spec"]["endpoints"][0]
    ]


def the_network_policy_lets_in_http_and_out_names(chart: Rendered) -> list[str]:
    wrong = []
    for one in chart.of("NetworkPolicy"):
        selector = one["spec"]["podSelector"]["matchLabels"]
        inward = [port["port"] for rule in one["spec"]["ingress"] for port in rule.get("ports", [])]
        outward = [port["port"] for rule in one["spec"]["egress"] for port in rule.get("ports", [])]
        if not all(matches(selector, pod.labels) for pod in chart.pods()) or "http" not in inward or 53 not in outward:
            wrong.append(name_of(one))
    return wrong


def the_network_policy_of_a_ray_cluster_lets_its_pods_talk(chart: Rendered) -> list[str]:
    wrong = []
    for one in chart.of("NetworkPolicy") if chart.of("RayCluster") else []:
        peers = [peer for rule in one["spec"]["ingress"] for peer in rule.get("from", [])]
        if {"podSelector": one["spec"]["podSelector"]} not in peers:
            wrong.append(name_of(one))
    return wrong


def routes_lead_to_services_of_ours(chart: Rendered) -> list[str]:
    ports = {
        name_of(one): {v for p in one["spec"]["ports"] for v in (p["name"], p["port"])} for one in chart.of("Service")
    }
    return [service for service, port in backends(chart) if port not in ports.get(service, ())]


def long_streams_pass_every_proxy(chart: Rendered) -> list[str]:
    wrong = []
    for one in chart.of("Ingress"):
        notes = {key.rsplit("/", 1)[-1]: value for key, value in one["metadata"]["annotations"].items()}
        if notes["proxy-buffering"] != "off" or int(notes["proxy-read-timeout"]) < 3600:
            wrong.append(name_of(one))
    timeouts = [
        (name_of(one), rule["timeouts"]["request"]) for one in chart.of("HTTPRoute") for rule in one["spec"]["rules"]
    ]
    return wrong + [name for name, timeout in timeouts if timeout != "3600s"]


def a_ray_cluster_lets_nobody_in_without_the_token(chart: Rendered) -> list[str]:
    return [name_of(one) for one in chart.of("RayCluster") if one["spec"]["authOptions"]["mode"] != "token"]


def a_ray_head_serves_and_computes_nothing(chart: Rendered) -> list[str]:
    wrong = []
    for one in chart.of("RayCluster"):
        head = one["spec"]["headGroupSpec"]
        args = head["template"]["spec"]["containers"][0]["args"]
        joins = {"--ray-address=auto", "--cluster-host=auto"} <= set(args) and "$KUBERAY_GEN_RAY_START_CMD" in args[0]
        own = head["template"]["metadata"]["annotations"].get("ray.io/overwrite-container-cmd") == "true"
        if head["rayStartParams"]["num-cpus"] != "0" or not joins or not own:
            wrong.append(name_of(one))
    return wrong


def rays_version_is_the_one_that_is_tested(chart: Rendered) -> list[str]:
    import ray

    return [name_of(one) for one in chart.of("RayCluster") if one["spec"]["rayVersion"] != ray.__version__]


def dashboards_are_found_by_grafana(chart: Rendered) -> list[str]:
    found = [one for one in chart.of("ConfigMap") if one["metadata"].get("labels", {}).get("grafana_dashboard") == "1"]
    wanted = len(DASHBOARDS) if chart.values["metrics"].get("dashboards", {}).get("enabled") else 0
    return [] if len(found) == wanted else [f"{len(found)} of {wanted}"]


def the_rules_are_all_there(chart: Rendered) -> list[str]:
    wrong = []
    for one in chart.of("PrometheusRule"):
        names = {rule.get("record") or rule["alert"] for group in one["spec"]["groups"] for rule in group["rules"]}
        if names != set(rule_queries()):
            wrong.append(name_of(one))
    return wrong


def objects_are_in_no_namespace_but_the_releases(chart: Rendered) -> list[str]:
    return [name_of(one) for one in chart.objects if "namespace" in one["metadata"]]


def replicas_keep_apart(chart: Rendered) -> list[str]:
    return [name_of(pod.owner) for pod in chart.servers() if not pod.spec["topologySpreadConstraints"]]


Policy = Callable[[Rendered], list[str]]
POLICIES: list[Policy] = [
    value
    for name, value in list(globals().items())
    if callable(value) and getattr(value, "__annotations__", {}).get("return") == "list[str]"
]


def test_the_policies_when_counted_then_there_are_enough() -> None:
    assert len(POLICIES) >= 25


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.__name__)
@pytest.mark.parametrize("name", VALUE_SETS)
def test_a_value_set_when_rendered_then_the_policy_holds(name: str, policy: Policy) -> None:
    assert policy(rendered(name)) == []


def test_the_policies_when_a_rendering_breaks_them_then_they_say_so() -> None:
    """Each finds at least one fault in objects that have all of them."""
    assert [policy.__name__ for policy in POLICIES if not _finds_something(policy)] == []


def _finds_something(policy: Policy) -> bool:
    for name in VALUE_SETS:
        for broken in _spoilt(rendered(name)):
            try:
                if policy(broken):
                    return True
            except (KeyError, TypeError, IndexError, StopIteration, ValueError, AttributeError):
                return True
    return False


def _spoilt(chart: Rendered) -> Iterator[Rendered]:
    """The rendering with one thing changed or taken away, each in turn."""
    for index, one in enumerate(chart.objects):
        for changed in _changes(one):
            yield Rendered(chart.values, [*chart.objects[:index], changed, *chart.objects[index + 1 :]])
        yield Rendered(chart.values, [*chart.objects[:index], *chart.objects[index + 1 :]])


def _changes(value: Any) -> Iterator[Any]:
    """Copies of a value, each with one leaf replaced or one entry removed."""
    if isinstance(value, dict):
        for key in value:
            yield {k: v for k, v in value.items() if k != key}
            for changed in _changes(value[key]):
                yield {**value, key: changed}
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield [*value[:i], *value[i + 1 :]]
            for changed in _changes(item):
                yield [*value[:i], changed, *value[i + 1 :]]
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield 0
    elif isinstance(value, str):
        yield from ("latest", f"{value}:latest", "Always", "--api-key=secret")


def test_every_flag_in_the_pods_when_asked_for_then_the_server_has_it() -> None:
    command = [sys.executable, "-m", "novainfer.entrypoints.cli", "serve", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    known = set(re.findall(r"--[a-z-]+", text))
    used = {flag for name in VALUE_SETS for pod in rendered(name).servers() for flag in flags(pod)}
    assert used
    assert used <= known


def test_every_metric_that_an_autoscaler_asks_for_when_looked_up_then_it_is_documented() -> None:
    documented = (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8")
    used = {
        name
        for chart in map(rendered, VALUE_SETS)
        for one in chart.of("ScaledObject") + chart.of("HorizontalPodAutoscaler")
        for name in NAME.findall(str(one))
    }
    assert used
    assert all(f"`{name}`" in documented for name in used)
