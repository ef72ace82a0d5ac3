# SPDX-License-Identifier: Apache-2.0
"""Instances that take requests and answer none, or late: what ends the wait, and who gets the others."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from attack import faulty_instance

from router import fake_instances
from router.fake_instances import InstancePlan, run_routed_instances, wait_until
from ttft_otel.router.limits import RouterLimits
from ttft_otel.router.routing.policies.policy_registry import SECONDS_PER_REQUEST
from ttft_otel.router.routing.policies.prefill_model import compute_work
from ttft_otel.router.routing.routing_service import RoutingService
from ttft_otel.router.timeline import Attempt
from ttft_otel.router.types import OVERDUE_AFTER_S, RoutingRequest, parse_instance_url
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.tracing import clock

CHAT_PATH = "/v1/chat/completions"
REQUEST = RoutingRequest("mono", CHAT_PATH, "tiny", "r", {}, b"{}", prompt_tokens=100)


async def test_a_stream_that_has_begun_may_take_any_time() -> None:
    """The limit is for the first byte only; with --total-timeout the answer is cut, uncounted."""
    plan = InstancePlan({}, gap_s=0.4)
    for limits, is_whole in (
        (RouterLimits(first_byte_timeout=0.3), True),
        (RouterLimits(first_byte_timeout=0.3, total_timeout=0.5), False),
    ):
        async with run_routed_instances([plan], failures=1, limits=limits) as (router, _):
            try:
                _, _, body = await router.post_chat()
            except Exception as error:  # noqa: BLE001 - whatever the client calls a cut stream
                assert not is_whole and "payload" in str(error)
            else:
                assert is_whole and body == b"".join(fake_instances.STREAM_EVENTS)
            (instance,) = router.fleet
            assert instance.breaker.state == "closed"


@pytest.mark.parametrize("by", ["time", "probe"])
async def test_a_long_trial_does_not_keep_its_instance(by: str) -> None:
    """A plain answer that takes minutes is the trial: the next request is let in before it is over."""
    plan = InstancePlan({}, status=503)
    limits = RouterLimits(breaker_trial=0.3 if by == "time" else 60.0)
    times = {"pause_s": 0.1, "probe_interval_s": 60.0}
    async with run_routed_instances([plan], failures=1, limits=limits, **times) as (router, one):
        (instance,) = router.fleet
        await router.app.endpoint.upstream.health_monitor.wait_probed()
        await router.post_chat()
        await wait_until(lambda: instance.breaker.state == "half-open")
        one.plan = InstancePlan({"prefill.compute": 20_000})
        trial = asyncio.create_task(router.post_chat(stream=False))
        await wait_until(lambda: len(one.received) >= 2)
        assert (await router.post_chat())[0] == 503
        if by == "probe":
            assert await router.app.endpoint.upstream.health_monitor.probe_instance(instance)
        await wait_until(lambda: instance.breaker.admits_requests)
        one.plan = InstancePlan({})
        assert (await router.post_chat())[0] == 200
        assert instance.breaker.state == "closed" and not trial.done()
        trial.cancel()
        await asyncio.gather(trial, return_exceptions=True)


async def test_headers_do_not_close_a_breaker() -> None:
    """A server whose engine hangs sends a stream's headers at once: it gets a trial, no full share."""
    async with (
        faulty_instance.run_instance("hangs after head") as one,
        fake_instances.run_router(
            [one.url],
            failures=1,
            pause_s=0.1,
            probe_interval_s=60.0,
            limits=RouterLimits(first_byte_timeout=0.5),
        ) as router,
    ):
        await router.app.endpoint.upstream.health_monitor.wait_probed()
        assert (await router.post_chat())[0] == 504
        (instance,) = router.fleet
        await wait_until(lambda: instance.breaker.state == "half-open")
        answers = await asyncio.gather(*(router.post_chat() for _ in range(4)))
        assert sorted(each[0] for each in answers) == [503, 503, 503, 504]
        assert one.received_count == 2 and instance.breaker.state == "open"


@pytest.mark.parametrize("policy", ["least_requests", "ttft"])
def test_an_instance_that_owes_answers_for_long_is_avoided(policy: str) -> None:
    """One request that hangs weighs more and more; a busy instance that answers gets the next."""
    hangs, busy = (parse_instance_url(f"http://127.0.0.1:{port}", "mono") for port in (1, 2))
    pool = InstancePool({"mono": [hangs, busy]})
    routing = RoutingService(pool, policy)
    if policy == "ttft":
        models = routing.prefill_policy.state.models
        for tokens in range(100, 2100, 100):
            for url in (hangs.url, busy.url):
                models.add_sample("tiny", url, compute_work(tokens, 0), tokens / 1000)
    sent_us, numbers = clock.now_us(), itertools.count()

    def send(instance_number: int, at_us: int) -> Attempt:
        instance = (hangs, busy)[instance_number]
        decision = routing.choose_instance(REQUEST, [instance], at_us, False)
        span_id = f"{next(numbers)}"
        load_entry = routing.add_load_entry(REQUEST, decision, span_id, at_us)
        attempt = Attempt("mono", CHAT_PATH, instance, span_id, at_us, load_entry=load_entry)
        pool.record_sent(attempt)
        return attempt

    send(0, sent_us)
    overdue_s = 4 * SECONDS_PER_REQUEST
    now_us = sent_us + int((OVERDUE_AFTER_S + overdue_s) * 1e6)
    for _ in range(3):
        send(1, now_us)
    early_us = sent_us + 1_000_000

    assert routing.choose_instance(REQUEST, [hangs, busy], early_us, False).instance is hangs
    assert routing.choose_instance(REQUEST, [hangs, busy], now_us, False).instance is busy
