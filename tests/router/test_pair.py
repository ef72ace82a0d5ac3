# SPDX-License-Identifier: Apache-2.0
"""A request through P and D: what each is asked, what the client gets, and that P is left empty."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from router import fakes, pd
from ttft_otel import clock, names
from ttft_otel.record import Ttft

CHAT, COMPLETIONS = pd.CHAT, "/v1/completions"
PATHS = (CHAT, COMPLETIONS)
WHOLE = list(pd.TOKENS)
USAGE = {"prompt_tokens": 5, "total_tokens": 9, "completion_tokens": 4}


async def told(router: fakes.Router, halves: int = 2) -> tuple[Ttft, Any]:
    """The ttft half and the last record of one stream."""
    records = await router.settled(halves)
    ttft = next(each.ttft for each in records if each.ttft)
    assert sum(ttft.stages.values()) + ttft.unattributed == ttft.end - ttft.start
    return ttft, records[-1]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", ["off", "strip", "continue"])
def test_every_mode_gives_one_plain_stream(mode: str, path: str) -> None:
    """The same events, usage and id whichever way the first token came; P is empty afterwards."""

    async def scenario() -> None:
        async with pd.fleet(mode) as fleet:
            got = await fleet.ask(path, stream_options={"include_usage": True})
            assert got.status == 200 and got.headers["Content-Type"].startswith("text/event-stream")
            assert got.texts == WHOLE and got.events[-1] == "[DONE]"
            assert got.events[-2]["usage"] == USAGE
            assert {(each["id"], each["created"]) for each in got.events[:-1]} == {
                (f"cmpl-{got.headers['X-Request-Id']}", 100)
            }
            if path == CHAT:
                assert got.events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            ends = [each["choices"][0]["finish_reason"] for each in got.events[:-2]]
            assert ends == [None] * (len(ends) - 1) + ["length"]
            assert await fleet.freed() and not fleet.model.dead
            ttft, _ = await told(fleet.router)
            assert ttft.attributes[names.FIRST_TOKEN] == mode
            assert names.FIRST_TOKEN_REASON not in ttft.attributes

    fakes.run(scenario)


@pytest.mark.parametrize("mode", ["off", "strip", "continue"])
def test_plain_answers_are_decodes(mode: str) -> None:
    """Nobody sees the first token of an answer that is not streamed: D makes it and answers."""

    async def scenario() -> None:
        async with pd.fleet(mode) as fleet:
            got = await fleet.ask(stream=False)
            assert json.loads(got.data)["choices"][0]["message"]["content"] == "".join(WHOLE)
            (asked,) = fleet.decode.seen
            assert asked.json["kv_transfer_params"]["remote_host"] == "10.0.0.1"
            assert asked.headers["x-ttft-leg"] == "decode" and await fleet.freed()

    fakes.run(scenario)


def test_what_prefill_and_decode_are_asked() -> None:
    """P: one token, its blocks kept, the same id and seed. D: what P returned, unchanged."""

    async def scenario() -> None:
        async with pd.fleet("strip") as fleet:
            await fleet.ask(max_completion_tokens=4, seed=3, min_tokens=2)
            (p,), (d,) = fleet.prefill.seen, fleet.decode.seen
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

    fakes.run(scenario)


def test_shared_storage_needs_no_parameters() -> None:
    """A P that returns none is followed by a D that gets none; continue is strip then."""

    async def scenario() -> None:
        for mode in ("off", "strip", "continue"):
            async with pd.fleet(mode, nixl=False) as fleet:
                assert (await fleet.ask()).texts == WHOLE
                assert "kv_transfer_params" not in fleet.decode.seen[0].json
                ttft, _ = await told(fleet.router)
                reason = ttft.attributes.get(names.FIRST_TOKEN_REASON)
                assert reason == ("kv_transfer_params" if mode == "continue" else None)

    fakes.run(scenario)


@pytest.mark.parametrize("length", [7, 8, 9, 16, 17])
@pytest.mark.parametrize("path", PATHS)
def test_continue_at_whole_blocks_does_not_kill_decode(length: int, path: str) -> None:
    """At a whole number of blocks D first loads the bare prompt, then goes on without parameters."""

    async def scenario() -> None:
        async with pd.fleet("continue", length=length) as fleet:
            assert (await fleet.ask(path)).texts == WHOLE
            assert not fleet.model.dead and await fleet.freed()
            *loads, last = [each.json for each in fleet.decode.seen]
            assert len(loads) == (length % pd.BLOCK == 0)
            params = last.get("kv_transfer_params", {})
            assert bool(params.get("do_remote_prefill")) == (length % pd.BLOCK != 0)
            ids = params.get("prompt_token_ids") or last["prompt"]
            assert ids == [*range(1, length + 1), 100] and last["max_tokens"] == 3
            for load in loads:
                assert (load["max_tokens"], load["stream"]) == (1, False)
                assert load["kv_transfer_params"]["do_remote_prefill"] is True
            ttft, _ = await told(fleet.router)
            assert ttft.attributes[names.FIRST_TOKEN] == "continue"

    fakes.run(scenario)


def test_continue_needs_to_know_the_blocks() -> None:
    """No block size, a release that takes no ids, no room for one token more: strip, with the reason."""

    async def scenario() -> None:
        for fields, reason in (
            ({"block": 0}, "block_size"),
            ({"version": "0.24.0"}, "version"),
            ({"longest": 6, "length": 5}, "max_model_len"),
        ):
            async with pd.fleet("continue", **fields) as fleet:
                await settled(fleet)
                await fleet.ask(max_tokens=None)
                ttft, _ = await told(fleet.router)
                assert ttft.attributes[names.FIRST_TOKEN] == "strip"
                assert ttft.attributes[names.FIRST_TOKEN_REASON] == reason

    fakes.run(scenario)


async def settled(fleet: pd.Fleet) -> None:
    """Wait until the router has read D's model cards."""
    while not all(each.cards for each in fleet.router.fleet):
        await asyncio.sleep(0.01)


