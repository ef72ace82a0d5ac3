# SPDX-License-Identifier: Apache-2.0
"""Instances that fail, hang or are late, what it costs a request, and what counts against them.

What counts is held to the rows of the reference page.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from attack import test_upstream_faults

from router import fake_instances, raw_http
from router.fake_instances import InstancePlan, run_instance, run_routed_instances, wait_until
from router.scripted_knowledge import teach_speed
from ttft_otel.model.names import keys
from ttft_otel.model.stages import ENCODE, MONO
from ttft_otel.router.limits import RouterLimits
from ttft_otel.router.proxy import admission
from ttft_otel.router.routing.policies.policy_registry import SECONDS_PER_REQUEST
from ttft_otel.router.routing.routing_service import RoutingService
from ttft_otel.router.timeline import Attempt
from ttft_otel.router.types import OVERDUE_AFTER_S, Instance, RoutingRequest, parse_instance_url
from ttft_otel.router.upstream import failures
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.tracing import clock

CHAT_PATH = "/v1/chat/completions"
REQUEST = RoutingRequest("mono", CHAT_PATH, "tiny", "r", {}, b"{}", prompt_tokens=100)


@pytest.fixture(autouse=True)
def _remove_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses between attempts are as short as they can be."""
    monkeypatch.setattr(failures, "FIRST_BACKOFF_S", 0.0)


def find_instance(
    router: fake_instances.RunningRouter, fake_instance: fake_instances.FakeInstance
) -> Instance:
    """The router's state of it."""
    (instance,) = (each for each in router.fleet if each.url == fake_instance.url)
    return instance


def get_state(
    router: fake_instances.RunningRouter, fake_instance: fake_instances.FakeInstance
) -> tuple[str, str]:
    """An instance's state and its breaker's."""
    instance = find_instance(router, fake_instance)
    return instance.state, instance.breaker.state


def end_pause(
    router: fake_instances.RunningRouter, fake_instance: fake_instances.FakeInstance
) -> None:
    """Do what the timer does at the end of an open period: on a busy machine a short one ends too soon."""
    assert find_instance(router, fake_instance).breaker.half_open()
    router.fleet.reset_candidates()


async def test_a_failing_probe_takes_an_instance_out_and_a_good_one_back() -> None:
    """While its /health says 503 an instance gets nothing; then again its share."""
    async with run_routed_instances([None, None], probe_interval_s=0.05) as (router, a, b):
        a.plan.health_status = 503
        await wait_until(lambda: get_state(router, a)[0] == "failed")
        assert (await router.get_json("/readyz"))[0] == 200
        for _ in range(4):
            assert (await router.post_chat())[0] == 200
        assert (len(a.received), len(b.received)) == (0, 4)
        b.plan.health_status = 500
        await wait_until(lambda: get_state(router, b)[0] == "failed")
        status, _, said = await router.get_json("/readyz")
        assert status == 503 and set(said["legs"]["mono"].values()) == {"failed"}
        # with all of them out the probes may be wrong: they are tried
        assert (await router.post_chat())[0] == 200
        a.plan.health_status = b.plan.health_status = 200
        await wait_until(lambda: get_state(router, a)[0] == get_state(router, b)[0] == "healthy")
        seen = len(a.received)
        for _ in range(4):
            await router.post_chat()
        assert len(a.received) == seen + 2


async def test_turns_stay_fair_while_one_is_out() -> None:
    """Of three instances with one out, the other two get half each."""
    up, down = InstancePlan({}), InstancePlan({}, health_status=503)
    async with run_routed_instances([up, down, up]) as (router, a, b, c):
        await router.get_json("/readyz")
        for _ in range(10):
            await router.post_chat()
        assert [len(each.received) for each in (a, b, c)] == [5, 0, 5]


async def test_an_instance_that_cannot_is_passed_over() -> None:
    """A 503 before the first byte: another instance answers; each attempt is a span."""
    async with run_routed_instances([InstancePlan(status=503), None]) as (router, a, b):
        got, _, body = await router.post_chat()
        assert (got, body) == (200, b"".join(fake_instances.STREAM_EVENTS))
        first, last = await router.wait_for_records(2)
        assert [call.status for call in last.calls] == [503, 200]
        assert last.calls[0].error == "503"
        assert last.calls[1].attributes[keys.ATTEMPT] == 2
        assert last.server is not None and last.server.error == ""
        assert first.ttft is not None and first.ttft.stages["router.retry"] >= 20_000
        assert b.received[0].body == a.received[0].body
        text = await fetch_metrics(router)
        assert 'ttft_otel_router_retries_total{leg="mono"} 1.0' in text
        assert f'instance="{a.url}",leg="mono",result="5xx"}} 1.0' in text
        assert f'instance="{b.url}",leg="mono",result="2xx"}} 1.0' in text
        assert 'ttft_otel_router_requests_total{result="2xx"} 1.0' in text


