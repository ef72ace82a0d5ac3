# SPDX-License-Identifier: Apache-2.0
"""Why a stage of a request waited, and what held it, for terminal, pages and JSON. Pure.

request_assembly.py reads the times per reason from the legs' spans; a stage of a router's sum is
explained by the leg that it belongs to.
"""

from __future__ import annotations

from ttft_otel.model import stages
from ttft_otel.report.report_types import Leg, Request


def list_wait_reasons(request: Request, stage: str) -> list[tuple[str, int]]:
    """(reason, microseconds) of the full stage name `stage`, longest first; [] where none is known."""
    word = stages.strip_leg(stage)
    if word in stages.QUEUE_STAGES:
        group = "queue"
    elif word == stages.STALL_STAGE:
        group = "stall"
    else:
        return []
    leg = _find_stage_leg(request, stages.find_leg(stage))
    # Of both queues a request has one: which of them is decided by its first step.
    reasons = leg.reasons.get(group, {}) if leg is not None and word in leg.stages else {}
    return sorted(reasons.items(), key=lambda part: (-part[1], part[0]))


def list_holding_kinds(request: Request, stage: str) -> list[tuple[str, int]]:
    """(kind of work, microseconds) that held a queue, the full stage name `stage`, longest first."""
    word = stages.strip_leg(stage)
    leg = _find_stage_leg(request, stages.find_leg(stage))
    if leg is None or word not in stages.QUEUE_STAGES or word not in leg.stages:
        return []
    return sorted(leg.held.items(), key=lambda part: (-part[1], part[0]))


def _find_stage_leg(request: Request, role: str) -> Leg | None:
    if role:
        return request.find_leg(role)
    return next((leg for leg in reversed(request.legs) if leg.stages == request.stages), None)
