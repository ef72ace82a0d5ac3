# SPDX-License-Identifier: Apache-2.0
"""A request through prefill and decode instances: what each and the client get; blocks are freed."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from router import fake_instances
from ttft_otel.exporter.span_writer import cut_handover
from ttft_otel.model.names import keys, span_names
from ttft_otel.model.record import Ttft
from ttft_otel.tracing import clock

CHAT, COMPLETIONS = fake_instances.CHAT_PATH, "/v1/completions"
PATHS = (CHAT, COMPLETIONS)
ALL_TOKENS = list(fake_instances.ANSWER_TOKENS)
USAGE = {"prompt_tokens": 5, "total_tokens": 9, "completion_tokens": 4}


async def wait_for_ttft(router: fake_instances.RunningRouter, count: int = 2) -> tuple[Ttft, Any]:
    """The ttft half and the last record of one stream."""
    records = await router.wait_for_records(count)
    ttft = next(each.ttft for each in records if each.ttft)
    assert sum(ttft.stages.values()) + ttft.unattributed == ttft.end - ttft.start
    return ttft, records[-1]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", ["off", "strip"])
async def test_every_mode_gives_one_plain_stream(mode: str, path: str) -> None:
    """The same events, usage and id whichever way the first token came; prefill is empty afterwards."""
    # Prefill's and decode's streams begin in different seconds; the client's does not.
    async with fake_instances.run_fleet(mode, created=107) as fleet:
        got = await fleet.send_request(path, stream_options={"include_usage": True})
        assert got.status == 200 and got.headers["Content-Type"].startswith("text/event-stream")
        assert got.texts == ALL_TOKENS and got.events[-1] == "[DONE]"
        assert got.events[-2]["usage"] == USAGE
        assert {(each["id"], each["created"]) for each in got.events[:-1]} == {
            (f"cmpl-{got.headers['X-Request-Id']}", 107 if mode == "off" else 100)
        }
        if path == CHAT:
            assert got.events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        ends = [each["choices"][0]["finish_reason"] for each in got.events[:-2]]
        assert ends == [None] * (len(ends) - 1) + ["length"]
        assert await fleet.wait_until_freed()
        ttft, _ = await wait_for_ttft(fleet.router)
        assert ttft.attributes[keys.FIRST_TOKEN] == mode
        assert keys.FIRST_TOKEN_REASON not in ttft.attributes


@pytest.mark.parametrize("mode", ["off", "strip"])
async def test_plain_answers_are_decodes(mode: str) -> None:
    """An answer that is not streamed is the decode instance's alone."""
    async with fake_instances.run_fleet(mode) as fleet:
        got = await fleet.send_request(stream=False)
        assert json.loads(got.body)["choices"][0]["message"]["content"] == "".join(ALL_TOKENS)
        (asked,) = fleet.decode.received
        assert asked.json["kv_transfer_params"]["remote_host"] == "10.0.0.1"
        assert asked.headers["x-ttft-leg"] == "decode" and await fleet.wait_until_freed()


async def test_blocks_of_an_answer_in_another_form_reach_decode() -> None:
    """Decode answers from the first token on, and fetches the blocks that prefill keeps all the same."""
    async with fake_instances.run_fleet("strip", is_foreign=True) as fleet:
        await fleet.send_request()
        (asked,) = fleet.decode.received
        assert asked.json["kv_transfer_params"]["remote_host"] == "10.0.0.1"
        assert await fleet.wait_until_freed()


async def test_what_prefill_and_decode_are_asked() -> None:
    """Prefill: one token, its blocks kept, the same id and seed. Decode: what prefill returned, unchanged."""
    async with fake_instances.run_fleet("strip") as fleet:
        await fleet.send_request(max_completion_tokens=4, seed=3, min_tokens=2)
        (p,), (d,) = fleet.prefill.received, fleet.decode.received
        assert p.headers["x-ttft-leg"] == "prefill"
        assert (p.json["max_tokens"], p.json["stream"], p.json["min_tokens"]) == (1, False, 1)
        assert p.json["kv_transfer_params"]["do_remote_decode"] is True
        assert d.json["kv_transfer_params"] == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_request_id": f"cmpl-{d.headers['X-Request-Id']}-p",
            "remote_host": "10.0.0.1",
            "remote_port": 5600,
        }
        assert p.json["seed"] == d.json["seed"] == 3
        assert p.headers["X-Request-Id"] == d.headers["X-Request-Id"]
        assert (d.json["max_completion_tokens"], d.json["min_tokens"]) == (4, 2)


