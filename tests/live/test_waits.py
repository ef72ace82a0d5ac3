# SPDX-License-Identifier: Apache-2.0
"""What requests wait for on one real server that has few of everything: places, tokens, KV blocks, adapters.

Each limit alone has 95 % of the wait that was made of it, and `ttft-otel explain` names it; of two at once
TWO_AT_ONCE says which one is told; what is attributed to another request is what removing it changes. Every
step is slowed down, so that waits are many steps on any machine. Last, what waits now: on /metrics, compared
with vLLM's own count on the same page, and in `ttft-otel top`, also while the engine core hangs; and what the
router holds, as measured by its client and by a proxy before the server, which know nothing of either.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from click.testing import CliRunner

from lab import tiny_models
from lab.delay_proxy import DelayProxy, ProxiedExchange, run_delay_proxy
from lab.evidence import Errors, ErrorTolerance, measure_until_decided
from lab.local_servers import LocalServer
from lab.session_processes import list_session_pids
from lab.ttft_client import COMPLETIONS_PATH, TimedResponse
from tests.live.bench import (
    LiveDeployment,
    count_at_engine,
    make_parent_header,
    make_trace_id,
    read_breakdown,
    read_metric,
)
from tests.live.conftest import (
    ADAPTERS,
    BLOCK_TOKENS,
    CACHE_BLOCKS,
    TEXT_PLACES,
    DeploymentDeck,
)
from tests.live.test_alone import run_alone
from tests.live.test_commands import (
    FEWER_LIKE,
    MIN_SHARE,
    LikeRequests,
    check_cause,
    check_stage,
    get_window,
)
from ttft_otel.commands.top import top
from ttft_otel.model import stages
from ttft_otel.model.names import keys, metric_names
from ttft_otel.model.stages import HOLD, UNATTRIBUTED

pytestmark = pytest.mark.timeout(900)  # what comes next is started meanwhile

STEP_MS: Final = 40.0
SHORT_STEP_MS: Final = 20.0  # of who holds the only place
LONG_STEP_MS: Final = 800.0
ATTEMPTS: Final = 3  # of each case: programs beside these stretch single steps and gaps
LARGE_BLOCKS: Final = 58  # leave room for short prompts, and none for another of SECOND_BLOCKS
SECOND_BLOCKS: Final = CACHE_BLOCKS - LARGE_BLOCKS
FIRST, SECOND = ADAPTERS
CHOICES: Final = 6000  # of a grammar: two seconds of one core

Fields = dict[str, Any]


def read_reasons(found: dict[str, Any], kind: str = "queue") -> dict[str, int]:
    """Microseconds per reason of a span's queue or stall; fails unless they add up to it."""
    reasons = {
        parsed[1]: us
        for key, us in found.items()
        if (parsed := keys.parse_reason_attribute(key)) and parsed[0] == kind
    }
    waits = stages.QUEUE_STAGES if kind == "queue" else (stages.STALL_STAGE,)
    assert sum(reasons.values()) == sum(
        found.get(keys.name_stage_attribute(stage), 0) for stage in waits
    )
    return reasons


def get_share(reasons: dict[str, int], *names: str) -> float:
    """The share of all waiting that these reasons have."""
    return sum(reasons.get(name, 0) for name in names) / sum(reasons.values())


def check_reason(bench: LiveDeployment, trace: str, *names: str) -> None:
    """These reasons together have nearly all of the wait, the first of them some."""
    reasons = read_reasons(bench.fetch_ttft(trace))
    assert reasons[names[0]] > 0
    assert get_share(reasons, *names) >= MIN_SHARE, reasons


def make_prompt(blocks: int, answer: int = 1, **more: Any) -> Fields:
    """A request whose prompt fills so many KV blocks, and is in no cache."""
    ids = [random.randrange(10, 200) for _ in range(blocks * BLOCK_TOKENS)]
    return {"path": COMPLETIONS_PATH, "max_tokens": answer, "extra": {"prompt": ids}, **more}


def make_grammar() -> Fields:
    """A request whose grammar is new, and takes a second or more to compile."""
    words = ["".join(random.choices("abcdefgh", k=20)) for _ in range(CHOICES)]
    return {"extra": {"structured_outputs": {"choice": words}, "ignore_eos": False}}