def test_the_first_token_does_not_wait_for_decode() -> None:
    """A D that takes 300 ms costs the client's TTFT nothing in strip and continue, all in off."""

    async def scenario() -> None:
        for mode, early in (("off", False), ("strip", True), ("continue", True)):
            async with pd.fleet(mode, late=0.3) as fleet:
                begun = clock.now()
                url = f"{fleet.router.url}{CHAT}"
                body = {"model": "tiny", "messages": [], "stream": True, "max_tokens": 4}
                async with fleet.router.client.post(url, json=body) as response:
                    first = await response.content.readany()
                    assert (clock.now() - begun < 200_000) == early and b"Hel" in first
                    await response.read()
                ttft, last = await told(fleet.router)
                assert (ttft.end < 200_000) == early
                assert ("decode.kv.transfer" in ttft.stages) == (not early)
                assert ttft.stages["prefill.prefill.compute"] >= 20_000
                assert [call.leg for call in last.calls] == ["prefill", "decode"]

    fakes.run(scenario)


def test_the_handover_is_told() -> None:
    """From P's token to D's next: a span below the server span, cut into what it was made of."""

    async def scenario() -> None:
        for mode, last in (("strip", names.FIRST_DECODE), ("continue", "router.egress")):
            async with pd.fleet(mode, late=0.1) as fleet:
                await fleet.ask()
                ttft, record = await told(fleet.router)
                whole, *steps = record.late
                assert (whole.name, whole.start) == (names.HANDOVER, ttft.end)
                found = dict(whole.attributes)
                total = found.pop(names.HANDOVER_TOTAL_US)
                assert total == whole.end - whole.start == sum(found.values())
                assert found["ttft.handover.decode.kv.transfer_us"] >= 100_000
                assert steps[0].start == whole.start and steps[-1].end == whole.end
                assert steps[-1].name == last
                for one, two in zip(steps, steps[1:], strict=False):
                    assert one.end == two.start

    fakes.run(scenario)


