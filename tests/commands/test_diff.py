# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel diff` as typed in a shell, over a store with two windows of which the second is slower."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from tests.explain.shell_commands import StoreCommand
from tests.explain.stored_records import build_noisy_record, build_spans, name_window, store_spans
from ttft_otel.model.names import keys
from ttft_otel.model.record import Record

DIFF = StoreCommand("diff")
WINDOW_S = 100
WINDOWS = {version: name_window((version - 1) * WINDOW_S, version * WINDOW_S) for version in (1, 2)}


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hundred requests of version 1, then a hundred of version 2 that wait 50 ms longer, a second apart."""
    spans = []
    for version in (1, 2):
        wait_us = 50_000 if version == 2 else 0
        records = [
            build_noisy_record(number, 200, wait_us)
            for number in range((version - 1) * WINDOW_S, version * WINDOW_S)
        ]
        spans += build_spans(records, {"service.version": str(version)})
    return store_spans(tmp_path_factory.mktemp("diff") / "spans.db", spans)


@pytest.mark.parametrize("by_attribute", [False, True])
def test_slower(database: Path, by_attribute: bool) -> None:
    """The stage is named with its size, by time and by version; the JSON keeps to its schema."""
    windows = ["--a", WINDOWS[1], "--b", WINDOWS[2]]
    words = ["--by", "service.version", "--a", "1", "--b", "2"] if by_attribute else windows
    result = DIFF.run(database, *words)
    assert result.exit_code == 0, result.output
    assert "prefill.queue of like requests" in result.output and "100 → 100" in result.output
    reported = DIFF.read_json(database, *words)
    assert reported["named"] == ["prefill.queue"] and reported["requests"] == {"a": 100, "b": 100}
    (queue,) = (each for each in reported["stages"] if each["name"] == "prefill.queue")
    assert queue["change_ms"] == pytest.approx(50, rel=0.05)
    parts = sum(each["change_ms"] for each in reported["stages"]) + reported["mix"]["change_ms"]
    assert parts == pytest.approx(reported["ttft"]["mean"]["change_ms"], abs=0.01)


def test_nothing(database: Path) -> None:
    """A window compared with itself: said in one sentence."""
    result = DIFF.run(database, "--a", WINDOWS[1], "--b", WINDOWS[1])
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
def test_remedies(database: Path, words: list[str], reported: str) -> None:
    """What cannot be compared is refused with what to do, in words and as JSON."""
    DIFF.check_refusal(database, words, reported)


def test_without_numpy(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pip command is named, as for every subcommand."""
    loaded = ("ttft_otel.explain", "ttft_otel.commands.diff")
    for module in [name for name in sys.modules if name.startswith(loaded)]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "numpy", None)
    result = DIFF.run(database, "--a", "2h..1h", "--b", "1h..")
    assert result.exit_code != 0 and "pip install 'ttft-otel[explain]'" in result.output


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
    database = store_spans(tmp_path / "spans.db", spans)
    windows = ["--a", WINDOWS[1], "--b", WINDOWS[2]]
    words = ["--by", "service.version", "--a", "1", "--b", "2"] if by_attribute else windows
    text = DIFF.run(database, *words).output
    reported = DIFF.read_json(database, *words)

    assert "Not compared: in B 33 requests ended without a first token" in text
    assert "(given up by their clients: 33; most in prefill.queue: 33)" in text
    lost = reported["without_token"]
    assert lost["a"]["requests"] == 0 and lost["b"]["died_in"] == {"prefill.queue": 33}
    assert lost["b"]["median_ms"] > 10_000

    # Nothing but those: that is why there is nothing to compare.
    only = DIFF.run(database, "--a", WINDOWS[1], "--b", name_window(WINDOW_S + 2, WINDOW_S + 3))
    assert only.exit_code == 1 and "In B 1 request ended" in only.output


def test_overlap(database: Path) -> None:
    """A window that contains the other one: told, because half of A is B."""
    reported = DIFF.run(database, "--a", name_window(0, 2 * WINDOW_S), "--b", WINDOWS[2]).output
    assert "100 requests are in both A and B" in reported
    assert "are in both" not in DIFF.run(database, "--a", WINDOWS[1], "--b", WINDOWS[2]).output
