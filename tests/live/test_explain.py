# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel explain` on real vLLM: a cause that was made on purpose is the one that is named.

Each test sends like requests, then one with the cause, and asks for that one. Causes: a pause, late KV
blocks and encodings, long prompts ahead, a grammar, urgent requests, and injected delays in every part of a
server. Limits of the scheduler: test_limits.py; turns at the encoder: test_media_waits.py.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from click.testing import CliRunner

from lab.evidence import Errors, ErrorTolerance, measure_until_decided
from lab.ttft_client import TimedResponse
from tests.live.bench import (
    LiveDeployment,
    count_at_engine,
    medians,
    read_breakdown,
)
from tests.live.like_requests import FEWER_LIKE, LikeRequests, check_cause, check_stage
from tests.live.test_engine_features import call, run_request, wait_for_arrival
from tests.live.test_queue_reasons import MIN_SHARE, check_reason, make_grammar
from tests.live.test_router import run_router_behind_proxies
from ttft_otel.commands import main as cli
from ttft_otel.model import stages

LONG_PROMPTS = 10
QUEUE = "prefill_decode.prefill.queue"  # as a router reports it
SLOW_STEP_MS = 20.0  # of who holds the only place
STEP_MS = 50.0  # by which every forward is longer while long prompts come first
LIKE_PER_ROUND = 10  # so that those behind long prompts stay below a tenth
MAX_EXPLAIN_ROUNDS = 9
# The queue has at least half of what such a request takes longer, give or take two steps.
QUEUE_TOLERANCE = ErrorTolerance(0.0, math.inf, 4 * STEP_MS)
DELAY_MS = 400.0
LATE = 5  # requests of a window; of fewer it asks to explain each
# place of the delay -> the stage that must be named; for a text, and for an image.
TEXT_STAGES = {
    "receive": "receive",
    "tokenize": "preprocess",
    "ipc": "ipc",
    "dispatch": "dispatch",
    "forward": "prefill.compute",
    "output": "output",
}
IMAGE_STAGES = {"multimodal": "preprocess", "encoder": "encoder.compute", "ec_load": "ec.transfer"}
# Of a delay that stops a process once nothing more can be known than that; where it waits, not even that.
SLEEPS = ("process_pause", "not_known")


@pytest.fixture(scope="module")
def texts() -> dict[str, LikeRequests]:
    """Like requests by the deployment that they were sent to: one window serves many causes."""
    return {}


def send_texts(bench: LiveDeployment, known: dict[str, LikeRequests]) -> LikeRequests:
    """The short texts of a deployment."""
    # By database: a deployment that was started anew has another one.
    key = str(bench.fleet.database)
    if key not in known:
        known[key] = LikeRequests(bench)
    return known[key]


def test_pause(features: LiveDeployment, texts: dict[str, LikeRequests]) -> None:
    """The scheduler is paused: the request waits for nothing else."""
    like = send_texts(features, texts)
    call(features, "/pause?mode=keep&clear_cache=false")
    resume = threading.Timer(0.8, call, (features, "/resume"))
    resume.start()
    try:
        name, trace = like.trace_one()
    finally:
        resume.join()
    check_reason(features, trace, "paused")
    check_cause(like.explain(name), "set_aside", "paused")


def test_grammar(features: LiveDeployment, texts: dict[str, LikeRequests]) -> None:
    """Its grammar is compiled for a second or more, and nobody else is there."""
    like = send_texts(features, texts)
    name, trace = like.trace_one(**make_grammar())
    check_reason(features, trace, "grammar")
    check_cause(like.explain(name), "set_aside", "grammar")