async def fetch_metrics(router: fake_instances.RunningRouter) -> str:
    """What /metrics says."""
    async with router.client.get(f"{router.url}/metrics") as response:
        return await response.text()


async def test_when_nobody_can_the_answer_is_the_last_ones() -> None:
    """Three that say 503: the client reads the third's body; alone, one is asked only once."""
    plan = InstancePlan({}, status=503)
    async with run_routed_instances([plan] * 3) as (router, *asked):
        status, headers, body = await router.post_chat()
        assert (status, body, headers["X-Own"]) == (503, b'{"error": "no"}', "kept")
        assert [len(each.received) for each in asked] == [1, 1, 1]
        (record,) = await router.wait_for_records(1)
        assert record.ttft is not None and record.ttft.died == "router.hop.mono"
    async with run_routed_instances([plan]) as (router, one):
        assert (await router.post_chat())[0] == 503 and len(one.received) == 1


async def test_what_may_have_been_read_is_not_sent_again() -> None:
    """A connection that breaks before any answer is a 502: such a request could kill the next."""
    plan = InstancePlan({"prefill.compute": 150}, dropped_requests=2)
    async with run_routed_instances([plan, None]) as (router, a, b):
        status, _, body = await router.post_chat()
        error = json.loads(body)["error"]
        assert (status, error["code"], error["type"]) == (502, 502, "UpstreamError")
        assert a.url.rpartition(":")[2] not in error["message"]
        await router.post_chat()  # b
        assert (await router.post_chat())[0] == 502  # on a connection that was kept, but late
        assert (len(a.received), len(b.received)) == (2, 1)
        (record,) = [each for each in router.records if each.ttft][:1]
        assert record.ttft is not None and record.ttft.died == "router.hop.mono"


async def test_a_failed_encoder_call_goes_to_another_encoder_once() -> None:
    """A 500, or a broken connection, is tried on another encoder; then the error is the client's."""
    for bad in (InstancePlan({}, status=500), InstancePlan({}, dropped_requests=9)):
        async with run_routed_instances(encoders=[bad, InstancePlan({})]) as (router, e1, e2, pd):
            assert (await router.post_chat("a"))[0] == 200
            assert [len(each.received) for each in (e1, e2, pd)] == [1, 1, 1]
            first, last = await router.wait_for_records(2)
            assert [call.leg for call in last.calls] == ["encode", "encode", "prefill_decode"]
            assert first.ttft is not None and "router.retry" in first.ttft.stages
    plan = InstancePlan({}, status=500)
    async with run_routed_instances(encoders=[plan, plan, plan]) as (router, e1, e2, e3, pd):
        status, _, body = await router.post_chat("a")
        assert (status, body) == (500, b'{"error": "no"}')
        assert len(e1.received + e2.received + e3.received) == 2 and not pd.received


@pytest.mark.parametrize(
    ("options", "number", "least", "most"),
    [
        ({"budget": 0.1}, 40, failures.MAX_SAVED_RETRIES, failures.MAX_SAVED_RETRIES + 4),
        ({"budget": 0.0}, 1, 0, 0),
        ({"retries": 0}, 1, 0, 0),
    ],
)
async def test_retries_are_a_share_of_requests(
    options: dict[str, float], number: int, least: float, most: float
) -> None:
    """With the saved ones spent, retries are no more than the budget's share of all requests."""
    plans = [InstancePlan({}, status=503)] * 2
    async with run_routed_instances(plans, failures=10_000, **options) as (router, a, b):
        for _ in range(number):
            assert (await router.post_chat())[0] == 503
        assert least <= len(a.received) + len(b.received) - number <= most


