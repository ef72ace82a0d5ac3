# SPDX-License-Identifier: Apache-2.0
"""Resources of a process that counts its requests: told apart, and marked for the collector."""

from __future__ import annotations

import pytest

from ttft_otel.exporter.spans.resource_cache import ResourceCache
from ttft_otel.model.names import keys


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
