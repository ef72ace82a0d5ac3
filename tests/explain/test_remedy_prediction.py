# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel explain --predict`: the remedy's effect, against vLLM's own Scheduler with that setting."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import msgspec
import numpy
import pytest
from click.testing import CliRunner

from tests.explain.scheduler_truth import STREAM_US, run_scheduler
from tests.explain.stored_records import (
    BEFORE_US,
    build_served_record,
    build_spans,
    draw_busy_arrivals,
    store_spans,
)
from ttft_otel import cli, names
from ttft_otel.explain.engine_model import EngineLimits

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/explain.schema.json").read_text("utf-8"))
LIMITS = EngineLimits(4, 512)
pytestmark = pytest.mark.filterwarnings("ignore")


def fill_database(path: Path, tells_settings: bool) -> None:
    """A window that vLLM's Scheduler has served with LIMITS; all waiting was for a place."""
    resource: dict[str, str | int] = {"service.instance.id": "chat-1"}
    if tells_settings:
        resource[names.ENGINE_MAX_SEQS] = LIMITS.max_num_seqs
        resource[names.ENGINE_MAX_TOKENS] = LIMITS.max_batched_tokens
    arrivals = draw_busy_arrivals()
    served = run_scheduler(arrivals, LIMITS)
    records = []
    for number, (arrival, one) in enumerate(zip(arrivals, served, strict=True)):
        record = build_served_record(number, arrival, one)
        assert record.ttft is not None
        reason = {names.name_reason_attribute("prefill.queue", "max_num_seqs"): one.queue}
        ttft = msgspec.structs.replace(record.ttft, attributes={**record.ttft.attributes, **reason})
        records.append(msgspec.structs.replace(record, ttft=ttft))
    store_spans(path, build_spans(records, resource))


def explain(path: Path) -> dict[str, dict[str, object]]:
    """The answer with a prediction."""
    words = ["explain", "--db", str(path), "--predict", "--json"]
    result = CliRunner().invoke(cli.main, words)
    assert result.exit_code == 0, result.output
    told: dict[str, dict[str, object]] = json.loads(result.stdout)
    jsonschema.validate(told, SCHEMA)
    return told


def test_prediction(tmp_path: Path) -> None:
    """Twice the places: the p99 that the real scheduler then gives lies in the predicted interval."""
    fill_database(tmp_path / "told.db", tells_settings=True)
    told = explain(tmp_path / "told.db")
    assert told["cause"]["rule"] == "max_num_seqs"
    found = told["cause"]["prediction"]
    assert (
        isinstance(found, dict) and found["setting"] == f"--max-num-seqs {2 * LIMITS.max_num_seqs}"
    )
    wider = run_scheduler(
        draw_busy_arrivals(), replace(LIMITS, max_num_seqs=2 * LIMITS.max_num_seqs)
    )
    ttfts = [BEFORE_US + one.queue + one.compute + one.stall + STREAM_US for one in wider]
    true_ms = float(numpy.quantile(ttfts, 0.99)) / 1000
    assert found["low_p99_ms"] <= true_ms * 1.02 and true_ms * 0.98 <= found["high_p99_ms"]
    # Counter-test: the recorded p99 is not in that interval, so that it says something.
    assert found["high_p99_ms"] < found["recorded_p99_ms"]


def test_no_prediction(tmp_path: Path) -> None:
    """Without the servers' settings the prediction is refused, and the explanation stays."""
    fill_database(tmp_path / "silent.db", tells_settings=False)
    told = explain(tmp_path / "silent.db")
    assert told["cause"]["prediction"] == {
        "refusal": "the servers' spans do not tell --max-num-seqs; ttft-otel whatif takes it by hand"
    }
