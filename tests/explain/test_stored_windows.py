# SPDX-License-Identifier: Apache-2.0
"""Stored windows: a weighted sample is read, holders add up, and what anybody may have sent harms nobody."""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
from click.testing import CliRunner
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource

from tests.commands.test_answers import COUNT, EXPLAIN, WINDOW, make_record
from tests.explain.stored_records import (
    BEGIN_S,
    StoreCommand,
    build_spans,
    name_window,
    store_spans,
)
from tests.fake_tempo import FakeTempo
from ttft_otel.commands import main as cli
from ttft_otel.explain.explain.late_requests import list_holders
from ttft_otel.explain.window.window_reading import (
    WindowReading,
    describe_coverage,
    describe_reading,
    read_window,
)
from ttft_otel.exporter import span_batch
from ttft_otel.model.names import keys, span_names
from ttft_otel.model.record import HeldBy, Record
from ttft_otel.model.statistics import compute_quantile, compute_weighted_quantiles
from ttft_otel.report.breakdown_source import open_source
from ttft_otel.report.receive import otlp_decoder
from ttft_otel.report.receive.otlp_decoder import StoredHolder, chunk_spans
from ttft_otel.report.report_types import (
    LATE,
    LOST,
    OTHER,
    SamplePlan,
    SourceChoice,
    StoredSpan,
    count_late,
    read_adjusted_count,
)
from ttft_otel.report.store.database_reader import RequestFilter, open_reader
from ttft_otel.report.store.span_store import SpanStore

RESOURCE = {"service.name": "vllm", "service.instance.id": "chat-1"}
CHUNK_COLUMNS = "chunks (trace, resource, scope, spans, trunks, span_ids, parent_ids, content)"
REQUEST_COLUMNS = (
    "requests (trace, number, request_id, start_ns, model, roles, ttft_us, error, pending)"
)
pack = msgspec.msgpack.Encoder().encode


