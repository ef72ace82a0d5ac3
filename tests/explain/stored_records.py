# SPDX-License-Identifier: Apache-2.0
"""Stores with records of one server, and the commands asked about them: explain, diff and whatif."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
from click.testing import CliRunner, Result
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from tests.explain.scheduler_truth import (
    BEFORE_US,
    STREAM_US,
    Arrival,
    Served,
    draw_arrivals,
    run_scheduler,
)
from tests.fake_tempo import FakeTempo
from ttft_otel.commands import main as cli
from ttft_otel.explain.whatif.engine_model import EngineLimits
from ttft_otel.exporter import span_batch
from ttft_otel.model.names import keys, span_names
from ttft_otel.model.record import Attributes, Piece, Record, Server, Ttft
from ttft_otel.report.receive import otlp_decoder
from ttft_otel.report.store.span_store import SpanStore

DOCS = Path(__file__).parents[2] / "docs"


class StoreCommand:
    """`ttft-otel NAME` over a store, with `flags` at each call; its JSON keeps to docs/NAME.schema.json."""

    def __init__(self, name: str, *flags: str) -> None:
        self.name, self.flags = name, flags
        self.schema = json.loads((DOCS / f"{name}.schema.json").read_text("utf-8"))

    def run(self, database: Path, *words: str) -> Result:
        """Run it in a terminal that is wide enough for one line each."""
        return self._invoke("--db", str(database), *words)

    def run_tempo(self, tempo: FakeTempo, *words: str) -> Result:
        """Run it in the same terminal, over a Tempo."""
        return self._invoke("--tempo", tempo.url, *words)

    def _invoke(self, *words: str) -> Result:
        return CliRunner(env={"COLUMNS": "2000"}).invoke(cli.main, [self.name, *self.flags, *words])

    def read_json(self, database: Path, *words: str) -> dict[str, Any]:
        """Its JSON, which keeps to the schema."""
        reported: dict[str, Any] = json.loads(self.run(database, *words, "--json").stdout)
        jsonschema.validate(reported, self.schema)
        return reported

    def check_refusal(self, database: Path, words: list[str], reported: str) -> None:
        """It refuses with `reported`; where the flags themselves are right, in its JSON as well."""
        result = self.run(database, *words)
        assert result.exit_code != 0 and reported in result.output
        if result.exit_code == 1:
            assert reported in self.read_json(database, *words)["refusal"]


BEGIN_S = 1_790_000_000  # Unix seconds of the first request


def build_record(number: int, start_us: int, lengths: dict[str, int], **more: Any) -> Record:
    """Request `number`, `start_us` after BEGIN_S: the stages of `lengths` (us), one after another.

    more: fields of its Ttft that differ.
    """
    pieces, at = [], 0
    for name, length in lengths.items():
        pieces.append(Piece("stage", name, at, at + length))
        at += length
    ttft = Ttft(f"{number + 9001:016x}", span_names.TTFT, 0, at, lengths, 0, 0, tuple(pieces))
    return Record(
        version=1,
        trace_id=f"{number + 1:032x}",
        span_id=f"{number + 1:016x}",
        parent_id="",
        flags=1,
        state="",
        start_ns=BEGIN_S * 10**9 + start_us * 1000,
        role="mono",
        outermost=True,
        service="vllm",
        request_id=f"r{number}",
        attributes={keys.MODEL: "tiny", keys.PROVIDER: "vllm"},
        ttft=msgspec.structs.replace(ttft, **more),
        server=Server("POST /v1/completions", at, 200),
    )


def build_noisy_record(number: int, tokens: int, wait_us: int) -> Record:
    """Request `number`, one a second: stages of usual lengths, and `wait_us` more in prefill.queue."""
    chance = random.Random(number)
    lengths = {
        "preprocess": round(2000 * chance.lognormvariate(0, 0.2)),
        "prefill.queue": round(5000 * chance.lognormvariate(0, 0.3)) + wait_us,
        "prefill.compute": round(30_000 * chance.lognormvariate(0, 0.2)),
    }
    record = build_record(number, number * 1_000_000, lengths)
    attributes = {**record.attributes, keys.INPUT_TOKENS: tokens}
    return msgspec.structs.replace(record, attributes=attributes)


def build_served_record(number: int, arrival: Arrival, one: Served) -> Record:
    """A request that vLLM's Scheduler has served, as its hooks would have recorded it."""
    lengths = {
        "preprocess": BEFORE_US,
        "prefill.queue": one.queue,
        "prefill.compute": one.compute,
        "prefill.stall": one.stall,
        "output": STREAM_US,
    }
    reported = {
        keys.INPUT_TOKENS: arrival.tokens,
        keys.CACHED_TOKENS: 0,
        keys.PREFILL_CHUNKS: one.chunks,
        keys.PREFILL_OWN_TOKENS: arrival.tokens,
        keys.PREFILL_STEP_TOKENS: one.step_tokens,
        keys.STREAMING: True,
        keys.name_reason_attribute("prefill.queue", "max_num_seqs"): one.queue - one.blocked,
        keys.name_reason_attribute("prefill.queue", "kv_blocks"): one.blocked,
    }
    pieces = (Piece("stage", "prefill.compute", 0, one.compute),)
    start_us = arrival.at_us - BEFORE_US
    record = build_record(number, start_us, lengths, pieces=pieces, attributes=reported)
    end = sum(lengths.values()) + one.end - one.first_token
    # What the server knows at its request's end.
    answer: Attributes = {
        keys.OUTPUT_TOKENS: arrival.answer,
        keys.TIME_PER_OUTPUT_TOKEN_US: (one.end - one.first_token) // max(arrival.answer - 1, 1),
    }
    server = Server("POST /v1/completions", end, 200, attributes=answer)
    return msgspec.structs.replace(record, server=server)


