# SPDX-License-Identifier: Apache-2.0
"""Results of experiments.py as Markdown tables and as SVG; pure. The page docs/routing.md shows both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loads import ROUTERS
from weigh import FEW, late, mapes, weigh

MEAN, TAIL, ROUND, INK, LINE = "#5b5bf0", "#ea6a12", "#9a9a9a", "#1f2937", "#e5e7eb"
WIDTH, LEFT, TOP, ROW, PANEL, BETWEEN = 860, 130, 58, 38, 320, 60

SAID = {True: "met", False: "**missed**", None: "not decided"}


def table(found: Mapping[str, Any], experiment: str) -> str:
    """A row for each policy, then one for each comparison; "" where nothing is complete."""
    weighed = weigh(found["runs"], experiment)
    if not weighed:
        return ""
    lines = [
        "| policy | requests | mean TTFT, s | p99, s | cached | mean in each round |",
        "|---|---|---|---|---|---|",
    ]
    for policy, each in _ordered(weighed["policies"]):
        rounds = ", ".join(f"{value:.2f}" for value in each["rounds"])
        lines.append(
            f"| `{policy}` | {each['requests']} | {_seconds(each['mean'])} | {_seconds(each['p99'])} "
            f"| {each['cached']:.0%} | {rounds} |"
        )
    lines += [
        "",
        "| | mean TTFT | p99 | mean in each round | goal for the mean | |",
        "|---|---|---|---|---|---|",
    ]
    reached = found["figures"]
    for each in weighed["against"]:
        name = f"{experiment.replace('-', '_')}_{each['policy']}_to_{each['other']}"
        rounds = ", ".join(f"{value:+.0%}" for value in each["rounds"])
        goal = f"{each['goal']:+.0%}" if each["goal"] else "below 0"
        lines.append(
            f"| `{each['policy']}` to `{each['other']}` | {_share(each['mean'])} | {_share(each['p99'])} "
            f"| {rounds} | {goal} | {SAID[reached[name]['met']]} |"
        )
    if errors := mapes(found, experiment):
        each = ", ".join(f"{error:.0%}" for error in errors)
        lines += ["", f"Error (MAPE) of the TTFTs that `calibrated` predicted, by round: {each}."]
    if load := found.get("loads", {}).get(experiment):
        lines += ["", f"Load: `{' '.join(load)}`, another seed each round."]
    if weighed["rounds"] < FEW:
        lines += ["", "Fewer than three rounds: a rehearsal, from which nothing follows."]
    if count := late(found, experiment):
        lines += [
            "",
            f"Runs in which the load itself was late (p99 over 5 ms): {count}. Nothing is decided by them.",
        ]
    return "\n".join(lines) + "\n"


def apart(found: Mapping[str, Any]) -> str:
    """How far the two servers disturb each other, in a sentence."""
    if "apart" not in found:
        return ""
    alone, together = found["apart"]["alone"], found["apart"]["together"]
    return (
        f"- A prefill of 2 600 tokens took {alone:.2f} s on one server alone, {together:.2f} s with both "
        f"at work ({together / alone - 1:+.0%}): so far they disturb each other.\n"
    )


def paged(page: str, experiment: str, shown: str) -> str:
    """A page with this between the experiment's marks. Raises ValueError where it has none."""
    before, mark, rest = page.partition(f"<!-- {experiment} -->\n")
    _, end, after = rest.partition(f"<!-- end of {experiment} -->\n")
    if not mark or not end:
        raise ValueError(f"the page has no marks for {experiment}")
    return f"{before}{mark}{shown}{end}{after}"


def picture(found: Mapping[str, Any], experiment: str) -> str:
    """Mean and p99 side by side, a row for each policy: bar of 95 %, dot, and small dots for rounds."""
    weighed = weigh(found["runs"], experiment)
    policies = _ordered(weighed["policies"])
    height = TOP + ROW * len(policies) + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(16, 24, f"{experiment}: time to first token, seconds", size=15, weight=600),
    ]
    for at, (policy, _) in enumerate(policies):
        parts.append(_text(LEFT - 14, _row(at) + 4, policy, anchor="end"))
    for place, (key, color) in enumerate((("mean", MEAN), ("p99", TAIL))):
        parts += _panel(policies, key, color, LEFT + place * (PANEL + BETWEEN))
    parts.append("</svg>\n")
    return "\n".join(parts)


def _panel(policies: Sequence[tuple[str, Any]], key: str, color: str, left: int) -> list[str]:
    highest = max(
        max(*each[key], *(each["rounds"] if key == "mean" else ())) for _, each in policies
    )
    step = next(unit for unit in _steps() if highest / unit <= 6)
    most = step * (int(highest / step) + 1)
    bottom = _row(len(policies)) - ROW // 2

    def x(value: float) -> float:
        return round(left + PANEL * value / most, 1)

    parts = [_text(left, TOP - 12, key, fill=color, weight=600)]
    for number in range(round(most / step) + 1):
        at = x(number * step)
        parts.append(f'<path d="M{at} {TOP}V{bottom}" stroke="{LINE}"/>')
        parts.append(_text(at, bottom + 18, f"{number * step:g}", anchor="middle", fill="#6b7280"))
    for at, (_, each) in enumerate(policies):
        value, low, high = each[key]
        y = _row(at)
        parts.append(
            f'<path d="M{x(low)} {y}H{x(high)}" stroke="{color}" stroke-width="6" '
            'stroke-opacity="0.35" stroke-linecap="round"/>'
        )
        parts += [
            f'<circle cx="{x(one)}" cy="{y + 11}" r="2.5" fill="{ROUND}"/>'
            for one in (each["rounds"] if key == "mean" else ())
        ]
        parts.append(f'<circle cx="{x(value)}" cy="{y}" r="5" fill="{color}"/>')
        parts.append(_text(x(value), y - 9, f"{value:.2f}", anchor="middle", size=11))
    return parts


def _row(at: int) -> int:
    return TOP + ROW * at + ROW // 2 + 4


def _steps() -> list[float]:
    return [base * 10.0**power for power in range(-3, 5) for base in (1, 2, 5)]


def _text(x: float, y: float, text: str, **more: Any) -> str:
    fill, anchor = more.get("fill", INK), more.get("anchor", "start")
    size, weight = more.get("size", 13), more.get("weight", 400)
    return (
        f'<text x="{x}" y="{y}" fill="{fill}" text-anchor="{anchor}" font-size="{size}" '
        f'font-weight="{weight}">{text}</text>'
    )


def _ordered(policies: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(policy, policies[policy]) for policy in ROUTERS if policy in policies]


def _seconds(values: Sequence[float]) -> str:
    value, low, high = values
    return f"{value:.2f} ({low:.2f}–{high:.2f})"


def _share(values: Sequence[float]) -> str:
    value, low, high = values
    return f"{value:+.0%} ({low:+.0%} to {high:+.0%})"
