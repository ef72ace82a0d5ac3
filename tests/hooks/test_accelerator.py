# SPDX-License-Identifier: Apache-2.0
"""The device clock under both runners and all of vLLM's loops on a simulated device: places are judged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ttft_otel.hooks import wrap

from .accelerated_runners import wrap_accelerated_classes
from .accelerator_cases import CASES, AcceleratorCase, run_case
from .accelerator_loops import LOOPS
from .accelerator_table import DOCS_PAGE, Runs, find_percentile, render_page, run_all_cases

MAX_PLACE_ERROR_US = 150  # at the 99th percentile
LAUNCH_AND_READ_US = 20  # of the simulation: an event's launch, or the hook's own queries
MAX_STAGE_ERROR_US, MAX_STAGE_ERROR_SHARE = 200, 0.02


@pytest.fixture(scope="module")
def kinds() -> Iterator[dict[str, Any]]:
    """Both runners with the hooks around them; the classes are put back afterwards."""
    before = dict(wrap.installed_patches)
    yield wrap_accelerated_classes()
    for patches in wrap.installed_patches.values():
        for patch in patches:
            setattr(patch.owner, patch.name, patch.original)
    wrap.installed_patches.clear()
    wrap.installed_patches.update(before)


@pytest.fixture(scope="module")
def runs(kinds: dict[str, Any]) -> Runs:
    """Every case over both runners and all loops."""
    return run_all_cases(kinds)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_places(runs: Runs, case: AcceleratorCase) -> None:
    """Every mark has a place, at most 150 us from the truth at p99; a late reader's is off by as much."""
    for run, judgement in runs[case].items():
        errors = [abs(error) for error in judgement.place_errors]
        limit = MAX_PLACE_ERROR_US + case.late_us
        assert find_percentile(errors, 0.99) <= limit, run
        assert judgement.missing == 0, run
        assert judgement.requests >= case.steps // max(case.chunks, case.marked), run


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_stages(runs: Runs, case: AcceleratorCase) -> None:
    """Dispatch, output and stall of every request: within 2 % or 200 us; nothing is unattributed."""
    for run, judgement in runs[case].items():
        for stage in ("dispatch", "output", "prefill.stall"):
            for error, length in judgement.stage_errors[stage]:
                limit = max(MAX_STAGE_ERROR_US, MAX_STAGE_ERROR_SHARE * length) + case.late_us
                assert abs(error) <= limit, (run, stage, length)
        assert judgement.unattributed <= MAX_PLACE_ERROR_US * judgement.requests, run


# Nothing tells a reader that is always late from a device that is.
TOLD_CASES = [case for case in CASES if case.gap_us or not case.late_us]


@pytest.mark.parametrize("case", TOLD_CASES, ids=lambda case: case.name)
def test_told_error(runs: Runs, case: AcceleratorCase) -> None:
    """The error that is told covers the true one, but for what the hook itself takes."""
    for run, judgement in runs[case].items():
        uncovered = [
            error for error, told in judgement.told_errors if error > told + LAUNCH_AND_READ_US
        ]
        assert len(uncovered) <= 0.01 * len(judgement.told_errors), run


# Events of a step: idle stream, forward and its end, sampled, end of V1's sample_tokens(); of an
# encoder, a KV load and a save two each.
MAX_ANCHORS = 8  # of a case, besides
MAX_EVENTS_BY_CASE = {
    "device-bound, 40 ms": 5,
    "images, 30 ms encoder, 20 ms forward": 7,
    "drafter and KV connector, 20 ms": 9,
}


@pytest.mark.parametrize("name", MAX_EVENTS_BY_CASE)
def test_calls(runs: Runs, name: str) -> None:
    """A marked step records so many events, and asks each of them at most once, and one again."""
    (case,) = [each for each in CASES if each.name == name]
    most = MAX_EVENTS_BY_CASE[name]
    for run, judgement in runs[case].items():
        calls = judgement.calls
        assert calls["record"] <= most * case.steps + MAX_ANCHORS, run
        assert calls["query"] <= (most + 5) * case.steps, run
        assert calls["elapsed"] <= most * case.steps + MAX_ANCHORS, run
        assert calls["stream query"] == case.steps, run


def test_unmarked_steps_call_nothing(kinds: dict[str, Any]) -> None:
    """A step without a traced request asks the device for nothing."""
    case = AcceleratorCase("decode steps", 10_000, steps=50, marked=0)
    for kind in kinds:
        for loop in LOOPS:
            calls = run_case(case, kinds, kind, loop).calls
            assert not calls.keys() - {"make"}, (kind, loop)


@pytest.mark.parametrize("case", [each for each in CASES if each.encode_only], ids=lambda c: c.name)
def test_encoder_runs(runs: Runs, case: AcceleratorCase) -> None:
    """An encoder's true length comes later, where the answer left before its end."""
    for run, judgement in runs[case].items():
        waits = "synchronizing" in case.connector
        assert len(judgement.encoder_errors) == (0 if waits else case.steps), run
        for length_error, begin_error in judgement.encoder_errors:
            assert abs(length_error) <= LAUNCH_AND_READ_US, run
            assert abs(begin_error) <= MAX_PLACE_ERROR_US, run


def test_table(runs: Runs) -> None:
    """The docs quote these figures."""
    page = DOCS_PAGE.read_text()

    assert render_page(page, runs) == page, "write it anew: see tests/hooks/accelerator_table.py"
