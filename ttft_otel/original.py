# SPDX-License-Identifier: Apache-2.0
"""The answer of /ttft_report: microseconds per role -> the original report's field names, in ms.

report/ (from stored spans) and router/ (from Server-Timing) give the sums; clients get the dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypedDict

from ttft_otel import stages

TTFT_MS: Final = "ttft_ms"
UNATTRIBUTED_MS: Final = "unattributed_ms"
STAGES: Final = "stages"


class Sums(TypedDict):
    """One server's (or the whole request's) stages in microseconds; they add up to `ttft`."""

    stages: dict[str, int]
    unattributed: int
    ttft: int


def original(
    request_id: str, by_role: Mapping[str, Sums], combined: Sums | None = None
) -> dict[str, Any]:
    """Build `{request_id, by_role: {role: {...}}, combined: {...}}`.

    by_role: what each server said of itself, under its own stage names; of several encoder legs
    the caller gives the slowest. combined: the outermost `ttft` span, a router's with prefixed
    names; None adds the legs up. In every entry stages and unattributed_ms add up to ttft_ms. An
    original name is missing from a role that has none of its stages; `combined` has them all. The
    router's entry is its own share: what the client waited for and no leg accounts for.
    """
    whole = combined if combined is not None else add(by_role)
    roles = {role: entry(sums) for role, sums in by_role.items() if role != "router"}
    if combined is not None:
        share = own(combined, [sums for role, sums in by_role.items() if role != "router"])
        if share["stages"]:
            roles["router"] = entry(share)
    return {
        "request_id": request_id,
        "by_role": roles,
        "combined": {**dict.fromkeys(stages.REPORT, 0.0), **entry(whole)},
    }


def entry(sums: Sums) -> dict[str, Any]:
    """Write one role's sums in milliseconds: the original names, then every stage under its own."""
    found: dict[str, int] = {}
    for name, value in sums["stages"].items():
        bare = stages.split(name)[1]
        found[bare] = found.get(bare, 0) + value
    kept: dict[str, Any] = {
        field: ms(sum(found[name] for name in parts if name in found))
        for field, parts in stages.REPORT.items()
        if any(name in found for name in parts)
    }
    kept[TTFT_MS] = ms(sums["ttft"])
    kept[UNATTRIBUTED_MS] = ms(sums["unattributed"])
    kept[STAGES] = {name: ms(value) for name, value in sums["stages"].items()}
    return kept


def own(combined: Sums, legs: list[Sums]) -> Sums:
    """The router's own share of the request: its stages, and what is unattributed in no leg."""
    mine = {name: us for name, us in combined["stages"].items() if name.startswith("router.")}
    rest = max(0, combined["unattributed"] - sum(leg["unattributed"] for leg in legs))
    return {"stages": mine, "unattributed": rest, "ttft": sum(mine.values()) + rest}


def add(by_role: Mapping[str, Sums]) -> Sums:
    """Add servers up that ran one after the other; one alone keeps its stages' own names."""
    if len(by_role) == 1:
        return next(iter(by_role.values()))
    parts: dict[str, int] = {}
    for role, sums in by_role.items():
        for name, value in sums["stages"].items():
            parts[f"{role}.{name}"] = value
    return {
        "stages": parts,
        "unattributed": sum(sums["unattributed"] for sums in by_role.values()),
        "ttft": sum(sums["ttft"] for sums in by_role.values()),
    }


def ms(us: int) -> float:
    """Microseconds -> milliseconds; the nearest double to three decimals, so nothing is lost."""
    return us / 1000
