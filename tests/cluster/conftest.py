# SPDX-License-Identifier: Apache-2.0
"""A real API server for the tests of this folder, with the definitions that our objects need."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator

import pytest

from lab.kube_cluster import ClusterCommandError, KubeCluster, run_cluster
from lab.kube_definitions import gather_definitions
from lab.stack import go_builds
from lab.stack.go_builds import GoBuildError, GoMissingError
from lab.stack.program_pins import KUBERNETES_TOOL
from tests.build_progress import make_announcer

# EndpointSlices may not name loopback addresses. This one is for documentation (RFC 5737), so no host has
# it; as an address of the interface `lo` it is reached from this machine alone.
POD_ADDRESS = "192.0.2.17"
CUSTOM_KINDS = "servicemonitors,podmonitors,prometheusrules,instrumentations,llminferenceservices"
KINDS = (
    "deployments,statefulsets,services,configmaps,serviceaccounts,roles,rolebindings,networkpolicies,"
    f"horizontalpodautoscalers,poddisruptionbudgets,{CUSTOM_KINDS}"
)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Build the programs before the first test: it takes minutes, which no test's limit allows."""
    needed = any("cluster" in getattr(item, "fixturenames", ()) for item in session.items)
    if needed and not session.config.option.collectonly:
        with contextlib.suppress(GoBuildError):  # the fixture says what is wrong
            go_builds.build_tool(KUBERNETES_TOOL, make_announcer("kubernetes"))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeCluster]:
    """An API server with definitions of prometheus-operator, the OpenTelemetry operator and KServe.

    Skips only without Go.
    """
    try:
        go_builds.check_go_version()
    except GoMissingError as error:
        pytest.skip(f"{error}; it builds an API server, once, in ten minutes of CPU")
    with run_cluster(tmp_path_factory.mktemp("cluster"), make_announcer("kubernetes")) as started:
        files = [word for path in gather_definitions() for word in ("-f", str(path))]
        started.run_kubectl("apply", "--server-side", *files)
        wait_for_definitions(started)
        yield started


def wait_for_definitions(cluster: KubeCluster) -> None:
    """Wait until the API server serves the kinds; `kubectl wait` fails on those without a condition yet."""
    deadline = time.monotonic() + 60
    while True:
        try:
            cluster.run_kubectl("wait", "crd", "--all", "--for=condition=Established")
            cluster.run_kubectl("get", CUSTOM_KINDS, "--all-namespaces")
            return
        except ClusterCommandError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


@pytest.fixture
def namespace(cluster: KubeCluster, request: pytest.FixtureRequest) -> str:
    """A namespace of this test's own. It stays until the cluster ends: nothing here removes namespaces."""
    name = f"test-{os.urandom(4).hex()}"
    cluster.apply_objects(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}},
        # A controller makes it in other clusters.
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": "default", "namespace": name},
        },
    )
    return name


@pytest.fixture
def pod_address() -> Iterator[str]:
    """An address that pods may have, on this machine's loopback interface while the test runs; needs root."""
    place = (f"{POD_ADDRESS}/32", "dev", "lo")
    if os.geteuid():
        pytest.skip(f"run as root, or first: ip address add {' '.join(place)}")
    subprocess.run(("ip", "address", "replace", *place), check=True)
    yield POD_ADDRESS
    subprocess.run(("ip", "address", "del", *place), check=True)


def list_object_names(
    cluster: KubeCluster, namespace: str, release: str, release_namespace: str
) -> set[str]:
    """NAMESPACE/KIND/NAME of what a release has in a namespace, of the kinds that our chart uses."""
    reported = json.loads(cluster.run_kubectl("-n", namespace, "get", KINDS, "-o", "json"))
    owner = (release, release_namespace)
    return {
        f"{namespace}/{each['kind']}/{each['metadata']['name']}"
        for each in reported["items"]
        if tuple(
            each["metadata"].get("annotations", {}).get(f"meta.helm.sh/release-{word}")
            for word in ("name", "namespace")
        )
        == owner
    }
