# SPDX-License-Identifier: Apache-2.0
"""The tables of benchmarks/results/device-clock.md, made from all cases of the simulation.

The first has the errors of all cases; the second what the clock's first rule told in some of them.
test_accelerator.py and test_launch_bound_clock.py compare the report with them. To write it anew, in tests/:

    ../.venv/bin/python -m hooks.device.accelerator_table
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, Final, TypeAlias

from hooks.device.accelerated_runners import wrap_accelerated_classes
from hooks.device.accelerator_cases import CASES, AcceleratorCase, run_case
from hooks.device.accelerator_loops import LOOPS, Judgement
from hooks.device.launch_bound_clock import LaunchBoundClock

DOCS_PAGE: Final = Path(__file__).parents[3] / "benchmarks" / "results" / "device-clock.md"
TABLE_BEGIN: Final = "<!-- places -->\n"
TABLE_END: Final = "<!-- end of places -->\n"
FIRST_RULE_BEGIN: Final = "<!-- first rule -->\n"
FIRST_RULE_END: Final = "<!-- end of first rule -->\n"
# The first is one in which that rule was right.
FIRST_RULE_CASES: Final = (
    "host-bound, 0.3 ms",
    "device-bound, 10 ms",
    "device-bound, 40 ms",
    "device-bound, 200 ms",
    "images, 30 ms encoder, 20 ms forward",
    "drafter and KV connector, 20 ms",
    "the anchor is renewed in flight, 40 ms, 1000 steps",
    "encoder-only, 30 ms, idle",
)
FIRST_RULE_KINDS: Final = ("V1", "V2")
Runs: TypeAlias = dict[AcceleratorCase, dict[tuple[str, str], Judgement]]


def run_all_cases(kinds: dict[str, Any]) -> Runs:
    """Every case over both runners of `kinds` and all loops: seconds, because time is virtual."""
    return {
        case: {(kind, loop): run_case(case, kinds, kind, loop) for kind in kinds for loop in LOOPS}
        for case in CASES
    }


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


def run_first_rule(kinds: dict[str, Any]) -> Runs:
    """Some cases with the clock that knows no upper bounds, under async scheduling."""
    return {
        case: {
            (kind, loop): run_case(case, kinds, kind, loop, LaunchBoundClock)
            for kind in FIRST_RULE_KINDS
            for loop in LOOPS
            if loop != "sync"
        }
        for case in CASES
        if case.name in FIRST_RULE_CASES
    }


def tell_stage(judgement: Judgement, stage: str) -> tuple[float, float]:
    """The true and the told length of `stage` in the middle of a run's requests, in microseconds."""
    pairs = judgement.stage_errors[stage]
    true_us = statistics.median(length for _, length in pairs)
    return true_us, statistics.median(error + length for error, length in pairs)


def format_first_rule(runs: Runs) -> str:
    """One row per case and runner, of the loop with the worker in the engine core's process."""
    lines = [
        "| case | runner | place p50, µs | `dispatch`, ms: true, told | `output`, ms: true, told | "
        "marks lost |",
        "|---|---|---|---|---|---|",
    ]
    for case, judgements in runs.items():
        for (kind, loop), judgement in judgements.items():
            if loop != "async":
                continue
            places = [abs(error) for error in judgement.place_errors]
            place = f"{find_percentile(places, 0.5):.0f}" if places else "–"
            stages = [
                "{:.2f}, {:.2f}".format(*(us / 1000 for us in tell_stage(judgement, stage)))
                for stage in ("dispatch", "output")
            ]
            lines.append(
                f"| {case.name} | {kind} | {place} | {' | '.join(stages)} | {judgement.missing} |"
            )
    return "\n".join(lines) + "\n"


def replace_table(text: str, begin: str, end: str, table: str) -> str:
    """Replace what is between two marks in a page's text."""
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return head + begin + table + end + tail


def render_page(text: str, runs: Runs, first_rule: Runs | None = None) -> str:
    """Replace the tables in a page's text; the second one stays if it is None."""
    text = replace_table(text, TABLE_BEGIN, TABLE_END, format_table(runs))
    if first_rule is None:
        return text
    return replace_table(text, FIRST_RULE_BEGIN, FIRST_RULE_END, format_first_rule(first_rule))


if __name__ == "__main__":
    wrapped_kinds = wrap_accelerated_classes()
    DOCS_PAGE.write_text(
        render_page(
            DOCS_PAGE.read_text(), run_all_cases(wrapped_kinds), run_first_rule(wrapped_kinds)
        )
    )