async def test_breaker_opens_tries_one_and_closes(caplog: pytest.LogCaptureFixture) -> None:
    """After failures in a row an instance gets nothing, then one request, then its share: no warning."""
    caplog.set_level(logging.INFO, "ttft_otel")
    plans, limits = [InstancePlan({}, status=503), InstancePlan({})], {"failures": 2, "pause_s": 30}
    async with run_routed_instances(plans, **limits) as (router, a, b):
        for _ in range(8):
            assert (await router.post_chat())[0] == 200
        assert len(a.received) == 2 and get_state(router, a) == ("healthy", "open")
        assert f'breaker_open{{instance="{a.url}",leg="mono"}} 1.0' in await fetch_metrics(router)
        end_pause(router, a)
        answers = await asyncio.gather(*(router.post_chat() for _ in range(6)))
        assert {answer[0] for answer in answers} == {200}
        assert len(a.received) == 3 and get_state(router, a)[1] == "open"
        a.plan.status = 200
        end_pause(router, a)
        await asyncio.gather(*(router.post_chat() for _ in range(4)))
        assert get_state(router, a)[1] == "closed" and len(a.received) >= 4
    (closed,) = [each for each in caplog.records if "circuit breaker closed" in each.getMessage()]
    assert closed.levelno == logging.INFO


async def test_with_every_breaker_open_clients_are_told_to_come_back() -> None:
    """No call is made: 503 in OpenAI's form, with Retry-After."""
    plan = InstancePlan({}, status=503)
    async with run_routed_instances([plan], failures=2, pause_s=30) as (router, one):
        for _ in range(2):
            assert (await router.post_chat())[2] == b'{"error": "no"}'
        status, headers, body = await router.post_chat()
        assert (status, headers["Retry-After"], len(one.received)) == (503, "1", 2)
        assert json.loads(body)["error"]["type"] == "UpstreamError"
        record = (await router.wait_for_records(3))[-1]
        assert record.ttft is not None and record.ttft.died == "router.route"


def test_an_answer_that_broke_off_is_no_success_where_it_was_tried_again() -> None:
    """An encoder whose answers all break off opens its breaker, though others answer in its place."""
    one = parse_instance_url("http://127.0.0.1:8001", "encode")
    fleet = InstancePool({"encode": [one]})
    for number in (1, 2):
        attempt = Attempt("encode", "/v1/chat/completions", one, "", 0)
        fleet.record_sent(attempt)
        attempt.record_head(200)
        attempt.record_lost("ClientPayloadError")
        fleet.record_failure(one, attempt.error)
        fleet.record_ended(attempt)
        assert one.breaker.consecutive_failures == number


async def test_a_trial_that_its_client_leaves_is_followed_by_another() -> None:
    """A half-open breaker is not stuck with a request that was cancelled."""
    plan = InstancePlan({}, status=503)
    async with run_routed_instances([plan], failures=1, pause_s=0.1) as (router, one):
        await router.post_chat()
        await wait_until(lambda: get_state(router, one)[1] == "half-open")
        one.plan = InstancePlan({"prefill.compute": 5000})
        task = asyncio.create_task(router.post_chat())
        await wait_until(lambda: len(one.received) == 2)
        assert (await router.post_chat())[0] == 503
        task.cancel()
        await router.wait_for_records(3)
        one.plan = InstancePlan({})
        assert (await router.post_chat())[0] == 200
        assert get_state(router, one)[1] == "closed"


async def test_a_request_from_before_does_not_end_a_trial() -> None:
    """A stream that began before the breaker opened ends during the trial: still one request only."""
    plan = InstancePlan({}, gap_s=0.3)
    async with run_routed_instances([plan], failures=1, pause_s=0.1) as (router, one):
        old = asyncio.create_task(router.post_chat())
        await wait_until(lambda: len(one.received) == 1)
        one.plan = InstancePlan({}, status=503)
        assert (await router.post_chat())[0] == 503
        await wait_until(lambda: get_state(router, one)[1] == "half-open")
        one.plan = InstancePlan({"prefill.compute": 5000})
        trial = asyncio.create_task(router.post_chat())
        await wait_until(lambda: len(one.received) == 3)
        assert not old.done() and (await old)[0] == 200
        assert (await router.post_chat())[0] == 503 and len(one.received) == 3
        trial.cancel()
        await asyncio.gather(trial, return_exceptions=True)


