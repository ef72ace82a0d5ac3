# SPDX-License-Identifier: Apache-2.0
"""Ask the commands about a known window, and judge their JSON: right, partly, wrong, or claims too much."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy
from click.testing import CliRunner

from benchmarks.answers.known_engine import Chance
from benchmarks.answers.known_fleet import Visit, serve_asks
from benchmarks.answers.known_windows import NOTHING, Hour, KnownWindow, Truth
from benchmarks.answers.window_spans import name_times, store_visits
from ttft_otel.commands.main import main
from ttft_otel.model.stages import strip_leg

RIGHT, PARTLY, WRONG, CLAIMS = "right", "partly", "wrong", "claims too much"
VERDICTS: Final = (RIGHT, PARTLY, WRONG, CLAIMS)
SLO_ABOVE: Final = 1.2  # of the good hour's p99: what a service would promise
EFFECT: Final = 1.3  # of the slowest hundredth with the cause to without, at least


@dataclass(frozen=True, slots=True)
class JudgedAnswer:
    """One answer, judged."""

    question: str  #: explain, slo or diff
    group: str
    window: str
    seed: int
    verdict: str
    said: str
    true: str


@dataclass(slots=True)
class StoredWindow:
    """A window in a store, and how it was served."""

    window: KnownWindow
    path: Path
    bad: list[Visit]
    good: list[Visit]

    @property
    def slo_ms(self) -> float:
        """An objective that the good hour meets; of a healthy window, one that a few requests miss."""
        if self.window.truth.kinds == NOTHING:
            return find_late(self.bad, 0.975)
        return SLO_ABOVE * find_late(self.good, 0.99)

    def ask(self, *arguments: str) -> dict[str, Any]:
        """The JSON answer of a command; a refusal has `answered` false."""
        result = CliRunner().invoke(main, [*arguments, "--db", str(self.path), "--json"])
        try:
            found: dict[str, Any] = json.loads(result.stdout)
        except ValueError:
            raise RuntimeError(f"{arguments}: {result.output}") from result.exception
        return found


def draw_chance(window: KnownWindow, seed: int, which: int) -> Chance:
    """The chance of one of a window's hours."""
    return numpy.random.default_rng(
        [zlib.crc32(f"{window.group} {window.name}".encode()), seed, which]
    )


def serve_hour(window: KnownWindow, hour: Hour, seed: int, which: int) -> list[Visit]:
    """The visits of an hour; the same seed and `which` have the same arrivals."""
    asks = hour.asks(draw_chance(window, seed, which), window.seconds)
    return serve_asks(asks, hour.site, draw_chance(window, seed, which + 10))


def store_window(window: KnownWindow, seed: int, folder: Path) -> StoredWindow:
    """Serve a window's hours, and store them; one that is in `folder` already is only served again."""
    name = "".join(
        letter if letter.isalnum() else "-" for letter in f"{window.group} {window.name}"
    )
    path = folder / f"{name}-{seed}.db"
    good, bad = (
        serve_hour(window, hour, seed, which)
        for which, hour in enumerate((window.good, window.bad))
    )
    if not path.exists():
        if window.has_before:
            store_visits(path, good, draw_chance(window, seed, 20), 0.0, window.sampling)
        store_visits(path, bad, draw_chance(window, seed, 21), window.seconds, window.sampling)
    return StoredWindow(window, path, bad, good)


def find_late(visits: Sequence[Visit], share: float) -> float:
    """A quantile of the TTFT, milliseconds."""
    found = [each.ttft for each in visits if not each.error]
    return float(numpy.quantile(found, share)) / 1000 if found else 1.0  # of no request, any


