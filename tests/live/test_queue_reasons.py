# SPDX-License-Identifier: Apache-2.0
"""Why requests wait, on one real server: alone, and where two reasons hold at once.

The server of `features` has one place, structured outputs and the endpoints for pauses; the
sum of the reasons is checked on every request. One reason alone, with the cause that `ttft-otel explain`
names: test_explain.py and test_limits.py; media: test_media_waits.py.
"""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.live.bench import LiveDeployment
from tests.live.test_engine_features import call, run_request
from ttft_otel.model import stages
from ttft_otel.model.names import keys

MIN_SHARE = 0.95
MAX_ATTEMPTS = 6
STEP_MS = 20.0  # by which steps are slowed down, so that an answer takes as long on any machine
CHOICES = 6000  # of a grammar: two seconds of one core


def read_reasons(bench: LiveDeployment, trace: str) -> dict[str, int]:
    """Microseconds per reason of a trace's queue; fails unless they add up to it."""
    found = bench.fetch_ttft(trace)
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


def check_reason(bench: LiveDeployment, trace: str, *names: str) -> None:
    """These reasons together have nearly all of the wait, the first of them some."""
    reasons = read_reasons(bench, trace)
    assert reasons[names[0]] > 0
    assert sum(get_share(reasons, each) for each in names) >= MIN_SHARE, reasons


def test_alone(features: LiveDeployment) -> None:
    """Nobody else is there: at most the engine's own loop is waited for, and no span is added."""
    _, trace = features.send_traced(max_tokens=2)
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


# Two at once: which of them is told. Written before the first run.
TWO_AT_ONCE = {
    ("grammar", "max_num_seqs"): "grammar",
    ("paused", "max_num_seqs"): "paused",
}


def test_grammar_and_place(features: LiveDeployment) -> None:
    """The only place is taken at first, and a grammar is compiled for longer than that."""
    # On a busy machine the first one may have ended before the other comes: then it gets a longer answer,
    # not by so much that it would outlast the grammar.
    features.control.set_injections({"forward": STEP_MS})
    for attempt in range(MAX_ATTEMPTS):
        with (
            run_request(features, max_tokens=round(50 * 1.2**attempt)),
            run_request(features, max_tokens=2, **make_grammar()) as second,
        ):
            answer, trace = second.result()
            assert answer.status == 200
        held_by_decoding = features.fetch_ttft(trace).get(keys.name_held_attribute("decode"), 0)
        if held_by_decoding:
            break
    assert held_by_decoding > 0, "the place was not taken meanwhile"
    check_reason(features, trace, TWO_AT_ONCE["grammar", "max_num_seqs"])


def test_pause_and_place(features: LiveDeployment) -> None:
    """The engine is paused with its only place taken; who took it goes away before the engine goes on."""
    with run_request(features, max_tokens=4000, abort_s=2.0) as first:
        call(features, "/pause?mode=keep&clear_cache=false")
        try:
            with ThreadPoolExecutor(1) as pool:
                second = pool.submit(features.send_traced, max_tokens=2)
                gone, _ = first.result()
                time.sleep(0.3)  # until the engine has been told so
                call(features, "/resume")
                found, trace = second.result()
        finally:
            call(features, "/resume")
    assert gone.aborted and found.status == 200
    assert gone.started_ns + gone.total_us * 1000 > found.started_ns, "the place was free"
    check_reason(features, trace, TWO_AT_ONCE["paused", "max_num_seqs"])
