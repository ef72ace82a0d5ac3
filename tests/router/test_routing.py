# SPDX-License-Identifier: Apache-2.0
"""The router decides by prompts, prefixes and predictions, tells what it decided, and learns from answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

from router import fakes, known, pd
from router.fakes import PARENT, Plan
from router.known import Reader, Source
from router.test_config import URL, read
from ttft_otel import guard, names, timing
from ttft_otel.record import Attributes, Record
from ttft_otel.router.account import Account
from ttft_otel.router.choose import Asked, Choice, Instance, Policy, instance
from ttft_otel.router.fleet import Fleet
from ttft_otel.router.policies.registry import POLICIES
from ttft_otel.router.policies.state import State
from ttft_otel.router.policies.work import work
from ttft_otel.router.routing import Routing
from ttft_otel.timing import Timing, Tokens

COMPLETIONS = "/v1/completions"
TRACED = {"traceparent": PARENT}


def ask(tokens: int | None = 800, at: int = 1, stream: bool = True, **more: Any) -> dict[str, Any]:
    """A completion whose prompt known.Reader finds so long."""
    told = {} if tokens is None else {"tokens": tokens, "from": at}
    return {"model": "tiny", "prompt": "a", "stream": stream, "max_tokens": 8, **told, **more}


def route(record: Record) -> Attributes:
    """The attributes of the last choice."""
    assert record.ttft is not None
    found = [piece for piece in record.ttft.pieces if piece.name == "router.route"]
    return found[-1].attributes


def teach(of: Routing, url: str, seconds: float = 0.0001, model: str = "tiny") -> None:
    """Prefills that took so many seconds a token, on this instance."""
    for tokens in range(100, 2100, 100):
        of.desk.state.models.add(model, url, work(tokens, 0), tokens * seconds)


def books(router: fakes.Router) -> Routing:
    """The router's."""
    return router.app.forward.legs.routing


@pytest.mark.parametrize(
    "flags",
    [
        ("--routing-logic", "session"),
        ("--encoder-routing-logic", "ttft"),
        ("--slo-ttft-ms", "500"),
        ("--slo-ttft-ms", "500", "--routing-logic", "ttft", "--ttft-model", "trapezoid"),
        ("--prefix-index", "lmcache", "--routing-logic", "ttft"),
        ("--lmcache-controller-url", "http://127.0.0.1:9"),
        ("--lmcache-instances", "a,b"),
        ("--kv-events-endpoint", "http://127.0.0.1:1=tcp://127.0.0.1:2"),
        ("--enable-shared-cache",),
        ("--prefix-index", "kv-events"),
        ("--prefix-index", "history", "--routing-logic", "qps"),
        ("--tokenizer", "/m"),
        ("--tokenize", "local"),
        ("--ttft-model", "calibrated", "--routing-logic", "kvaware"),
        ("--kv-aware-threshold", "0", "--routing-logic", "ttft"),
        ("--session-key", "user", "--routing-logic", "qps"),
        ("--request-stats-window", "60", "--routing-logic", "least_requests"),
    ],
)
def test_a_flag_that_needs_another_says_which(flags: tuple[str, ...]) -> None:
    """A combination that would do nothing is refused at start, with the remedy."""
    with pytest.raises(click.UsageError, match="needs|go together"):
        read("--backend", URL, *flags).routing(Fleet({}))


