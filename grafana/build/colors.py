# SPDX-License-Identifier: Apache-2.0
"""The page's colours (palette.py) as field overrides: a stage looks the same everywhere."""

from __future__ import annotations

from typing import Any, Final

from grafana_foundation_sdk.models.dashboard import DynamicConfigValue

from ttft_otel import palette, stages

Override = tuple[str, list[DynamicConfigValue]]

# Lines that are no stage's: percentiles from calm to loud, and the SLO.
CALM: Final = palette.COLORS["ipc"]
MIDDLE: Final = palette.COLORS["prefill.compute"]
LOUD: Final = palette.COLORS["prefill.stall"]
LIMIT: Final = palette.COLORS["router.retry"]
GOOD: Final = palette.COLORS["output"]
NEUTRAL: Final = palette.COLORS["dispatch"]


def fixed(hue: str) -> DynamicConfigValue:
    """One colour, whatever the value."""
    return DynamicConfigValue("color", {"mode": "fixed", "fixedColor": hue})


def set_to(name: str, value: Any) -> DynamicConfigValue:
    """Any other property of an override."""
    return DynamicConfigValue(name, value)


def stage_colors() -> list[Override]:
    """One override per word of the vocabulary, for every leg that has it."""
    return [(_pattern(word), [fixed(hue)]) for word, hue in palette.COLORS.items()]


def role_colors() -> list[Override]:
    """One override per role."""
    return [(f"^{role}$", [fixed(hue)]) for role, hue in palette.ROLE_COLORS.items()]


def _pattern(word: str) -> str:
    """A regular expression (JavaScript's) for a word's full names."""
    name = word.replace(".", "\\.")
    if word == "router.hop":
        return f"^{name}\\..+$"
    if word in stages.ROUTER:
        return f"^{name}$"
    legs = "|".join(role for role in stages.ROLES if role != "router")
    return f"^(({legs})\\.)?{name}$"