def store_lengths(
    path: Path, ttfts_us: Sequence[int], every_us: int, trace_state: str = "", error_every: int = 0
) -> Path:
    """Requests with these TTFTs, `every_us` after one another; returns `path`.

    error_every: the last of so many has no first token, 0: all have one.
    """
    SpanStore(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:

        def insert(table: str, *values: object) -> None:
            connection.execute(
                f"INSERT INTO {table} VALUES ({','.join('?' * len(values))})", values
            )

        connection.execute("PRAGMA synchronous=OFF")
        connection.execute("BEGIN")
        for number, shared in ((1, RESOURCE), (2, span_names.SCOPE)):
            insert("shared", number, bytes([number]) * 16, pack(shared), len(ttfts_us))
        for number, us in enumerate(ttfts_us):
            start_ns = BEGIN_S * 10**9 + number * every_us * 1000
            error = "timeout" if error_every and (number + 1) % error_every == 0 else ""
            (chunk,) = chunk_spans(make_spans(number, start_ns, us, trace_state, error))
            ids = chunk.span_ids, chunk.parent_ids, chunk.content
            insert(CHUNK_COLUMNS, number + 1, 1, 2, 2, 1, *ids)
            insert("traces", number + 1, (number + 1).to_bytes(16, "big"), number, 2, 1)
            values = number + 1, 0, f"r{number}", start_ns, "tiny", "mono", us, error, 0
            insert(REQUEST_COLUMNS, *values)
        connection.execute("COMMIT")
    return path


def make_spans(
    number: int, start_ns: int, us: int, trace_state: str, error: str
) -> list[StoredSpan]:
    """A server's span, and the `ttft` one below it."""
    trace_id, end_ns = f"{number + 1:032x}", start_ns + us * 1000
    server_id, trunk_id = (f"{2 * number + each:016x}" for each in (2, 1))
    attributes: dict[str, Any] = {
        keys.ROLE: "mono",
        keys.OUTERMOST: True,
        keys.TOTAL_US: us,
        keys.UNATTRIBUTED_US: 0,
        "ttft.prefill.compute_us": us,
        keys.MODEL: "tiny",
        keys.REQUEST_ID: f"r{number}",
        keys.INPUT_TOKENS: 500,
        keys.ERROR_TYPE: error,
    }
    shared: dict[str, Any] = {
        "scope": span_names.SCOPE,
        "resource": RESOURCE,
        "trace_state": trace_state,
    }
    trunk = (trace_id, trunk_id, server_id, "ttft", 1, start_ns, end_ns)
    server = (trace_id, server_id, "", "POST /v1/completions", 2, start_ns, end_ns + 10**9)
    return [StoredSpan(*trunk, attributes=attributes, **shared), StoredSpan(*server, **shared)]


DIFF = StoreCommand("diff")
ALL = RequestFilter(last=0)
SLO_US = 300_000
HOUR = 6000  # requests, of which those of an incident are not among the newest


def draw_hour(seed: int = 1, count: int = HOUR, incident: bool = True) -> list[int]:
    """The TTFTs of an hour, by default with an incident in a sixth of it, in the order of arrival."""
    chance = numpy.random.default_rng(seed)
    usual = chance.lognormal(11, 0.3, count)
    if incident:
        usual[count // 2 : count // 2 + count // 6] *= chance.lognormal(1.2, 0.7, count // 6)
    return [int(each) for each in usual]


def read(path: Path, wanted: RequestFilter = ALL, slo_us: int = SLO_US) -> WindowReading:
    with open_reader(path) as opened:
        return read_window(opened, wanted, slo_us)


def test_incident(tmp_path: Path) -> None:
    """All late requests of an incident are read, and the weights add up to the window."""
    ttfts = draw_hour()
    found = read(store_lengths(tmp_path / "spans.db", ttfts, 250_000))
    late = sum(each > SLO_US for each in ttfts)
    lengths = [each.ttft_us for each in found.requests]
    weights = [each.weight for each in found.requests]
    assert 180 < late < 2000
    assert found.coverage.counts[LATE] == late == sum(each > SLO_US for each in lengths)
    assert sum(weights) == pytest.approx(len(ttfts))
    share = sum(
        weight for each, weight in zip(lengths, weights, strict=True) if each > SLO_US
    ) / sum(weights)
    assert share == pytest.approx(late / len(ttfts))
    text = describe_reading(found.coverage)
    assert text.startswith(f"{HOUR} requests from ")
    assert f"read: all {late} late ones and 2000 of {HOUR - late} others, at random" in text
    told = describe_coverage(found.coverage)
    assert told["requests"] == HOUR and told["read"] == len(found.requests) == late + 2000
    assert datetime.fromisoformat(told["from"]).timestamp() == BEGIN_S
    # Counter-test: the newest ones, which were read before, have none of them.
    assert not any(each > SLO_US for each in ttfts[-2000:])


def test_commands_read_the_window(tmp_path: Path) -> None:
    """`explain` and `diff` tell an incident that none of the newest requests was in."""
    usual, bad = draw_hour(2, incident=False), draw_hour()
    path = store_lengths(tmp_path / "spans.db", [*usual, *bad], 250_000)
    hour_s = len(usual) / 4
    a, b = name_window(0, hour_s - 0.1), name_window(hour_s, 2 * hour_s)
    late = sum(each > SLO_US for each in bad)

    reported = EXPLAIN.read_json(path, "--since", b, "--slo", "300")
    first, second = reported["sentences"][:2]
    assert f"{late} of {HOUR} requests were later than 300 ms" in second
    assert f"; read: all {late} late ones and 2000 of {HOUR - late} others" in first
    assert reported["requests"]["late"] == late
    assert reported["p50_ms"] == pytest.approx(numpy.median(bad) / 1000, rel=0.03)
    assert reported["p99_ms"] == pytest.approx(numpy.quantile(bad, 0.99) / 1000, rel=0.03)

    found = DIFF.read_json(path, "--a", a, "--b", b)
    assert found["named"] == ["prefill.compute"] and found["requests"] == {"a": HOUR, "b": HOUR}
    assert found["coverage"]["b"]["read"] == 2000 + HOUR // 100 and found["shared"] == 0
    truth = (numpy.mean(bad) - numpy.mean(usual)) / 1000
    change = found["ttft"]["mean"]
    assert change["low_ms"] < truth < change["high_ms"] < 2 * truth


def test_unbiased() -> None:
    """Over many windows the weighted mean, shares and percentiles of what is read are those of all."""
    errors = []
    for seed in range(30):
        ttfts = numpy.array(draw_hour(seed, 9000 + seed), float)
        count = len(ttfts)
        limit = numpy.sort(ttfts)[-count_late(count) - 1]
        parts = {LATE: ttfts[ttfts > limit], OTHER: ttfts[ttfts <= limit], LOST: ttfts[:0]}
        plan = SamplePlan(
            {name: len(some) for name, some in parts.items()}, {LATE: 50, OTHER: 500, LOST: 0}
        )
        values, weights = [], []
        for name, some in parts.items():
            chosen = some[list(plan.choose_positions(name))]
            values += chosen.tolist()
            weights += [plan.get_weight(name)] * len(chosen)
        shares = (0.5, 0.9, 0.99, 0.995)
        estimated = compute_weighted_quantiles(values, weights, shares)
        mean = numpy.average(values, weights=weights)
        incident = numpy.average(numpy.array(values) > SLO_US, weights=weights)
        truth = [*numpy.quantile(ttfts, shares), ttfts.mean(), (ttfts > SLO_US).mean()]
        errors.append(numpy.array([*estimated, mean, incident]) / truth - 1)
    found = numpy.array(errors)
    spread = found.std(0) / numpy.sqrt(len(found))
    # Of six figures none is off by more than four standard errors, or a thousandth of itself.
    assert (numpy.abs(found.mean(0)) < numpy.maximum(4 * spread, 1e-3)).all(), (
        found.mean(0) / spread
    )
    # Counter-test: without weights the late ones count several times.
    assert numpy.mean(numpy.array(values) > SLO_US) > 1.3 * truth[-1]


def test_small_window(tmp_path: Path) -> None:
    """A window that can be read is read, and each request counts once; `last` takes the newest ones only."""
    path = store_lengths(tmp_path / "spans.db", range(1000, 1400), 1000)
    found = read(path, slo_us=0)
    assert [each.ttft_us for each in found.requests] == list(range(1000, 1400))
    assert {each.weight for each in found.requests} == {1.0}
    assert "all read" in describe_reading(found.coverage)
    newest = read(path, RequestFilter(last=30), 0)
    assert [each.ttft_us for each in newest.requests] == list(range(1370, 1400))


def test_lost(tmp_path: Path) -> None:
    """Requests without a first token are counted, whether they are read or not."""
    path = store_lengths(tmp_path / "spans.db", [50_000] * 2400, 1000, error_every=4)
    found = read(path)
    assert found.coverage.counts[LOST] == found.lost.total == 600
    assert len(found.failed) == 500
    assert "600 without a first token" in describe_reading(found.coverage)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 1.0),
        ("ot=th:0", 1.0),
        ("ot=th:8", 2.0),
        ("other=1, ot=rv:abc;th:c", 4.0),
        ("ot=th:e66", 9.99),
        ("ot=th:ffffffffffffff", 10_000.0),
        ("ot=th:fffffffffffffff", 1.0),
        ("ot=th:-8", 1.0),
        ("not=th:8", 1.0),
        ("ot=rv:8", 1.0),
    ],
)
def test_tracestate(text: str, count: float) -> None:
    """A sampler's threshold says how many requests a trace stands for; what is none says nothing."""
    assert read_adjusted_count(text) == pytest.approx(count, rel=1e-3)


