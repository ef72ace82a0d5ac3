# SPDX-License-Identifier: Apache-2.0
"""The router before real servers: its TTFT is the client's, a delay on the wire shows in its hop, little is
unaccounted for, and what it records of prompts, caches and speed is what servers report.

The modes of --first-token on prefill and decode servers: answers equal one server's, and prefill keeps
nothing.
"""

from __future__ import annotations

import json
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest

from lab import free_ports, tiny_models, ttft_client
from lab.delay_proxy import DelayProxy, run_delay_proxy
from lab.evidence import Errors, ErrorTolerance, measure_until_decided
from lab.local_deployment import ROUTER_FLAG_BY_ROLE
from lab.local_servers import LocalServer
from lab.ttft_client import TimedResponse
from tests.live.bench import (
    READ_PROMPTS_METRIC,
    LiveDeployment,
    fetch_json,
    make_parent_header,
    make_trace_id,
    mark_repeated,
    read_breakdown,
    read_metric,
)
from tests.live.conftest import BLOCK_TOKENS
from tests.live.test_injected import SLEPT, Sample, check_difference
from ttft_otel.model.endpoints import CHAT_PATH, COMPLETIONS_PATH
from ttft_otel.model.names import keys, metric_names, span_names
from ttft_otel.model.stages import REPORT_FIELDS, UNATTRIBUTED

FEW_ROUNDS, ALL_ROUNDS = 8, 50  # every day, and with --full
MAX_SHARE = 0.05  # of the router's TTFT, which no server accounts for, at the median
# A hop costs 1 to 4 ms whatever the TTFT: of a short one that is a large share.
MIN_TTFT_US = 20_000
WORDS = (100, 400, 1200)
ROUTING_FLAGS = ("--routing-logic", "ttft")
COUNTED = (
    READ_PROMPTS_METRIC,
    metric_names.ROUTER_PREFILL_SAMPLES,
    metric_names.ROUTER_PENDING_TOKENS,
    metric_names.ROUTER_PREDICTION_MAPE,
)


ECHO_RESPONSE = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\ndata: {}\n\n"
)
MeasureClock = Callable[[], float]


@pytest.fixture(scope="session")
def measure_clock() -> Iterator[MeasureClock]:
    """Asks a server that answers at once: the client's TTFT minus the time that the server noted, in ms.

    Called between two requests to a router: that much is the client's own, its socket, and the time that
    both processes wait for a core.
    """
    noted_ms: list[float] = []

    def answer_request(peer: socket.socket) -> None:
        with peer:
            head, _, body = peer.recv(65536).partition(b"\r\n\r\n")
            began_ns = time.monotonic_ns()
            length = re.search(rb"content-length: (\d+)", head)
            missing = int(length[1]) - len(body) if length else 0
            while missing > 0:
                missing -= len(peer.recv(65536))
            noted_ms.append((time.monotonic_ns() - began_ns) / 1e6)
            peer.sendall(ECHO_RESPONSE)

    def measure() -> float:
        answer = ttft_client.send_timed_request(url, words=2500, max_tokens=1)
        assert answer.client_ttft_us is not None
        return answer.client_ttft_us / 1000 - noted_ms[-1]

    server = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{server.getsockname()[1]}"
    serving = (server, answer_request)
    thread = threading.Thread(target=free_ports.accept_connections, args=serving, daemon=True)
    thread.start()
    yield measure
    server.shutdown(socket.SHUT_RDWR)  # close alone does not end accept
    server.close()
    thread.join()


