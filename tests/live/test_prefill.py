# SPDX-License-Identifier: Apache-2.0
"""The modes of the first token on real P and D: the same answers, earlier, and nothing left on P."""

from __future__ import annotations

import json
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.live.bench import Bench, again, breakdown
from tests.live.test_closing import parent, trace_id
from ttft_otel import names
from ttft_otel.lab import client, fleet, models
from ttft_otel.lab.client import Answer
from ttft_otel.lab.servers import Server

MODES = ("off", "strip", "continue")
BLOCK = 128  # tokens of a KV block on CPU
LATE = "kv_wait"
IDLE = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")


def vocabulary() -> dict[str, int]:
    """The tiny model's tokens."""
    path = models.build(models.VISION) / "tokenizer.json"
    found: dict[str, int] = json.loads(path.read_text("utf-8"))["model"]["vocab"]
    return found


def plain() -> list[int]:
    """Tokens that are ASCII letters: a random model otherwise says mostly halves of characters."""
    return [number for word, number in vocabulary().items() if word.isascii() and word.isalpha()]


class Modes:
    """One router for each mode before the same P and D; D is also asked directly."""

    def __init__(self, bench: Bench, urls: dict[str, str]) -> None:
        self.bench, self.urls = bench, urls
        self.direct = bench.fleet.url("decode")
        self.letters = plain()

    def ask(self, mode: str, allowed: list[int] | None = None, **fields: Any) -> Answer:
        """One request, "" for D itself; answers are of these tokens only."""
        extra = {"allowed_token_ids": allowed or self.letters, **fields.pop("extra", {})}
        return self.bench.ask(self.urls.get(mode, self.direct), extra=extra, **fields)

    def prompt(self) -> str:
        """A prompt that no cache has seen."""
        return f"{self.bench.fresh()}"


class Routers:
    """The routers of this module, by deployment: each is started once."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.modes: dict[str, Modes] = {}

    def before(self, bench: Bench, shape: str) -> Modes:
        """One for each mode before a deployment's servers."""
        if shape not in self.modes:
            servers = bench.fleet.servers
            legs = {role: [servers[role].url] for role in servers if role in fleet.FLAGS}
            sink = {names.ENV_ENDPOINT: bench.fleet.url("receiver")}
            commands = {mode: fleet.router(legs, sink, "--first-token", mode) for mode in MODES}
            urls = {
                mode: self.stack.enter_context(Server(command)).url
                for mode, command in commands.items()
            }
            self.modes[shape] = Modes(bench, urls)
            for mode in MODES:
                for path in (client.CHAT, client.COMPLETIONS):
                    self.modes[shape].ask(mode, path=path, prompt="warm")
        return self.modes[shape]


@pytest.fixture(scope="module")
def routers() -> Iterator[Routers]:
    """They run until the module's last test."""
    with ExitStack() as stack:
        yield Routers(stack)


@pytest.fixture
def modes(pd: Bench, routers: Routers) -> Modes:
    """P and D behind routers of all modes."""
    return routers.before(pd, "pd")


def told(answer: Answer) -> list[Any]:
    """An answer's events, ids and times apart, with neighbours that only add text made one.

    A server merges tokens that its client is slow to take; which ones is chance.
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
                    holder, name = at(choice)
                    earlier, _ = at(old)
                    holder[name] = earlier[name] + holder[name]
                    found.pop()
        found.append(data)
    return found


def at(choice: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Where a choice's text is."""
    return (choice["delta"], "content") if "delta" in choice else (choice, "text")


def whole(answer: Answer) -> Any:
    """A plain answer, ids and times apart."""
    found = answer.json()
    del found["id"], found["created"]
    return found


def early(answer: Answer) -> bool:
    """Whether the client's first token was P's."""
    return not any(name.startswith("decode.") for name in breakdown(answer))


@pytest.mark.parametrize("path", (client.CHAT, client.COMPLETIONS))
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_answers_as_one_server(modes: Modes, mode: str, path: str) -> None:
    """At temperature 0, event by event: text, preamble, finish reason, usage, model, [DONE]."""
    usage = {"stream_options": {"include_usage": True}}
    for fields in (
        {"words": 4},
        {"words": 200, "extra": usage},
        {"words": 4, "max_tokens": 2, "extra": usage},
        {"words": 4, "max_tokens": 1, "extra": usage},
        {"words": 9, "extra": {"stop": ["~~~~"]}},
    ):
        question = {"path": path, "prompt": modes.prompt(), **fields}
        got, one = modes.ask(mode, **question), modes.ask("", **question)
        assert got.status == one.status == 200
        assert told(got) == told(one), (got.events, one.events)
        many = question.get("max_tokens") != 1
        assert early(got) == (mode != "off" or not many), breakdown(got)
    for fields in ({"words": 4}, {"words": 200}, {"words": 4, "max_tokens": 1}):
        question = {"path": path, "prompt": modes.prompt(), "stream": False, **fields}
        assert whole(modes.ask(mode, **question)) == whole(modes.ask("", **question))


