# SPDX-License-Identifier: Apache-2.0
"""What the device clock's first rule tells in the simulation: wrong places, seen as such.

A simulation in which a wrong clock passes judges nothing. launch_bound_clock.py is that clock.
"""

from __future__ import annotations

from typing import Any

import pytest

from hooks.device.accelerator_cases import CASES, run_case
from hooks.device.accelerator_table import (
    DOCS_PAGE,
    FIRST_RULE_BEGIN,
    FIRST_RULE_END,
    Runs,
    find_percentile,
    format_first_rule,
    replace_table,
    run_first_rule,
    tell_stage,
)
from hooks.device.test_accelerator import MAX_PLACE_ERROR_US
from ttft_otel.hooks.worker.model_runners import WorkerTracer

CASES_BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(scope="module")
def first_runs(kinds: dict[str, Any]) -> Runs:
    """The cases of the docs' table."""
    return run_first_rule(kinds)


@pytest.mark.parametrize("step_ms", [10, 40, 200])
def test_device_bound(first_runs: Runs, step_ms: int) -> None:
    """Every place is early by about a step: what was `dispatch` is told as `output`, and the sum closes."""
    for run, judgement in first_runs[CASES_BY_NAME[f"device-bound, {step_ms} ms"]].items():
        errors = [abs(error) for error in judgement.place_errors]
        dispatch, told_dispatch = tell_stage(judgement, "dispatch")
        output, told_output = tell_stage(judgement, "output")

        assert 0.75 * step_ms <= find_percentile(errors, 0.5) / 1000 <= step_ms, run
        assert dispatch >= 0.95 * step_ms * 1000 and told_dispatch <= 4_000, run
        assert output <= 1_000 and told_output >= 0.8 * step_ms * 1000, run
        assert judgement.unattributed == 0 and judgement.missing == 0, run


def test_host_bound(first_runs: Runs) -> None:
    """Where the device waits for the host that rule is right, which is why nobody saw it."""
    for run, judgement in first_runs[CASES_BY_NAME["host-bound, 0.3 ms"]].items():
        errors = [abs(error) for error in judgement.place_errors]
        assert find_percentile(errors, 0.99) <= MAX_PLACE_ERROR_US, run


@pytest.mark.parametrize(
    ("name", "runners"),
    [
        ("drafter and KV connector, 20 ms", ("V2",)),
        ("encoder-only, 30 ms, idle", ("V1", "V2")),
    ],
)
def test_one_late_event(first_runs: Runs, name: str, runners: tuple[str, ...]) -> None:
    """One event that the answer does not wait for takes all of its step's marks along."""
    for (kind, loop), judgement in first_runs[CASES_BY_NAME[name]].items():
        if kind in runners:
            assert not judgement.place_errors, (kind, loop)
            assert judgement.unattributed > 0 and judgement.missing > 0, (kind, loop)


def test_renewal_in_flight(first_runs: Runs) -> None:
    """A step that is in flight while the anchor is renewed has no marks."""
    case = CASES_BY_NAME["the anchor is renewed in flight, 40 ms, 1000 steps"]

    assert any(judgement.missing for judgement in first_runs[case].values())


@pytest.mark.parametrize("loop", ["async", "async, own process"])
def test_pipeline_without_flag(
    kinds: dict[str, Any], loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A last pipeline stage that does not say what it did not see claims the earlier stages' work."""
    monkeypatch.setattr(WorkerTracer, "_list_lost_flags", lambda *_: 0)
    case = CASES_BY_NAME["last of two pipeline stages, 15 ms each"]
    judgement = run_case(case, kinds, "V2", loop)

    true_us, told_us = tell_stage(judgement, "dispatch")
    assert true_us == 0 and told_us >= case.receive_us
    true_us, told_us = tell_stage(judgement, "pipeline")
    assert true_us >= case.receive_us and told_us == 0


def test_table(first_runs: Runs) -> None:
    """The docs quote these figures."""
    page = DOCS_PAGE.read_text()
    table = format_first_rule(first_runs)

    assert replace_table(page, FIRST_RULE_BEGIN, FIRST_RULE_END, table) == page, (
        "write it anew: see tests/hooks/device/accelerator_table.py"
    )
