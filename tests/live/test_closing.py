# SPDX-License-Identifier: Apache-2.0
"""Every kind of request closes on real servers: stages add up, nothing unattributed, one whole trace."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.live.bench import Bench, breakdown
from ttft_otel import names, stages
from ttft_otel.lab import client
from ttft_otel.lab.client import Question

KINDS: dict[str, dict[str, Any]] = {
    "text": {},
    "text plain": {"stream": False},
    "completion": {"path": client.COMPLETIONS},
    "completion plain": {"path": client.COMPLETIONS, "stream": False},
    "responses": {"path": client.RESPONSES},
    "responses plain": {"path": client.RESPONSES, "stream": False},
    "three chunks": {"words": 1300},
    "two answers": {"n": 2},
    "two answers plain": {"n": 2, "stream": False},
    "one image": {"pictures": (1,)},
    "same image again": {"pictures": (1,)},
    "two images": {"pictures": (2, 3)},
    "image plain": {"pictures": (4,), "stream": False},
    "image after a long text": {"pictures": (5,), "words": 1300},
}


def trace_id() -> str:
    """A caller's own trace, sampled."""
    return os.urandom(16).hex()


def parent(trace: str) -> dict[str, str]:
    """The header that makes a request part of it."""
    return {names.TRACEPARENT: f"00-{trace}-{'c' * 16}-01"}


def sums(span: dict[str, Any]) -> tuple[int, int]:
    """(Σ stages + unattributed, total) of a ttft or encode span, in microseconds."""
    found = span["attributes"]
    parts = [value for key, value in found.items() if names.stage_of(key)]
    assert all(isinstance(value, int) and value >= 0 for value in parts)
    return sum(parts), found[names.TOTAL_US]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_closes_through_router_and_servers(epd: Bench, kind: str) -> None:
    """Client, router, E and PD: one trace, every parent in it, every sum exact."""
    question = KINDS[kind]
    images = len(question.get("pictures", ()))
    trace = trace_id()

    answer = epd.ask(epd.front, headers=parent(trace), **question)
    spans = epd.trace(trace, lambda found: _complete(found, images))

    assert answer.status == 200
    ids = {span["span_id"] for span in spans} | {"c" * 16}
    assert [span for span in spans if span["parent_id"] not in ids] == []
    for span in spans:
        if span["name"] in (names.TTFT, names.ENCODE):
            total, whole = sums(span)
            assert total == whole
            if span["attributes"][names.ROLE] != "router":
                assert span["attributes"][names.UNATTRIBUTED_US] == 0, span
                assert span["attributes"][names.CLAMPED_US] <= max(1, whole // 1000)


def _complete(spans: list[dict[str, Any]], images: int) -> bool:
    """Server span and ttft span of the router, PD and one E per image."""
    servers = [span for span in spans if span["kind"] == "server"]
    trunks = [span for span in spans if span["name"] in (names.TTFT, names.ENCODE)]
    return len(servers) >= 2 + images and len(trunks) >= 2 + images


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_closes_on_cudas_runner(newer: Bench, kind: str) -> None:
    """The same on one server with the V2 runner and async scheduling."""
    found = breakdown(newer.ask(newer.front, **KINDS[kind]))

    assert found[stages.UNATTRIBUTED] == 0
    assert sum(us for name, us in found.items() if name != "ttft") == found["ttft"]


def test_two_hundred_in_a_row_and_fifty_at_once_leave_whole_traces(epd: Bench) -> None:
    """No span is missing, whatever the load."""
    traces = [trace_id() for _ in range(250)]
    for trace in traces[:200]:
        epd.ask(epd.front, headers=parent(trace), max_tokens=1)
    many = [Question(headers=parent(trace), max_tokens=2) for trace in traces[200:]]
    client.ask_all(epd.front, many)

    wanted = set(stages.NAMES) - {"encoder.queue", "encoder.compute", "ec.transfer", "kv.transfer"}
    wanted -= {"prefill.stall"}
    for trace in traces:
        spans = epd.trace(trace, lambda found: _complete(found, 0))
        own = [span for span in spans if span["attributes"].get(names.ROLE) == "prefill_decode"]
        assert wanted <= {span["attributes"].get(names.STAGE) for span in own}, trace