def test_priority(features: LiveDeployment, texts: dict[str, LikeRequests]) -> None:
    """Who came later and is urgent takes the only place, waits less, and has a long answer."""
    like = send_texts(features, texts)
    features.control.set_injections({"forward": SLOW_STEP_MS})
    with run_request(features, max_tokens=100), ThreadPoolExecutor(1) as pool:
        before = count_at_engine(features.front_url)
        patient = pool.submit(like.trace_one, extra={"priority": 5})
        wait_for_arrival(features, before, patient)
        with run_request(features, max_tokens=250, extra={"priority": -5}) as urgent:
            name, trace = patient.result()
            reported = like.explain(name)
    waits = [
        features.fetch_ttft(each)["ttft.prefill.queue_us"] for each in (urgent.result()[1], trace)
    ]
    assert waits[0] < waits[1]
    check_reason(features, trace, "priority", "max_num_seqs")
    check_cause(reported, "setting_limit", "scheduling_policy")
    assert reported["reasons"].keys() <= {"in_step", "max_num_seqs", "priority"}


def delay_one(like: LikeRequests, place: str) -> str:
    """Send one more with a delay in this place; its ID."""
    like.bench.control.set_injections({place: DELAY_MS})
    try:
        return like.send_one()
    finally:
        like.bench.control.set_injections()


def test_remote_kv(pd: LiveDeployment) -> None:
    """KV blocks come late from the prefill instance, of a prompt that fills some."""
    like = LikeRequests(pd, count=FEWER_LIKE, words=300)
    reported = like.explain(delay_one(like, "kv_wait"))
    check_cause(reported, "slow_hop")
    assert reported["cause"]["stage"] == "decode.kv.transfer"


def test_a_usual_request(features: LiveDeployment, texts: dict[str, LikeRequests]) -> None:
    """Counter-test: no cause is named for requests than which a quarter of their like took longer.

    By the server's clock, as explain ranks them: the client's has the way to it as well.
    """
    like = send_texts(features, texts)
    ranked = sorted(like.sent, key=lambda each: read_breakdown(each)["ttft"])
    upper = len(ranked) * 3 // 4
    names = [str(each.request_id) for each in ranked[upper - 8 : upper]]
    reported = [like.explain(name) for name in names]
    assert any(each["answered"] for each in reported), reported
    for each in reported:
        assert each["answered"] or "no longer than usual" in each["refusal"], reported
        assert not each["answered"] or each["cause"]["kind"] == "nothing", reported


@pytest.mark.parametrize("place", TEXT_STAGES)
def test_delays_of_a_text(epd: LiveDeployment, texts: dict[str, LikeRequests], place: str) -> None:
    """A delay in one place of the server is found, and has the answer for its stage."""
    like = send_texts(epd, texts)
    reported = like.explain(delay_one(like, place))
    check_stage(reported, TEXT_STAGES[place])
    assert reported["cause"]["kind"] in SLEEPS, reported["sentences"]
    top = reported["stages"][0]
    assert top["late_ms"] - top["typical_ms"] == pytest.approx(DELAY_MS, rel=0.25)


@pytest.mark.full  # test_limits.py has the same cause on a server of its own, test_attribution.py who holds
def test_long_prompts_ahead(epd: LiveDeployment) -> None:
    """Prompts of many chunks came first: the steps have no tokens left.

    Each round compares a request behind long prompts with like ones of the same moment that have none ahead.
    All of them are on steps with the same delay, so that the queue outlasts what this machine does besides.
    """
    like = LikeRequests(epd, count=0)
    late: list[tuple[str, float]] = []  # ID and the queue's share of what each took longer

    def measure_round() -> Errors:
        usual = medians([read_breakdown(like.time_one()) for _ in range(LIKE_PER_ROUND)])
        answer = time_behind_long_prompts(like)
        found = read_breakdown(answer)
        late_us = found["ttft"] - usual["ttft"]
        queue_us = found[QUEUE] - usual[QUEUE]
        late.append((str(answer.request_id), queue_us / late_us))
        return {"beyond half": (queue_us - late_us / 2) / 1000}

    epd.control.set_injections({"forward": STEP_MS})
    try:
        measure_until_decided(
            measure_round, lambda _: QUEUE_TOLERANCE, max_rounds=MAX_EXPLAIN_ROUNDS
        )
    finally:
        epd.control.set_injections()
    name, share = max(late, key=lambda each: each[1])
    reported = like.explain(name)
    assert reported["cause"]["kind"] in ("setting_limit", "held_by_long_prompts"), reported[
        "sentences"
    ]
    assert next(iter(reported["reasons"])) == "token_budget"
    # Its usual is that of all like requests, ours that of the same round.
    assert reported["stages"][0]["share"] == pytest.approx(share, abs=0.15)
    assert reported["held"] is None or reported["held"]["kinds"]["prefill"] >= 0.5


