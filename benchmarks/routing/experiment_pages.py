# SPDX-License-Identifier: Apache-2.0
"""Results of experiments.py as Markdown tables and as SVG; pure. A report in results/ has both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.routing.experiment_loads import SHOWN_POLICIES
from benchmarks.routing.experiment_statistics import (
    MIN_ROUNDS,
    compare_policies,
    count_late_runs,
    list_mapes,
)

# Mean and tail in the hues of prefill.compute and prefill.stall (ttft_otel/model/stages.py).
MEAN_COLOR, TAIL_COLOR, ROUND_COLOR, TEXT_COLOR, LINE_COLOR = (
    "#5b5bf0",
    "#ea6a12",
    "#9a9a9a",
    "#1f2937",
    "#e5e7eb",
)
# Units of the SVG's viewBox; the page scales it.
WIDTH, LEFT_MARGIN, TOP_MARGIN, ROW_HEIGHT, PANEL_WIDTH, PANEL_GAP = 860, 130, 58, 38, 320, 60

OUTCOME_TEXT = {True: "met", False: "**missed**", None: "not decided"}


def format_experiment_table(results: Mapping[str, Any], experiment: str) -> str:
    """A row for each policy, then one for each comparison; "" where nothing is complete."""
    comparison = compare_policies(results["runs"], experiment)
    if not comparison:
        return ""
    lines = [
        "| policy | requests | mean TTFT, s | p99, s | cached | mean in each round |",
        "|---|---|---|---|---|---|",
    ]
    for policy, each in _order_by_mean(comparison["policies"]):
        rounds = ", ".join(f"{value:.2f}" for value in each["rounds"])
        lines.append(
            f"| `{policy}` | {each['requests']} | {_format_seconds(each['mean'])} | "
            f"{_format_seconds(each['p99'])} "
            f"| {each['cached']:.0%} | {rounds} |"
        )
    lines += [
        "",
        "| | mean TTFT | p99 | mean in each round | goal for the mean | |",
        "|---|---|---|---|---|---|",
    ]
    # Judged over the draws by experiment_statistics.py: this only prints it.
    judged = results["figures"]
    for each in comparison["against"]:
        name = f"{experiment.replace('-', '_')}_{each['policy']}_to_{each['other']}"
        rounds = ", ".join(f"{value:+.0%}" for value in each["rounds"])
        goal = f"{each['goal']:+.0%}" if each["goal"] else "below 0"
        lines.append(
            f"| `{each['policy']}` to `{each['other']}` | {_format_share(each['mean'])} | "
            f"{_format_share(each['p99'])} "
            f"| {rounds} | {goal} | {OUTCOME_TEXT[judged[name]['met']]} |"
        )
    if errors := list_mapes(results, experiment):
        each = ", ".join(f"{error:.0%}" for error in errors)
        lines += ["", f"Error (MAPE) of the TTFTs that `calibrated` predicted, by round: {each}."]
    if load := results.get("loads", {}).get(experiment):
        lines += ["", f"Load: `{' '.join(load)}`, another seed each round."]
    # Said on the page itself: tables are quoted without the run that they come from.
    if comparison["rounds"] < MIN_ROUNDS:
        lines += ["", "Fewer than three rounds: a rehearsal, from which nothing follows."]
    if count := count_late_runs(results, experiment):
        lines += [
            "",
            f"Runs in which the load itself was late (p99 over 5 ms): {count}. Nothing is decided by them.",
        ]
    return "\n".join(lines) + "\n"


def format_interference(results: Mapping[str, Any]) -> str:
    """How far the two servers disturb each other, in a sentence."""
    if "apart" not in results:
        return ""
    alone, together = results["apart"]["alone"], results["apart"]["together"]
    return (
        f"- A prefill of 2 600 tokens took {alone:.2f} s on one server alone, {together:.2f} s with both "
        f"at work ({together / alone - 1:+.0%}): so far they disturb each other.\n"
    )


def replace_in_page(page: str, experiment: str, content: str) -> str:
    """A page with this between the experiment's marks. Raises ValueError where it has none."""
    # Comments of HTML: no reader sees them, and an editor keeps them.
    before, mark, rest = page.partition(f"<!-- {experiment} -->\n")
    _, end, after = rest.partition(f"<!-- end of {experiment} -->\n")
    if not mark or not end:
        raise ValueError(f"the page has no marks for {experiment}")
    return f"{before}{mark}{content}{end}{after}"


