# SPDX-License-Identifier: Apache-2.0
"""Values for other charts' Tempo and Prometheus say what this repository's own configuration of them says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

CHECKOUT = Path(__file__).parents[1]
STORAGE = CHECKOUT / "deploy" / "kubernetes" / "storage"
GUIDE = CHECKOUT / "docs" / "guides" / "kubernetes.md"
TEMPO = yaml.safe_load((CHECKOUT / "grafana/tempo/tempo.yaml").read_text("utf-8"))
PROMETHEUS = yaml.safe_load((CHECKOUT / "grafana/prometheus/prometheus.yml").read_text("utf-8"))
OUR_CHART = CHECKOUT / "deploy/helm/ttft-otel/values.yaml"


def load_values(name: str) -> Any:
    """The values of the file NAME-values.yaml."""
    return yaml.safe_load((STORAGE / f"{name}-values.yaml").read_text("utf-8"))


def test_one_process() -> None:
    """Tempo on object storage: the limits, the messages' size and the days of the one in compose."""
    tempo = load_values("tempo")["tempo"]
    receiver = TEMPO["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]
    limits = TEMPO["overrides"]["defaults"]["ingestion"]
    retention = TEMPO["backend_worker"]["compaction"]["block_retention"]

    assert tempo["receivers"]["otlp"]["protocols"]["grpc"] == receiver
    assert tempo["overrides"]["defaults"]["ingestion"] == limits
    assert tempo["retention"] == retention
    assert tempo["storage"]["trace"]["backend"] == "s3"


def test_services_apart() -> None:
    """Tempo's services with Kafka: as many consumers as partitions, and room for a batch of ours."""
    values = load_values("tempo-distributed")
    partitions = values["ingest"]["kafka"]["auto_create_topic_default_partitions"]
    limits = TEMPO["overrides"]["defaults"]["ingestion"]
    receiver = TEMPO["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]

    assert values["blockBuilder"]["replicas"] == values["liveStore"]["replicas"] == partitions
    apart = values["overrides"]["defaults"]["ingestion"]
    assert apart["rate_limit_bytes"] > limits["rate_limit_bytes"]
    found = values["traces"]["otlp"]["grpc"]["receiverConfig"]
    assert found["max_recv_msg_size_mib"] == receiver["max_recv_msg_size_mib"]


def test_prometheus() -> None:
    """The dashboards' names, late samples and exemplars are as in compose, and native histograms leave it."""
    spec = load_values("prometheus")["prometheus"]["prometheusSpec"]

    assert spec["otlp"]["translationStrategy"] == PROMETHEUS["otlp"]["translation_strategy"]
    late = PROMETHEUS["storage"]["tsdb"]["out_of_order_time_window"]
    assert spec["tsdb"]["outOfOrderTimeWindow"] == late
    assert spec["exemplars"]["maxSize"] == PROMETHEUS["storage"]["exemplars"]["max_exemplars"]
    assert spec["enableOTLPReceiver"] is True
    (remote,) = spec["remoteWrite"]
    assert remote["sendNativeHistograms"] is remote["sendExemplars"] is True


@pytest.mark.parametrize("path", sorted(STORAGE.iterdir()), ids=lambda path: path.name)
def test_told(path: Path) -> None:
    """Each file is named in the guide, has no secret, and names settings of our chart that exist."""
    text = path.read_text("utf-8")
    assert path.name in GUIDE.read_text("utf-8")
    keys = re.findall(r"^ *(?:access|secret)_key: (.*)$", text, re.M)
    assert all(each.startswith("${") for each in keys)
    ours = yaml.safe_load(OUR_CHART.read_text("utf-8"))["collector"]
    named = re.findall(r"collector\.(\w+)=", text)
    assert named and set(named) <= set(ours)