def test_one_token_is_prefills_alone() -> None:
    """max_tokens 1: P answers, streamed or not, keeps nothing, and D hears nothing of it."""

    async def scenario() -> None:
        for mode in ("off", "strip", "continue"):
            async with pd.fleet(mode) as fleet:
                got = await fleet.ask(max_tokens=1)
                assert got.texts == ["Hel"] and not fleet.decode.seen
                assert "kv_transfer_params" not in fleet.prefill.seen[0].json

    fakes.run(scenario)


def test_an_answer_that_ends_on_prefill_ends_there() -> None:
    """P's finish reason is the stream's: no D, and P's blocks are given back."""

    async def scenario() -> None:
        for mode in ("strip", "continue"):
            async with pd.fleet(mode, finish="stop") as fleet:
                got = await fleet.ask(stream_options={"include_usage": True})
                assert got.texts == ["Hel"] and got.events[-1] == "[DONE]"
                assert got.events[-2]["usage"]["completion_tokens"] == 1
                assert got.events[-3]["choices"][0]["finish_reason"] == "stop"
                assert await fleet.freed()
                assert [each.json["model"] for each in fleet.decode.seen] == ["ttft-otel-nobody"]
                ttft, record = await told(fleet.router)
                assert ttft.attributes[names.FIRST_TOKEN] == mode and record.late == ()

    fakes.run(scenario)


def test_decode_may_merge_tokens() -> None:
    """D's first event may hold three tokens: the client loses none of them."""

    async def scenario() -> None:
        for mode in ("off", "strip", "continue"):
            for path in PATHS:
                async with pd.fleet(mode, merged=3) as fleet:
                    assert "".join((await fleet.ask(path)).texts) == "".join(WHOLE)

    fakes.run(scenario)


def test_another_first_token_is_counted() -> None:
    """Strip: the stream stays one sentence, the server span says it and /metrics counts it."""

    async def scenario() -> None:
        async with pd.fleet("strip", first="Yo") as fleet:
            assert (await fleet.ask()).texts == WHOLE
            _, record = await told(fleet.router)
            assert record.server.attributes[names.FIRST_TOKEN_MISMATCH] is True
            async with fleet.router.client.get(f"{fleet.router.url}/metrics") as response:
                assert "ttft_otel_router_first_token_mismatches_total 1.0" in await response.text()
        async with pd.fleet("off", first="Yo") as fleet:
            assert (await fleet.ask()).texts == ["Yo", *WHOLE[1:]]

    fakes.run(scenario)


def test_half_a_character_waits_for_decode() -> None:
    """A first token that is no text yet is D's to say, so nothing of it can be wrong."""

    async def scenario() -> None:
        for mode in ("strip", "continue"):
            for half in ("", "a\ufffd"):
                async with pd.fleet(mode, tokens=(half, "é", "!", ".")) as fleet:
                    assert (await fleet.ask()).texts == [half, "é", "!", "."]
                    assert len(fleet.decode.seen) == 1
                    ttft, _ = await told(fleet.router)
                    assert ttft.attributes[names.FIRST_TOKEN] == "off"
                    assert ttft.attributes[names.FIRST_TOKEN_REASON] == "character"

    fakes.run(scenario)


def test_one_time_for_all_events() -> None:
    """P's and D's streams begin in different seconds; the client's does not."""

    async def scenario() -> None:
        for mode in ("strip", "continue"):
            async with pd.fleet(mode, created=107) as fleet:
                events = (await fleet.ask()).events
                assert {each["created"] for each in events[:-1]} == {100}

    fakes.run(scenario)


def test_prefills_refusal_is_the_clients() -> None:
    """What P will not serve is answered with P's status and body; D is not asked."""

    async def scenario() -> None:
        async with pd.fleet("strip") as fleet:
            got = await fleet.ask(model="other")
            assert got.status == 404 and not fleet.decode.seen

    fakes.run(scenario)