def time_behind_long_prompts(like: LikeRequests) -> TimedResponse:
    """Send a like request once long prompts are at the engine; gives its answer when theirs have come."""
    bench, url = like.bench, like.bench.fleet.get_url("prefill_decode")
    with ThreadPoolExecutor(LONG_PROMPTS) as pool:
        ahead = [
            pool.submit(
                bench.send_request,
                bench.front_url,
                prompt=os.urandom(8).hex(),
                words=2500,
                max_tokens=2,
            )
            for _ in range(LONG_PROMPTS)
        ]
        # Half of them: the first ones may have ended before the last one has come.
        while count_at_engine(url) < LONG_PROMPTS / 2 and not all(each.done() for each in ahead):
            time.sleep(0.02)
        answer = like.time_one()
        assert all(each.result().status == 200 for each in ahead)
    return answer


def test_delays_of_an_image(epd: LiveDeployment) -> None:
    """Media: what the processor, the encoder and the encoder cache took longer is told apart.

    An item that comes late is waited for as `ec.transfer`, and the queues have nothing of it.
    """
    like = LikeRequests(epd, count=FEWER_LIKE, image=True)
    for place, stage in IMAGE_STAGES.items():
        # The encoder and prefill_decode both prepare an image, so that its processor is late twice.
        check_stage(like.explain(delay_one(like, place)), stage, min_share=0.4)
    reported = like.explain(delay_one(like, "ec_wait"))
    check_cause(reported, "slow_hop")
    assert reported["cause"]["stage"] == "prefill_decode.ec.transfer"
    late = {each["name"]: each["late_ms"] for each in reported["stages"]}
    waited = late["prefill_decode.ec.transfer"]
    queued = sum(late.get(f"prefill_decode.{name}", 0.0) for name in stages.QUEUE_STAGES)
    assert waited >= DELAY_MS
    assert waited >= MIN_SHARE * (waited + queued), late


def test_the_wire(epd: LiveDeployment) -> None:
    """A delay between router and server is the hop's, and no server's."""
    with run_router_behind_proxies(epd) as (router, legs):
        like = LikeRequests(epd, url=router.url, count=FEWER_LIKE)
        legs["prefill_decode"].delay_s = DELAY_MS / 1000
        reported = like.explain(like.send_one())
    check_cause(reported, "slow_hop")
    assert reported["cause"]["stage"] == "router.hop.prefill_decode"


def test_window(epd: LiveDeployment) -> None:
    """The late requests of a window: the stage that was delayed ate the objective."""
    like = LikeRequests(epd, count=12 * LATE)
    names = [delay_one(like, "dispatch") for _ in range(LATE)]
    like.explain(names[-1])  # until it is stored
    # Half of the delay is lateness then: what delays a single request besides is less than that of these.
    words = ["--since", f"{like.since.isoformat()}..", "--slo", str(DELAY_MS / 2), "--json"]
    database = str(epd.fleet.database)
    result = CliRunner().invoke(cli.main, ["explain", "--db", database, *words])
    reported = json.loads(result.stdout)
    check_stage(reported, "dispatch")
    # What other tests asked of this server is the time before, in which some may have been later.
    assert reported["cause"]["kind"] in (*SLEEPS, "nothing"), reported["sentences"]
    assert reported["requests"]["late"] >= LATE and reported["slo"]["stages"][0]["share"] >= 0.5
    assert reported["slo"]["stages"][0]["name"].endswith("dispatch")
