# SPDX-License-Identifier: Apache-2.0
"""Numbers out of readings that are known to the nanosecond: what the JSON says is exactly right."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from bench.conftest import validate_document
from ttft_otel.bench.bench_session import BenchSide
from ttft_otel.bench.http_exchange import BenchTarget, RawResponse
from ttft_otel.bench.load_driver import (
    LoadRun,
    RequestResult,
    classify_failure,
)
from ttft_otel.bench.load_plan import LoadPlan
from ttft_otel.bench.request_factory import RequestFactory
from ttft_otel.bench.request_statistics import find_steady_start
from ttft_otel.bench.result_document import build_document, find_knee
from ttft_otel.model.timing import ServerTiming

NS_PER_MS = 1_000_000


def build_result(
    index: int,
    token_offsets_ms: Sequence[float],
    parts: Mapping[str, float] | None = None,
    lag_ms: float = 0.0,
) -> RequestResult:
    """A request sent at place x 10 ms, its tokens so many ms later, its end 1 ms after the last."""
    sent_ns = index * 10 * NS_PER_MS
    token_times_ns = [sent_ns + int(each * NS_PER_MS) for each in token_offsets_ms]
    response = RawResponse(
        sent_ns,
        sent_ns=sent_ns,
        end_ns=token_times_ns[-1] + NS_PER_MS,
        status=200,
        lag_ns=int(lag_ms * NS_PER_MS),
    )
    parts_us = {name: int(value * 1000) for name, value in (parts or {}).items()}
    breakdown = ServerTiming(parts_us, 0, sum(parts_us.values())) if parts else None
    return RequestResult(
        *(f"r{index}", f"{index:032x}", response, breakdown),
        token_times_ns=token_times_ns,
        prompt_tokens=8,
        completion_tokens=len(token_times_ns),
    )


UNUSED_TARGET = BenchTarget.parse_url("http://127.0.0.1:1")


def build_target_document(
    results: list[RequestResult],
    slo_ms: Mapping[str, float] | None = None,
    loop_lags_ns: Sequence[int] = (),
) -> Any:
    """The document's only target."""
    run = LoadRun(UNUSED_TARGET, 1.0, results, list(loop_lags_ns), started=len(results))
    side = BenchSide(UNUSED_TARGET, RequestFactory("m"), LoadPlan(), [run])
    return validate_document(build_document({}, [side], slo_ms or {}))["targets"][0]


def test_exact() -> None:
    """Percentiles interpolate, TPOT leaves out the first token, ITL is every gap, latency the end.

    Throughput is over the time from the first write to the last byte.
    """
    two = [build_result(0, [10, 20, 40]), build_result(1, [30, 40, 59])]
    summary = build_target_document(two)["summary"]

    figures = summary["figures_ms"]
    assert figures["ttft"] == {"count": 2, "mean": 20, "p50": 20, "p95": 29, "p99": 29.8}
    assert figures["tpot"]["mean"] == 14.75
    assert figures["itl"] == {"count": 4, "mean": 14.75, "p50": 14.5, "p95": 19.85, "p99": 19.97}
    assert figures["latency"]["p50"] == 50.5
    names = ("requests_per_s", "input_tokens_per_s", "output_tokens_per_s")
    per_second = [round(each / 0.07, 3) for each in (2, 16, 6)]
    assert summary["throughput"] == dict(zip(names, per_second, strict=True))


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
    summary = build_target_document([build_result(0, [40], parts)])["summary"]

    assert summary["figures_ms"]["queue_wait"]["mean"] == 6
    assert summary["figures_ms"]["prefill_to_first_token"]["mean"] == 18
    assert summary["stages_ms"]["outside"]["mean"] == 4
    assert list(summary["stages_ms"])[-2:] == ["unattributed", "outside"]


QUEUED = {"prefill.queue": 190, "prefill.compute": 55, "output": 5}
QUICKER = {"prefill.queue": 0, "prefill.compute": 60, "output": 0}
LATE = "ms slower than the middle tenth on average"


