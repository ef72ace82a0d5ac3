# SPDX-License-Identifier: Apache-2.0
"""What is lost where something fails. Without a patch target its stages become unattributed, and the sum of
all is the client's TTFT still; hooks that raise, exporters and receivers that are gone, and clients that send
nonsense or leave change no answer, and traces arrive again; however a server ends, its records arrive.

A known delay inside the lost stages makes them large: all of it must be in `unattributed`, and a
neighbouring stage that took part of it would have grown. Ways of ending that need no vLLM (SIGTERM, Ctrl-C,
process groups): tests/exporter.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lab import ttft_client
from lab.evidence import Errors, ErrorTolerance, measure_until_decided
from lab.ttft_client import TimedRequest
from tests.live.bench import LiveDeployment, read_breakdown, read_metric
from tests.live.conftest import DeploymentDeck, is_running
from tests.live.test_injected import Ask, Sample, load_from_files
from tests.stack.running_stack import wait_until
from ttft_otel.hooks.targets import TARGETS, TARGETS_BY_NAME
from ttft_otel.model import stages
from ttft_otel.model.names import metric_names

DELAY_MS = 60.0
RESOLUTION_MS = 0.75 * DELAY_MS
MAX_STRAY_MS = 6.0  # by which a stage may move that is not lost
MAX_SHARE = 0.1  # of what is lost, by which the remainder may be off
CLIENT = "client beyond all stages"
IMAGE = {"image": True, "max_tokens": 1, "stream": False}  # for an encoder
# Target -> where the delay goes while it is out. Parts have none: nothing is lost with them.
DELAYED = {
    "frontend.render": "receive",
    "frontend.assign": "tokenize",
    "frontend.register": "forward",
    "frontend.outputs": "forward",
    "engine.input": "ipc",
    "scheduler.schedule": "queue",
    "scheduler.update": "sample",
    "worker.execute": "forward",
    "worker.encoder": "encoder",
    "worker.forward": "forward",
    "worker.sample": "sample",
    "worker.tokens": "forward",
    "worker.output": "sample",
    "transfer.wait": "ec_wait",
    "transfer.load": "ec_load",
    "transfer.save": "ec_save",
    "kv.match": "kv_wait",
    "kv.arrive": "kv_wait",
    "kv.load": "kv_load",
    "kv.save": "sample",
    "transfer.flush": "ec_save",
}
PARTS = [target.name for target in TARGETS if not target.lost]
# An image that the encoder has encoded: prefill_decode neither encodes nor saves it. V1 without async has
# no late output.
ON_PD = [
    name
    for name in DELAYED
    if name not in ("worker.encoder", "worker.output", "transfer.save", "transfer.flush")
    and not name.startswith("kv.")
]
# A deployment and what is asked of it -> how, and the targets that are taken out there.
CASES: dict[str, tuple[Ask, Sequence[str]]] = {
    # V1 runner.
    "epd prefill_decode": (LiveDeployment.encode_then_prefill, ON_PD),
    "epd encode": (
        lambda epd: epd.read_one("encode", **IMAGE),
        ("worker.encoder", "transfer.save", "worker.execute"),
    ),
    # The time of prefill's KV blocks is neither queue nor transfer.
    "pd decode": (
        lambda pd: read_breakdown(pd.prefill_then_decode()[1]),
        ("kv.match", "kv.arrive", "engine.input", "scheduler.schedule", "worker.execute"),
    ),
    # V2 runner and async scheduling.
    "newer all": (
        lambda newer: newer.read_one(image=True, max_tokens=1),
        [f"worker.{part}" for part in ("execute", "encoder", "forward", "sample", "output")],
    ),
    # Copies that start at the step's end are lost. It runs the language model, too.
    "nixl encoder": (lambda nixl: nixl.read_one("encode", **IMAGE), ("transfer.flush",)),
    # The step's time before loads, or after saves.
    "files all": (load_from_files, ("kv.load", "kv.save")),
}
# One of each process in every run: the API server, the engine core, the worker, and the connector in both;
# of decode what prefill_decode does not show.
EVERY_DAY = ("frontend.assign", "engine.input", "worker.forward", "transfer.wait", "transfer.load")


def is_everyday(case: str, target: str) -> bool:
    """Whether a target is taken out there in every run."""
    if case == "pd decode":
        return target not in ON_PD
    return case != "epd prefill_decode" or target in EVERY_DAY


def ask_without(
    bench: LiveDeployment, target: str, place: str, once: Callable[[], Sample]
) -> Sample:
    """Send one delayed request while `target` is removed ("": none is); CLIENT is among its stages."""
    bench.control.set_injections(
        {place: DELAY_MS} if place else {}, off=(target,) if target else ()
    )
    bench.control.wait_applied()
    sample = once()
    total = sample.pop("ttft")
    assert sum(sample.values()) == total, (sample, total)
    return {**sample, CLIENT: bench.latest_client_us - total}


def check_loss(
    bench: LiveDeployment, once: Callable[[], Sample], target: str, place: str, encode: bool = False
) -> None:
    """Check that the target's lost stages become unattributed and every other stage stays.

    Each round measures with and without the target; rounds go on until the intervals decide.
    """
    row = TARGETS_BY_NAME[target]
    lost = set(row.lost_encode if encode and row.lost_encode is not None else row.lost)
    limits = {
        # At least nine tenths of the delay. It cannot be too much: the other stages stay as they are, and the
        # sum of all is exact. Two requests' lost stages are not compared: they differ by what steps vary.
        "unattributed beyond the delay": ErrorTolerance(
            -MAX_SHARE * DELAY_MS, math.inf, RESOLUTION_MS
        ),
    }
    other = ErrorTolerance(-MAX_STRAY_MS, MAX_STRAY_MS, RESOLUTION_MS)

    def measure_round() -> Errors:
        full, found = (ask_without(bench, off, place, once) for off in ("", target))
        assert full[stages.UNATTRIBUTED] == 0, full
        kept = set(full) - lost - {stages.UNATTRIBUTED}
        assert kept <= set(found), (kept, found)
        beyond = found[stages.UNATTRIBUTED] / 1000 - DELAY_MS
        return {
            **{name: (found[name] - full[name]) / 1000 for name in kept},
            "unattributed beyond the delay": beyond,
        }

    once()
    try:
        measure_until_decided(measure_round, lambda name: limits.get(name, other))
    finally:
        bench.control.set_injections()
        bench.control.wait_applied()  # the next test must find everything in place


@pytest.mark.parametrize(
    ("deployment", "case", "target"),
    [
        pytest.param(
            *(case.split()[0], case, target),
            id=f"{case} {target}",
            marks=() if is_everyday(case, target) else pytest.mark.full,
        )
        for case, (_, targets) in CASES.items()
        for target in targets
    ],
    indirect=["deployment"],
)
def test_a_lost_target_costs_its_stages(deployment: LiveDeployment, case: str, target: str) -> None:
    """Only the target's stages are lost."""
    ask, _ = CASES[case]
    is_encoder = case == "epd encode"
    place = "encoder" if is_encoder and target == "worker.execute" else DELAYED[target]
    check_loss(deployment, lambda: ask(deployment), target, place, encode=is_encoder)


