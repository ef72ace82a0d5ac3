# SPDX-License-Identifier: Apache-2.0
"""The colours of stages.py as field overrides, so that a stage looks the same everywhere."""

from __future__ import annotations

from typing import Any, Final

from grafana_foundation_sdk.models.dashboard import DynamicConfigValue

from ttft_otel.model import stages

Override = tuple[str, list[DynamicConfigValue]]

# Lines that are no stage's: percentiles from calm to loud, and the SLO.
CALM_COLOR: Final = stages.STAGE_COLORS["ipc"]
MIDDLE_COLOR: Final = stages.STAGE_COLORS["prefill.compute"]
LOUD_COLOR: Final = stages.STAGE_COLORS["prefill.stall"]
LIMIT_COLOR: Final = stages.STAGE_COLORS["router.retry"]
GOOD_COLOR: Final = stages.STAGE_COLORS["output"]
NEUTRAL_COLOR: Final = stages.STAGE_COLORS["dispatch"]


# Kept in field overrides: Grafana's palette goes by a series'
# position, which changes with the filter.
def fix_color(hue: str) -> DynamicConfigValue:
    """One colour, whatever the value."""
    return DynamicConfigValue("color", {"mode": "fixed", "fixedColor": hue})


def set_property(name: str, value: Any) -> DynamicConfigValue:
    """Any other property of an override."""
    return DynamicConfigValue(name, value)


def list_stage_colors() -> list[Override]:
    """One override per word of the vocabulary, for every leg that has it."""
    return [
        (_build_name_pattern(word), [fix_color(hue)]) for word, hue in stages.STAGE_COLORS.items()
    ]


def list_role_colors() -> list[Override]:
    """One override per role."""
    return [(f"^{role}$", [fix_color(hue)]) for role, hue in stages.ROLE_COLORS.items()]


def _build_name_pattern(word: str) -> str:
    """A regular expression (JavaScript's) for a word's full names."""
    name = word.replace(".", "\\.")
    # A hop is always to somebody: router.hop.<role>.
    if word == "router.hop":
        return f"^{name}\\..+$"
    # The router's own stages never have the prefix of a leg.
    if word in stages.ROUTER_STAGES:
        return f"^{name}$"
    # Behind a router a server's stages are <role>.<stage>; of a server without one, <stage> alone.
    legs = "|".join(role for role in stages.ROLES if role != "router")
    return f"^(({legs})\\.)?{name}$"
