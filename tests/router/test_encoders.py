# SPDX-License-Identifier: Apache-2.0
"""Requests with media: prompts are read before any encoder is asked, and items go where the least work is."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from router import fakes, known, pd
from router.fakes import PARENT, Plan
from router.known import Reader, Source
from ttft_otel import timing

CHAT = "/v1/chat/completions"
TRACED = {"traceparent": PARENT}


@contextlib.asynccontextmanager
async def fleet(apart: bool, *encoders: str, **more: object) -> AsyncIterator[fakes.Router]:
    """A router before these encoders and one server that answers, or before P and D."""
    if not apart:
        async with (
            fakes.instance(Plan({"prefill.compute": 20})) as one,
            fakes.router([one.url], encoders, **more) as router,  # type: ignore[arg-type]
        ):
            yield router
        return
    model = pd.Model()
    async with (
        pd.server(model, False) as p,
        pd.server(model, True) as d,
        fakes.router([], encoders, prefills=[p.url], decodes=[d.url], **more) as router,  # type: ignore[arg-type]
    ):
        yield router


@pytest.mark.parametrize("apart", [False, True], ids=["E+PD", "E+P+D"])
def test_prompts_are_read_before_encoders_are_asked(apart: bool) -> None:
    """`router.tokenize` and `router.lookup` come before the encode leg, once, and the sum closes."""

    async def scenario() -> None:
        routing = known.routing("ttft", Reader(0.2), Source(0.1))
        async with (
            fakes.instance(Plan({"encoder.compute": 50})) as e,
            fleet(apart, e.url, routing=routing) as router,
        ):
            body = fakes.chat("a", "b") | {"tokens": 800, "max_tokens": 4}
            status, headers, _ = await router.post(CHAT, body, x_ttft_timing="1", **TRACED)
            assert status == 200
            told = timing.read(headers["Server-Timing"])
            ttft = next(each.ttft for each in await router.settled(2) if each.ttft is not None)
            pieces = [each for each in ttft.pieces if each.name.startswith(("router.", "encode."))]
            order = [each.name for each in pieces]
            assert order[:6] == [
                *("router.receive", "router.route", "router.tokenize", "router.lookup"),
                *("router.route", "router.hop.encode"),
            ]
            assert order.count("router.tokenize") == order.count("router.lookup") == 1
            assert 200_000 <= ttft.stages["router.tokenize"] < 300_000
            assert 100_000 <= ttft.stages["router.lookup"] < 200_000
            assert ttft.stages["encode.encoder.compute"] >= 50_000
            assert sum(ttft.stages.values()) + ttft.unattributed == ttft.end - ttft.start
            assert told is not None
            assert told.stages["router.lookup"] == ttft.stages["router.lookup"]

    fakes.run(scenario)
