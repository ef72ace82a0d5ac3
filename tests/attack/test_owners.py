# SPDX-License-Identifier: Apache-2.0
"""Whoever has a key reads the reports of its own requests alone; `serve` with a token answers nobody else."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from commands.router.test_router_process import CommandProcess, run_command
from commands.router.test_worker_processes import wait_for_workers
from router import fake_instances
from router.fake_instances import InstancePlan, RunningRouter

from attack.serve_thread import run_serve
from attack.test_export_elements import encode_export
from ttft_otel.model.names import env_names
from ttft_otel.report.receive.receiver import OTLP_TRACE_SERVICE
from ttft_otel.report.report_server import ReportServer
from ttft_otel.router.errors import RequestRejected
from ttft_otel.router.limits import RouterLimits
from ttft_otel.router.proxy import admission
from ttft_otel.router.upstream.http_headers import ClientHeaders
from ttft_otel.tracing.settings import Settings

ALICE, BOB = "alice-1", "bob-ü"
ORDER = "order-17"
CHAT_PATH = "/v1/chat/completions"
SERVED = (
    "/",
    "/trace/1",
    "/api/requests",
    "/api/trace/1",
    "/api/summary",
    "/ttft_report/x",
    "/stages.css",
)


async def read_report(router: RunningRouter, key: str) -> tuple[int, Any]:
    """What this key is told of the order."""
    status, _, body = await router.get_json(f"/ttft_report/{ORDER}", Authorization=f"Bearer {key}")
    return status, body


@pytest.mark.parametrize("sampler", ["always_on", "always_off"])
async def test_reports_have_owners(sampler: str) -> None:
    """Another key, and none, neither reads a report nor replaces it by a request with the same ID."""
    settings = Settings(sampler=sampler)
    plans = [InstancePlan({})]
    async with fake_instances.run_routed_instances(plans, settings=settings, keys=[ALICE, BOB]) as (
        router,
        _,
    ):
        await router.post_chat(Authorization=f"Bearer {ALICE}", X_Request_Id=ORDER)
        status, hers = await read_report(router, ALICE)
        assert status == 200
        assert (await read_report(router, BOB))[0] == 404
        reports = router.app.endpoint.reports
        for key, expected in (("", 401), ("wrong", 401), (BOB, 200)):
            reports.max_reports = 2
            for _ in range(1 if expected == 200 else 5):
                given = {"Authorization": f"Bearer {key}", "X_Request_Id": ORDER}
                assert (await router.post_chat(**given))[0] == expected
            assert await read_report(router, ALICE) == (200, hers), key
        assert (await read_report(router, BOB))[0] == 200
        # Her own is replaced by her own.
        await router.post_chat(Authorization=f"Bearer {ALICE}", X_Request_Id=ORDER)
        assert await read_report(router, ALICE) != (200, hers)


async def test_a_key_has_its_share() -> None:
    """--max-key-requests: however many requests one key has open, the other key is answered."""
    permits = asyncio.Semaphore(0)
    plan, limits = InstancePlan({}, permits=permits), RouterLimits(max_key_requests=2)
    async with fake_instances.run_routed_instances([plan], keys=[ALICE, BOB], limits=limits) as (
        router,
        one,
    ):

        async def post(key: str) -> int:
            return (await router.post_chat(Authorization=f"Bearer {key}"))[0]

        held = [asyncio.create_task(post(ALICE)) for _ in range(2)]
        await fake_instances.wait_until(lambda: len(one.received) == 2)
        assert [await post(ALICE) for _ in range(5)] == [429] * 5
        assert (await router.post_body("/v1/files", b"x", Authorization=f"Bearer {ALICE}"))[
            0
        ] == 429
        assert router.app.admission.refusal_counts["share"] == 6
        other = asyncio.create_task(post(BOB))
        await fake_instances.wait_until(lambda: len(one.received) == 3)
        # Who leaves gives its share back, and so does who has its answer.
        held[0].cancel()
        await fake_instances.wait_until(lambda: any(each.cancelled_us for each in one.received))
        held[0] = asyncio.create_task(post(ALICE))
        await fake_instances.wait_until(lambda: len(one.received) == 4)
        for _ in range(100):
            permits.release()
        assert [await each for each in (*held, other)] == [200] * 3
        assert [await post(ALICE) for _ in range(5)] == [200] * 5


async def test_a_key_has_its_bytes() -> None:
    """--max-key-bytes: what one key's bodies take, others have beside it; who leaves gives it back."""
    plan, limits = InstancePlan({"prefill.compute": 60_000}), RouterLimits(max_key_bytes=100_000)
    long = b'{"model": "tiny"%b}' % (b" " * 60_000)
    async with fake_instances.run_routed_instances([plan], keys=[ALICE, BOB], limits=limits) as (
        router,
        one,
    ):

        async def post(key: str, body: Any = long) -> tuple[int, Any, bytes]:
            return await router.post_body(CHAT_PATH, body, Authorization=f"Bearer {key}")

        async def hold(*given: Any) -> asyncio.Task[Any]:
            before = len(one.received)
            task = asyncio.create_task(post(*given))
            await fake_instances.wait_until(lambda: len(one.received) > before)
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
        await fake_instances.wait_until(lambda: not router.app.endpoint.body_budget.counted_bytes)
        held.append(await hold(ALICE))
        assert (await post(ALICE))[0] == 429
        held[-1].cancel()