def cache_prompt(
    bench: LiveDeployment, answer: int, blocks: int = LARGE_BLOCKS, **more: Any
) -> Fields:
    """A request that holds so many blocks while it answers; its prompt is in the prefix cache."""
    fields = make_prompt(blocks, **more)
    assert bench.send_request(bench.front_url, **fields).status == 200
    return {**fields, "max_tokens": answer}


def plan_holders(bench: LiveDeployment, case: str) -> tuple[list[Fields], Fields]:
    """Who comes first in a case, and who then waits: the last of the holders is the first to end."""
    long_prompt = make_prompt(LARGE_BLOCKS)
    more_blocks = make_prompt(SECOND_BLOCKS)
    others = [{"max_tokens": 140}] * (TEXT_PLACES - 1)
    second = {"model": SECOND}
    plans: dict[str, Any] = {
        "max_num_seqs": lambda: ([*others, {"max_tokens": 40}], {}),
        "token_budget": lambda: ([long_prompt], {}),
        "kv_blocks": lambda: ([cache_prompt(bench, 60)], more_blocks),
        # Each grows by a block with its first token: of 71 that is one too many, and the last one has to go.
        "preempted": lambda: ([cache_prompt(bench, 60, 23) for _ in range(3)], {}),
        "lora": lambda: ([{"max_tokens": 40, "model": FIRST}], second),
        "max_num_seqs, token_budget": lambda: ([*others, long_prompt], {}),
        "max_num_seqs, kv_blocks": lambda: ([*others, cache_prompt(bench, 60)], more_blocks),
        "max_num_seqs, lora": lambda: ([*others, {"max_tokens": 60, "model": FIRST}], second),
        "token_budget, kv_blocks": lambda: ([long_prompt], more_blocks),
        "token_budget, lora": lambda: ([{**long_prompt, "model": FIRST}], second),
        "kv_blocks, lora": lambda: (
            [cache_prompt(bench, 60, model=FIRST)],
            {**more_blocks, **second},
        ),
    }
    found: tuple[list[Fields], Fields] = plans[case]()
    return found


def measure_case(bench: LiveDeployment, case: str, reason: str) -> str:
    """The ID of a request that waited in `case`; fails unless `reason` has nearly all of the wait."""
    seen = []
    for _ in range(ATTEMPTS):
        holders, waiter = plan_holders(bench, case)
        with bench.control.inject_delay("forward", STEP_MS), ExitStack() as stack:
            for each in holders:
                stack.enter_context(bench.run_request(**each))
            answer, trace = bench.send_traced(**{"max_tokens": 2, **waiter})
        assert answer.status == 200, answer.body[:300]
        seen.append(read_reasons(bench.fetch_ttft(trace)))
        if get_share(seen[-1], reason) >= MIN_SHARE:
            return answer.request_id
    raise AssertionError((case, seen))


# Reason of waiting -> the setting that explain names.
SETTINGS: Final = {
    "max_num_seqs": "max_num_seqs",
    "token_budget": "max_num_batched_tokens",
    "kv_blocks": "kv_blocks",
    "lora": "max_loras",
}


@pytest.mark.parametrize("reason", SETTINGS)
def test_alone(small: LiveDeployment, reason: str) -> None:
    """One limit: it has the wait, and explain names it with its setting."""
    model = SECOND if reason == "lora" else "tiny"
    like = LikeRequests(small, count=FEWER_LIKE, model=model)
    reported = like.explain(measure_case(small, reason, reason))

    check_cause(reported, "setting_limit", SETTINGS[reason])
    assert reported["reasons"][reason] >= 0.9
    settings = reported["cause"]["remedy"]["settings"]
    assert reason != "max_num_seqs" or "--max-num-seqs" in settings


def test_preempted(small: LiveDeployment) -> None:
    """Answers fill the cache, one is preempted: who comes later waits behind it, for blocks as it does."""
    like = LikeRequests(small, count=FEWER_LIKE)
    before = small.sum_metric("vllm:num_preemptions_total")
    reported = like.explain(measure_case(small, "preempted", "kv_blocks"))

    assert small.sum_metric("vllm:num_preemptions_total") > before
    check_cause(reported, "setting_limit", "kv_blocks")