@pytest.mark.untimed
@pytest.mark.parametrize("target", PARTS)
def test_a_lost_part_costs_no_stage(epd: LiveDeployment, target: str) -> None:
    """Without the target of a part nothing is unattributed: the stage around it has marks of its own."""
    found = [ask_without(epd, target, "", epd.encode_then_prefill) for _ in range(3)]
    epd.control.set_injections()
    epd.control.wait_applied()

    assert all(sample[stages.UNATTRIBUTED] == 0 for sample in found)


@pytest.mark.untimed
def test_every_target_is_taken_out_somewhere() -> None:
    """Each target is in one of the lists above, except those whose effect is fixed at a server's start."""
    fixed = {"frontend.app", "transfer.create", "kv.create"}
    tried = {*PARTS, *(target for _, targets in CASES.values() for target in targets)}

    assert {target.name for target in TARGETS} == tried | fixed


def check_failing_hooks(bench: LiveDeployment, server: str, **question: Any) -> None:
    """Make every hook fail in turn: the answer is the same, and afterwards the stages add up again."""
    url = bench.fleet.get_url(server)
    plain = bench.send_request(url, **question)
    assert not bench.list_complaints(server)
    for target in TARGETS:
        bench.control.set_injections(fail=[target.name])
        bench.control.wait_applied()
        answer = bench.send_request(url, **question)
        assert (answer.status, answer.text) == (200, plain.text), target.name
    bench.control.set_injections()
    bench.control.wait_applied()

    assert read_breakdown(bench.send_request(url, **question))[stages.UNATTRIBUTED] == 0
    said = bench.list_complaints(server)
    assert len(said) >= 10, said  # each hook that ran said so, once


