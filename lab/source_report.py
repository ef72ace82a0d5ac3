# SPDX-License-Identifier: Apache-2.0
"""Format the result of source_check.check_source() as text and as JSON."""

from __future__ import annotations

from typing import Any

from lab.source_check import (
    MAX_CANDIDATES,
    PARTLY,
    PRESENT,
    PlaceResult,
    SourceResult,
    TargetResult,
)


def format_source_result(result: SourceResult) -> str:
    """Text with what is lost, where it may be now, which stages are affected, and what to do."""
    lines = [f"{result.folder}: {_describe_version(result)}", _summarize_counts(result)]
    # Only what is wrong, in the order of the targets; what is present is counted above.
    for target in result.targets:
        if target.state != PRESENT:
            lines += ["", *_describe_target(target)]
    lost = [field for field in result.fields if field.place.state != PRESENT]
    if lost:
        lines += ["", "fields that hooks read:"]
    for field in lost:
        lines += _describe_place(field.place)
        lines.append(f"      without it: {field.without}")
    if not result.complete:
        lines += [
            "",
            # What to do next stands at the end, where a terminal leaves the reader.
            "Add the new address in ttft_otel/hooks/targets/ as a TargetPlace with `since`, or the",
        ]
        lines += ["new name in hooks/; then scripts/compat VERSION once there is a wheel."]
    return "\n".join(lines)


def source_result_to_dict(result: SourceResult) -> dict[str, Any]:
    """The `result` for JSON; `complete` corresponds to exit code 0."""
    return {
        "source": str(result.folder),
        "version": result.version,
        "complete": result.complete,
        "targets": {target.target.name: _target_to_dict(target) for target in result.targets},
        "fields": [
            {**_place_to_dict(field.place), "without": field.without} for field in result.fields
        ],
    }


def _describe_version(result: SourceResult) -> str:
    return f"vLLM {result.version}" if result.version else "no release, judged as the newest vLLM"


def _summarize_counts(result: SourceResult) -> str:
    present = sum(target.state == PRESENT for target in result.targets)
    fields = sum(field.place.state == PRESENT for field in result.fields)
    return (
        f"{present} of {len(result.targets)} targets and {fields} of {len(result.fields)} fields "
        "are where we look for them"
    )


def _describe_target(target: TargetResult) -> list[str]:
    lines = [f"{target.target.name}: {target.state} ({target.target.marks})"]
    for place in target.places:
        if place.state != PRESENT:
            lines += _describe_place(place)
    # Partly lost: which of the addresses vLLM uses depends on its settings.
    where = "" if target.state != PARTLY else " where that is what runs"
    lines.append(f"  unattributed{where}: {_join_stages(target.unattributed)}")
    return lines


def _describe_place(place: PlaceResult) -> list[str]:
    lines = [f"  {place.state}: {place.address}: {place.why}"]
    lines += [f"    now perhaps: {address}" for address in place.candidates[:MAX_CANDIDATES]]
    # Common names such as `forward` are defined in many classes.
    more = len(place.candidates) - MAX_CANDIDATES
    if more > 0:
        lines.append(f"    and {more} more functions of that name")
    return lines


def _join_stages(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "nothing, a detail inside a stage is missing"


def _target_to_dict(target: TargetResult) -> dict[str, Any]:
    row = target.target
    # None: an encoder loses the same stages as any other server.
    encode = row.lost if row.lost_encode is None else row.lost_encode
    return {
        "state": target.state,
        "places": [_place_to_dict(place) for place in target.places],
        "unattributed": list(target.unattributed),
        "unattributed_on_encoder": list(encode) if target.state != PRESENT else [],
    }


def _place_to_dict(place: PlaceResult) -> dict[str, Any]:
    return {
        "address": place.address,
        "state": place.state,
        "why": place.why,
        "candidates": list(place.candidates),
    }
