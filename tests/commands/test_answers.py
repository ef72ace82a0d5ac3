# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel explain` and `diff` as typed in a shell, over a store and a Tempo; `mcp` as a client starts it.

Some of explain's requests wait for a place; the second window of diff is slower.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import msgspec
import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from tests.explain.stored_records import (
    DOCS,
    StoreCommand,
    build_noisy_record,
    build_spans,
    name_window,
    store_spans,
)
from tests.fake_tempo import FakeTempo
from tests.report.sample_records import make_routed_records
from ttft_otel.commands import command_options, mcp_server
from ttft_otel.commands.report import report
from ttft_otel.exporter import span_batch
from ttft_otel.model.names import keys
from ttft_otel.model.record import Record, Server
from ttft_otel.report.tempo import tempo_source

EXPLAIN = StoreCommand("explain")
COUNT = 200
WAIT_US = 250_000
WINDOW = name_window(0, COUNT)


def make_record(number: int) -> Record:
    """One request; every 16th waits for a place. The last one failed."""
    wait_us = WAIT_US if number % 16 == 0 else 0
    record = build_noisy_record(number, 600 + number, wait_us)
    assert record.ttft is not None and record.server is not None
    queue = record.ttft.stages["prefill.queue"]
    reasons = {"in_step": queue - wait_us, "max_num_seqs": wait_us}
    attributes = {
        keys.name_reason_attribute("prefill.queue", reason): us
        for reason, us in reasons.items()
        if us
    }
    error = "timeout" if number == COUNT - 1 else ""
    return msgspec.structs.replace(
        record,
        ttft=msgspec.structs.replace(record.ttft, attributes=attributes, error=error),
        server=Server(record.server.name, record.server.end, 504 if error else 200),
    )


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, FakeTempo]]:
    """The same requests of two instances in a database, and in a Tempo; only chat-0 has late ones."""
    spans = []
    for instance in range(2):
        records = [make_record(number) for number in range(instance, COUNT, 2)]
        spans += build_spans(records, {"service.instance.id": f"chat-{instance}"})
    path = store_spans(tmp_path_factory.mktemp("explain") / "spans.db", spans)
    with FakeTempo() as tempo:
        tempo.add(spans)
        yield path, tempo


def test_explained_window(places: tuple[Path, FakeTempo]) -> None:
    """Late by an objective: the stage, its share, reason and instance; the JSON keeps to its schema."""
    words = ("--since", WINDOW, "--slo", "150")
    result = EXPLAIN.run(places[0], *words)
    assert result.exit_code == 0, result.output
    assert "13 of 199 requests were later than 150 ms" in result.output
    assert "prefill.queue on chat-0 has " in result.output and "--max-num-seqs" in result.output
    assert len(result.output.splitlines()) <= 7 and "more: --verbose" in result.output
    assert "Looked at setting_limit: " in EXPLAIN.run(places[0], *words, "--verbose").output
    reported = EXPLAIN.read_json(places[0], *words)
    assert reported["requests"] == {"window": 199, "late": 13, "typical": 94}
    # The one that failed has no TTFT, and is told.
    assert reported["without_token"]["requests"] == 1 and reported["without_token"]["left"] == 0
    assert "Not among them: 1 request ended without a first token" in result.output
    cause = reported["cause"]
    assert (cause["kind"], cause["setting"]) == ("setting_limit", "max_num_seqs")
    assert cause["remedy"]["price_kind"] == "qualitative" and cause["stage"] == "prefill.queue"
    queue = reported["stages"][0]
    assert queue["name"] == "prefill.queue"
    assert queue["late_ms"] - queue["typical_ms"] == pytest.approx(WAIT_US / 1000, rel=0.02)
    assert sum(stage["share"] for stage in reported["stages"]) == pytest.approx(1, abs=0.001)
    assert reported["reasons"]["max_num_seqs"] == pytest.approx(1, abs=0.02)
    assert reported["held"] is None  # these servers do not tell who held
    assert reported["slo"]["stages"][0]["name"] == "prefill.queue"
    assert reported["instances"][0]["name"] == "chat-0" and cause["stage_confidence"] == "high"


