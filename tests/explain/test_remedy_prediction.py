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
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource

from tests.explain.scheduler_truth import STREAM_US, Arrival, draw_arrivals, run_scheduler
from tests.explain.test_what_if_command import BEFORE_US, LIMITS, make_record
from ttft_otel import cli, names
from ttft_otel.exporter import span_builder
from ttft_otel.report import otlp_decoder
from ttft_otel.report.span_store import SpanStore

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/explain.schema.json").read_text("utf-8"))
pytestmark = pytest.mark.filterwarnings("ignore")


def fill_database(path: Path, arrivals: list[Arrival], tells_settings: bool) -> None:
    """A window that vLLM's Scheduler has served with LIMITS; all waiting was for a place."""
    told = {
        names.ENGINE_MAX_SEQS: LIMITS.max_num_seqs,
        names.ENGINE_MAX_TOKENS: LIMITS.max_batched_tokens,
    }
    resource = Resource.create(
        {
            "service.name": "vllm",
            "service.instance.id": "chat-1",
            **(told if tells_settings else {}),
        }
    )
    spans = []
    served = run_scheduler(arrivals, LIMITS)
    for number, (arrival, one) in enumerate(zip(arrivals, served, strict=True)):
        record = make_record(number, arrival, one)
        assert record.ttft is not None
        reason = {names.name_reason_attribute("prefill.queue", "max_num_seqs"): one.queue}
        ttft = msgspec.structs.replace(record.ttft, attributes={**record.ttft.attributes, **reason})
        spans += span_builder.build_spans(msgspec.structs.replace(record, ttft=ttft), resource)
    store = SpanStore(path)
    store.add(otlp_decoder.decode_export(encode_spans(spans).SerializeToString()).spans).result(20)
    store.close()


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
    arrivals = [
        Arrival(each.at_us + BEFORE_US, each.tokens, each.answer)
        for each in draw_arrivals(21, 160, 40_000, (5, 25))
    ]
    fill_database(tmp_path / "told.db", arrivals, tells_settings=True)
    told = explain(tmp_path / "told.db")
    assert told["cause"]["rule"] == "max_num_seqs"
    found = told["cause"]["prediction"]
    assert (
        isinstance(found, dict) and found["setting"] == f"--max-num-seqs {2 * LIMITS.max_num_seqs}"
    )
    wider = run_scheduler(arrivals, replace(LIMITS, max_num_seqs=2 * LIMITS.max_num_seqs))
    ttfts = [BEFORE_US + one.queue + one.compute + one.stall + STREAM_US for one in wider]
    true_ms = float(numpy.quantile(ttfts, 0.99)) / 1000
    assert found["low_p99_ms"] <= true_ms * 1.02 and true_ms * 0.98 <= found["high_p99_ms"]
    # Counter-test: the recorded p99 is not in that interval, so that it says something.
    assert found["high_p99_ms"] < found["recorded_p99_ms"]


def test_no_prediction(tmp_path: Path) -> None:
    """Without the servers' settings the prediction is refused, and the explanation stays."""
    arrivals = [
        Arrival(each.at_us + BEFORE_US, each.tokens, each.answer)
        for each in draw_arrivals(21, 160, 40_000, (5, 25))
    ]
    fill_database(tmp_path / "silent.db", arrivals, tells_settings=False)
    told = explain(tmp_path / "silent.db")
    assert told["cause"]["prediction"] == {
        "refusal": "the servers' spans do not tell --max-num-seqs; ttft-otel whatif takes it by hand"
    }