def compute_quantile(values: list[float], share: float) -> float:
    """The quantile `share` of `values` by nearest rank."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def send_long_prompt(bench: LiveDeployment, pictures: int = 0, words: int = 2500) -> TimedResponse:
    """Send a prompt of five chunks, or as many words, that is in no cache, from its first word on."""
    images = tuple(bench.new_picture_seed() for _ in range(pictures))
    fields = {"prompt": bench.new_prompt(), "pictures": images, "words": words, "max_tokens": 1}
    return bench.send_request(bench.front_url, **fields)


def measure_router_clock(epd: LiveDeployment, pictures: int) -> tuple[float, float]:
    """One request: the client's TTFT, and that minus the router's; ms."""
    answer = send_long_prompt(epd, pictures)
    assert answer.client_ttft_us is not None
    excess_us = answer.client_ttft_us - read_breakdown(answer)["ttft"]
    return answer.client_ttft_us / 1000, excess_us / 1000


@pytest.mark.parametrize(
    ("pictures", "rounds"),
    ((1, FEW_ROUNDS), *(pytest.param(many, ALL_ROUNDS, marks=pytest.mark.full) for many in (0, 1))),
)
def test_the_routers_ttft_is_what_the_client_measured(
    epd: LiveDeployment, measure_clock: MeasureClock, pictures: int, rounds: int
) -> None:
    """The median difference is at most 1 ms and p95 at most 3 % of the client's TTFT, beyond a bare echo's.

    Each request is followed by an echo, so that both compete for the cores in the same moments. Few rounds
    have no p95.
    """
    shares: dict[str, list[float]] = {"router": [], "echo": []}

    def measure_round() -> Errors:
        (ttft_ms, excess_ms), own_ms = measure_router_clock(epd, pictures), measure_clock()
        shares["router"].append(abs(excess_ms) / ttft_ms)
        shares["echo"].append(own_ms / ttft_ms)
        return {"router's clock": excess_ms - own_ms}

    measure_until_decided(
        measure_round, lambda _: ErrorTolerance(-1.0, 1.0, 4.0), min_rounds=rounds, max_rounds=80
    )
    if rounds == ALL_ROUNDS:
        p95 = {name: compute_quantile(values, 0.95) for name, values in shares.items()}
        assert p95["router"] <= 0.03 + p95["echo"], p95


@pytest.mark.full
def test_a_router_that_starts_its_clock_late_fails(
    epd: LiveDeployment, measure_clock: MeasureClock
) -> None:
    """The measurement itself: five milliseconds that the router does not see are found."""

    def measure_round() -> Errors:
        (_, excess_ms), own_ms = measure_router_clock(epd, 0), measure_clock()
        return {"late": excess_ms + 5 - own_ms}

    with pytest.raises(AssertionError, match="late: .* is outside"):
        measure_until_decided(measure_round, lambda _: ErrorTolerance(-1.0, 1.0, 4.0))


def check_unaccounted_share(
    send_request: Callable[[int], TimedResponse],
    measure_clock: MeasureClock,
    *,
    min_rounds: int = 5,
    max_rounds: int = 21,
    added_share: float = 0.0,
) -> dict[str, list[float]]:
    """Check that the median of hops and `unattributed` is at most MAX_SHARE of the TTFT.

    send_request: gets the number of the round, sends one request through the router.
    added_share: a part of the TTFT that is counted as unaccounted, to prove that the check can fail.
    What an echo takes in the same round is subtracted: that much the machine adds to any exchange.
    Returns the shares of the TTFT of all rounds, of "router" and of "echo".
    """
    shares: dict[str, list[float]] = {"router": [], "echo": []}

    def measure_round() -> Errors:
        found = read_breakdown(send_request(len(shares["router"])))
        assert found["ttft"] > MIN_TTFT_US, found
        hops_us = sum(us for name, us in found.items() if name.startswith("router.hop."))
        ttft_ms, own_ms = found["ttft"] / 1000, (hops_us + found[UNATTRIBUTED]) / 1000
        own_ms += added_share * ttft_ms
        echo_ms = measure_clock()
        shares["router"].append(own_ms / ttft_ms)
        shares["echo"].append(echo_ms / ttft_ms)
        return {"unaccounted": own_ms - echo_ms - MAX_SHARE * ttft_ms}

    most = ErrorTolerance(-math.inf, 0.0, 4.0)
    measure_until_decided(
        measure_round, lambda _: most, min_rounds=min_rounds, max_rounds=max_rounds
    )
    return shares


@pytest.mark.parametrize("rounds", (FEW_ROUNDS, pytest.param(ALL_ROUNDS, marks=pytest.mark.full)))
def test_what_no_server_accounts_for_is_little(
    epd: LiveDeployment, measure_clock: MeasureClock, rounds: int
) -> None:
    """hop + unattributed: median <= 5 % of the router's TTFT, p99 <= 15 %, each beyond an echo's.

    Prompts of five chunks, in turns without and with an image. Few rounds have no p99.
    """
    send = partial(send_long_prompt, epd)
    shares = check_unaccounted_share(
        lambda number: send(number % 2), measure_clock, min_rounds=rounds, max_rounds=80
    )
    if rounds == ALL_ROUNDS:
        p99 = {name: compute_quantile(values, 0.99) for name, values in shares.items()}
        assert p99["router"] <= 0.15 + p99["echo"], p99


@pytest.mark.full
def test_what_no_server_accounts_for_is_little_with_two_legs(
    pd: LiveDeployment, measure_clock: MeasureClock
) -> None:
    """The same with prompts of ten chunks.

    A hop costs 2 to 4 ms here, whatever the TTFT: the instance that waits polls, on the same core.
    """
    send = partial(send_long_prompt, pd, words=5000)
    check_unaccounted_share(lambda _: send(), measure_clock, min_rounds=8)


@pytest.mark.full
def test_twice_the_allowed_unaccounted_time_fails(
    epd: LiveDeployment, measure_clock: MeasureClock
) -> None:
    """The measurement itself fails when twice the allowed share of the TTFT is added."""
    added = {"max_rounds": 10, "added_share": 2 * MAX_SHARE}
    with pytest.raises(AssertionError, match="unaccounted: .* is outside"):
        check_unaccounted_share(lambda _: send_long_prompt(epd), measure_clock, **added)


@contextmanager
def run_router_behind_proxies(
    bench: LiveDeployment,
) -> Iterator[tuple[LocalServer, dict[str, DelayProxy]]]:
    """Run a second router that reaches the encoder and prefill_decode through TCP proxies."""
    with ExitStack() as stack:
        legs = {
            name: stack.enter_context(run_delay_proxy(bench.fleet.get_url(name), 0.0))
            for name in ("encode", "prefill_decode")
        }
        urls = {name: proxy.url for name, proxy in legs.items()}
        yield stack.enter_context(bench.build_router(urls)), legs


@pytest.mark.parametrize("leg", mark_repeated(("encode", "prefill_decode"), ("prefill_decode",)))
def test_a_delay_on_the_wire_shows_in_its_hop(epd: LiveDeployment, leg: str) -> None:
    """A delay of 80 ms between router and instance shows in `router.hop.<leg>` and nowhere else."""
    with run_router_behind_proxies(epd) as (router, legs):

        def measure(delay_ms: float) -> Sample:
            legs[leg].delay_s = delay_ms / 1000
            pictures = (epd.new_picture_seed(),)
            found = read_breakdown(epd.send_request(router.url, pictures=pictures, max_tokens=1))
            return {**found, SLEPT: round(legs[leg].slept_ms * 1000)}

        measure(0)
        check_difference(measure, f"router.hop.{leg}", spare_ms=0.5)


@pytest.mark.untimed
def test_the_report_speaks_the_original_names(epd: LiveDeployment) -> None:
    """GET /ttft_report/{id} of the router has by_role, combined and the original fields."""
    answer = epd.send_request(epd.front_url, pictures=(epd.new_picture_seed(),), max_tokens=2)

    found = epd.get_json(f"/ttft_report/{answer.request_id}", "router")

    assert found["request_id"] == answer.request_id
    assert {"encode", "prefill_decode"} <= set(found["by_role"])
    assert set(REPORT_FIELDS) | {"ttft_ms"} <= set(found["combined"])
    assert found["by_role"]["encode"]["enc_compute_time_ms"] > 0
    assert found["by_role"]["prefill_decode"]["prefill_compute_time_ms"] > 0
    assert found["combined"]["enc_compute_time_ms"] > 0


@pytest.mark.untimed
def test_a_real_encoders_items_are_learnt_from(epd: LiveDeployment) -> None:
    """With --encoder-routing-logic ttft GET /instances shows how long an item takes on the encoder."""
    legs = {name: epd.fleet.get_url(name) for name in ("encode", "prefill_decode")}
    port = free_ports.find_free_port()
    flags = (*ROUTING_FLAGS, "--encoder-routing-logic", "ttft", "--admin-port", str(port))
    with epd.build_router(legs, *flags) as router:
        epd.wait_for_tokenizer(router)
        for _ in range(12):
            found = read_breakdown(
                epd.send_request(router.url, pictures=(epd.new_picture_seed(),), max_tokens=1)
            )
            assert found["router.tokenize"] > 0 and found["encode.encoder.compute"] > 0
        reported = fetch_json(f"http://127.0.0.1:{port}/instances")

    assert reported["routing"]["encoders"] == "ttft"
    encoder = next(each for each in reported["instances"] if each["leg"] == "encode")
    (fit,) = encoder["fits"].values()
    assert fit["samples"] == 12 and max(fit["a"], fit["b"], fit["d"]) > 0
    assert encoder["predictions"]["outcomes"] >= 4 and encoder["besides"] > 0
    assert encoder["pending"] == {"requests": 0, "tokens": 0, "pairs": 0}


def test_prompts_prefixes_and_predictions(newer: LiveDeployment) -> None:
    """After some prompts the router has a fit, and expects of a repeated one the engine's cached tokens."""
    with newer.build_router({"mono": newer.front_url}, *ROUTING_FLAGS) as router:
        newer.wait_for_tokenizer(router)
        before = read_metric(router.url, READ_PROMPTS_METRIC)[0]
        for number in range(15):
            fields = {"prompt": newer.new_prompt(), "words": WORDS[number % 3], "max_tokens": 1}
            answer = newer.send_request(router.url, **fields)
            assert read_breakdown(answer)["router.tokenize"] > 0
        asked = {"prompt": newer.new_prompt(), "words": 1200, "max_tokens": 1}
        for _ in range(2):
            answer, trace = newer.send_traced(router.url, **asked)
            assert answer.status == 200
        spans = newer.wait_for_spans(trace, span_names.TTFT, 2)
        counted = {name: read_metric(router.url, name) for name in COUNTED}

    known = {
        key: value
        for each in spans
        if each["name"] in (span_names.TTFT, "router.route")
        for key, value in each["attributes"].items()
    }
    assert known[keys.PREDICTED_MS] > 0
    found = known[keys.CACHED_TOKENS]
    believed = json.loads(known[keys.ROUTE_CACHED_TOKENS])[0]  # stored as text
    assert found > 1000 and found <= believed < found + BLOCK_TOKENS
    assert counted[READ_PROMPTS_METRIC] == [before + 17]
    assert counted[metric_names.ROUTER_PREFILL_SAMPLES][0] >= 18
    assert counted[metric_names.ROUTER_PENDING_TOKENS] == [0]
    (mape,) = counted[metric_names.ROUTER_PREDICTION_MAPE]
    assert 0 < mape < 10  # how good it is depends on what else two cores do


