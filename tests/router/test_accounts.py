# SPDX-License-Identifier: Apache-2.0
"""Whatever becomes of requests, in whatever order: the books that policies decide by end empty."""

from __future__ import annotations

import asyncio
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router import fakes, known, rough, test_soak
from ttft_otel.router.policies.registry import POLICIES
from ttft_otel.router.routing import Routing

# After how many bytes a client may leave; 0: at once, None: never.
LEAVES = (None, None, 0, 1, 150)
LONG = 1000  # ms: what is to be seen meanwhile is seen, on a busy machine too
MOODS = ("ok", "error", "busy", "cut", "torn", "late", "endless")
requests = st.lists(
    st.tuples(
        st.sampled_from(MOODS),
        st.booleans(),  # a stream
        st.integers(0, 3000),  # tokens; 0: unknown
        st.integers(0, 2),  # which prompt
        st.sampled_from(LEAVES),
        st.integers(0, 3),  # images, each of the prompt's length
        st.integers(0, 20),  # ms after the one before
    ),
    min_size=1,
    max_size=12,
)
Request = tuple[str, bool, int, int, int | None, int, int]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests,
    st.sampled_from([name for name, kind in POLICIES.items() if kind.books]),
    st.booleans(),
    st.sampled_from(("", "ttft")),
)
def test_books_end_empty(sent: list[Request], logic: str, apart: bool, encoders: str) -> None:
    """Answers, errors, retries, cut connections and clients that leave, at once and in any order."""

    async def scenario() -> None:
        async with rough.instance() as a, rough.instance() as b:
            legs = {"prefills": [a.url, b.url], "decodes": [b.url]} if apart else {}
            async with fakes.router(
                [] if apart else [a.url, b.url],
                [a.url, b.url] if encoders else [],
                failures=test_soak.NEVER,
                routing=known.routing(logic, encoders=encoders, session="prompt"),
                **legs,  # type: ignore[arg-type]
            ) as router:
                tasks = []
                for each in sent:
                    await asyncio.sleep(each[-1] / 1000)
                    tasks.append(asyncio.create_task(one(router.url, each)))
                await asyncio.gather(*tasks)
                routing = router.app.forward.legs.routing
                for _ in range(100):
                    if not pending(routing) and not router.app.gate.inside:
                        break
                    await asyncio.sleep(0.02)
                assert pending(routing) == 0
                for leg in routing.told:
                    for each in (a, b):
                        load = routing.at(leg).state.pending.at(each.url)
                        assert (load.fresh, load.pairs, len(load.queued)) == (0, 0, 0)
                assert not [each for each in router.fleet if each.in_flight]

    fakes.run(scenario, 60)


async def one(url: str, request: Request) -> None:
    """Send it, and leave as it says."""
    mood, stream, tokens, prompt, most, images, _ = request
    length = f'"tokens": {tokens}, ' if tokens else ""
    word = "true" if stream else "false"
    said, path = f'"prompt": "{prompt}"', "/v1/completions"
    if images:
        parts = [{"type": "image_url", "image_url": {"url": str(each)}} for each in range(images)]
        said = f'"messages": {json.dumps([{"role": "user", "content": parts}])}'
        said, path = f'{said}, "items": {[tokens] * images}', "/v1/chat/completions"
    body = f'{{"model": "tiny", "stream": {word}, {length}"from": {prompt + 1}, {said}}}'
    data = rough.request(mood, body.encode(), path)
    never = mood == "endless" and (
        most is None or images
    )  # an encoder's answer is waited for whole
    if most == 0 or mood == "late" or never:
        await test_soak.leave(url, data)
    else:
        await rough.ask(url, data, most, test_soak.PATIENCE)


def pending(routing: Routing) -> int:
    """Requests without a first token, and items at encoders, as their policies believe."""
    return sum(len(routing.at(leg).state.pending) for leg in routing.told)


def test_the_same_id_twice() -> None:
    """Clients choose request ids: two requests with one id are two entries, and each ends its own."""

    async def scenario() -> None:
        plan = fakes.Plan({"prefill.compute": LONG})
        async with (
            fakes.instance(plan) as one,
            fakes.router([one.url], routing=known.routing()) as router,
        ):
            body = {"model": "tiny", "prompt": "a", "stream": True, "tokens": 100}
            posts = [router.post("/v1/completions", body, x_request_id="same") for _ in range(3)]
            tasks = [asyncio.create_task(each) for each in posts]
            state = router.app.forward.legs.routing.desk.state
            await known.until(lambda: len(state.pending) == 3)
            assert state.pending.at(one.url).fresh == 300
            await asyncio.gather(*tasks)
            assert len(state.pending) == 0

    fakes.run(scenario)


def test_a_retry_moves_the_entry() -> None:
    """While a request waits for its second attempt it counts nowhere, and then where it is."""

    async def scenario() -> None:
        async with (
            fakes.instance(fakes.Plan(status=503)) as a,
            fakes.instance(fakes.Plan({"prefill.compute": LONG})) as b,
            fakes.router([a.url, b.url], routing=known.routing("qps")) as router,
        ):
            body = {"model": "tiny", "prompt": "a", "stream": True, "tokens": 100}
            task = asyncio.create_task(router.post("/v1/completions", body))
            pending = router.app.forward.legs.routing.desk.state.pending
            await known.until(lambda: len(a.seen) == len(b.seen) == 1)
            assert (pending.at(a.url).fresh, pending.at(b.url).fresh) == (0, 100)
            assert (await task)[0] == 200
            assert len(pending) == 0

    fakes.run(scenario)


def test_an_entry_ends_with_the_first_token() -> None:
    """While the rest of a stream comes nothing is pending any more."""

    async def scenario() -> None:
        plan = fakes.Plan({"prefill.compute": 10}, gap=LONG / 1000)
        async with (
            fakes.instance(plan) as one,
            fakes.router([one.url], routing=known.routing()) as router,
        ):
            body = {"model": "tiny", "prompt": "a", "stream": True, "tokens": 100}
            task = asyncio.create_task(router.post("/v1/completions", body))
            pending = router.app.forward.legs.routing.desk.state.pending
            (instance,) = router.fleet
            await known.until(lambda: instance.in_flight == 1 and not len(pending))
            await task

    fakes.run(scenario)
