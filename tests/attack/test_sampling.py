# SPDX-License-Identifier: Apache-2.0
"""Callers that choose trace IDs and flags to be sampled, or not to be, where a ratio is."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from router import fake_instances
from router.fake_instances import InstancePlan

from ttft_otel.tracing.context import start_context
from ttft_otel.tracing.settings import Settings

RATIO = 0.1
UNTRUSTED = Settings(sampler="parentbased_traceidratio", ratio=RATIO, trust_sampled=False)
CALLS = 4000
CHOSEN_LOW_BITS = ("0" * 15 + "1", "0" * 8 + "f" * 8, "f" * 16, "e" + "0" * 15)


def is_sampled(trace_id: str, settings: Settings, flags: str = "01") -> bool:
    """Whether a request with this trace ID and flags is."""
    return start_context(f"00-{trace_id}-b7ad6b7169203331-{flags}", "", settings).sampled


@pytest.mark.parametrize("low_bits", CHOSEN_LOW_BITS)
@pytest.mark.parametrize("sampler", ["traceidratio", "parentbased_traceidratio"])
def test_callers_choose_nothing(sampler: str, low_bits: str) -> None:
    """Whatever low bits a caller gives its IDs, a tenth of them is sampled."""
    settings = replace(UNTRUSTED, sampler=sampler)
    trace_ids = [f"{random.getrandbits(64) or 1:016x}{low_bits}" for _ in range(CALLS)]
    drawn = [is_sampled(each, settings) for each in trace_ids]
    # Seven standard deviations.
    assert abs(sum(drawn) / CALLS - RATIO) < 0.033


def test_who_agrees() -> None:
    """One process always decides alike for a trace, others with the same key do, and no flag changes it."""
    settings = replace(UNTRUSTED, sampling_key="one")
    trace_ids = [f"{random.getrandbits(128) or 1:032x}" for _ in range(500)]
    drawn = [is_sampled(each, settings) for each in trace_ids]
    assert drawn == [is_sampled(each, replace(settings, ratio=RATIO), "00") for each in trace_ids]
    assert drawn != [is_sampled(each, replace(settings, sampling_key="two")) for each in trace_ids]
    assert drawn != [is_sampled(each, UNTRUSTED) for each in trace_ids]
    assert is_sampled(trace_ids[0], replace(settings, ratio=1.0, sampling_key="k" * 200))


async def test_instances_are_told() -> None:
    """The router draws for an ID that a ratio would take, and its instances follow the flag."""
    async with fake_instances.run_routed_instances([InstancePlan({})], settings=UNTRUSTED) as (
        router,
        one,
    ):
        for number in range(25):
            traceparent = f"00-{number + 1:016x}{1:016x}-b7ad6b7169203331-01"
            await router.post_chat(traceparent=traceparent)
        flags = [each.headers["traceparent"][-2:] for each in one.received]
        assert len(flags) == 25 and 0 < flags.count("00")
