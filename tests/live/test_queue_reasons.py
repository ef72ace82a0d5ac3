# SPDX-License-Identifier: Apache-2.0
"""Why requests wait, on one real server: each reason alone has 95 % of the wait that was caused for it.

The server of `features` has one place (max_num_seqs 1), priorities, an adapter and the endpoints for
pauses; the sum of the reasons is checked on every request.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from tests.live.bench import LiveDeployment, read_breakdown
from tests.live.test_engine_features import (
    call,
    fetch_ttft_span,
    make_parent_header,
    run_request,
)
from ttft_otel import names, stages

MIN_SHARE = 0.95


def read_reasons(bench: LiveDeployment, trace: str) -> dict[str, int]:
    """Microseconds per reason of a trace's queue; fails unless they add up to it."""
    found = fetch_ttft_span(bench, trace)
    reasons = {
        parsed[1]: us
        for key, us in found.items()
        if (parsed := names.parse_reason_attribute(key)) and parsed[0] == "queue"
    }
    queues = [found.get(names.name_stage_attribute(stage), 0) for stage in stages.QUEUE_STAGES]
    assert sum(reasons.values()) == sum(queues) > 0
    return reasons


def get_share(reasons: dict[str, int], reason: str) -> float:
    """The reason's share of all waiting."""
    return reasons.get(reason, 0) / sum(reasons.values())


def test_max_num_seqs(features: LiveDeployment) -> None:
    """The second request waits for the only place until the first one's answer has ended."""
    trace = os.urandom(16).hex()
    with (
        run_request(features, max_tokens=1500),
        run_request(features, max_tokens=2, headers=make_parent_header(trace)) as second,
    ):
        assert second.result().status == 200
    reasons = read_reasons(features, trace)

    assert get_share(reasons, "max_num_seqs") >= MIN_SHARE, reasons


def test_priority(features: LiveDeployment) -> None:
    """Who came later and is urgent waits less: from then on priority is what the other one waits for."""
    trace = os.urandom(16).hex()
    with (
        run_request(features, max_tokens=1500),
        run_request(
            features, max_tokens=2, extra={"priority": 5}, headers=make_parent_header(trace)
        ) as patient,
        run_request(features, max_tokens=1500, extra={"priority": -5}) as urgent,
    ):
        assert patient.result().status == 200
        waits = [read_breakdown(each.result())["prefill.queue"] for each in (urgent, patient)]
    reasons = read_reasons(features, trace)

    assert waits[0] < waits[1]
    assert set(reasons) <= {"in_step", "max_num_seqs", "priority"}
    assert reasons["priority"] > 0
    assert get_share(reasons, "priority") + get_share(reasons, "max_num_seqs") >= MIN_SHARE


def test_pause(features: LiveDeployment) -> None:
    """A request that comes while the scheduler is paused waits for nothing else."""
    trace = os.urandom(16).hex()
    call(features, "/pause?mode=keep&clear_cache=false")
    resume = threading.Timer(0.8, call, (features, "/resume"))
    resume.start()
    try:
        features.send_request(features.front_url, max_tokens=2, headers=make_parent_header(trace))
    finally:
        resume.join()
    reasons = read_reasons(features, trace)

    assert get_share(reasons, "paused") >= MIN_SHARE, reasons


def test_alone(features: LiveDeployment) -> None:
    """Nobody else is there: at most the engine's own loop is waited for, and no span is added."""
    trace = os.urandom(16).hex()
    features.send_request(features.front_url, max_tokens=2, headers=make_parent_header(trace))
    reasons = read_reasons(features, trace)
    spans: list[dict[str, Any]] = features.wait_for_trace(
        trace, lambda got: any(span["name"] == "prefill.queue" for span in got)
    )
    (queue,) = [span for span in spans if span["name"] == "prefill.queue"]

    assert set(reasons) == {"in_step"}
    assert queue["attributes"][names.QUEUE_REASON] == "in_step"
