# SPDX-License-Identifier: Apache-2.0
"""Why requests wait, on one real server: each reason alone has 95 % of the wait that was caused for it.

The server of `features` has one place (max_num_seqs 1), priorities, structured outputs and the endpoints
for pauses; the sum of the reasons is checked on every request. Other limits: test_limits.py; media:
test_media_waits.py.
"""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.live.bench import LiveDeployment, make_parent_header, read_breakdown
from tests.live.test_engine_features import call, fetch_ttft_span, run_request
from ttft_otel.model import stages
from ttft_otel.model.names import keys

MIN_SHARE = 0.95
MAX_ATTEMPTS = 6
CHOICES = 6000  # of a grammar: two seconds of one core


def read_reasons(bench: LiveDeployment, trace: str) -> dict[str, int]:
    """Microseconds per reason of a trace's queue; fails unless they add up to it."""
    found = fetch_ttft_span(bench, trace)
    reasons = {
        parsed[1]: us
        for key, us in found.items()
        if (parsed := keys.parse_reason_attribute(key)) and parsed[0] == "queue"
    }
    queues = [found.get(keys.name_stage_attribute(stage), 0) for stage in stages.QUEUE_STAGES]
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
    assert queue["attributes"][keys.QUEUE_REASON] == "in_step"


def make_grammar() -> dict[str, Any]:
    """Fields of a request whose grammar is new, and takes a second or more to compile."""
    words = ["".join(random.choices("abcdefgh", k=20)) for _ in range(CHOICES)]
    return {"extra": {"structured_outputs": {"choice": words}, "ignore_eos": False}}


def test_grammar(features: LiveDeployment) -> None:
    """Nobody else is there, and its grammar is being compiled."""
    trace = os.urandom(16).hex()
    answer = features.send_request(
        features.front_url, max_tokens=2, headers=make_parent_header(trace), **make_grammar()
    )
    assert answer.status == 200, answer.body[:300]
    reasons = read_reasons(features, trace)

    assert get_share(reasons, "grammar") >= MIN_SHARE, reasons


# Two at once: which of them is told. Written before the first run.
TWO_AT_ONCE = {
    ("grammar", "max_num_seqs"): "grammar",
    ("paused", "max_num_seqs"): "paused",
}


def test_grammar_and_place(features: LiveDeployment) -> None:
    """The only place is taken at first, and a grammar is compiled for longer than that."""
    # On a busy machine the first one may have ended before the other comes: then it gets a longer answer,
    # not by so much that it would outlast the grammar.
    for attempt in range(MAX_ATTEMPTS):
        trace = os.urandom(16).hex()
        with (
            run_request(features, max_tokens=round(300 * 1.5**attempt)),
            run_request(
                features, max_tokens=2, headers=make_parent_header(trace), **make_grammar()
            ) as second,
        ):
            assert second.result().status == 200
        held_by_decoding = fetch_ttft_span(features, trace).get(
            keys.name_held_attribute("decode"), 0
        )
        if held_by_decoding:
            break
    reasons = read_reasons(features, trace)

    assert held_by_decoding > 0, "the place was not taken meanwhile"
    assert get_share(reasons, TWO_AT_ONCE["grammar", "max_num_seqs"]) >= MIN_SHARE, reasons


def test_pause_and_place(features: LiveDeployment) -> None:
    """The engine is paused with its only place taken; who took it goes away before the engine goes on."""
    trace = os.urandom(16).hex()
    with run_request(features, max_tokens=4000, abort_s=2.0) as first:
        call(features, "/pause?mode=keep&clear_cache=false")
        try:
            with ThreadPoolExecutor(1) as pool:
                second = pool.submit(
                    features.send_request,
                    features.front_url,
                    max_tokens=2,
                    headers=make_parent_header(trace),
                )
                gone = first.result()
                time.sleep(0.3)  # until the engine has been told so
                call(features, "/resume")
                found = second.result()
        finally:
            call(features, "/resume")
    reasons = read_reasons(features, trace)

    assert gone.aborted and found.status == 200
    assert gone.started_ns + gone.total_us * 1000 > found.started_ns, "the place was free"
    assert get_share(reasons, TWO_AT_ONCE["paused", "max_num_seqs"]) >= MIN_SHARE, reasons