MODES = ("off", "strip")
PATHS = (CHAT_PATH, COMPLETIONS_PATH)
USAGE = {"stream_options": {"include_usage": True}}
IDLE_METRICS = (
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
)


def read_vocabulary() -> dict[str, int]:
    """The tokens of the tiny model."""
    path = tiny_models.build_model(tiny_models.VISION_RECIPE) / "tokenizer.json"
    found: dict[str, int] = json.loads(path.read_text("utf-8"))["model"]["vocab"]
    return found


class RouterModes:
    """A router for each mode in front of the same servers; decode is also called directly."""

    def __init__(self, bench: LiveDeployment, stack: ExitStack) -> None:
        self.bench = bench
        servers = bench.fleet.servers
        legs = {role: servers[role].url for role in servers if role in ROUTER_FLAG_BY_ROLE}
        self.urls = {
            mode: stack.enter_context(bench.build_router(legs, "--first-token", mode)).url
            for mode in MODES
        }
        self.urls[""] = bench.fleet.get_url("decode")
        # Most tokens of a random model are parts of characters.
        self.letters = [
            number
            for word, number in read_vocabulary().items()
            if word.isascii() and word.isalpha()
        ]
        for mode in MODES:
            for path in PATHS:
                self.send_request(mode, path=path, prompt="warm")

    def send_request(
        self, mode: str, allowed: list[int] | None = None, **fields: Any
    ) -> TimedResponse:
        """Send a new prompt through the router of `mode`, "" to decode; answers are of ASCII letters."""
        extra = {"allowed_token_ids": allowed or self.letters, **fields.pop("extra", {})}
        fields = {"prompt": self.bench.new_prompt(), "extra": extra, **fields}
        return self.bench.send_request(self.urls[mode], **fields)

    def check_same(self, mode: str, **question: Any) -> TimedResponse:
        """The mode's answer to a new prompt is decode's own, streamed or not; gives the answer."""
        question["prompt"] = self.bench.new_prompt()
        got, one = self.send_request(mode, **question), self.send_request("", **question)
        assert got.status == one.status == 200
        if question.get("stream", True):
            found = [normalize_events(each) for each in (got, one)]
        else:
            found = [{**each.json(), "id": "", "created": 0} for each in (got, one)]
        assert found[0] == found[1], (got.body, one.body)
        return got


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[ExitStack, dict[str, RouterModes]]]:
    """The routers of this module by the deployment's database; they run until its last test ends."""
    with ExitStack() as stack:
        yield stack, {}