@pytest.mark.untimed
@pytest.mark.parametrize("server", ("prefill_decode", "encode"))
def test_a_hook_that_raises_never_reaches_the_client(epd: LiveDeployment, server: str) -> None:
    """V1 runner: failing hooks change no answer to a text, and of the encoder none to an image."""
    image = {"pictures": (epd.new_picture_seed(),), "max_tokens": 1, "stream": False}
    check_failing_hooks(epd, server, **(image if server == "encode" else {"max_tokens": 4}))


def test_a_hook_that_raises_never_reaches_the_client_of_cudas_runner(newer: LiveDeployment) -> None:
    """With the V2 runner and async scheduling failing hooks change no answer."""
    pictures = (newer.new_picture_seed(),)
    check_failing_hooks(newer, "prefill_decode", pictures=pictures, max_tokens=4)


def test_a_hook_that_raises_never_reaches_the_client_of_decode(pd: LiveDeployment) -> None:
    """On prefill and decode failing hooks of the KV connectors change no answer, and the blocks arrive."""
    for target in (name for name in TARGETS_BY_NAME if name.startswith("kv.")):
        pd.control.set_injections(fail=[target])
        pd.control.wait_applied()
        first, second = pd.prefill_then_decode(max_tokens=4)
        assert (first.status, second.status) == (200, 200), target
        assert second.text.startswith(first.text), target
    pd.control.set_injections()
    pd.control.wait_applied()

    found = read_breakdown(pd.prefill_then_decode()[1])
    assert found[stages.UNATTRIBUTED] == 0 < found["kv.transfer"]
    assert pd.list_complaints("decode") and pd.list_complaints("prefill")


MAX_WAIT_S = 30.0
HEADERS = {
    "traceparent": ("", "x", "00-0-0-00", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "é" * 200),
    "tracestate": ("a=" + "b" * 2000, "=,=,,"),
    "baggage": ("%%%", "k=v" * 3000),
    "x-request-id": ("", "a" * 5000, "<script>"),
    "x-ttft-timing": ("yes", "1, 1"),
    "x-ttft-leg": ("nobody", "encode"),
}


