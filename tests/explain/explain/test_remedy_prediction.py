# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel explain --predict`: the remedy's effect, against vLLM's own Scheduler with that setting."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy
import pytest
from click.testing import CliRunner

from tests.explain.stored_records import (
    BEFORE_US,
    build_served_record,
    build_spans,
    draw_busy_arrivals,
    store_spans,
)
from tests.explain.whatif.scheduler_truth import (
    STREAM_US,
    Arrival,
    Served,
    draw_arrivals,
    run_scheduler,
)
from ttft_otel.commands import main as cli
from ttft_otel.explain.whatif.engine_model import EngineLimits
from ttft_otel.model.names import keys
from ttft_otel.model.record import Attributes, Record

SCHEMA = json.loads((Path(__file__).parents[3] / "docs/explain.schema.json").read_text("utf-8"))
LIMITS = EngineLimits(4, 512)
pytestmark = pytest.mark.filterwarnings("ignore")


def fill_database(
    path: Path,
    arrivals: list[Arrival],
    limits: EngineLimits = LIMITS,
    *,
    tells_settings: bool = True,
    tells_answers: bool = False,
) -> None:
    """A window that vLLM's Scheduler has served; all waiting was for a place, but for that for KV blocks."""
    resource: dict[str, str | int] = {"service.instance.id": "chat-1"}
    if tells_settings:
        resource[keys.ENGINE_MAX_SEQS] = limits.max_num_seqs
        resource[keys.ENGINE_MAX_TOKENS] = limits.max_batched_tokens
        if limits.kv_tokens:
            resource[keys.ENGINE_KV_TOKENS] = limits.kv_tokens
    served = run_scheduler(arrivals, limits)
    records = []
    for number, (arrival, one) in enumerate(zip(arrivals, served, strict=True)):
        record = build_served_record(number, arrival, one)
        assert record.ttft is not None
        waits = {"max_num_seqs": one.queue - one.blocked, "kv_blocks": one.blocked}
        reasons = {
            keys.name_reason_attribute("prefill.queue", why): us for why, us in waits.items()
        }
        ttft = msgspec.structs.replace(
            record.ttft, attributes={**record.ttft.attributes, **reasons}
        )
        record = msgspec.structs.replace(record, ttft=ttft)
        records.append(tell_answer(record, arrival, one) if tells_answers else record)
    store_spans(path, build_spans(records, resource))


def tell_answer(record: Record, arrival: Arrival, one: Served) -> Record:
    """The record with what the server knows at its request's end."""
    assert record.server is not None
    reported: Attributes = {
        keys.OUTPUT_TOKENS: arrival.answer,
        keys.TIME_PER_OUTPUT_TOKEN_US: (one.end - one.first_token) // (arrival.answer - 1),
    }
    return msgspec.structs.replace(
        record, server=msgspec.structs.replace(record.server, attributes=reported)
    )


def explain(path: Path) -> dict[str, Any]:
    """The answer with a prediction."""
    words = ["explain", "--db", str(path), "--predict", "--json"]
    result = CliRunner().invoke(cli.main, words)
    assert result.exit_code == 0, result.output
    reported: dict[str, Any] = json.loads(result.stdout)
    jsonschema.validate(reported, SCHEMA)
    return reported


def test_prediction(tmp_path: Path) -> None:
    """Twice the places: the p99 that the real scheduler then gives lies in the predicted interval."""
    arrivals = draw_busy_arrivals()
    fill_database(tmp_path / "told.db", arrivals, tells_answers=True)
    reported = explain(tmp_path / "told.db")
    assert reported["cause"]["setting"] == "max_num_seqs"
    assert reported["cause"]["remedy"]["price_kind"] == "predicted"
    found = reported["cause"]["prediction"]
    assert (
        isinstance(found, dict) and found["setting"] == f"--max-num-seqs {2 * LIMITS.max_num_seqs}"
    )
    wider = run_scheduler(
        draw_busy_arrivals(), replace(LIMITS, max_num_seqs=2 * LIMITS.max_num_seqs)
    )
    ttfts = [BEFORE_US + one.queue + one.compute + one.stall + STREAM_US for one in wider]
    true_ms = float(numpy.quantile(ttfts, 0.99)) / 1000
    assert found["low_p99_ms"] <= true_ms * 1.02 and true_ms * 0.98 <= found["high_p99_ms"]
    price = found["time_per_output_token"]
    times = [
        (one.end - one.first_token) / (each.answer - 1) / 1000
        for each, one in zip(arrivals, wider, strict=True)
    ]
    assert numpy.quantile(times, 0.99) == pytest.approx(
        price["recorded_p99_ms"] * (1 + price["change"]), rel=0.05
    )
    assert any(
        "Its price: p99 of the time per output token" in each for each in reported["sentences"]
    )
    # Counter-test: the recorded p99 is not in that interval, so that it says something.
    assert found["high_p99_ms"] < found["recorded_p99_ms"]


def test_no_prediction(tmp_path: Path) -> None:
    """Without the servers' settings the prediction is refused, and the explanation stays."""
    fill_database(tmp_path / "silent.db", draw_busy_arrivals(), tells_settings=False)
    reported = explain(tmp_path / "silent.db")
    assert reported["cause"]["remedy"]["price_kind"] == "qualitative"
    assert reported["cause"]["prediction"] == {
        "refusal": "the servers' spans do not tell --max-num-seqs; ttft-otel whatif takes it by hand"
    }


@pytest.mark.slow
def test_more_memory(tmp_path: Path) -> None:
    """Late requests waited for KV blocks: with twice as many the p99 is that of the real scheduler."""
    scarce = EngineLimits(16, 512, kv_tokens=2400)
    arrivals = [
        Arrival(each.at_us + BEFORE_US, each.tokens, each.answer)
        for each in draw_arrivals(19, 300, 40_000, (20, 60))
    ]
    fill_database(tmp_path / "scarce.db", arrivals, scarce, tells_answers=True)
    reported = explain(tmp_path / "scarce.db")
    assert reported["cause"]["setting"] == "kv_blocks"
    found = reported["cause"]["prediction"]
    assert isinstance(found, dict) and found["setting"] == "2 times the KV cache"
    wider = run_scheduler(arrivals, replace(scarce, kv_tokens=4800))
    ttfts = [BEFORE_US + one.queue + one.compute + one.stall + STREAM_US for one in wider]
    true_ms = float(numpy.quantile(ttfts, 0.99)) / 1000
    assert found["low_p99_ms"] <= true_ms * 1.02 and true_ms * 0.98 <= found["high_p99_ms"]
    assert found["high_p99_ms"] < found["recorded_p99_ms"]
