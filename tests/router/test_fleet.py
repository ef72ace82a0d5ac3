# SPDX-License-Identifier: Apache-2.0
"""Instances that fail, and what it costs a request: probes, retries, breakers, budgets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from router import fakes, pd
from router.fakes import Plan
from ttft_otel import names
from ttft_otel.router import choose, retry
from ttft_otel.router.fleet import Fleet


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses between attempts are as short as they can be."""
    monkeypatch.setattr(retry, "FIRST", 0.0)


async def until(true: Callable[[], bool]) -> None:
    """Wait for it, at most as long as a scenario may take."""
    while not true():
        await asyncio.sleep(0.01)


def state(router: fakes.Router, one: fakes.Instance) -> tuple[str, str]:
    """An instance's state and its breaker's."""
    (found,) = (each for each in router.fleet if each.url == one.url)
    return found.state, found.breaker


def test_a_failing_probe_takes_an_instance_out_and_a_good_one_back() -> None:
    """While its /health says 503 an instance gets nothing; then again its share."""

    async def scenario() -> None:
        async with (
            fakes.instance() as a,
            fakes.instance() as b,
            fakes.router([a.url, b.url], pace=0.05) as router,
        ):
            a.plan.health = 503
            await until(lambda: state(router, a)[0] == "failed")
            assert (await router.get("/readyz"))[0] == 200
            for _ in range(4):
                assert (await router.chat())[0] == 200
            assert (len(a.seen), len(b.seen)) == (0, 4)
            b.plan.health = 500
            await until(lambda: state(router, b)[0] == "failed")
            status, _, said = await router.get("/readyz")
            assert status == 503 and set(said["legs"]["mono"].values()) == {"failed"}
            # with all of them out the probes may be wrong: they are tried
            assert (await router.chat())[0] == 200
            a.plan.health = b.plan.health = 200
            await until(lambda: state(router, a)[0] == state(router, b)[0] == "healthy")
            seen = len(a.seen)
            for _ in range(4):
                await router.chat()
            assert len(a.seen) == seen + 2

    fakes.run(scenario)


def test_turns_stay_fair_while_one_is_out() -> None:
    """Of three instances with one out, the other two get half each."""

    async def scenario() -> None:
        async with (
            fakes.instance(Plan({})) as a,
            fakes.instance(Plan({}, health=503)) as b,
            fakes.instance(Plan({})) as c,
            fakes.router([a.url, b.url, c.url]) as router,
        ):
            await router.get("/readyz")
            for _ in range(10):
                await router.chat()
            assert [len(each.seen) for each in (a, b, c)] == [5, 0, 5]

    fakes.run(scenario)


@pytest.mark.parametrize("status", [502, 503, 504])
def test_an_instance_that_cannot_is_passed_over(status: int) -> None:
    """502, 503 and 504 before the first byte: another instance answers; each attempt is a span."""

    async def scenario() -> None:
        async with (
            fakes.instance(Plan(status=status)) as a,
            fakes.instance() as b,
            fakes.router([a.url, b.url]) as router,
        ):
            got, _, body = await router.chat()
            assert (got, body) == (200, b"".join(fakes.EVENTS))
            first, last = await router.settled(2)
            assert [call.status for call in last.calls] == [status, 200]
            assert last.calls[0].error == str(status)
            assert last.calls[1].attributes[names.ATTEMPT] == 2
            assert last.server is not None and last.server.error == ""
            assert first.ttft is not None and first.ttft.stages["router.retry"] >= 20_000
            assert b.seen[0].body == a.seen[0].body
            text = await metrics(router)
            assert 'ttft_otel_router_retries_total{leg="mono"} 1.0' in text
            assert f'instance="{a.url}",leg="mono",result="5xx"}} 1.0' in text
            assert f'instance="{b.url}",leg="mono",result="2xx"}} 1.0' in text
            assert 'ttft_otel_router_requests_total{result="2xx"} 1.0' in text

    fakes.run(scenario)