def store_served_window(
    path: Path, arrivals: Sequence[Arrival], limits: EngineLimits, *, tells_settings: bool = True
) -> Path:
    """A window that vLLM's Scheduler has served; all waiting was for a place, but for that for KV blocks."""
    resource: dict[str, str | int] = {"service.instance.id": "chat-1"}
    if tells_settings:
        resource[keys.ENGINE_MAX_SEQS] = limits.max_num_seqs
        resource[keys.ENGINE_MAX_TOKENS] = limits.max_batched_tokens
        if limits.kv_tokens:
            resource[keys.ENGINE_KV_TOKENS] = limits.kv_tokens
    served = run_scheduler(tuple(arrivals), limits)
    records = map(build_served_record, itertools.count(), arrivals, served)
    return store_spans(path, build_spans(list(records), resource))


def draw_busy_arrivals() -> tuple[Arrival, ...]:
    """160 requests that wait for each other on four places; none is at the scheduler before BEFORE_US."""
    return delay(draw_arrivals(21, 160, 40_000, (5, 25)))


def delay(arrivals: Sequence[Arrival]) -> tuple[Arrival, ...]:
    """The same, BEFORE_US later."""
    return tuple(replace(each, at_us=each.at_us + BEFORE_US) for each in arrivals)


def build_spans(records: Sequence[Record], attributes: dict[str, Any]) -> list[ReadableSpan]:
    """Their spans, of the service `vllm` with these other resource attributes."""
    resource = Resource.create({"service.name": "vllm", **attributes})
    return [span for record in records for span in span_batch.build_spans(record, resource)]


def store_spans(path: Path, spans: Sequence[ReadableSpan]) -> Path:
    """Write the spans into the database `path`, a new one where there is none; returns `path`."""
    store = SpanStore(path)
    store.add(otlp_decoder.decode_export(encode_spans(spans).SerializeToString()).spans).result(20)
    store.close()
    return path


def name_window(first_s: float, last_s: float) -> str:
    """The window between so many seconds after BEGIN_S, as a user writes it."""
    ends = (datetime.fromtimestamp(BEGIN_S + each, timezone.utc) for each in (first_s, last_s))
    return "..".join(end.isoformat() for end in ends)
