# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel serve`, `report` and `demo` as typed in a shell, time windows among it.

The demo's shipped requests are whole, and the commands that it names answer.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner, Result
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from sample_records import (
    DECODE_US,
    change_spans,
    export_records,
    fetch_any_status,
    fill_database,
    make_leg_record,
    make_routed_records,
)

from lab import report_files, tiny_models
from lab.fake_vllm import word_server
from lab.free_ports import find_free_port
from lab.local_deployment import build_receiver_command, build_router_command
from lab.local_servers import run_servers
from tests.explain.stored_records import StoreCommand
from ttft_otel.commands import serve
from ttft_otel.commands.main import main
from ttft_otel.model.names import env_names
from ttft_otel.report.breakdown_source import parse_window
from ttft_otel.report.store.span_store import SpanStore

SCHEMA = Path(__file__).parents[1] / "golden" / "report.schema.json"
REPORT = StoreCommand("report")


@pytest.fixture
def stored_database(tmp_path: Path) -> Path:
    """A database with requests of all kinds, one of them dead."""
    return fill_database(
        tmp_path / "spans.db",
        *make_routed_records("chatcmpl-one", encoders=2),
        *make_routed_records("two", 1.7),
        make_leg_record("mono", DECODE_US, request_id="three"),
        make_leg_record("mono", {"ipc": 9}, request_id="dead", error="EngineDeadError", died="ipc"),
    )


def run_command(*words: str) -> Result:
    """Run a command."""
    return CliRunner(env={"COLUMNS": "120"}).invoke(main, list(words))


def test_many(stored_database: Path) -> None:
    """Without arguments: percentiles per stage, the mean bar, and that the sums close."""
    result = REPORT.run(stored_database)
    assert result.exit_code == 0, result.output
    for word in ("3 requests, 1 failed", "p95", "encode.encoder.compute", "unattributed", "█"):
        assert word in result.output
    assert "✓ Σ stages + unattributed = ttft, in every request" in result.output


def test_one(stored_database: Path) -> None:
    """One request: its waterfall and the sum with its closing line, at any width."""
    words = ["report", "--db", str(stored_database), "--request", "two"]
    for width in (60, 200):
        result = CliRunner(env={"COLUMNS": str(width)}).invoke(main, words)
        assert result.exit_code == 0, result.output
        assert "✓" in result.output and "encoder.compute" in result.output
        assert max(len(line) for line in result.output.splitlines()) <= width


def test_json(stored_database: Path) -> None:
    """--json prints one request's report, or all requests with their summary, by the schema."""
    one = REPORT.read_json(stored_database, "--request", "two")
    assert one["combined"]["enc_compute_time_ms"] == round(41_700 * 1.7) / 1000
    assert [leg["role"] for leg in one["request"]["legs"]] == ["encode", "prefill_decode"]
    assert {each["name"] for each in one["spans"]} >= {"ttft", "encode", "prefill.compute"}
    many = REPORT.read_json(stored_database)
    assert many["summary"]["count"] == 3 and len(many["requests"]) == 4
    whole = REPORT.read_json(stored_database, "--trace", many["requests"][-1]["trace_id"])
    assert {span["kind"] for span in whole["spans"]} >= {"server", "internal"}
    REPORT.check_refusal(stored_database, ["--request", "no"], "nothing is stored")
    # The schema holds: a field that nobody has described, or one that is missing, is found.
    for wrong in (
        {**one, "more": 1},
        {**many, "requests": [{**many["requests"][0], "more": 1}]},
        {},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, REPORT.schema)
    assert REPORT.run(stored_database, "--last", "1").exit_code == 0


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
    SpanStore(tmp_path / "empty.db").close()
    REPORT.check_refusal(tmp_path / "none.db", [], "ttft-otel serve")
    REPORT.check_refusal(stored_database, ["--request", "nobody"], "nobody")
    REPORT.check_refusal(tmp_path / "empty.db", [], "TTFT_OTEL=1")
    REPORT.check_refusal(stored_database, ["--last", "3", "--trace", "x"], "exclude each other")


