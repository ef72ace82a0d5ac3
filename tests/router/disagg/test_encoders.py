# SPDX-License-Identifier: Apache-2.0
"""Media requests: prompts are tokenized before encoders are called, items go to the least loaded one."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from commands.router.test_router_command import INSTANCE_URL

from router import fake_instances
from router.control.test_admin import open_admin
from router.fake_instances import TRACEPARENT, InstancePlan
from router.scripted_knowledge import ScriptedReader, build_routing_factory, teach_speed
from ttft_otel.model import timing
from ttft_otel.model.names import keys, metric_names
from ttft_otel.model.stages import ENCODE
from ttft_otel.model.timing import ServerTiming, TokenCounts
from ttft_otel.router.disagg.encoders import DEFAULT_ITEM_TOKENS, build_encoder_requests
from ttft_otel.router.disagg.request_body import RequestBody, parse_body
from ttft_otel.router.errors import SloUnreachable
from ttft_otel.router.limits import RouterLimits
from ttft_otel.router.routing.policies.block_index import BlockHolders
from ttft_otel.router.routing.policies.policy_registry import LeastTtftPolicy
from ttft_otel.router.routing.policies.policy_state import PolicyOptions, PolicyState
from ttft_otel.router.routing.policies.prefill_model import PrefillLine, PrefillModels, compute_work
from ttft_otel.router.routing.routing_service import LoadEntry
from ttft_otel.router.types import Decision, RoutingRequest, parse_instance_url
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.tracing import clock

CHAT_PATH = "/v1/chat/completions"
TRACED_HEADERS = {"traceparent": TRACEPARENT}
A, B = (parse_instance_url(f"http://127.0.0.1:{port}", ENCODE) for port in (8001, 8002))
LONG_PROMPT_TOKENS = 1000  # ms: what is to be seen meanwhile is seen, on a busy machine too


def build_request(leg: str, tokens: int, **more: Any) -> RoutingRequest:
    """A request with so many tokens; of the encode leg for one item."""
    return RoutingRequest(leg, CHAT_PATH, "tiny", "r", {}, b"", prompt_tokens=tokens, **more)


def build_image_chat(*items: int, tokens: int = 800, **more: Any) -> dict[str, Any]:
    """A chat with an image for each of these sizes, all of them different ones."""
    urls = [f"{random.random()}" for _ in items]
    return fake_instances.build_chat(*urls) | {
        "tokens": tokens,
        "items": items,
        "max_tokens": 4,
        **more,
    }


def list_sent_images(encoder: fake_instances.FakeInstance) -> list[str]:
    """The images that an encoder got."""
    return [each.json["messages"][0]["content"][0]["image_url"]["url"] for each in encoder.received]


def list_image_urls(body: dict[str, Any]) -> list[str]:
    """The images of a chat."""
    return [part["image_url"]["url"] for part in body["messages"][0]["content"][1:]]


def run_fleet(apart: bool, *encoders: InstancePlan, **more: Any) -> Any:
    """A router before these encoders and one server that answers, or before prefill and decode instances."""
    if apart:
        return fake_instances.run_disaggregated(fake_instances.PairModel(), *encoders, **more)
    plan = InstancePlan({"prefill.compute": 20})
    return fake_instances.run_routed_instances([plan], encoders, **more)


@pytest.mark.parametrize("apart", [False, True], ids=["E+PD", "E+P+D"])
async def test_prompts_are_read_before_encoders_are_asked(apart: bool) -> None:
    """`router.tokenize` and `router.lookup` come before the encode leg, once, and the sum closes."""
    routing = build_routing_factory("ttft", ScriptedReader(0.2))
    plan = InstancePlan({"encoder.compute": 50})
    async with run_fleet(apart, plan, routing=routing) as (router, *_):
        body = fake_instances.build_chat("a", "b") | {"tokens": 800, "max_tokens": 4}
        status, headers, _ = await router.post_body(
            CHAT_PATH, body, x_ttft_timing="1", **TRACED_HEADERS
        )
        assert status == 200
        told = timing.parse_server_timing(headers["Server-Timing"])
        ttft = next(each.ttft for each in await router.wait_for_records(2) if each.ttft is not None)
        pieces = [each for each in ttft.pieces if each.name.startswith(("router.", "encode."))]
        order = [each.name for each in pieces]
        assert order[:6] == [
            *("router.receive", "router.route", "router.tokenize", "router.lookup"),
            *("router.route", "router.hop.encode"),
        ]
        assert order.count("router.tokenize") == order.count("router.lookup") == 1
        assert 200_000 <= ttft.stages["router.tokenize"] < 300_000
        assert ttft.stages["router.lookup"] < 50_000
        assert ttft.stages["encode.encoder.compute"] >= 50_000
        assert sum(ttft.stages.values()) + ttft.unattributed == ttft.end - ttft.start
        assert told is not None
        assert told.stages["router.lookup"] == ttft.stages["router.lookup"]


def test_sizes_are_of_distinct_items() -> None:
    """An item that comes twice is encoded once; counts that are of other parts say nothing."""
    body = RequestBody(b"", media_items=(b"a", b"b"), item_positions=(0, 2), media_part_count=3)
    assert body.map_item_tokens((6, 6, 50)) == [6, 50]
    assert body.map_item_tokens((6, 50)) == body.map_item_tokens(()) == [0, 0]


def test_what_is_learnt_of_encoders() -> None:
    """What keeps an encoder from its next item: its run, dispatch and save, its share of a batch."""
    routing = build_routing_factory(encoders="ttft")(
        InstancePool({ENCODE: [A], "prefill_decode": [B]})
    )
    state = routing.get_policy(ENCODE).state
    kept: list[tuple[Any, ...]] = []
    state.models.add_sample = lambda *told: kept.append(told)  # type: ignore[method-assign]
    stages = {
        "preprocess": 90_000,
        "encoder.queue": 50_000,
        "dispatch": 2000,
        "ec.transfer": 8000,
        "encoder.compute": 100_000,
    }

    def book_and_answer(
        asked: RoutingRequest, stages: dict[str, int], tokens: TokenCounts | None
    ) -> None:
        made = LoadEntry(state, asked, Decision(A, 0.0, "", predicted_ttft_s=0.2), "1", 1_000_000)
        timing_told = ServerTiming(stages, 0, sum(stages.values()), None, tokens)
        made.record_first_token(1_300_000, timing_told, True)

    book_and_answer(build_request(ENCODE, 500), stages, None)
    book_and_answer(build_request(ENCODE, 500), stages, TokenCounts(510, 0, 510, 1020))
    # It had this image already.
    book_and_answer(build_request(ENCODE, 500), {"preprocess": 90_000}, None)
    estimated = build_request(ENCODE, DEFAULT_ITEM_TOKENS, tokens_estimated=True)
    book_and_answer(estimated, stages, None)
    assert kept == [
        ("tiny", A.url, compute_work(500, 0), 0.11, 0),
        ("tiny", A.url, compute_work(510, 0), 0.055, 0),
    ]
    assert state.overheads_s[A.url] == pytest.approx(0.14)
    assert len(state.pending) == 0


async def test_items_go_where_the_least_work_is() -> None:
    """One big item keeps its encoder from small ones, of the same request and of the next."""
    plan = InstancePlan({"encoder.compute": LONG_PROMPT_TOKENS})
    routing = build_routing_factory(encoders="ttft")
    async with run_fleet(False, plan, plan, routing=routing) as (router, a, b, _):
        first, second = build_image_chat(200, 4000, 300), build_image_chat(100)
        tasks = [asyncio.create_task(router.post_body(CHAT_PATH, first))]
        await fake_instances.wait_until(lambda: len(a.received) + len(b.received) == 3)
        tasks.append(asyncio.create_task(router.post_body(CHAT_PATH, second)))
        await fake_instances.wait_until(lambda: len(a.received) + len(b.received) == 4)
        big, small = (a, b) if len(a.received) == 1 else (b, a)
        assert list_sent_images(big) == [list_image_urls(first)[1]]
        assert sorted(list_sent_images(small)) == sorted(
            [list_image_urls(first)[0], list_image_urls(first)[2], *list_image_urls(second)]
        )
        pending = router.app.endpoint.routing.get_policy(ENCODE).state.pending
        waiting = [pending.get_load(each.url).tokens_to_compute for each in (big, small)]
        assert waiting == [4000, 600]
        assert [(await task)[0] for task in tasks] == [200, 200]
        assert len(pending) == 0


async def test_items_of_unknown_size_are_alike() -> None:
    """Items of unknown size are spread evenly by number, and no speed is learnt from them."""
    plan = InstancePlan({"encoder.compute": LONG_PROMPT_TOKENS})
    routing = build_routing_factory(encoders="ttft")
    async with run_fleet(False, plan, plan, routing=routing) as (router, a, b, _):
        # These are none of its parts.
        body = build_image_chat(1, 1, 1, 1, 1, 1) | {"items": [4000, 100]}
        task = asyncio.create_task(router.post_body(CHAT_PATH, body))
        await fake_instances.wait_until(lambda: len(a.received) + len(b.received) == 6)
        assert len(a.received) == len(b.received) == 3
        state = router.app.endpoint.routing.get_policy(ENCODE).state
        assert state.pending.get_load(a.url).tokens_to_compute == 3 * DEFAULT_ITEM_TOKENS
        assert (await task)[0] == 200
        assert (state.models.list_fits(), len(state.pending)) == ({}, 0)


async def test_what_the_encoders_policy_believes_is_seen() -> None:
    """GET /instances and /metrics show encoders' load and learnt speed; `ttft.predicted_ms` excludes them."""
    plan, routing = InstancePlan(), build_routing_factory(encoders="ttft")
    async with (
        run_fleet(True, plan, routing=routing) as (router, e, *_),
        open_admin(router) as here,
    ):
        for number in range(10):
            size = 400 + 40 * (number % 3)
            plan.stages_ms = {"preprocess": 5, "encoder.compute": size // 20}
            answer = await router.post_body(CHAT_PATH, build_image_chat(size), **TRACED_HEADERS)
            assert answer[0] == 200
        said = (await here.list_instances())[1]
        assert said["routing"]["encoders"] == "ttft"
        told = said["instances"][0]
        assert told["leg"] == ENCODE
        assert told["pending"] == {"requests": 0, "tokens": 0, "pairs": 0}
        assert told["fits"]["tiny"]["samples"] == 10
        assert told["fits"]["tiny"]["b"] is not None and told["predictions"]["outcomes"] == 2
        assert told["besides"] >= 0.005
        text = router.app.metrics.render_text().decode()
        labels = f'instance="{e.url}",leg="encode"'
        assert f"{metric_names.ROUTER_PENDING_TOKENS}{{{labels}}} 0.0" in text
        assert f'{metric_names.ROUTER_PREFILL_SAMPLES}{{{labels},model="tiny"}} 10.0' in text
        record = next(each for each in (await router.wait_for_records(20))[-2:] if each.ttft)
        assert record.ttft is not None
        routes = [each.attributes for each in record.ttft.pieces if each.attributes]
        assert keys.ROUTE_SCORE in next(each for each in routes if keys.ROUTE_POLICY in each)
        leg = router.app.endpoint.routing.prefilling_leg
        own = router.app.endpoint.routing.get_policy(leg).state.models.get_line("tiny")
        assert (keys.PREDICTED_MS in record.ttft.attributes) is (own is not None)


async def test_too_late_is_refused_before_encoders_work() -> None:
    """When prefill or encoders are too busy for the SLO, the answer is 429, before any encoder call."""
    routing = build_routing_factory(encoders="ttft", slo_s=0.5)
    plan = InstancePlan({"encoder.compute": LONG_PROMPT_TOKENS})
    async with run_fleet(False, plan, routing=routing) as (router, e, _):
        (answering,) = router.fleet.get("prefill_decode")
        teach_speed(router.app.endpoint.routing.get_policy(ENCODE).state, e.url)
        teach_speed(router.app.endpoint.routing.prefill_policy.state, answering.url, 1e-4)
        # Late, but who is idle tries.
        first = asyncio.create_task(router.post_body(CHAT_PATH, build_image_chat(2000)))
        await fake_instances.wait_until(lambda: len(e.received) == 1)
        status, headers, _ = await router.post_body(CHAT_PATH, build_image_chat(100))
        assert status == 429 and 1 <= int(headers["Retry-After"]) <= 2
        assert (await router.post_body(CHAT_PATH, build_image_chat()))[0] == 200  # no item
        assert (await first)[0] == 200
        assert len(e.received) == 1

        state = router.app.endpoint.routing.prefill_policy.state
        other = build_request("prefill_decode", 20_000)
        state.record_sent(other, Decision(answering, 0.0, ""), clock.now_us())
        assert (await router.post_body(CHAT_PATH, build_image_chat(100)))[0] == 429
        assert len(e.received) == 1 and router.app.endpoint.admission.refusal_counts["slo"] == 2
        state.record_left(other, clock.now_us())
        assert (await router.post_body(CHAT_PATH, build_image_chat(100)))[0] == 200
        assert len(state.pending) == 0


def test_time_already_spent_counts() -> None:
    """Time since arrival and expected encoding count against the SLO; idle instances are tried."""
    second = 1_000_000
    now = 10 * second
    models = PrefillModels(PrefillLine(0.0, 0.001, 0.0))
    state = PolicyState(BlockHolders(1), PolicyOptions(slo_s=1.0), models=models)
    policy = LeastTtftPolicy(state)

    def get_retry_after_s(**more: Any) -> float:
        try:
            policy.choose_instance(build_request("prefill", 500, **more), (A,), now, False)
        except SloUnreachable as error:
            return error.wait_s
        return 0.0

    busy = build_request("prefill", 300)
    state.record_sent(busy, Decision(A, 0.0, ""), now)
    assert get_retry_after_s() == get_retry_after_s(arrived_us=now - second // 10) == 0
    assert get_retry_after_s(arrived_us=now - second // 4) == pytest.approx(0.05)
    assert get_retry_after_s(encode_wait_s=0.4) == 0  # longer than the wait, which passes meanwhile
    assert get_retry_after_s(encode_wait_s=0.7) == pytest.approx(0.2)
    state.record_left(busy, now)
    assert get_retry_after_s(arrived_us=now - second) == get_retry_after_s(encode_wait_s=0.7) == 0
    assert get_retry_after_s(encode_wait_s=0.7, encoders_busy=True) == pytest.approx(0.2)


def test_an_encoder_that_is_gone_is_forgotten() -> None:
    """What was learnt of an encoder is dropped when it is removed."""
    fleet = InstancePool(
        {ENCODE: [A, B], "prefill_decode": [parse_instance_url(INSTANCE_URL, "prefill_decode")]}
    )
    routing = build_routing_factory(encoders="ttft")(fleet)
    state = routing.get_policy(ENCODE).state
    for each in (A, B):
        state.models.add_sample("tiny", each.url, compute_work(500, 0), 0.1)
        state.record_overhead(each.url, 0.01)
    fleet.remove_instance(B)
    routing.sync_instances()
    assert set(state.overheads_s) == set(routing.describe_instances(ENCODE)) == {A.url}
    assert ("tiny", B.url) not in state.models.list_fits()


async def test_too_many_items_are_refused_before_any_encoder_is_asked() -> None:
    """One item more than --max-items is a 400; the same item again is none."""
    async with fake_instances.run_routed_instances(
        encoders=[None], limits=RouterLimits(max_items=3)
    ) as (router, e, pd):
        status, _, body = await router.post_chat("a", "b", "c", "d")
        assert status == 400 and b"more than 3 different media items" in body
        assert not e.received and not pd.received
        assert (await router.post_chat("a", "b", "c", "a"))[0] == 200
        assert len(e.received) == 3


async def test_the_fields_of_all_items_are_held_once() -> None:
    """Sixty-four items with a template of half a megabyte do not make sixty-four copies of it."""
    async with fake_instances.run_routed_instances(encoders=[None]) as (router, e, _):
        body = fake_instances.build_chat(*map(str, range(64))) | {"chat_template": "x" * 500_000}
        parsed = parse_body(json.dumps(body).encode(), CHAT_PATH)
        request = RoutingRequest("mono", CHAT_PATH, "tiny", "r", {}, parsed.data)
        requests = build_encoder_requests(parsed, request)
        assert len({id(each.body_frame) for each in requests}) == 1
        assert not any(each.body for each in requests)
        assert (await router.post_body(CHAT_PATH, body))[0] == 200
        assert {len(each.json["chat_template"]) for each in e.received} == {500_000}
        assert sorted(list_sent_images(e), key=int) == [str(number) for number in range(64)]
