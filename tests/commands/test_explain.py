# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel explain` as typed in a shell, over a store and a Tempo in which some waited for a place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from tests.explain.stored_records import (
    StoreCommand,
    build_noisy_record,
    build_spans,
    name_window,
    store_spans,
)
from tests.fake_tempo import FakeTempo
from ttft_otel.commands import command_options
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


def test_window(places: tuple[Path, FakeTempo]) -> None:
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


def test_from_tempo(places: tuple[Path, FakeTempo], monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_single(places: tuple[Path, FakeTempo]) -> None:
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
def test_remedies(places: tuple[Path, FakeTempo], words: list[str], reported: str) -> None:
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
