# SPDX-License-Identifier: Apache-2.0
"""The resources of spans and metrics: what the operator's variables and the SDK's detectors add to ours."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from opentelemetry.util import _importlib_metadata

from ttft_otel.exporter.spans.resource_cache import ResourceCache
from ttft_otel.model.names import keys


def test_operator_resource(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator's attributes and detectors of entry points are in the resource; the former win."""
    (tmp_path / "own_place.py").write_text(
        "from opentelemetry.sdk.resources import Resource, ResourceDetector\n"
        "class Detector(ResourceDetector):\n"
        "    def detect(self):\n"
        "        return Resource({'container.id': 'c0ffee', 'k8s.pod.name': 'guessed'})\n"
    )
    folder = tmp_path / "own_place-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: own-place\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(
        "[opentelemetry_resource_detector]\nown_place = own_place:Detector\n"
    )
    given = {
        "k8s.namespace.name": "serving",
        "k8s.pod.name": "vllm-0",
        "service.namespace": "chat",
        "service.version": "1.2",
        "deployment.environment.name": "staging",
    }
    text = ",".join(f"{name}={value}" for name, value in given.items())
    monkeypatch.syspath_prepend(tmp_path)
    # Another test may have looked for detectors: the API keeps what it found.
    _importlib_metadata._original_entry_points_cached.cache_clear()
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", text)
    monkeypatch.setenv("OTEL_EXPERIMENTAL_RESOURCE_DETECTORS", "host,own_place")

    found = ResourceCache(4711).get("vllm").attributes
    assert {name: found[name] for name in given} == given
    assert found["container.id"] == "c0ffee"
    assert found["host.name"] == socket.gethostname()
    assert (found["service.name"], found["process.pid"]) == ("vllm", 4711)


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
