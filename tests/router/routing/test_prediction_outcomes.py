# SPDX-License-Identifier: Apache-2.0
"""What became of a prediction is on the span of its request, and the same as on the metrics."""

from __future__ import annotations

import statistics

import pytest

from router import fake_instances, scripted_knowledge
from router.fake_instances import InstancePlan
from router.routing.test_routing_service import (
    COMPLETIONS_PATH,
    TRACED_HEADERS,
    build_completion,
    get_routing,
    teach_prefills,
)
from ttft_otel.model.names import keys
from ttft_otel.model.record import Ttft


async def measure_ttft(router: fake_instances.RunningRouter, stream: bool = True) -> Ttft:
    """One request's TTFT as the router tells it."""
    await router.post_body(COMPLETIONS_PATH, build_completion(stream=stream), **TRACED_HEADERS)
    record = (await router.wait_for_records(2))[0]
    assert record.ttft is not None
    return record.ttft


@pytest.mark.parametrize(("seconds", "late"), [(0.0001, True), (0.001, False)])
async def test_the_error_is_what_came_less_what_was_predicted(seconds: float, late: bool) -> None:
    """Of the leg that was predicted, from sending until its first token; negative: it came sooner."""
    leg = {"router.hop.mono", "mono.prefill.compute", "unattributed"}
    off_ms: list[float] = []

    for _ in range(5):  # whose median is not a busy moment's
        async with fake_instances.run_routed_instances(
            [InstancePlan({"prefill.compute": 300})],
            routing=scripted_knowledge.build_routing_factory(),
        ) as (router, one):
            teach_prefills(get_routing(router), one.url, seconds)
            ttft = await measure_ttft(router)
            predicted = ttft.attributes[keys.PREDICTED_MS]
            error = ttft.attributes[keys.PREDICTION_ERROR_MS]
            assert isinstance(predicted, int) and isinstance(error, int)
            took = sum(piece.end - piece.start for piece in ttft.pieces if piece.name in leg) / 1000
            off_ms.append(predicted + error - took)
            assert (error > 150) if late else (error < -150)
            mape = get_routing(router).prefill_policy.state.outcomes[one.url].mape
            assert mape == pytest.approx(abs(error) / (predicted + error), abs=0.01)
    assert abs(statistics.median(off_ms)) <= 2, off_ms


@pytest.mark.parametrize(("taught", "stream", "told"), [(0.0, True, False), (0.0001, False, True)])
async def test_without_both_there_is_no_error(taught: float, stream: bool, told: bool) -> None:
    """Nothing was predicted yet; or an untraced answer came as a whole, whose first token nobody saw."""
    async with fake_instances.run_routed_instances(
        [InstancePlan(sends_timing=False)], routing=scripted_knowledge.build_routing_factory()
    ) as (router, one):
        if taught:
            teach_prefills(get_routing(router), one.url, taught)
        ttft = await measure_ttft(router, stream)
        assert (keys.PREDICTED_MS in ttft.attributes) is told
        assert keys.PREDICTION_ERROR_MS not in ttft.attributes
        assert get_routing(router).prefill_policy.state.outcomes == {}
