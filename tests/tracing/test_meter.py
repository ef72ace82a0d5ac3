# SPDX-License-Identifier: Apache-2.0
"""Our counts on the host's own /metrics, also where several API servers share one; and what waits now."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import tracing_fakes
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from ttft_otel.model.names import env_names, metric_names
from ttft_otel.model.stages import WAIT_REASON_NAMES
from ttft_otel.tracing import carrier, clock, guard, handoff, meter, recorder
from ttft_otel.tracing.asgi import TracingMiddleware
from ttft_otel.tracing.context import start_context
from ttft_otel.tracing.request_trace import RequestTrace
from ttft_otel.tracing.settings import Settings


def read_value(name: str, **labels: str) -> float:
    """A sample of the registry that vLLM shows; 0 when it has none yet."""
    return REGISTRY.get_sample_value(name, labels) or 0.0


def make_trace() -> RequestTrace:
    """A sampled trace."""
    return RequestTrace(1, start_context("", "", Settings()), timing_requested=False)


def test_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records sent are the sender's own count, drops are counted with their reason."""
    TracingMiddleware(object(), Settings(), print, print)  # type: ignore[arg-type] # never called
    sender = tracing_fakes.MemorySender()
    monkeypatch.setattr(handoff, "_process_sender", sender)
    monkeypatch.setattr(meter._collectors[0], "counts", handoff.get_counts)
    lost = read_value(f"{metric_names.DROPPED}_total", reason="handoff")
    for sender.full in (False, False, True):
        recorder.send_record(make_trace(), sender)

    assert read_value(f"{metric_names.RECORDS}_total") == 2
    assert read_value(f"{metric_names.DROPPED}_total", reason="handoff") == lost + 1


def test_pending(no_state_left: None) -> None:
    """How many requests wait for their first token is read at the scrape."""
    TracingMiddleware(object(), Settings(), print, print)  # type: ignore[arg-type] # never called
    trace = make_trace()
    recorder.register_engine_request(trace, "a")
    recorder.register_engine_request(trace, "b")

    assert read_value(metric_names.PENDING) == 2
    trace.arrive = clock.now_us() - 3_000_000
    assert 3.0 <= (read_value(metric_names.OLDEST_PENDING) or 0) < 60
    recorder.forget_trace(trace)
    assert read_value(metric_names.PENDING) == read_value(metric_names.OLDEST_PENDING) == 0


def test_errors(guard_keeps: None) -> None:
    """A hook that failed shows with its place."""
    meter.register_collector(recorder.awaiting_traces, dict)
    with guard.Guard("some place"):
        raise ValueError

    assert read_value(f"{metric_names.HOOK_ERRORS}_total", place="some place") == 1


SERVER = Path(__file__).parent / "shared_metrics_server.py"
WAIT_S = 120.0  # for exporters to start and to count, on a busy machine; takes 3
# Of each server: records to lose, errors to make, requests pending.
SERVERS = ((3, 1, 2), (4, 2, 5))
Samples = dict[tuple[str, str], float]


@contextmanager
def start_server(folder: Path, numbers: tuple[int, int, int]) -> Iterator[str]:
    """A process of shared_metrics_server.py; gives its URL."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {
        meter.ENV_SHARED_METRICS: str(folder),
        "PYTHONPATH": str(SERVER.parents[1]),
        env_names.OTEL_EXPORTER_OTLP_ENDPOINT: "http://127.0.0.1:9",
    }
    command = [sys.executable, str(SERVER), *map(str, numbers)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()
            process.wait(WAIT_S)


def read_samples(url: str, data: bytes | None = None) -> Samples:
    """What /metrics shows, by name and the value of the only label; with `data` by a POST."""
    with urllib.request.urlopen(url, data, timeout=WAIT_S) as answer:
        text = answer.read().decode()
    return {
        (sample.name, "".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("ttft_otel") and sample.name != metric_names.OLDEST_PENDING
    }


def wait_for_samples(url: str, wanted: Samples) -> Samples:
    """The samples once they are those wanted; the last ones when time is up."""
    until = time.monotonic() + WAIT_S
    while (found := read_samples(url)) != wanted and time.monotonic() < until:
        time.sleep(0.1)
    return found


def test_sums_of_all_servers(tmp_path: Path) -> None:
    """Every server shows all metrics of all, with their labels: the exporters' losses, too.

    Records and losses are there at 0 from the start, so that a first loss is an increase.
    """
    losses, errors, pending = (sum(numbers) for numbers in zip(*SERVERS, strict=True))
    unlost = {(f"{metric_names.LOST}_total", reason): 0.0 for reason in meter.LOSS_REASONS}
    records = (f"{metric_names.RECORDS}_total", "")
    before: Samples = {(metric_names.PENDING, ""): pending, records: 0.0, **unlost}
    after = before | {
        records: losses,
        (f"{metric_names.HOOK_ERRORS}_total", "a place"): errors,
        (f"{metric_names.LOST}_total", "foreign"): losses,
    }
    with ExitStack() as stack:
        urls = [stack.enter_context(start_server(tmp_path, numbers)) for numbers in SERVERS]
        assert wait_for_samples(urls[0], before) == before
        for url in urls:
            read_samples(url, b"{}")
        for url in urls:
            assert wait_for_samples(url, after) == after


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
    meter.latest.__init__()  # type: ignore[misc]
    trace = make_trace()
    trace.arrive = clock.now_us() - 10_000_000
    recorder.register_engine_request(trace, "a")
    yield trace
    recorder.forget_trace(trace)
    meter.latest.__init__()  # type: ignore[misc]


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
    assert meter.latest.describe()[0]["holders"][0] == {
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
        await meter.latest.ask([fail])
    assert len(asked) == 1


async def test_nothing_is_told_where_nobody_can_be_asked(pending: RequestTrace) -> None:
    """Without a way to the engine core no count is shown: 0 would be wrong."""
    seen = await scrape()
    assert set(seen.values()) == {None, seen["took"]}