async def test_shared_storage_needs_no_parameters() -> None:
    """Where prefill returns none, decode gets none."""
    for mode in ("off", "strip"):
        async with fake_instances.run_fleet(mode, nixl=False) as fleet:
            assert (await fleet.send_request()).texts == ALL_TOKENS
            assert "kv_transfer_params" not in fleet.decode.received[0].json
            ttft, _ = await wait_for_ttft(fleet.router)
            assert keys.FIRST_TOKEN_REASON not in ttft.attributes


async def test_the_first_token_does_not_wait_for_decode() -> None:
    """800 ms of decode add nothing to the client's TTFT in strip, all of it in off."""
    for mode, early in (("off", False), ("strip", True)):
        async with fake_instances.run_fleet(mode, late=0.8) as fleet:
            begun = clock.now_us()
            url = f"{fleet.router.url}{CHAT}"
            body = {"model": "tiny", "messages": [], "stream": True, "max_tokens": 4}
            async with fleet.router.client.post(url, json=body) as response:
                first = await response.content.readany()
                assert (clock.now_us() - begun < 600_000) == early and b"Hel" in first
                await response.read()
            ttft, last = await wait_for_ttft(fleet.router)
            assert (ttft.end < 600_000) == early
            assert ("decode.kv.transfer" in ttft.stages) == (not early)
            assert ttft.stages["prefill.prefill.compute"] >= 20_000
            assert [call.leg for call in last.calls] == ["prefill", "decode"]


async def test_the_handover_is_told() -> None:
    """The time between the prefill and the decode token is a span below the server span, in parts."""
    async with fake_instances.run_fleet("strip", late=0.1) as fleet:
        await fleet.send_request()
        ttft, record = await wait_for_ttft(fleet.router)
        assert record.handover is not None
        whole, *steps = cut_handover(record.handover)
        assert (whole.name, whole.start) == (span_names.HANDOVER, ttft.end)
        found = dict(whole.attributes)
        total = found.pop(keys.HANDOVER_TOTAL_US)
        assert total == whole.end - whole.start == sum(found.values())
        assert found["ttft.handover.decode.kv.transfer_us"] >= 100_000
        assert steps[0].start == whole.start and steps[-1].end == whole.end
        assert steps[-1].name == span_names.FIRST_DECODE
        for one, two in zip(steps, steps[1:], strict=False):
            assert one.end == two.start


async def test_one_token_is_prefills_alone() -> None:
    """With max_tokens 1, prefill answers and keeps no blocks; decode is not called."""
    for mode in ("off", "strip"):
        async with fake_instances.run_fleet(mode) as fleet:
            got = await fleet.send_request(max_tokens=1)
            assert got.texts == ["Hel"] and not fleet.decode.received
            assert "kv_transfer_params" not in fleet.prefill.received[0].json


async def test_an_answer_that_ends_on_prefill_ends_there() -> None:
    """If the prefill token ends the answer, decode generates nothing, and prefill's blocks are freed."""
    async with fake_instances.run_fleet("strip", finish="stop") as fleet:
        got = await fleet.send_request(stream_options={"include_usage": True})
        assert got.texts == ["Hel"] and got.events[-1] == "[DONE]"
        assert got.events[-2]["usage"]["completion_tokens"] == 1
        assert got.events[-3]["choices"][0]["finish_reason"] == "stop"
        assert await fleet.wait_until_freed()
        assert [each.json["model"] for each in fleet.decode.received] == ["ttft-otel-nobody"]
        ttft, record = await wait_for_ttft(fleet.router)
        assert ttft.attributes[keys.FIRST_TOKEN] == "strip" and record.handover is None


async def test_another_first_token_is_counted() -> None:
    """In strip, a different first token of decode is replaced, marked on the server span and counted."""
    async with fake_instances.run_fleet("strip", first="Yo") as fleet:
        assert (await fleet.send_request()).texts == ALL_TOKENS
        _, record = await wait_for_ttft(fleet.router)
        assert record.server.attributes[keys.FIRST_TOKEN_MISMATCH] is True
        async with fleet.router.client.get(f"{fleet.router.url}/metrics") as response:
            assert "ttft_otel_router_first_token_mismatches_total 1.0" in await response.text()
    async with fake_instances.run_fleet("off", first="Yo") as fleet:
        assert (await fleet.send_request()).texts == ["Yo", *ALL_TOKENS[1:]]


