# SPDX-License-Identifier: Apache-2.0
"""Media items that were encoded twice are logged and counted."""

from __future__ import annotations

import pytest

from router import fake_instances
from router.fake_instances import TRACEPARENT, InstancePlan
from ttft_otel import testing
from ttft_otel.model.names import metric_names
from ttft_otel.model.timing import EncoderCacheCounts, format_server_timing
from ttft_otel.router.disagg.encoders import LOG_INTERVAL_US, RecomputedMediaLog
from ttft_otel.router.timeline import Attempt
from ttft_otel.router.types import parse_instance_url

METRIC_NAME = f"{metric_names.ROUTER_RECOMPUTED_ITEMS}_total"
INSTANCES = [
    parse_instance_url(f"http://127.0.0.1:{port}", "prefill_decode") for port in range(8001, 8007)
]


def build_attempt(number: int, recomputed: int) -> Attempt:
    """A request that is over, at one of the servers."""
    items = EncoderCacheCounts(4, 4 - recomputed, 0, recomputed, 1000)
    path, instance = "/v1/chat/completions", INSTANCES[number]
    said = format_server_timing({}, 0, 0, ec=items)
    return Attempt(instance.leg, path, instance, "", 0, timing_header=said)


def test_one_line_a_minute(clock: testing.FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    """The first case is logged at once, then one line a minute with sum, instance, likely cause and link."""
    items = RecomputedMediaLog()
    items.record_attempt(build_attempt(0, 0))
    assert not caplog.messages
    items.record_attempt(build_attempt(0, 2))
    (line,) = caplog.messages
    assert "2, in 1 requests" in line and "by http://127.0.0.1:8001 (2). Possible" in line
    assert "docs/router.md" in line and caplog.records[0].levelname == "WARNING"

    for number, recomputed in ((1, 1), (2, 2), (3, 3), (4, 4), (5, 1)):
        clock.tick(10_000_000)
        items.record_attempt(build_attempt(number, recomputed))
    assert len(caplog.messages) == 1
    clock.tick(LOG_INTERVAL_US - 50_000_000)
    items.record_attempt(build_attempt(1, 4))
    assert len(caplog.messages) == 2
    line = caplog.messages[-1]
    assert "15, in 6 requests" in line and line.count("http://") == 4
    assert "http://127.0.0.1:8002 (5), http://127.0.0.1:8005 (4)" in line and " and 1 more." in line


def test_those_that_say_nothing_count_nothing() -> None:
    """Servers that do not report the number, or no timings, count as no item and cause no error."""
    items = RecomputedMediaLog()
    silent, plain = build_attempt(0, 1), build_attempt(0, 1)
    cut_off = build_attempt(0, 1)
    silent.record_server_timing("")
    plain.record_server_timing("ttft;dur=0.000")
    cut_off.record_server_timing(cut_off.timing_header[:-2])
    before = INSTANCES[0].recomputed_items
    for each in (silent, plain, cut_off):
        items.record_attempt(each)
    assert INSTANCES[0].recomputed_items == before


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_what_a_server_encoded_again_is_on_metrics(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """By leg and instance, 0 as long as all is well; encoders have no such count."""
    plan = InstancePlan(
        encoder_cache=EncoderCacheCounts(items=3, remote=1, local=0, recomputed=2, bytes=4096)
    )
    async with fake_instances.run_routed_instances([plan, None], [None]) as (router, e, one, two):
        for _ in range(4):
            assert (await router.post_chat("a", stream=stream, traceparent=TRACEPARENT))[0] == 200
        await router.wait_for_records(8)
        lines = router.app.metrics.render_text().decode().splitlines()
        assert [line for line in lines if line.startswith(METRIC_NAME)] == [
            f'{METRIC_NAME}{{instance="{one.url}",leg="prefill_decode"}} 4.0',
            f'{METRIC_NAME}{{instance="{two.url}",leg="prefill_decode"}} 0.0',
        ]
        assert len(caplog.messages) == 1 and one.url in caplog.messages[0]


async def test_without_encoders_there_is_no_such_count() -> None:
    """Nothing can be encoded twice where nobody encodes ahead."""
    async with fake_instances.run_routed_instances() as (router, one):
        text = router.app.metrics.render_text().decode()
        assert metric_names.ROUTER_ATTEMPTS in text and f"{METRIC_NAME}{{" not in text