async def test_requests_go_where_their_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance that does not list a model is not asked for it; nobody lists it: 404."""
    monkeypatch.setattr(admission, "MODEL_REFRESH_INTERVAL_US", 100_000)
    async with run_routed_instances(
        [InstancePlan({}, models=("tiny", "one")), InstancePlan({}, models=("tiny", "two"))]
    ) as (router, a, b):
        cards = (await router.get_json("/v1/models"))[2]["data"]
        assert {card["id"] for card in cards} == {"tiny", "one", "two"}
        for _ in range(3):
            assert (await router.post_body("/v1/completions", {"model": "two"}))[0] == 200
        assert (len(a.received), len(b.received)) == (0, 3)
        status, _, body = await router.post_body("/v1/completions", {"model": "other"})
        error = json.loads(body)["error"]
        assert (status, error["type"], error["param"]) == (404, "NotFoundError", "model")
        assert "`other`" in error["message"]
        await asyncio.sleep(0.2)
        a.plan.models = ("tiny", "other")  # an adapter, loaded a moment ago
        assert (await router.post_body("/v1/completions", {"model": "other"}))[0] == 200
        assert len(a.received) == 1


async def test_an_instance_that_came_and_went_meanwhile_is_not_watched() -> None:
    """Two changes at once: who is gone when the first is done is asked nothing any more."""
    async with (
        run_instance() as a,
        run_instance() as b,
        run_instance() as brief,
        fake_instances.run_router([a.url, b.url], probe_interval_s=0.05) as router,
    ):
        fleet = router.fleet
        (old,) = (each for each in fleet if each.url == a.url)
        new = parse_instance_url(brief.url, "mono")
        fleet.remove_instance(old)
        fleet.add_instance(new)
        await asyncio.sleep(0)  # a's watch is ending, the new one's begins
        fleet.remove_instance(new)
        await asyncio.sleep(0.2)
        assert not brief.models_authorizations and b.models_authorizations


async def test_a_pause_that_a_probe_cut_short_does_not_end_the_next_one() -> None:
    """The timer of an older opening leaves a breaker alone that opened again since."""
    one = parse_instance_url("http://127.0.0.1:1", "mono")
    fleet = InstancePool({"mono": (one,)}, first_open_period_s=0.3)
    for _ in range(fleet.max_failures):
        fleet.record_failure(one, "502")
    fleet.mark_failed(one, "its probe")
    fleet.mark_healthy(one)
    assert one.breaker.state == "half-open"
    # Its trial: a pause of 0.6 s, after 0 s of the first one's 0.3.
    fleet.record_failure(one, "502")
    assert one.breaker.state == "open"
    await asyncio.sleep(0.42)
    assert one.breaker.state == "open"
    await wait_until(lambda: one.breaker.state == "half-open", 10)


async def test_a_stream_that_has_begun_may_take_any_time() -> None:
    """The limit is for the first byte only; with --total-timeout the answer is cut, uncounted."""
    plan = InstancePlan({}, gap_s=0.2)
    for limits, is_whole in (
        (RouterLimits(first_byte_timeout=0.15), True),
        (RouterLimits(first_byte_timeout=0.15, total_timeout=0.3), False),
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
        raw_http.run_instance("hangs after head") as one,
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
        assert one.mood_counts.total() == 2 and instance.breaker.state == "open"


@pytest.mark.parametrize("policy", ["least_requests", "ttft"])
def test_an_instance_that_owes_answers_for_long_is_avoided(policy: str) -> None:
    """One request that hangs weighs more and more; a busy instance that answers gets the next."""
    hangs, busy = (parse_instance_url(f"http://127.0.0.1:{port}", "mono") for port in (1, 2))
    pool = InstancePool({"mono": [hangs, busy]})
    routing = RoutingService(pool, policy)
    if policy == "ttft":
        for each in (hangs, busy):
            teach_speed(routing.prefill_policy.state, each.url)
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


ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "router-failures.md"
ALL_FAULTS = ROOT / "benchmarks" / "results" / "upstream-faults.md"


# Rows of the page: what happens, and the fault on a leg that makes it: of FAULTS, which are tried on all
# legs there, or one of `run_failing`.
ROWS = {
    "the connection is refused": ("refused", MONO),
    "the connection is closed or reset before the first byte": ("reset before head", MONO),
    "status 502, 503 or 504": ("status 503", MONO),
    "no first byte within `--first-byte-timeout`": ("hangs", MONO),
    "the answer breaks off": ("half body", MONO),
    "status 500, which media of a client can cause": ("status 500", ENCODE),
    "any other status": ("status 422", MONO),
    "a head that the router cannot read": ("garbage", MONO),
    "a header longer than `--max-answer-header-bytes`": ("huge headers", MONO),
    "an encoder's answer that the router cannot use": ("nonsense", ENCODE),
    "the router has no file descriptor, port or memory left": ("shortage", MONO),
    "the client leaves": ("client leaves", MONO),
    "an answer that has begun takes longer than `--total-timeout`": (
        "content length too long",
        MONO,
    ),
    "a kept connection is closed just as the request comes": ("closes kept connections", MONO),
}


@contextlib.asynccontextmanager
async def run_failing(fault: str) -> AsyncIterator[str]:
    """The URL of an instance with this fault."""
    if fault == "nonsense":
        async with fake_instances.run_instance(
            InstancePlan({}, answers=lambda _: b"<html>")
        ) as instance:
            yield instance.url
        return
    at_instance = {"client leaves": "hangs", "shortage": ""}.get(fault, fault)
    async with raw_http.run_instance(at_instance) as faulty:
        yield faulty.url


def use_up_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every new connection of the router fail as if it had no file descriptor left."""

    async def fail_to_connect(
        _: object, *__: object, req: aiohttp.ClientRequest, **___: object
    ) -> None:
        raise aiohttp.ClientConnectorError(
            req.connection_key, OSError(errno.EMFILE, "Too many open files")
        )

    monkeypatch.setattr(aiohttp.TCPConnector, "_wrap_create_connection", fail_to_connect)