def draw_experiment(results: Mapping[str, Any], experiment: str) -> str:
    """Mean and p99 side by side, a row for each policy: bar of 95 %, dot, and small dots for rounds."""
    comparison = compare_policies(results["runs"], experiment)
    policies = _order_by_mean(comparison["policies"])
    # Grows with the number of policies; 44 is for the numbers below the axis.
    height = TOP_MARGIN + ROW_HEIGHT * len(policies) + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _format_svg_text(
            16, 24, f"{experiment}: time to first token, seconds", size=15, weight=600
        ),
    ]
    for row_number, (policy, _) in enumerate(policies):
        parts.append(
            _format_svg_text(
                LEFT_MARGIN - 14, _get_row_offset(row_number) + 4, policy, anchor="end"
            )
        )
    for place, (key, color) in enumerate((("mean", MEAN_COLOR), ("p99", TAIL_COLOR))):
        parts += _draw_panel(policies, key, color, LEFT_MARGIN + place * (PANEL_WIDTH + PANEL_GAP))
    parts.append("</svg>\n")
    return "\n".join(parts)


def _draw_panel(
    policies: Sequence[tuple[str, Any]], key: str, color: str, panel_left: int
) -> list[str]:
    # The widest of interval and rounds: no dot may fall outside.
    highest = max(
        max(*each[key], *(each["rounds"] if key == "mean" else ())) for _, each in policies
    )
    # The smallest round step with six lines at most.
    step = next(unit for unit in _choose_steps() if highest / unit <= 6)
    axis_max = step * (int(highest / step) + 1)
    bottom = _get_row_offset(len(policies)) - ROW_HEIGHT // 2

    def scale_x(value: float) -> float:
        return round(panel_left + PANEL_WIDTH * value / axis_max, 1)

    parts = [_format_svg_text(panel_left, TOP_MARGIN - 12, key, fill=color, weight=600)]
    for number in range(round(axis_max / step) + 1):
        x_position = scale_x(number * step)
        parts.append(f'<path d="M{x_position} {TOP_MARGIN}V{bottom}" stroke="{LINE_COLOR}"/>')
        parts.append(
            _format_svg_text(
                x_position, bottom + 18, f"{number * step:g}", anchor="middle", fill="#6b7280"
            )
        )
    for x_position, (_, each) in enumerate(policies):
        value, low, high = each[key]
        y = _get_row_offset(x_position)
        parts.append(
            f'<path d="M{scale_x(low)} {y}H{scale_x(high)}" stroke="{color}" stroke-width="6" '
            'stroke-opacity="0.35" stroke-linecap="round"/>'
        )
        parts += [
            f'<circle cx="{scale_x(one)}" cy="{y + 11}" r="2.5" fill="{ROUND_COLOR}"/>'
            for one in (each["rounds"] if key == "mean" else ())
        ]
        parts.append(f'<circle cx="{scale_x(value)}" cy="{y}" r="5" fill="{color}"/>')
        parts.append(
            _format_svg_text(scale_x(value), y - 9, f"{value:.2f}", anchor="middle", size=11)
        )
    return parts


def _get_row_offset(row_number: int) -> int:
    return TOP_MARGIN + ROW_HEIGHT * row_number + ROW_HEIGHT // 2 + 4


def _choose_steps() -> list[float]:
    return [base * 10.0**power for power in range(-3, 5) for base in (1, 2, 5)]


def _format_svg_text(x: float, y: float, text: str, **more: Any) -> str:
    fill, anchor = more.get("fill", TEXT_COLOR), more.get("anchor", "start")
    size, weight = more.get("size", 13), more.get("weight", 400)
    return (
        f'<text x="{x}" y="{y}" fill="{fill}" text-anchor="{anchor}" font-size="{size}" '
        f'font-weight="{weight}">{text}</text>'
    )


def _order_by_mean(policies: Mapping[str, Any]) -> list[tuple[str, Any]]:
    # In a fixed order, so that rows keep their places from page to page.
    names = dict.fromkeys(SHOWN_POLICIES)
    return [(policy, policies[policy]) for policy in names if policy in policies]


def _format_seconds(values: Sequence[float]) -> str:
    value, low, high = values
    return f"{value:.2f} ({low:.2f}–{high:.2f})"


def _format_share(values: Sequence[float]) -> str:
    value, low, high = values
    return f"{value:+.0%} ({low:+.0%} to {high:+.0%})"
