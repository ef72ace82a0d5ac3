# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel whatif` as typed in a shell, over a store with a window that vLLM's Scheduler has served."""

from __future__ import annotations

from pathlib import Path
from time import monotonic_ns, time_ns
from types import SimpleNamespace
from typing import Any

import pytest

from tests.explain.stored_records import (
    BEGIN_S,
    StoreCommand,
    draw_busy_arrivals,
    name_window,
    store_served_window,
)
from ttft_otel.commands import bench
from ttft_otel.explain.whatif.engine_model import EngineLimits
from ttft_otel.report.report_types import SourceChoice

LIMITS = EngineLimits(4, 512)
WHATIF = StoreCommand("whatif", "--repetitions", "2", "--since", name_window(-1, 600))
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A window of one server whose spans tell its settings."""
    path = tmp_path_factory.mktemp("whatif") / "spans.db"
    return store_served_window(path, draw_busy_arrivals(), LIMITS)


def test_json(database: Path) -> None:
    """Figures keep to the schema; the error of the unchanged window is small and told."""
    reported = WHATIF.read_json(database, "--rate", "1.2x", "--cache-hit", "+10%")

    assert reported["requests"] == 160 and reported["instances"] == 1
    assert reported["change"] == {"rate": 1.2, "cache_hit": 0.1}
    assert all(abs(error) < 0.05 for error in reported["replay_error"].values())
    p95 = reported["ttft"]["p95"]
    assert p95["replayed_ms"] == pytest.approx(p95["recorded_ms"], rel=0.05)
    assert p95["low_ms"] <= p95["predicted_ms"] <= p95["high_ms"]


def test_text(database: Path) -> None:
    """A sentence with the figures, the error of the unchanged window, the stages, what is assumed.

    Without an option it says how well the model knows the window.
    """
    result = WHATIF.run(database, "--instances", "+1", "--max-num-seqs", "8")
    assert result.exit_code == 0, result.output

    assert "+1 instances, max-num-seqs 8: TTFT p50" in result.output
    assert "The same model on the 160 recorded requests, unchanged: p50" in result.output
    assert "prefill.queue" in result.output and "`round_robin`" in result.output
    assert "nothing changed: TTFT" in WHATIF.run(database).output


def test_autotune(database: Path) -> None:
    """The plan, its flags and in how many replays it holds."""
    reported = WHATIF.read_json(database, "--autotune", "ttft_p95=120", "--rate", "1.1x")
    plan = reported["autotune"]
    assert plan["held"] >= 0.9 * plan["replays"] and reported["change"]["rate"] == 1.1
    assert reported["ttft"]["p95"]["predicted_ms"] <= 120


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["--rate", "4x"], "more requests arrive than are served"),
        (["--rate", "fast"], "'fast' is not a factor"),
        (["--autotune", "p99=500"], "write ttft_p99=500,tpot_p99=50"),
        (["--autotune", "ttft_p99=500", "--instances", "+1"], "leave them out"),
        (["--since", "1999-01-01..1999-01-02"], "50 are needed"),
        (["--model", "other"], "50 are needed"),
        (["--since", "nonsense"], "is not a time"),
    ],
)
def test_remedies(database: Path, words: list[str], reported: str) -> None:
    """What cannot be told is refused with the reason, in words and as JSON."""
    WHATIF.check_refusal(database, words, reported)


def ask_for_limit(
    source: SourceChoice, monkeypatch: pytest.MonkeyPatch, targets: str, first_s: float = -1
) -> str | None:
    """What `bench` adds of whatif, after a round at a rate that was the recorded window."""
    offset_ns = time_ns() - monotonic_ns()
    start_ns, end_ns = (round((BEGIN_S + each) * 1e9) - offset_ns for each in (first_s, 600))
    monkeypatch.setattr(bench, "SPANS_TIMEOUT_S", 0)
    monkeypatch.setattr(bench, "WHATIF_REPETITIONS", 2)
    results = [SimpleNamespace(error="")] * 160
    runs = [SimpleNamespace(results=results, start_ns=start_ns, end_ns=end_ns)]
    side: Any = SimpleNamespace(runs=runs, rate=4.0, plan=SimpleNamespace(rate=4.0))
    return bench._ask_whatif(source, targets, side)


@pytest.mark.full  # searches twice
def test_found_limit(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After bench --find: what would hold the condition at 1.5 times the rate that holds, or why not."""
    source = SourceChoice(db=database)

    said = ask_for_limit(source, monkeypatch, "ttft_p95=100000")
    assert said is not None
    assert said.startswith("At 1.5 times 4 requests/s, by whatif: ")
    assert ask_for_limit(source, monkeypatch, "ttft_p95=0.001") != said
    assert ask_for_limit(SourceChoice(), monkeypatch, "ttft_p95=500") is None


@pytest.mark.parametrize(
    ("first_s", "name"),
    (
        (599, "spans.db"),  # nothing was recorded
        (-1, "absent.db"),
    ),
)
def test_found_limit_alone(
    database: Path, monkeypatch: pytest.MonkeyPatch, first_s: float, name: str
) -> None:
    """What was found is not lost where whatif cannot tell: a sentence says why."""
    source = SourceChoice(db=database.with_name(name))

    said = ask_for_limit(source, monkeypatch, "ttft_p95=500", first_s)

    assert said is not None and said.startswith("whatif cannot tell: ")