@pytest.mark.parametrize(
    ("fault", "leg"), [each for each in ROWS.values() if each[0] not in raw_http.FAULTS]
)
async def test_what_never_counts(fault: str, leg: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The breaker opens at the first failure, and this is none."""
    async with (
        run_failing(fault) as url,
        raw_http.run_instance() as well,
        fake_instances.run_router(
            [well.url] if leg == ENCODE else [url],
            [url] if leg == ENCODE else [],
            failures=1,
            probe_interval_s=60.0,
        ) as router,
    ):
        await router.app.endpoint.upstream.health_monitor.wait_probed()
        (instance,) = router.fleet.get(ENCODE) or tuple(router.fleet)
        if fault == "shortage":
            use_up_descriptors(monkeypatch)
        task = asyncio.create_task(router.post_chat("a"))
        if fault == "client leaves":
            await asyncio.sleep(0.2)
            task.cancel()
        await asyncio.wait([task])
        await fake_instances.wait_until(lambda: not router.app.admission.requests_under_way)
        assert (instance.state, instance.breaker.state) == ("healthy", "closed")
        assert instance.breaker.consecutive_failures == 0


def test_the_page_tells_what_counts() -> None:
    """Each row says of its fault what the page of all faults, or the test above, has found."""
    section = re.search(r"## Whose fault\n(.*?)(?=\n## )", PAGE.read_text("utf-8"), re.DOTALL)
    assert section is not None
    told = dict(re.findall(r"^\| (.+?) \| (yes|no) \|", section[1], re.MULTILINE))
    assert list(told) == list(ROWS)
    found = test_upstream_faults.read_table(ALL_FAULTS.read_text("utf-8"))
    for row, (fault, leg) in ROWS.items():
        counts = any(
            outcome.breaker != "not counted"
            for cell, outcome in found.items()
            if (cell.fault, cell.leg) == (fault, leg)
        )
        assert told[row] == ("yes" if counts else "no"), row


def test_errors_in_logs_are_cut_and_printable() -> None:
    """What an instance sends is quoted in exceptions: no line of a log is made by it."""
    described = failures.describe_error(
        aiohttp.ClientOSError(1, f"a\r\nforged line\x1b[31m{'x' * 10_000}")
    )

    assert described.startswith("ClientOSError: ") and described.isprintable()
    assert len(described) <= failures.MAX_DESCRIPTION_CHARS + 1


async def test_without_file_descriptors_probes_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance that could not be asked stays as it was, and the client is told to come back."""
    async with (
        raw_http.run_instance("closes kept connections") as one,
        fake_instances.run_router([one.url], probe_interval_s=60.0) as router,
    ):
        await router.get_json("/readyz")  # a connection to the router, which is kept
        await router.app.endpoint.upstream.health_monitor.wait_probed()
        (instance,) = router.fleet
        use_up_descriptors(monkeypatch)
        assert not await router.app.endpoint.upstream.health_monitor.probe_instance(instance)
        status, headers, body = await router.post_chat()
        assert (status, headers["Retry-After"]) == (503, "1")
        assert b"no free connection" in body
        assert (instance.state, instance.missed_probes) == ("healthy", 0)