def test_ids_times_and_names_are_one_streams(modes: Modes) -> None:
    """One id, one time and one model over all events of a joined stream."""
    for mode in MODES:
        answer = modes.ask(mode, prompt=modes.prompt(), request_id=f"mine-{mode}")
        events = [json.loads(event.data) for event in answer.events[:-1]]
        assert {event["id"] for event in events} == {f"chatcmpl-mine-{mode}"}
        assert len({event["created"] for event in events}) == 1
        assert {event["model"] for event in events} == {"tiny"}


@pytest.mark.parametrize("path", (client.CHAT, client.COMPLETIONS))
def test_whole_blocks_do_not_kill_decode(modes: Modes, path: str) -> None:
    """Around multiples of the block size continue answers as one server, and D lives on."""
    digits = len("".join(map(str, range(10))))  # a digit is a token of its own here
    usage = {"stream_options": {"include_usage": True}}
    base = tokens(modes.ask("", path=path, prompt="1" * digits, extra=usage)) - digits
    for length in (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1):
        number = str(modes.bench.fresh())
        prompt = (number * length)[: length - base]
        question = {"path": path, "prompt": prompt, "extra": usage}
        got, one = modes.ask("continue", **question), modes.ask("", **question)
        assert tokens(one) == tokens(got) == length
        assert told(got) == told(one)
        assert early(got)
    assert modes.bench.fleet.servers["decode"].healthy()


def tokens(answer: Answer) -> int:
    """How long the server says the prompt was."""
    (usage,) = [json.loads(each.data) for each in answer.events[:-1] if '"usage":{' in each.data]
    found: int = usage["usage"]["prompt_tokens"]
    return found


@pytest.mark.parametrize("mode", ("strip", "continue"))
def test_text_at_the_seam(modes: Modes, mode: str) -> None:
    """Halves of "é", and any tokens: no text of the prompt leaks, nothing is lost or doubled."""
    every = vocabulary()
    halves = [every["Ã"], every["©"]]  # a byte-level vocabulary writes C3 and A9 like this
    for allowed in (halves, halves, *[list(every.values())] * 8):
        question = {"prompt": modes.prompt(), "max_tokens": 9, "allowed": allowed}
        for path in (client.CHAT, client.COMPLETIONS):
            got = modes.ask(mode, path=path, **question)
            assert told(got) == told(modes.ask("", path=path, **question))


def test_seeds(modes: Modes) -> None:
    """Strip: a seeded answer is one server's. Continue: its second token is not the first's draw."""
    repeated = 0
    for seed in range(8):
        extra = {"temperature": 1.0, "seed": seed}
        question = {"prompt": modes.prompt(), "path": client.COMPLETIONS, "extra": extra}
        assert told(modes.ask("strip", **question)) == told(modes.ask("", **question))
        answer = modes.ask("continue", max_tokens=2, **question)
        first, second = (json.loads(e.data)["choices"][0]["text"] for e in answer.events[:2])
        repeated += first == second
    assert repeated <= 4


@again
def test_the_first_token_is_the_prefill_legs(modes: Modes) -> None:
    """Median over pairs: TTFT is P's leg, the client's way to the router and at most 2 ms; off is later.

    That way is what the client's clock shows above the router's in mode off, where no first token
    shares the cores with a decode leg that begins.
    """
    above: dict[str, list[float]] = {mode: [] for mode in MODES}
    ttfts: dict[str, list[float]] = {mode: [] for mode in MODES}
    ways: list[float] = []
    for _ in range(15):
        for mode in MODES:
            answer = modes.ask(mode, prompt=modes.prompt(), words=400, max_tokens=4)
            assert answer.client_ttft_us is not None
            found = breakdown(answer)
            ttfts[mode].append(answer.client_ttft_us / 1000)
            above[mode].append((answer.client_ttft_us - leg(found)) / 1000)
            if mode == "off":
                ways.append((answer.client_ttft_us - found["ttft"]) / 1000)
    way = statistics.median(ways)
    for mode in ("strip", "continue"):
        gains = [off - on for off, on in zip(ttfts["off"], ttfts[mode], strict=True)]
        usual, now = statistics.median(ttfts["off"]), statistics.median(ttfts[mode])
        sys.stderr.write(
            f"\n[live] first token, {mode}: {now:.1f} ms instead of {usual:.1f} ms,"
            f" {statistics.median(gains):.1f} ms earlier (median of pairs);"
            f" {statistics.median(above[mode]):.2f} ms above the prefill leg,"
            f" {way:.2f} of them the client's way\n"
        )
        assert statistics.median(gains) > 0
    for mode in ("strip", "continue"):
        assert statistics.median(above[mode]) - way <= 2.0, (above[mode], ways)


