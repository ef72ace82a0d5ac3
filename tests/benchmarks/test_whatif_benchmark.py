# SPDX-License-Identifier: Apache-2.0
"""The what-if benchmark's load and its judgement, without servers."""

from __future__ import annotations

from benchmarks.whatif import Outcome, build_figures
from benchmarks.whatif_servers import plan_load


def make_outcome(predicted: list[float]) -> Outcome:
    return Outcome(
        *("rate", [100.0, 300.0], predicted, [[0, 1], [0, 1]], [0.0, 0.0]),
        measured=[150.0, 600.0],
    )


def test_figures() -> None:
    """The mean error over p50 and p95 decides; a wrong prediction misses the goal."""
    right = build_figures([make_outcome([150.0, 660.0])])
    wrong = build_figures([make_outcome([110.0, 400.0])])

    assert right["mean_error"]["value"] == 0.05 and right["mean_error"]["met"]
    assert right["mean_error_of_no_change"]["value"] == 0.417
    assert not wrong["mean_error"]["met"]


def test_load() -> None:
    """Every run has the same arrivals and lengths; prompts have one to four chunks."""
    planned = plan_load(200, 80)

    assert planned == plan_load(200, 80)
    assert {-(-each.tokens // 512) for each in planned} == {1, 2, 3, 4}
    assert all(a.at_s <= b.at_s for a, b in zip(planned, planned[1:], strict=False))
