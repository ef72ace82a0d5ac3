# SPDX-License-Identifier: Apache-2.0
"""What the router records of a real server's prompts, caches and speed equals what the server reports."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lab import local_deployment
from lab.local_servers import LocalServer
from tests.live.bench import (
    LiveDeployment,
    read_breakdown,
    read_metric,
)
from ttft_otel.model.names import env_names, keys, metric_names, span_names

BLOCK_TOKENS = 128  # tokens of a KV block on CPU
WORDS = (100, 400, 1200)
ROUTING_FLAGS = ("--routing-logic", "ttft")
READ_PROMPTS_METRIC = metric_names.ROUTER_PROMPTS + '_total{result="read"}'


@pytest.fixture
def routed(newer: LiveDeployment) -> Iterator[LocalServer]:
    """A router with TTFT prediction in front of one server."""
    sink = {env_names.OTEL_EXPORTER_OTLP_ENDPOINT: newer.fleet.get_url("receiver")}
    with LocalServer(
        local_deployment.build_router_command({"mono": [newer.front_url]}, sink, *ROUTING_FLAGS)
    ) as router:
        yield router


def list_attribute_values(spans: list[dict[str, Any]], name: str, key: str) -> list[Any]:
    """The values of an attribute in all spans of that name that have it."""
    return [
        each["attributes"][key]
        for each in spans
        if each["name"] == name and key in each["attributes"]
    ]


def test_prompts_prefixes_and_predictions(newer: LiveDeployment, routed: LocalServer) -> None:
    """After some prompts the router has a fit, and expects of a repeated one the engine's cached tokens."""
    for _ in range(100):  # until the tokenizer is there
        newer.send_request(routed.url, prompt=f"{newer.new_picture_seed()}", max_tokens=1)
        if read_metric(routed.url, READ_PROMPTS_METRIC):
            break
        time.sleep(1)
    before = read_metric(routed.url, READ_PROMPTS_METRIC)[0]
    for number in range(15):
        words = WORDS[number % len(WORDS)]
        answer = newer.send_request(
            routed.url, prompt=f"{newer.new_picture_seed()}", words=words, max_tokens=1
        )
        assert read_breakdown(answer)["router.tokenize"] > 0
    asked = {"prompt": f"{newer.new_picture_seed()}", "words": 1200, "max_tokens": 1}
    traces = []
    for _ in range(2):
        answer, trace = newer.send_traced(routed.url, **asked)
        assert answer.status == 200
        traces.append(trace)
    spans = newer.wait_for_trace(
        traces[1], lambda found: sum(each["name"] == span_names.TTFT for each in found) == 2
    )

    (predicted,) = list_attribute_values(spans, span_names.TTFT, keys.PREDICTED_MS)
    (believed,) = list_attribute_values(spans, "router.route", keys.ROUTE_CACHED_TOKENS)
    (found,) = list_attribute_values(spans, span_names.TTFT, keys.CACHED_TOKENS)
    assert predicted > 0
    assert (
        found > 1000 and found <= json.loads(believed)[0] < found + BLOCK_TOKENS
    )  # stored as text
    assert read_metric(routed.url, READ_PROMPTS_METRIC) == [before + 17]
    assert read_metric(routed.url, metric_names.ROUTER_PREFILL_SAMPLES)[0] >= 18
    assert read_metric(routed.url, metric_names.ROUTER_PENDING_TOKENS) == [0]
    (mape,) = read_metric(routed.url, metric_names.ROUTER_PREDICTION_MAPE)
    assert 0 < mape < 10  # how good it is depends on what else two cores do
