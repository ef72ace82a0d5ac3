# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel explain --predict`: the remedy's effect, against vLLM's own Scheduler with that setting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest

from tests.explain.shell_commands import StoreCommand
from tests.explain.stored_records import (
    build_served_record,
    build_spans,
    delay,
    draw_busy_arrivals,
    store_spans,
)
from tests.explain.whatif.scheduler_truth import (
    BEFORE_US,
    STREAM_US,
    Arrival,
    draw_arrivals,
    run_scheduler,
)
from ttft_otel.explain.explain import window_answer
from ttft_otel.explain.whatif.engine_model import EngineLimits
from ttft_otel.model.names import keys
from ttft_otel.model.record import Attributes

LIMITS = EngineLimits(4, 512)
pytestmark = pytest.mark.filterwarnings("ignore")


def fill_database(
    path: Path,
    arrivals: tuple[Arrival, ...],
    limits: EngineLimits = LIMITS,
    *,
    tells_settings: bool = True,
) -> None:
    """A window that vLLM's Scheduler has served; all waiting was for a place, but for that for KV blocks."""
    resource: dict[str, str | int] = {"service.instance.id": "chat-1"}
    if tells_settings:
        resource[keys.ENGINE_MAX_SEQS] = limits.max_num_seqs
        resource[keys.ENGINE_MAX_TOKENS] = limits.max_batched_tokens
        if limits.kv_tokens:
            resource[keys.ENGINE_KV_TOKENS] = limits.kv_tokens
    records = []
    for number, (arrival, one) in enumerate(
        zip(arrivals, run_scheduler(arrivals, limits), strict=True)
    ):
        record = build_served_record(number, arrival, one)
        assert record.ttft is not None and record.server is not None
        waits = {"max_num_seqs": one.queue - one.blocked, "kv_blocks": one.blocked}
        reasons = {
            keys.name_reason_attribute("prefill.queue", why): us for why, us in waits.items()
        }
        # What the server knows at its request's end.
        answer: Attributes = {
            keys.OUTPUT_TOKENS: arrival.answer,
            keys.TIME_PER_OUTPUT_TOKEN_US: (one.end - one.first_token) // (arrival.answer - 1),
        }
        records.append(
            msgspec.structs.replace(
                record,
                ttft=msgspec.structs.replace(
                    record.ttft, attributes={**record.ttft.attributes, **reasons}
                ),
                server=msgspec.structs.replace(record.server, attributes=answer),
            )
        )
    store_spans(path, build_spans(records, resource))


def explain(path: Path, *words: str) -> dict[str, Any]:
    """The answer with a prediction."""
    return StoreCommand("explain").read_json(path, *words)


def check_p99(found: dict[str, Any], arrivals: tuple[Arrival, ...], limits: EngineLimits) -> None:
    """The p99 that the real scheduler gives with these limits lies in the predicted interval."""
    ttfts = [
        BEFORE_US + one.queue + one.compute + one.stall + STREAM_US
        for one in run_scheduler(arrivals, limits)
    ]
    true_ms = float(numpy.quantile(ttfts, 0.99)) / 1000
    assert found["low_p99_ms"] <= true_ms * 1.02 and true_ms * 0.98 <= found["high_p99_ms"]
    # Counter-test: the recorded p99 is not in that interval, so that it says something.
    assert found["high_p99_ms"] < found["recorded_p99_ms"]


def test_prediction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the places: what the real scheduler then gives is what was predicted, and its price."""
    monkeypatch.setattr(window_answer, "REPETITIONS", 8)
    arrivals, limits = draw_busy_arrivals(), replace(LIMITS, max_num_seqs=2 * LIMITS.max_num_seqs)
    fill_database(tmp_path / "told.db", arrivals)
    reported = explain(tmp_path / "told.db", "--predict")
    assert reported["cause"]["setting"] == "max_num_seqs"
    assert reported["cause"]["remedy"]["price_kind"] == "predicted"
    found = reported["cause"]["prediction"]
    assert found["setting"] == f"--max-num-seqs {limits.max_num_seqs}"
    check_p99(found, arrivals, limits)
    price = found["time_per_output_token"]
    times = [
        (one.end - one.first_token) / (each.answer - 1) / 1000
        for each, one in zip(arrivals, run_scheduler(arrivals, limits), strict=True)
    ]
    assert numpy.quantile(times, 0.99) == pytest.approx(
        price["recorded_p99_ms"] * (1 + price["change"]), rel=0.05
    )
    assert any(
        "Its price: p99 of the time per output token" in each for each in reported["sentences"]
    )


def test_no_prediction(tmp_path: Path) -> None:
    """Without the servers' settings the prediction is refused, and the explanation stays."""
    fill_database(tmp_path / "silent.db", draw_busy_arrivals(), tells_settings=False)
    reported = explain(tmp_path / "silent.db")
    assert reported["cause"]["remedy"]["price_kind"] == "qualitative"
    assert reported["cause"]["prediction"] == {
        "refusal": "the servers' spans do not tell --max-num-seqs; ttft-otel whatif takes it by hand"
    }


@pytest.mark.full
def test_more_memory(tmp_path: Path) -> None:
    """Late requests waited for KV blocks: with twice as many the p99 is that of the real scheduler."""
    scarce = EngineLimits(16, 512, kv_tokens=2400)
    arrivals = delay(draw_arrivals(19, 300, 40_000, (20, 60)))
    fill_database(tmp_path / "scarce.db", arrivals, scarce)
    reported = explain(tmp_path / "scarce.db")
    assert reported["cause"]["setting"] == "kv_blocks"
    assert reported["cause"]["prediction"]["setting"] == "2 times the KV cache"
    check_p99(reported["cause"]["prediction"], arrivals, replace(scarce, kv_tokens=4800))
