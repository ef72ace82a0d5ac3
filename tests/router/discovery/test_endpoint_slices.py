# SPDX-License-Identifier: Apache-2.0
"""Which instances EndpointSlices name: readiness, ports, address families, labels."""

from __future__ import annotations

import pytest

from router.discovery.slice_server import build_endpoint, build_slice
from ttft_otel.router.discovery.discovery import parse_source_address
from ttft_otel.router.discovery.kubernetes_source import read_slices

ANY = parse_source_address("k8s://default/app=vllm")


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