async def metrics(router: fakes.Router) -> str:
    """What /metrics says."""
    async with router.client.get(f"{router.url}/metrics") as response:
        return await response.text()


def test_when_nobody_can_the_answer_is_the_last_ones() -> None:
    """Three that say 503: the client reads the third's body; alone, one is asked only once."""

    async def scenario() -> None:
        plan = Plan({}, status=503)
        async with fakes.instance(plan) as a, fakes.instance(plan) as b, fakes.instance(plan) as c:
            async with fakes.router([a.url, b.url, c.url]) as router:
                status, headers, body = await router.chat()
                assert (status, body, headers["X-Own"]) == (503, b'{"error": "no"}', "kept")
                assert [len(each.seen) for each in (a, b, c)] == [1, 1, 1]
                (record,) = await router.settled(1)
                assert record.ttft is not None and record.ttft.died == "router.hop.mono"
            async with fakes.router([a.url]) as router:
                assert (await router.chat())[0] == 503 and len(a.seen) == 2

    fakes.run(scenario)


def test_other_errors_are_answers() -> None:
    """A 500 or a 429 is not tried elsewhere: it may be the request that is wrong."""

    async def scenario() -> None:
        for status in (400, 429, 500, 501):
            async with fakes.instance(Plan(status=status)) as a, fakes.instance() as b:
                async with fakes.router([a.url, b.url]) as router:
                    assert (await router.chat())[0] == status
                    assert not b.seen

    fakes.run(scenario)


def test_what_may_have_been_read_is_not_sent_again() -> None:
    """A connection that breaks before any answer is a 502: such a request could kill the next."""

    async def scenario() -> None:
        plan = Plan({"prefill.compute": 150}, drops=2)
        async with fakes.instance(plan) as a, fakes.instance() as b:
            async with fakes.router([a.url, b.url]) as router:
                status, _, body = await router.chat()
                error = json.loads(body)["error"]
                assert (status, error["code"], error["type"]) == (502, 502, "UpstreamError")
                assert a.url.rpartition(":")[2] not in error["message"]
                await router.chat()  # b
                assert (await router.chat())[0] == 502  # on a connection that was kept, but late
                assert (len(a.seen), len(b.seen)) == (2, 1)
                (record,) = [each for each in router.records if each.ttft][:1]
                assert record.ttft is not None and record.ttft.died == "router.hop.mono"

    fakes.run(scenario)


def test_a_kept_connection_that_was_just_closed_is_no_loss() -> None:
    """A server that closes an idle connection as a request comes gets it again, once."""

    async def scenario() -> None:
        async with fakes.instance(Plan({})) as one, fakes.router([one.url]) as router:
            assert (await router.chat())[0] == 200
            one.plan.drops = 1
            assert (await router.chat())[0] == 200
            assert len(one.seen) == 3 and state(router, one) == ("healthy", "closed")
            one.plan.drops = 2
            assert (await router.chat())[0] == 502
            assert len(one.seen) == 5

    fakes.run(scenario)


def test_a_failed_encoder_call_goes_to_another_encoder_once() -> None:
    """A 500, or a broken connection, is tried on another encoder; then the error is the client's."""

    async def scenario() -> None:
        for bad in (Plan({}, status=500), Plan({}, drops=9)):
            async with (
                fakes.instance(bad) as e1,
                fakes.instance(Plan({})) as e2,
                fakes.instance() as pd,
                fakes.router([pd.url], [e1.url, e2.url]) as router,
            ):
                assert (await router.chat("a"))[0] == 200
                assert [len(each.seen) for each in (e1, e2, pd)] == [1, 1, 1]
                first, last = await router.settled(2)
                assert [call.leg for call in last.calls] == ["encode", "encode", "prefill_decode"]
                assert first.ttft is not None and "router.retry" in first.ttft.stages
        plan = Plan({}, status=500)
        async with (
            fakes.instance(plan) as e1,
            fakes.instance(plan) as e2,
            fakes.instance(plan) as e3,
            fakes.instance() as pd,
            fakes.router([pd.url], [e1.url, e2.url, e3.url]) as router,
        ):
            status, _, body = await router.chat("a")
            assert (status, body) == (500, b'{"error": "no"}')
            assert len(e1.seen + e2.seen + e3.seen) == 2 and not pd.seen

    fakes.run(scenario)


