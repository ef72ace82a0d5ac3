# SPDX-License-Identifier: Apache-2.0
"""What answers and what-if are measured by: truth, load and judgements; a small part is answered right."""

from __future__ import annotations

import ast
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import whatif, whatif_known
from benchmarks.answers.__main__ import (
    DEVELOPMENT,
    HELD_OUT,
    QUESTIONS,
    build_figures,
    choose_windows,
    list_misses,
    list_table,
)
from benchmarks.answers.answer_scores import (
    CLAIMS,
    EFFECT,
    PARTLY,
    RIGHT,
    WRONG,
    JudgedAnswer,
    judge_explanation,
    judge_window,
    measure_effect,
    serve_hour,
)
from benchmarks.answers.known_engine import pass_stops
from benchmarks.answers.known_windows import NOTHING, KnownWindow, Truth, list_windows
from benchmarks.whatif_changes import Outcome
from benchmarks.whatif_known import Judged
from benchmarks.whatif_servers import BLOCK_TOKENS, build_request, plan_load
from ttft_otel.explain.explain import cause_kinds
from ttft_otel.explain.whatif.window_check import PlannedChange


def find_windows(*names: str) -> list[KnownWindow]:
    """The first window of each name."""
    return [choose_windows([name])[0] for name in names]


def test_windows_are_well_formed() -> None:
    """Each has a name of its own in its class, and kinds that the product knows; seeds are apart."""
    windows = list_windows()
    assert len(windows) >= 60
    assert len({(each.group, each.name) for each in windows}) == len(windows)
    known = {value for value in vars(cause_kinds).values() if isinstance(value, str)}
    for each in windows:
        assert {*each.truth.kinds, *each.truth.change} <= known, each.name
    assert not {*DEVELOPMENT} & {*HELD_OUT}


@pytest.mark.parametrize(
    "window",
    find_windows("twice", "KV blocks, long prompts", "two of three encoders gone"),
    ids=lambda each: each.name,
)
def test_stages_add_up(window: KnownWindow) -> None:
    """The stages of each server fill its time to first token, and those of the router the whole."""
    visits = serve_hour(window, window.bad, 1, 1)
    for visit in visits:
        assert all(us >= 0 for leg in visit.legs for us in leg.stages.values())
        assert all(
            leg.unattributed < 500
            for leg in visit.legs
            if not leg.attributes.get("ttft.preemptions")
        )
        if visit.router:
            last = visit.legs[-1]
            assert visit.ask.at + visit.ttft >= last.start + last.ttft
    assert [each.ttft for each in serve_hour(window, window.bad, 1, 1)] == [
        each.ttft for each in visits
    ]


def list_harmful() -> list[KnownWindow]:
    """The windows that have a cause."""
    return [each for each in list_windows() if not {*NOTHING} & {*each.truth.kinds}]


@pytest.mark.full
@pytest.mark.parametrize("window", list_harmful(), ids=lambda each: f"{each.group}: {each.name}")
def test_all_effects(window: KnownWindow) -> None:
    """Without its cause no window is as late."""
    assert measure_effect(window, 1) >= EFFECT


def test_effects() -> None:
    """The same of a few of them."""
    for window in find_windows("twice", "restart"):
        assert measure_effect(window, 1) >= EFFECT, window.name


def test_a_part_is_answered(tmp_path: Path) -> None:
    """What was right once stays so."""
    (window,) = find_windows("twice")
    found = judge_window(window, DEVELOPMENT[0], tmp_path, ["explain"])
    assert [each.verdict for each in found] == [RIGHT], found


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_all_is_answered(tmp_path: Path) -> None:
    """The whole suite holds its goals, of a seed that the answers were developed with."""
    found = [
        each
        for window in list_windows()
        for each in judge_window(window, DEVELOPMENT[-1], tmp_path, QUESTIONS)
    ]
    missed = [name for name, figure in build_figures(found).items() if figure.get("met") is False]
    assert not missed, list_misses(found)


@pytest.mark.parametrize(
    ("module", "foreign"),
    [
        ("known_engine", "ttft_otel"),
        ("known_fleet", "ttft_otel"),
        ("known_windows", "ttft_otel"),
        ("window_spans", "ttft_otel.explain"),
    ],
)
def test_truth_is_independent(module: str, foreign: str) -> None:
    """What makes the windows imports nothing of what is judged, nor of what-if's model."""
    tree = ast.parse(Path(f"benchmarks/answers/{module}.py").read_text(encoding="utf-8"))
    names = [
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or "", *(each.name for each in node.names)]
    ]
    assert names and not [name for name in names if name.startswith(foreign)]


def test_stops() -> None:
    """Work goes on after a stop where it was; a stop that is over, or not begun, does not matter."""
    assert pass_stops(0, 10, [(5, 25)]) == 30
    assert pass_stops(6, 10, [(5, 25)]) == 35
    assert pass_stops(30, 10, [(5, 25), (40, 50)]) == 40