async def test_a_key_has_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """--max-key-rate: a second's requests may come at once; then one for each part of a second."""
    now_us = 5_000_000
    monkeypatch.setattr(admission.clock, "now_us", lambda: now_us)
    limits = RouterLimits(max_key_rate=4)
    async with fake_instances.run_routed_instances(
        [InstancePlan({})], keys=[ALICE, BOB], limits=limits
    ) as (router, _):

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
    async with fake_instances.run_routed_instances([InstancePlan({})]) as (router, _):
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
    """A request with the order's ID, on a connection of its own, so at any worker."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(headers=headers | {"X-Request-Id": ORDER}) as client:
        body = {"model": "tiny", "messages": []}
        async with client.post(f"{it.router.url}/v1/chat/completions", json=body) as response:
            assert response.status == 200


async def read_all_reports(it: CommandProcess, key: str) -> list[Any]:
    """What it is told of the order by 12 connections, so by all workers."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    found = []
    for _ in range(12):
        async with aiohttp.ClientSession(headers=headers) as client:
            async with client.get(f"{it.router.url}/ttft_report/{ORDER}") as response:
                assert response.status == (404 if key == "bob-1" else 200)
                found.append(await response.json())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("key", [ALICE, pytest.param("", marks=pytest.mark.full)])
async def test_workers_agree_on_the_request(tmp_path: Path, key: str) -> None:
    """Of one ID at several workers all show the same request: an owner's newest, without keys the first.

    Of another owner's none of them shows anything.
    """
    async with fake_instances.run_instance(InstancePlan({})) as one:
        env = {env_names.TTFT_OTEL: "1", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
        flags = (
            "--backend",
            one.url,
            "--workers",
            "3",
            *(("--api-key", key, "--api-key", "bob-1") if key else ()),
        )
        async with run_command(tmp_path, *flags, **env) as it:
            await wait_for_workers(it, 3)
            await post_order(it, key)
            first = await read_all_reports(it, key)
            for _ in range(8):
                await post_order(it, key)
            later = await read_all_reports(it, key)
            if key:
                await read_all_reports(it, "bob-1")
    assert all(each == first[0] for each in first)
    assert all(each == later[0] for each in later)
    assert (first[0] == later[0]) == (not key)


@pytest.fixture
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """`ttft-otel serve` with this token."""
    with run_serve(tmp_path, 0, token=request.param) as server:
        yield server


def encode_password(text: str) -> str:
    """What a browser sends."""
    return f"Basic {base64.b64encode(text.encode()).decode()}"


GIVEN = [
    (None, False),
    ("", False),
    ("Bearer ", False),
    ("Bearer wrong", False),
    ("Bearer sesamö", True),
    ("bearer sesamö", True),
    (encode_password("anybody:sesamö"), True),
    (encode_password("sesamö:"), False),
    ("Basic sesamö", False),
    ("Basic a", False),
    ("Basic =", False),
]


@pytest.mark.parametrize("served", ["sesamö", ""], indirect=True)
async def test_serve_asks_for_its_token(served: ReportServer) -> None:
    """Every path of HTTP but the probes', and gRPC; without a token everybody is answered."""
    url = f"http://127.0.0.1:{served.http_port}"
    export = encode_export()
    async with aiohttp.ClientSession() as client:
        for given, is_right in GIVEN:
            headers = {} if given is None else {"Authorization": given}
            is_open = is_right or not served.options.token
            for path in SERVED:
                async with client.get(url + path, headers=headers) as response:
                    assert (response.status != 401) == is_open, (given, path)
                    if not is_open:
                        assert "Basic" in response.headers["WWW-Authenticate"]
            kind = {"Content-Type": "application/x-protobuf"}
            async with client.post(
                f"{url}/v1/traces", data=export, headers=headers | kind
            ) as response:
                assert response.status == (200 if is_open else 401), given
            async with client.get(f"{url}/healthz", headers=headers) as response:
                assert response.status == 200
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
        call = channel.unary_unary(f"/{OTLP_TRACE_SERVICE}/Export")
        # Metadata are ASCII.
        given = (("authorization", encode_password("x:sesamö")),)
        await call(export, metadata=given)
        if served.options.token:
            for wrong in ((), (("authorization", "Bearer wrong"),)):
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await call(export, metadata=wrong)
                assert raised.value.code() == grpc.StatusCode.UNAUTHENTICATED
        else:
            await call(export)
