# SPDX-License-Identifier: Apache-2.0
"""Servers of other shapes, each started for its own tests: off, full, short of memory, several processes.

Long: they run with `scripts/test --full`.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.live.bench import ASK, Bench, breakdown
from tests.live.conftest import Deck
from ttft_otel import names, stages
from ttft_otel.lab import client, fleet, models, processes
from ttft_otel.lab.client import Question
from ttft_otel.lab.fleet import Plan, deployed
from ttft_otel.lab.injection import Control
from ttft_otel.lab.recipes import Options
from ttft_otel.lab.servers import Server

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]


@contextmanager
def alone(deck: Deck, folder: Path, extra: tuple[str, ...] = (), **changes: Any) -> Iterator[Bench]:
    """One server of the text model, nothing else running unless told what to start beside it."""
    deck.stop()
    if beside := changes.pop("beside", ""):
        deck.begin(beside)
    control = Control(folder / "control.json")
    traced = changes.pop("traced", True)
    chunk = changes.pop("chunk", 512)
    options = Options(model=models.build(models.TEXT), control=control.path, extra=extra)
    options = replace(options, **changes)
    env = {"TTFT_OTEL_GUARD": "keep"}
    plan = Plan("mono", options, folder=folder, traced=traced, env=env, chunk=chunk)
    with deployed(plan) as running:
        bench = Bench(running, control)
        for _ in range(3):
            client.ask(bench.front, max_tokens=2)
        yield bench


def test_one_at_a_time_queues_the_others(deck: Deck, tmp_path: Path) -> None:
    """max-num-seqs 1, three requests at once: two of them wait in prefill.queue, one twice as long."""
    with alone(deck, tmp_path, max_num_seqs=1) as bench:
        bench.control.set({"forward": 100})
        many = [Question(prompt=f"q{n}", max_tokens=1, headers=ASK) for n in range(3)]
        found = [breakdown(answer) for answer in client.ask_all(bench.front, many)]

    first, second, third = sorted(each["prefill.queue"] for each in found)
    assert first < 60_000
    assert second >= 95_000
    assert third >= 195_000
    assert all(each["ipc"] < 20_000 and each[stages.UNATTRIBUTED] == 0 for each in found)


def test_preemption_is_stall_and_its_tokens_are_counted(deck: Deck, tmp_path: Path) -> None:
    """A prompt half computed has to leave for others' tokens: stall, and its tokens counted again.

    39 blocks of 32 tokens (and the null block). Three short requests hold 3 each, and 4 after 13
    tokens; the long one is admitted while its 28 fit, and does not fit any more when it gets there.
    """
    extra = ("--num-gpu-blocks-override", "40", "--block-size", "32", "--no-enable-prefix-caching")
    trace = os.urandom(16).hex()
    header = {names.TRACEPARENT: f"00-{trace}-{'c' * 16}-01"}
    short = Question(words=60, max_tokens=60, extra={"ignore_eos": True})
    late = Question(words=850, max_tokens=2, headers=header)
    with alone(deck, tmp_path, extra, max_model_len=1024, chunk=64) as bench:
        bench.control.set({"forward": 30})
        threads = [
            threading.Thread(target=client.ask, args=(bench.front, replace(short, prompt=f"s{n}")))
            for n in range(3)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        answer = client.ask(bench.front, late)
        for thread in threads:
            thread.join()
        spans = bench.trace(trace, lambda got: any(span["name"] == "ttft" for span in got))

    assert answer.status == 200
    found = next(span["attributes"] for span in spans if span["name"] == "ttft")
    assert found[names.PREEMPTIONS] > 0, found
    assert found[names.RECOMPUTED_TOKENS] > 0
    assert found[names.stage_us("prefill.stall")] > 200_000
    assert found[names.UNATTRIBUTED_US] == 0
    assert sum(us for key, us in found.items() if names.stage_of(key)) == found[names.TOTAL_US]


def test_vllms_own_span_hangs_under_our_server_span(deck: Deck, tmp_path: Path) -> None:
    """The operator switched vLLM's tracing on as well: one trace, llm_request below our server span."""
    receiver = "http://127.0.0.1:{port}/v1/traces"
    port = _port()
    env = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    extra = ("--otlp-traces-endpoint", receiver.format(port=port))
    deck.stop()
    sink = fleet.receiver(tmp_path / "own.db", port)
    with Server(sink), alone(deck, tmp_path, extra, env=env) as bench:
        trace = os.urandom(16).hex()
        header = {names.TRACEPARENT: f"00-{trace}-{'c' * 16}-01"}
        bench.ask(bench.front, max_tokens=3, headers=header)
        theirs = _trace(f"http://127.0.0.1:{port}", trace, "llm_request")
        ours = bench.trace(trace, lambda got: any(s["kind"] == "server" for s in got))

    server = next(span for span in ours if span["kind"] == "server")
    assert {span["parent_id"] for span in theirs if span["name"] == "llm_request"} == {
        server["span_id"]
    }


