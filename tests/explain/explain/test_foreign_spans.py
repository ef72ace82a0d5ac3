# SPDX-License-Identifier: Apache-2.0
"""What anybody may have sent, in request IDs, roles and resources, does not reach a reader's terminal."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource

from tests.commands.test_explain import WINDOW, make_record
from ttft_otel.commands import main as cli
from ttft_otel.exporter.spans import span_builder
from ttft_otel.model.names import keys
from ttft_otel.report.receive import otlp_decoder
from ttft_otel.report.report_types import StoredSpan
from ttft_otel.report.store.span_store import SpanStore

# Colour, window title, a C1 introducer, a text direction; CliRunner takes only the first one out.
CONTROLS = "\x1b[31m\x1b]0;x\x07\x9b31m\u202e"


def make_foreign_spans(seed: int) -> list[StoredSpan]:
    """A window of requests whose every text has controls, and some of whose counts are absurd."""
    chance = random.Random(seed)
    spans = []
    for number in range(80):
        resource = Resource(
            {
                "service.name": f"vllm{CONTROLS}",
                "service.instance.id": f"chat-{number % 2}{CONTROLS}",
                "service.version": f"{number % 2}{CONTROLS}",
            }
        )
        message = encode_spans(span_builder.build_spans(make_record(number), resource))
        for span in otlp_decoder.decode_export(message.SerializeToString()).spans:
            texts = {
                name: f"{value}{CONTROLS}"
                for name, value in span.attributes.items()
                if isinstance(value, str)
            }
            odd = {
                name: chance.choice([-1, -(2**63), 2**63 - 1, True, 1e308, "nan", CONTROLS])
                for name in (keys.INPUT_TOKENS, keys.CACHED_TOKENS, keys.RANK, keys.PREFILL_CHUNKS)
                if chance.random() < 0.2
            }
            spans.append(replace(span, attributes={**span.attributes, **texts, **odd}))
    return spans


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store of such requests."""
    store = SpanStore(tmp_path_factory.mktemp("foreign") / "spans.db")
    store.add(make_foreign_spans(1)).result(20)
    store.close()
    yield store.path


@pytest.mark.parametrize("form", [[], ["--json"]])
@pytest.mark.parametrize(
    "words",
    [
        ["report"],
        ["report", "--last", "1"],
        ["explain"],
        ["explain", "--slo", "300"],  # refused, with the IDs of the late ones
        ["explain", "--trace", f"{17:032x}"],
        ["diff", "--a", WINDOW, "--b", WINDOW],
        ["diff", "--by", "service.version", "--a", "7", "--b", "8"],  # refused, with the values
        ["whatif", "--since", WINDOW],  # refused, with the instance's name
    ],
)
def test_no_controls(database: Path, words: list[str], form: list[str]) -> None:
    """Answers and refusals of every command, as text and as JSON."""
    result = CliRunner().invoke(cli.main, [*words, "--db", str(database), *form])
    assert isinstance(result.exception, SystemExit | None), result.exception
    assert result.output and not any(
        each in result.output for each in CONTROLS if not each.isprintable()
    )
    if form:
        json.loads(result.stdout)


def test_damaged_file(database: Path, tmp_path: Path) -> None:
    """A file that is damaged behind its first pages is told with what to do, whoever reads it."""
    data = database.read_bytes()
    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(data[:8192] + b"\xaa" * (len(data) - 8192))
    for words in (
        ["report"],
        ["explain", "--json"],
        ["diff", "--a", "1h", "--b", "1h"],
        ["whatif"],
    ):
        result = CliRunner().invoke(cli.main, [*words, "--db", str(damaged)])
        assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.exception
        assert "--db FILE" in result.output