def test_decodes_refusal_ends_the_stream() -> None:
    """Off: D's status and body. With P's token out: an error event, [DONE], and P is freed."""

    async def scenario() -> None:
        for mode in ("off", "strip", "continue"):
            async with pd.fleet(mode, refuses=400) as fleet:
                got = await fleet.ask()
                if mode == "off":
                    assert got.status == 400 and b"refused" in got.data
                else:
                    assert got.status == 200 and got.events[-1] == "[DONE]"
                    assert got.events[-2]["error"]["message"] == "refused"
                    _, record = await told(fleet.router)
                    assert record.server.error == "400"
                assert await fleet.freed()

    fakes.run(scenario)


def test_a_decode_that_is_gone_ends_the_stream() -> None:
    """Nobody there after P's token: the client reads why, and [DONE]."""

    async def scenario() -> None:
        model = pd.Model()
        async with (
            pd.server(model, False) as p,
            fakes.router([], prefills=[p.url], decodes=[fakes.unused()]) as router,
        ):
            body = {"model": "tiny", "messages": [], "stream": True}
            status, _, data = await router.post(CHAT, body)
            assert status == 200 and b'"error"' in data and data.endswith(b"data: [DONE]\n\n")

    fakes.run(scenario)


@pytest.mark.parametrize(
    ("slow", "late", "wait"), [(5.0, 0.0, 0.2), (0.0, 5.0, 0.2)], ids=["in P", "between P and D"]
)
def test_a_client_that_leaves_frees_prefill(slow: float, late: float, wait: float) -> None:
    """Whoever works for it is told within 100 ms, and what P kept is given back."""

    async def scenario() -> None:
        for mode in ("off", "strip", "continue"):
            async with pd.fleet(mode, slow=slow, late=late) as fleet:
                task = asyncio.create_task(fleet.ask())
                await asyncio.sleep(wait)
                left = clock.now()
                task.cancel()
                await asyncio.sleep(0.15)
                busy = fleet.prefill if slow else fleet.decode
                assert 0 < busy.seen[0].cancelled - left < 100_000
                assert await fleet.freed()

    fakes.run(scenario)


def test_a_decode_that_cannot_is_followed_by_one_without_blocks() -> None:
    """A D that answers 503 has P free the blocks: the next D computes the prompt, and fetches nothing."""

    async def scenario() -> None:
        for mode in ("off", "strip", "continue"):
            full, other = pd.Model(refuses=503), pd.Model()
            async with (
                pd.server(full, False) as p,
                pd.server(full, True) as busy,
                pd.server(other, True) as idle,
                fakes.router(
                    [], prefills=[p.url], decodes=[busy.url, idle.url], first_token=mode
                ) as router,
            ):
                fleet = pd.Fleet(full, p, idle, router)
                assert (await fleet.ask()).texts == WHOLE
                assert busy.seen[0].json["kv_transfer_params"]["do_remote_prefill"] is True
                (asked,) = idle.seen
                assert "remote_host" not in asked.json.get("kv_transfer_params", {})
                assert await fleet.freed()

    fakes.run(scenario)


def test_a_decode_that_refused_has_nothing_in_flight() -> None:
    """While another D answers, the one that said no is free to be chosen."""

    async def scenario() -> None:
        full, other = pd.Model(refuses=503), pd.Model(late=0.3)
        async with (
            pd.server(full, False) as p,
            pd.server(full, True) as busy,
            pd.server(other, True) as idle,
            fakes.router([], prefills=[p.url], decodes=[busy.url, idle.url]) as router,
        ):
            asked = asyncio.create_task(pd.Fleet(full, p, idle, router).ask())
            while not idle.seen:
                await asyncio.sleep(0.01)
            assert {each.url: each.in_flight for each in router.fleet.get("decode")} == {
                busy.url: 0,
                idle.url: 1,
            }
            assert (await asked).status == 200

    fakes.run(scenario)


def test_no_retries_is_no_second_decode() -> None:
    """With --retries 0 a D that cannot is the answer, though another one could."""

    async def scenario() -> None:
        full, other = pd.Model(refuses=503), pd.Model()
        async with (
            pd.server(full, False) as p,
            pd.server(full, True) as busy,
            pd.server(other, True) as idle,
            fakes.router(
                [], prefills=[p.url], decodes=[busy.url, idle.url], first_token="off", retries=0
            ) as router,
        ):
            assert (await pd.Fleet(full, p, idle, router).ask()).status == 503
            assert not idle.seen and not router.app.forward.legs.retried

    fakes.run(scenario)