def test_slowest_hundredth(places: tuple[Path, FakeTempo]) -> None:
    """Without an objective the slowest are explained; `--last` and `--model` choose the window."""
    reported = EXPLAIN.read_json(places[0])
    assert reported["requests"]["late"] == 5 and reported["slo"] is None
    assert reported["cause"]["setting"] == "max_num_seqs"
    # Five late requests never make a cause certain.
    assert reported["cause"]["confidence"] != "high" != reported["cause"]["stage_confidence"]
    fewer = EXPLAIN.read_json(places[0], "--last", "100")
    assert fewer["requests"]["window"] == 99
    nobody = EXPLAIN.run(places[0], "--model", "other")
    assert nobody.exit_code == 1 and "0 requests with a first token" in nobody.output


def test_explain_from_tempo(
    places: tuple[Path, FakeTempo], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tempo gives the same answer, word by word, for a window and for a request."""
    database, tempo = places
    for words in (
        ["--since", WINDOW, "--slo", "150", "--json"],
        ["--trace", f"{17:032x}", "--since", WINDOW],
    ):
        stored = EXPLAIN.run(database, *words)
        tempo.asked.clear()
        searched = EXPLAIN.run_tempo(tempo, *words)
        assert searched.stdout == stored.stdout and stored.exit_code == 0, searched.output
        # Who is compared, who held them, and the replay of the remedy: each trace is fetched once.
        assert COUNT - 2 < tempo.count_fetched() == len(set(tempo.list_fetched())) <= COUNT
    # Counter-test: without what is kept they are fetched again.
    monkeypatch.setattr(tempo_source, "MAX_KEPT_BYTES", 0)
    tempo.asked.clear()
    EXPLAIN.run_tempo(tempo, "--since", WINDOW, "--slo", "150")
    assert tempo.count_fetched() > len(set(tempo.list_fetched()))


def test_explained_request(places: tuple[Path, FakeTempo]) -> None:
    """One request, by either ID: how it compares with its like, and why."""
    reported = EXPLAIN.read_json(places[0], "--request", "r16")
    assert reported["unusual"] and reported["requests"]["late"] == 1 and reported["rank"] > 0.9
    text = EXPLAIN.run(places[0], "--trace", f"{17:032X}").output
    assert "r16: first token after" in text and "max_num_seqs" in text
    assert any("r16: first token after" in each for each in reported["sentences"])
    usual = EXPLAIN.read_json(places[0], "--request", "r21")
    assert not usual["answered"] or (not usual["unusual"] and usual["cause"]["kind"] == "nothing")


@pytest.mark.parametrize(
    ("words", "reported"),
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
def test_explain_remedies(places: tuple[Path, FakeTempo], words: list[str], reported: str) -> None:
    """What cannot be explained is refused with what to do, in words and as JSON."""
    EXPLAIN.check_refusal(places[0], words, reported)


@pytest.mark.parametrize("words", [["--slo", "150"], ["--since", "1999-01-01..1999-01-02"]])
def test_watch(
    places: tuple[Path, FakeTempo], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers again after so many seconds, also where there is nothing yet, until Ctrl-C."""
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(command_options, "time", SimpleNamespace(sleep=wait))
    result = EXPLAIN.run(places[0], *words, "--watch", "5")
    assert waits == [5, 5] and result.exit_code == 1
    said = "13 of 199 requests were later" if "--slo" in words else "0 requests with a first token"
    assert result.output.count(said) == 2


DIFF = StoreCommand("diff")
WINDOW_S = 100
WINDOWS = {version: name_window((version - 1) * WINDOW_S, version * WINDOW_S) for version in (1, 2)}


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with these requests."""
    return store_spans(tmp_path_factory.mktemp("diff") / "spans.db", make_version_spans())


def make_version_spans() -> list[ReadableSpan]:
    """A hundred requests of version 1, then a hundred of version 2 that wait 50 ms longer, a second apart."""
    spans = []
    for version in (1, 2):
        wait_us = 50_000 if version == 2 else 0
        records = [
            build_noisy_record(number, 200, wait_us)
            for number in range((version - 1) * WINDOW_S, version * WINDOW_S)
        ]
        spans += build_spans(records, {"service.version": str(version)})
    return spans


def test_diff_from_tempo(versions: Path) -> None:
    """Tempo gives the same answer; a trace that is in both windows is fetched once."""
    both = name_window(0, 2 * WINDOW_S)
    with FakeTempo() as tempo:
        tempo.add(make_version_spans())
        for words in (
            ["--a", WINDOWS[1], "--b", both],
            ["--by", "service.version", "--a", "1", "--b", "2", "--since", both],
        ):
            tempo.asked.clear()
            assert DIFF.run_tempo(tempo, *words).stdout == DIFF.run(versions, *words).stdout
            assert tempo.count_fetched() == len(set(tempo.list_fetched())) == 2 * WINDOW_S


@pytest.mark.parametrize("by_attribute", [False, True])
def test_slower(versions: Path, by_attribute: bool) -> None:
    """The stage is named with its size, by time and by version; the JSON keeps to its schema."""
    windows = ["--a", WINDOWS[1], "--b", WINDOWS[2]]
    words = ["--by", "service.version", "--a", "1", "--b", "2"] if by_attribute else windows
    result = DIFF.run(versions, *words)
    assert result.exit_code == 0, result.output
    assert "prefill.queue of like requests" in result.output and "100 → 100" in result.output
    reported = DIFF.read_json(versions, *words)
    # What divides the sides is no mix that changed between them.
    assert reported["cause"]["kind"] != "mix_change", reported["cause"]
    assert reported["named"] == ["prefill.queue"] and reported["requests"] == {"a": 100, "b": 100}
    (queue,) = (each for each in reported["stages"] if each["name"] == "prefill.queue")
    assert queue["change_ms"] == pytest.approx(50, rel=0.05)
    parts = sum(each["change_ms"] for each in reported["stages"]) + reported["mix"]["change_ms"]
    assert parts == pytest.approx(reported["ttft"]["mean"]["change_ms"], abs=0.01)


def test_nothing(versions: Path) -> None:
    """A window compared with itself: said in one sentence."""
    result = DIFF.run(versions, "--a", WINDOWS[1], "--b", WINDOWS[1])
    assert result.exit_code == 0 and "Nothing changed" in result.output


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["--a", "1999-01-01..1999-01-02", "--b", "1h.."], "window A has 0 requests"),
        (["--a", "nonsense", "--b", "1h.."], "'nonsense' is not a time"),
        (["--a", "2h..1h", "--b", "1h..", "--since", "1d"], "--since goes with --by"),
        (["--by", "service.version", "--a", "7", "--b", "8"], "service.version is one of: 1, 2"),
        (["--by", "no.such", "--a", "7", "--b", "8"], "no stored request has the attribute"),
        (["--a", "2h..1h"], "Missing option '--b'"),
    ],
)
def test_diff_remedies(versions: Path, words: list[str], reported: str) -> None:
    """What cannot be compared is refused with what to do, in words and as JSON."""
    DIFF.check_refusal(versions, words, reported)


def make_given_up(number: int, wait_us: int) -> Record:
    """A request whose client left while it waited."""
    record = build_noisy_record(number, 200, wait_us)
    assert record.ttft is not None and record.server is not None
    died = {keys.DIED_IN: "prefill.queue"}
    ttft = msgspec.structs.replace(
        record.ttft, error=keys.ERROR_DISCONNECTED, attributes={**record.ttft.attributes, **died}
    )
    return msgspec.structs.replace(record, ttft=ttft)


@pytest.mark.parametrize("by_attribute", [False, True])
def test_given_up(tmp_path: Path, by_attribute: bool) -> None:
    """Clients that gave up have no TTFT: what is left of B looks as fast as A, and they are told."""
    spans = []
    for version in (1, 2):
        numbers = range((version - 1) * WINDOW_S, version * WINDOW_S)
        records = [
            make_given_up(each, 10_000_000)
            if version == 2 and each % 3 == 0
            else build_noisy_record(each, 200, 0)
            for each in numbers
        ]
        spans += build_spans(records, {"service.version": str(version)})
    versions = store_spans(tmp_path / "spans.db", spans)
    windows = ["--a", WINDOWS[1], "--b", WINDOWS[2]]
    words = ["--by", "service.version", "--a", "1", "--b", "2"] if by_attribute else windows
    text = DIFF.run(versions, *words).output
    reported = DIFF.read_json(versions, *words)

    assert "Not compared: in B 33 requests ended without a first token" in text
    assert "(given up by their clients: 33; most in prefill.queue: 33)" in text
    lost = reported["without_token"]
    assert lost["a"]["requests"] == 0 and lost["b"]["died_in"] == {"prefill.queue": 33}
    assert lost["b"]["median_ms"] > 10_000

    # Nothing but those: that is why there is nothing to compare.
    only = DIFF.run(versions, "--a", WINDOWS[1], "--b", name_window(WINDOW_S + 2, WINDOW_S + 3))
    assert only.exit_code == 1 and "In B 1 request ended" in only.output


def test_overlap(versions: Path) -> None:
    """A window that contains the other one: told, because half of A is B."""
    reported = DIFF.run(versions, "--a", name_window(0, 2 * WINDOW_S), "--b", WINDOWS[2]).output
    assert "100 requests are in both A and B" in reported
    assert "are in both" not in DIFF.run(versions, "--a", WINDOWS[1], "--b", WINDOWS[2]).output


@pytest.mark.parametrize(
    ("conditions", "outcome"),
    [
        (["ttft.mean > +20ms"], "worse"),
        (["ttft.mean > +200%", "prefill.queue.mean > +100ms"], "as asked"),
        (["ttft.p99 > +10%"], "cannot tell"),
        (["ttft.p99 > +10%", "ttft.p50 > +1ms"], "worse"),
    ],
)
def test_gate(versions: Path, tmp_path: Path, conditions: list[str], outcome: str) -> None:
    """The second window waits 50 ms longer: the exit code says whether that was asked for."""
    words = ["--a", WINDOWS[1], "--b", WINDOWS[2], "--junit", str(tmp_path / "gate.xml")]
    words += [word for each in conditions for word in ("--fail-if", each)]
    exit_code = {"as asked": 0, "worse": 1, "cannot tell": 2}[outcome]
    result = DIFF.run(versions, *words)
    assert result.exit_code == exit_code and outcome.upper() in result.output, result.output
    assert f'tests="{len(conditions)}"' in (tmp_path / "gate.xml").read_text("utf-8")


def test_gate_forms(versions: Path) -> None:
    """The verdict as JSON and as Markdown."""
    words = ["--a", WINDOWS[1], "--b", WINDOWS[2], "--fail-if", "ttft.mean > +20ms"]
    assert DIFF.read_json(versions, *words)["gate"]["outcome"] == "worse"
    table = DIFF.run(versions, *words, "--markdown")
    assert table.exit_code == 1 and "gate: worse" in table.output
    assert "- +50." in table.output


def test_gate_without_answer(versions: Path, tmp_path: Path) -> None:
    """What cannot be compared has exit code 2, and a report in each form that was asked for."""
    gate = ["--a", "1999-01-01..1999-01-02", "--b", "1h..", "--fail-if", "ttft.p95 > +10%"]
    result = DIFF.run(versions, *gate, "--junit", str(tmp_path / "gate.xml"), "--markdown")
    assert result.exit_code == 2 and "window A has 0 requests" in result.output
    assert 'errors="1"' in (tmp_path / "gate.xml").read_text("utf-8")
    assert "gate: cannot tell" in result.stdout
    refused = DIFF.run(versions, *gate, "--json")
    assert refused.exit_code == 2 and json.loads(refused.stdout)["answered"] is False
    assert "is no condition" in DIFF.run(versions, *gate, "--fail-if", "ttft.p95").output


def test_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide's commands, as they stand there: equal releases pass, in a store where B is as A."""
    spans = []
    for side, version in enumerate(("1.4", "1.5")):
        numbers = range(side * 200, side * 200 + 200)
        records = [build_noisy_record(number, 200, 0) for number in numbers]
        spans += build_spans(records, {"service.version": version})
    versions = store_spans(tmp_path / "spans.db", spans)
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "guides" / "release-gate.md").read_text("utf-8")
    commands = [shlex.split(line) for line in page.splitlines() if line.startswith("ttft-otel ")]
    assert len(commands) == 2
    for program, name, *words in commands:
        assert (program, name) == ("ttft-otel", "diff")
        result = DIFF.run(versions, *words)
        assert result.exit_code == 0 and "as asked" in result.output.lower(), result.output
    assert 'tests="2"' in (tmp_path / "gate.xml").read_text("utf-8")