async def check_first_token_off(fleet: fake_instances.PairFleet, reason: str) -> None:
    """Check that decode sent the first token, and that the router's span says why."""
    ttft, _ = await wait_for_ttft(fleet.router)
    assert ttft.attributes[keys.FIRST_TOKEN] == "off"
    assert ttft.attributes[keys.FIRST_TOKEN_REASON] == reason


async def test_half_a_character_waits_for_decode() -> None:
    """A first token that is an incomplete character is not sent at once: the decode event has the text."""
    for half in ("", "a\ufffd"):
        async with fake_instances.run_fleet("strip", tokens=(half, "é", "!", ".")) as fleet:
            assert (await fleet.send_request()).texts == [half, "é", "!", "."]
            assert len(fleet.decode.received) == 1
            await check_first_token_off(fleet, "character")


async def test_prefills_refusal_is_the_clients() -> None:
    """The prefill instance's error status and body are the client's; the decode instance is not called."""
    async with fake_instances.run_fleet("strip") as fleet:
        got = await fleet.send_request(model="other")
        assert got.status == 404 and not fleet.decode.received


async def test_decodes_refusal_ends_the_stream() -> None:
    """Off: decode's status and body. With the first token out: an error event, [DONE], and freed blocks."""
    for mode in ("off", "strip"):
        async with fake_instances.run_fleet(mode, refuses=400) as fleet:
            got = await fleet.send_request()
            if mode == "off":
                assert got.status == 400 and b"refused" in got.body
            else:
                assert got.status == 200 and got.events[-1] == "[DONE]"
                assert got.events[-2]["error"]["message"] == "refused"
                _, record = await wait_for_ttft(fleet.router)
                assert record.server.error == "400"
            assert await fleet.wait_until_freed()


async def test_a_decode_that_is_gone_ends_the_stream() -> None:
    """When no decode can be reached after the prefill token, the client gets an error event and [DONE]."""
    gone = [fake_instances.find_unused_url()]
    async with (
        fake_instances.run_server(fake_instances.PairModel(), False) as p,
        fake_instances.run_router([], prefills=[p.url], decodes=gone) as router,
    ):
        body = {"model": "tiny", "messages": [], "stream": True}
        status, _, data = await router.post_body(CHAT, body)
        assert status == 200 and b'"error"' in data and data.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("slow", "late", "wait"), [(5.0, 0.0, 0.2), (0.0, 5.0, 0.2)], ids=["in P", "between P and D"]
)
async def test_a_client_that_leaves_frees_prefill(slow: float, late: float, wait: float) -> None:
    """100 ms after the client disconnects both legs have ended, and prefill's blocks are freed."""
    for mode in ("off", "strip"):
        async with fake_instances.run_fleet(mode, slow=slow, late=late) as fleet:
            task = asyncio.create_task(fleet.send_request())
            await asyncio.sleep(wait)
            left = clock.now_us()
            task.cancel()
            await asyncio.sleep(0.15)
            busy = fleet.prefill if slow else fleet.decode
            assert 0 < busy.received[0].cancelled_us - left < 100_000
            assert await fleet.wait_until_freed()


@contextlib.asynccontextmanager
async def run_refusing_decode(
    late: float = 0, **options: Any
) -> AsyncIterator[
    tuple[fake_instances.PairFleet, fake_instances.PairServer, fake_instances.PairServer]
]:
    """Run prefill, a decode instance that answers 503, a second decode instance that serves, and a router.

    late: seconds before the first token of the second decode instance. options: of run_router. Gives the
    fleet (the prefill instance and the second decode instance), then both decode instances.
    """
    full, other = fake_instances.PairModel(refuses=503), fake_instances.PairModel(late=late)
    async with (
        fake_instances.run_server(full, False) as p,
        fake_instances.run_server(full, True) as busy,
        fake_instances.run_server(other, True) as idle,
        fake_instances.run_router(
            [], prefills=[p.url], decodes=[busy.url, idle.url], **options
        ) as router,
    ):
        yield fake_instances.PairFleet(full, p, idle, router), busy, idle


async def test_a_decode_that_cannot_is_followed_by_one_without_blocks() -> None:
    """A decode instance that answers 503 has blocks freed: the next one computes the prompt itself."""
    for mode in ("off", "strip"):
        async with run_refusing_decode(first_token=mode) as (fleet, busy, idle):
            assert (await fleet.send_request()).texts == ALL_TOKENS
            assert busy.received[0].json["kv_transfer_params"]["do_remote_prefill"] is True
            (asked,) = idle.received
            assert "remote_host" not in asked.json.get("kv_transfer_params", {})
            assert await fleet.wait_until_freed()