def test_export(stored_database: Path, tmp_path: Path) -> None:
    """report.json keeps to its schema, has the client's own measurements, and its sums close."""
    client = report_files.read_measurements(
        [
            {"request_id": "chatcmpl-one", "kind": "image", "client_ttft_ms": 151.0, "ignored": 1},
            {"request_id": "three", "kind": "text", "client_ttft_ms": None},
            {"request_id": "dead", "kind": "text", "client_ttft_ms": None},
            {"request_id": "nobody", "kind": "text", "client_ttft_ms": 3.0},
        ]
    )
    report = report_files.write_report_files(stored_database, client, tmp_path / "out")
    jsonschema.validate(report, json.loads(SCHEMA.read_text("utf-8")))
    assert json.loads((tmp_path / "out" / "report.json").read_text("utf-8")) == report
    one, three, dead = report["requests"]
    assert (one["request_id"], len(one["encode_all"])) == ("chatcmpl-one", 2)
    assert one["legs"]["encode"]["ttft_ms"] == max(leg["ttft_ms"] for leg in one["encode_all"])
    assert one["closed"] and three["closed"] and dead["error"] == "EngineDeadError"
    summary = report["summary"]
    assert summary["closed"] and summary["missing"] == ["nobody"]
    assert summary["client_ttft"]["count"] == 1
    assert summary["client_minus_ttft"]["p50"] == round(151.0 - one["ttft_ms"], 3)
    assert set(summary["by_kind"]) == {"image", "text"}
    everything = report_files.write_report_files(stored_database, [], tmp_path / "all")
    assert [each["request_id"] for each in everything["requests"]][-1] == "dead"


def test_serve(tmp_path: Path) -> None:
    """The command starts, prints its addresses, stores spans, and on SIGTERM has all of them on disk."""
    port, database = find_free_port(), tmp_path / "spans.db"
    url = f"http://127.0.0.1:{port}"
    words = ["serve", "--http-port", str(port), "--grpc-port", "0", "--db", str(database)]
    process = subprocess.Popen(
        [sys.executable, "-m", "ttft_otel.commands.main", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": url},
    )
    with process:
        assert process.stdout is not None
        assert url in process.stdout.readline()
        exporter = OTLPSpanExporter(endpoint=f"{url}/v1/traces")
        sent = export_records(exporter, make_routed_records("one"))
        _, _, health = fetch_any_status(f"{url}/healthz")
        assert json.loads(health)["stored"]["spans"] == len(sent)
        taken = run_command(*words)
        assert taken.exit_code == 1 and "--http-port" in taken.output
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert process.wait(20) in (0, -signal.SIGTERM), rest
        assert "Traceback" not in rest
    assert REPORT.read_json(database)["requests"]


def test_other_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address that other machines can reach needs --insecure."""
    started: list[str] = []
    monkeypatch.setattr(serve, "run_server", lambda options, _: started.append(options.host))
    words = ("serve", "--db", str(tmp_path / "spans.db"), "--host")
    others, own = ("0.0.0.0", "::", "192.0.2.1", "host.example"), ("127.0.0.7", "::1", "localhost")
    for host in others:
        refused = run_command(*words, host)
        assert refused.exit_code == 2 and "--insecure" in refused.output
        assert run_command(*words, host, "--insecure").exit_code == 0
    for host in own:
        assert run_command(*words, host).exit_code == 0
    assert started == [*others, *own]


def test_grpc_taken(tmp_path: Path) -> None:
    """A gRPC port that is taken is said so, with the option that chooses another."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        words = ["--http-port", "0", "--grpc-port", str(port), "--db", str(tmp_path / "a.db")]
        result = run_command("serve", *words)
    assert result.exit_code == 1 and "--grpc-port" in result.output


def test_filters(tmp_path: Path) -> None:
    """By model, time and instance, alone and together; what nobody matches is refused."""
    spans = []
    for number in range(8):
        record = make_leg_record(
            "mono",
            {"prefill.queue": 1000 * (number + 1)},
            request_id=f"r{number}",
            start_ns=(1_790_000_000 + number * 60) * 10**9,
            model=("tiny", "large")[number % 2],
        )
        instance = {"service_instance_id": f"vllm-{number // 4}"}
        spans += change_spans([record], "mono", {}, **instance)
    database = fill_database(tmp_path / "spans.db", spans=spans)

    def list_ids(*words: str) -> list[str]:
        answer = REPORT.read_json(database, *words)
        return [each["request_id"] for each in answer.get("requests", [])]

    window = "2026-09-21T14:14:20Z..2026-09-21T14:18:20Z"  # its first minute is that of r1
    assert list_ids("--model", "large") == ["r7", "r5", "r3", "r1"]
    assert list_ids("--instance", "vllm-0") == ["r3", "r2", "r1", "r0"]
    assert list_ids("--since", window) == ["r4", "r3", "r2", "r1"]
    assert list_ids("--since", window, "--instance", "vllm-0", "--model", "large") == ["r3", "r1"]
    assert list_ids("--instance", "vllm-1", "--last", "2") == ["r7", "r6"]
    assert list_ids("--instance", "vllm-2") == []
    words = ["--request", "r1", "--model", "x"]
    REPORT.check_refusal(database, words, "choose among many")


def test_join_aiperf(stored_database: Path, tmp_path: Path) -> None:
    """Requests of AIPerf's export are joined by ID; `outside` closes the sum at the client's TTFT."""
    ttfts = {"chatcmpl-one": 900.5, "three": 800.25, "elsewhere": 3.0}
    results = tmp_path / "profile_export.jsonl"
    lines = [
        {
            "metadata": {"x_request_id": name, "benchmark_phase": phase},
            "metrics": {"time_to_first_token": {"value": ms, "unit": "ms"}} if ms else {},
        }
        for phase, name, ms in (
            ("warmup", "three", 800.25),
            *(("profiling", name, ms) for name, ms in ttfts.items()),
            ("profiling", "two", 0),
        )
    ]
    results.write_text("\n".join(map(json.dumps, lines)))
    found = REPORT.read_json(stored_database, "--join", str(results))
    assert found["join"] == {"in_file": 3, "joined": 2, "not_in_file": 2}
    plain = REPORT.read_json(stored_database)
    served = {each["request_id"]: each["ttft_ms"] for each in plain["requests"]}
    for each in found["requests"]:
        client = ttfts[each["request_id"]]
        assert each["ttft_ms"] == client
        assert each["stages"]["outside"] == pytest.approx(client - served[each["request_id"]])
        assert sum(each["stages"].values()) + each["unattributed_ms"] == pytest.approx(client)
    text = REPORT.run(stored_database, "--join", str(results)).output
    assert "outside" in text and "2 of the file's 3 requests" in text and "✓" in text


def test_join_vllm_bench(stored_database: Path, tmp_path: Path) -> None:
    """vLLM's result has no IDs: its prefix and the request's number are one."""
    results = tmp_path / "result.json"
    results.write_text(json.dumps({"ttfts": [0.7, 0.0, 0.9], "errors": ["", "refused", ""]}))
    words = ["--join", str(results)]
    REPORT.check_refusal(stored_database, words, "--request-id-prefix")
    words.append("--join-prefix")
    REPORT.check_refusal(stored_database, [*words, "none-"], "none of the 2 requests")
    results.write_text(json.dumps({"ttfts": [0.0001] * 4}))
    records = [make_leg_record("mono", DECODE_US, request_id=f"b-{number}") for number in range(4)]
    fill_database(stored_database, *records)
    too_short = "waited for less than their server took"
    REPORT.check_refusal(stored_database, [*words, "b-"], too_short)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"ttfts": 3}', '{"x_request_id": 1}', "\udcff"])
