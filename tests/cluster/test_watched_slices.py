# SPDX-License-Identifier: Apache-2.0
"""`--discover k8s://` against a real API server, with the rights of the chart's service account alone."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from router import fake_instances
from router.discovery.discovery_site import (
    DiscoverySite,
    build_endpoint,
    build_slice,
    run_discovery_site,
)
from router.fake_instances import FakeInstance, InstancePlan

from lab import chart
from lab.kube_cluster import KubeCluster
from ttft_otel.router.discovery import sources

pytestmark = pytest.mark.full

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
