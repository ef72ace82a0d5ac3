# SPDX-License-Identifier: Apache-2.0
"""For each kind of request on real servers: stages add up to the TTFT, nothing is unattributed, and the
trace is complete. test_ec_nixl.py has it of encodings over NIXL.
"""

from __future__ import annotations

from typing import Any

import pytest

from lab import ttft_client
from lab.ttft_client import TimedRequest
from tests.live.bench import (
    LiveDeployment,
    get_trunks_by_role,
    list_trunks,
    make_parent_header,
    make_trace_id,
    read_breakdown,
)
from ttft_otel.model import stages
from ttft_otel.model.endpoints import COMPLETIONS_PATH, RESPONSES_PATH
from ttft_otel.model.names import keys, span_names

TEXTS: dict[str, dict[str, Any]] = {
    "text": {},
    "text plain": {"stream": False},
    "completion": {"path": COMPLETIONS_PATH},
    "completion plain": {"path": COMPLETIONS_PATH, "stream": False},
}
KINDS: dict[str, dict[str, Any]] = {
    **TEXTS,
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


def check_closed(spans: list[dict[str, Any]]) -> None:
    """Check that every parent is in the trace, every sum is exact, and of servers nothing is left over."""
    ids = {span["span_id"] for span in spans} | {"c" * 16}
    assert [span for span in spans if span["parent_id"] not in ids] == []
    for found in list_trunks(spans):
        parts = [value for key, value in found.items() if keys.parse_stage_attribute(key)]
        assert all(isinstance(value, int) and value >= 0 for value in parts)
        assert sum(parts) == found[keys.TOTAL_US]
        if found[keys.ROLE] != "router":
            assert found[keys.UNATTRIBUTED_US] == 0, found
            assert found[keys.CLAMPED_US] <= max(1, sum(parts) // 1000), found


@pytest.mark.untimed
def test_each_kind_closes_through_router_and_servers(epd: LiveDeployment) -> None:
    """A request through router, the encoder and prefill_decode leaves one whole trace."""
    traces = {}
    for kind, fields in KINDS.items():
        answer, traces[kind] = epd.send_traced(**fields)
        assert answer.status == 200, kind
    for kind, trace in traces.items():
        encoders = ["encode" for _ in KINDS[kind].get("pictures", ())]
        check_closed(epd.wait_for_roles(trace, "router", "prefill_decode", *encoders))


@pytest.mark.untimed
def test_each_kind_closes_on_cudas_runner(newer: LiveDeployment) -> None:
    """The same holds on one server with the V2 runner and async scheduling."""
    for kind, fields in KINDS.items():
        found = read_breakdown(newer.send_request(newer.front_url, **fields))
        assert found[stages.UNATTRIBUTED] == 0, kind
        assert sum(us for name, us in found.items() if name != "ttft") == found["ttft"], kind


@pytest.mark.untimed
def test_many_in_a_row_and_at_once_leave_whole_traces(epd: LiveDeployment) -> None:
    """After 80 requests in a row and 50 at once no span is missing."""
    traces = [make_trace_id() for _ in range(130)]
    for trace in traces[:80]:
        epd.send_request(epd.front_url, headers=make_parent_header(trace), max_tokens=1)
    many = [TimedRequest(headers=make_parent_header(trace), max_tokens=2) for trace in traces[80:]]
    ttft_client.send_timed_requests(epd.front_url, many)

    wanted = set(stages.STAGE_NAMES) - {
        "encoder.queue", "encoder.compute", "ec.transfer", "kv.transfer", "prefill.stall", "pipeline",
    }  # fmt: skip
    for trace in traces:
        spans = epd.wait_for_roles(trace, "router", "prefill_decode")
        own = [span for span in spans if span["attributes"].get(keys.ROLE) == "prefill_decode"]
        assert wanted <= {span["attributes"].get(keys.STAGE) for span in own}, trace


def test_each_kind_closes_on_prefill_and_decode(pd: LiveDeployment) -> None:
    """A request through router, prefill and decode leaves one whole trace, with its wait for KV blocks."""
    traces = {}
    for kind, fields in TEXTS.items():
        answer, traces[kind] = pd.send_traced(prompt=pd.new_prompt(), words=300, **fields)
        assert answer.status == 200
        timing = read_breakdown(answer)
        assert sum(us for name, us in timing.items() if name != "ttft") == timing["ttft"]
    for trace in traces.values():
        spans = pd.wait_for_roles(trace, "router", "prefill", "decode", also=span_names.KV_KEPT)
        check_closed(spans)
        found = get_trunks_by_role(spans)
        assert found["decode"][keys.name_stage_attribute("kv.transfer")] > 0
        # A connector's call that has nothing to do, and whose process had to wait for its core.
        assert found["prefill"].get(keys.name_stage_attribute("kv.transfer"), 0) < 5_000
