# SPDX-License-Identifier: Apache-2.0
"""--max-queue-ms: who is held, how long, in which order, and that the time is told as router.queue."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router import fake_instances, scripted_knowledge
from router.fake_instances import (
    TRACEPARENT,
    FakeInstance,
    InstancePlan,
    RunningRouter,
    run_instance,
    run_router,
    wait_until,
)
from router.scripted_knowledge import teach_speed
from ttft_otel.model.names import header_names, keys
from ttft_otel.model.record import Record
from ttft_otel.router.errors import RouterError
from ttft_otel.router.limits import RouterLimits
from ttft_otel.router.proxy.admission import PATIENCE, HoldQueue
from ttft_otel.router.routing.policies.block_index import BlockHolders
from ttft_otel.router.routing.policies.policy_registry import LeastTtftPolicy
from ttft_otel.router.routing.policies.policy_state import PolicyOptions, PolicyState
from ttft_otel.router.routing.policies.prefill_model import (
    PrefillLine,
    PrefillModels,
)
from ttft_otel.router.timeline import Hold
from ttft_otel.router.types import RoutingRequest, parse_instance_url

PATH = "/v1/completions"
MS_PER_TOKEN = PrefillLine(0, 1e-3, 0)
MAX_QUEUE_S = 0.1


class Fleet:
    """Engines that serve one prompt after the other behind a HoldQueue, with a clock of its own.

    slowness: of each engine, to what the router predicts. sent: numbers of requests in the order of sending.
    """

    def __init__(self, slowness: Sequence[float], limits: RouterLimits | None = None) -> None:
        self.now_us = 0
        self.events: list[tuple[int, int, Callable[[], object]]] = []
        self.event_numbers = itertools.count()
        self.instances = [
            parse_instance_url(f"http://127.0.0.1:{8001 + at}", "mono")
            for at in range(len(slowness))
        ]
        self.slowness = {
            each.url: factor for each, factor in zip(self.instances, slowness, strict=True)
        }
        options = PolicyOptions(max_queue_s=MAX_QUEUE_S)
        state = PolicyState(BlockHolders(1), options, models=PrefillModels(MS_PER_TOKEN))
        self.policy = LeastTtftPolicy(state)
        self.busy_until_us = dict.fromkeys(self.slowness, 0)
        self.sent: list[int] = []
        self.refused: dict[int, RouterError] = {}
        self.waiting: set[int] = set()
        self.queue = HoldQueue(
            self.policy,
            lambda _leg, _model: self.instances,
            limits or RouterLimits(),
            self.call_later,
            lambda: self.now_us,
        )

    def call_later(self, delay_s: float, action: Callable[[], object]) -> None:
        """Call `action` later."""
        due_us = self.now_us + round(delay_s * 1e6)
        heapq.heappush(self.events, (due_us, next(self.event_numbers), action))

    def run(self) -> None:
        """Until nothing is left to happen; at no moment may an engine be idle while a request waits."""
        while self.events:
            due_us = self.events[0][0]
            while self.events and self.events[0][0] == due_us:
                self.now_us = due_us
                heapq.heappop(self.events)[2]()
            if self.waiting:
                idle = [
                    each.url
                    for each in self.instances
                    if not self.policy.state.pending.get_load(each.url).entries
                ]
                assert not idle, (self.now_us, self.waiting)

    def arrive(self, number: int, tokens: int, priority: int = 0) -> None:
        """A request comes to the router now."""
        request = RoutingRequest(
            "mono", PATH, "m", str(number), {}, b"", prompt_tokens=tokens, arrived_us=self.now_us
        )
        if self.queue.is_free(request):
            self.send(number, request)
            return
        self.waiting.add(number)
        go_on = partial(self._end_hold, number, request)
        self.queue.add_request(request, priority, Hold(self.now_us), go_on)

    def _end_hold(self, number: int, request: RoutingRequest, error: RouterError | None) -> None:
        self.waiting.remove(number)
        if error is None:
            self.send(number, request)
        else:
            self.refused[number] = error

    def send(self, number: int, request: RoutingRequest) -> None:
        """The engine that the policy chooses gets it."""
        choice = self.policy.choose_instance(request, self.instances, self.now_us, False)
        self.policy.state.record_sent(request, choice, self.now_us)
        self.sent.append(number)
        url = choice.instance.url
        service_us = round(request.prompt_tokens * 1000 * self.slowness[url])
        self.busy_until_us[url] = max(self.busy_until_us[url], self.now_us) + service_us
        self.call_later(
            (self.busy_until_us[url] - self.now_us) / 1e6,
            lambda: self.policy.state.record_left(request, self.now_us),
        )


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 300), st.integers(1, 600), st.integers(-2, 2)),
    min_size=1,
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(ARRIVALS, st.lists(st.sampled_from((0.3, 0.9, 1.0, 1.1, 3.0)), min_size=1, max_size=4))
def test_nothing_waits_while_an_instance_idles(
    arrivals: list[tuple[int, int, int]], slowness: list[float]
) -> None:
    """However wrong predictions are: an idle engine has no request held, and all are sent in the end."""
    fleet = Fleet(slowness)
    at_ms = 0
    for number, (pause_ms, tokens, priority) in enumerate(arrivals):
        at_ms += pause_ms
        fleet.call_later(at_ms / 1e3, partial(fleet.arrive, number, tokens, priority))
    fleet.run()

    assert sorted(fleet.sent) == [*range(len(arrivals))]
    assert not len(fleet.queue) and not len(fleet.policy.state.pending)


def hold_all(requests: Sequence[tuple[int, int]], limits: RouterLimits | None = None) -> Fleet:
    """One engine with 10 s of work, and then these (tokens, priority), a millisecond apart."""
    fleet = Fleet([1.0], limits)
    fleet.arrive(-1, 10_000)
    for number, (tokens, priority) in enumerate(requests):
        fleet.call_later((number + 1) / 1e3, partial(fleet.arrive, number, tokens, priority))
    fleet.run()
    return fleet


@pytest.mark.parametrize(
    ("requests", "order"),
    [
        ([(200, 0), (200, 0), (200, 0)], [0, 1, 2]),  # alike: by arrival
        ([(200, 1), (200, 0), (200, -1)], [2, 1, 0]),  # lower values first
        ([(500, 0), (500, 0), (100, 0)], [2, 0, 1]),  # a short one before long ones
        # A priority counts more than a length.
        ([(100, 1), (5000, 0)], [1, 0]),
    ],
)
def test_order(requests: list[tuple[int, int]], order: list[int]) -> None:
    """By priority, then short before long, then by arrival."""
    assert hold_all(requests).sent == [-1, *order]


def test_no_prompt_is_overtaken_for_ever() -> None:
    """A long prompt waits for short ones that come soon after it, and for none that comes later."""
    tokens, pause_ms = 400, 150
    fleet = Fleet([1.0])
    fleet.arrive(-1, 1000)
    fleet.call_later(0.001, partial(fleet.arrive, 0, tokens))
    for number in range(1, 40):  # as fast as they can be served
        fleet.call_later(number * pause_ms / 1e3, partial(fleet.arrive, number, pause_ms))
    fleet.run()

    overtaken_by = fleet.sent.index(0)
    last_ms = PATIENCE * tokens - PATIENCE * pause_ms  # arrivals up to here have less patience left
    assert 4 < overtaken_by <= last_ms / pause_ms + 2
    assert fleet.sent[-1] == 39


def test_the_last_one_is_refused_when_too_many_wait() -> None:
    """Of more than --max-held the one that would be served last gets a 429, whoever came last."""
    fleet = hold_all([(200, 5), (200, 0), (200, 0)], RouterLimits(max_held=2))

    assert fleet.sent == [-1, 1, 2]
    assert fleet.refused[0].status == 429
    assert fleet.queue.counts == {"full": 1, "sent": 2}


def test_a_hold_has_an_end() -> None:
    """After --first-byte-timeout a request that none could take gets a 504."""
    fleet = hold_all([(200, 0)], RouterLimits(first_byte_timeout=2.0))

    assert fleet.refused[0].status == 504 and "2 s" in str(fleet.refused[0])
    assert fleet.queue.counts == {"late": 1}


# What follows is through the router, on real sockets.


@contextlib.asynccontextmanager
async def run_holding(
    *urls: str, prefill_ms: int = 0, max_queue_s: float = 0.05, **options: Any
) -> AsyncIterator[tuple[RunningRouter, FakeInstance | None]]:
    """A router that holds before instances whose prefills take a millisecond a token, as it knows.

    urls: of the instances, or `prefill_ms`: what each prefill takes at the only one, which is given, too.
    """
    options["routing"] = scripted_knowledge.build_routing_factory(max_queue_s=max_queue_s)
    async with contextlib.AsyncExitStack() as stack:
        one = None
        if not urls:
            plan = InstancePlan({"prefill.compute": prefill_ms})
            one = await stack.enter_async_context(run_instance(plan))
            urls = (one.url,)
        router = await stack.enter_async_context(run_router(urls, **options))
        for url in urls:
            teach_speed(router.app.endpoint.routing.prefill_policy.state, url)
        yield router, one


def get_queue(router: RunningRouter) -> HoldQueue:
    """The router's."""
    queue = router.app.endpoint.hold_queue
    assert queue is not None
    return queue


