# SPDX-License-Identifier: Apache-2.0
"""The chart, manifests and guides' objects on a real API server; scripts/kube, which runs a whole node."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab import chart, kube_host
from lab.kube_cluster import ClusterCommandError, KubeCluster
from lab.kube_configs import PLUGIN_FOLDER
from lab.stack import go_builds
from lab.stack.program_pins import CHECKOUT, KUBERNETES_NODE_TOOL, KUBERNETES_TOOL
from tests.cluster.conftest import list_object_names

pytestmark = pytest.mark.full

VALUES = [
    pytest.param(path, id=str(path.relative_to(chart.CHART))) for path in chart.find_values_files()
]
RELEASE = "ttft"
# Namespaces that examples name: of the servers, of the monitoring that is there.
NAMED_NAMESPACES = ("default", "inference", "monitoring")
CHANGES = ("--set", "router.drain.timeoutSeconds=100", "--set", "collector.memoryMib=640")


@pytest.fixture(scope="module", autouse=True)
def named_namespaces(cluster: KubeCluster) -> None:
    """The namespaces that examples name."""
    cluster.apply_objects(
        *(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            for name in NAMED_NAMESPACES
        )
    )


def run_chart(cluster: KubeCluster, command: str, namespace: str, values: Path, *more: str) -> None:
    """`helm install` or `helm upgrade`, which must succeed without a warning of the API server."""
    done = cluster.run_helm(
        command, RELEASE, str(chart.CHART), "--namespace", namespace, "-f", str(values), *more
    )
    reported = done.stdout + done.stderr
    assert done.returncode == 0, reported
    assert "arning" not in reported, reported


def find_lost_fields(written: Any, stored: Any, path: str = "") -> list[str]:
    """Paths of what was written and not stored so: the server adds to objects, and drops in silence."""
    if isinstance(written, dict):
        if not isinstance(stored, dict):
            return [] if not written and stored is None else [path]
        return [
            each
            for key, value in written.items()
            # An empty value may be left out.
            if not (value in ({}, [], "", None) and key not in stored)
            for each in find_lost_fields(value, stored.get(key), f"{path}.{key}")
        ]
    if isinstance(written, list):
        if not isinstance(stored, list) or len(written) != len(stored):
            return [path]
        return [
            each
            for number, pair in enumerate(zip(written, stored, strict=True))
            for each in find_lost_fields(*pair, f"{path}[{number}]")
        ]
    return [] if written == stored else [f"{path}: {written!r} became {stored!r}"]


def check_stored(cluster: KubeCluster, namespace: str) -> list[dict[str, Any]]:
    """Every object of the release is stored as it was written; gives what was written."""
    reported = cluster.run_helm("get", "manifest", RELEASE, "--namespace", namespace)
    written = [each for each in yaml.safe_load_all(reported.stdout) if each]
    stored = json.loads(
        cluster.run_kubectl("get", "-f", "-", "-o", "json", stdin=yaml.safe_dump_all(written))
    )["items"]
    assert len(written) == len(stored) > 1
    for mine, theirs in zip(written, stored, strict=True):
        assert mine["metadata"]["name"] == theirs["metadata"]["name"]
        assert find_lost_fields(mine, theirs) == [], mine["kind"]
    return written


def list_all(cluster: KubeCluster, namespace: str) -> set[str]:
    """What the release has anywhere."""
    return {
        name
        for place in (namespace, *NAMED_NAMESPACES)
        for name in list_object_names(cluster, place, RELEASE, namespace)
    }


@pytest.mark.parametrize("values", VALUES)
def test_install_upgrade_uninstall(cluster: KubeCluster, namespace: str, values: Path) -> None:
    """Each example goes in without a warning, changes, and leaves nothing behind."""
    run_chart(cluster, "install", namespace, values)
    written = check_stored(cluster, namespace)
    installed = list_all(cluster, namespace)
    assert len(installed) == len(written)

    run_chart(cluster, "upgrade", namespace, values, *CHANGES)
    upgraded = check_stored(cluster, namespace)
    assert upgraded != written
    assert list_all(cluster, namespace) == installed

    done = cluster.run_helm("uninstall", RELEASE, "--namespace", namespace)
    assert done.returncode == 0, done.stderr
    assert list_all(cluster, namespace) == set()


def test_upgrades_leave_the_scaled_number(cluster: KubeCluster, namespace: str) -> None:
    """With autoscaling the autoscaler alone sets replicas: an upgrade in a busy hour stops no router."""
    values = chart.CHART / "examples" / "prefill-decode" / "values.yaml"
    run_chart(cluster, "install", namespace, values)
    deployment = f"deployment/{RELEASE}-ttft-otel-router"
    cluster.run_kubectl("-n", namespace, "scale", deployment, "--replicas=4")
    run_chart(cluster, "upgrade", namespace, values, *CHANGES)

    reported = cluster.run_kubectl(
        "-n", namespace, "get", deployment, "-o", "jsonpath={.spec.replicas}"
    )
    assert reported == "4"
    cluster.run_helm("uninstall", RELEASE, "--namespace", namespace)


def test_two_teams_watch_the_same_servers(cluster: KubeCluster, namespace: str) -> None:
    """Releases of one name in two namespaces do not claim each other's Role in the servers' namespace."""
    other = f"{namespace}-b"
    values = chart.CHART / "examples" / "trial" / "values.yaml"
    run_chart(cluster, "install", namespace, values)
    run_chart(cluster, "install", other, values, "--create-namespace")

    for name in (namespace, other):
        assert cluster.run_helm("uninstall", RELEASE, "--namespace", name).returncode == 0


@pytest.mark.parametrize(
    ("setting", "reported"),
    [
        ('router.extraEnv=[{"name":"A","valu":"x"}]', "valu"),
        ('router.tolerations=[{"key":"gpu","operator":"Exist"}]', "Exist"),
        ('router.nodeSelector={"pool":7}', "pool"),
        ('router.podLabels={"a b":"c"}', "a b"),
    ],
)
def test_what_no_schema_knows_is_refused(
    cluster: KubeCluster, namespace: str, setting: str, reported: str
) -> None:
    """Counter-test: the API server looks into the free parts of our values, too."""
    values = chart.CHART / "examples" / "trial" / "values.yaml"
    words = ("install", RELEASE, str(chart.CHART), "--namespace", namespace, "-f", str(values))
    done = cluster.run_helm(*words, "--set-json", setting)
    cluster.run_helm("uninstall", RELEASE, "--namespace", namespace)

    assert done.returncode != 0 or "arning" in done.stderr
    assert reported in done.stdout + done.stderr


KUBERNETES = CHECKOUT / "deploy" / "kubernetes"
MANIFESTS = [
    path for path in sorted(KUBERNETES.glob("*.yaml")) if not path.name.endswith("-values.yaml")
]
GUIDE = CHECKOUT / "docs" / "guides" / "inject.md"
BLOCK = re.compile(r"```yaml\n(.*?)```", re.S)


def try_objects(cluster: KubeCluster, namespace: str, text: str) -> str:
    """What the API server says to objects that it is not to keep. Raises ClusterCommandError."""
    words = ("apply", "--server-side", "--dry-run=server", "--validate=strict")
    return cluster.run_kubectl("-n", namespace, *words, "-f", "-", stdin=text)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_the_server_takes_them(cluster: KubeCluster, namespace: str, path: Path) -> None:
    """Each object, with unknown fields an error."""
    text = path.read_text("utf-8")
    reported = try_objects(cluster, namespace, text)

    objects = [each for each in yaml.safe_load_all(text) if each]
    assert reported.count("serverside-applied") == len(objects) > 0


def test_the_guides_instrumentation(cluster: KubeCluster, namespace: str) -> None:
    """The object for the OpenTelemetry operator, by the operator's own definition."""
    (text,) = [
        each for each in BLOCK.findall(GUIDE.read_text("utf-8")) if "kind: Instrumentation" in each
    ]

    assert "serverside-applied" in try_objects(cluster, namespace, text)