def test_instances_behind_router(tmp_path: Path) -> None:
    """Each server has the router above it: requests are told apart by the instance that had them."""
    spans = []
    for number in range(90):
        start_ns = 1_790_000_000 * 10**9 + number * 10**9
        # Every third goes to the slower one; two of them to both.
        instance = "vllm-1" if number % 3 == 0 else "vllm-0"
        factor = 3.0 if instance == "vllm-1" else 1.0
        noise = 1 + number % 7 / 50
        for record in make_routed_records(f"r{number}", factor * noise, start_ns=start_ns):
            place = {"router": "router-1", "encode": "encode-1"}.get(record.role, instance)
            if number < 2 and record.role == "encode":
                place = "vllm-1" if instance == "vllm-0" else "vllm-0"
            resource = {"service.name": record.service, "service.instance.id": place}
            spans += span_batch.build_spans(record, Resource.create(resource))
    versions = store_spans(tmp_path / "spans.db", spans)
    words = ["--by", "service.instance.id", "--a", "vllm-0", "--b", "vllm-1"]
    result = DIFF.run(versions, *words)
    assert "2 requests have both values of service.instance.id" in result.stderr
    reported = DIFF.read_json(versions, *words)
    assert reported["requests"] == {"a": 59, "b": 29} and reported["shared"] == 0
    assert reported["ttft"]["mean"]["b_ms"] > 2 * reported["ttft"]["mean"]["a_ms"]
    typo = DIFF.run(versions, "--by", "service.instance.id", "--a", "x", "--b", "y")
    assert "is one of: encode-1, router-1, vllm-0, vllm-1" in typo.output


