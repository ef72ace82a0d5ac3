# SPDX-License-Identifier: Apache-2.0
"""Callers who want what is not theirs: reports, shares, turns, samples, orders; what is told of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from commands.router.test_router_command import CommandProcess, run_command
from commands.router.test_worker_processes import wait_for_workers
from router import fake_instances
from router.control.test_admin import open_admin
from router.fake_instances import (
    FakeInstance,
    InstancePlan,
    RunningRouter,
    run_routed_instances,
    wait_until,
)
from router.proxy.test_hold_queue import get_queue, run_holding

from ttft_otel.model.names import env_names
from ttft_otel.router.errors import RequestRejected
from ttft_otel.router.limits import RouterLimits
from ttft_otel.router.proxy import admission
from ttft_otel.router.upstream.http_headers import ClientHeaders
from ttft_otel.tracing.context import start_context
from ttft_otel.tracing.settings import Settings

ALICE, BOB, CAROL = "alice-1", "bob-ü", "carol-1"
KEYS = [ALICE, BOB]
ORDER = "order-17"
CHAT_PATH = "/v1/chat/completions"


def bear(key: str) -> dict[str, str]:
    """The header with this key, "" for none."""
    return {"Authorization": f"Bearer {key}"} if key else {}


async def read_report(router: RunningRouter, key: str) -> tuple[int, Any]:
    """What this key is told of the order."""
    status, _, body = await router.get_json(f"/ttft_report/{ORDER}", **bear(key))
    return status, body


@pytest.mark.parametrize("sampler", ["always_on", "always_off"])
async def test_reports_have_owners(sampler: str) -> None:
    """Another key, and none, neither reads a report nor replaces it by a request with the same ID."""
    settings = Settings(sampler=sampler)
    async with run_routed_instances(settings=settings, keys=KEYS) as (router, _):
        await router.post_chat(**bear(ALICE), X_Request_Id=ORDER)
        status, hers = await read_report(router, ALICE)
        assert status == 200
        assert (await read_report(router, BOB))[0] == 404
        reports = router.app.endpoint.reports
        for key, expected in (("", 401), ("wrong", 401), (BOB, 200)):
            reports.max_reports = 2
            for _ in range(1 if expected == 200 else 5):
                assert (await router.post_chat(**bear(key), X_Request_Id=ORDER))[0] == expected
            assert await read_report(router, ALICE) == (200, hers), key
        assert (await read_report(router, BOB))[0] == 200
        # Her own is replaced by her own.
        await router.post_chat(**bear(ALICE), X_Request_Id=ORDER)
        assert await read_report(router, ALICE) != (200, hers)


async def test_a_key_has_its_share() -> None:
    """--max-key-requests: however many requests one key has open, the other key is answered."""
    permits = asyncio.Semaphore(0)
    plan, limits = InstancePlan({}, permits=permits), RouterLimits(max_key_requests=2)
    async with run_routed_instances([plan], keys=KEYS, limits=limits) as (router, one):

        async def post(key: str) -> int:
            return (await router.post_chat(**bear(key)))[0]

        held = [asyncio.create_task(post(ALICE)) for _ in range(2)]
        await wait_until(lambda: len(one.received) == 2)
        assert [await post(ALICE) for _ in range(5)] == [429] * 5
        assert (await router.post_body("/v1/files", b"x", **bear(ALICE)))[0] == 429
        assert router.app.admission.refusal_counts["share"] == 6
        other = asyncio.create_task(post(BOB))
        await wait_until(lambda: len(one.received) == 3)
        # Who leaves gives its share back, and so does who has its answer.
        held[0].cancel()
        await wait_until(lambda: any(each.cancelled_us for each in one.received))
        held[0] = asyncio.create_task(post(ALICE))
        await wait_until(lambda: len(one.received) == 4)
        for _ in range(100):
            permits.release()
        assert [await each for each in (*held, other)] == [200] * 3
        assert [await post(ALICE) for _ in range(5)] == [200] * 5


async def test_a_key_has_its_bytes() -> None:
    """--max-key-bytes: what one key's bodies take, others have beside it; who leaves gives it back."""
    plan, limits = InstancePlan({"prefill.compute": 60_000}), RouterLimits(max_key_bytes=100_000)
    long = b'{"model": "tiny"%b}' % (b" " * 60_000)
    async with run_routed_instances([plan], keys=KEYS, limits=limits) as (router, one):

        async def post(key: str, body: Any = long) -> tuple[int, Any, bytes]:
            return await router.post_body(CHAT_PATH, body, **bear(key))

        async def hold(*given: Any) -> asyncio.Task[Any]:
            before = len(one.received)
            task = asyncio.create_task(post(*given))
            await wait_until(lambda: len(one.received) > before)
            return task

        held = [await hold(ALICE)]
        for _ in range(3):
            status, headers, body = await post(ALICE)
            assert (status, headers.get("Retry-After")) == (429, "1"), body
            assert b"bytes of this API key" in body
        assert router.app.admission.refusal_counts["share"] == 3
        # Nothing of what was refused counts, and another key has a share of its own.
        held += [await hold(ALICE, {"model": "tiny"}), await hold(BOB)]
        for task in held:
            task.cancel()
        await wait_until(lambda: not router.app.endpoint.body_budget.counted_bytes)
        held.append(await hold(ALICE))
        assert (await post(ALICE))[0] == 429
        held[-1].cancel()


