# SPDX-License-Identifier: Apache-2.0
"""The resources of spans and metrics: what the operator's variables and the SDK's detectors add to ours."""

from __future__ import annotations

import pytest

from ttft_otel.exporter.spans.resource_cache import MAX_SERVICES, ResourceCache
from ttft_otel.model.names import keys


def test_operator_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator's attributes and the detectors that are asked for are in the resource; the former win."""
    given = {"k8s.pod.name": "vllm-0", "service.version": "1.2", "host.name": "mine"}
    text = ",".join(f"{name}={value}" for name, value in given.items())
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", text)
    monkeypatch.setenv("OTEL_EXPERIMENTAL_RESOURCE_DETECTORS", "host")
    settings = {keys.ENGINE_MAX_SEQS: 64, keys.ENGINE_ASYNC: 0}  # told by the host, as integers

    found = ResourceCache(4711, engine_settings=settings).get("vllm").attributes
    assert {name: found[name] for name in given} == given and found["host.arch"]
    assert (found["service.name"], found["process.pid"]) == ("vllm", 4711)
    assert settings.items() <= found.items()


def test_resources_are_bounded() -> None:
    """More service names than roles share one resource, whatever the records claim."""
    resources = ResourceCache(1)
    found = [resources.get(f"service-{number}") for number in range(100)]
    assert len({id(each) for each in found}) <= MAX_SERVICES + 1


def test_instances_of_several_processes_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of one server share the operator's service.instance.id on spans, and never on sums."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=pod-1")
    found = set()
    for pid in (1, 2):
        resources = ResourceCache(pid, True)
        spans = resources.get("vllm")
        assert spans.attributes["service.instance.id"] == "pod-1"
        found.add(resources.build_metrics_resource(spans).attributes["service.instance.id"])

    assert found == {"pod-1:1", "pod-1:2"}


def test_spans_are_marked() -> None:
    """Spans of a process that counts itself say so, for the collector; others do not."""
    assert ResourceCache(1, True).get("vllm").attributes[keys.METRICS_SOURCE] == "exporter"
    assert keys.METRICS_SOURCE not in ResourceCache(1).get("vllm").attributes