Started = tuple[ExitStack, dict[str, RouterModes]]


def start_before(bench: LiveDeployment, started: Started) -> RouterModes:
    """A router for each mode before a deployment's servers, started once."""
    stack, known = started
    database = str(bench.fleet.database)
    return known.get(database) or known.setdefault(database, RouterModes(bench, stack))


@pytest.fixture
def modes(pd: LiveDeployment, started: Started) -> RouterModes:
    """Routers of all modes in front of prefill and decode."""
    return start_before(pd, started)


def normalize_events(answer: TimedResponse) -> list[Any]:
    """The events of a stream without IDs and times; neighbours that only add text are merged.

    A server merges tokens when its client reads slowly, so how many events there are is a matter of chance.
    """
    found: list[Any] = []
    for event in answer.events:
        if event.data == "[DONE]":
            found.append("[DONE]")
            continue
        data = json.loads(event.data)
        del data["id"], data["created"]
        for choice in data["choices"]:
            before = found[-1] if found else None
            if isinstance(before, dict) and before["choices"]:
                (old,) = before["choices"]
                if "role" not in old.get("delta", {}) and old["finish_reason"] is None:
                    holder, name = get_choice_text(choice)
                    earlier, _ = get_choice_text(old)
                    holder[name] = earlier[name] + holder[name]
                    found.pop()
        found.append(data)
    return found