def test_a_stop_of_another_type_is_the_instances_to_refuse() -> None:
    """Not the router's: it neither fails nor answers for them."""

    async def scenario() -> None:
        for stop in (5, True, 1.5, {"a": 1}, [None]):
            async with pd.fleet("strip") as fleet:
                got = await fleet.ask(stop=stop)
                assert got.status == 200 and fleet.prefill.seen[0].json["stop"] == stop

    fakes.run(scenario)


def test_several_answers_are_decodes_alone() -> None:
    """n > 1 would fetch one request's blocks several times: D computes the prompt itself."""

    async def scenario() -> None:
        async with pd.fleet("strip") as fleet:
            assert (await fleet.ask(n=2)).status == 200
            assert not fleet.prefill.seen and "kv_transfer_params" not in fleet.decode.seen[0].json
            ttft, _ = await told(fleet.router)
            assert ttft.attributes[names.FIRST_TOKEN] == "off"
            assert ttft.attributes[names.FIRST_TOKEN_REASON] == "n"

    fakes.run(scenario)


def test_a_clients_own_parameters_reach_nobody() -> None:
    """Neither at the top nor by vLLM's side door, on any path, in any leg."""

    async def scenario() -> None:
        evil = {"do_remote_prefill": True, "remote_block_ids": [[1]], "prompt_token_ids": [1]}
        for mode in ("off", "strip", "continue"):
            async with pd.fleet(mode) as fleet:
                for path in (*PATHS, "/v1/responses", "/v1/embeddings"):
                    for more in ({}, {"top_p": float("nan")}, {"n": 2}, {"max_tokens": 1}):
                        await fleet.ask(
                            path,
                            stream=False,
                            kv_transfer_params=evil,
                            ec_transfer_params=evil,
                            vllm_xargs={"kv_transfer_params": "x", "mine": 1},
                            **more,
                        )
                for each in (*fleet.prefill.seen, *fleet.decode.seen):
                    params = each.json.get("kv_transfer_params") or {}
                    assert params.get("remote_block_ids") is None
                    assert "prompt_token_ids" not in params
                    assert "ec_transfer_params" not in each.json
                    assert each.json.get("vllm_xargs", {"mine": 1}) == {"mine": 1}

    fakes.run(scenario)


def test_a_router_that_is_stopped_leaves_nothing_on_prefill() -> None:
    """A request that the drain's time-out cuts off before D took P's blocks has them released."""

    async def scenario() -> None:
        model = pd.Model()
        async with (
            pd.server(model, False) as p,
            pd.server(model, True) as d,
            aiohttp.ClientSession() as client,
        ):
            model.stuck = 20
            async with fakes.router([], prefills=[p.url], decodes=[d.url]) as router:
                body = {"model": "tiny", "messages": [], "stream": True, "max_tokens": 4}
                cut = asyncio.create_task(client.post(router.url + CHAT, json=body))
                while not d.seen:
                    await asyncio.sleep(0.01)
                assert model.kept
            assert not model.kept
            await asyncio.gather(cut, return_exceptions=True)

    fakes.run(scenario)


def test_with_every_decodes_breaker_open_prefill_is_left_empty() -> None:
    """Nobody may be asked for the answer then, but one that says no is still asked to."""

    async def scenario() -> None:
        model = pd.Model(refuses=503)
        async with (
            pd.server(model, False) as p,
            pd.server(model, True) as d,
            fakes.router(
                [], prefills=[p.url], decodes=[d.url], failures=1, pause=30, first_token="off"
            ) as router,
        ):
            fleet = pd.Fleet(model, p, d, router)
            assert [(await fleet.ask()).status for _ in range(2)] == [503, 503]
            assert len(p.seen) == 2 and await fleet.freed()
            streams = [each for each in d.seen if each.json["model"] == "tiny"]
            assert len(streams) == 1

    fakes.run(scenario)
