# SPDX-License-Identifier: Apache-2.0
"""The JSON of /ttft_report: stages per role in ms, with the field names of the original TTFT report.

report/ passes what stored spans say, router/ what Server-Timing does: sums in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from ttft_otel.model import stages
from ttft_otel.model.timing import ServerTiming

TTFT_MS_KEY: Final = "ttft_ms"
UNATTRIBUTED_MS_KEY: Final = "unattributed_ms"
STAGES_KEY: Final = "stages"


def build_ttft_report(
    request_id: str, by_role: Mapping[str, ServerTiming], combined: ServerTiming
) -> dict[str, Any]:
    """Build `{request_id, by_role: {role: {...}}, combined: {...}}`.

    by_role: each server's breakdown under its own stage names; of several encoder legs the slowest.
    combined: the outermost `ttft` span, from a router with prefixed names.

    In every entry stages and unattributed_ms add up to ttft_ms. A field of the original report is
    missing from a role that has none of its stages; `combined` has them all. The router's entry is
    its own share: time that the client waited and that no leg accounts for.
    """
    # The router's stages are in `combined`; as a role it gets only its share.
    legs = {role: sums for role, sums in by_role.items() if role != "router"}
    roles = {role: build_role_entry(sums) for role, sums in legs.items()}
    router_share = compute_router_share(combined, legs.values())
    if router_share.stages:
        roles["router"] = build_role_entry(router_share)
    return {
        "request_id": request_id,
        "by_role": roles,
        # Zeros for missing fields: readers of the original report expect all of them here.
        "combined": {**dict.fromkeys(stages.REPORT_FIELDS, 0.0), **build_role_entry(combined)},
    }


def build_role_entry(sums: ServerTiming) -> dict[str, Any]:
    """One role's `sums` in milliseconds: the original report's fields, totals, and all stages."""
    sum_by_stage: dict[str, int] = {}
    # `combined` of a router has one entry per leg of the same stage: they are added up.
    for name, value in sums.stages.items():
        stage = stages.split_stage(name)[1]
        sum_by_stage[stage] = sum_by_stage.get(stage, 0) + value
    fields: dict[str, Any] = {
        field: to_ms(sum(sum_by_stage[name] for name in parts if name in sum_by_stage))
        for field, parts in stages.REPORT_FIELDS.items()
        # Absent, not 0: a decode instance has no encoder whose queue could be empty.
        if any(name in sum_by_stage for name in parts)
    }
    fields[TTFT_MS_KEY] = to_ms(sums.ttft)
    fields[UNATTRIBUTED_MS_KEY] = to_ms(sums.unattributed)
    fields[STAGES_KEY] = {name: to_ms(value) for name, value in sums.stages.items()}
    return fields


def compute_router_share(combined: ServerTiming, legs: Iterable[ServerTiming]) -> ServerTiming:
    """The router's own share: its stages, and unattributed time that is not in any of the `legs`."""
    router_stages = {name: us for name, us in combined.stages.items() if name.startswith("router.")}
    # Legs' own unattributed time is part of `combined`'s and stays with the legs.
    rest = max(0, combined.unattributed - sum(leg.unattributed for leg in legs))
    return ServerTiming(router_stages, rest, sum(router_stages.values()) + rest)


def to_ms(us: int) -> float:
    """Microseconds -> milliseconds, exact to three decimals."""
    return us / 1000