def test_two_api_servers_give_one_record_each(deck: Deck, tmp_path: Path) -> None:
    """--api-server-count 2: every request leaves one ttft span, whichever process served it."""
    with alone(deck, tmp_path, ("--api-server-count", "2")) as bench:
        _each_gives_one(bench, ranks={0})


def test_two_engines_give_one_record_each_with_its_rank(deck: Deck, tmp_path: Path) -> None:
    """--data-parallel-size 2: every request leaves one ttft span that names its engine."""
    extra = ("--data-parallel-size", "2")
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with alone(deck, tmp_path, extra, env=env) as bench:
        _each_gives_one(bench, ranks={0, 1})


def _each_gives_one(bench: Bench, ranks: set[int]) -> None:
    traces = [os.urandom(16).hex() for _ in range(24)]
    many = [
        Question(max_tokens=3, headers={names.TRACEPARENT: f"00-{trace}-{'c' * 16}-01"})
        for trace in traces
    ]
    assert all(answer.status == 200 for answer in client.ask_all(bench.front, many))
    seen = set()
    for trace in traces:
        spans = bench.trace(trace, lambda got: any(s["name"] == "ttft" for s in got))
        found = [span for span in spans if span["name"] == "ttft"]
        assert len(found) == 1
        assert found[0]["attributes"][names.UNATTRIBUTED_US] == 0
        seen.add(found[0]["attributes"][names.RANK])
    assert seen == ranks


def test_off_is_plain_vllm(deck: Deck, tmp_path: Path) -> None:
    """TTFT_OTEL unset: log lines, processes and sockets are those of a vLLM that does not know us."""
    shapes = {}
    for name, env in (("plain", {"VLLM_PLUGINS": "none"}), ("off", {"TTFT_OTEL": ""})):
        folder = tmp_path / name
        folder.mkdir()
        changes: dict[str, Any] = {"env": env, "traced": False, "control": None}
        with alone(deck, folder, **changes) as bench:
            server = bench.fleet.servers["mono"]
            client.ask(bench.front, max_tokens=3)
            time.sleep(1)
            shapes[name] = (_sockets(server.pid), len(processes.of_session(server.pid)))
            text = server.log.read_text(errors="replace")
            assert "ttft" not in _without_ours(text)

    assert shapes["off"] == shapes["plain"]


def _without_ours(text: str) -> str:
    """The log without what names our package for other reasons: its folders, the plugin list."""
    kept = [line for line in text.splitlines() if "plugins" not in line.lower()]
    return re.sub(r"\S*[/']ttft\S*|\S*ttft_\w+\S*", "", "\n".join(kept))


def _sockets(leader: int) -> int:
    """How many sockets all processes of a server hold."""
    count = 0
    for pid in processes.of_session(leader):
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                count += os.readlink(link).startswith("socket:")
            except OSError:
                continue
    return count


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _trace(url: str, trace: str, name: str) -> list[dict[str, Any]]:
    """A trace from another receiver, once a span of this name has arrived."""
    for _ in range(60):
        try:
            with urllib.request.urlopen(f"{url}/api/trace/{trace}", timeout=5) as answer:
                spans: list[dict[str, Any]] = json.load(answer)["spans"]
            if any(span["name"] == name for span in spans):
                return spans
        except urllib.error.HTTPError as error:
            assert error.code == 404
        time.sleep(0.5)
    raise AssertionError(f"no {name} in {trace}")
