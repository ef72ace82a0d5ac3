# SPDX-License-Identifier: Apache-2.0
"""Numbers out of readings that are known to the nanosecond: what the JSON says is exactly right."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from bench.conftest import checked
from ttft_otel.bench.ask import Form
from ttft_otel.bench.document import document
from ttft_otel.bench.drive import Driver, Result, Run
from ttft_otel.bench.session import Side
from ttft_otel.bench.stream import Story
from ttft_otel.bench.wire import Reply, Target
from ttft_otel.timing import Timing

MS = 1_000_000


def result(
    place: int, tokens: Sequence[float], parts: Mapping[str, float] | None = None, lag: float = 0.0
) -> Result:
    """A request sent at place x 10 ms, its tokens so many ms later, its end 1 ms after the last."""
    sent = place * 10 * MS
    times = [sent + int(each * MS) for each in tokens]
    story = Story(tokens_ns=times, prompt=8, answer=len(times))
    reply = Reply(sent, sent_ns=sent, end_ns=times[-1] + MS, status=200, lag_ns=int(lag * MS))
    found = {name: int(value * 1000) for name, value in (parts or {}).items()}
    timing = Timing(found, 0, sum(found.values())) if parts else None
    return Result(f"r{place}", f"{place:032x}", reply, story, timing, "")


NOBODY = Target.of("http://127.0.0.1:1")


def told(
    results: list[Result], slo: Mapping[str, float] | None = None, beats_ns: Sequence[int] = ()
) -> Any:
    """The document's only target."""
    run = Run(results, list(beats_ns), started=len(results))
    side = Side(NOBODY, Form("m"), [run])
    return checked(document({}, [side], slo or {}))["targets"][0]


def test_exact() -> None:
    """Percentiles interpolate, TPOT leaves out the first token, ITL is every gap, latency the end."""
    summary = told([result(0, [10, 20, 40]), result(1, [30, 40, 60])])["summary"]

    figures = summary["figures_ms"]
    assert figures["ttft"] == {"count": 2, "mean": 20, "p50": 20, "p95": 29, "p99": 29.8}
    assert figures["tpot"]["mean"] == 15
    assert figures["itl"] == {"count": 4, "mean": 15, "p50": 15, "p95": 20, "p99": 20}
    assert figures["latency"]["p50"] == 51


def test_rates() -> None:
    """Throughput is over the time from the first write to the last byte."""
    rates = told([result(0, [10, 20]), result(1, [39, 89])])["summary"]["throughput"]

    assert rates == {
        "requests_per_s": 20.0,
        "input_tokens_per_s": 160.0,
        "output_tokens_per_s": 40.0,
    }


def test_stages() -> None:
    """Queue wait and Prefill -> first token are sums of stages, of the right legs; the rest is outside."""
    parts = {
        "router.receive": 1,
        "encode.encoder.queue": 2,
        "encode.output": 3,
        "prefill_decode.prefill.queue": 4,
        "prefill_decode.dispatch": 5,
        "prefill_decode.prefill.compute": 6,
        "prefill_decode.output": 7,
        "router.egress": 8,
    }
    summary = told([result(0, [40], parts)])["summary"]

    assert summary["figures_ms"]["queue_wait"]["mean"] == 6
    assert summary["figures_ms"]["prefill_to_first_token"]["mean"] == 18
    assert summary["stages_ms"]["outside"]["mean"] == 4
    assert list(summary["stages_ms"])[-2:] == ["unattributed", "outside"]


@pytest.mark.parametrize(
    ("most", "who"),
    [(100, "The slowest request is"), (200, "The slowest 2 requests are")],
)
def test_blame(most: int, who: str) -> None:
    """The stage that separates the slowest from the middle tenth is named, not the longest one."""
    usual = {"prefill.queue": 5, "prefill.compute": 40, "output": 5}
    late = {"prefill.queue": 190, "prefill.compute": 55, "output": 5}
    slow = most // 100
    every = [result(n, [50], usual) for n in range(most - slow)]
    every += [result(most + n, [250], late) for n in range(slow)]
    says = told(every)["summary"]["explanation"]

    assert says == (
        f"{who} 200.0 ms slower than the middle tenth on average, "
        "185.0 ms of it (92 %) in prefill.queue."
    )


def test_blame_beyond() -> None:
    """A stage that takes more than the whole difference, others being quicker, is no share of it."""
    every = [result(n, [50], {"prefill.queue": 40, "prefill.compute": 10}) for n in range(99)]
    every.append(result(99, [60], {"prefill.queue": 10, "prefill.compute": 50}))

    assert told(every)["summary"]["explanation"] == (
        "The slowest request is 10.0 ms slower than the middle tenth on average; "
        "prefill.compute alone takes 40.0 ms more."
    )


def test_few() -> None:
    """A handful of requests has no slowest hundredth to explain."""
    few = [result(n, [50], {"prefill.queue": 5}) for n in range(3)]

    assert "too few" in told(few)["summary"]["explanation"]


def test_goodput() -> None:
    """Goodput counts the requests that kept every limit."""
    three = [result(0, [10, 20]), result(1, [10, 90]), result(2, [70, 80])]

    assert told(three, {"ttft": 50, "tpot": 50})["summary"]["goodput"]["share"] == 0.333
    assert told(three, {"latency": 90})["summary"]["goodput"]["share"] == 0.667


@pytest.mark.parametrize(("lag", "valid"), [(4.9, True), (5.1, False)])
def test_lag(lag: float, valid: bool) -> None:
    """A generator that was itself late by more than 5 ms says that its run is not valid, and why."""
    target = told([result(n, [10], lag=lag) for n in range(10)])

    assert target["valid"] is valid
    assert ["generator itself was late" in why for why in target["runs"][0]["why"]] == (
        [] if valid else [True]
    )


def test_stall() -> None:
    """One stall of half a second counts for every beat that fell into it: the run is not valid."""

    async def stalled() -> list[int]:
        driver = Driver(NOBODY)
        async with driver.beating():
            await asyncio.sleep(1.0)
            time.sleep(0.5)
            await asyncio.sleep(1.0)
        return driver.run.beats_ns

    target = told([result(0, [10])], beats_ns=asyncio.run(stalled()))

    assert target["runs"][0]["lag_ms"]["loop_p99"] > 300
    assert not target["valid"]