# Two at once: which of them is told. Written before the first run.
TWO_AT_ONCE: Final = {
    ("max_num_seqs", "token_budget"): "max_num_seqs",
    ("max_num_seqs", "kv_blocks"): "max_num_seqs",
    ("max_num_seqs", "lora"): "max_num_seqs",
    ("token_budget", "kv_blocks"): "token_budget",
    ("token_budget", "lora"): "token_budget",
    ("kv_blocks", "lora"): "lora",
}


@pytest.mark.full
@pytest.mark.parametrize("both", TWO_AT_ONCE, ids=" and ".join)
def test_two_at_once(small: LiveDeployment, both: tuple[str, str]) -> None:
    """Both limits hold until the same moment: the one of the table has the wait."""
    measure_case(small, ", ".join(both), TWO_AT_ONCE[both])


def test_in_step(small: LiveDeployment) -> None:
    """It comes while a long step runs: all of its wait is the rest of that step."""
    like = LikeRequests(small, count=FEWER_LIKE)
    for _ in range(ATTEMPTS):
        small.control.set_injections({"forward": LONG_STEP_MS})
        began_ns = time.monotonic_ns()
        with small.run_request(max_tokens=2):
            small.control.set_injections()
            reported = like.explain(like.send_one())
        if reported["answered"] and small.control.read_delays(began_ns):
            break
    check_stage(reported, "prefill.queue")
    assert reported["cause"]["kind"] in ("not_known", "process_pause"), reported["sentences"]
    assert reported["reasons"] == {"in_step": 1.0}


def test_long_prompt(small: LiveDeployment) -> None:
    """Nobody else is there, and the prompt is long."""
    like = LikeRequests(small, count=FEWER_LIKE)
    reported = like.explain(like.send_one(**make_prompt(LARGE_BLOCKS)))

    check_cause(reported, "own_size")
    assert reported["cause"]["tokens_to"] > LARGE_BLOCKS * reported["cause"]["tokens_from"]