async def test_a_key_has_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """--max-key-rate: a second's requests may come at once; then one for each part of a second."""
    now_us = 5_000_000
    monkeypatch.setattr(admission.clock, "now_us", lambda: now_us)
    limits = RouterLimits(max_key_rate=4)
    async with run_routed_instances(keys=KEYS, limits=limits) as (router, _):

        def admit(key: str, number: int) -> int:
            """How many of so many requests are admitted."""
            count = 0
            for _ in range(number):
                try:
                    admitted = ClientHeaders({}, {"authorization": f"Bearer {key}"})
                    owner = router.app.admission.admit_request({"path": CHAT_PATH}, admitted, False)
                except RequestRejected as refused:
                    assert (refused.status, refused.reason) == (429, "share")
                    continue
                router.app.admission.end_request(owner)
                count += 1
            return count

        assert (admit(ALICE, 9), admit(ALICE, 9)) == (4, 0)
        assert admit(BOB, 9) == 4
        # What was refused was not booked.
        now_us += 250_000
        assert admit(ALICE, 9) == 1
        now_us += 10_000_000
        assert admit(ALICE, 9) == 4


async def test_without_keys_the_first_stays() -> None:
    """Nobody can tell whose a request is: whoever repeats an ID neither replaces nor renews its report."""
    async with run_routed_instances() as (router, _):
        reports = router.app.endpoint.reports
        reports.max_reports = 3
        await router.post_chat(X_Request_Id=ORDER)
        first = await read_report(router, "")
        assert first[0] == 200
        for _ in range(5):
            await router.post_chat(X_Request_Id=ORDER)
        assert await read_report(router, "") == first
        assert len(reports) == 1
        for number in range(3):
            await router.post_chat(X_Request_Id=f"other-{number}")
        assert (await read_report(router, ""))[0] == 404
        await router.post_chat(X_Request_Id=ORDER)
        assert (await read_report(router, ""))[0] == 200


async def post_order(it: CommandProcess, key: str) -> None:
    """A request with the order's ID, at any worker."""
    body = {"model": "tiny", "messages": []}
    assert (await it.ask(CHAT_PATH, body, **bear(key), X_Request_Id=ORDER))[0] == 200


async def read_all_reports(it: CommandProcess, key: str) -> set[tuple[int, bytes]]:
    """What it is told of the order by 12 connections, so by all workers, once they have told each other."""
    async with asyncio.timeout(20):
        while True:
            found = {await it.ask(f"/ttft_report/{ORDER}", **bear(key)) for _ in range(12)}
            if len(found) == 1:
                return found
            await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("key", [ALICE, pytest.param("", marks=pytest.mark.full)])