async def post(router: RunningRouter, tokens: int, **more: object) -> tuple[int, str]:
    """Post a completion of so many tokens; status and body."""
    limit = {header_names.TTFT_LIMIT: str(more.pop("limit"))} if "limit" in more else {}
    body = {"model": "tiny", "prompt": "a", "stream": True, "tokens": tokens, **more}
    status, _, data = await router.post_body(PATH, body, traceparent=TRACEPARENT, **limit)
    return status, data.decode()


async def begin_hold(router: RunningRouter, *requests: dict[str, object]) -> list[asyncio.Task]:
    """The first one is sent, the others are held, one after the other."""
    pending = router.app.endpoint.routing.prefill_policy.state.pending
    tasks = [asyncio.create_task(post(router, 20_000))]
    await wait_until(lambda: len(pending) == 1)
    for number, fields in enumerate(requests, 1):
        tasks.append(asyncio.create_task(post(router, **fields)))
        await wait_until(lambda number=number: len(get_queue(router)) == number)
    return tasks


def find_ttft(records: list[Record]) -> list[Record]:
    """Those with a TTFT, in the order of arrival."""
    return sorted((each for each in records if each.ttft), key=lambda each: each.start_ns)


async def test_a_hold_is_router_queue_and_nothing_else() -> None:
    """The time for which a request was held, and no other, is in router.queue; the sum is exact."""
    async with run_holding(prefill_ms=600) as (router, one):
        first = asyncio.create_task(post(router, 20_000))
        await wait_until(lambda: one.received)
        one.plan.stages_ms = {"prefill.compute": 40}
        delays = fake_instances.LoopDelays()
        await asyncio.gather(first, post(router, 100))
        told = find_ttft(await router.wait_for_records(4))

    held = told[1].ttft
    assert held is not None
    # From the second one's arrival until the first one's token, after which nothing is pending.
    first_ends_ns = told[0].start_ns + told[0].ttft.end * 1000
    wanted_us = (first_ends_ns - told[1].start_ns) / 1000
    assert 300_000 < wanted_us < 700_000
    margin_us = 30_000 + delays.total_us
    assert held.stages["router.queue"] == pytest.approx(wanted_us, abs=margin_us)
    assert sum(held.stages.values()) + held.unattributed == held.end
    others = held.end - held.stages["router.queue"] - held.stages["mono.prefill.compute"]
    assert others < margin_us
    (piece,) = (each for each in held.pieces if each.name == "router.queue")
    assert piece.attributes == {keys.QUEUE_REASON: "max_queue"}
    assert "router.queue" not in told[0].ttft.stages
    assert 'ttft_otel_router_holds_total{result="sent"} 1.0' in (
        router.app.metrics.render_text().decode()
    )


