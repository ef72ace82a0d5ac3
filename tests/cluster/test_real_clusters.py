# SPDX-License-Identifier: Apache-2.0
"""Real API servers: the chart, manifests and guides' objects, `--discover k8s://`, and a whole node.

Each example is installed, upgraded, removed, and stored as it was written; mistakes are refused. The router
has the rights of the chart's service account alone. scripts/kube runs the node.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from router import fake_instances
from router.discovery.test_sources import (
    DiscoverySite,
    build_endpoint,
    build_slice,
    run_discovery_site,
)
from router.fake_instances import FakeInstance, InstancePlan

from lab import chart, kube_host
from lab.kube_cluster import ClusterCommandError, KubeCluster
from lab.kube_configs import PLUGIN_FOLDER
from lab.stack import go_builds
from lab.stack.program_pins import CHECKOUT, KUBERNETES_NODE_TOOL, KUBERNETES_TOOL
from tests.cluster.conftest import list_object_names
from ttft_otel.router.discovery import sources

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


ACCOUNT = "ttft-ttft-otel-router"


@pytest.fixture
def account(
    cluster: KubeCluster, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """This process is a pod of the chart's router, which is installed in `namespace` and watches it.

    Gives the folder that kubelet would mount, with a token that the API server has signed.
    """
    done = cluster.run_helm(
        "install", "ttft", str(chart.CHART), "--namespace", namespace,
        *(
            "--set",
            f"router.discover={{k8s://{namespace}/app=vllm}}",
            "--set",
            "trial.enabled=true",
        ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    folder = cluster.write_account_folder(namespace, ACCOUNT, tmp_path / "account")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT_HTTPS", str(cluster.port))
    find_cluster = sources.find_cluster
    monkeypatch.setattr(sources, "find_cluster", lambda api_url="": find_cluster(api_url, folder))
    return folder


class SliceWriter:
    """Writes EndpointSlices of a namespace as the control plane would."""

    def __init__(self, cluster: KubeCluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    async def put_slice(
        self, instance: FakeInstance, name: str, *, ready: bool = True, terminating: bool = False
    ) -> None:
        """A slice with this instance alone."""
        place = urlsplit(instance.url)
        assert place.hostname and place.port
        endpoint = build_endpoint(place.hostname, ready=ready, terminating=terminating)
        built = build_slice(name, [endpoint], [("http", place.port)])
        built["metadata"] |= {"namespace": self.namespace}
        built |= {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice"}
        await asyncio.to_thread(self.cluster.apply_objects, built)

    async def delete_slice(self, name: str) -> None:
        """It is gone."""
        await asyncio.to_thread(
            self.cluster.run_kubectl, "-n", self.namespace, "delete", "endpointslice", name
        )


@asynccontextmanager
async def run_site(namespace: str, selector: str = "app=vllm") -> AsyncIterator[DiscoverySite]:
    """A router that watches the namespace as a pod does."""
    async with run_discovery_site("--discover", f"k8s://{namespace}/{selector}") as site:
        yield site


def name_states(*instances: FakeInstance) -> dict[str, str]:
    """All of them healthy."""
    return {f"prefill_decode {each.url}": "healthy" for each in instances}


async def test_pods_come_terminate_and_go(
    cluster: KubeCluster, namespace: str, account: Path, pod_address: str
) -> None:
    """By the watch: a new slice serves, a terminating one ends its stream and gets nothing new."""
    slices = SliceWriter(cluster, namespace)

    permits = asyncio.Semaphore(0)
    async with (
        fake_instances.run_instance(InstancePlan({}, permits=permits), pod_address) as one,
        fake_instances.run_instance(InstancePlan({}), pod_address) as two,
    ):
        await slices.put_slice(one, "one")
        async with run_site(namespace) as site:
            await site.wait_for_states(name_states(one))
            stream = asyncio.create_task(site.router.post_chat(stream=True))
            while not one.received:
                await asyncio.sleep(0.01)
            await slices.put_slice(two, "two")
            await site.wait_for_states(name_states(one, two))
            await slices.put_slice(one, "one", ready=False, terminating=True)
            await site.wait_for_source(lambda said: said["instances"] == 1)
            assert (await site.router.post_chat())[0] == 200
            assert (len(one.received), len(two.received)) == (1, 1)
            for _ in range(10):
                permits.release()
            assert (await stream)[0] == 200
            await site.wait_for_states(name_states(two))
            await slices.delete_slice("two")
            line = await site.wait_for_source(lambda said: said["instances"] == 0)
            assert line["problem"] == "no endpoint is ready"
            await slices.delete_slice("one")
            await site.wait_for_source(
                lambda said: "finds no EndpointSlice" in said.get("problem", "")
            )


async def test_a_selector_that_finds_nothing(
    cluster: KubeCluster, namespace: str, account: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """/readyz is not ready and says why, as the log does; a selector that is none is named, too."""

    async with run_site(namespace, "app=vlm") as site:
        await site.wait_for_source(
            lambda said: "the selector finds no EndpointSlice" in said.get("problem", "")
        )
        assert (await site.router.get_json("/readyz"))[0] == 503
        assert any("finds no EndpointSlice" in each for each in caplog.messages)
    async with run_site(namespace, "app in vllm") as site:
        line = await site.wait_for_source(lambda said: "answered 400" in said["problem"])
        assert "unable to parse requirement" in line["problem"]


async def test_the_api_server_dies_and_comes_back(
    cluster: KubeCluster, namespace: str, account: Path, pod_address: str
) -> None:
    """Killed, it takes no instance with it; once it is back the watch goes on."""
    slices = SliceWriter(cluster, namespace)

    async with (
        fake_instances.run_instance(InstancePlan({}), pod_address) as one,
        fake_instances.run_instance(InstancePlan({}), pod_address) as two,
        run_site(namespace) as site,
    ):
        await slices.put_slice(one, "one")
        await site.wait_for_states(name_states(one))
        await asyncio.to_thread(cluster.kill_api)
        line = await site.wait_for_source(lambda said: "stay in use" in said.get("problem", ""))
        assert line["instances"] == 1
        assert (await site.router.post_chat())[0] == 200
        await asyncio.to_thread(cluster.restart_api)
        await slices.put_slice(two, "two")
        await site.wait_for_states(name_states(one, two))
        await site.wait_for_source(lambda said: "problem" not in said)
        await slices.delete_slice("one")
        await site.wait_for_states(name_states(two))


def ask_rules(cluster: KubeCluster, namespace: str, token: str) -> set[tuple[str, str, str]]:
    """(group, resource, verb) that the bearer of a token may in a namespace, by the server's own answer."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace},
    }
    reported = json.loads(
        cluster.run_kubectl(
            "--token", token, "create", "--validate=false", "-f", "-", "-o", "json",
            stdin=json.dumps(review),
        )
    )  # fmt: skip
    return {
        (group, resource, verb)
        for rule in reported["status"]["resourceRules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        # What everybody who is known may: ask about himself.
        if not resource.startswith("selfsubject")
    }


def test_the_account_may_watch_and_nothing_else(
    cluster: KubeCluster, namespace: str, account: Path
) -> None:
    """List and watch of EndpointSlices in the namespaces of `discover`; elsewhere nothing."""
    token = (account / "token").read_text("utf-8")
    slices = "endpointslices"
    watched = {("discovery.k8s.io", slices, verb) for verb in ("list", "watch")}

    assert ask_rules(cluster, namespace, token) == watched
    assert ask_rules(cluster, "default", token) == set()
    for words in (("get", slices, "one"), ("get", "pods"), ("get", "secrets")):
        done = subprocess.run(
            (
                "curl", "-sS", "--cacert", str(cluster.certificate),
                "-H", f"Authorization: Bearer {token}",
                f"{cluster.url}{build_path(namespace, *words[1:])}",
            ),
            capture_output=True,
            text=True,
            check=True,
        )  # fmt: skip
        assert json.loads(done.stdout)["code"] == 403, words


def build_path(namespace: str, resource: str, name: str = "") -> str:
    """Where the API has objects."""
    group = "apis/discovery.k8s.io/v1" if resource == "endpointslices" else "api/v1"
    return f"/{group}/namespaces/{namespace}/{resource}/{name}".rstrip("/")


async def test_without_the_role_the_remedy_is_named(
    cluster: KubeCluster, namespace: str, account: Path
) -> None:
    """Counter-test: the Role is what lets the router in."""
    cluster.run_kubectl(
        "-n", namespace, "delete", "rolebinding", f"{ACCOUNT}-discovery-{namespace}"
    )

    async with run_site(namespace) as site:
        line = await site.wait_for_source(lambda said: "403" in said["problem"])
        assert "the service account needs list and watch of endpointslices" in line["problem"]
