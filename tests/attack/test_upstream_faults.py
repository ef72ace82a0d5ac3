# SPDX-License-Identifier: Apache-2.0
"""Every fault of an instance, on every leg: what the client gets, what counts, what the spans say."""

from __future__ import annotations

from pathlib import Path

import pytest

from attack import upstream_matrix
from attack.upstream_matrix import FaultCell, list_cells

PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "upstream-faults.md"
TOLD = upstream_matrix.read_table(PAGE.read_text("utf-8"))
ALL = list_cells()
# Of each fault some legs, streamed or not, and of either attempt.
FEW = [each for at, each in enumerate(ALL) if at % 7 == 0]


@pytest.mark.parametrize(
    "cells", [pytest.param(FEW, id="some"), pytest.param(ALL, id="all", marks=pytest.mark.full)]
)
async def test_the_page_is_what_the_run_gives(cells: list[FaultCell]) -> None:
    """No outcome has changed since docs/generate_upstream_faults.py wrote the page."""
    outcomes = await upstream_matrix.run_cells(cells)
    assert outcomes == {each: TOLD[each] for each in cells}


def test_what_the_page_tells() -> None:
    """Of every cell: no fault becomes a 500 of the router, nor an incomplete answer a complete one."""
    assert set(TOLD) == set(ALL)
    for cell, outcome in TOLD.items():
        assert outcome.client != "500" or cell.fault == "status 500", cell
        assert "incomplete" not in outcome.client, cell
        assert (not outcome.server_error) == (outcome.client == "200"), cell
        # Whatever the client gets, a counted fault is on the span of its attempt.
        assert outcome.breaker == "not counted" or outcome.attempt_error, cell