ROOT = Path(__file__).parents[2]


def start_server(database: Path, folder: Path) -> Client:
    """A client of the command, which is started in another folder than the checkout."""
    arguments = ["-m", "ttft_otel.commands.main", "mcp", "--db", str(database)]
    environment = {"PYTHONPATH": str(ROOT)}
    return Client(
        StdioServerParameters(command=sys.executable, args=arguments, env=environment, cwd=folder)
    )


async def test_mcp(places: tuple[Path, FakeTempo], tmp_path: Path) -> None:
    """Each tool is read-only, and its answer is the command's JSON, which keeps to its schema."""
    half = COUNT // 2
    calls: dict[str, dict[str, Any]] = {
        "explain": {"since": WINDOW, "slo": 200.0},
        "report": {"since": WINDOW},
        "diff": {"a": name_window(0, half), "b": name_window(half, COUNT)},
        "whatif": {"since": WINDOW, "max-num-seqs": 8},
    }
    async with start_server(places[0], tmp_path) as client:
        tools = (await client.list_tools()).tools
        answers = {name: await client.call_tool(name, values) for name, values in calls.items()}

    assert {tool.name for tool in tools} == set(calls)
    for tool in tools:
        assert tool.annotations is not None and tool.annotations.read_only_hint
        jsonschema.validate(calls[tool.name], tool.input_schema)
        assert (
            not {"db", "tempo", "json", "perfetto", "junit"}
            & tool.input_schema["properties"].keys()
        )
    for name, answer in answers.items():
        assert not answer.is_error, answer.content
        found = json.loads(answer.content[0].text)
        schema = json.loads((DOCS / f"{name}.schema.json").read_text("utf-8"))
        jsonschema.validate(found, schema)
    explained = json.loads(answers["explain"].content[0].text)
    assert explained["cause"]["stage"] == "prefill.queue"
    assert len(json.loads(answers["report"].content[0].text)["requests"]) == 20


@pytest.mark.full
async def test_mcp_refusals(places: tuple[Path, FakeTempo], tmp_path: Path) -> None:
    """What is not offered, or cannot be answered, is an error in words; the server goes on."""
    calls: list[tuple[str, dict[str, Any], str]] = [
        ("serve", {}, "there is no tool 'serve'"),
        ("explain", {"db": "/etc/passwd"}, "explain has no db"),
        ("explain", {"since": "--help"}, "--help"),
        ("explain", {"last": 0}, "0 is not in the range"),
        ("diff", {"a": "1h.."}, "Missing option '--b'"),
        ("report", {"last": 2000}, "ask for fewer requests"),
    ]
    async with start_server(places[0], tmp_path) as client:
        for name, values, expected in calls:
            answer = await client.call_tool(name, values)
            assert expected in answer.content[0].text, (name, values)
            assert answer.is_error == ("answered" not in answer.content[0].text)
        assert not (await client.call_tool("report", {"last": 1})).is_error


def test_values_are_no_flags() -> None:
    """A value that begins with a dash stays the value of its flag."""
    commands = {"report": report}
    assert mcp_server.list_arguments(commands, "report", {"request": "--perfetto=x"}) == [
        *("report", "--json", "--request=--perfetto=x"),
    ]