def test_join_of_another_file(stored_database: Path, tmp_path: Path, text: str) -> None:
    """A file of another form is refused with what it should be."""
    results = tmp_path / "results"
    results.write_bytes(text.encode("utf-8", "surrogateescape"))
    reason = "cannot be read" if text == "\udcff" else "neither AIPerf's"
    words = ["--join", str(results), "--join-prefix", ""]
    REPORT.check_refusal(stored_database, words, reason)


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


REQUESTS = 12
ARRIVAL_S = 30.0  # until all spans must have come


@pytest.fixture
def router_url(tmp_path: Path) -> Iterator[str]:
    """A traced router; its spans are in spans.db."""
    server = word_server.StreamServer(("127.0.0.1", 0), word_server.StreamHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    instance = f"http://127.0.0.1:{server.server_address[1]}"
    with run_servers(build_receiver_command(tmp_path / "spans.db")) as (receiver,):
        sink = {env_names.TTFT_OTEL: "1", env_names.OTEL_EXPORTER_OTLP_ENDPOINT: receiver.url}
        with run_servers(build_router_command({"mono": [instance]}, sink)) as (router,):
            yield router.url
    server.shutdown()
    server.server_close()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_vllm_bench(router_url: str, tmp_path: Path) -> None:
    """Every request of a `vllm bench serve` is found, and its stages add up to its client's TTFT.

    The instance is a stand-in that streams words: the load generator and the router are what is tried.
    """
    named = {
        "backend": "openai-chat",
        "base-url": router_url,
        "endpoint": "/v1/chat/completions",
        "model": "tiny",
        "tokenizer": str(tiny_models.build_model(tiny_models.TEXT_RECIPE)),
        "dataset-name": "random",
        "random-input-len": 16,
        "random-output-len": 4,
        "num-prompts": REQUESTS,
        "max-concurrency": 3,
        "ready-check-timeout-sec": 0,
        "request-id-prefix": "joined-",
        "result-dir": tmp_path,
        "result-filename": "result.json",
    }
    words = [word for name, value in named.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", *words]
    subprocess.run(
        [*command, "--save-result", "--save-detailed", "--disable-tqdm"],
        check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TTFT_OTEL": "0"},
    )
    result = tmp_path / "result.json"
    asked = ("--join", str(result), "--join-prefix", "joined-")
    # The router's exporter sends within a second, and more on a busy machine.
    until_s = time.monotonic() + ARRIVAL_S
    while True:
        found = REPORT.read_json(tmp_path / "spans.db", *asked)
        if found.get("join", {}).get("joined") == REQUESTS or time.monotonic() > until_s:
            break
        time.sleep(0.5)
    assert found["join"] == {"in_file": REQUESTS, "joined": REQUESTS, "not_in_file": 0}
    ttfts = json.loads(result.read_text())["ttfts"]
    for each in found["requests"]:
        client_ms = 1000 * ttfts[int(each["request_id"].removeprefix("joined-"))]
        assert each["ttft_ms"] == pytest.approx(client_ms, abs=0.001)
        total_ms = sum(each["stages"].values()) + each["unattributed_ms"]
        assert total_ms == pytest.approx(client_ms, abs=0.001)
        assert each["stages"]["outside"] >= -0.5, "a client waits for at least what the router took"


NEEDED_REQUESTS = 56
MAX_RECORDED_BYTES = 150_000


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The three commands that the demo prints, in words, on a database that it wrote."""
    database = tmp_path_factory.mktemp("demo") / "spans.db"
    done = CliRunner().invoke(main, ["demo", "--recorded", "--db", str(database)])
    assert done.exit_code == 0, done.output
    return [shlex.split(line)[1:] for line in done.output.splitlines() if "--db" in line]


def test_recorded() -> None:
    """The file is small, and its requests end when asked; stages add up in each."""
    end_ns = time.time_ns()
    spans = serve.read_recorded(end_ns)
    trunks = [span for span in spans if span.is_ttft_span]

    assert serve.RECORDED.stat().st_size < MAX_RECORDED_BYTES
    assert max(span.end_ns for span in spans) == end_ns
    assert len({span.trace_id for span in trunks}) == NEEDED_REQUESTS
    for attributes in (span.attributes for span in trunks):
        parts = [us for name, us in attributes.items() if serve.keys.parse_stage_attribute(name)]
        assert sum(parts) == attributes[serve.keys.TOTAL_US]


def test_demo_commands(told: list[list[str]]) -> None:
    """The first command has all requests, the second explains the slowest, the third compares two halves."""

    def run(*words: str) -> str:
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, done.output
        return done.output

    report, explain, diff = told
    answer = run(*explain)
    assert f"{NEEDED_REQUESTS} requests" in run(*report)
    assert json.loads(run(*report, "--json"))["summary"]["closed"]
    # The stage that has its time, and who held it.
    assert explain[-1] in answer and "has 78%" in answer and "Held longest by" in answer
    assert re.search(r"A:\s+28 requests.*B: 28 requests", run(*diff), re.S)


def test_demo_page() -> None:
    """Without --db there is a page on loopback until Ctrl-C, and nothing is left."""
    words = (sys.executable, "-m", "ttft_otel.commands.main", "demo", "--recorded")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(5)]
        url = re.findall(r"http://127\.0\.0\.1:\d+", lines[-1])
        folder = Path(lines[1].split()[-1]).parent
        try:
            with urllib.request.urlopen(url[0], timeout=60) as answer:
                page = answer.read().decode()
            assert "demo-28" in page and folder.is_dir()
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert not folder.exists()


def test_demo_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without vLLM it says what to do; a file that is there is not touched."""
    (taken := tmp_path / "spans.db").write_bytes(b"mine")
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda _: None)

    refused = CliRunner().invoke(main, ["demo"])
    assert refused.exit_code == 2 and "`ttft-otel demo --recorded`" in refused.output
    monkeypatch.undo()
    assert CliRunner().invoke(main, ["demo", "--recorded", "--db", str(taken)]).exit_code == 2
    assert taken.read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (serve.MODEL, "vLLM downloads it, 1.5 GB, from Hugging Face unless"),
        ("m", "vLLM downloads it from Hugging Face unless"),
        ("/", ""),  # of a folder's model nothing is downloaded
    ],
)
def test_a_server_that_does_not_start(
    model: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it downloads is said before; the end of its log is shown, with what needs no network."""
    monkeypatch.setattr(serve.sys, "executable", str(fake := tmp_path / "python"))
    fake.write_text("#!/bin/sh\necho no such model: $4\nexit 3\n")
    fake.chmod(0o755)
    failed = CliRunner().invoke(main, ["demo", "--model", model, "--db", str(tmp_path / "a.db")])

    assert failed.exit_code == 1
    before, _, after = failed.output.partition("vLLM did not start")
    assert told in before and ("downloads" in before) is bool(told)
    assert f"no such model: {model}" in after
    shown = (before, after) if told else (after,)
    assert all("--model FOLDER" in text and "--recorded" in text for text in shown)
