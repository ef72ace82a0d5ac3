# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel serve` and `ttft-otel report` as typed in a shell, time windows among it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from datetime import datetime, timedelta, timezone
from pathlib import Path

import jsonschema
import pytest
import sample_records
from click.testing import CliRunner, Result
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExportResult

from lab import report_files
from lab.free_ports import find_free_port
from ttft_otel.commands import serve
from ttft_otel.commands.main import main
from ttft_otel.exporter.spans.span_builder import build_spans
from ttft_otel.report.receive import otlp_decoder
from ttft_otel.report.store.span_store import SpanStore
from ttft_otel.report.time_window import parse_window

SCHEMA = Path(__file__).parents[1] / "golden" / "report.schema.json"
PUBLIC_SCHEMA = json.loads(
    (Path(__file__).parents[2] / "docs" / "report.schema.json").read_text("utf-8")
)


@pytest.fixture
def stored_database(store: SpanStore) -> Path:
    """A database with requests of all kinds, one of them dead."""
    records = [
        *sample_records.make_routed_records("chatcmpl-one", encoders=2),
        *sample_records.make_routed_records("two", 1.7),
        sample_records.make_leg_record("mono", sample_records.DECODE_US, request_id="three"),
        sample_records.make_leg_record(
            "mono", {"ipc": 9}, request_id="dead", error="EngineDeadError", died="ipc"
        ),
    ]
    sample_records.store_records(store, records)
    store.close()
    return store.path


def run_command(*words: str, width: int = 120) -> Result:
    """Run a command."""
    return CliRunner(env={"COLUMNS": str(width)}).invoke(main, list(words))


def test_many(stored_database: Path) -> None:
    """Without arguments: percentiles per stage, the mean bar, and that the sums close."""
    result = run_command("report", "--db", str(stored_database))
    assert result.exit_code == 0, result.output
    for word in ("3 requests, 1 failed", "p95", "encode.encoder.compute", "unattributed", "█"):
        assert word in result.output
    assert "✓ Σ stages + unattributed = ttft, in every request" in result.output


@pytest.mark.parametrize("width", [60, 200])
def test_one(stored_database: Path, width: int) -> None:
    """One request: its waterfall and the sum with its closing line, at any width."""
    result = run_command("report", "--db", str(stored_database), "--request", "two", width=width)
    assert result.exit_code == 0, result.output
    assert "✓" in result.output and "encoder.compute" in result.output
    assert max(len(line) for line in result.output.splitlines()) <= width


def test_json(stored_database: Path) -> None:
    """--json prints one request's report, or all requests with their summary."""
    one = json.loads(
        run_command("report", "--db", str(stored_database), "--request", "two", "--json").output
    )
    assert one["combined"]["enc_compute_time_ms"] == round(41_700 * 1.7) / 1000
    assert [leg["role"] for leg in one["request"]["legs"]] == ["encode", "prefill_decode"]
    assert {each["name"] for each in one["spans"]} >= {"ttft", "encode", "prefill.compute"}
    jsonschema.validate(one, PUBLIC_SCHEMA)
    many = json.loads(run_command("report", "--db", str(stored_database), "--json").output)
    assert many["summary"]["count"] == 3 and len(many["requests"]) == 4
    trace = many["requests"][-1]["trace_id"]
    whole = json.loads(
        run_command("report", "--db", str(stored_database), "--trace", trace, "--json").output
    )
    assert {span["kind"] for span in whole["spans"]} >= {"server", "internal"}
    unknown = run_command("report", "--db", str(stored_database), "--request", "no", "--json")
    assert unknown.exit_code == 1
    for document in (one, many, whole, json.loads(unknown.stdout)):
        jsonschema.validate(document, PUBLIC_SCHEMA)
    # The schema holds: a field that nobody has described, or one that is missing, is found.
    for wrong in (
        {**one, "more": 1},
        {**many, "requests": [{**many["requests"][0], "more": 1}]},
        {},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, PUBLIC_SCHEMA)
    assert run_command("report", "--db", str(stored_database), "--last", "1").exit_code == 0