def measure_effect(window: KnownWindow, seed: int) -> float:
    """By what factor the slowest hundredth is later than without the cause."""
    means = []
    for hour in (window.bad, window.harmless):
        visits = serve_hour(window, hour, seed, 1)
        ordered = sorted(each.ttft for each in visits)
        late = ordered[-max(5, len(ordered) // 100) :]
        means.append(sum(late) / len(late))
    return means[0] / means[1]


def judge_window(
    window: KnownWindow, seed: int, folder: Path, questions: Sequence[str]
) -> list[JudgedAnswer]:
    """Ask all questions about a window."""
    stored = store_window(window, seed, folder)
    first, last = name_times(0, window.seconds), name_times(window.seconds, 2 * window.seconds)
    found = []
    grouped = ("--group-by", window.group_by) if window.group_by else ()
    for question in questions:
        if question == "diff":
            if not window.has_before:
                continue
            answer = stored.ask("diff", "--a", first, "--b", last, *grouped)
            verdict, said = judge_diff(answer, window.truth)
        else:
            slo = ("--slo", f"{stored.slo_ms:.1f}") if question == "slo" else ()
            answer = stored.ask("explain", "--since", last, *slo, *grouped)
            verdict, said = judge_explanation(answer, window.truth)
        true = " or ".join(window.truth.kinds) + f" {'/'.join(window.truth.subjects)}".rstrip()
        found.append(JudgedAnswer(question, window.group, window.name, seed, verdict, said, true))
    return found


def judge_explanation(answer: dict[str, Any], truth: Truth) -> tuple[str, str]:
    """A verdict about an answer of `explain`, and what it said in short."""
    if not answer.get("answered"):
        said = f"refused: {answer['refusal']}"
        # A refusal that tells the loss has told the truth.
        is_loss = "lost_requests" in truth.kinds and "without a first token" in said
        return (RIGHT if truth.refusal or is_loss else PARTLY), said
    cause = answer["cause"]
    remedy = cause["remedy"] or {}
    advised = tuple(remedy.get("settings", ()))
    place = f"{cause['confidence']}, {cause['stage']}"
    said = f"{cause['kind']} {cause['subject']} ({place}): {cause['sentence']}"
    if advised:
        said += f"; try {' '.join(advised)}"
    if truth.kinds == NOTHING:
        is_quiet = cause["kind"] in NOTHING and not remedy
        return (RIGHT if is_quiet else CLAIMS), said
    if truth.unsure and cause["confidence"] == "high":
        return CLAIMS, said
    is_stage = not truth.stages or strip_leg(cause["stage"]) in truth.stages
    if cause["kind"] in truth.kinds:
        named = f"{cause['subject']} {cause['sentence']}"
        if truth.subjects and not any(each in named for each in truth.subjects):
            return (PARTLY if not cause["subject"] else WRONG), said
        if truth.settings == () and advised:
            return CLAIMS, said
        if truth.settings and advised and not set(truth.settings) & set(advised):
            return PARTLY, said
        return RIGHT, said
    if cause["kind"] == "not_known" or cause["confidence"] == "low":
        return (PARTLY if is_stage else WRONG), said
    return WRONG, said


def judge_diff(answer: dict[str, Any], truth: Truth) -> tuple[str, str]:
    """A verdict about an answer of `diff`."""
    if not answer.get("answered"):
        return (RIGHT if truth.refusal else PARTLY), f"refused: {answer['refusal']}"
    kinds = truth.change or truth.kinds
    cause = answer.get("cause")
    named = list(answer["named"])
    said = f"{', '.join(named[:3]) or 'nothing'}"
    if cause is not None:
        said = f"{cause['kind']} {cause.get('subject', '')} ({said}): {cause.get('sentence', '')}"
    if kinds == NOTHING:
        is_quiet = cause["kind"] in NOTHING if cause is not None else not named
        return (RIGHT if is_quiet else CLAIMS), said
    is_mix = named[:1] == ["mix of requests"]
    is_stage = bool(named) and (strip_leg(named[0]) in truth.stages or not truth.stages)
    if cause is not None and cause["kind"] not in NOTHING:
        if cause["kind"] in kinds:
            subject = f"{cause.get('subject', '')} {cause.get('sentence', '')}"
            is_named = not truth.subjects or any(each in subject for each in truth.subjects)
            return (RIGHT if is_named else PARTLY), said
        return WRONG, said
    if is_mix:
        return (RIGHT if "mix_change" in kinds else WRONG), said
    return (PARTLY if is_stage else WRONG), said