def test_flags_without_effect_are_refused_wherever_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable or a line of the file is refused as a flag is; what is empty or false asks for nothing."""
    file = tmp_path / "router.yaml"
    file.write_text("tokenize: local")
    with pytest.raises(
        click.UsageError, match="--tokenize needs --routing-logic prefix or kvaware"
    ):
        read("--config", str(file))
    assert read("--config", str(file), "--routing-logic", "prefix").tokenize == "local"
    file.write_text("enable-shared-cache: false\ntokenizer: ''")
    assert read("--config", str(file)).routing_logic == "round_robin"
    monkeypatch.setenv("TTFT_OTEL_ROUTER_KV_AWARE_THRESHOLD", "2000")
    with pytest.raises(
        click.UsageError, match="--kv-aware-threshold needs --routing-logic kvaware"
    ):
        read("--routing-logic", "ttft")
    assert read("--routing-logic", "kvaware").kv_aware_threshold == 2000


@pytest.mark.parametrize(
    ("more", "why"),
    [((), "share an address"), (("--lmcache-instances", "a,b,c"), "3 names for 2 instances")],
)
def test_instances_that_lmcache_cannot_tell_apart(more: tuple[str, ...], why: str) -> None:
    """Ids that fit no instance, or no ids where one address has two, are refused at start."""
    controller = ("--prefix-index", "lmcache", "--lmcache-controller-url", "http://127.0.0.1:9")
    backends = ("--backend", "http://127.0.0.1:8001", "--backend", "http://127.0.0.1:8002")
    options = read(*backends, "--routing-logic", "ttft", *controller, *more)
    with pytest.raises(click.UsageError, match=why):
        options.routing(Fleet(options.legs()))


def test_unknown_logic() -> None:
    """A word that is no policy is refused with the words that are."""
    with pytest.raises(
        click.BadParameter, match=r"'fastest' is not one of .*'round_robin'.*'ttft'"
    ):
        read("--routing-logic", "fastest")


def test_who_decides_for_which_leg() -> None:
    """The flag is for the leg that prefills; encoders and decoders get requests by least_requests."""
    given = {"encode": [instance(URL, "encode")], "prefill": [instance(URL, "prefill")]}
    made = read("--routing-logic", "qps").routing(Fleet(given | {"decode": [instance(URL, "d")]}))
    logics = {leg: made.at(leg).logic for leg in ("encode", "prefill", "decode")}
    assert logics == {
        "encode": "least_requests",
        "prefill": "qps",
        "decode": "least_requests",
    }
    assert (made.reader, made.source) == (None, None)
    assert read().routing(Fleet({})).desk.logic == "round_robin"


class Toy(Policy):
    """All that adding a policy takes, but its line in the registry."""

    books = prompts = True

    def __init__(self, state: State) -> None:
        self.state = state
        self.saw: list[tuple[int, list[int], int]] = []

    def choose(self, request: Asked, instances: Sequence[Instance], *_: Any) -> Choice:
        """The first one; keeps what it could have decided by."""
        cached = self.state.cached(request, instances)
        fresh = self.state.pending.at(instances[0].url).fresh
        self.saw.append((request.tokens, cached, fresh))
        return Choice(instances[0], 0.0, "toy", cached[0])


def test_a_new_policy_is_a_class_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says that it needs it gets: prompts, who has them cached, and what is pending where."""
    monkeypatch.setitem(POLICIES, "toy", Toy)
    asks = replace(read("--backend", URL), routing_logic="toy").routing(Fleet({}))
    assert asks.reader is not None and asks.source is not None

    async def scenario() -> None:
        async with (
            fakes.instance(Plan({"prefill.compute": 500})) as one,
            fakes.router([one.url], routing=known.routing("toy")) as router,
        ):
            toy = books(router).desk.policy
            assert isinstance(toy, Toy)
            first = asyncio.create_task(router.post(COMPLETIONS, ask(800)))
            await known.until(lambda: len(toy.saw) == 1)
            await router.post(COMPLETIONS, ask(160, 2))
            await first
            await router.post(COMPLETIONS, ask(800))
            assert toy.saw == [(800, [0], 0), (160, [0], 800), (800, [784], 0)]
            assert names.METRIC_PENDING_TOKENS in router.app.metrics.text().decode()

    fakes.run(scenario)


def test_delays_are_where_they_were() -> None:
    """A reader that takes 300 ms is `router.tokenize`, a source that takes 500 is `router.lookup`."""

    async def scenario() -> None:
        routing = known.routing("ttft", Reader(0.3), Source(0.5))
        async with (
            fakes.instance(Plan({"prefill.compute": 20})) as one,
            fakes.router([one.url], routing=routing) as router,
        ):
            _, headers, _ = await router.post(COMPLETIONS, ask(), x_ttft_timing="1", **TRACED)
            record = (await router.settled(2))[0]
            assert record.ttft is not None
            stages = record.ttft.stages
            assert 300_000 <= stages["router.tokenize"] < 450_000
            assert 500_000 <= stages["router.lookup"] < 650_000
            assert stages["router.route"] < 150_000
            length = record.ttft.end - record.ttft.start
            assert sum(stages.values()) + record.ttft.unattributed == length
            told = timing.read(headers["Server-Timing"])
            assert told is not None and told.stages["router.lookup"] == stages["router.lookup"]

    fakes.run(scenario)


