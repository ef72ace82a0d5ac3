# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel whatif` as typed in a shell, over a store with a window that vLLM's Scheduler has served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner, Result
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource

from tests.explain.scheduler_truth import (
    STREAM_US,
    Arrival,
    Served,
    draw_arrivals,
    run_scheduler,
)
from ttft_otel import cli, names
from ttft_otel.explain.engine_parts import EngineLimits
from ttft_otel.exporter import span_builder
from ttft_otel.record import Attributes, Piece, Record, Server, Ttft
from ttft_otel.report import otlp_decoder
from ttft_otel.report.span_store import SpanStore

SCHEMA = Path(__file__).parents[2] / "docs" / "whatif.schema.json"
BEGIN_S = 1_790_000_000
BEFORE_US = 1500
LIMITS = EngineLimits(4, 512)
WINDOW = (
    "--since",
    "..".join(
        datetime.fromtimestamp(end, timezone.utc).isoformat()
        for end in (BEGIN_S - 1, BEGIN_S + 600)
    ),
)
pytestmark = pytest.mark.filterwarnings("ignore")


def make_record(number: int, arrival: Arrival, one: Served) -> Record:
    """One request of a single server, as its hooks would have recorded it."""
    lengths = {
        "preprocess": BEFORE_US,
        "prefill.queue": one.queue,
        "prefill.compute": one.compute,
        "prefill.stall": one.stall,
        "output": STREAM_US,
    }
    ttft_us = sum(lengths.values())
    told: Attributes = {
        names.INPUT_TOKENS: arrival.tokens,
        names.CACHED_TOKENS: 0,
        names.CHUNKS: one.chunks,
        names.OWN_TOKENS: arrival.tokens,
        names.STEP_TOKENS: one.step_tokens,
        names.STREAMING: True,
    }
    return Record(
        version=1,
        trace_id=f"{number + 1:032x}",
        span_id=f"{number + 1:016x}",
        parent_id="",
        flags=1,
        state="",
        start_ns=BEGIN_S * 10**9 + (arrival.at_us - BEFORE_US) * 1000,
        role="mono",
        outermost=True,
        service="vllm",
        request_id=f"r{number}",
        attributes={names.MODEL: "tiny", names.PROVIDER: "vllm"},
        ttft=Ttft(
            f"{number + 90001:016x}",
            names.TTFT,
            0,
            ttft_us,
            lengths,
            0,
            0,
            (Piece("stage", "prefill.compute", 0, one.compute),),
            told,
        ),
        server=Server("POST /v1/completions", ttft_us + one.end - one.first_token, 200),
    )


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A window of one server whose spans tell its settings."""
    arrivals = [
        Arrival(each.at_us + BEFORE_US, each.tokens, each.answer)
        for each in draw_arrivals(21, 160, 40_000, (5, 25))
    ]
    store = SpanStore(tmp_path_factory.mktemp("whatif") / "spans.db")
    resource = Resource.create(
        {
            "service.name": "vllm",
            "service.instance.id": "chat-1",
            names.ENGINE_MAX_SEQS: LIMITS.max_num_seqs,
            names.ENGINE_MAX_TOKENS: LIMITS.max_batched_tokens,
        }
    )
    spans = [
        span
        for number, (arrival, one) in enumerate(
            zip(arrivals, run_scheduler(arrivals, LIMITS), strict=True)
        )
        for span in span_builder.build_spans(make_record(number, arrival, one), resource)
    ]
    message = encode_spans(spans).SerializeToString()
    store.add(otlp_decoder.decode_export(message).spans).result(20)
    store.close()
    yield store.path


def run_whatif(database: Path, *words: str) -> Result:
    """Run the command, with few repetitions."""
    return CliRunner(env={"COLUMNS": "160"}).invoke(
        cli.main, ["whatif", "--db", str(database), "--repetitions", "3", *WINDOW, *words]
    )


def test_json(database: Path) -> None:
    """Figures keep to the schema; the error of the unchanged window is small and told."""
    result = run_whatif(database, "--rate", "1.2x", "--cache-hit", "+10%", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    jsonschema.validate(told, json.loads(SCHEMA.read_text("utf-8")))

    assert told["requests"] == 160 and told["instances"] == 1
    assert told["change"] == {"rate": 1.2, "cache_hit": 0.1}
    assert all(abs(error) < 0.05 for error in told["replay_error"].values())
    p95 = told["ttft"]["p95"]
    assert p95["replayed_ms"] == pytest.approx(p95["recorded_ms"], rel=0.05)
    assert p95["low_ms"] <= p95["predicted_ms"] <= p95["high_ms"]


def test_text(database: Path) -> None:
    """A sentence with the figures, the error of the unchanged window, the stages, what is assumed."""
    result = run_whatif(database, "--instances", "+1", "--max-num-seqs", "8")
    assert result.exit_code == 0, result.output

    assert "+1 instances, max-num-seqs 8: TTFT p50" in result.output
    assert "The same model on the 160 recorded requests, unchanged: p50" in result.output
    assert "prefill.queue" in result.output and "`round_robin`" in result.output


def test_nothing_changed(database: Path) -> None:
    """Without an option it says how well the model knows the window."""
    result = run_whatif(database)
    assert result.exit_code == 0 and "nothing changed: TTFT" in result.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--rate", "4x"], "more requests arrive than are served"),
        (["--routing-logic", "prefix"], "traces do not tell"),
        (["--encoders", "+1"], "no request of the window was at an encoder instance"),
        (["--rate", "fast"], "'fast' is not a factor"),
        (["--instances", "2"], "write +1"),
        (["--cache-hit", "20"], "write +20%"),
        (["--since", "1999-01-01..1999-01-02"], "50 are needed"),
        (["--model", "other"], "50 are needed"),
        (["--since", "nonsense"], "is not a time"),
    ],
)
def test_remedies(database: Path, words: list[str], told: str) -> None:
    """What cannot be told is refused with the reason."""
    result = run_whatif(database, *words)
    assert result.exit_code != 0 and told in result.output
