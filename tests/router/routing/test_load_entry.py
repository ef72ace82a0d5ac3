# SPDX-License-Identifier: Apache-2.0
"""Whatever becomes of requests, in whatever order: what policies decide by ends empty, and is told."""

from __future__ import annotations

import asyncio
import json
import statistics
from operator import itemgetter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router import fake_instances, raw_http, scripted_knowledge
from router.fake_instances import InstancePlan
from router.proxy import test_endpoint_soak
from router.routing.test_routing_service import (
    COMPLETIONS_PATH,
    TRACED_HEADERS,
    build_completion,
    get_routing,
    teach_prefills,
)
from ttft_otel.model.names import keys
from ttft_otel.model.record import Ttft
from ttft_otel.router.routing.policies.policy_registry import POLICIES
from ttft_otel.router.routing.routing_service import RoutingService

# After how many bytes a client may leave; 0: at once, None: never.
LEAVE_AFTER_BYTES = (None, None, 0, 1, 150)
LONG_PROMPT_TOKENS = 1000  # ms: what is to be seen meanwhile is seen, on a busy machine too
MOODS = ("ok", "error", "busy", "cut", "torn", "late", "endless")
REQUEST_LISTS = st.lists(
    st.tuples(
        st.sampled_from(MOODS),
        st.booleans(),  # a stream
        st.integers(0, 3000),  # tokens; 0: unknown
        st.integers(0, 2),  # which prompt
        st.sampled_from(LEAVE_AFTER_BYTES),
        st.integers(0, 3),  # images, each of the prompt's length
        st.integers(0, 20),  # ms after the one before
    ),
    min_size=1,
    max_size=12,
)
Request = tuple[str, bool, int, int, int | None, int, int]


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    REQUEST_LISTS,
    st.sampled_from([name for name, kind in POLICIES.items() if kind.reads_prompts]),
    st.booleans(),
    st.sampled_from(("", "ttft")),
)
async def test_books_end_empty(sent: list[Request], logic: str, apart: bool, encoders: str) -> None:
    """Answers, errors, retries, cut connections and clients that leave, at once and in any order."""
    async with raw_http.run_instance() as a, raw_http.run_instance() as b:
        legs = {"prefills": [a.url, b.url], "decodes": [b.url]} if apart else {}
        async with fake_instances.run_router(
            [] if apart else [a.url, b.url],
            [a.url, b.url] if encoders else [],
            failures=test_endpoint_soak.NEVER_BYTES,
            routing=scripted_knowledge.build_routing_factory(
                logic, encoders=encoders, session_key="prompt"
            ),
            **legs,  # type: ignore[arg-type]
        ) as router:
            tasks = []
            for each in sent:
                await asyncio.sleep(each[-1] / 1000)
                tasks.append(asyncio.create_task(send_one(router.url, each)))
            await asyncio.gather(*tasks)
            routing = router.app.endpoint.routing
            for _ in range(100):
                if not count_pending(routing) and not router.app.admission.requests_under_way:
                    break
                await asyncio.sleep(0.02)
            assert count_pending(routing) == 0
            for leg in routing.reported_legs:
                for each in (a, b):
                    load = routing.get_policy(leg).state.pending.get_load(each.url)
                    assert (load.tokens_to_compute, load.pairs, len(load.queued_blocks)) == (
                        0,
                        0,
                        0,
                    )
            assert not [each for each in router.fleet if each.in_flight]


async def send_one(url: str, request: Request) -> None:
    """Send it, and leave as it says."""
    mood, stream, tokens, prompt, most, images, _ = request
    length = f'"tokens": {tokens}, ' if tokens else ""
    word = "true" if stream else "false"
    said, path = f'"prompt": "{prompt}"', "/v1/completions"
    if images:
        parts = [{"type": "image_url", "image_url": {"url": str(each)}} for each in range(images)]
        said = f'"messages": {json.dumps([{"role": "user", "content": parts}])}'
        said, path = f'{said}, "items": {[tokens] * images}', "/v1/chat/completions"
    body = f'{{"model": "tiny", "stream": {word}, {length}"from": {prompt + 1}, {said}}}'
    data = raw_http.encode_request(mood, body.encode(), path)
    # An encoder's answer is waited for whole.
    never = mood == "endless" and (most is None or images)
    if most == 0 or mood == "late" or never:
        await test_endpoint_soak.send_and_leave(url, data)
    else:
        await raw_http.send_bytes(url, data, most, test_endpoint_soak.TIMEOUT_S)


def count_pending(routing: RoutingService) -> int:
    """Requests without a first token, and items at encoders, as their policies believe."""
    return sum(len(routing.get_policy(leg).state.pending) for leg in routing.reported_legs)


async def test_the_same_id_twice() -> None:
    """Clients choose request ids: two requests with one id are two entries, and each ends its own."""
    plan = fake_instances.InstancePlan({"prefill.compute": LONG_PROMPT_TOKENS})
    async with fake_instances.run_routed_instances(
        [plan], routing=scripted_knowledge.build_routing_factory()
    ) as (router, one):
        body = {"model": "tiny", "prompt": "a", "stream": True, "tokens": 100}
        posts = [router.post_body("/v1/completions", body, x_request_id="same") for _ in range(3)]
        tasks = [asyncio.create_task(each) for each in posts]
        state = router.app.endpoint.routing.prefill_policy.state
        await fake_instances.wait_until(lambda: len(state.pending) == 3)
        assert state.pending.get_load(one.url).tokens_to_compute == 300
        await asyncio.gather(*tasks)
        assert len(state.pending) == 0


async def test_a_retry_moves_the_entry() -> None:
    """While a request waits for its second attempt it counts nowhere, and then where it is."""
    async with fake_instances.run_routed_instances(
        [
            fake_instances.InstancePlan(status=503),
            fake_instances.InstancePlan({"prefill.compute": LONG_PROMPT_TOKENS}),
        ],
        routing=scripted_knowledge.build_routing_factory("kvaware"),
    ) as (router, a, b):
        state = router.app.endpoint.routing.prefill_policy.state
        pending = state.pending
        state.tie_breaker.choice = itemgetter(0)  # the one that refuses is asked first
        body = {"model": "tiny", "prompt": "a", "stream": True, "tokens": 100}
        task = asyncio.create_task(router.post_body("/v1/completions", body))
        await fake_instances.wait_until(lambda: len(a.received) == len(b.received) == 1)
        assert (
            pending.get_load(a.url).tokens_to_compute,
            pending.get_load(b.url).tokens_to_compute,
        ) == (0, 100)
        assert (await task)[0] == 200
        assert len(pending) == 0


async def test_an_entry_ends_with_the_first_token() -> None:
    """While the rest of a stream comes nothing is pending any more."""
    plan = fake_instances.InstancePlan({"prefill.compute": 10}, gap_s=LONG_PROMPT_TOKENS / 1000)
    async with fake_instances.run_routed_instances(
        [plan], routing=scripted_knowledge.build_routing_factory()
    ) as (router, one):
        body = {"model": "tiny", "prompt": "a", "stream": True, "tokens": 100}
        task = asyncio.create_task(router.post_body("/v1/completions", body))
        pending = router.app.endpoint.routing.prefill_policy.state.pending
        (instance,) = router.fleet
        await fake_instances.wait_until(lambda: instance.in_flight == 1 and not len(pending))
        await task


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

    for _ in range(3):  # whose median is not a busy moment's
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
