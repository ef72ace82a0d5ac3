# SPDX-License-Identifier: Apache-2.0
"""The chart on a real API server: each example installed, upgraded, removed, and stored as it was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab import chart
from lab.kube_cluster import KubeCluster
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