async def test_a_decode_that_refused_has_nothing_in_flight() -> None:
    """While another decode instance answers, the one that said no is free to be chosen."""
    async with run_refusing_decode(late=0.3) as (fleet, busy, idle):
        asked = asyncio.create_task(fleet.send_request())
        await fake_instances.wait_until(lambda: idle.received)
        decodes = fleet.router.fleet.get("decode")
        assert {each.url: each.in_flight for each in decodes} == {busy.url: 0, idle.url: 1}
        assert (await asked).status == 200


async def test_no_retries_is_no_second_decode() -> None:
    """With --retries 0 a decode instance's error is the answer, though another instance is free."""
    async with run_refusing_decode(first_token="off", retries=0) as (fleet, busy, idle):
        assert (await fleet.send_request()).status == 503
        assert not idle.received and not fleet.router.app.endpoint.upstream.retry_counts


async def test_a_stop_of_another_type_is_the_instances_to_refuse() -> None:
    """A `stop` of a wrong type is forwarded to prefill as it came, for prefill to refuse."""
    async with fake_instances.run_fleet("strip") as fleet:
        for stop in (5, True, 1.5, {"a": 1}, [None]):
            assert (await fleet.send_request(stop=stop)).status == 200
            assert fleet.prefill.received[-1].json["stop"] == stop


async def test_several_answers_are_decodes_alone() -> None:
    """n > 1 would fetch one request's blocks several times: decode computes the prompt itself."""
    async with fake_instances.run_fleet("strip") as fleet:
        assert (await fleet.send_request(n=2)).status == 200
        assert not fleet.prefill.received
        assert "kv_transfer_params" not in fleet.decode.received[0].json
        await check_first_token_off(fleet, "n")


async def test_a_clients_own_parameters_reach_nobody() -> None:
    """kv_transfer_params of a client reach no instance, on any path, vllm_xargs included."""
    evil = {"do_remote_prefill": True, "remote_block_ids": [[1]], "prompt_token_ids": [1]}
    for mode in ("off", "strip"):
        async with fake_instances.run_fleet(mode) as fleet:
            for path in (*PATHS, "/v1/responses", "/v1/embeddings"):
                for more in ({}, {"top_p": float("nan")}, {"n": 2}, {"max_tokens": 1}):
                    await fleet.send_request(
                        path,
                        stream=False,
                        kv_transfer_params=evil,
                        ec_transfer_params=evil,
                        vllm_xargs={"kv_transfer_params": "x", "mine": 1},
                        **more,
                    )
            for each in (*fleet.prefill.received, *fleet.decode.received):
                params = each.json.get("kv_transfer_params") or {}
                assert params.get("remote_block_ids") is None
                assert "prompt_token_ids" not in params
                assert "ec_transfer_params" not in each.json
                assert each.json.get("vllm_xargs", {"mine": 1}) == {"mine": 1}


async def test_a_router_that_is_stopped_leaves_nothing_on_prefill() -> None:
    """A request that the drain's time-out cuts off before decode took prefill's blocks has them released."""
    model = fake_instances.PairModel()
    async with (
        fake_instances.run_server(model, False) as p,
        fake_instances.run_server(model, True) as d,
        aiohttp.ClientSession() as client,
    ):
        model.stuck = 20
        async with fake_instances.run_router([], prefills=[p.url], decodes=[d.url]) as router:
            body = {"model": "tiny", "messages": [], "stream": True, "max_tokens": 4}
            cut = asyncio.create_task(client.post(router.url + CHAT, json=body))
            await fake_instances.wait_until(lambda: d.received)
            assert model.held_requests
            router.server.cancels = True
        assert not model.held_requests
        await asyncio.gather(cut, return_exceptions=True)


async def test_with_every_decodes_breaker_open_prefill_is_left_empty() -> None:
    """With all breakers open one decode is still tried; when it refuses, prefill frees its blocks."""
    options = {"failures": 1, "pause_s": 30}
    async with fake_instances.run_fleet("off", options, refuses=503) as fleet:
        assert [(await fleet.send_request()).status for _ in range(2)] == [503, 503]
        assert len(fleet.prefill.received) == 2 and await fleet.wait_until_freed()
        streams = [each for each in fleet.decode.received if each.json["model"] == "tiny"]
        assert len(streams) == 1