def test_a_client_that_leaves_in_between() -> None:
    """Who leaves while its prompt is read died in `router.tokenize`; or in `router.lookup`."""

    async def scenario() -> None:
        for reader, source, stage in (
            (Reader(5), Source(), "router.tokenize"),
            (Reader(), Source(5), "router.lookup"),
        ):
            async with (
                fakes.instance() as one,
                fakes.router([one.url], routing=known.routing("ttft", reader, source)) as router,
            ):
                task = asyncio.create_task(router.post(COMPLETIONS, ask(), **TRACED))
                await known.until(lambda: router.app.gate.inside == 1)
                await asyncio.sleep(0.15)
                task.cancel()
                (record,) = await router.settled(1)
                assert record.ttft is not None and record.ttft.died == stage
                assert record.ttft.stages[stage] > 50_000
                assert not one.seen

    fakes.run(scenario)


def test_the_choice_is_told() -> None:
    """Policy, reason, candidates' scores and caches are on `router.route`, the prediction on `ttft`."""

    async def scenario() -> None:
        async with (
            fakes.instance() as a,
            fakes.instance() as b,
            fakes.router([a.url, b.url], routing=known.routing()) as router,
        ):
            teach(books(router), a.url, 0.0001)
            teach(books(router), b.url, 0.0002)
            await router.post(COMPLETIONS, ask(800), **TRACED)
            record = (await router.settled(2))[0]
            found = route(record)
            assert record.ttft is not None
            assert found[names.POLICY] == "ttft" and found[names.ROUTE_REASON] == "calibrated"
            assert found[names.CANDIDATES] == 2
            near = [each.url.removeprefix("http://") for each in (a, b)]
            assert found[names.ROUTE_INSTANCES] == tuple(near)
            scores = found[names.ROUTE_SCORES]
            assert isinstance(scores, tuple) and found[names.ROUTE_SCORE] == scores[0] < scores[1]
            assert found[names.ROUTE_CACHED] == (0, 0)
            assert record.ttft.attributes[names.PREDICTED_MS] == pytest.approx(80, rel=0.3)
            await router.post(COMPLETIONS, ask(800), **TRACED)
            again = route((await router.settled(4))[2])
            assert again[names.ROUTE_CACHED] == (784, 0)  # all blocks but the one of the last token

    fakes.run(scenario)


def test_at_most_sixteen_candidates() -> None:
    """Of many candidates the sixteen best are told, the best first."""

    async def scenario() -> None:
        async with fakes.instance() as one:
            others = [f"http://127.0.0.1:{port}" for port in range(1, 31)]
            source = Source(tells={one.url: 784, others[7]: 160})
            routing = known.routing("ttft", None, source)
            async with fakes.router([*others, one.url], routing=routing) as router:
                await router.app.forward.legs.health.close()
                for each in router.fleet:
                    each.state = "healthy"
                router.fleet.changed()
                await router.post(COMPLETIONS, ask(), **TRACED)
                found = route((await router.settled(2))[0])
                assert found[names.CANDIDATES] == 31
                scores = found[names.ROUTE_SCORES]
                assert isinstance(scores, tuple) and len(scores) == 16
                assert list(scores) == sorted(scores) and scores[0] == found[names.ROUTE_SCORE]
                assert found[names.ROUTE_CACHED] == (784, 160, *[0] * 14)

    fakes.run(scenario)


def test_prompts_that_nobody_can_read_are_guessed() -> None:
    """A prompt of unknown length counts by its bytes, so that pending work is not nothing."""

    async def scenario() -> None:
        async with (
            fakes.instance(Plan({"prefill.compute": 1000})) as one,
            fakes.router([one.url], routing=known.routing()) as router,
        ):
            body = ask(None, prompt="word " * 400)
            task = asyncio.create_task(router.post(COMPLETIONS, body))
            await known.until(lambda: len(books(router).desk.state.pending) == 1)
            load = books(router).desk.state.pending.at(one.url)
            assert 500 < load.fresh < 520
            await task
            assert len(books(router).desk.state.pending) == 0

    fakes.run(scenario)


