# SPDX-License-Identifier: Apache-2.0
"""Instances from a watch of EndpointSlices, over HTTP: which they name, ends of watches, 410, refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from router import fake_instances
from router.discovery.discovery_site import (
    DiscoverySite,
    SliceServer,
    build_endpoint,
    build_slice,
    run_discovery_site,
    run_slice_server,
)
from router.fake_instances import FakeInstance, InstancePlan
from ttft_otel.model.names import metric_names
from ttft_otel.router.discovery.discovery import parse_source_address
from ttft_otel.router.discovery.kubernetes_source import (
    KubernetesSource,
    find_cluster,
    read_slices,
)
from ttft_otel.router.errors import SourceUnreachable
from ttft_otel.router.upstream.query_client import QueryClient

SOURCE = "k8s://default/app=vllm"
ANY = parse_source_address(SOURCE)


def serve_from(instance: FakeInstance, name: str = "a", **labels: str) -> dict[str, Any]:
    """A slice with this instance alone."""
    port = int(instance.url.rpartition(":")[2])
    return build_slice(name, [build_endpoint("127.0.0.1")], [("http", port)], **labels)


def watch(cluster: SliceServer) -> tuple[str, ...]:
    """Flags of a router that asks this API server."""
    return ("--discover", SOURCE, "--kubernetes-api", cluster.url)


@asynccontextmanager
async def run_cluster() -> AsyncIterator[tuple[SliceServer, FakeInstance, DiscoverySite]]:
    """An API server that names one instance, and a router that found it."""
    async with (
        run_slice_server() as cluster,
        fake_instances.run_instance(InstancePlan({})) as one,
    ):
        cluster.put(serve_from(one))
        async with run_discovery_site(*watch(cluster)) as site:
            await site.wait_for_states({f"prefill_decode {one.url}": "healthy"})
            yield cluster, one, site


async def test_a_change_comes_by_the_watch() -> None:
    """A pod that terminates drains: its stream ends, new requests go elsewhere; one list is enough."""
    async with (
        run_cluster() as (cluster, one, site),
        fake_instances.run_instance(InstancePlan({})) as two,
    ):
        cluster.put(serve_from(two, "b"))
        both = {f"prefill_decode {each.url}": "healthy" for each in (one, two)}
        await site.wait_for_states(both)
        gone = serve_from(one)
        gone["endpoints"][0]["conditions"] = {"ready": False, "terminating": True}
        cluster.put(gone)
        await site.wait_for_states({f"prefill_decode {two.url}": "healthy"})
        assert (await site.router.post_chat())[0] == 200
        assert (len(one.received), len(two.received)) == (0, 1)
        cluster.delete("b")
        line = await site.wait_for_source(lambda said: said["instances"] == 0)
        assert line["problem"] == "no endpoint is ready"
        assert cluster.lists == 1


async def test_a_watch_that_ends_goes_on_where_it_was() -> None:
    """After a time-out of the server the next watch begins at the last version, bookmarks' included."""
    async with run_cluster() as (cluster, one, site):
        cluster.ends_watches = True
        cluster.send_bookmark()
        newest = str(cluster.version)
        while cluster.queries[-1].get("resourceVersion") != newest:
            await site.wait_for_source(lambda _: True)
        assert cluster.queries[-1]["allowWatchBookmarks"] == "true"
        cluster.put(serve_from(one, "b", ttft_otel__role="prefill_decode"))
        cluster.delete("a")
        while cluster.queries[-1].get("resourceVersion") != str(cluster.version):
            await site.wait_for_source(lambda _: True)
        assert site.map_states() == {f"prefill_decode {one.url}": "healthy"}
        assert cluster.lists == 1


async def test_a_version_that_was_compacted_is_listed_anew() -> None:
    """410 is an event of the watch, not its status; what was deleted meanwhile is gone."""
    async with (
        run_cluster() as (cluster, one, site),
        fake_instances.run_instance(InstancePlan({})) as two,
    ):
        cluster.slices.clear()
        cluster.slices["b"] = serve_from(two, "b")  # no event tells it
        cluster.compact()
        await site.wait_for_states({f"prefill_decode {two.url}": "healthy"})
        assert cluster.lists >= 2


async def test_an_api_server_that_goes_away_leaves_everybody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """While the API server is away instances stay and serve; the failures are counted."""
    async with run_cluster() as (cluster, one, site):
        cluster.status = 503
        cluster.cut_watches()
        line = await site.wait_for_source(lambda said: "answered 503" in said.get("problem", ""))
        assert line["instances"] == 1
        assert (await site.router.post_chat())[0] == 200
        assert any("stay in use" in each for each in caplog.messages)
        async with site.router.client.get(f"{site.router.url}/metrics") as response:
            text = await response.text()
        assert f'{metric_names.ROUTER_DISCOVERED_INSTANCES}{{source="{SOURCE}"}} 1.0' in text
        assert f"{metric_names.ROUTER_DISCOVERY_FAILURES}_total" in text
        cluster.delete("a")
        cluster.put(serve_from(one, "new"))
        cluster.status = 200
        await site.wait_for_source(lambda said: "problem" not in said)
        assert site.map_states() == {f"prefill_decode {one.url}": "healthy"}


@pytest.mark.parametrize("status", [401, 403])
async def test_missing_rights_are_named(status: int) -> None:
    """When the API refuses, the log says which Role is needed."""
    async with run_slice_server() as cluster:
        cluster.status = status
        async with run_discovery_site(*watch(cluster)) as site:
            line = await site.wait_for_source(lambda said: str(status) in said["problem"])
            assert "list and watch of endpointslices" in line["problem"]
            assert (await site.router.get_json("/readyz"))[0] == 503


