# SPDX-License-Identifier: Apache-2.0
"""The modes of --first-token on real prefill and decode servers: answers equal one server's, and prefill
keeps nothing.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

from lab import tiny_models
from lab.evidence import Errors, ErrorTolerance, measure_until_decided
from lab.local_deployment import ROUTER_FLAG_BY_ROLE
from lab.ttft_client import TimedResponse
from tests.live.bench import (
    LiveDeployment,
    make_parent_header,
    make_trace_id,
    mark_repeated,
    read_breakdown,
    read_metric,
)
from ttft_otel.model.endpoints import CHAT_PATH, COMPLETIONS_PATH
from ttft_otel.model.names import keys, span_names

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
        read = normalize_events if question.get("stream", True) else read_plain_answer
        assert read(got) == read(one), (got.body, one.body)
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


def read_plain_answer(answer: TimedResponse) -> Any:
    """A response that was not streamed, without ID and time."""
    found = answer.json()
    del found["id"], found["created"]
    return found


def is_first_token_early(answer: TimedResponse) -> bool:
    """Whether the client's first token came from prefill."""
    return not any(name.startswith("decode.") for name in read_breakdown(answer))


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
        many = fields.get("max_tokens") != 1
        assert is_first_token_early(got) == (mode != "off" or not many), read_breakdown(got)
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


class FirstToken(NamedTuple):
    """Milliseconds of one: the client's TTFT; of that, above prefill's leg, and above the router's TTFT."""

    ttft_ms: float
    above_ms: float
    way_ms: float


def measure_first_token(modes: RouterModes, mode: str) -> FirstToken:
    """Send one request through this mode's router; times are of the client's clock."""
    answer = modes.send_request(mode, words=400, max_tokens=4)
    assert answer.client_ttft_us is not None
    found = read_breakdown(answer)
    # As the router measured it: what prefill accounts for, and the hop.
    is_leg = ("prefill.", "router.hop.prefill")
    leg_us = sum(us for name, us in found.items() if name.startswith(is_leg))
    spent_us = (0, leg_us, found["ttft"])
    return FirstToken(*((answer.client_ttft_us - us) / 1000 for us in spent_us))


def test_the_first_token_is_the_prefill_legs(modes: RouterModes) -> None:
    """At the median TTFT exceeds prefill's leg by the way from the client plus at most 2 ms; `off` is later.

    The way is what the client's clock shows above the router's in mode `off`, where no first token competes
    for the cores with a decode leg that begins.
    """
    limits = {
        "above": ErrorTolerance(-math.inf, 2.0, 40.0),
        "later": ErrorTolerance(-math.inf, 0.0, 80.0),
    }

    def measure_round() -> Errors:
        off, early = (measure_first_token(modes, mode) for mode in MODES)
        return {"above": early.above_ms - off.way_ms, "later": early.ttft_ms - off.ttft_ms}

    rounds = measure_until_decided(measure_round, lambda name: limits[name])
    usual = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    sys.stderr.write(f"\n[live] first token, ms, medians of pairs: {usual}\n")


def test_the_handover_is_in_the_trace(modes: RouterModes) -> None:
    """The span ttft.handover is below the router's server span, and its steps add up."""
    trace = make_trace_id()
    modes.send_request("strip", words=200, headers=make_parent_header(trace))
    spans = modes.bench.wait_for_trace(
        trace, lambda found: any(span["name"] == span_names.HANDOVER for span in found)
    )
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


def read_busy_metrics(url: str) -> dict[str, float]:
    """The gauges of a server's requests that are not zero."""
    found = {name: sum(read_metric(url, f"{name}{{")) for name in IDLE_METRICS}
    return {name: value for name, value in found.items() if value}


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
        while (found := read_busy_metrics(url)) and time.monotonic() < start + seconds:
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