def list_exporters(server_pid: int) -> list[int]:
    """Exporter processes that belong to the processes of this server's session."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            line = (entry / "cmdline").read_bytes().split(b"\0")
            if b"ttft_otel.exporter" in line:
                host = int(line[line.index(b"ttft_otel.exporter") + 3])
                if host == server_pid or os.getsid(host) == server_pid:
                    found.append(int(entry.name))
    return found


def wait_until_traces_arrive(bench: LiveDeployment, url: str) -> None:
    """Send requests until the trace of one of them is in the receiver."""

    def has_arrived() -> bool:
        _, trace = bench.send_traced(url, max_tokens=1)
        for _ in range(20):
            time.sleep(0.1)
            with contextlib.suppress(OSError):
                if bench.get_json(f"/api/trace/{trace}")["spans"]:
                    return True
        return False

    wait_until(has_arrived, MAX_WAIT_S)


@pytest.mark.untimed
@pytest.mark.parametrize("name", HEADERS)
def test_malformed_headers_change_nothing_for_the_client(epd: LiveDeployment, name: str) -> None:
    """With any value of a header that we read, the answer equals the one without that header."""
    for url in (epd.front_url, epd.fleet.get_url("prefill_decode")):
        plain = ttft_client.send_timed_request(url, max_tokens=4)
        for value in HEADERS[name]:
            raw = value.encode("utf-8").decode("latin-1")
            answer = ttft_client.send_timed_request(url, max_tokens=4, headers={name: raw})
            assert (answer.status, answer.text) == (200, plain.text), (name, value[:40])


@pytest.mark.untimed
def test_a_killed_exporter_is_replaced(epd: LiveDeployment) -> None:
    """After SIGKILL to prefill_decode's exporter requests are answered, and a new exporter sends the next
    traces.
    """
    server = epd.fleet.servers["prefill_decode"]
    wait_until_traces_arrive(epd, server.url)
    before = list_exporters(server.pid)
    assert before

    for pid in before:
        os.kill(pid, signal.SIGKILL)
    answer = epd.send_request(server.url, max_tokens=2)

    assert answer.status == 200
    assert read_breakdown(answer)[stages.UNATTRIBUTED] == 0
    wait_until_traces_arrive(epd, server.url)
    assert not set(before) & set(list_exporters(server.pid))


@pytest.mark.untimed
def test_an_absent_receiver_costs_spans_and_nothing_else(epd: LiveDeployment) -> None:
    """Without a receiver answers are as before; when it is back, traces arrive without a restart."""
    receiver = epd.fleet.servers["receiver"]
    receiver.stop()
    try:
        for answer in ttft_client.send_timed_requests(
            epd.front_url, [TimedRequest(max_tokens=2)] * 12
        ):
            assert answer.status == 200
    finally:
        receiver.start().wait_until_ready()

    wait_until_traces_arrive(epd, epd.fleet.get_url("prefill_decode"))


@pytest.mark.untimed
def test_aborted_requests_leave_no_state(epd: LiveDeployment) -> None:
    """After 100 clients hung up at different moments, no request awaits its first token."""
    url = epd.fleet.get_url("prefill_decode")
    for start in range(0, 100, 20):
        many = [
            TimedRequest(prompt=f"abort {start + n}", words=300, abort_s=0.002 + 0.004 * n)
            for n in range(20)
        ]
        ttft_client.send_timed_requests(url, many)
    # It shows that there are none.
    wait_until(lambda: set(read_metric(url, metric_names.PENDING)) == {0.0}, MAX_WAIT_S)
    assert read_breakdown(epd.send_request(url, max_tokens=1))[stages.UNATTRIBUTED] == 0


@pytest.mark.untimed
def test_failing_requests_are_traced_with_their_status(epd: LiveDeployment) -> None:
    """A request that gets 400 has plain vLLM's body, an error span, and the stage in which it ended."""
    answer, trace = epd.send_traced(extra={"temperature": "hot"})
    spans = epd.wait_for_spans(trace, "ttft", 2)

    assert answer.status == 400
    assert b"temperature" in answer.body
    for span in spans:
        if span["name"] == "ttft":
            assert span["attributes"]["error.type"] == "400"
            assert span["attributes"]["ttft.died_in"]


def test_a_killed_process_tree_loses_no_record(newer: LiveDeployment, deck: DeploymentDeck) -> None:
    """After SIGKILL to every process of a streaming server, its ttft spans are in the receiver."""
    server = newer.fleet.servers["prefill_decode"]
    # Hung up after the first token: the ttft half of the record is on its way by then.
    traces = [newer.send_traced(max_tokens=2)[1] for _ in range(8)]
    born = list_exporters(server.pid)
    assert born

    server.kill()

    for trace in traces:
        assert newer.fetch_ttft(trace)
    wait_until(lambda: not any(map(is_running, map(str, born))), 10)
    deck.stop_running()
