# SPDX-License-Identifier: Apache-2.0
"""For each kind of request on real servers: stages add up to the TTFT, nothing is unattributed, and the
trace is complete.
"""

from __future__ import annotations

from typing import Any

import pytest

from lab import ttft_client
from lab.ttft_client import TimedRequest
from tests.live.bench import LiveDeployment, make_parent_header, make_trace_id, read_breakdown
from ttft_otel.model import stages
from ttft_otel.model.endpoints import COMPLETIONS_PATH, RESPONSES_PATH
from ttft_otel.model.names import keys, span_names

KINDS: dict[str, dict[str, Any]] = {
    "text": {},
    "text plain": {"stream": False},
    "completion": {"path": COMPLETIONS_PATH},
    "completion plain": {"path": COMPLETIONS_PATH, "stream": False},
    "responses": {"path": RESPONSES_PATH},
    "responses plain": {"path": RESPONSES_PATH, "stream": False},
    "three chunks": {"words": 1300},
    "two answers": {"n": 2},
    "two answers plain": {"n": 2, "stream": False},
    "one image": {"pictures": (1,)},
    "same image again": {"pictures": (1,)},
    "two images": {"pictures": (2, 3)},
    "image plain": {"pictures": (4,), "stream": False},
    "image after a long text": {"pictures": (5,), "words": 1300},
}


def sum_span_stages(span: dict[str, Any]) -> tuple[int, int]:
    """(Σ stages + unattributed, total) of a ttft or encode span, in microseconds."""
    found = span["attributes"]
    parts = [value for key, value in found.items() if keys.parse_stage_attribute(key)]
    assert all(isinstance(value, int) and value >= 0 for value in parts)
    return sum(parts), found[keys.TOTAL_US]


def check_closed(spans: list[dict[str, Any]]) -> None:
    """Check that every parent is in the trace, every sum is exact and nothing was clamped."""
    ids = {span["span_id"] for span in spans} | {"c" * 16}
    assert [span for span in spans if span["parent_id"] not in ids] == []
    for span in spans:
        if span["name"] in (span_names.TTFT, span_names.ENCODE):
            total, length = sum_span_stages(span)
            assert total == length
            if span["attributes"][keys.ROLE] != "router":
                assert span["attributes"][keys.CLAMPED_US] <= max(1, length // 1000), span


@pytest.mark.untimed
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_closes_through_router_and_servers(epd: LiveDeployment, kind: str) -> None:
    """A request through router, the encoder and prefill_decode leaves one trace: every parent is in it,
    every sum is exact.
    """
    question = KINDS[kind]
    images = len(question.get("pictures", ()))
    trace = make_trace_id()

    answer = epd.send_request(epd.front_url, headers=make_parent_header(trace), **question)
    spans = epd.wait_for_trace(trace, lambda found: _is_complete(found, images))

    assert answer.status == 200
    check_closed(spans)
    for span in spans:
        if span["name"] in (span_names.TTFT, span_names.ENCODE):
            is_ours = span["attributes"][keys.ROLE] != "router"
            assert not is_ours or span["attributes"][keys.UNATTRIBUTED_US] == 0, span


def _is_complete(spans: list[dict[str, Any]], images: int) -> bool:
    """Server span and ttft span of the router, prefill_decode and one encoder per image."""
    servers = [span for span in spans if span["kind"] == "server"]
    trunks = [span for span in spans if span["name"] in (span_names.TTFT, span_names.ENCODE)]
    return len(servers) >= 2 + images and len(trunks) >= 2 + images


@pytest.mark.untimed
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_closes_on_cudas_runner(newer: LiveDeployment, kind: str) -> None:
    """The same holds on one server with the V2 runner and async scheduling."""
    found = read_breakdown(newer.send_request(newer.front_url, **KINDS[kind]))

    assert found[stages.UNATTRIBUTED] == 0
    assert sum(us for name, us in found.items() if name != "ttft") == found["ttft"]


@pytest.mark.untimed
def test_two_hundred_in_a_row_and_fifty_at_once_leave_whole_traces(epd: LiveDeployment) -> None:
    """After 200 requests in a row and 50 at once no span is missing."""
    traces = [make_trace_id() for _ in range(250)]
    for trace in traces[:200]:
        epd.send_request(epd.front_url, headers=make_parent_header(trace), max_tokens=1)
    many = [TimedRequest(headers=make_parent_header(trace), max_tokens=2) for trace in traces[200:]]
    ttft_client.send_timed_requests(epd.front_url, many)

    wanted = set(stages.STAGE_NAMES) - {
        "encoder.queue",
        "encoder.compute",
        "ec.transfer",
        "kv.transfer",
    }
    wanted -= {"prefill.stall", "pipeline"}
    for trace in traces:
        spans = epd.wait_for_trace(trace, lambda found: _is_complete(found, 0))
        own = [span for span in spans if span["attributes"].get(keys.ROLE) == "prefill_decode"]
        assert wanted <= {span["attributes"].get(keys.STAGE) for span in own}, trace