async def test_priorities_pass_unchanged_and_are_told() -> None:
    """The urgent one goes first, which the one before it tells; instances get the field as it is."""
    async with run_holding(prefill_ms=300, trust_priority=True) as (router, one):
        late, urgent = ({"tokens": 100, "priority": number} for number in (3, -1))
        tasks = await begin_hold(router, late, urgent)
        assert [(await each)[0] for each in tasks] == [200] * 3
        told = find_ttft(await router.wait_for_records(6))
    priorities = [json.loads(each.body).get("priority") for each in one.received]
    assert priorities == [None, -1, 3]
    reasons = [
        [each.attributes[keys.QUEUE_REASON] for each in pieces if each.name == "router.queue"]
        for pieces in (record.ttft.pieces for record in told)
    ]
    assert reasons == [[], ["priority"], ["max_queue"]]


async def test_a_client_that_leaves_leaves_nothing() -> None:
    """A request whose client leaves while it is held is gone, and no instance gets it."""
    async with run_holding(prefill_ms=400) as (router, one):
        first, second = await begin_hold(router, {"tokens": 100})
        second.cancel()
        await wait_until(lambda: not len(get_queue(router)))
        assert (await first)[0] == 200
        told = find_ttft(await router.wait_for_records(3))
        endpoint = router.app.endpoint
        assert len(one.received) == 1 and not len(endpoint.routing.prefill_policy.state.pending)
        assert get_queue(router).counts == {"left": 1} and not endpoint.body_budget.counted_bytes
    assert [each.ttft.died for each in told] == ["", "router.queue"]