def test_the_prometheus_of_other_charts(cluster: KubeCluster, namespace: str) -> None:
    """The operator's definition takes what kube-prometheus-stack would give it, and refuses a wrong field."""
    values = yaml.safe_load((KUBERNETES / "storage/prometheus-values.yaml").read_text("utf-8"))
    prometheus = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "Prometheus",
        "metadata": {"name": "main"},
        "spec": values["prometheus"]["prometheusSpec"],
    }

    assert "serverside-applied" in try_objects(cluster, namespace, yaml.safe_dump(prometheus))
    text = yaml.safe_dump(prometheus).replace("sendNativeHistograms", "sendNativeHistogram")
    with pytest.raises(ClusterCommandError, match="sendNativeHistogram"):
        try_objects(cluster, namespace, text)


@pytest.mark.parametrize(
    ("right", "wrong", "reported"),
    [
        ("periodSeconds: 5", "periodSecond: 5", "periodSecond"),
        ("periodSeconds: 10", "periodSeconds: -10", "greater than or equal to 0"),
        ("clusterIP: None", "type: Internal", "Unsupported value"),
        ("      labels: {app: vllm,", "      labels: {app: v,", "selector"),
        ("- {name: http, containerPort: 8000}", "- {name: HTTP_, containerPort: 8000}", "ports[0].name"),
        ("mountPath: /dev/shm}", "mountPath: /ttft-otel}", "duplicate entries"),
    ],
)  # fmt: skip
def test_mistakes_are_refused(
    cluster: KubeCluster, namespace: str, right: str, wrong: str, reported: str
) -> None:
    """Counter-test: field, range, enum, selector, name and a rule between fields, each alone."""
    text = (KUBERNETES / "mono.yaml").read_text("utf-8")
    assert right in text
    with pytest.raises(ClusterCommandError) as refusal:
        try_objects(cluster, namespace, text.replace(right, wrong, 1))

    assert reported in str(refusal.value)


LIMIT_S = 3600  # a busy machine starts each server in five minutes


@pytest.mark.timeout(LIMIT_S + 60)
def test_requests_survive_rollouts(tmp_path: Path) -> None:
    """Servers, router and collector on a real node: nothing fails while they are replaced, nothing stays."""
    if lacking := kube_host.find_lacking(PLUGIN_FOLDER):
        pytest.skip("; ".join(lacking))
    if not (go_builds.is_built(KUBERNETES_TOOL) and go_builds.is_built(KUBERNETES_NODE_TOOL)):
        pytest.skip("Kubernetes is not built: scripts/kube --until service does it once")
    settings, figures = kube_host.read_settings(), tmp_path / "figures.json"

    done = subprocess.run(
        (CHECKOUT / "scripts" / "kube", "--json", figures, "--logs", tmp_path / "logs"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )

    assert done.returncode == 0, done.stderr[-5000:]
    steps = json.loads(figures.read_text("utf-8"))["figures"]
    for name in ("backend rollout", "router rollout", "pod deleted"):
        assert steps[name]["requests"] > 0 == steps[name]["failed"]
    assert kube_host.read_settings() == settings
    assert not kube_host.get_state_path().exists()
    assert not list(kube_host.CONTROL_GROUPS.glob("*/ttft-kube-*"))
