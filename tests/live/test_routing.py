# SPDX-License-Identifier: Apache-2.0
"""What the router believes of a real server's prompts, caches and speed is what that server says itself."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.live.bench import Bench, breakdown
from tests.live.test_closing import parent, trace_id
from ttft_otel import names
from ttft_otel.lab import fleet
from ttft_otel.lab.servers import Server

BLOCK = 128  # tokens of a KV block on CPU
WORDS = (100, 400, 1200)
ROUTED = ("--routing-logic", "ttft")
READ = names.METRIC_PROMPTS + '_total{result="read"}'


@pytest.fixture
def routed(newer: Bench) -> Iterator[Server]:
    """A router that predicts before the one server."""
    sink = {names.ENV_ENDPOINT: newer.fleet.url("receiver")}
    with Server(fleet.router({"mono": [newer.front]}, sink, *ROUTED)) as router:
        yield router


def attributes(spans: list[dict[str, Any]], name: str, key: str) -> list[Any]:
    """An attribute of all spans of that name that have it."""
    return [
        each["attributes"][key]
        for each in spans
        if each["name"] == name and key in each["attributes"]
    ]


def metric(url: str, name: str) -> list[float]:
    """A metric's values."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return [float(value) for value in re.findall(rf"^{name}.* (\S+)$", text, re.M)]


def test_prompts_prefixes_and_predictions(newer: Bench, routed: Server) -> None:
    """After some prompts it has a fit; a prompt that comes again has as much cached as the engine finds."""
    for _ in range(100):  # until the tokenizer is there
        newer.ask(routed.url, prompt=f"{newer.fresh()}", max_tokens=1)
        if metric(routed.url, READ):
            break
        time.sleep(1)
    before = metric(routed.url, READ)[0]
    for number in range(15):
        words = WORDS[number % len(WORDS)]
        answer = newer.ask(routed.url, prompt=f"{newer.fresh()}", words=words, max_tokens=1)
        assert breakdown(answer)["router.tokenize"] > 0
    prompt = f"{newer.fresh()}"
    traces = [trace_id() for _ in range(2)]
    for trace in traces:
        asked = {"prompt": prompt, "words": 1200, "max_tokens": 1, "headers": parent(trace)}
        assert newer.ask(routed.url, **asked).status == 200
    spans = newer.trace(
        traces[1], lambda found: sum(each["name"] == names.TTFT for each in found) == 2
    )

    (predicted,) = attributes(spans, names.TTFT, names.PREDICTED_MS)
    (believed,) = attributes(spans, "router.route", names.ROUTE_CACHED)
    (found,) = attributes(spans, names.TTFT, names.CACHED_TOKENS)
    assert predicted > 0
    assert found > 1000 and found <= json.loads(believed)[0] < found + BLOCK  # stored as text
    assert metric(routed.url, READ) == [before + 17]
    assert metric(routed.url, names.METRIC_FIT_SAMPLES)[0] >= 18
    assert metric(routed.url, names.METRIC_PENDING_TOKENS) == [0]
    (mape,) = metric(routed.url, names.METRIC_PREDICTION_ERROR)
    assert 0 < mape < 10  # how good it is depends on what else two cores do
