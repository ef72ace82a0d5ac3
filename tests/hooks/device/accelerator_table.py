# SPDX-License-Identifier: Apache-2.0
"""The table of benchmarks/results/device-clock.md: the clock's errors in all cases of the simulation.

test_accelerator.py compares the report with it. To write it anew, in tests/:

    ../.venv/bin/python -m hooks.device.accelerator_table
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, TypeAlias

from hooks.device.accelerated_runners import wrap_accelerated_classes
from hooks.device.accelerator_cases import CASES, AcceleratorCase, run_case
from hooks.device.accelerator_loops import LOOPS, Judgement

DOCS_PAGE: Final = Path(__file__).parents[3] / "benchmarks" / "results" / "device-clock.md"
TABLE_BEGIN: Final = "<!-- places -->\n"
TABLE_END: Final = "<!-- end of places -->\n"
Runs: TypeAlias = dict[AcceleratorCase, dict[tuple[str, str], Judgement]]


def run_everywhere(
    case: AcceleratorCase, kinds: dict[str, Any]
) -> dict[tuple[str, str], Judgement]:
    """The case over both runners of `kinds` and all loops: a quarter of a second each; time is virtual."""
    return {(kind, loop): run_case(case, kinds, kind, loop) for kind in kinds for loop in LOOPS}


def find_percentile(values: list[float], share: float) -> float:
    """The value that `share` of `values` do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def format_table(runs: Runs) -> str:
    """One row per case: errors of all its runs together, in microseconds."""
    lines = [
        "| case | place p50 | p99 | max | `dispatch` max | `output` max | `prefill.stall` max |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, judgements in runs.items():
        places = [abs(error) for each in judgements.values() for error in each.place_errors]
        cells = [find_percentile(places, 0.5), find_percentile(places, 0.99), max(places)]
        for stage in ("dispatch", "output", "prefill.stall"):
            errors = [each.stage_errors[stage] for each in judgements.values()]
            cells.append(max(abs(error) for pairs in errors for error, _ in pairs))
        lines.append(f"| {case.name} | {' | '.join(f'{round(cell):d}' for cell in cells)} |")
    return "\n".join(lines) + "\n"


def render_page(text: str, runs: Runs) -> str:
    """Replace the table in a page's text."""
    head, _, rest = text.partition(TABLE_BEGIN)
    return head + TABLE_BEGIN + format_table(runs) + TABLE_END + rest.partition(TABLE_END)[2]


if __name__ == "__main__":
    wrapped = wrap_accelerated_classes()
    all_runs = {case: run_everywhere(case, wrapped) for case in CASES}
    DOCS_PAGE.write_text(render_page(DOCS_PAGE.read_text(), all_runs))