@pytest.mark.parametrize(
    ("count", "slow", "says"),
    [
        (
            99,
            QUEUED,
            f"The slowest request is 200.0 {LATE}, 185.0 ms of it (92 %) in prefill.queue.",
        ),
        (
            198,
            QUEUED,
            f"The slowest 2 requests are 200.0 {LATE}, 185.0 ms of it (92 %) in prefill.queue.",
        ),
        # No share of it: other stages were quicker.
        (
            99,
            QUICKER,
            f"The slowest request is 10.0 {LATE}; prefill.compute alone takes 20.0 ms more.",
        ),
        (3, QUEUED, "4 requests with a breakdown are too few to explain the slowest (from 20)."),
    ],
)
def test_blame(count: int, slow: dict[str, float], says: str) -> None:
    """The stage that separates the slowest from the middle tenth is named, not the longest one."""
    usual = {"prefill.queue": 5, "prefill.compute": 40, "output": 5}
    every = [build_result(n, [50], usual) for n in range(count)]
    late_ms = sum(slow.values())
    every += [build_result(count + n, [late_ms], slow) for n in range(max(1, count // 99))]

    assert build_target_document(every)["summary"]["explanation"] == says


def test_steady_part() -> None:
    """A warm-up is cut off where it ends, without one hardly anything; what only grows is never steady."""
    rng = np.random.default_rng(1)
    noise = rng.exponential(20, (60, 400))
    cold = 300 * np.exp(-np.arange(400) / 20)
    steady = [find_steady_start(list(row)) for row in noise]
    warmed = [find_steady_start(list(row + cold)) for row in noise]
    grown = [find_steady_start(list(row + 2 * np.arange(400))) for row in noise]

    assert sum(at is None for at in steady) <= 6 and np.median([at or 0 for at in steady]) <= 20
    assert 30 <= np.median([at or 0 for at in warmed]) <= 150
    assert sum(at is None for at in warmed) <= 6
    assert sum(at is None for at in grown) >= 58


@pytest.mark.parametrize(("serves_alike", "load"), [(True, 2 - math.sqrt(2)), (False, 0.5)])
def test_knee(serves_alike: bool, load: float) -> None:
    """The knee of M/D/1 and of M/M/1, by formula; with none higher there is no knee."""
    variation = 0.5 if serves_alike else 1.0
    rates = [place / 100 for place in range(1, 100)]
    rows = [
        {
            "rate": rate,
            "requests": 9,
            "requests_per_s": rate,
            "ttft_ms": {"mean": 1 + variation * rate / (1 - rate)},
        }
        for rate in rates
    ]

    assert find_knee(rows) == pytest.approx(load, abs=0.01)
    assert find_knee(rows[:20]) is None and find_knee([]) is None


def test_goodput() -> None:
    """Goodput counts the requests that kept every limit."""
    three = [build_result(0, [10, 20]), build_result(1, [10, 90]), build_result(2, [70, 80])]

    assert (
        build_target_document(three, {"ttft": 50, "tpot": 50})["summary"]["goodput"]["share"]
        == 0.333
    )
    assert build_target_document(three, {"latency": 90})["summary"]["goodput"]["share"] == 0.667


@pytest.mark.parametrize(("lag", "valid"), [(4.9, True), (5.1, False)])
def test_lag(lag: float, valid: bool) -> None:
    """A generator that was itself late by more than 5 ms says that its run is not valid, and why."""
    target = build_target_document([build_result(n, [10], lag_ms=lag) for n in range(10)])

    assert target["valid"] is valid
    assert ["generator itself was late" in why for why in target["runs"][0]["why"]] == (
        [] if valid else [True]
    )


def test_stall() -> None:
    """One stall of 0.2 s counts for every sample that fell into it: the run is not valid."""

    async def measure_stall() -> list[int]:
        run = LoadRun(UNUSED_TARGET)
        task = asyncio.create_task(run.sample_loop_lag())
        await asyncio.sleep(0.3)
        time.sleep(0.2)
        await asyncio.sleep(0.1)
        task.cancel()
        return run.loop_lags_ns

    target = build_target_document(
        [build_result(0, [10])], loop_lags_ns=asyncio.run(measure_stall())
    )

    assert target["runs"][0]["lag_ms"]["loop_p99"] > 120
    assert not target["valid"]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, ""),
        ({"completion_tokens": 0}, "no token"),
        ({"stream_error": "ended by the server"}, "ended by the server"),
        ({"token_times_ns": []}, "no token"),
        ({"is_finished": False}, "cut off"),
    ],
)
def test_what_counts_as_failed(change: dict[str, Any], kind: str) -> None:
    """Only a complete answer with a token is measured."""
    result = dataclasses.replace(build_result(0, [10, 20]), is_finished=True)

    assert classify_failure(dataclasses.replace(result, **change)) == kind