def test_sampled_window(tmp_path: Path) -> None:
    """A tracestate's probability is a weight, and is told."""
    found = read(store_lengths(tmp_path / "spans.db", [50_000] * 100, 1000, trace_state="ot=th:c"))
    assert {each.weight for each in found.requests} == {4.0}
    assert "up to 4 requests" in found.coverage.sampling


def test_weighted_quantiles() -> None:
    """With equal weights they are those of the values; a weight of 3 is a value that comes three times."""
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    for share in (0.0, 0.3, 0.5, 0.95, 1.0):
        (found,) = compute_weighted_quantiles(values, [1.0] * 5, (share,))
        assert found == pytest.approx(compute_quantile(values, share))
    many = numpy.random.default_rng(1).lognormal(0, 1, 2000)
    weights = numpy.random.default_rng(2).integers(1, 5, 2000)
    (found,) = compute_weighted_quantiles(many.tolist(), weights.tolist(), (0.9,))
    assert found == pytest.approx(numpy.quantile(numpy.repeat(many, weights), 0.9), rel=0.01)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_million(tmp_path: Path) -> None:
    """A million stored requests are read in the time of some counts by SQLite, and in flat memory."""
    small = store_lengths(tmp_path / "small.db", draw_hour(1, 20_000), 3600)
    large = store_lengths(tmp_path / "large.db", draw_hour(1, 1_000_000), 3600)
    program = (
        "import resource, sys, pathlib\n"
        "from ttft_otel.explain.window.window_reading import read_window\n"
        "from ttft_otel.report.store.database_reader import RequestFilter, open_reader\n"
        "with open_reader(pathlib.Path(sys.argv[1])) as opened:\n"
        "    read_window(opened, RequestFilter(last=0))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )

    def run(path: Path) -> tuple[float, int]:
        begun = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", program, str(path)], capture_output=True, check=True
        )
        return time.monotonic() - begun, int(done.stdout)

    (small_s, small_kb), (large_s, large_kb) = run(small), run(large)
    begun = time.monotonic()
    with closing(sqlite3.connect(large)) as connection:
        for _ in range(10):
            connection.execute(
                "SELECT count(*), sum(ttft_us) FROM requests WHERE error=''"
            ).fetchone()
    reference_s = (time.monotonic() - begun) / 10
    told = (
        f"{small_s:.2f} s, {large_s:.2f} s, a count {reference_s:.3f} s; {small_kb}, {large_kb} KiB"
    )
    # Both read as many requests: what remains are passes over the table.
    assert large_s - small_s < 40 * reference_s, told
    assert large_kb < 1.3 * small_kb, told