@pytest.mark.parametrize(
    ("kind", "subject", "confidence", "settings", "verdict"),
    [
        ("slow_instance", "vllm-1", "high", [], RIGHT),
        ("slow_instance", "vllm-0", "high", [], WRONG),
        ("slow_instance", "vllm-1", "high", ["--max-num-seqs"], CLAIMS),
        ("not_known", "", "low", [], PARTLY),
        ("own_size", "", "low", [], PARTLY),
        ("own_size", "", "medium", [], WRONG),
        ("nothing", "", "medium", [], WRONG),
    ],
)
def test_verdicts(
    kind: str, subject: str, confidence: str, settings: list[str], verdict: str
) -> None:
    """Kind and subject decide; what must not be advised is a claim."""
    truth = Truth(("slow_instance",), ("vllm-1",), ("prefill.compute",), ())
    cause = {
        "kind": kind,
        "subject": subject,
        "confidence": confidence,
        "stage": "mono.prefill.compute",
        "sentence": "",
        "remedy": {"settings": settings},
    }
    assert judge_explanation({"answered": True, "cause": cause}, truth)[0] == verdict
    quiet = judge_explanation({"answered": True, "cause": cause}, Truth(NOTHING))[0]
    assert quiet == CLAIMS


def test_answer_figures() -> None:
    """Shares by question; the table has a line for each class, and misses are listed, the worst first."""
    verdicts = [
        JudgedAnswer("explain", "a", f"w{number}", 1, verdict, "said", "true")
        for number, verdict in enumerate([RIGHT, RIGHT, PARTLY, WRONG])
    ]
    figures = build_figures(verdicts)
    assert figures["explain_right"]["value"] == 0.5 and not figures["explain_right"]["met"]
    assert figures["explain_false"]["value"] == 0.25
    assert "| explain | a | 2 | 1 | 1 | 0 |" in list_table(verdicts)
    assert [line.split(",")[0] for line in list_misses(verdicts)] == ["- wrong", "- partly"]


def make_outcome(predicted: list[float], repeated: float = 1.0) -> Outcome:
    """repeated: the unchanged window once more, relative to what it was before."""
    return Outcome(
        *("rate", [100.0, 300.0], predicted, [[0, 1], [0, 1]], [0.0, 0.0]),
        measured=[150.0, 600.0],
        repeated=[100 * repeated, 300 * repeated],
    )


def test_whatif_figures() -> None:
    """The mean error over p50 and p95 decides; a wrong prediction misses the goal."""
    right = whatif.build_figures([make_outcome([150.0, 660.0])])
    wrong = whatif.build_figures([make_outcome([110.0, 400.0])])

    assert right["mean_error"]["value"] == 0.05 and right["mean_error"]["met"]
    assert right["mean_error_of_no_change"]["value"] == 0.417
    assert not wrong["mean_error"]["met"]


def test_drift() -> None:
    """A machine that was another one afterwards does not judge, whichever way it went."""
    wrong = [110.0, 400.0]
    assert whatif.build_figures([make_outcome(wrong, 0.95)])["mean_error"]["met"] is False
    for factor in (0.8, 1.25):
        figures = whatif.build_figures([make_outcome(wrong, factor)])
        assert figures["judged"]["value"] == 0 and "mean_error" not in figures
        both = whatif.build_figures([make_outcome(wrong, factor), make_outcome([150.0, 660.0])])
        assert both["judged"]["value"] == 1 and both["mean_error"]["value"] == 0.05


def test_cached_prompts() -> None:
    """Prompts share whole blocks of their beginning, as much as is asked for; the rest is their own."""
    planned = plan_load(200, 80)
    prompts = [
        build_request(each, random.Random(number), 0.4).extra["prompt"]
        for number, each in enumerate(planned)
    ]
    longest = max(prompts, key=len)
    shared = [
        next((at for at, (a, b) in enumerate(zip(each, longest, strict=False)) if a != b), 0)
        // BLOCK_TOKENS
        * BLOCK_TOKENS
        for each in prompts
        if each is not longest
    ]

    assert [len(each) for each in prompts] == [each.tokens for each in planned]
    assert 0.36 < sum(shared) / sum(len(each) for each in prompts if each is not longest) < 0.44


def test_load() -> None:
    """Every run has the same arrivals and lengths; prompts have one to four chunks."""
    planned = plan_load(200, 80)

    assert planned == plan_load(200, 80)
    assert {-(-each.tokens // 512) for each in planned} == {1, 2, 3, 4}
    assert all(a.at_s <= b.at_s for a, b in zip(planned, planned[1:], strict=False))


@pytest.mark.parametrize(
    ("missed", "changed"),
    [
        ("", {}),
        ("p95_error", {"errors": [0.0, 0.08, 0.0]}),
        ("inside", {"inside": [True, False, True]}),
        ("silent_misses", {"errors": [0.0, 0.0, 0.4]}),
        ("token_time_error", {"token_errors": [0.0, 0.2, 0.0]}),
    ],
)
def test_known_figures(missed: str, changed: dict[str, Any]) -> None:
    """Against a known engine each goal is missed by answers that are wrong in its way alone."""
    right = Judged("rate", errors=[0.0] * 3, inside=[True] * 3, token_errors=[0.0] * 3)
    figures = whatif_known.build_figures([replace(right, **changed)])
    assert [name for name, each in figures.items() if not each["met"]] == [missed] * bool(missed)


def test_known_window() -> None:
    """The engine's own account of a window adds up, and an unchanged one is predicted as it was."""
    window = replace(whatif_known.WINDOWS["usual"], count=120, changes=(PlannedChange(),))
    (judged,) = whatif_known.judge_window("usual", window, 3, 4)
    assert not judged.refusal and max(map(abs, judged.errors)) < 0.15
