# SPDX-License-Identifier: Apache-2.0
"""What is told of a request: its stages have the delays that were really there, in real records."""

from __future__ import annotations

import json

from router import fakes
from router.fakes import PARENT, Plan
from ttft_otel import names
from ttft_otel.record import Record, Ttft
from ttft_otel.settings import Settings

NEAR = 15_000  # microseconds: two busy cores, everything in one loop


def check(record: Record) -> Ttft:
    """The ttft half, after its sums are checked."""
    ttft = record.ttft
    assert ttft is not None and (record.role, record.service) == ("router", "ttft-otel-router")
    assert sum(ttft.stages.values()) + ttft.unattributed == ttft.end - ttft.start
    assert ttft.pieces[0].start == ttft.start and ttft.pieces[-1].end == ttft.end
    for one, two in zip(ttft.pieces, ttft.pieces[1:], strict=False):
        assert one.end == two.start
    return ttft


def test_a_stream_tells_twice() -> None:
    """The ttft half goes out with the first token, the server half and the calls at the end."""

    async def scenario() -> None:
        async with fakes.instance(Plan(gap=0.2)) as one, fakes.router([one.url]) as router:
            url = f"{router.url}/v1/chat/completions"
            async with router.client.post(url, json=fakes.chat()) as response:
                await response.content.readany()
                (first,) = await router.settled(1)
                await response.read()
            last = (await router.settled(2))[1]
            assert first.server is None and last.ttft is None and last.server is not None
            assert first.calls == () and len(last.calls) == 1
            assert first.span_id == last.span_id and first.trace_id == last.trace_id
            assert 400_000 < last.server.end < 700_000 and last.server.status == 200
            ttft = check(first)
            assert 20_000 <= ttft.end < 20_000 + 3 * NEAR
            assert ttft.attributes == {"ttft.streaming": True}
            assert first.attributes == {
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": "vllm",
                "gen_ai.request.model": "tiny",
                "gen_ai.request.stream": True,
            }
            (call,) = last.calls
            assert (call.leg, call.status, call.name) == ("mono", 200, "POST /v1/chat/completions")
            assert call.end - call.start > 400_000

    fakes.run(scenario)


def test_delays_show_in_their_stages() -> None:
    """80 ms in one stage of the backend, or of an encoder, is 80 ms there and nowhere else."""

    async def scenario() -> None:
        for leg, stage in (("prefill_decode", "prefill.queue"), ("encode", "preprocess")):
            encode = {"preprocess": 5, "encoder.compute": 5}
            backend = {"prefill.queue": 5, "prefill.compute": 5}
            (encode if leg == "encode" else backend)[stage] = 80
            async with (
                fakes.instance(Plan(encode)) as e,
                fakes.instance(Plan(backend)) as pd,
                fakes.router([pd.url], [e.url]) as router,
            ):
                await router.chat("a")
                ttft = check((await router.settled(2))[0])
                assert 80_000 <= ttft.stages.pop(f"{leg}.{stage}") < 80_000 + NEAR
                assert all(length < 5_000 + NEAR for length in ttft.stages.values())
                assert ttft.unattributed < 2000

    fakes.run(scenario)


def test_stages_name_their_server() -> None:
    """Stages of a leg, its hop among them, say which instance had it; the router's own do not."""

    async def scenario() -> None:
        async with (
            fakes.instance() as e,
            fakes.instance() as pd,
            fakes.router([pd.url], [e.url]) as router,
        ):
            await router.chat("a")
            ttft = check((await router.settled(2))[0])
            legs = {"encode": e.url, "prefill_decode": pd.url}
            for piece in ttft.pieces:
                own = [
                    url.removeprefix("http://")
                    for leg, url in legs.items()
                    if leg in piece.name.removeprefix("router.hop.").split(".")
                ]
                said = piece.attributes.get(names.INSTANCE)
                assert ([] if said is None else [said]) == own, piece
            assert len({piece.attributes.get(names.INSTANCE) for piece in ttft.pieces}) == 3

    fakes.run(scenario)


def test_a_slow_wire_is_the_hop() -> None:
    """80 ms held back between router and instance is router.hop of that leg."""

    async def scenario() -> None:
        async with (
            fakes.instance() as e,
            fakes.instance() as pd,
            fakes.wire(pd.url, 0.08) as slow,
            fakes.router([slow], [e.url]) as router,
        ):
            await router.chat("a")
            ttft = check((await router.settled(2))[0])
            assert 80_000 <= ttft.stages["router.hop.prefill_decode"] < 80_000 + NEAR
            assert ttft.stages["router.hop.encode"] < NEAR

    fakes.run(scenario)


def test_slowest_encoder_counts_not_the_sum() -> None:
    """Two encoders of 30 and 90 ms cost 90 ms, and only the slow one's stages are in the sum."""

    async def scenario() -> None:
        async with (
            fakes.instance(Plan({"encoder.compute": 30})) as fast,
            fakes.instance(Plan({"encoder.compute": 90})) as slow,
            fakes.instance() as pd,
            fakes.router([pd.url], [fast.url, slow.url]) as router,
        ):
            await router.chat("a", "b")
            first, last = await router.settled(2)
            ttft = check(first)
            assert 90_000 <= ttft.stages["encode.encoder.compute"] < 90_000 + NEAR
            assert ttft.end < 90_000 + 20_000 + 3 * NEAR and len(last.calls) == 3

    fakes.run(scenario)