def get_choice_text(choice: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The part of a choice that holds its text."""
    return (choice["delta"], "content") if "delta" in choice else (choice, "text")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", mark_repeated(MODES, ("off",)))
def test_every_mode_answers_as_one_server(modes: RouterModes, mode: str, path: str) -> None:
    """At temperature 0 every mode gives one server's events: text, finish reason, usage, model and [DONE]."""
    for fields in (
        {"words": 4},
        {"words": 200, "extra": USAGE},
        {"words": 4, "max_tokens": 2, "extra": USAGE},
        {"words": 4, "max_tokens": 1, "extra": USAGE},
        {"words": 9, "extra": {"stop": ["~~~~"]}},
    ):
        got = modes.check_same(mode, path=path, **fields)
        # Whether the client's first token came from prefill.
        is_early = not any(name.startswith("decode.") for name in read_breakdown(got))
        assert is_early == (mode != "off" or fields.get("max_tokens") == 1), read_breakdown(got)
    for fields in ({"words": 4}, {"words": 200}, {"words": 4, "max_tokens": 1}):
        modes.check_same(mode, path=path, stream=False, **fields)


def test_ids_times_and_names_are_one_streams(modes: RouterModes) -> None:
    """All events of a joined stream have the same ID, time and model."""
    for mode in MODES:
        answer = modes.send_request(mode, request_id=f"mine-{mode}")
        events = [json.loads(event.data) for event in answer.events[:-1]]
        assert {event["id"] for event in events} == {f"chatcmpl-mine-{mode}"}
        assert len({event["created"] for event in events}) == 1
        assert {event["model"] for event in events} == {"tiny"}


def test_text_at_the_seam(modes: RouterModes) -> None:
    """With parts of "é" and with random tokens no text is lost, doubled, or taken from the prompt."""
    every = read_vocabulary()
    halves = [every["Ã"], every["©"]]  # a byte-level vocabulary writes C3 and A9 like this
    for allowed in (halves, halves, *[list(every.values())] * 8):
        for path in PATHS:
            modes.check_same("strip", path=path, max_tokens=9, allowed=allowed)


def test_seeds(modes: RouterModes) -> None:
    """`strip` gives the seeded answer of one server."""
    for seed in range(8):
        extra = {"temperature": 1.0, "seed": seed}
        modes.check_same("strip", path=COMPLETIONS_PATH, extra=extra)


def test_the_first_token_is_the_prefill_legs(modes: RouterModes) -> None:
    """At the median TTFT exceeds prefill's leg by the way from the client plus at most 2 ms; `off` is later.

    The way is what the client's clock shows above the router's in mode `off`, where no first token competes
    for the cores with a decode leg that begins.
    """
    limits = {
        "above": ErrorTolerance(-math.inf, 2.0, 40.0),
        "later": ErrorTolerance(-math.inf, 0.0, 80.0),
    }

    def measure(mode: str) -> tuple[float, float, float]:
        answer = modes.send_request(mode, words=400, max_tokens=4)
        assert answer.client_ttft_us is not None
        found = read_breakdown(answer)
        # As the router measured it: what prefill accounts for, and the hop.
        is_leg = ("prefill.", "router.hop.prefill")
        leg_us = sum(us for name, us in found.items() if name.startswith(is_leg))
        client_ms = answer.client_ttft_us / 1000
        return client_ms, client_ms - leg_us / 1000, client_ms - found["ttft"] / 1000

    def measure_round() -> Errors:
        (off_ms, _, way_ms), (early_ms, above_ms, _) = map(measure, MODES)
        return {"above": above_ms - way_ms, "later": early_ms - off_ms}

    measure_until_decided(measure_round, lambda name: limits[name])


def test_the_handover_is_in_the_trace(modes: RouterModes) -> None:
    """The span ttft.handover is below the router's server span, and its steps add up."""
    trace = make_trace_id()
    modes.send_request("strip", words=200, headers=make_parent_header(trace))
    spans = modes.bench.wait_for_spans(trace, span_names.HANDOVER)
    (handover,) = [span for span in spans if span["name"] == span_names.HANDOVER]
    own = handover["attributes"]
    steps = [span for span in spans if span["parent_id"] == handover["span_id"]]
    total = own[keys.HANDOVER_TOTAL_US]
    assert 2 * total == sum(us for name, us in own.items() if name.endswith("_us"))
    assert own[keys.name_handover_attribute("decode.kv.transfer")] > 0
    assert keys.name_handover_attribute(span_names.FIRST_DECODE) in own
    assert {step["name"] for step in steps} >= {"router.hop.decode", "decode.kv.transfer"}
    above = next(span for span in spans if span["span_id"] == handover["parent_id"])
    assert (above["kind"], above["attributes"][keys.ROLE]) == ("server", "router")


def list_what_is_left(modes: RouterModes, seconds: float = 8.0) -> dict[str, dict[str, float]]:
    """What prefill and decode still hold after a while, by role; empty as soon as both are free.

    An idle engine takes no step, and both its gauges and the blocks whose release waits for the
    end of a step (`Scheduler.deferred_frees`) stay as its last step left them. Half-way through
    the wait a busy server is therefore given one token to make; that frees no block of a request
    that is still alive.
    """
    left = {}
    for role in ("prefill", "decode"):
        url, start, nudged = modes.bench.fleet.get_url(role), time.monotonic(), False
        while True:
            gauges = {name: sum(read_metric(url, f"{name}{{")) for name in IDLE_METRICS}
            found = {name: value for name, value in gauges.items() if value}
            if not found or time.monotonic() > start + seconds:
                break
            if not nudged and time.monotonic() > start + seconds / 2:
                modes.bench.send_request(url, prompt="step", max_tokens=1)
                nudged = True
            time.sleep(0.2)
        if found:
            left[role] = found
    return left


@pytest.mark.parametrize("mode", mark_repeated(MODES, ("off",)))
def test_nothing_is_left_on_prefill(modes: RouterModes, mode: str) -> None:
    """When the answer has one token, ends on prefill or is refused by decode, prefill releases its blocks
    at once.
    """
    ends = {"stop_token_ids": modes.letters, "ignore_eos": False}
    for fields in (
        {"max_tokens": 1},
        {"extra": ends},
        {"extra": ends, "stream": False},
        {"max_tokens": 9000},
    ):
        modes.send_request(mode, words=300, **fields)
        assert list_what_is_left(modes) == {}, fields


@pytest.mark.parametrize("mode", mark_repeated(MODES, ("off",)))
def test_nothing_is_left_by_clients_that_leave(modes: RouterModes, mode: str) -> None:
    """When clients hang up while prefill computes or decode waits, both servers are idle within seconds."""
    # Long answers: on a fast machine a short one has come before its client leaves.
    computing = {"words": 2500, "abort_s": 0.05, "max_tokens": 300, "extra": {"ignore_eos": True}}
    for late, fields in ((0, computing), (3000, {"abort_s": 1.5})):
        with modes.bench.control.inject_delay("kv_wait", late):
            answer = modes.send_request(mode, **{"words": 300, **fields})
        assert answer.aborted
        assert list_what_is_left(modes) == {}, fields
    assert modes.send_request(mode).status == 200


def test_what_does_not_fit_is_refused_as_by_one_server(modes: RouterModes) -> None:
    """A prompt longer than the model's context gets decode's status and body in every mode, and no stream."""
    for mode in MODES:
        question = {"prompt": modes.bench.new_prompt(), "max_tokens": 9000}
        got, one = modes.send_request(mode, **question), modes.send_request("", **question)
        assert got.status == one.status == 400
        assert got.json() == one.json()


@pytest.mark.parametrize("mode", MODES)
def test_images_go_through_all_three(epd3: LiveDeployment, started: Started, mode: str) -> None:
    """With the encoder chats with and without an image are answered as by decode, streamed or not."""
    modes = start_before(epd3, started)
    for pictures in ((), (epd3.new_picture_seed(),)):
        for stream in (True, False):
            modes.check_same(mode, pictures=pictures, stream=stream)