async def test_labels_say_roles() -> None:
    """One selector, prefill and decode by the label of their Services."""
    async with (
        run_slice_server() as cluster,
        fake_instances.run_instance() as p,
        fake_instances.run_instance() as d,
    ):
        cluster.put(serve_from(d, "d", ttft_otel__role="decode"))
        of_llm_d = serve_from(p, "p")
        of_llm_d["metadata"]["labels"]["llm-d.ai/role"] = "prefill"
        cluster.put(of_llm_d)
        async with run_discovery_site(*watch(cluster)) as site:
            await site.wait_for_states(
                {f"prefill {p.url}": "healthy", f"decode {d.url}": "healthy"}
            )


async def test_events_may_be_longer_than_buffers(caplog: pytest.LogCaptureFixture) -> None:
    """A slice with a thousand endpoints is one line of some 100 kB; that there is none yet is told."""
    async with run_slice_server() as cluster, run_discovery_site(*watch(cluster)) as site:
        line = await site.wait_for_source(lambda said: "selector" in said["problem"])
        problem = "the selector finds no EndpointSlice: has the Service these labels?"
        assert line["problem"] == problem and problem in caplog.text
        endpoints = [
            {**build_endpoint(f"127.0.2.{number % 200}"), "nodeName": "n" * 200}
            for number in range(1000)
        ]
        cluster.put(build_slice("large", endpoints))
        await site.wait_for_source(lambda said: said["instances"] == 200)


async def test_a_token_is_read_anew_for_each_request(tmp_path: Path) -> None:
    """The token file is read again for each request, because kubelet replaces it."""
    async with run_slice_server() as cluster:
        token = tmp_path / "token"
        source = KubernetesSource(ANY, cluster.url, tmp_path)
        async with QueryClient() as source._queries:
            with pytest.raises(SourceUnreachable, match="no token"):
                await source.list_slices()
            for cluster.token in ("first", "second"):
                token.write_text(f"{cluster.token}\n")
                assert await source.list_slices() == ([], "10")
            cluster.token = "third"
            with pytest.raises(SourceUnreachable, match="401"):
                await source.list_slices()


def test_a_pod_knows_its_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """kubelet's variables and files; elsewhere the message says what to give."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ValueError, match="--kubernetes-api"):
        find_cluster()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT_HTTPS", "6443")
    assert find_cluster(folder=tmp_path) == ("https://[fd00::1]:6443", tmp_path)
    assert find_cluster("http://127.0.0.1:8001/") == ("http://127.0.0.1:8001", None)


@pytest.mark.parametrize(
    ("conditions", "is_used"),
    [
        ({"ready": True}, True),
        ({"ready": False}, False),
        ({"ready": None}, True),  # "unknown" is to be read as ready
        ({"ready": False, "serving": True, "terminating": True}, False),
        ({"ready": True, "terminating": True}, False),  # publishNotReadyAddresses
    ],
)
def test_readiness(conditions: dict[str, bool], is_used: bool) -> None:
    """Only endpoints that may get new requests are used: ready ones that do not terminate."""
    found = read_slices([build_slice("a", [build_endpoint("10.0.0.1", **conditions)])], ANY)

    assert dict(found.roles_by_url) == (
        {"http://10.0.0.1:8000": "prefill_decode"} if is_used else {}
    )
    assert found.problem == ("" if is_used else "no endpoint is ready")


def test_ports() -> None:
    """The port is the only one, the one named http, or the one that the source names."""
    endpoints = [build_endpoint("10.0.0.1")]
    single = build_slice("a", endpoints, [("", 9000)])
    several = build_slice("b", endpoints, [("http", 8000), ("kv", 5600)])
    unclear = build_slice("c", endpoints, [("api", 8000), ("kv", 5600)])

    def list_urls(text: str, each: object) -> list[str]:
        assert isinstance(each, dict)
        return list(read_slices([each], parse_source_address(text)).roles_by_url)

    assert list_urls("k8s://n/app=x", single) == ["http://10.0.0.1:9000"]
    assert list_urls("k8s://n/app=x?scheme=https", single) == ["https://10.0.0.1:9000"]
    assert list_urls("k8s://n/app=x", several) == ["http://10.0.0.1:8000"]
    assert list_urls("k8s://n/app=x?port=api", unclear) == ["http://10.0.0.1:8000"]
    assert list_urls("k8s://n/app=x?port=8200", unclear) == ["http://10.0.0.1:8200"]
    assert read_slices([unclear], ANY).problem == (
        "slice c: which of its ports? Add ?port=NAME or ?port=NUMBER"
    )


def test_two_families_are_one_instance() -> None:
    """A dual-stack Service has two slices for the same pods; a single IPv6 one is used."""
    service = {"kubernetes.io__service_name": "vllm"}
    four = build_slice("four", [build_endpoint("10.0.0.1")], **service)
    six = build_slice("six", [build_endpoint("fd00::1")], family="IPv6", **service)

    assert list(read_slices([six, four], ANY).roles_by_url) == ["http://10.0.0.1:8000"]
    assert list(read_slices([six], ANY).roles_by_url) == ["http://[fd00::1]:8000"]


def test_a_label_with_an_unknown_role_is_said() -> None:
    """Instances whose label names an unknown role are not used, and the log says so."""
    odd = build_slice("odd", [build_endpoint("10.0.0.1")], ttft_otel__role="worker")

    found = read_slices([odd], ANY)

    assert not found.roles_by_url
    assert found.problem == "slice odd: its label says role 'worker'; add ?role=ROLE"
    assert read_slices([odd], parse_source_address("k8s://n/a=b?role=decode")).roles_by_url == {
        "http://10.0.0.1:8000": "decode"
    }