def test_a_lookup_that_fails_loses_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in reading or looking up is caught and counted; the request is routed by its bytes."""
    monkeypatch.setenv("TTFT_OTEL_GUARD", "keep")

    class Broken(Source):
        async def lookup(self, *_: Any) -> dict[str, int] | None:
            raise RuntimeError("broken")

    async def scenario() -> None:
        async with (
            fakes.instance() as one,
            fakes.router([one.url], routing=known.routing("ttft", None, Broken())) as router,
        ):
            before = guard.errors["router.look"]
            assert (await router.post(COMPLETIONS, ask()))[0] == 200
            assert guard.errors["router.look"] == before + 1

    fakes.run(scenario)


def test_what_is_learnt() -> None:
    """A prefill's share of its steps, with the tokens that its engine really had cached."""
    leg = Fleet({"mono": [instance(URL, "mono")]})
    routing = known.routing()(leg)
    (to,) = leg.get("mono")
    asked = Asked("mono", COMPLETIONS, "tiny", "r", {}, b"", tokens=800)
    kept: list[tuple[Any, ...]] = []
    routing.desk.state.models.add = lambda *told: kept.append(told)  # type: ignore[method-assign]

    def send(stages: Mapping[str, int], tokens: Tokens | None, streaming: bool = True) -> None:
        made = Account(routing.desk.state, asked, Choice(to, 0.0, "", 160), "1", 1_000_000)
        told = Timing(dict(stages), 0, sum(stages.values()), None, tokens) if stages else None
        made.first(1_500_000, told, streaming)

    stages = {"receive": 9000, "dispatch": 2000, "prefill.compute": 100_000, "sample": 8000}
    send(stages, Tokens(801, 320, 481, 481))
    send(stages, Tokens(801, 320, 481, 962))
    send(stages, None)
    send({"receive": 9000}, None)  # not traced as far as its engine
    send({}, None)  # not traced at all, but alone
    send({}, None, streaming=False)  # its whole answer
    asked = replace(asked, guessed=True)
    send(stages, None)
    send({}, None)
    send(stages, Tokens(801, 320, 481, 481))  # its engine has counted
    assert kept == [
        ("tiny", URL, work(801, 320), 0.11),
        ("tiny", URL, work(801, 320), 0.055),
        ("tiny", URL, work(800, 160), 0.11),
        ("tiny", URL, work(800, 160), 0.5),
        ("tiny", URL, work(801, 320), 0.11),
    ]


def test_a_whole_answer_of_unknown_ttft_is_no_outcome() -> None:
    """What an untraced instance took for all of an answer says nothing of a predicted TTFT."""
    leg = Fleet({"mono": [instance(URL, "mono")]})
    state = known.routing()(leg).desk.state
    (to,) = leg.get("mono")
    asked = Asked("mono", COMPLETIONS, "tiny", "r", {}, b"", tokens=800, blocks=(7,))
    choice = Choice(to, 0.0, "", predicted=0.1)
    Account(state, asked, choice, "1", 1_000_000).first(9_000_000, None, False)
    assert (state.outcomes, state.besides, len(state.pending)) == ({}, {}, 0)
    assert state.index.match((7,), [URL]) == [1]
    Account(state, asked, choice, "2", 1_000_000).first(1_100_000, None, True)
    assert state.outcomes[URL].outcomes == 1


def test_events_before_the_engine_are_no_first_token() -> None:
    """A stream of /v1/responses is pending until its first delta, and nothing is learnt of its begin."""

    async def scenario() -> None:
        created, delta = (
            f'event: response.{name}\ndata: {{"type":"response.{name}"}}\n\n'.encode()
            for name in ("created", "output_text.delta")
        )
        plan = Plan({}, timed=False, chunks=(created, *[delta] * 60), gap=0.5)
        async with (
            fakes.instance(plan) as one,
            fakes.router([one.url], routing=known.routing()) as router,
        ):
            teach(books(router), one.url)
            state, (to,) = books(router).desk.state, router.fleet
            before = state.models.fits()["tiny", one.url].samples
            async with router.client.post(f"{router.url}/v1/responses", json=ask()) as response:
                assert await response.content.readany() == created
                assert len(state.pending) == 1
                assert (await response.content.readany()).startswith(delta)
                await known.until(lambda: not len(state.pending))
                assert to.in_flight == 1
            assert state.models.fits()["tiny", one.url].samples == before
            assert state.outcomes == {}

    fakes.run(scenario)