def test_a_wrong_image_is_wrong_everywhere() -> None:
    """An encoder's 4xx is the client's error: no other encoder is asked."""

    async def scenario() -> None:
        plan = Plan({}, status=422)
        async with (
            fakes.instance(plan) as e1,
            fakes.instance(plan) as e2,
            fakes.instance() as pd,
            fakes.router([pd.url], [e1.url, e2.url]) as router,
        ):
            assert (await router.chat("a"))[0] == 422
            assert len(e1.seen + e2.seen) == 1

    fakes.run(scenario)


def test_retries_are_a_share_of_requests() -> None:
    """With the saved ones spent, retries are no more than the budget's share of all requests."""

    async def scenario() -> None:
        plan = Plan({}, status=503)
        async with fakes.instance(plan) as a, fakes.instance(plan) as b:
            many = {"budget": 0.1, "failures": 10_000}
            async with fakes.router([a.url, b.url], **many) as router:
                for _ in range(100):
                    assert (await router.chat())[0] == 503
                retried = len(a.seen) + len(b.seen) - 100
                assert retry.SAVED <= retried <= retry.SAVED + 10
            async with fakes.router([a.url, b.url], budget=0.0) as router:
                before = len(a.seen) + len(b.seen)
                assert (await router.chat())[0] == 503
                assert len(a.seen) + len(b.seen) == before + 1
            async with fakes.router([a.url, b.url], retries=0) as router:
                before = len(a.seen) + len(b.seen)
                assert (await router.chat())[0] == 503
                assert len(a.seen) + len(b.seen) == before + 1

    fakes.run(scenario)


def test_breaker_opens_tries_one_and_closes() -> None:
    """After failures in a row an instance gets nothing, then one request, then its share."""

    async def scenario() -> None:
        async with fakes.instance(Plan({}, status=503)) as a, fakes.instance(Plan({})) as b:
            async with fakes.router([a.url, b.url], failures=2, pause=0.5) as router:
                for _ in range(8):
                    assert (await router.chat())[0] == 200
                assert len(a.seen) == 2 and state(router, a) == ("healthy", "open")
                assert f'breaker_open{{instance="{a.url}",leg="mono"}} 1.0' in await metrics(router)
                await until(lambda: state(router, a)[1] == "half-open")
                answers = await asyncio.gather(*(router.chat() for _ in range(6)))
                assert {answer[0] for answer in answers} == {200}
                assert len(a.seen) == 3 and state(router, a)[1] == "open"
                a.plan.status = 200
                await until(lambda: state(router, a)[1] == "half-open")
                await asyncio.gather(*(router.chat() for _ in range(4)))
                assert state(router, a)[1] == "closed" and len(a.seen) >= 4

    fakes.run(scenario)


def test_with_every_breaker_open_clients_are_told_to_come_back() -> None:
    """No call is made: 503 in OpenAI's form, with Retry-After."""

    async def scenario() -> None:
        async with fakes.instance(Plan({}, status=503)) as one:
            async with fakes.router([one.url], failures=2, pause=30) as router:
                for _ in range(2):
                    assert (await router.chat())[2] == b'{"error": "no"}'
                status, headers, body = await router.chat()
                assert (status, headers["Retry-After"], len(one.seen)) == (503, "1", 2)
                assert json.loads(body)["error"]["type"] == "UpstreamError"
                record = (await router.settled(3))[-1]
                assert record.ttft is not None and record.ttft.died == "router.route"

    fakes.run(scenario)