LONG = HeldBy(150_000, 4096, "prefill", "long-1", "ab" * 16, "cd" * 8)
HIDDEN = HeldBy(50_000, 300, "decode", "hidden")  # not sampled: no span to link to


def make_held_record(number: int) -> Record:
    """The record of a late request, held by a long prompt, a decode, and nobody for a fifth of the time."""
    record = make_record(number)
    ttft = record.ttft
    assert ttft is not None
    held = {"prefill": 150_000, "decode": 50_000, "idle": 50_000}
    attributes = {keys.name_held_attribute(kind): us for kind, us in held.items()}
    pieces = tuple(
        msgspec.structs.replace(piece, attributes=attributes, held_by=(LONG, HIDDEN))
        if piece.name == "prefill.queue"
        else piece
        for piece in ttft.pieces
    )
    more = {**ttft.attributes, **attributes}
    return msgspec.structs.replace(
        record, ttft=msgspec.structs.replace(ttft, pieces=pieces, attributes=more)
    )


def test_holders(tmp_path: Path) -> None:
    """Kinds are shares of the wait, holders are joined over all that they held; from either source."""
    made = [
        make_record(number) if number % 16 else make_held_record(number) for number in range(COUNT)
    ]
    spans = build_spans(made, {"service.instance.id": "chat-0"})
    path = store_spans(tmp_path / "held.db", spans)
    result = EXPLAIN.run(path, "--slo", "150", "--json")
    reported = json.loads(result.stdout)
    assert reported["held"]["kinds"] == {"prefill": 0.6, "decode": 0.2, "idle": 0.2}
    assert reported["held"]["holders"] == [
        {
            "request_id": "long-1",
            "trace_id": "ab" * 16,
            "kind": "prefill",
            "ms": 150.0 * reported["requests"]["late"],
            "tokens": 4096,
            "delayed": reported["requests"]["late"],
        },
        {
            "request_id": "hidden",
            "trace_id": "",
            "kind": "decode",
            "ms": 50.0 * reported["requests"]["late"],
            "tokens": 300,
            "delayed": reported["requests"]["late"],
        },
    ]
    text = EXPLAIN.run(path, "--request", "r16", "--verbose").output
    assert (
        "While they were in the queue, the engine's time went to: prefill 60%, decode 20%, idle 20%."
        in text
    )
    assert "Held longest by: long-1 (prefill, 4096 tokens, 150.00 ms, 1 held), hidden" in text
    with (
        FakeTempo() as tempo,
        open_source(SourceChoice(db=path)) as stored,
        open_source(SourceChoice(tempo=tempo.url)) as searched,
    ):
        tempo.add(spans)
        assert searched.find_trace(f"{17:032x}") == stored.find_trace(f"{17:032x}")


def test_one_trace_for_many(tmp_path: Path) -> None:
    """Of requests that a client has put into one trace each is held by its own holders, and once."""
    records = [
        msgspec.structs.replace(make_held_record(number), trace_id="ef" * 16)
        if number % 16 == 0
        else make_record(number)
        for number in range(COUNT)
    ]
    spans = build_spans(records, {"service.instance.id": "chat-0"})
    path = store_spans(tmp_path / "shared.db", spans)
    reported = json.loads(EXPLAIN.run(path, "--slo", "150", "--json").stdout)
    late = reported["requests"]["late"]
    assert late == 13
    assert [(each["ms"], each["delayed"]) for each in reported["held"]["holders"]] == [
        (150.0 * late, late),
        (50.0 * late, late),
    ]


def test_foreign_text() -> None:
    """Only our own spans name holders; whatever somebody sends as such: no holder, and no error."""
    reported = json.dumps([{"us": 1, "tokens": 2, "kind": "k", "request_id": "r", "trace_id": ""}])
    tokens = '"tokens": 1, "kind": "a", "request_id": "b"'
    lengths = ("1e999", "-5", f"1{'0' * 3000}")  # that no span can have
    foreign = (
        *("", "[]", "[1]", "{}", "{", '[{"us": 1}]', '[{"us": "x", "tokens": 1}]', "[[", 7, None),
        *("[" * 4000, *(f'[{{"us": {us}, {tokens}}}]' for us in lengths)),
    )

    def read(text: object, scope: str = span_names.SCOPE) -> list[StoredHolder]:
        attributes = {keys.HELD_BY: text}
        return list_holders(StoredSpan(*"ab", "", "x", 0, 0, 1, scope=scope, attributes=attributes))

    assert read(reported) == [StoredHolder(us=1, tokens=2, kind="k", request_id="r")]
    assert read(reported, "") == [] and not any(map(read, foreign))


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
        message = encode_spans(span_batch.build_spans(make_record(number), resource))
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
