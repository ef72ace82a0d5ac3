# SPDX-License-Identifier: Apache-2.0
"""The Helm chart, the manifests and other charts' values beside it: rendered, validated, compared."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from lab import chart
from lab.kube_tools import run_helm
from ttft_otel import __version__
from ttft_otel.model.names import metric_names

CHECKOUT = Path(__file__).parents[1]
KUBERNETES = CHECKOUT / "deploy" / "kubernetes"
VALUES = [
    pytest.param(path, id=str(path.relative_to(chart.CHART))) for path in chart.find_values_files()
]
EXISTING, SCALE_OUT = "examples/existing-monitoring", "examples/scale-out"
ROUTER = "ttft-ttft-otel-router"
SCHEMA_VERSION = "1.35"
CUSTOM = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}  # of prometheus-operator
FOREIGN = {"LLMInferenceService", "Instrumentation"}  # of KServe and the OpenTelemetry operator


def read_documents(text: str) -> list[dict[str, Any]]:
    """The objects of a YAML stream."""
    return [each for each in yaml.load_all(text, yaml.CSafeLoader) if each]


def validate_documents(documents: list[dict[str, Any]]) -> None:
    """Check each object of Kubernetes itself against its published schema, unknown fields included."""
    for document in documents:
        if document["kind"] not in CUSTOM | FOREIGN:
            kubernetes_validate.validate(document, SCHEMA_VERSION, strict=True)


def index_documents(values: str) -> dict[tuple[str, str], dict[str, Any]]:
    """What an example (or a file NAME-values.yaml of ci/) renders, by kind and name."""
    path = chart.CHART / (
        f"{values}/values.yaml" if "examples" in values else f"ci/{values}-values.yaml"
    )
    return {
        (each["kind"], each["metadata"]["name"]): each
        for each in read_documents(chart.render_chart(path))
    }


@pytest.mark.parametrize("values", VALUES)
def test_lint_and_schemas(values: Path) -> None:
    """Each example passes helm's linter, and each object Kubernetes' schema."""
    linted = run_helm("lint", "--strict", str(chart.CHART), "-f", str(values))
    assert linted.returncode == 0, linted.stdout + linted.stderr

    documents = read_documents(chart.render_chart(values))
    validate_documents(documents)
    keys = [(each["kind"], each["metadata"]["name"]) for each in documents]
    assert len(keys) == len(set(keys))


def test_generated() -> None:
    """README and rendered examples are what `python -m lab.chart` writes."""
    for path, text in chart.render_files().items():
        assert path.read_text("utf-8") == text, f"{path.name}: run python -m lab.chart"


def test_every_value_is_documented() -> None:
    """values.yaml, its schema and README name the same values."""
    values = yaml.safe_load((chart.CHART / "values.yaml").read_text("utf-8"))
    schema = json.loads((chart.CHART / "values.schema.json").read_text("utf-8"))
    documented = {
        name for name, _, _ in chart.list_rows((chart.CHART / "values.yaml").read_text("utf-8"))
    }

    def check(given: dict[str, Any], described: dict[str, Any], path: str) -> None:
        assert set(given) == set(described["properties"]) - {"global"}, path
        for key, value in given.items():
            here = f"{path}.{key}".lstrip(".")
            if "properties" in described["properties"][key]:
                check(value, described["properties"][key], here)
            else:
                assert here in documented

    check(values, schema, "")


def read_router(values: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """The router's pod in an example, its container, and its flags with their values."""
    pod = index_documents(values)["Deployment", ROUTER]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    return pod, container, dict(each.partition("=")[::2] for each in container["args"])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("router.discover={http://vllm:8000}", "router/discover"),
        ("router.replica=3", "additional properties 'replica' not allowed"),
        ("router.routingLogic=fastest", "router/routingLogic"),
        ("collector.tempoEndpoint=http://tempo:4317", "collector/tempoEndpoint"),
        ("prometheusRule.sloBudget=1.5", "prometheusRule/sloBudget"),
        ("trial.enabled=false", "collector.tempoEndpoint is empty"),
        ("router.discover=null", "the router has no instances"),
        ("router.auth.insecure=false", "router.auth needs existingSecret"),
        ("router.sharedState.existingSecret=valkey", "router.sharedState needs url"),
        ("router.sharedState.url=valkey:6379", "router/sharedState/url"),
        ("router.upstreamTls.serverName=vllm", "router.upstreamTls needs existingSecret"),
        ("monitors.vllm.enabled=true", "monitors.vllm.matchLabels is empty"),
        ("", "set router.discover"),  # of the default values, where nothing can be guessed
    ],
)
def test_wrong_values_are_refused(setting: str, message: str) -> None:
    """With a sentence that names the value."""
    values = chart.CHART / "examples" / "trial" / "values.yaml"
    flag = "--set-json" if setting.endswith("=null") else "--set"
    words = ("-f", str(values), flag, setting) if setting else ()
    done = run_helm("template", "x", str(chart.CHART), *words)

    assert done.returncode != 0
    assert message in done.stderr


