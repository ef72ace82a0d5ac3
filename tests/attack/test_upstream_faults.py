# SPDX-License-Identifier: Apache-2.0
"""Every fault of an instance, on every leg: what the client gets, what counts, what the spans say."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path

import pytest

from attack import upstream_matrix
from attack.upstream_matrix import FaultCell, FaultOutcome

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks" / "results" / "upstream-faults.md"


@pytest.fixture(scope="module")
def outcomes() -> dict[FaultCell, FaultOutcome]:
    """The outcome of every cell."""
    return asyncio.run(
        asyncio.wait_for(upstream_matrix.run_cells(upstream_matrix.list_cells()), 200)
    )


def test_the_page_is_what_the_run_gives(outcomes: dict[FaultCell, FaultOutcome]) -> None:
    """No outcome has changed since the page was written."""
    render_page = runpy.run_path(str(ROOT / "docs" / "generate_upstream_faults.py"))["render_page"]

    text = PAGE.read_text("utf-8")

    assert render_page(text, outcomes) == text, "run docs/generate_upstream_faults.py"


def test_no_fault_is_an_error_of_the_routers_own(
    outcomes: dict[FaultCell, FaultOutcome],
) -> None:
    """No fault becomes a 500 of the router, and no incomplete answer is passed on as a complete one."""
    for cell, outcome in outcomes.items():
        assert outcome.client != "500" or cell.fault == "status 500", cell
        assert "incomplete" not in outcome.client, cell
        is_told_good = not outcome.server_error
        assert is_told_good == (outcome.client == "200"), cell


def test_a_fault_after_a_retry_is_told_with_its_attempt(
    outcomes: dict[FaultCell, FaultOutcome],
) -> None:
    """Whatever the client gets, a counted fault is on the span of its attempt."""
    for cell, outcome in outcomes.items():
        if outcome.breaker != "not counted":
            assert outcome.attempt_error, cell