@pytest.mark.parametrize("wants", [False, True])
def test_without_tracing_instances_are_asked_all_the_same(wants: bool) -> None:
    """With tracing off ttft learns from Server-Timing, which only clients that asked for it see."""

    async def scenario() -> None:
        async with (
            fakes.instance(Plan({"prefill.compute": 30}, rest=100)) as one,
            fakes.router([one.url], routing=known.routing(), traced=False) as router,
        ):
            own = {"x_ttft_timing": "1"} if wants else {}
            _, headers, _ = await router.post(COMPLETIONS, ask(stream=False), **own)
            assert one.seen[0].headers[names.ASK] == "1"
            assert names.TRACEPARENT not in one.seen[0].headers
            assert ("Server-Timing" in headers) == wants
            assert books(router).desk.state.models.fits()["tiny", one.url].samples == 1

    fakes.run(scenario)


def test_without_tracing_nobody_is_asked_for_what_nobody_reads() -> None:
    """A policy that predicts nothing sends no header of its own, and takes none away."""

    async def scenario() -> None:
        async with (
            fakes.instance() as one,
            fakes.router([one.url], routing=known.routing("prefix"), traced=False) as router,
        ):
            _, headers, _ = await router.post(COMPLETIONS, ask())
            assert names.ASK not in one.seen[0].headers
            assert "Server-Timing" in headers

    fakes.run(scenario)


def test_messages_are_work() -> None:
    """A body of /v1/messages counts by its length; one that loads an adapter is no work."""

    async def scenario() -> None:
        async with (
            fakes.instance(Plan({"prefill.compute": 1000})) as one,
            fakes.router([one.url], routing=known.routing()) as router,
        ):
            load = books(router).desk.state.pending
            for path, least in (("/v1/messages", 500), ("/v1/load_lora_adapter", 0)):
                body = ask(None, prompt="word " * 400)
                task = asyncio.create_task(router.post(path, body))
                await known.until(lambda: len(load) == 1)
                assert least <= load.at(one.url).fresh <= least + 20 * bool(least)
                await task

    fakes.run(scenario)


def test_what_comes_besides_is_expected_too() -> None:
    """The way there, tokenizing and the way back are in the prediction, not in the prefill's cost."""
    leg = Fleet({"mono": [instance(URL, "mono")]})
    state = known.routing()(leg).desk.state
    (to,) = leg.get("mono")
    asked = Asked("mono", COMPLETIONS, "tiny", "r", {}, b"", tokens=800)
    made = Account(state, asked, Choice(to, 0.0, ""), "1", 1_000_000)
    stages = {"preprocess": 7000, "prefill.queue": 90_000, "prefill.compute": 100_000}
    made.first(1_200_000, Timing(stages, 0, 197_000), True)
    assert state.expected(Choice(to, 0.0, "", predicted=0.1)) == pytest.approx(0.11)
    assert state.expected(Choice(to, 0.0, "")) is None
    state.forget(URL)
    assert state.expected(Choice(to, 0.0, "", predicted=0.1)) == 0.1