async def test_workers_agree_on_the_request(tmp_path: Path, key: str) -> None:
    """Of one ID at several workers all show the same request: an owner's newest, without keys the first.

    Of another owner's none of them shows anything.
    """
    async with fake_instances.run_instance() as one:
        env = {env_names.TTFT_OTEL: "1", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
        flags = ["--backend", one.url, "--workers", "3"]
        flags += ["--api-key", key, "--api-key", CAROL] if key else []
        async with run_command(tmp_path, *flags, **env) as it:
            await wait_for_workers(it, 3)
            await post_order(it, key)
            first = await read_all_reports(it, key)
            for _ in range(8):
                await post_order(it, key)
            later = await read_all_reports(it, key)
            if key:
                assert {status for status, _ in await read_all_reports(it, CAROL)} == {404}
    assert len(first) == len(later) == 1 and {status for status, _ in first} == {200}
    assert (first == later) == (not key)


MALLORY = "mallory-1"
SHARE = 4  # requests of one key under way
MOST_URGENT = -(2**63)
PREFILL_MS = 50


async def post(router: RunningRouter, key: str, **fields: object) -> int:
    """The status of a completion that the router takes for 20 s of prefill: one at a time is sent."""
    body = {"model": "tiny", "prompt": key, "stream": True, "tokens": 20_000, **fields}
    return (await router.post_body("/v1/completions", body, **bear(key)))[0]


@contextlib.asynccontextmanager
async def run_flooded(
    timeout_s: float = 60.0, **options: Any
) -> AsyncIterator[tuple[RunningRouter, FakeInstance]]:
    """A router that holds, and Mallory, who sends urgent requests as fast as the share of one key allows."""
    limits = RouterLimits(max_key_requests=SHARE, first_byte_timeout=timeout_s)
    options |= {"keys": [MALLORY, CAROL], "limits": limits}
    async with run_holding(prefill_ms=PREFILL_MS, max_queue_s=0.01, **options) as (router, one):

        async def flood() -> None:
            while True:
                await post(router, MALLORY, priority=MOST_URGENT)

        flooding = [asyncio.create_task(flood()) for _ in range(SHARE)]
        try:
            await wait_until(lambda: len(get_queue(router)) == SHARE - 1)
            yield router, one
        finally:
            for task in flooding:
                task.cancel()
            await asyncio.gather(*flooding, return_exceptions=True)
        budget = router.app.endpoint.body_budget
        await wait_until(lambda: not len(get_queue(router)) and not budget.counted_bytes)


async def test_nobody_is_overtaken_by_claim() -> None:
    """However urgent other requests say that they are: of those that come later none goes first."""
    async with run_flooded() as (router, one):
        queue = get_queue(router)
        for _ in range(3):
            carol = asyncio.create_task(post(router, CAROL))
            await wait_until(
                lambda carol=carol: (  # type: ignore[misc]
                    carol.done() or any(CAROL.encode() in each.request.body for each in queue._held)
                )
            )
            before = len(one.received)
            assert await carol == 200
            # Those that were here before, and one that was on its way.
            senders = [each.json["prompt"] for each in one.received[before:]]
            assert CAROL not in senders[SHARE + 1 :]


async def test_trusted_callers_can_overtake() -> None:
    """With --trust-priority Carol waits for as long as Mallory sends, and is told when that is too long."""
    async with run_flooded(1.0, trust_priority=True) as (router, _):
        assert await post(router, CAROL) == 504
        assert get_queue(router).counts["late"] >= 1


async def test_nobody_is_driven_out_by_claim() -> None:
    """Where --max-held is reached, the urgent ones that come are refused, not those that wait already."""
    options = {"max_queue_s": 0.01, "limits": RouterLimits(max_held=2)}
    async with run_holding(prefill_ms=600_000, **options) as (router, one):
        queue = get_queue(router)
        tasks = [asyncio.create_task(post(router, ""))]
        await wait_until(lambda: one.received)
        tasks += [asyncio.create_task(post(router, "")) for _ in range(2)]
        await wait_until(lambda: len(queue) == 2)
        flood = [post(router, "", priority=MOST_URGENT) for _ in range(20)]
        assert await asyncio.wait_for(asyncio.gather(*flood), 60) == [429] * 20
        assert len(queue) == 2 and not any(each.done() for each in tasks)
        for task in tasks:
            task.cancel()
        await wait_until(lambda: not len(queue))


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
    async with run_routed_instances(settings=UNTRUSTED) as (router, one):
        for number in range(25):
            traceparent = f"00-{number + 1:016x}{1:016x}-b7ad6b7169203331-01"
            await router.post_chat(traceparent=traceparent)
        flags = [each.headers["traceparent"][-2:] for each in one.received]
        assert len(flags) == 25 and 0 < flags.count("00")


TOKEN = "sesame"
FORGED = 'x"}\n{"event": "ttft-otel admin order"'
UNKNOWN = "http://127.0.0.1:9"
ATTEMPTS = 40


async def test_orders_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Those that were done and those that were refused, one line each; of strangers one a second."""
    caplog.set_level(logging.WARNING, "ttft_otel.audit")
    began = datetime.now(timezone.utc)
    async with run_routed_instances() as (router, _), open_admin(router, TOKEN) as here:
        other = fake_instances.find_unused_url()

        async def give(action: str, url: str, token: str = TOKEN) -> int:
            order = {"action": action, "leg": "mono", "url": url}
            headers = bear(token) | {"User-Agent": "kubectl/1"}
            async with here.client.post(here.url, json=order, headers=headers) as response:
                return response.status

        orders = [("add", other), ("drain", other), ("drain", FORGED), ("remove", UNKNOWN)]
        assert [await give(*each) for each in orders] == [200, 200, 400, 404]
        assert [await give("add", other, "wrong") for _ in range(ATTEMPTS)] == [401] * ATTEMPTS
        assert (await here.list_instances(**bear(TOKEN)))[0] == 200
    lines = [each.getMessage() for each in caplog.records if each.name == "ttft_otel.audit"]
    assert not any("\n" in line for line in lines)
    entries = [json.loads(line) for line in lines]
    known, strangers = entries[:4], entries[4:]
    assert [each["status"] for each in known] == [200, 200, 400, 404]
    assert [(each["order"]["action"], each["order"]["url"]) for each in known] == orders
    assert 1 <= len(strangers) < ATTEMPTS / 4
    assert all(each["status"] == 401 and each["order"] is None for each in strangers)
    for each in entries:
        assert (each["client"], each["user_agent"]) == ("127.0.0.1", "kubectl/1")
        assert each["token"] == (each["status"] != 401)
        age = datetime.fromisoformat(each["time"]) - began + timedelta(milliseconds=1)
        assert timedelta() <= age < timedelta(minutes=2)


SECRET = "a-secret-of-a-client"
KEY, UPSTREAM_KEY = "key-of-a-client", "key-of-the-instances"
SAID = [{"role": "user", "content": SECRET}]
SHOWN = [{"content": [{"type": "image_url", "image_url": {"url": SECRET}}]}]
BODIES: tuple[Any, ...] = (
    {"model": "tiny", "stream": True, "messages": SAID},
    {"model": "tiny", "messages": SAID},
    {"model": "tiny", "messages": SECRET},
    {"model": "unknown", "messages": SAID},
    b'{"model": "tiny", "messages": [{"content": "' + SECRET.encode(),
    {"model": "tiny", "messages": SHOWN},
)


@pytest.mark.parametrize("status", [200, 400, 500, 503])
async def test_nothing_of_a_body_leaves(status: int, caplog: pytest.LogCaptureFixture) -> None:
    """Whether it is served, refused or fails, and whether its instance repeats it in an error."""
    caplog.set_level(logging.DEBUG)
    plan = InstancePlan({}, status=status, answers=lambda body: body)
    async with run_routed_instances(
        [plan], settings=Settings(metrics=True), keys=[KEY], key=UPSTREAM_KEY
    ) as (router, one):
        for number, body in enumerate(BODIES):
            await router.post_body(CHAT_PATH, body, **bear(KEY), X_Request_Id=f"r{number}")
        assert one.received and SECRET.encode() in one.received[0].body
        told = b"".join(await router.wait_for_encoded(len(BODIES)))
        assert b"r0" in told
        reports = [f"/ttft_report/r{number}" for number in range(len(BODIES))]
        for path in ("/metrics", "/readyz", "/v1/models", *reports):
            async with router.client.get(router.url + path, headers=bear(KEY)) as response:
                told += await response.read()
    told += caplog.text.encode()
    for word in (SECRET, KEY, UPSTREAM_KEY):
        assert word.encode() not in told, word