def test_hostile_terminal(store: SpanStore) -> None:
    """Control characters of foreign spans do not reach the terminal."""
    store.add(
        sample_records.make_stored_spans(
            [sample_records.make_short_record(request_id="\x1b)0;x\x07\n")]
        )
    )
    store.close()
    output = run_command("report", "--db", str(store.path), "--last", "1").output
    assert "\x1b]0" not in output and "\x07" not in output


def test_bytes_that_are_no_text(stored_database: Path) -> None:
    """What a shell passes on as it is, and is no UTF-8, names nothing; that is said."""
    for words in (
        ("report", "--request", "\udcff"),
        ("report", "--trace", "\udcff"),
        ("explain", "--model", "\udcff"),
        ("diff", "--a", "2h..1h", "--b", "1h..", "--model", "\udcff"),
        ("whatif", "--model", "\udcff"),
    ):
        result = run_command(*words, "--db", str(stored_database))
        assert result.exit_code == 1 and isinstance(result.exception, SystemExit), words
        assert result.output.startswith("Error: ")


def test_remedies(stored_database: Path, tmp_path: Path) -> None:
    """For what is not stored the error says what to do."""
    nothing = run_command("report", "--db", str(tmp_path / "none.db"))
    assert nothing.exit_code == 1 and "ttft-otel serve" in nothing.output
    unknown = run_command("report", "--db", str(stored_database), "--request", "nobody")
    assert unknown.exit_code == 1 and "nobody" in unknown.output
    SpanStore(tmp_path / "empty.db").close()
    empty = run_command("report", "--db", str(tmp_path / "empty.db"))
    assert empty.exit_code == 1 and "TTFT_OTEL=1" in empty.output
    assert run_command("report", "--last", "3", "--trace", "x").exit_code == 2


def test_export(stored_database: Path) -> None:
    """report.json keeps to its schema, has the client's own measurements, and its sums close."""
    client = report_files.read_measurements(
        [
            {"request_id": "chatcmpl-one", "kind": "image", "client_ttft_ms": 151.0, "ignored": 1},
            {"request_id": "three", "kind": "text", "client_ttft_ms": None},
            {"request_id": "dead", "kind": "text", "client_ttft_ms": None},
            {"request_id": "nobody", "kind": "text", "client_ttft_ms": 3.0},
        ]
    )
    report = report_files.write_report_files(
        stored_database, client, stored_database.parent / "out"
    )
    jsonschema.validate(report, json.loads(SCHEMA.read_text("utf-8")))
    assert json.loads((stored_database.parent / "out" / "report.json").read_text("utf-8")) == report
    one, three, dead = report["requests"]
    assert (one["request_id"], len(one["encode_all"])) == ("chatcmpl-one", 2)
    assert one["legs"]["encode"]["ttft_ms"] == max(leg["ttft_ms"] for leg in one["encode_all"])
    assert one["closed"] and three["closed"] and dead["error"] == "EngineDeadError"
    summary = report["summary"]
    assert summary["closed"] and summary["missing"] == ["nobody"]
    assert summary["client_ttft"]["count"] == 1
    assert summary["client_minus_ttft"]["p50"] == round(151.0 - one["ttft_ms"], 3)
    assert set(summary["by_kind"]) == {"image", "text"}
    everything = report_files.write_report_files(
        stored_database, [], stored_database.parent / "all"
    )
    assert [each["request_id"] for each in everything["requests"]][-1] == "dead"


def test_serve(tmp_path: Path) -> None:
    """The command starts, prints its addresses, stores spans, and on SIGTERM has all of them on disk."""
    port, database = find_free_port(), tmp_path / "spans.db"
    env = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}"}
    words = ["serve", "--http-port", str(port), "--grpc-port", "0", "--db", str(database)]
    process = subprocess.Popen(
        [sys.executable, "-c", "from ttft_otel.commands.main import main; main()", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
    )
    with process:
        assert process.stdout is not None
        assert f"http://127.0.0.1:{port}" in process.stdout.readline()
        exporter = OTLPSpanExporter(endpoint=f"http://127.0.0.1:{port}/v1/traces")
        sent = sample_records.make_spans(sample_records.make_routed_records("one"))
        assert exporter.export(sent) is SpanExportResult.SUCCESS
        exporter.shutdown()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10) as answer:
            assert json.load(answer)["stored"]["spans"] == len(sent)
        taken = run_command(
            "serve", "--http-port", str(port), "--grpc-port", "-1", "--db", str(database)
        )
        assert taken.exit_code == 1 and re.search("--http-port", taken.output)
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert process.wait(20) in (0, -signal.SIGTERM), rest
        assert "Traceback" not in rest
    assert json.loads(run_command("report", "--db", str(database), "--json").output)["requests"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "host.example"])