def test_predictions_are_held_against_outcomes() -> None:
    """After some requests the fit is the instance's own speed, and predictions come near."""

    async def scenario() -> None:
        plan = Plan({"prefill.compute": 40})
        async with (
            fakes.instance(plan) as one,
            fakes.router([one.url], routing=known.routing()) as router,
        ):
            for number in range(14):
                tokens = 400 + 40 * (number % 3)
                plan.stages = {"prefill.compute": tokens // 10}
                await router.post(COMPLETIONS, ask(tokens, number + 1), **TRACED)
            told = books(router).tell()[one.url]
            assert told["fits"]["tiny"]["samples"] == 14
            assert 0 < told["fits"]["tiny"]["mape"] < 0.1
            assert told["predictions"]["mape"] < 0.3
            text = router.app.metrics.text().decode()
            assert f'{names.METRIC_PREDICTION_ERROR}{{instance="{one.url}",leg="mono"}} 0.' in text
            assert f"{names.METRIC_FIT_SAMPLES}" in text and 'coefficient="b"' in text

    fakes.run(scenario)


def test_too_late_is_429() -> None:
    """What has to wait too long for --slo-ttft-ms is refused and counted; an idle instance serves it late."""

    async def scenario() -> None:
        async with (
            fakes.instance(Plan({"prefill.compute": 1000})) as one,
            fakes.router([one.url], routing=known.routing(slo=0.5)) as router,
        ):
            teach(books(router), one.url, 0.001)
            late = asyncio.create_task(router.post(COMPLETIONS, ask(20_000), **TRACED))
            await known.until(lambda: len(books(router).desk.state.pending) == 1)
            status, headers, body = await router.post(COMPLETIONS, ask(100, 9), **TRACED)
            assert status == 429 and 10 < int(headers["Retry-After"]) <= 20
            assert b'"type":"RateLimitError"' in body and b'"code":429' in body
            assert (await late)[0] == 200
            assert len(one.seen) == 1
            assert f"{names.METRIC_LATE}_total 1.0" in router.app.metrics.text().decode()
            assert len(books(router).desk.state.pending) == 0

    fakes.run(scenario)


def test_prefill_instances_are_accounted_for_until_their_token() -> None:
    """With P and D apart the policy is P's: an entry while P computes, none while D answers."""

    async def scenario() -> None:
        model = pd.Model()
        async with (
            pd.server(model, False) as p,
            pd.server(model, True) as d,
            fakes.router([], prefills=[p.url], decodes=[d.url], routing=known.routing()) as router,
        ):
            routing = books(router)
            assert routing.leg == "prefill"
            body = fakes.chat() | {"tokens": 800, "max_tokens": 4}
            assert (await router.post("/v1/chat/completions", body, **TRACED))[0] == 200
            state = routing.desk.state
            assert len(state.pending) == 0 and state.index.match(
                range(1_000_000, 1_000_003), [p.url]
            ) == [3]
            found = [
                piece.attributes
                for each in await router.settled(2)
                for piece in (each.ttft.pieces if each.ttft else ())
                if piece.name == "router.route" and piece.attributes
            ]
            assert found[0][names.POLICY] == "ttft"

    fakes.run(scenario)


def test_whoever_is_removed_is_forgotten() -> None:
    """Added by /instances it is chosen, removed its outcomes go; the source is told each time."""

    async def scenario() -> None:
        source = Source()
        async with (
            fakes.instance() as a,
            fakes.instance() as b,
            fakes.router([a.url], routing=known.routing("ttft", None, source)) as router,
        ):
            legs, routing = router.app.forward.legs, books(router)
            legs.fleet.add(instance(b.url, "mono"))
            await legs.follow()
            teach(routing, a.url, 0.001)
            teach(routing, b.url, 0.0001)
            await router.post(COMPLETIONS, ask())
            assert len(b.seen) == 1 and b.url in routing.desk.state.outcomes
            found = legs.fleet.find("mono", b.url)
            assert found is not None
            begun = asyncio.create_task(router.post(COMPLETIONS, ask()))
            await known.until(lambda: len(b.seen) == 2)
            legs.fleet.remove(found)
            await legs.follow()
            assert source.followed == 2
            state = routing.desk.state
            assert (await begun)[0] == 200 and len(state.pending) == 0
            assert b.url not in state.outcomes and b.url not in routing.tell()
            assert b.url not in state.besides and ("tiny", b.url) not in state.models.fits()
            await router.post(COMPLETIONS, ask())
            assert len(a.seen) == 1

    fakes.run(scenario)


def test_shared_cache() -> None:
    """What one instance has, all have: then the cached prefix decides nothing, and counts everywhere."""

    async def scenario() -> None:
        async with fakes.instance() as a, fakes.instance() as b:
            source = Source(tells={a.url: 160})
            routing = known.routing("ttft", None, source, shared=True)
            async with fakes.router([a.url, b.url], routing=routing) as router:
                await router.post(COMPLETIONS, ask(), **TRACED)
                assert route((await router.settled(2))[0])[names.ROUTE_CACHED] == (160, 160)

    fakes.run(scenario)
