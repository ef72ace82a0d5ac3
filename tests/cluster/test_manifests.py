# SPDX-License-Identifier: Apache-2.0
"""The manifests beside the chart and in guides: a real API server takes them, and refuses mistakes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from lab.kube_cluster import ClusterCommandError, KubeCluster

pytestmark = pytest.mark.full

CHECKOUT = Path(__file__).parents[2]
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