def test_streams_that_break_off_open_the_breaker() -> None:
    """Headers alone do not make an instance a good one."""

    async def scenario() -> None:
        async with fakes.instance(Plan({}, breaks=True, gap=0.05)) as one:
            async with fakes.router([one.url], failures=2, pause=30) as router:
                for _ in range(2):
                    with pytest.raises(Exception, match="payload"):
                        await router.chat()
                await router.settled(4)
                assert state(router, one)[1] == "open"

    fakes.run(scenario)


def test_a_trial_that_its_client_leaves_is_followed_by_another() -> None:
    """A half-open breaker is not stuck with a request that was cancelled."""

    async def scenario() -> None:
        async with fakes.instance(Plan({}, status=503)) as one:
            async with fakes.router([one.url], failures=1, pause=0.1) as router:
                await router.chat()
                await until(lambda: state(router, one)[1] == "half-open")
                one.plan = Plan({"prefill.compute": 5000})
                task = asyncio.create_task(router.chat())
                await until(lambda: len(one.seen) == 2)
                assert (await router.chat())[0] == 503
                task.cancel()
                await router.settled(3)
                one.plan = Plan({})
                assert (await router.chat())[0] == 200
                assert state(router, one)[1] == "closed"

    fakes.run(scenario)


def test_a_request_from_before_does_not_end_a_trial() -> None:
    """A stream that began before the breaker opened ends during the trial: still one request only."""

    async def scenario() -> None:
        async with fakes.instance(Plan({}, gap=0.3)) as one:
            async with fakes.router([one.url], failures=1, pause=0.1) as router:
                old = asyncio.create_task(router.chat())
                await until(lambda: len(one.seen) == 1)
                one.plan = Plan({}, status=503)
                assert (await router.chat())[0] == 503
                await until(lambda: state(router, one)[1] == "half-open")
                one.plan = Plan({"prefill.compute": 5000})
                trial = asyncio.create_task(router.chat())
                await until(lambda: len(one.seen) == 3)
                assert not old.done() and (await old)[0] == 200
                assert (await router.chat())[0] == 503 and len(one.seen) == 3
                trial.cancel()
                await asyncio.gather(trial, return_exceptions=True)

    fakes.run(scenario)


def test_nothing_stays_in_flight() -> None:
    """Answers, errors, retries, cut streams and clients that leave: the counts return to nought."""

    async def scenario() -> None:
        slow = Plan({"prefill.compute": 100})
        async with (
            fakes.instance(Plan({}, status=503)) as e1,
            fakes.instance(Plan({})) as e2,
            fakes.instance(slow) as pd,
            fakes.router([pd.url], [e1.url, e2.url]) as router,
        ):
            tasks = [asyncio.create_task(router.chat("a", "b")) for _ in range(6)]
            await until(lambda: sum(each.in_flight for each in router.fleet) > 0)
            for task in tasks[::2]:
                task.cancel()
            await asyncio.wait(tasks)
            pd.plan = Plan({}, status=500)
            await router.chat()
            pd.plan = Plan({}, drops=1)
            await router.chat()
            pd.plan = Plan({}, breaks=True, gap=0.05)
            with pytest.raises(Exception, match="payload"):
                await router.chat()
            await until(lambda: not router.app.gate.inside)
            assert [each.in_flight for each in router.fleet] == [0, 0, 0]
            assert not any(each.trial for each in router.fleet)

    fakes.run(scenario)