async def test_a_limit_that_cannot_be_kept_ends_the_hold() -> None:
    """A held request gets a 429 when its own limit cannot be kept, one that is late already at once."""
    async with run_holding(prefill_ms=700, max_queue_s=0.01) as (router, one):
        # Predicted are 0.5 s, of which a tenth is left however long it takes: more than may wait there.
        tasks = [asyncio.create_task(post(router, 500))]
        await wait_until(lambda: one.received)
        assert (await post(router, 100, limit=200))[0] == 429
        assert get_queue(router).counts == {}
        held = asyncio.create_task(post(router, 100, limit=620))
        await wait_until(lambda: len(get_queue(router)) or held.done())
        status, body = await held
        assert (await tasks[0])[0] == 200
        assert status == 429 and "try again" in body
        assert router.app.endpoint.admission.refusal_counts == {"slo": 2}
        assert len(one.received) == 1


async def test_a_dead_instance_lets_go() -> None:
    """When the instance whose queue was long dies, what was held goes to the one that is left."""
    async with run_holding(prefill_ms=20_000) as (router, _):
        first, second = await begin_hold(router, {"tokens": 100})
        async with run_instance(InstancePlan()) as other:
            # It comes instead: what is sent to the first one is still pending there.
            leg = router.fleet.answering_leg
            router.fleet.replace_instances({leg: [parse_instance_url(other.url, leg)]})
            assert (await asyncio.wait_for(second, 10))[0] == 200
            assert len(other.received) == 1
        first.cancel()


ENDLESS_INSTANCE = """
import asyncio
from lab.fake_vllm.instances import InstancePlan, run_instance

async def main():
    async with run_instance(InstancePlan({"prefill.compute": 600_000})) as one:
        print(one.url, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("others", [0, 1])
async def test_a_crash_leaves_nobody_held(others: int) -> None:
    """When the process of an instance is killed, what was held gets an answer of another or a clear error."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ENDLESS_INSTANCE, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        urls = [(await child.stdout.readline()).decode().strip()]
        async with contextlib.AsyncExitStack() as stack:
            if others:
                other = run_instance(InstancePlan({"prefill.compute": 100}))
                urls.append((await stack.enter_async_context(other)).url)
            router, _ = await stack.enter_async_context(run_holding(*urls))
            pending = router.app.endpoint.routing.prefill_policy.state.pending
            # One for each instance, so that the next ones are held.
            first = [asyncio.create_task(post(router, 20_000)) for _ in range(1 + others)]
            await wait_until(lambda: len(pending) == 1 + others)
            held = [asyncio.create_task(post(router, 20_000)) for _ in range(6)]
            queue = get_queue(router)
            await wait_until(lambda: sum(queue.counts.values()) + len(queue) == 6)
            child.kill()
            answers = await asyncio.wait_for(asyncio.gather(*first, *held), 20)

            lost, answered = answers[: 1 + others], answers[1 + others :]
            assert sorted(status for status, _ in lost) == [200] * others + [502]
            # Nothing of theirs was sent to the one that crashed.
            assert {status for status, _ in answered} <= ({200} if others else {502, 503})
            assert others or all("instance" in body for _, body in answered)
            assert queue.counts == {"sent": 6} and not len(queue) and not len(pending)
            endpoint = router.app.endpoint
            await wait_until(lambda: endpoint.response_counts.total() == 7 + others)
            assert endpoint.response_counts == ({"2xx": 7, "5xx": 1} if others else {"5xx": 7})
            assert not endpoint.body_budget.counted_bytes
            assert not any(each.in_flight for each in router.fleet)
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
