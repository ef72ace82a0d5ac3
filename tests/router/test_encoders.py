# SPDX-License-Identifier: Apache-2.0
"""Requests with media: prompts are read before any encoder is asked, and items go where the least work is."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import click
import pytest

from router import fakes, known, pd
from router.fakes import PARENT, Plan
from router.known import Reader, Source
from router.test_admin import door
from router.test_config import URL, read
from ttft_otel import clock, names, timing
from ttft_otel.router.account import Account
from ttft_otel.router.body import Body
from ttft_otel.router.choose import ENCODE, Asked, Choice, instance
from ttft_otel.router.fan import GUESS
from ttft_otel.router.fleet import Fleet
from ttft_otel.router.policies.index import Holders
from ttft_otel.router.policies.model import Line, Models
from ttft_otel.router.policies.state import Options, State
from ttft_otel.router.policies.ttft import Late, Ttft
from ttft_otel.router.policies.work import work
from ttft_otel.timing import Timing, Tokens

CHAT = "/v1/chat/completions"
TRACED = {"traceparent": PARENT}
A, B = (instance(f"http://127.0.0.1:{port}", ENCODE) for port in (8001, 8002))
LONG = 1000  # ms: what is to be seen meanwhile is seen, on a busy machine too


def item(number: int, tokens: int) -> Asked:
    """A call for one item."""
    return Asked(ENCODE, CHAT, "tiny", str(number), {}, b"", tokens=tokens)


def image(*items: int, tokens: int = 800, **more: Any) -> dict[str, Any]:
    """A chat with an image for each of these sizes, all of them different ones."""
    urls = [f"{random.random()}" for _ in items]
    return fakes.chat(*urls) | {"tokens": tokens, "items": items, "max_tokens": 4, **more}


def teach(router: fakes.Router, leg: str, url: str, seconds: float) -> None:
    """So many seconds a token, on this instance."""
    models = router.app.forward.legs.routing.at(leg).state.models
    for tokens in range(100, 2100, 100):
        models.add("tiny", url, work(tokens, 0), tokens * seconds)


def sent(of: fakes.Instance) -> list[str]:
    """The images that an encoder got."""
    return [each.json["messages"][0]["content"][0]["image_url"]["url"] for each in of.seen]


def urls(body: dict[str, Any]) -> list[str]:
    """The images of a chat."""
    return [part["image_url"]["url"] for part in body["messages"][0]["content"][1:]]


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


@pytest.mark.parametrize("line", [None, Line(0.01, 1e-4, 1e-8)], ids=["pairs", "seconds"])
def test_less_work_wins_over_fewer_items(line: Line | None) -> None:
    """Three small items are less to do than a big one, by pairs as by learnt seconds."""
    state = State(Holders(1), models=Models(line))
    policy = Ttft(state)
    state.sent(item(0, 4000), Choice(A, 0.0, ""), 0)
    for number in (1, 2, 3):
        state.sent(item(number, 100), Choice(B, 0.0, ""), 0)
    assert policy.choose(item(4, 100), (A, B), 0, False).instance is B
    state.sent(item(5, 8000), Choice(B, 0.0, ""), 0)
    assert policy.choose(item(6, 100), (A, B), 0, False).instance is A


def test_sizes_are_of_distinct_items() -> None:
    """An item that comes twice is encoded once; counts that are of other parts say nothing."""
    body = Body(b"", media=(b"a", b"b"), places=(0, 2), parts=3)
    assert body.sizes((6, 6, 50)) == [6, 50]
    assert body.sizes((6, 50)) == body.sizes(()) == [0, 0]


def test_what_is_learnt_of_encoders() -> None:
    """What keeps an encoder from its next item: its run, dispatch and save, its share of a batch."""
    routing = known.routing(encoders="ttft")(Fleet({ENCODE: [A], "prefill_decode": [B]}))
    state = routing.at(ENCODE).state
    kept: list[tuple[Any, ...]] = []
    state.models.add = lambda *told: kept.append(told)  # type: ignore[method-assign]
    stages = {
        "preprocess": 90_000,
        "encoder.queue": 50_000,
        "dispatch": 2000,
        "ec.transfer": 8000,
        "encoder.compute": 100_000,
    }

    def send(asked: Asked, stages: dict[str, int], tokens: Tokens | None) -> None:
        made = Account(state, asked, Choice(A, 0.0, "", predicted=0.2), "1", 1_000_000)
        made.first(1_300_000, Timing(stages, 0, sum(stages.values()), None, tokens), True)

    send(item(0, 500), stages, None)
    send(item(0, 500), stages, Tokens(510, 0, 510, 1020))
    send(item(0, 500), {"preprocess": 90_000}, None)  # it had this image already
    send(Asked(ENCODE, CHAT, "tiny", "0", {}, b"", tokens=GUESS, guessed=True), stages, None)
    assert kept == [("tiny", A.url, work(500, 0), 0.11), ("tiny", A.url, work(510, 0), 0.055)]
    assert state.besides[A.url] == pytest.approx(0.14)
    assert len(state.pending) == 0


def test_items_go_where_the_least_work_is() -> None:
    """One big item keeps its encoder from small ones, of the same request and of the next."""

    async def scenario() -> None:
        plan = Plan({"encoder.compute": LONG})
        routing = known.routing(encoders="ttft")
        async with (
            fakes.instance(plan) as a,
            fakes.instance(plan) as b,
            fleet(False, a.url, b.url, routing=routing) as router,
        ):
            first, second = image(200, 4000, 300), image(100)
            tasks = [asyncio.create_task(router.post(CHAT, first))]
            await known.until(lambda: len(a.seen) + len(b.seen) == 3)
            tasks.append(asyncio.create_task(router.post(CHAT, second)))
            await known.until(lambda: len(a.seen) + len(b.seen) == 4)
            big, small = (a, b) if len(a.seen) == 1 else (b, a)
            assert sent(big) == [urls(first)[1]]
            assert sorted(sent(small)) == sorted([urls(first)[0], urls(first)[2], *urls(second)])
            pending = router.app.forward.legs.routing.at(ENCODE).state.pending
            assert (pending.at(big.url).fresh, pending.at(small.url).fresh) == (4000, 600)
            assert [(await task)[0] for task in tasks] == [200, 200]
            assert len(pending) == 0

    fakes.run(scenario)


def test_items_of_unknown_size_are_alike() -> None:
    """Where nobody has counted them each encoder gets as many, and nothing is learnt."""

    async def scenario() -> None:
        plan = Plan({"encoder.compute": LONG})
        async with (
            fakes.instance(plan) as a,
            fakes.instance(plan) as b,
            fleet(False, a.url, b.url, routing=known.routing(encoders="ttft")) as router,
        ):
            body = image(1, 1, 1, 1, 1, 1) | {"items": [4000, 100]}  # these are none of its parts
            task = asyncio.create_task(router.post(CHAT, body))
            await known.until(lambda: len(a.seen) + len(b.seen) == 6)
            assert len(a.seen) == len(b.seen) == 3
            state = router.app.forward.legs.routing.at(ENCODE).state
            assert state.pending.at(a.url).fresh == 3 * GUESS
            assert (await task)[0] == 200
            assert (state.models.fits(), len(state.pending)) == ({}, 0)

    fakes.run(scenario)


@pytest.mark.parametrize("apart", [False, True], ids=["E+PD", "E+P+D"])
def test_what_the_encoders_policy_believes_is_seen(apart: bool) -> None:
    """GET /instances and /metrics tell of encoders, too; `ttft.predicted_ms` is not theirs."""

    async def scenario() -> None:
        plan = Plan()
        async with (
            fakes.instance(plan) as e,
            fleet(apart, e.url, routing=known.routing(encoders="ttft")) as router,
            door(router) as here,
        ):
            for number in range(10):
                size = 400 + 40 * (number % 3)
                plan.stages = {"preprocess": 5, "encoder.compute": size // 20}
                assert (await router.post(CHAT, image(size), **TRACED))[0] == 200
            said = (await here.see())[1]
            assert said["routing"]["encoders"] == "ttft"
            told = said["instances"][0]
            assert told["leg"] == ENCODE
            assert told["pending"] == {"requests": 0, "tokens": 0, "pairs": 0}
            assert told["fits"]["tiny"]["samples"] == 10
            assert told["fits"]["tiny"]["b"] is not None and told["predictions"]["outcomes"] == 2
            assert told["besides"] >= 0.005
            text = router.app.metrics.text().decode()
            labels = f'instance="{e.url}",leg="encode"'
            assert f"{names.METRIC_PENDING_TOKENS}{{{labels}}} 0.0" in text
            assert f'{names.METRIC_FIT_SAMPLES}{{{labels},model="tiny"}} 10.0' in text
            record = next(each for each in (await router.settled(20))[-2:] if each.ttft)
            assert record.ttft is not None
            routes = [each.attributes for each in record.ttft.pieces if each.attributes]
            assert names.ROUTE_SCORE in next(each for each in routes if names.POLICY in each)
            leg = router.app.forward.legs.routing.leg
            own = router.app.forward.legs.routing.at(leg).state.models.known("tiny")
            assert (names.PREDICTED_MS in record.ttft.attributes) is (own is not None)

    fakes.run(scenario)


def test_too_late_is_refused_before_encoders_work() -> None:
    """A prefill instance that is too busy, or encoders that are: a 429, and no encoder is asked."""

    async def scenario() -> None:
        routing = known.routing(encoders="ttft", slo=0.5)
        async with (
            fakes.instance(Plan({"encoder.compute": LONG})) as e,
            fleet(False, e.url, routing=routing) as router,
        ):
            (answering,) = router.fleet.get("prefill_decode")
            teach(router, ENCODE, e.url, 0.001)
            teach(router, "prefill_decode", answering.url, 0.0001)
            first = asyncio.create_task(
                router.post(CHAT, image(2000))
            )  # late, but who is idle tries
            await known.until(lambda: len(e.seen) == 1)
            status, headers, _ = await router.post(CHAT, image(100))
            assert status == 429 and 1 <= int(headers["Retry-After"]) <= 2
            assert (await router.post(CHAT, fakes.chat() | {"tokens": 800}))[0] == 200  # no item
            assert (await first)[0] == 200
            assert len(e.seen) == 1

            state = router.app.forward.legs.routing.desk.state
            other = Asked("prefill_decode", CHAT, "tiny", "x", {}, b"", tokens=20_000)
            state.sent(other, Choice(answering, 0.0, ""), clock.now())
            assert (await router.post(CHAT, image(100)))[0] == 429
            assert len(e.seen) == 1 and router.app.forward.legs.routing.late == 2
            state.left(other, clock.now())
            assert (await router.post(CHAT, image(100)))[0] == 200
            assert len(state.pending) == 0

    fakes.run(scenario)


def test_time_already_spent_counts() -> None:
    """What came long ago, or will be with encoders for long, is too late sooner; an idle one tries it."""
    second = 1_000_000
    now = 10 * second
    state = State(Holders(1), Options(slo=1.0), models=Models(Line(0.0, 0.001, 0.0)))
    policy = Ttft(state)

    def late(**more: Any) -> float:
        asked = Asked("prefill", CHAT, "tiny", "1", {}, b"", tokens=500, **more)
        try:
            policy.choose(asked, (A,), now, False)
        except Late as error:
            return error.after
        return 0.0

    busy = Asked("prefill", CHAT, "tiny", "0", {}, b"", tokens=300)
    state.sent(busy, Choice(A, 0.0, ""), now)
    assert late() == late(arrived=now - second // 10) == 0
    assert late(arrived=now - second // 4) == pytest.approx(0.05)
    assert late(ahead=0.4) == 0  # longer than the wait, which passes meanwhile
    assert late(ahead=0.7) == pytest.approx(0.2)
    state.left(busy, now)
    assert late(arrived=now - second) == late(ahead=0.7) == 0
    assert late(ahead=0.7, queued=True) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        (("--backend", URL, "--routing-logic", "ttft"), "needs --encoder"),
        (("--backend", URL, "--encoder", URL), "--routing-logic prefix or kvaware or ttft"),
        (("--backend", URL, "--encoder", URL, "--routing-logic", "qps"), "prefix or kvaware or"),
    ],
)
def test_encoders_by_work_need_items_that_are_counted(flags: tuple[str, ...], remedy: str) -> None:
    """Without encoders, or with a policy that reads no prompts, the flag is refused with the remedy."""
    options = read(*flags, "--encoder-routing-logic", "ttft")
    with pytest.raises(click.UsageError, match=remedy):
        options.routing(Fleet(options.legs()))
    options = read("--backend", URL, "--encoder", URL, "--routing-logic", "ttft")
    assert options.routing(Fleet(options.legs())).at(ENCODE).logic == "least_requests"


def test_an_encoder_that_is_gone_is_forgotten() -> None:
    """What was learnt of it goes with it, at once."""
    fleet = Fleet({ENCODE: [A, B], "prefill_decode": [instance(URL, "prefill_decode")]})
    routing = known.routing(encoders="ttft")(fleet)
    state = routing.at(ENCODE).state
    for each in (A, B):
        state.models.add("tiny", each.url, work(500, 0), 0.1)
        state.beside(each.url, 0.01)
    fleet.remove(B)
    routing.follow()
    assert set(state.besides) == set(routing.tell(ENCODE)) == {A.url}
    assert ("tiny", B.url) not in state.models.fits()
