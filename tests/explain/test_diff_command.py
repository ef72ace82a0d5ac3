# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel diff` as typed in a shell, over a store with two windows of which the second is slower."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner, Result
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource

from ttft_otel import cli, names
from ttft_otel.exporter import span_builder
from ttft_otel.record import Attributes, Piece, Record, Server, Ttft
from ttft_otel.report import otlp_decoder
from ttft_otel.report.span_store import SpanStore

SCHEMA = Path(__file__).parents[2] / "docs" / "diff.schema.json"
BEGIN_S = 1_790_000_000
WINDOW_S = 100


def make_record(number: int, slow: bool) -> Record:
    """One request of a single server; a slow one takes 50 ms longer in prefill.queue."""
    chance = random.Random(number)
    lengths = {
        "preprocess": round(2000 * chance.lognormvariate(0, 0.2)),
        "prefill.queue": round(5000 * chance.lognormvariate(0, 0.3)) + (50_000 if slow else 0),
        "prefill.compute": round(30_000 * chance.lognormvariate(0, 0.2)),
    }
    pieces, at = [], 0
    for name, length in lengths.items():
        pieces.append(Piece("stage", name, at, at + length))
        at += length
    attributes: Attributes = {names.MODEL: "tiny", names.PROVIDER: "vllm", names.INPUT_TOKENS: 200}
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
        attributes=attributes,
        ttft=Ttft(f"{number + 9001:016x}", names.TTFT, 0, at, lengths, 0, 0, tuple(pieces)),
        server=Server("POST /v1/completions", at, 200),
    )


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A hundred requests of version 1, then a hundred slower ones of version 2, a second apart."""
    store = SpanStore(tmp_path_factory.mktemp("diff") / "spans.db")
    for version in (1, 2):
        resource = Resource.create({"service.name": "vllm", "service.version": str(version)})
        spans = [
            span
            for number in range((version - 1) * WINDOW_S, version * WINDOW_S)
            for span in span_builder.build_spans(make_record(number, version == 2), resource)
        ]
        message = encode_spans(spans).SerializeToString()
        store.add(otlp_decoder.decode_export(message).spans).result(20)
    store.close()
    yield store.path


def run_diff(database: Path, *words: str) -> Result:
    """Run the command."""
    return CliRunner(env={"COLUMNS": "140"}).invoke(
        cli.main, ["diff", "--db", str(database), *words]
    )


def name_window(number: int) -> str:
    """The window of version `number`, as a user writes it."""
    ends = (BEGIN_S + (number - 1) * WINDOW_S, BEGIN_S + number * WINDOW_S)
    first, last = (datetime.fromtimestamp(end, timezone.utc).isoformat() for end in ends)
    return f"{first}..{last}"


@pytest.mark.parametrize("by_attribute", [False, True])
def test_slower(database: Path, by_attribute: bool) -> None:
    """The stage is named with its size, by time and by version; the JSON keeps to its schema."""
    windows = ["--a", name_window(1), "--b", name_window(2)]
    words = ["--by", "service.version", "--a", "1", "--b", "2"] if by_attribute else windows
    result = run_diff(database, *words)
    assert result.exit_code == 0, result.output
    assert "prefill.queue of like requests" in result.output and "100 → 100" in result.output
    told = json.loads(run_diff(database, *words, "--json").stdout)
    jsonschema.validate(told, json.loads(SCHEMA.read_text("utf-8")))
    assert told["named"] == ["prefill.queue"] and told["requests"] == {"a": 100, "b": 100}
    (queue,) = (each for each in told["stages"] if each["name"] == "prefill.queue")
    assert queue["change_ms"] == pytest.approx(50, rel=0.05)
    parts = sum(each["change_ms"] for each in told["stages"]) + told["mix"]["change_ms"]
    assert parts == pytest.approx(told["ttft"]["mean"]["change_ms"], abs=0.01)


def test_nothing(database: Path) -> None:
    """A window compared with itself: said in one sentence."""
    result = run_diff(database, "--a", name_window(1), "--b", name_window(1))
    assert result.exit_code == 0 and "Nothing changed" in result.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--a", "1999-01-01..1999-01-02", "--b", "1h.."], "window A has 0 requests"),
        (["--a", "nonsense", "--b", "1h.."], "'nonsense' is not a time"),
        (["--a", "2h..1h", "--b", "1h..", "--since", "1d"], "--since goes with --by"),
        (["--by", "service.version", "--a", "7", "--b", "8"], "service.version is one of: 1, 2"),
        (["--by", "no.such", "--a", "7", "--b", "8"], "no stored request has the attribute"),
        (["--a", "2h..1h"], "Missing option '--b'"),
    ],
)
def test_remedies(database: Path, words: list[str], told: str) -> None:
    """What cannot be compared is refused with what to do, in words and as JSON."""
    result = run_diff(database, *words)
    assert result.exit_code != 0 and told in result.output
    if result.exit_code == 1:
        document = json.loads(run_diff(database, *words, "--json").stdout)
        jsonschema.validate(document, json.loads(SCHEMA.read_text("utf-8")))
        assert told in document["refusal"]


def test_without_numpy(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pip command is named, as for every subcommand."""
    for module in [name for name in sys.modules if name.startswith("ttft_otel.explain")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "numpy", None)
    result = run_diff(database, "--a", "2h..1h", "--b", "1h..")
    assert result.exit_code != 0 and "pip install 'ttft-otel[explain]'" in result.output