def test_plain_answer_leaves_decode_out() -> None:
    """A plain answer's TTFT ends at the instance's first token; one record, not streaming."""

    async def scenario() -> None:
        async with fakes.instance(Plan(rest=200)) as one, fakes.router([one.url]) as router:
            await router.chat(stream=False)
            (record,) = await router.settled(1)
            ttft = check(record)
            assert 20_000 <= ttft.end < 20_000 + 2 * NEAR and "router.egress" not in ttft.stages
            assert ttft.attributes == {"ttft.streaming": False}
            assert record.server is not None and record.server.end > 200_000

    fakes.run(scenario)


def test_silent_and_partial_legs() -> None:
    """A leg without Server-Timing is unattributed; a leg's own unattributed joins the router's."""

    async def scenario() -> None:
        async with (
            fakes.instance(Plan(timed=False)) as silent,
            fakes.instance(Plan(unattributed=40)) as partial,
            fakes.router([silent.url, partial.url]) as router,
        ):
            await router.chat()
            await router.chat()
            first, second = (check(each) for each in await router.settled(4) if each.ttft)
            assert first.unattributed >= 20_000
            assert not any(name.startswith(("mono.", "router.hop")) for name in first.stages)
            assert 40_000 <= second.unattributed < 40_000 + NEAR

    fakes.run(scenario)


def test_unsampled_requests_are_measured_not_told() -> None:
    """Without the sampled flag no record leaves, legs get flag 00, and the report still knows it."""

    async def scenario() -> None:
        async with fakes.instance() as one, fakes.router([one.url]) as router:
            await router.chat(traceparent=PARENT[:-1] + "0", X_Request_Id="quiet")
            assert one.seen[0].headers["traceparent"].endswith("-00")
            status, _, _ = await get(router, "/ttft_report/quiet")
            assert status == 200 and not router.records
        async with (
            fakes.instance() as one,
            fakes.router([one.url], settings=Settings(sampler="always_off")) as router,
        ):
            await router.chat()
            assert not router.records

    fakes.run(scenario)


def test_off_it_is_a_plain_proxy() -> None:
    """With tracing off the caller's trace headers go on as they came, and so does Server-Timing."""

    async def scenario() -> None:
        async with fakes.instance() as one, fakes.router([one.url], traced=False) as router:
            asked = {"traceparent": PARENT, "tracestate": "v=1", "x_ttft_timing": "1"}
            for stream in (True, False):
                _, headers, _ = await router.chat(stream=stream, X_Request_Id="off", **asked)
                assert headers["Server-Timing"].startswith("prefill.compute;dur=")
                seen = one.seen[-1].headers
                assert (seen["traceparent"], seen["tracestate"]) == (PARENT, "v=1")
                assert seen["x-ttft-timing"] == "1" and "x-ttft-leg" not in seen
                assert seen["X-Request-Id"] == headers["X-Request-Id"] == "off"
            await router.chat()
            assert "traceparent" not in one.seen[-1].headers
            assert "x-ttft-timing" not in one.seen[-1].headers
            status, _, missing = await get(router, "/ttft_report/off")
            assert status == 404 and "TTFT_OTEL=0" in missing["error"]["message"]
            assert not router.records

    fakes.run(scenario)


def test_behind_another_router_it_is_not_outermost() -> None:
    """x-ttft-leg on the request says that someone before us counts this request."""

    async def scenario() -> None:
        async with fakes.instance() as one, fakes.router([one.url]) as router:
            await router.chat()
            await router.chat(x_ttft_leg="mono")
            assert [each.outermost for each in await router.settled(4)] == [True] * 2 + [False] * 2

    fakes.run(scenario)


def test_other_posts_have_no_ttft() -> None:
    """Embeddings and the like are forwarded and traced, without a TTFT they do not have."""

    async def scenario() -> None:
        async with fakes.instance() as one, fakes.router([one.url]) as router:
            assert (await router.post("/v1/embeddings", {"model": "m"}))[0] == 200
            (record,) = await router.settled(1)
            assert record.ttft is None and record.server is not None
            assert record.server.name == "POST /v1/{path:path}"

    fakes.run(scenario)


def test_report() -> None:
    """/ttft_report gives each role and the whole; the unknown is a 404 that says so."""

    async def scenario() -> None:
        async with (
            fakes.instance(Plan({"encoder.compute": 30})) as e,
            fakes.instance() as pd,
            fakes.router([pd.url], [e.url]) as router,
        ):
            await router.chat("a", X_Request_Id="r-1")
            status, _, report = await get(router, "/ttft_report/r-1")
            assert status == 200 and report["request_id"] == "r-1"
            assert report["by_role"]["encode"]["enc_compute_time_ms"] >= 30
            assert report["by_role"]["prefill_decode"]["prefill_compute_time_ms"] >= 20
            whole = report["combined"]
            total = sum(whole["stages"].values()) + whole["unattributed_ms"]
            assert abs(total - whole["ttft_ms"]) < 1e-6 and whole["ttft_ms"] > 50
            status, _, missing = await get(router, "/ttft_report/other")
            assert status == 404 and "other" in missing["error"]["message"]

    fakes.run(scenario)


def test_reports_are_bounded() -> None:
    """Beyond the bound the oldest report goes."""

    async def scenario() -> None:
        reports = fakes.Reports(3)
        async with fakes.instance() as one, fakes.router([one.url], reports=reports) as router:
            for number in range(5):
                await router.chat(X_Request_Id=f"r{number}")
            assert len(reports) == 3 and reports.get("r1") is None and reports.get("r4")

    fakes.run(scenario)


async def get(router: fakes.Router, path: str) -> tuple[int, object, dict]:
    """Get JSON from the control plane."""
    async with router.client.get(f"{router.url}{path}") as response:
        return response.status, response.headers, json.loads(await response.read())
