# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel explain` as typed in a shell, over a store and a Tempo in which some waited for a place."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner, Result
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource

from tests.fake_tempo import FakeTempo
from ttft_otel import cli, names
from ttft_otel.exporter import span_builder
from ttft_otel.record import Attributes, Piece, Record, Server, Ttft
from ttft_otel.report import otlp_decoder
from ttft_otel.report.span_store import SpanStore

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/explain.schema.json").read_text("utf-8"))
BEGIN_S = 1_790_000_000
COUNT = 200
WAIT_US = 250_000


def make_record(number: int) -> Record:
    """One request; every 16th waits for a place, on chat-0 of two instances. The last one failed."""
    chance = random.Random(number)
    slow = number % 16 == 0
    lengths = {
        "preprocess": round(2000 * chance.lognormvariate(0, 0.2)),
        "prefill.queue": round(5000 * chance.lognormvariate(0, 0.3)) + (WAIT_US if slow else 0),
        "prefill.compute": round(30_000 * chance.lognormvariate(0, 0.2)),
    }
    pieces, at = [], 0
    for name, length in lengths.items():
        pieces.append(Piece("stage", name, at, at + length))
        at += length
    queue = lengths["prefill.queue"]
    reasons = {"in_step": queue - (WAIT_US if slow else 0), "max_num_seqs": WAIT_US * slow}
    attributes: Attributes = {
        names.name_reason_attribute("prefill.queue", reason): us
        for reason, us in reasons.items()
        if us
    }
    error = "timeout" if number == COUNT - 1 else ""
    return Record(
        version=1,
        trace_id=f"{number + 1:032x}",
        span_id=f"{number + 1:016x}",
        parent_id="",
        flags=1,
        state="",
        start_ns=(BEGIN_S + number) * 10**9,
        role="mono",
        outermost=True,
        service="vllm",
        request_id=f"r{number}",
        attributes={names.MODEL: "tiny", names.PROVIDER: "vllm", names.INPUT_TOKENS: 600 + number},
        ttft=Ttft(
            f"{number + 9001:016x}",
            names.TTFT,
            0,
            at,
            lengths,
            0,
            0,
            tuple(pieces),
            attributes,
            error=error,
        ),
        server=Server("POST /v1/completions", at, 504 if error else 200),
    )


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The same requests in a database, and in a Tempo."""
    store = SpanStore(tmp_path_factory.mktemp("explain") / "spans.db")
    with FakeTempo() as tempo:
        for instance in range(2):
            resource = Resource({"service.name": "vllm", "service.instance.id": f"chat-{instance}"})
            spans = [
                span
                for number in range(instance, COUNT, 2)
                for span in span_builder.build_spans(make_record(number), resource)
            ]
            message = encode_spans(spans).SerializeToString()
            store.add(otlp_decoder.decode_export(message).spans).result(20)
            tempo.add(spans)
        store.close()
        yield store.path, tempo.url


def run_explain(database: Path, *words: str) -> Result:
    """Run the command."""
    return CliRunner().invoke(cli.main, ["explain", "--db", str(database), *words])


def name_window() -> str:
    """The window of all requests, as a user writes it."""
    ends = (datetime.fromtimestamp(BEGIN_S + each, timezone.utc) for each in (0, COUNT))
    return "..".join(end.isoformat() for end in ends)


def test_window(places: tuple[Path, str]) -> None:
    """Late by an objective: the stage, its share, reason and instance; the JSON keeps to its schema."""
    words = ("--since", name_window(), "--slo", "150")
    result = run_explain(places[0], *words)
    assert result.exit_code == 0, result.output
    assert "13 of 199 requests were later than 150 ms" in result.output
    assert "is prefill.queue on chat-0: " in result.output and "--max-num-seqs" in result.output
    told = json.loads(run_explain(places[0], *words, "--json").stdout)
    jsonschema.validate(told, SCHEMA)
    assert told["requests"] == {"window": 199, "late": 13, "typical": 94}
    assert told["cause"]["rule"] == "max_num_seqs" and told["cause"]["price_kind"] == "qualitative"
    queue = told["stages"][0]
    assert queue["name"] == "prefill.queue"
    assert queue["late_ms"] - queue["typical_ms"] == pytest.approx(WAIT_US / 1000, rel=0.02)
    assert sum(stage["share"] for stage in told["stages"]) == pytest.approx(1, abs=0.001)
    assert told["reasons"]["max_num_seqs"] == pytest.approx(1, abs=0.02)
    assert told["slo"]["stages"][0]["name"] == "prefill.queue"
    assert told["instances"][0]["name"] == "chat-0" and told["confidence"] == "high"


def test_slowest_hundredth(places: tuple[Path, str]) -> None:
    """Without an objective the slowest are explained; `--last` and `--model` choose the window."""
    told = json.loads(run_explain(places[0], "--json").stdout)
    assert told["requests"]["late"] == 5 and told["slo"] is None
    assert told["cause"]["rule"] == "max_num_seqs"
    fewer = json.loads(run_explain(places[0], "--last", "100", "--json").stdout)
    assert fewer["requests"]["window"] == 99
    nobody = run_explain(places[0], "--model", "other")
    assert nobody.exit_code == 1 and "0 requests with a first token" in nobody.output


def test_from_tempo(places: tuple[Path, str]) -> None:
    """Tempo gives the same answer, word by word, for a window and for a request."""
    database, url = places
    for words in (
        ["--since", name_window(), "--slo", "150", "--json"],
        ["--trace", f"{17:032x}", "--since", name_window()],
    ):
        stored = run_explain(database, *words)
        searched = CliRunner().invoke(cli.main, ["explain", "--tempo", url, *words])
        assert searched.stdout == stored.stdout and stored.exit_code == 0, searched.output


@pytest.mark.parametrize("words", [("--request", "r16"), ("--trace", f"{17:032X}")])
def test_single(places: tuple[Path, str], words: tuple[str, str]) -> None:
    """One request, by either ID: how it compares with its like, and why."""
    result = run_explain(places[0], *words)
    assert result.exit_code == 0, result.output
    assert "r16: first token after" in result.output and "max_num_seqs" in result.output
    told = json.loads(run_explain(places[0], *words, "--json").stdout)
    jsonschema.validate(told, SCHEMA)
    assert told["unusual"] and told["requests"]["late"] == 1 and told["rank"] > 0.9
    usual = json.loads(run_explain(places[0], "--request", "r21", "--json").stdout)
    jsonschema.validate(usual, SCHEMA)
    assert not usual["answered"] or (not usual["unusual"] and usual["cause"] is None)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--request", "nobody"], "nothing is stored for 'nobody'"),
        (["--trace", "f" * 32], "nothing is stored for"),
        (["--request", f"r{COUNT - 1}"], "failed (timeout)"),
        (["--since", "nonsense"], "'nonsense' is not a time"),
        (["--since", "1999-01-01..1999-01-02"], "0 requests with a first token"),
        (["--request", "r1", "--trace", "f" * 32], "exclude each other"),
        (["--request", "r1", "--slo", "500"], "--slo is for a window"),
        (["--slo", "90000"], "leave --slo out"),
        (["--slo", "nan"], "nan is not a number"),
        (["--slo", "inf"], "is not in the range"),
        (["--slo", "0.0001"], "is not in the range"),
    ],
)
def test_remedies(places: tuple[Path, str], words: list[str], told: str) -> None:
    """What cannot be explained is refused with what to do, in words and as JSON."""
    result = run_explain(places[0], *words)
    assert result.exit_code != 0 and told in result.output, result.output
    if result.exit_code == 1:
        refused = run_explain(places[0], *words, "--json")
        document = json.loads(refused.stdout)
        jsonschema.validate(document, SCHEMA)
        assert refused.exit_code == 1 and told in document["refusal"]
