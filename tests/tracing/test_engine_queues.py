# SPDX-License-Identifier: Apache-2.0
"""What waits now, on /metrics: asked of engine cores at the scrape, also of one that does not answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest
from prometheus_client import REGISTRY

from ttft_otel.model.names import metric_names
from ttft_otel.model.stages import WAIT_REASON_NAMES
from ttft_otel.tracing import carrier, clock, engine_queues, recorder
from ttft_otel.tracing.asgi import TracingMiddleware
from ttft_otel.tracing.context import start_context
from ttft_otel.tracing.request_trace import RequestTrace
from ttft_otel.tracing.settings import Settings

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"
Seen = dict[str, float | None]


class FakeEngine:
    """An engine core with requests that wait; while `hangs` is set it does not answer."""

    def __init__(self, **waiting: int) -> None:
        self.waiting = waiting
        self.hangs = asyncio.Event()
        self.asked = 0

    async def answer(self) -> str:
        """The utility call."""
        self.asked += 1
        while self.hangs.is_set():
            await asyncio.sleep(0.01)
        counts = {WAIT_REASON_NAMES.index(name): number for name, number in self.waiting.items()}
        holders = [(2_000_000, 40, 1, "holder", PARENT)] if counts else []
        return carrier.encode_answer(carrier.QueueReport(counts, holders))


@pytest.fixture
def pending(no_state_left: None) -> Iterator[RequestTrace]:
    """A request that has waited for 10 seconds."""
    engine_queues.latest.__init__()  # type: ignore[misc]
    trace = RequestTrace(
        clock.now_us() - 10_000_000, start_context("", "", Settings()), timing_requested=False
    )
    recorder.register_engine_request(trace, "a")
    yield trace
    recorder.forget_trace(trace)
    engine_queues.latest.__init__()  # type: ignore[misc]


async def scrape(*engines: FakeEngine) -> Seen:
    """What GET /metrics shows of the queues: counts by reason, `age`, and the seconds that it `took`."""
    seen: Seen = {}

    async def show_metrics(*_: object) -> None:
        for reason in WAIT_REASON_NAMES:
            seen[reason] = REGISTRY.get_sample_value(metric_names.WAITING, {"reason": reason})
        seen["age"] = REGISTRY.get_sample_value(metric_names.WAITING_AGE)

    calls: list[Callable[[], Awaitable[str]]] = [each.answer for each in engines]
    app = TracingMiddleware(
        show_metrics,
        Settings(),
        print,
        print,  # type: ignore[arg-type] # never called
        list_engine_calls=lambda _: calls,
    )
    begun = time.monotonic()
    scope = {"type": "http", "method": "GET", "path": "/metrics", "app": None}
    await app(scope, print, print)  # type: ignore[arg-type] # never called
    seen["took"] = time.monotonic() - begun
    return seen


def list_counts(seen: Seen) -> Seen:
    """The reasons that have requests."""
    return {name: seen[name] for name in WAIT_REASON_NAMES if seen[name] != 0}


async def test_all_engines_together(pending: RequestTrace) -> None:
    """The counts of all data-parallel ranks are added; reasons that nobody has are there at 0."""
    seen = await scrape(FakeEngine(kv_blocks=2, lora=1), FakeEngine(kv_blocks=3))

    assert list_counts(seen) == {"kv_blocks": 5, "lora": 1}
    assert 0 <= (seen["age"] or 0) < 1
    assert engine_queues.latest.describe()[0]["holders"][0] == {
        "request_id": "holder",
        "trace_id": "a" * 32,
        "kind": "decode",
        "held_s": 2.0,
        "tokens": 40,
    }


async def test_nobody_is_asked_while_nothing_waits(pending: RequestTrace) -> None:
    """Without a pending request a scrape asks no engine core, and all counts are 0."""
    recorder.awaiting_traces.clear()
    engine = FakeEngine(kv_blocks=2)
    seen = await scrape(engine)

    assert engine.asked == 0
    assert list_counts(seen) == {} and seen["age"] == 0


async def test_an_engine_that_hangs(pending: RequestTrace) -> None:
    """Its last word stays with a growing age, a scrape waits little for it, and it is asked once.

    A request that comes after that word has no reason yet; its own age counts.
    """
    engine = FakeEngine(max_num_seqs=4)
    fresh = await scrape(engine)
    engine.hangs.set()
    await asyncio.sleep(0.5)
    hung = await scrape(engine)
    await asyncio.sleep(0.5)
    later = await scrape(engine)
    pending.arrive = clock.now_us() - 300_000
    newer = await scrape(engine)
    asked = engine.asked
    engine.hangs.clear()
    engine.waiting = {}
    await asyncio.sleep(0.1)
    after = await scrape(engine)

    for each in (fresh, hung, later):
        assert list_counts(each) == {"max_num_seqs": 4}
    assert (fresh["age"] or 0) < 0.1 < (hung["age"] or 0) < (later["age"] or 0) - 0.4
    assert (fresh["took"] or 0) < 0.2 < (hung["took"] or 0) < 5
    assert list_counts(newer) == {} and 0.3 <= (newer["age"] or 0) < (later["age"] or 0)
    assert asked == 2
    assert list_counts(after) == {} and (after["age"] or 0) < 0.4


async def test_a_scraper_without_pause(pending: RequestTrace) -> None:
    """However often a page is read, by how many, an engine core is asked twice a second; the age is told."""
    begun = time.monotonic()
    engine, seen = FakeEngine(max_num_seqs=4), list[Seen]()
    while time.monotonic() < begun + 1.2:
        seen += await asyncio.gather(*(scrape(engine) for _ in range(4)))

    assert len(seen) > 40 and 1 < engine.asked <= 1 + (time.monotonic() - begun) / 0.5
    assert all(list_counts(each) == {"max_num_seqs": 4} for each in seen)
    assert 0.4 < max(each["age"] or 0 for each in seen)


async def test_an_engine_without_the_method_is_asked_once(
    pending: RequestTrace, guard_keeps: None
) -> None:
    """An engine core without hooks fails the call, and logs it: once is enough."""
    asked = []

    async def fail() -> str:
        asked.append(1)
        raise RuntimeError

    for _ in range(3):
        await engine_queues.latest.ask([fail])
    assert len(asked) == 1


async def test_nothing_is_told_where_nobody_can_be_asked(pending: RequestTrace) -> None:
    """Without a way to the engine core no count is shown: 0 would be wrong."""
    seen = await scrape()
    assert set(seen.values()) == {None, seen["took"]}
