# SPDX-License-Identifier: Apache-2.0
"""vLLM's features on one real server: LoRA, structured outputs, priorities, pauses, sleep mode, background
responses. Answers are fine, sums close, no hook fails, and nothing is left behind.

Drafts: test_alone.py. Pauses that keep what runs: test_waits.py. What this machine cannot run is in
docs/limits.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lab import ttft_client
from tests.live.bench import LiveDeployment, read_breakdown
from tests.live.conftest import ADAPTERS
from ttft_otel.model import stages, timing
from ttft_otel.model.names import header_names, keys, metric_names

MAX_WAIT_S = 30.0
LONG_TOKENS = 4000  # some ten seconds, unless it is aborted

KINDS: dict[str, dict[str, Any]] = {
    "adapter": {"model": ADAPTERS[0]},
    "adapter plain": {"model": ADAPTERS[0], "stream": False},
    "choice": {"extra": {"structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": False}},
    "urgent": {"extra": {"priority": -5}},
    "two answers of an adapter": {"model": ADAPTERS[0], "n": 2},
    "completion": {"path": ttft_client.COMPLETIONS_PATH, "words": 80},
    "responses": {"path": ttft_client.RESPONSES_PATH},
}


@pytest.fixture(autouse=True)
def check_nothing_is_left(features: LiveDeployment) -> Iterator[None]:
    """After each test no hook has failed, nothing awaits a first token, and the server still closes."""
    yield
    deadline = time.monotonic() + MAX_WAIT_S
    while features.sum_metric(metric_names.PENDING) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert features.sum_metric(metric_names.PENDING) == 0
    assert features.sum_metric(f"{metric_names.HOOK_ERRORS}_total") == 0
    assert features.list_complaints("mono") == []
    after = read_breakdown(features.send_request(features.front_url, max_tokens=2))
    assert after[stages.UNATTRIBUTED] == 0


def test_each_feature_closes(features: LiveDeployment) -> None:
    """Server-Timing and span add up, with nothing unattributed."""
    traces = {}
    for kind, fields in KINDS.items():
        answer, traces[kind] = features.send_traced(**fields)
        assert answer.status == 200, (kind, answer.body[:300])
        assert kind != "choice" or answer.text in ("yes", "no")
        assert read_breakdown(answer)[stages.UNATTRIBUTED] == 0, kind
    for kind, trace in traces.items():
        found = features.fetch_ttft(trace)
        assert found[keys.UNATTRIBUTED_US] == 0 and keys.ERROR_TYPE not in found, kind


def test_a_pause_aborts(features: LiveDeployment) -> None:
    """/pause aborts what runs and what waits: who has no token has no TTFT, and died where it was."""
    try:
        with (
            features.run_request(max_tokens=LONG_TOKENS) as running,
            features.run_request() as waiting,
        ):
            features.call("/pause?mode=abort")
            (first, _), (second, trace) = running.result(), waiting.result()
    finally:
        features.call("/resume")

    assert first.status == second.status == 200
    assert read_breakdown(first)[stages.UNATTRIBUTED] == 0
    assert timing.reports_no_token(second.headers[header_names.SERVER_TIMING])
    found = features.fetch_ttft(trace)
    assert (found[keys.ERROR_TYPE], found[keys.DIED_IN]) == ("error", "prefill.queue")


def test_an_engine_that_sleeps_is_a_wait(features: LiveDeployment) -> None:
    """What comes meanwhile waits in the queue, and is told so."""
    features.call("/sleep?level=0&mode=abort")  # level 0 is all that a CPU can
    assert features.call("/is_sleeping", "GET") == {"is_sleeping": True}
    timer = threading.Timer(0.8, features.call, ("/wake_up?tags=scheduling",))
    timer.start()
    try:
        found = read_breakdown(features.send_request(features.front_url, max_tokens=2))
    finally:
        timer.join()

    assert found["prefill.queue"] > 400_000
    assert found[stages.UNATTRIBUTED] == 0


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_background_response(features: LiveDeployment, is_cancelled: bool) -> None:
    """It is answered at once, and traced all the same, below its request, whichever is first."""
    answer, trace = features.send_traced(
        path=ttft_client.RESPONSES_PATH,
        stream=False,
        max_tokens=LONG_TOKENS if is_cancelled else 8,
        # A random model may stop at any token otherwise.
        extra={"background": True, "store": True, "ignore_eos": True},
    )
    assert answer.status == 200, answer.body[:300]
    place = f"/v1/responses/{answer.json()['id']}"
    assert answer.json()["status"] == "queued"
    if is_cancelled:
        time.sleep(0.3)
        assert features.call(f"{place}/cancel")["status"] == "cancelled"
    else:
        deadline = time.monotonic() + MAX_WAIT_S
        while features.call(place, "GET")["status"] in ("queued", "in_progress"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    spans = features.wait_for_trace(
        trace, lambda got: any(keys.DIRECT in s["attributes"] for s in got) and len(got) > 2
    )

    (http,) = [span for span in spans if span["kind"] == "server"]
    assert http["name"] == "POST /v1/responses" and keys.ERROR_TYPE not in http["attributes"]
    (own,) = [span for span in spans if keys.DIRECT in span["attributes"]]
    assert own["parent_id"] == http["span_id"]
    assert (own["attributes"].get(keys.ERROR_TYPE) == keys.ERROR_CANCELLED) is is_cancelled
    assert features.fetch_ttft(trace)[keys.UNATTRIBUTED_US] == 0