def test_requests_go_where_their_model_is() -> None:
    """An instance that does not list a model is not asked for it; nobody lists it: 404."""

    async def scenario() -> None:
        async with (
            fakes.instance(Plan({}, models=("tiny", "one"))) as a,
            fakes.instance(Plan({}, models=("tiny", "two"))) as b,
            fakes.router([a.url, b.url]) as router,
        ):
            assert {card["id"] for card in (await router.get("/v1/models"))[2]["data"]} == {
                "tiny",
                "one",
                "two",
            }
            for _ in range(3):
                assert (await router.post("/v1/completions", {"model": "two"}))[0] == 200
            assert (len(a.seen), len(b.seen)) == (0, 3)
            status, _, body = await router.post("/v1/completions", {"model": "other"})
            error = json.loads(body)["error"]
            assert (status, error["type"], error["param"]) == (404, "NotFoundError", "model")
            assert "`other`" in error["message"]
            await asyncio.sleep(1.1)
            a.plan.models = ("tiny", "other")  # an adapter, loaded a moment ago
            assert (await router.post("/v1/completions", {"model": "other"}))[0] == 200
            assert len(a.seen) == 1

    fakes.run(scenario)


@pytest.mark.parametrize("mode", ["off", "strip", "continue"])
def test_prefill_and_decode_are_tried_elsewhere_too(mode: str) -> None:
    """A prefill and a decode instance that say 503 cost a retry each; the stream is whole."""

    async def scenario() -> None:
        model = pd.Model()
        async with (
            pd.server(model, False) as prefill,
            pd.server(model, True) as decode,
            fakes.instance(Plan({}, status=503)) as bad,
            fakes.router(
                [],
                prefills=[bad.url, prefill.url],
                decodes=[bad.url, decode.url],
                first_token=mode,
            ) as router,
        ):
            await router.get("/v1/models")
            status, _, data = await router.post(
                "/v1/chat/completions", fakes.chat() | {"max_tokens": 4}
            )
            assert (status, "".join(pd.Answer(200, {}, data).texts)) == (200, "".join(pd.TOKENS))
            last = (await router.settled(2))[-1]
            tried = [(call.leg, call.status) for call in last.calls]
            assert tried[:2] == [("prefill", 503), ("prefill", 200)]
            assert tried[2:] == [("decode", 503), ("decode", 200)]
            await until(lambda: not any(each.in_flight for each in router.fleet))

    fakes.run(scenario)


def test_an_instance_that_came_and_went_meanwhile_is_not_watched() -> None:
    """Two changes at once: who is gone when the first is done is asked nothing any more."""

    async def scenario() -> None:
        async with (
            fakes.instance() as a,
            fakes.instance() as b,
            fakes.instance() as brief,
            fakes.router([a.url, b.url], pace=0.05) as router,
        ):
            health, fleet = router.app.forward.legs.health, router.fleet
            (old,) = (each for each in fleet if each.url == a.url)
            new = choose.instance(brief.url, "mono")
            fleet.remove(old)
            fleet.add(new)
            first = asyncio.create_task(health.follow())
            await asyncio.sleep(0)  # it waits for the end of a's watch
            fleet.remove(new)
            await asyncio.gather(first, health.follow())
            await asyncio.sleep(0.2)
            assert not brief.asked and b.asked

    fakes.run(scenario)


def test_a_pause_that_a_probe_cut_short_does_not_end_the_next_one() -> None:
    """The timer of an older opening leaves a breaker alone that opened again since."""

    async def scenario() -> None:
        fleet = Fleet({"mono": (choose.instance("http://127.0.0.1:1", "mono"),)})
        fleet.pause = 0.3
        (one,) = fleet.get("mono")
        for _ in range(fleet.failures):
            fleet.bad(one, "502")
        fleet.fail(one, "its probe")
        fleet.heal(one)
        assert one.breaker == "half-open"
        fleet.bad(one, "502")  # its trial: a pause of 0.6 s, after 0 s of the first one's 0.3
        assert one.breaker == "open"
        await asyncio.sleep(0.42)
        assert one.breaker == "open"
        await until(lambda: one.breaker == "half-open")

    asyncio.run(asyncio.wait_for(scenario(), 10))
