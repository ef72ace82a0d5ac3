# SPDX-License-Identifier: Apache-2.0
"""Reported numbers against what a server really did, read from the same clock in another process.

A quiet run is held to 1 ms. On a busy machine there may be none: then the quietest that the
benchmark calls valid is held to 1 ms more than the lag that it states of itself.
"""

from __future__ import annotations

from time import process_time
from typing import Any

import numpy as np
import pytest

from bench.conftest import RunBench
from bench.scripted_server import ServerScript, run_scripted_server

pytestmark = pytest.mark.slow

MAX_TRIES = 3
MANY = 500  # streams at once, which take less than a third of a core
QUIET_LAG_MS = 1.5  # ms; up to 1 of them is the timers of epoll, which are no lag of readings


def max_lag_ms(target: Any) -> float:
    """The greater of a run's own lags, in milliseconds."""
    return max(target["runs"][0]["lag_ms"].values())


def build_load(streams: int, gap_ms: float) -> tuple[ServerScript, tuple[object, ...]]:
    """A script and the flags with which so many of its streams overlap.

    At a constant rate: no burst of connections is the server's to queue.
    """
    script = ServerScript(
        first_token_ms=[40.0, 80.0, 120.0], queue_ms=[20.0], token_count=20, gap_ms=gap_ms
    )
    rate = streams / ((80 + 19 * gap_ms) / 1000)
    return script, ("--rate", rate, "--arrivals constant --requests", 2 * streams + 2)


def measure_quietest(
    bench: RunBench, streams: int, gap_ms: float
) -> tuple[Any, list[dict[str, Any]]]:
    """A target and the server's notes of it."""
    script, flags = build_load(streams, gap_ms)
    attempts = []
    for _ in range(MAX_TRIES):
        with run_scripted_server(script) as server:
            before = process_time()
            target = bench("--url", server.url, "--input-len 8", *flags)["targets"][0]
            attempts.append((target, server.fetch_notes()))
        if streams == MANY:
            spent_s = process_time() - before
            assert spent_s < target["runs"][0]["seconds"] / 3, "being on time would be luck"
        if max_lag_ms(target) < QUIET_LAG_MS:
            break
    best = min(attempts, key=lambda each: max_lag_ms(each[0]))
    if not best[0]["valid"]:
        pytest.skip(
            f"no valid run on this machine now, own lag {max_lag_ms(best[0])} ms; keep it free"
        )
    return best


@pytest.mark.parametrize(
    ("streams", "gap"), [(20, 20.0), pytest.param(MANY, 250.0, marks=pytest.mark.full)]
)
def test_truth(bench: RunBench, streams: int, gap: float) -> None:
    """Every figure, stage and rate is that of the server's own notes: times within 1 ms."""
    target, notes = measure_quietest(bench, streams, gap)
    right = 1.0 if max_lag_ms(target) < QUIET_LAG_MS else 1.0 + max_lag_ms(target)

    summary = target["summary"]
    metrics, stages = compute_client_metrics(notes), compute_server_stages(notes)
    for name, truth in (metrics | stages).items():
        found = (summary["figures_ms"] | summary["stages_ms"])[name]
        near = right if name in metrics else 0.002
        assert found["count"] == len(truth)
        for q in (50, 95, 99):
            assert found[f"p{q}"] == pytest.approx(np.percentile(truth, q), abs=near)
        assert found["mean"] == pytest.approx(np.mean(truth), abs=near)
    assert set(summary["figures_ms"]) <= metrics.keys() | stages.keys()
    for row in target["runs"][0]["requests"]:
        assert sum(row["stages_ms"].values()) == pytest.approx(row["ttft_ms"], abs=0.01)
    # Throughput is what was served, over a time that is right within twice as much.
    duration_ms = (max(note["end"] for note in notes) - min(note["came"] for note in notes)) / 1e6
    each = {"requests_per_s": 1, "input_tokens_per_s": 8, "output_tokens_per_s": 20}
    assert summary["throughput"].keys() == each.keys()
    for name, amount in each.items():
        truth = 1000 * amount * len(notes) / duration_ms
        assert summary["throughput"][name] == pytest.approx(truth, rel=2 * right / duration_ms)


def compute_client_metrics(notes: list[dict[str, Any]]) -> dict[str, list[float]]:
    """What a client that loses no time would have read, in milliseconds."""
    tokens = [np.array(note["tokens"]) / 1e6 for note in notes]
    came = [note["came"] / 1e6 for note in notes]
    return {
        "ttft": [each[0] - at for each, at in zip(tokens, came, strict=True)],
        "itl": [gap for each in tokens for gap in np.diff(each)],
        "tpot": [(each[-1] - each[0]) / (len(each) - 1) for each in tokens],
        "latency": [note["end"] / 1e6 - at for note, at in zip(notes, came, strict=True)],
    }


def compute_server_stages(notes: list[dict[str, Any]]) -> dict[str, list[float]]:
    """What the server said of its stages, and the figures made of them, in milliseconds."""
    queue = [20.0 for _ in notes]
    compute = [note["took_us"] / 1000 - 20.0 for note in notes]
    return {
        "prefill.queue": queue,
        "queue_wait": queue,
        "prefill.compute": compute,
        "prefill_to_first_token": compute,
    }