def test_other_machines(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address that other machines can reach needs --insecure."""
    started: list[str] = []
    monkeypatch.setattr(serve, "run_server", lambda options, _: started.append(options.host))
    words = ("serve", "--db", str(tmp_path / "spans.db"), "--host")
    refused = CliRunner().invoke(main, (*words, host))
    assert refused.exit_code == 2 and "--insecure" in refused.output
    assert CliRunner().invoke(main, (*words, host, "--insecure")).exit_code == 0
    for own in ("127.0.0.1", "127.0.0.7", "::1", "localhost"):
        assert CliRunner().invoke(main, (*words, own)).exit_code == 0
    assert started == [host, "127.0.0.1", "127.0.0.7", "::1", "localhost"]


def test_grpc_taken(tmp_path: Path) -> None:
    """A gRPC port that is taken is said so, with the option that chooses another."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        words = ["--http-port", "0", "--grpc-port", str(port), "--db", str(tmp_path / "a.db")]
        result = run_command("serve", *words)
    assert result.exit_code == 1 and "--grpc-port" in result.output


def test_filters(store: SpanStore) -> None:
    """By model, time and instance, alone and together; what nobody matches is refused."""
    begin_ns = 1_790_000_000 * 10**9
    for number in range(8):
        record = sample_records.make_leg_record(
            "mono",
            {"prefill.queue": 1000 * (number + 1)},
            request_id=f"r{number}",
            start_ns=begin_ns + number * 60 * 10**9,
            model=("tiny", "large")[number % 2],
        )
        resource = Resource.create({"service.instance.id": f"vllm-{number // 4}"})
        exported = encode_spans(build_spans(record, resource)).SerializeToString()
        store.add(otlp_decoder.decode_export(exported).spans).result(20)
    store.close()

    def list_ids(*words: str) -> list[str]:
        result = run_command("report", "--db", str(store.path), "--json", *words)
        answer = json.loads(result.stdout)
        jsonschema.validate(answer, PUBLIC_SCHEMA)
        return [each["request_id"] for each in answer.get("requests", [])]

    window = "2026-09-21T14:14:20Z..2026-09-21T14:18:20Z"  # its first minute is begin_ns + 1 min
    assert list_ids("--model", "large") == ["r7", "r5", "r3", "r1"]
    assert list_ids("--instance", "vllm-0") == ["r3", "r2", "r1", "r0"]
    assert list_ids("--since", window) == ["r4", "r3", "r2", "r1"]
    assert list_ids("--since", window, "--instance", "vllm-0", "--model", "large") == ["r3", "r1"]
    assert list_ids("--instance", "vllm-1", "--last", "2") == ["r7", "r6"]
    assert list_ids("--instance", "vllm-2") == []
    refused = run_command("report", "--db", str(store.path), "--request", "r1", "--model", "x")
    assert refused.exit_code == 2 and "choose among many" in refused.output


def test_join_aiperf(stored_database: Path, tmp_path: Path) -> None:
    """Requests of AIPerf's export are joined by ID; `outside` closes the sum at the client's TTFT."""
    ttfts = {"chatcmpl-one": 900.5, "three": 800.25, "elsewhere": 3.0}
    results = tmp_path / "profile_export.jsonl"
    lines = [
        {
            "metadata": {"x_request_id": name, "benchmark_phase": phase},
            "metrics": {"time_to_first_token": {"value": ms, "unit": "ms"}},
        }
        for phase in ("warmup", "profiling")
        for name, ms in ttfts.items()
        if phase == "profiling" or name == "three"
    ]
    lines.append(
        {"metadata": {"x_request_id": "two", "benchmark_phase": "profiling"}, "metrics": {}}
    )
    results.write_text("\n".join(map(json.dumps, lines)))
    asked = ("report", "--db", str(stored_database), "--join", str(results))
    found = json.loads(run_command(*asked, "--json").stdout)
    jsonschema.validate(found, PUBLIC_SCHEMA)
    assert found["join"] == {"in_file": 3, "joined": 2, "not_in_file": 2}
    plain = json.loads(run_command(*asked[:3], "--json").stdout)
    served = {each["request_id"]: each["ttft_ms"] for each in plain["requests"]}
    for each in found["requests"]:
        client = ttfts[each["request_id"]]
        assert each["ttft_ms"] == client
        assert each["stages"]["outside"] == pytest.approx(client - served[each["request_id"]])
        assert sum(each["stages"].values()) + each["unattributed_ms"] == pytest.approx(client)
    text = run_command(*asked).output
    assert "outside" in text and "2 of the file's 3 requests" in text and "✓" in text


def test_join_vllm_bench(stored_database: Path, tmp_path: Path) -> None:
    """vLLM's result has no IDs: its prefix and the request's number are one."""
    results = tmp_path / "result.json"
    results.write_text(json.dumps({"ttfts": [0.7, 0.0, 0.9], "errors": ["", "refused", ""]}))
    asked = ("report", "--db", str(stored_database), "--join", str(results))
    refused = run_command(*asked)
    assert refused.exit_code == 1 and "--request-id-prefix" in refused.output
    found = run_command(*asked, "--join-prefix", "none-")
    assert found.exit_code == 1 and "none of the 2 requests" in found.output
    results.write_text(json.dumps({"ttfts": [0.0001] * 4}))
    other = SpanStore(stored_database)
    records = [
        sample_records.make_leg_record("mono", sample_records.DECODE_US, request_id=f"b-{number}")
        for number in range(4)
    ]
    sample_records.store_records(other, records)
    other.close()
    found = run_command(*asked, "--join-prefix", "b-")
    assert found.exit_code == 1 and "waited for less than their server took" in found.output


@pytest.mark.parametrize("text", ["", "[]", "{", '{"ttfts": 3}', '{"x_request_id": 1}', "\udcff"])
def test_join_of_another_file(stored_database: Path, tmp_path: Path, text: str) -> None:
    """A file of another form is refused with what it should be."""
    results = tmp_path / "results"
    results.write_bytes(text.encode("utf-8", "surrogateescape"))
    asked = ("report", "--db", str(stored_database), "--join", str(results), "--join-prefix", "")
    found = run_command(*asked)
    assert found.exit_code == 1 and "Traceback" not in found.output
    assert "neither AIPerf's" in found.output or "cannot be read" in found.output


NOW = datetime(2026, 3, 29, 14, 30, tzinfo=timezone(timedelta(hours=2)))


def describe_window(text: str) -> tuple[str, str]:
    """Both ends, as clock times of the same zone."""
    ends = (datetime.fromtimestamp(ns / 1e9, NOW.tzinfo) for ns in parse_window(text, NOW))
    first, last = (end.strftime("%d %H:%M:%S") for end in ends)
    return first, last


@pytest.mark.parametrize(
    ("text", "since", "until"),
    [
        ("2h..1h", "29 12:30:00", "29 13:30:00"),
        ("1h..", "29 13:30:00", "29 14:30:00"),
        ("90s", "29 14:28:30", "29 14:30:00"),
        ("14:00..14:05", "29 14:00:00", "29 14:05:00"),
        ("23:50:10..0:10", "28 23:50:10", "29 00:10:00"),  # the last ones that have been
        ("2026-03-28T10:00..2026-03-28T10:00:30Z", "28 10:00:00", "28 12:00:30"),
        ("1.5d..30m", "28 02:30:00", "29 14:00:00"),
    ],
)
def test_windows(text: str, since: str, until: str) -> None:
    """Times ago, clock times and moments, with and without an end."""
    assert describe_window(text) == (since, until)


@pytest.mark.parametrize(
    "text",
    ["", "..", "yesterday", "1h..2h", "25:00..26:00", "1x..", "1h..1h", "800000d", f"{'9' * 400}d"],
)
def test_refused(text: str) -> None:
    """What is no window is refused with a sentence that quotes it."""
    with pytest.raises(ValueError, match="is not a time|ends before it begins"):
        parse_window(text, NOW)
