# SPDX-License-Identifier: Apache-2.0
"""Requests that the router holds in front of a real server: how long, in which order, while it is busy.

What a request waited is measured by its client and by a proxy between router and server, which know nothing
of either. Every step of the server is slowed down, so that prompts last many steps on any machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from lab.delay_proxy import DelayProxy, ProxiedExchange, run_delay_proxy
from lab.local_servers import LocalServer
from lab.ttft_client import TimedResponse
from tests.live.bench import (
    LiveDeployment,
    make_parent_header,
    make_trace_id,
    read_breakdown,
    read_metric,
)
from tests.live.test_waits import STEP_MS, make_prompt
from ttft_otel.model.names import keys, metric_names
from ttft_otel.model.stages import HOLD, UNATTRIBUTED

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]

MAX_QUEUE_MS = 50
LONG_BLOCKS, SHORT_BLOCKS = 40, 4  # of one step each
HELD = 4
CLOCK_US = 2_000  # what two readings of one clock may differ in by rounding and order
MAX_GAP_MS = 100.0  # between an answer and the next request; a few on an idle machine
ATTEMPTS = 3  # programs beside these stretch single gaps
FLAGS = ("--routing-logic", "ttft", "--max-queue-ms", str(MAX_QUEUE_MS), "--trust-priority")


@pytest.fixture
def proxied(small: LiveDeployment) -> Iterator[tuple[LocalServer, DelayProxy]]:
    """A router that holds, and the proxy through which it reaches the server; it can predict prefills."""
    with (
        run_delay_proxy(small.front_url, 0.0) as proxy,
        small.control.inject_delay("forward", STEP_MS),
        small.build_router({"mono": proxy.url}, *FLAGS) as router,
    ):
        for number in range(100):  # until the tokenizer is there, and a line is fitted
            small.send_request(router.url, **make_prompt(1 + number % 5))
            if sum(read_metric(router.url, metric_names.ROUTER_PREFILL_SAMPLES)) >= 15:
                break
        yield router, proxy


def send_burst(
    bench: LiveDeployment, router: LocalServer, proxy: DelayProxy
) -> tuple[list[TimedResponse], list[str]]:
    """A long prompt, short ones while it is computed, and an urgent one last; answers, trace IDs."""
    traces = [make_trace_id() for _ in range(HELD + 1)]
    before = len(proxy.exchanges)
    with ThreadPoolExecutor(HELD + 1) as pool:
        sent = []
        for number, trace in enumerate(traces):
            fields = make_prompt(SHORT_BLOCKS if number else LONG_BLOCKS)
            if number == HELD:
                fields["extra"]["priority"] = -1
            headers = make_parent_header(trace)
            sent.append(pool.submit(bench.send_request, router.url, headers=headers, **fields))
            while not number and len(proxy.exchanges) == before:
                time.sleep(0.01)
            time.sleep(0.1)
        return [each.result() for each in sent], traces


def check_times(answer: TimedResponse, exchange: ProxiedExchange) -> int:
    """The microseconds that it was held, which the clocks of client and proxy must confirm."""
    found = read_breakdown(answer)
    ttft_us = found.pop("ttft")
    assert sum(found.values()) == ttft_us and found[UNATTRIBUTED] == 0
    assert answer.client_ttft_us is not None
    # Before the router has the request, and after its answer.
    beyond_us = answer.client_ttft_us - ttft_us
    assert -CLOCK_US <= beyond_us <= 0.05 * ttft_us + 50_000, (answer.client_ttft_us, ttft_us)
    own_us = sum(found[each] for each in found if each.startswith("router.") and each != HOLD)
    to_proxy_us = (exchange.began_ns - answer.started_ns) // 1000
    held_us = found.get(HOLD, 0)
    # What the router did besides, and the way, are all that it can have taken longer.
    assert -CLOCK_US <= to_proxy_us - held_us <= own_us + beyond_us + CLOCK_US, (found, to_proxy_us)
    return held_us


def find_reasons(bench: LiveDeployment, trace: str) -> list[str]:
    """Why the router held the request of this trace."""
    spans = bench.wait_for_trace(
        trace, lambda got: sum(each["name"] == "ttft" for each in got) == 2
    )
    return [each["attributes"][keys.QUEUE_REASON] for each in spans if each["name"] == HOLD]


def test_a_burst_is_held(small: LiveDeployment, proxied: tuple[LocalServer, DelayProxy]) -> None:
    """Each hold is a stage of the right length, sums close, the urgent one overtakes, the server is busy."""
    router, proxy = proxied
    gaps_ms = []
    for _ in range(ATTEMPTS):
        answers, traces = send_burst(small, router, proxy)
        assert [each.status for each in answers] == [200] * (HELD + 1)
        exchanges = [
            each
            for answer in answers
            for each in proxy.exchanges
            if answer.request_id.encode() in each.data
        ]
        held_us = [check_times(*each) for each in zip(answers, exchanges, strict=True)]
        assert held_us[0] == 0 and min(held_us[1:]) > MAX_QUEUE_MS * 1000, held_us
        order = sorted(range(HELD + 1), key=lambda at: exchanges[at].began_ns)
        assert order == [0, HELD, *range(1, HELD)], held_us
        reasons = [find_reasons(small, each) for each in traces]
        assert reasons == [[], *[["priority"]] * (HELD - 1), ["max_queue"]]
        # From when all that was sent is answered until the next one is there.
        done_ns = [
            max(exchanges[each].answered_ns for each in order[:at]) for at in range(1, HELD + 1)
        ]
        gaps_ms = [
            (exchanges[at].began_ns - done) / 1e6
            for at, done in zip(order[1:], done_ns, strict=True)
        ]
        if max(gaps_ms) < MAX_GAP_MS:
            break
    assert max(gaps_ms) < MAX_GAP_MS, gaps_ms
    assert read_metric(router.url, metric_names.ROUTER_HOLDS + '_total{result="sent"}') >= [HELD]