def test_names_are_those_of_the_repository() -> None:
    """Versions, images and the metric for scaling are written in one more place each."""
    values = yaml.safe_load((chart.CHART / "values.yaml").read_text("utf-8"))
    compose = yaml.safe_load((CHECKOUT / "docker-compose.yml").read_text("utf-8"))
    services = compose["services"]
    for part, image in (
        ("router", services["router"]["image"]),
        ("collector", compose["x-collector"]["image"]),
    ):
        own = values[part]["image"]
        assert f"{own['repository']}:{own['tag']}" == image
    for part in ("tempo", "prometheus", "grafana"):
        assert values["trial"][part]["image"] == services[part]["image"]
    metadata = yaml.safe_load((chart.CHART / "Chart.yaml").read_text("utf-8"))
    assert metadata["appVersion"] == __version__
    assert f"## {metadata['version']}" in (chart.CHART / "UPGRADING.md").read_text("utf-8")
    scaler = index_documents(SCALE_OUT)["HorizontalPodAutoscaler", ROUTER]
    metric = scaler["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert metric == metric_names.ROUTER_REQUESTS_IN_FLIGHT


def test_the_router_drains_before_it_is_killed() -> None:
    """The grace period is longer than all that happens in it, and one replica of several stays."""
    pod, container, flags = read_router(EXISTING)

    drain_s = int(flags["--drain-delay"]) + int(flags["--drain-timeout"])
    assert pod["terminationGracePeriodSeconds"] > drain_s
    readiness = container["readinessProbe"]
    assert int(flags["--drain-delay"]) > readiness["periodSeconds"] * readiness["failureThreshold"]
    assert "--insecure" not in flags
    assert ("PodDisruptionBudget", ROUTER) in index_documents(EXISTING)


def test_discovery_may_read_slices_and_nothing_else() -> None:
    """A Role in each namespace that a source names, bound to the router's account there."""
    documents = index_documents(EXISTING)
    name = f"{ROUTER}-discovery-{chart.NAMESPACE}"
    role, binding = documents["Role", name], documents["RoleBinding", name]

    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "inference"
    (rule,) = role["rules"]
    assert (rule["apiGroups"], rule["resources"]) == (["discovery.k8s.io"], ["endpointslices"])
    assert rule.keys() == {"apiGroups", "resources", "verbs"} and rule["verbs"] == ["list", "watch"]
    assert binding["subjects"][0]["namespace"] == chart.NAMESPACE
    # Where instances are found by DNS alone there is none.
    assert not [name for kind, name in index_documents(SCALE_OUT) if kind == "Role"]
    assert read_router(SCALE_OUT)[0]["automountServiceAccountToken"] is False


def test_replicas_share_through_the_store() -> None:
    """One URL and one prefix for all replicas; password and authority come from their Secrets."""
    pod, container, flags = read_router("shared-state")
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    secrets = {each["name"]: each["secret"] for each in pod["volumes"] if "secret" in each}
    password, ca = (
        f"{mounts[volume]}/{secrets[volume]['items'][0]['path']}"
        for volume in ("store", "store-ca")
    )

    url = "rediss://router@valkey.cache.svc:6379"
    assert flags["--shared-state"] == f"{url}?ssl_ca_certs={ca}"
    assert flags["--shared-state-password-file"] == password
    assert flags["--shared-state-prefix"] == f"{chart.NAMESPACE}.{ROUTER}"
    names = (secrets["store"]["secretName"], secrets["store-ca"]["secretName"])
    assert names == ("valkey-router", "valkey-ca")
    assert not any("shared-state" in each for each in read_router("router-only")[2])


def test_instances_behind_tls() -> None:
    """The flags name files of the Secret, which kubelet replaces; an image may be named by its digest."""
    pod, container, flags = read_router("upstream-tls")
    (mount,) = (each for each in container["volumeMounts"] if each["name"] == "upstream-tls")
    (volume,) = (each for each in pod["volumes"] if each["name"] == "upstream-tls")
    folder = mount["mountPath"]
    assert flags["--upstream-ca"] == f"{folder}/ca.crt"
    assert flags["--upstream-cert"] == f"{folder}/tls.crt"
    assert flags["--upstream-cert-key"] == f"{folder}/tls.key"
    assert flags["--upstream-name"] == "vllm.inference.svc"
    assert volume["secret"] == {"secretName": "router-tls"} and "subPath" not in mount
    assert re.fullmatch(r"ttft-otel-router:0\.1\.0@sha256:[0-9a-f]{64}", container["image"])


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector of the chart's takes a pod with these labels."""
    return all(
        labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()
    ) and all(
        each["operator"] == "In" and labels.get(each["key"]) in each["values"]
        for each in selector.get("matchExpressions", ())
    )


def test_dashboards_and_rules_are_those_of_the_repository() -> None:
    """Byte for byte, but for the objective."""
    documents = index_documents(EXISTING)
    for name in ("ttft", "ttft-health"):
        config_map = documents["ConfigMap", f"ttft-ttft-otel-dashboard-{name}"]
        path = CHECKOUT / "grafana" / "dashboards" / f"{name}.json"
        assert config_map["data"][f"{name}.json"].strip() == path.read_text("utf-8").strip()
        assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert len(json.dumps(config_map)) < 1_000_000, "etcd takes 1 MiB"
    groups = documents["PrometheusRule", "ttft-ttft-otel"]["spec"]["groups"]
    expected = [
        group
        for kind in ("rules", "alerts")
        for group in yaml.safe_load(
            (CHECKOUT / "grafana" / "prometheus" / kind / "ttft.yml").read_text("utf-8")
        )["groups"]
    ]
    # The operator's definition refuses a second group of a name.
    assert len({group["name"] for group in groups}) == len(groups)
    recorded = {rule.get("record"): rule["expr"] for rule in groups[0]["rules"]}
    assert recorded["ttft:slo:seconds"] == "vector(2)"
    for given, wanted in zip(groups, expected, strict=True):
        for rule, original in zip(given["rules"], wanted["rules"], strict=True):
            if original.get("record") not in ("ttft:slo:seconds", "ttft:slo:budget"):
                assert rule == original


def test_the_second_tier_is_named_pod_by_pod() -> None:
    """The first tier's list has exactly the pods of the StatefulSet."""
    documents = index_documents(SCALE_OUT)
    second = documents["StatefulSet", "ttft-ttft-otel-collector-tier2"]["spec"]
    first = documents["Deployment", "ttft-ttft-otel-collector-tier1"]["spec"]["template"]["spec"]
    variables = {each["name"]: each.get("value") for each in first["containers"][0]["env"]}

    hosts = yaml.safe_load(variables["TTFT_TIER2"])
    assert hosts == [
        f"ttft-ttft-otel-collector-tier2-{number}.{second['serviceName']}.{chart.NAMESPACE}.svc:4317"
        for number in range(second["replicas"])
    ]


@pytest.mark.parametrize("path", sorted(KUBERNETES.glob("*.yaml")), ids=lambda path: path.name)
def test_manifests_beside_the_chart(path: Path) -> None:
    """Objects pass their schemas; files named *-values.yaml are values of other people's charts."""
    text = path.read_text("utf-8")
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n# ")
    documents = read_documents(text)
    if path.name.endswith("-values.yaml"):
        assert len(documents) == 1 and "kind" not in documents[0]
    else:
        validate_documents(documents)
    if "TTFT_OTEL" in text:
        assert re.search(r"name: TTFT_OTEL\b", text)


@pytest.mark.parametrize("name", ["mono.yaml", "prefill-decode.yaml", "encode-prefill-decode.yaml"])
def test_busy_servers_stay_ready(name: str) -> None:
    """A server that answers its probe within seconds keeps its requests; the default is one second."""
    for document in read_documents((KUBERNETES / name).read_text("utf-8")):
        if document["kind"] == "Deployment":
            for container in document["spec"]["template"]["spec"]["containers"]:
                assert container["readinessProbe"]["timeoutSeconds"] >= 5


STORAGE = CHECKOUT / "deploy" / "kubernetes" / "storage"
GUIDE = CHECKOUT / "docs" / "guides" / "kubernetes.md"
TEMPO = yaml.safe_load((CHECKOUT / "grafana/tempo/tempo.yaml").read_text("utf-8"))
PROMETHEUS = yaml.safe_load((CHECKOUT / "grafana/prometheus/prometheus.yml").read_text("utf-8"))
OUR_CHART = CHECKOUT / "deploy/helm/ttft-otel/values.yaml"


def load_values(name: str) -> Any:
    """The values of the file NAME-values.yaml."""
    return yaml.safe_load((STORAGE / f"{name}-values.yaml").read_text("utf-8"))


def test_one_process() -> None:
    """Tempo on object storage: the limits, the messages' size and the days of the one in compose."""
    tempo = load_values("tempo")["tempo"]
    receiver = TEMPO["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]
    limits = TEMPO["overrides"]["defaults"]["ingestion"]
    retention = TEMPO["backend_worker"]["compaction"]["block_retention"]

    assert tempo["receivers"]["otlp"]["protocols"]["grpc"] == receiver
    assert tempo["overrides"]["defaults"]["ingestion"] == limits
    assert tempo["retention"] == retention
    assert tempo["storage"]["trace"]["backend"] == "s3"


def test_services_apart() -> None:
    """Tempo's services with Kafka: as many consumers as partitions, and room for a batch of ours."""
    values = load_values("tempo-distributed")
    partitions = values["ingest"]["kafka"]["auto_create_topic_default_partitions"]
    limits = TEMPO["overrides"]["defaults"]["ingestion"]
    receiver = TEMPO["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]

    assert values["blockBuilder"]["replicas"] == values["liveStore"]["replicas"] == partitions
    apart = values["overrides"]["defaults"]["ingestion"]
    assert apart["rate_limit_bytes"] > limits["rate_limit_bytes"]
    found = values["traces"]["otlp"]["grpc"]["receiverConfig"]
    assert found["max_recv_msg_size_mib"] == receiver["max_recv_msg_size_mib"]


def test_prometheus() -> None:
    """The dashboards' names, late samples and exemplars are as in compose, and native histograms leave it."""
    spec = load_values("prometheus")["prometheus"]["prometheusSpec"]

    assert spec["otlp"]["translationStrategy"] == PROMETHEUS["otlp"]["translation_strategy"]
    late = PROMETHEUS["storage"]["tsdb"]["out_of_order_time_window"]
    assert spec["tsdb"]["outOfOrderTimeWindow"] == late
    assert spec["exemplars"]["maxSize"] == PROMETHEUS["storage"]["exemplars"]["max_exemplars"]
    assert spec["enableOTLPReceiver"] is True
    (remote,) = spec["remoteWrite"]
    assert remote["sendNativeHistograms"] is remote["sendExemplars"] is True


@pytest.mark.parametrize("path", sorted(STORAGE.iterdir()), ids=lambda path: path.name)
def test_told(path: Path) -> None:
    """Each file is named in the guide, has no secret, and names settings of our chart that exist."""
    text = path.read_text("utf-8")
    assert path.name in GUIDE.read_text("utf-8")
    keys = re.findall(r"^ *(?:access|secret)_key: (.*)$", text, re.M)
    assert all(each.startswith("${") for each in keys)
    ours = yaml.safe_load(OUR_CHART.read_text("utf-8"))["collector"]
    named = re.findall(r"collector\.(\w+)=", text)
    assert named and set(named) <= set(ours)


def test_every_pod_is_contained() -> None:
    """No root, no writable files, no capability, limited memory; policies select pods and ports of theirs."""
    found = 0
    for each in chart.find_values_files():
        documents = read_documents(chart.render_chart(each))
        kinds = ("Deployment", "StatefulSet")
        pods = [one["spec"]["template"] for one in documents if one["kind"] in kinds]
        for pod in pods:
            assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
            for container in pod["spec"]["containers"]:
                assert container["securityContext"] == {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                }
                assert "memory" in container["resources"]["limits"]
                assert "readinessProbe" in container
        for policy in (one["spec"] for one in documents if one["kind"] == "NetworkPolicy"):
            labels = [pod["metadata"]["labels"] for pod in pods]
            chosen = [
                pod
                for pod, own in zip(pods, labels, strict=True)
                if selects(policy["podSelector"], own)
            ]
            assert chosen and policy["policyTypes"] == ["Ingress"]
            ports = {
                key
                for pod in chosen
                for container in pod["spec"]["containers"]
                for port in container["ports"]
                for key in (port.get("name"), port["containerPort"])
            }
            assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} <= ports
            found += 1
    assert found > 6