def test_cache_miss(small: LiveDeployment) -> None:
    """The prompt is as long as others, of which the prefix cache has all but the last block."""
    like = LikeRequests(small, count=FEWER_LIKE, **make_prompt(LARGE_BLOCKS // 2))
    reported = like.explain(like.send_one(**make_prompt(LARGE_BLOCKS // 2)))

    check_cause(reported, "cold_prefix_cache")
    assert reported["cause"]["hits_to"] < 0.1 < 0.5 < reported["cause"]["hits_from"]


@pytest.fixture
def texts(features: LiveDeployment) -> LikeRequests:
    """Like requests on the server with one place."""
    return get_window(features)


def test_nobody_else(features: LiveDeployment) -> None:
    """At most the engine's own loop is waited for, and no span is added."""
    _, trace = features.send_traced(max_tokens=2)
    spans = features.wait_for_spans(trace, "prefill.queue")
    (queue,) = [span for span in spans if span["name"] == "prefill.queue"]

    assert set(read_reasons(features.fetch_ttft(trace))) == {"in_step"}
    assert queue["attributes"][keys.QUEUE_REASON] == "in_step"


def test_a_usual_request(texts: LikeRequests) -> None:
    """Counter-test: no cause is named for requests than which a quarter of their like took longer.

    By the server's clock, as explain ranks them: the client's has the way to it as well.
    """
    ranked = sorted(texts.sent, key=lambda each: read_breakdown(each)["ttft"])
    upper = len(ranked) * 3 // 4
    reported = [texts.explain(str(each.request_id)) for each in ranked[upper - 8 : upper]]
    assert any(each["answered"] for each in reported), reported
    for each in reported:
        assert each["answered"] or "no longer than usual" in each["refusal"], reported
        assert not each["answered"] or each["cause"]["kind"] == "nothing", reported


def test_pause(features: LiveDeployment, texts: LikeRequests) -> None:
    """The scheduler is paused: the request waits for nothing else."""
    features.call("/pause?mode=keep&clear_cache=false")
    resume = threading.Timer(0.8, features.call, ("/resume",))
    resume.start()
    try:
        name, trace = texts.trace_one()
    finally:
        resume.join()
    check_reason(features, trace, "paused")
    check_cause(texts.explain(name), "set_aside", "paused")


def test_grammar(features: LiveDeployment, texts: LikeRequests) -> None:
    """Its grammar is compiled for a second or more, and nobody else is there."""
    name, trace = texts.trace_one(**make_grammar())
    check_reason(features, trace, "grammar")
    check_cause(texts.explain(name), "set_aside", "grammar")


def test_priority(features: LiveDeployment, texts: LikeRequests) -> None:
    """Who came later and is urgent takes the only place, waits less, and has a long answer."""
    features.control.set_injections({"forward": SHORT_STEP_MS})
    with features.run_request(max_tokens=100), ThreadPoolExecutor(1) as pool:
        before = count_at_engine(features.front_url)
        patient = pool.submit(texts.trace_one, extra={"priority": 5})
        features.wait_for_arrival(before, patient)
        with features.run_request(max_tokens=250, extra={"priority": -5}) as urgent:
            name, trace = patient.result()
            reported = texts.explain(name)
    waits = [
        features.fetch_ttft(each)["ttft.prefill.queue_us"] for each in (urgent.result()[1], trace)
    ]
    assert waits[0] < waits[1]
    check_reason(features, trace, "priority", "max_num_seqs")
    check_cause(reported, "setting_limit", "scheduling_policy")
    assert reported["reasons"].keys() <= {"in_step", "max_num_seqs", "priority"}


def test_grammar_and_place(features: LiveDeployment) -> None:
    """The only place is taken at first, and a grammar is compiled for longer than that: this is told."""
    # On a busy machine the first one may have ended before the other comes: then it gets a longer answer,
    # not by so much that it would outlast the grammar.
    features.control.set_injections({"forward": SHORT_STEP_MS})
    for attempt in range(2 * ATTEMPTS):
        with (
            features.run_request(max_tokens=round(50 * 1.2**attempt)),
            features.run_request(max_tokens=2, **make_grammar()) as second,
        ):
            answer, trace = second.result()
            assert answer.status == 200
        held_by_decoding = features.fetch_ttft(trace).get(keys.name_held_attribute("decode"), 0)
        if held_by_decoding:
            break
    assert held_by_decoding > 0, "the place was not taken meanwhile"
    check_reason(features, trace, "grammar")


def test_pause_and_place(features: LiveDeployment) -> None:
    """Paused with its only place taken, by one that leaves before the engine goes on: the pause is told."""
    with features.run_request(max_tokens=4000, abort_s=2.0) as first:
        features.call("/pause?mode=keep&clear_cache=false")
        try:
            with ThreadPoolExecutor(1) as pool:
                second = pool.submit(features.send_traced, max_tokens=2)
                gone, _ = first.result()
                time.sleep(0.3)  # until the engine has been told so
                features.call("/resume")
                found, trace = second.result()
        finally:
            features.call("/resume")
    assert gone.aborted and found.status == 200
    assert gone.started_ns + gone.total_us * 1000 > found.started_ns, "the place was free"
    check_reason(features, trace, "paused")


# By what it holds the place with; 40 steps, and as many in chunks.
HOLDERS: Final[dict[str, Fields]] = {
    "decode": {"words": 1, "max_tokens": 40},
    "prefill": {"words": 4000, "max_tokens": 1},
}
HEAD_START_S: Final = 0.1  # the holder is at the engine then, and has not ended
MIN_WAIT_US: Final = 300_000  # of a request that was behind the holder


class Waited(NamedTuple):
    """A small request: its TTFT and its wait in microseconds, its queue's span, the holder's trace."""

    ttft_us: int
    waited_us: int
    queue: dict[str, Any]
    holders_trace: str


def measure_small(bench: LiveDeployment, holder: Fields | None) -> Waited:
    """Send a small request, behind the holder if there is one."""
    with ThreadPoolExecutor(1) as pool:
        future = None
        if holder is not None:
            future = pool.submit(bench.send_traced, prompt=bench.new_prompt(), **holder)
            time.sleep(HEAD_START_S)
        _, trace = bench.send_traced(max_tokens=1)
        _, holders_trace = future.result() if future else (None, "")
    spans = bench.wait_for_trace(
        trace, lambda got: {"ttft", "prefill.queue"} <= {s["name"] for s in got}
    )
    found = {span["name"]: span["attributes"] for span in spans}
    queue = found["prefill.queue"]
    waited_us = found["ttft"][keys.name_stage_attribute("prefill.queue")]
    held = [queue.get(keys.name_held_attribute(kind), 0) for kind in stages.HOLDING_KINDS]
    assert sum(held) == waited_us
    return Waited(found["ttft"][keys.TOTAL_US], waited_us, queue, holders_trace)


@pytest.mark.parametrize("kind", HOLDERS)
def test_what_is_attributed(features: LiveDeployment, kind: str) -> None:
    """Of an answer or a prompt that took the only place the attributed time is the difference, within 5 %.

    Pairs of the same moment, with the holder and without it. Of a prompt that of the wait: the API server
    prepares the small request while it works on the long one.
    """

    def measure_round() -> Errors:
        plain, found = measure_small(features, None), measure_small(features, HOLDERS[kind])
        for _ in range(ATTEMPTS):  # the holder had ended, or not begun: the first one takes longer
            if found.waited_us >= MIN_WAIT_US:
                break
            found = measure_small(features, HOLDERS[kind])
        first = json.loads(found.queue[keys.HELD_BY])[0]
        # The holder is named, by its kind and with its trace, and nobody where nobody was.
        assert (first["kind"], first["trace_id"]) == (kind, found.holders_trace)
        assert keys.HELD_BY not in plain.queue
        if kind == "decode":
            held_us = found.queue[keys.name_held_attribute(kind)]
            assert abs(first["us"] - held_us) <= 0.05 * first["us"]
        place = 0 if kind == "decode" else 1
        return {"percent": 100 * (first["us"] / (found[place] - plain[place]) - 1)}

    with features.control.inject_delay("forward", SHORT_STEP_MS):
        measure_until_decided(measure_round, lambda _: ErrorTolerance(-5.0, 5.0, 10.0))


EDGE: Final = 504  # pixels: 324 tokens, more than half of the encoder's 512 of a step
LARGE: Final[Fields] = {
    "size": EDGE,
    "extra": {"mm_processor_kwargs": {"max_pixels": EDGE * EDGE}},
}
IMAGES: Final = 10  # with the text before each image fewer than the step's tokens
ENCODER_MS: Final = 80.0


@pytest.mark.full
def test_one_image_at_a_time(deck: DeploymentDeck, tmp_path: Path) -> None:
    """Ten images that are encoded one after the other: the last one waits for its turn, and for nothing else.

    The text before an image is computed at once, so that this is a wait between two chunks. The server is
    one of its own: a model that takes videos has an encoder budget for the longest of them.
    """
    limit = ("--limit-mm-per-prompt", json.dumps({"video": 0}), "--trust-request-mm-kwargs")
    model = tiny_models.build_model(tiny_models.VISION_RECIPE)
    with run_alone(deck, tmp_path, limit, model=model) as bench:
        like = LikeRequests(bench, count=FEWER_LIKE, image=True, **LARGE)
        with (
            bench.control.inject_delay("encoder", ENCODER_MS),
            ThreadPoolExecutor(IMAGES) as pool,
        ):
            sent = list(pool.map(lambda _: like.time_one(), range(IMAGES)))
        last = max(sent, key=lambda each: each.client_ttft_us or 0)
        reported = like.explain(str(last.request_id))
        found = bench.fetch_ttft(reported["examples"][0]["trace_id"])
    reasons = read_reasons(found, "stall")

    assert get_share(reasons, "encoder_budget") >= MIN_SHARE, reasons
    # Else few of the others were encoded in between.
    queued = [found.get(keys.name_stage_attribute(stage), 0) for stage in stages.QUEUE_STAGES]
    assert reasons["encoder_budget"] >= sum(queued)
    check_cause(reported, "setting_limit", "max_num_batched_tokens")


WAITERS: Final = 2
HANG_S: Final = 2.0
PATIENCE_S: Final = 60.0
OURS = re.compile(rf'^{metric_names.WAITING}{{reason="(\w+)"}} ([\d.]+)$', re.M)
VLLMS = re.compile(r"^vllm:num_requests_waiting\{.*\} ([\d.]+)$", re.M)


def read_waiting(bench: LiveDeployment) -> tuple[dict[str, int], int]:
    """Our counts that are not 0, and vLLM's one, from one page."""
    with urllib.request.urlopen(f"{bench.front_url}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    ours = {reason: int(float(number)) for reason, number in OURS.findall(text)}
    return {reason: n for reason, n in ours.items() if n}, sum(
        map(int, map(float, VLLMS.findall(text)))
    )


def ask_top(bench: LiveDeployment) -> dict[str, Any]:
    """What `ttft-otel top --json` says of the server."""
    done = CliRunner().invoke(top, ["--server", bench.front_url, "--json"])
    assert done.exit_code == 0, done.output
    (view,) = json.loads(done.output)
    return dict(view)


@contextmanager
def keep_waiting(bench: LiveDeployment, holders: list[Fields], waiter: Fields) -> Iterator[None]:
    """While WAITERS requests wait behind the holders, by vLLM's own count; steps are slow meanwhile."""
    with bench.control.inject_delay("forward", STEP_MS), ExitStack() as stack:
        for each in holders:
            stack.enter_context(bench.run_request(**each))
        pool = stack.enter_context(ThreadPoolExecutor(WAITERS))
        for _ in range(WAITERS):
            pool.submit(bench.send_request, bench.front_url, **{"max_tokens": 2, **waiter})
        yield


def wait_until_it_waits(bench: LiveDeployment) -> tuple[dict[str, int], int]:
    """The first page on which both count WAITERS; the last one when time is up.

    Who has come within a step waits for its end first (`in_step`), and is looked at again after it.
    """
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        found = read_waiting(bench)
        if sum(found[0].values()) == found[1] == WAITERS and "in_step" not in found[0]:
            return found
        time.sleep(0.05)
    return found


def test_the_reason_is_on_the_page(small: LiveDeployment) -> None:
    """While requests wait, /metrics counts as many as vLLM does, under the reason that was made."""
    with keep_waiting(small, *plan_holders(small, "kv_blocks")):
        ours, vllms = wait_until_it_waits(small)
    assert (ours, vllms) == ({"kv_blocks": WAITERS}, WAITERS)
    assert read_waiting(small) == ({}, 0)


def test_a_stopped_engine_core_shows_while_it_stands(small: LiveDeployment) -> None:
    """The oldest wait grows, reasons and holders stay with their age; all is 0 when it has gone on."""
    pids = list_session_pids(small.fleet.servers["mono"].pid)
    (pid,) = [each for each in pids if b"EngineCore" in Path(f"/proc/{each}/cmdline").read_bytes()]
    with keep_waiting(small, *plan_holders(small, "max_num_seqs")):
        wait_until_it_waits(small)
        before = ask_top(small)
        assert before["waiting"] == {"max_num_seqs": WAITERS} and before["age_s"] < 1
        assert {each["kind"] for each in before["holders"]} == {"decode"}
        os.kill(pid, signal.SIGSTOP)
        try:
            first = ask_top(small)
            time.sleep(HANG_S)
            second = ask_top(small)
        finally:
            os.kill(pid, signal.SIGCONT)
    assert first["pending"] == second["pending"] == WAITERS
    for key in ("oldest_s", "age_s"):
        assert HANG_S <= second[key] - first[key] < HANG_S + 5
    assert second["waiting"] == before["waiting"]
    held_by = [[each["request_id"] for each in view["holders"]] for view in (before, second)]
    assert held_by[0] == held_by[1]
    after = ask_top(small)
    assert (after["pending"], after["oldest_s"], after["waiting"], after["age_s"]) == (0, 0, {}, 0)
    assert small.sum_metric(f"{metric_names.HOOK_ERRORS}_total") == 0


MAX_QUEUE_MS = 50
LONG_BLOCKS, SHORT_BLOCKS = 40, 4  # of one step each
HELD = 4
CLOCK_US = 2_000  # what two readings of one clock may differ in by rounding and order
MAX_GAP_MS = 100.0  # between an answer and the next request; a few on an idle machine
FLAGS = ("--routing-logic", "ttft", "--max-queue-ms", str(MAX_QUEUE_MS), "--trust-priority")


@pytest.fixture
def proxied(small: LiveDeployment) -> Iterator[tuple[LocalServer, DelayProxy]]:
    """A router that holds, and the proxy through which it reaches the server; it can predict prefills."""
    with (
        run_delay_proxy(small.front_url, 0.0) as proxy,
        small.control.inject_delay("forward", STEP_MS),
        small.build_router({"mono": proxy.url}, *FLAGS) as router,
    ):
        for number in range(100):  # until the tokenizer is there, and a line is fitted
            small.send_request(router.url, **make_prompt(1 + number % 5))
            if sum(read_metric(router.url, metric_names.ROUTER_PREFILL_SAMPLES)) >= 15:
                break
        yield router, proxy


def send_burst(
    bench: LiveDeployment, router: LocalServer, proxy: DelayProxy
) -> tuple[list[TimedResponse], list[str]]:
    """A long prompt, short ones while it is computed, and an urgent one last; answers, trace IDs."""
    traces = [make_trace_id() for _ in range(HELD + 1)]
    before = len(proxy.exchanges)
    with ThreadPoolExecutor(HELD + 1) as pool:
        sent = []
        for number, trace in enumerate(traces):
            fields = make_prompt(SHORT_BLOCKS if number else LONG_BLOCKS)
            if number == HELD:
                fields["extra"]["priority"] = -1
            headers = make_parent_header(trace)
            sent.append(pool.submit(bench.send_request, router.url, headers=headers, **fields))
            while not number and len(proxy.exchanges) == before:
                time.sleep(0.01)
            time.sleep(0.1)
        return [each.result() for each in sent], traces


def check_times(answer: TimedResponse, exchange: ProxiedExchange) -> int:
    """The microseconds that it was held, which the clocks of client and proxy must confirm."""
    found = read_breakdown(answer)
    ttft_us = found.pop("ttft")
    assert sum(found.values()) == ttft_us and found[UNATTRIBUTED] == 0
    assert answer.client_ttft_us is not None
    # Before the router has the request, and after its answer.
    beyond_us = answer.client_ttft_us - ttft_us
    assert -CLOCK_US <= beyond_us <= 0.05 * ttft_us + 50_000, (answer.client_ttft_us, ttft_us)
    own_us = sum(found[each] for each in found if each.startswith("router.") and each != HOLD)
    to_proxy_us = (exchange.began_ns - answer.started_ns) // 1000
    held_us = found.get(HOLD, 0)
    # What the router did besides, and the way, are all that it can have taken longer.
    assert -CLOCK_US <= to_proxy_us - held_us <= own_us + beyond_us + CLOCK_US, (found, to_proxy_us)
    return held_us


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_burst_is_held(small: LiveDeployment, proxied: tuple[LocalServer, DelayProxy]) -> None:
    """Each hold is a stage of the right length, sums close, the urgent one overtakes, the server is busy."""
    router, proxy = proxied
    gaps_ms = []
    for _ in range(ATTEMPTS):
        answers, traces = send_burst(small, router, proxy)
        assert [each.status for each in answers] == [200] * (HELD + 1)
        exchanges = [
            each
            for answer in answers
            for each in proxy.exchanges
            if answer.request_id.encode() in each.data
        ]
        held_us = [check_times(*each) for each in zip(answers, exchanges, strict=True)]
        assert held_us[0] == 0 and min(held_us[1:]) > MAX_QUEUE_MS * 1000, held_us
        order = sorted(range(HELD + 1), key=lambda at: exchanges[at].began_ns)
        assert order == [0, HELD, *range(1, HELD)], held_us
        reasons = []
        for trace in traces:
            spans = small.wait_for_spans(trace, "ttft", 2)
            holds = [each["attributes"] for each in spans if each["name"] == HOLD]
            reasons.append([each[keys.QUEUE_REASON] for each in holds])
        assert reasons == [[], *[["priority"]] * (HELD - 1), ["max_queue"]]
        # From when all that was sent is answered until the next one is there.
        done_ns = [
            max(exchanges[each].answered_ns for each in order[:at]) for at in range(1, HELD + 1)
        ]
        gaps_ms = [
            (exchanges[at].began_ns - done) / 1e6
            for at, done in zip(order[1:], done_ns, strict=True)
        ]
        if max(gaps_ms) < MAX_GAP_MS:
            break
    assert max(gaps_ms) < MAX_GAP_MS, gaps_ms
    assert read_metric(router.url, metric_names.ROUTER_HOLDS + '_total{result="sent"}') >= [HELD]