def leg(found: dict[str, int]) -> int:
    """P's leg as the router saw it: what P accounts for, and the way there and back."""
    return sum(
        us
        for name, us in found.items()
        if name.startswith("prefill.") or name == "router.hop.prefill"
    )


def test_the_handover_is_in_the_trace(modes: Modes) -> None:
    """Below the router's server span: what the client felt after P's token, cut and adding up."""
    for mode in ("strip", "continue"):
        trace = trace_id()
        modes.ask(mode, prompt=modes.prompt(), words=200, headers=parent(trace))
        spans = modes.bench.trace(trace, lambda found: named(found, names.HANDOVER))
        (handover,) = named(spans, names.HANDOVER)
        own = handover["attributes"]
        steps = [span for span in spans if span["parent_id"] == handover["span_id"]]
        total = own[names.HANDOVER_TOTAL_US]
        assert total == sum(
            us
            for name, us in own.items()
            if name.endswith("_us") and name != names.HANDOVER_TOTAL_US
        )
        assert own[names.handover_us("decode.kv.transfer")] > 0
        assert (names.handover_us(names.FIRST_DECODE) in own) == (mode == "strip")
        assert {step["name"] for step in steps} >= {"router.hop.decode", "decode.kv.transfer"}
        above = next(span for span in spans if span["span_id"] == handover["parent_id"])
        assert (above["kind"], above["attributes"][names.ROLE]) == ("server", "router")


def named(spans: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The spans of one name."""
    return [span for span in spans if span["name"] == name]


def busy(url: str) -> dict[str, float]:
    """What a server is at, as its /metrics tells, without the zeros."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found = {
        name: sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))
        for name in IDLE
    }
    return {name: value for name, value in found.items() if value}


def emptied(url: str, seconds: float = 8.0) -> dict[str, float]:
    """What is still there after a while; nothing as soon as there is nothing."""
    deadline = time.monotonic() + seconds
    while (found := busy(url)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_left_on_prefill(modes: Modes, mode: str) -> None:
    """One token, an end on P, a refusal by D: what P kept is given back at once."""
    prefill, decode = (modes.bench.fleet.url(role) for role in ("prefill", "decode"))
    ends = {"stop_token_ids": modes.letters, "ignore_eos": False}
    for fields in (
        {"max_tokens": 1},
        {"extra": ends},
        {"extra": ends, "stream": False},
        {"max_tokens": 9000},
    ):
        modes.ask(mode, prompt=modes.prompt(), words=300, **fields)
        assert emptied(prefill) == emptied(decode) == {}, fields


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_left_by_clients_that_leave(modes: Modes, mode: str) -> None:
    """They hang up while P computes, or while D waits for P's blocks: both are free in seconds."""
    prefill, decode = (modes.bench.fleet.url(role) for role in ("prefill", "decode"))
    for late, fields in ((0, {"words": 2500, "abort_s": 0.1}), (3000, {"abort_s": 1.5})):
        modes.bench.control.set({LATE: late})
        answer = modes.ask(mode, **{"prompt": modes.prompt(), "words": 300, **fields})
        modes.bench.control.set()
        assert answer.aborted
        assert emptied(prefill) == emptied(decode) == {}, fields
    assert modes.ask(mode, prompt=modes.prompt()).status == 200


def test_what_does_not_fit_is_refused_as_by_one_server(modes: Modes) -> None:
    """More tokens than the model's context: D's status and body in every mode, no stream begun."""
    for mode in MODES:
        question = {"prompt": modes.prompt(), "max_tokens": 9000}
        got, one = modes.ask(mode, **question), modes.ask("", **question)
        assert got.status == one.status == 400
        assert got.json() == one.json()


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_images_go_through_all_three(epd3: Bench, routers: Routers, mode: str) -> None:
    """E, P and D: streamed and plain, chat with and without an image, as D alone answers."""
    modes = routers.before(epd3, "epd3")
    for pictures in (0, 1):
        images = tuple(modes.bench.fresh() for _ in range(pictures))
        question = {"prompt": modes.prompt(), "pictures": images}
        assert told(modes.ask(mode, **question)) == told(modes.ask("", **question))
        question = {"prompt": modes.prompt(), "pictures": images, "stream": False}
        assert whole(modes.ask(mode, **question)) == whole(modes.ask("", **question))
