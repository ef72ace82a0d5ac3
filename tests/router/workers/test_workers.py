# SPDX-License-Identifier: Apache-2.0
"""Workers of one router: their supervisor, the datagrams and the memory between them, and the load of all."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from router.fake_instances import wait_until
from ttft_otel.model.names import metric_names
from ttft_otel.router import types
from ttft_otel.router.routing.policies.block_index import SentHistory
from ttft_otel.router.routing.routing_service import RoutingService
from ttft_otel.router.timeline import Attempt
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.router.workers import messages, supervisor, worker
from ttft_otel.router.workers.messages import (
    Answer,
    Ended,
    LoadLink,
    Message,
    OwnLoads,
    Question,
    RemoteLoads,
    WorkerSocket,
    decode_frame,
    encode_frame,
    make_socket_pairs,
)
from ttft_otel.router.workers.supervisor import SILENCE_US, SharedMemory
from ttft_otel.tracing import clock

FAILING_START = """
import sys
from ttft_otel.router.workers.supervisor import WorkerSupervisor
sys.exit(WorkerSupervisor(2, lambda slot: sys.exit(3), 1.0, lambda: None).run())
"""

# Workers whose heart beats; the first one of slot 0 stops after a moment.
HUNG_WORKER = """
import os, signal, sys, time
from ttft_otel.router.workers import supervisor
supervisor.CHECK_INTERVAL_S, supervisor.MAX_SILENT_CHECKS = 0.2, 3
def work(slot):
    for beat in range(1, 1000):
        slot.shared.numbers[slot.number].heartbeat = beat
        if slot.number == 0 and beat == 20:
            if slot.is_successor:
                os.kill(os.getppid(), signal.SIGTERM)
            else:
                os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.02)
sys.exit(supervisor.WorkerSupervisor(2, work, 1.0, lambda: None).run())
"""


def test_pauses() -> None:
    """None after a steady life; else doubled, up to a limit."""
    pauses = [0.0]
    for _ in range(8):
        pauses.append(supervisor.choose_pause_s(pauses[-1], 1.0))

    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert supervisor.choose_pause_s(30.0, supervisor.STEADY_S) == 0.0


def test_a_port_is_reserved() -> None:
    """Any free one for 0; workers may share it; whoever listens there already is noticed."""
    port, reserved = supervisor.reserve_port("127.0.0.1", 0)
    workers = [*supervisor.bind_shared_port("127.0.0.1", port)]
    workers[0].listen()

    with pytest.raises(OSError):
        supervisor.reserve_port("127.0.0.1", port)

    with socket.create_connection(("127.0.0.1", port)):
        pass
    for each in (*reserved, *workers):
        each.close()


def test_a_worker_that_cannot_start() -> None:
    """The router ends with its exit code: what is wrong will be wrong again."""
    ended = subprocess.run(
        [sys.executable, "-c", FAILING_START], capture_output=True, text=True, check=False
    )

    assert ended.returncode == 3
    assert "could not start" in ended.stderr


def test_a_worker_that_hangs() -> None:
    """It is killed and replaced, and no other one is."""
    ended = subprocess.run(
        [sys.executable, "-c", HUNG_WORKER], capture_output=True, text=True, check=False, timeout=60
    )

    assert "worker 0 (process" in ended.stderr and "hangs, its event loop" in ended.stderr
    assert ended.stderr.count("it is killed") == 1, ended.stderr
    assert "was ended by SIGKILL" in ended.stderr


Frame = tuple[int, list[Message]]  # the sender's slot, and what it says


@contextmanager
def make_sockets(count: int) -> Iterator[tuple[list[WorkerSocket], list[list[Frame]]]]:
    """Sockets of so many workers, which are closed at the end, and what each has received."""
    pairs = make_socket_pairs(count)
    received: list[list[Frame]] = [[] for _ in range(count)]

    def make_socket(slot: int) -> WorkerSocket:
        return WorkerSocket(pairs, slot, lambda *frame: received[slot].append(frame))

    sockets = [make_socket(slot) for slot in range(count)]
    try:
        yield sockets, received
    finally:
        for each in sockets:
            each.close()
        for pair in pairs:
            for end in pair:
                end.close()


def list_messages(frames: list[Frame]) -> list[Message]:
    """The messages in several frames."""
    return [message for _, messages in frames for message in messages]


async def test_messages_arrive_in_order() -> None:
    """Everybody else gets all of them."""
    with make_sockets(3) as (sockets, received):
        for each in sockets:
            each.open()
        sent: list[Message] = [Answer(number) for number in range(200)]
        for message in sent:
            sockets[0].send([message], [1, 2])
        await wait_until(lambda: all(len(list_messages(each)) >= 200 for each in received[1:]))
        assert list_messages(received[1]) == list_messages(received[2]) == sent
        assert not received[0]


async def test_many_messages_are_several_datagrams() -> None:
    """What is too long for the kernel's buffers arrives in parts, in order."""
    with make_sockets(2) as (sockets, received):
        for each in sockets:
            each.open()
        sent: list[Message] = [Answer(number, b"x" * 30_000) for number in range(50)]
        sockets[0].send(sent, [1])
        await wait_until(lambda: len(list_messages(received[1])) >= 50)
        assert list_messages(received[1]) == sent and not sockets[0].lost


async def test_a_full_queue_is_tried_again() -> None:
    """A worker that reads nothing for a while loses nothing, and then no more than the backlog is kept."""
    with make_sockets(2) as (sockets, _):
        sockets[0].open()
        inbox = sockets[0]._pairs[1].inbox
        sent: list[Message] = [Answer(number, b"x" * 20_000) for number in range(100)]
        for message in sent:
            sockets[0].send([message], [1])
        assert sockets[0].lost == 0
        frames: list[Frame] = []
        while len(frames) < 100:
            try:
                frames.append(decode_frame(inbox.recv(1 << 20)))
            except BlockingIOError:
                await asyncio.sleep(0.01)
        assert list_messages(frames) == sent
        for message in sent * 4:
            sockets[0].send([message], [1])
        assert sockets[0].lost > 0


async def test_a_successor_hears_nothing_of_before() -> None:
    """What its predecessor did not read is not for it: it asks for everything anew."""
    with make_sockets(2) as (sockets, received):
        sockets[0].open()
        sockets[0].send([Question(0, "load")], [1])
        sockets[1].open()
        sockets[0].send([Question(1, "load")], [1])
        await wait_until(lambda: received[1])
        assert list_messages(received[1]) == [Question(1, "load")]
        assert not sockets[0].lost


async def test_rubbish_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be read is logged, and what comes next is heard."""
    ended = encode_frame(1, [Ended("abc", 5)])
    # No MessagePack; a text that is none; a field more, of a depth that no parser follows.
    longer = ended.replace(b"\x93\xa1e", b"\x94\xa1e") + b"\x91" * 20_000
    bad = (b"\xc1", ended.replace(b"abc", b"\xff\xff\xff"), longer)
    with make_sockets(2) as (sockets, received):
        for each in sockets:
            each.open()
        for data in bad:
            sockets[0]._pairs[1].outbox.send(data)
        sockets[0].send([Question(0, "load")], [1])
        await wait_until(lambda: received[1])
    assert caplog.text.count("is not readable") == len(bad) and "Traceback" not in caplog.text


URL = "http://127.0.0.1:1"


def build_metrics(
    requests: float, in_flight: float, breaker: float, reloads: float
) -> Iterator[Metric]:
    """What a worker has: a part of the requests, an opinion, and a reload like the others."""
    ended = CounterMetricFamily(metric_names.ROUTER_ATTEMPTS, "Ended.", labels=["instance"])
    ended.add_metric([URL], requests)
    yield ended
    yield GaugeMetricFamily(metric_names.ROUTER_REQUESTS_IN_FLIGHT, "Under way.", value=in_flight)
    yield GaugeMetricFamily(metric_names.ROUTER_BREAKER_OPEN, "Open.", value=breaker)
    yield CounterMetricFamily(metric_names.ROUTER_RELOADS, "Reloads.", value=reloads)


@pytest.fixture
def shared() -> SharedMemory:
    """That of two workers whose event loops run."""
    memory = SharedMemory(2)
    for slot in range(2):
        memory.numbers[slot].heartbeat = clock.now_us()
    return memory


def read_values(shared: SharedMemory, slot: int = 0) -> dict[str, float]:
    """All that the worker on a slot shows, without labels."""
    metrics = worker.collect_all(shared, slot)
    return {each.name: each.value for metric in metrics for each in metric.samples}


def write(shared: SharedMemory, slot: int, *values: float, inherited: Any = ()) -> None:
    """Write metrics of these values."""
    metrics = build_metrics(*values) if values else ()
    worker.write_metrics(shared, slot, metrics, inherited, {URL} if values else ())


def test_workers_are_one(shared: SharedMemory) -> None:
    """Parts are added up; of what all have seen the most counts."""
    write(shared, 0, 5, 1, 0.0, 2)
    write(shared, 1, 7, 2, 1.0, 2)

    assert read_values(shared, 0) == read_values(shared, 1)
    assert read_values(shared) == {
        f"{metric_names.ROUTER_ATTEMPTS}_total": 12,
        metric_names.ROUTER_REQUESTS_IN_FLIGHT: 3,
        metric_names.ROUTER_BREAKER_OPEN: 1,
        f"{metric_names.ROUTER_RELOADS}_total": 2,
    }


def test_a_successor_goes_on_counting(shared: SharedMemory) -> None:
    """Counters of a dead worker stay, also before its successor has written anything; gauges do not.

    Nor does what was counted of an instance that is gone: these would fill /metrics for ever.
    """
    write(shared, 0, 5, 3, 1.0, 0)
    inherited = worker.read_counters(shared, 0)
    assert read_values(shared)[f"{metric_names.ROUTER_ATTEMPTS}_total"] == 5

    for requests in (0, 1, 2):
        write(shared, 0, requests, 0, 0.0, 0, inherited=inherited)

        values = read_values(shared)
        assert values[f"{metric_names.ROUTER_ATTEMPTS}_total"] == 5 + requests
        assert values[metric_names.ROUTER_REQUESTS_IN_FLIGHT] == 0
    write(shared, 0, inherited=inherited)
    assert read_values(shared) == {f"{metric_names.ROUTER_RELOADS}_total": 0}


def test_gauges_of_a_silent_worker_are_left_out(shared: SharedMemory) -> None:
    """Nothing is under way at a worker that has been dead for long; what it counted stays."""
    write(shared, 0, 5, 1, 0.0, 0)
    write(shared, 1, 7, 2, 1.0, 0)
    shared.numbers[1].heartbeat = clock.now_us() - SILENCE_US - 1

    values = read_values(shared)

    assert values[f"{metric_names.ROUTER_ATTEMPTS}_total"] == 12
    assert values[metric_names.ROUTER_REQUESTS_IN_FLIGHT] == 1
    assert values[metric_names.ROUTER_BREAKER_OPEN] == 0


def test_nothing_is_read_in_halves() -> None:
    """Whoever reads while a worker writes gets one of the two, whole."""
    shared = SharedMemory(1)
    is_over = threading.Event()

    def write_forever() -> None:
        while not is_over.is_set():
            for letter, length in ((b"a", 3_000_000), (b"b", 1_000)):
                shared.write_metrics(0, letter * length)

    writer = threading.Thread(target=write_forever)
    writer.start()
    try:
        found = {shared.read_metrics(0) for _ in range(300)}
    finally:
        is_over.set()
        writer.join()
    assert found <= {b"", b"a" * 3_000_000, b"b" * 1_000}


def test_a_forked_process_writes_and_is_gone() -> None:
    """What it has written stays; that it died while it wrote the next is not seen."""
    shared = SharedMemory(1)
    child = os.fork()
    if not child:
        shared.write_metrics(0, b"whole")
        shared.write_metrics(0, b"newer")
        os.pwrite(shared._pages[0][1], b"half", 0)
        os._exit(0)
    os.waitpid(child, 0)

    assert shared.read_metrics(0) == b"newer"


LEG = "mono"
URLS = ("http://127.0.0.1:1", "http://127.0.0.1:2")


class JoinedWorker:
    """One worker; `outbox` has what it says, until somebody delivers it."""

    def __init__(self, policy: str) -> None:
        instances = tuple(types.parse_instance_url(url, LEG) for url in URLS)
        self.pool = InstancePool({LEG: instances})
        self.routing = RoutingService(self.pool, policy)
        self.state = self.routing.get_policy(LEG).state
        self.state.index = SentHistory(16, 1000)
        self.outbox: list[messages.LoadMessage] = []
        self.own = OwnLoads(self.pool, self.routing, self.outbox.append)
        self.own.start()
        self.remote = RemoteLoads(self.pool.find_instance, lambda _: self.state)

    def choose(self, request: types.RoutingRequest) -> types.Decision:
        """Which instance its policy chooses now."""
        return self.routing.choose_instance(request, self.pool.get(LEG), clock.now_us(), False)

    def send(self, request: types.RoutingRequest, url: str = "") -> Attempt:
        """Send a request where its policy says, or to `url`."""
        decision = self.choose(request)
        if url:
            instance = self.pool.find_instance(LEG, url)
            assert instance is not None
            decision = types.Decision(instance, 0.0, "test")
        now_us = clock.now_us()
        load_entry = self.routing.add_load_entry(request, decision, request.request_id, now_us)
        attempt = Attempt(LEG, "/", decision.instance, request.request_id, now_us)
        attempt.policy, attempt.load_entry = self.routing.get_policy(LEG).name, load_entry
        self.pool.record_sent(attempt)
        return attempt

    def hear(self, slot: int, message: messages.LoadMessage) -> None:
        """Take in a message of the worker on `slot`."""
        handlers: dict[type, Callable[[int, Any], None]] = {
            messages.InFlight: self.remote.apply_in_flight,
            messages.Sent: self.remote.apply_sent,
            messages.FirstToken: self.remote.apply_first_token,
            messages.Ended: self.remote.apply_ended,
        }
        _, (heard,) = messages.decode_frame(messages.encode_frame(slot, [message]))
        handlers[type(message)](slot, heard)

    def hear_all(self, slot: int, other: JoinedWorker) -> bool:
        """Compare with the totals of the worker on `slot`; hear everything anew if they differ."""
        if self.remote.agrees_with(slot, other.own.build_totals()):
            return True
        self.remote.forget_process(slot, clock.now_us())
        for sent in other.own.list_pending():
            self.hear(slot, sent)
        assert self.remote.agrees_with(slot, other.own.build_totals())
        return False

    def count_elsewhere(self) -> int:
        """Requests in flight of others, as it believes."""
        return sum(each.all_in_flight - each.in_flight for each in self.pool)


def build_request(number: int, tokens: int = 64) -> types.RoutingRequest:
    """A request of so many prompt tokens, whose blocks no other one has."""
    blocks = tuple(number * 1000 + each for each in range(tokens // 16))
    return types.RoutingRequest(
        *(LEG, "/v1/completions", "tiny", f"request-{number}", {}, b""),
        prompt_tokens=tokens,
        block_keys=blocks,
    )


@pytest.fixture(params=["least_requests", "ttft"])
def workers(request: pytest.FixtureRequest) -> tuple[JoinedWorker, JoinedWorker]:
    """Two workers with one of the policies that compare load."""
    return JoinedWorker(request.param), JoinedWorker(request.param)


def deliver(speaker: JoinedWorker, listener: JoinedWorker) -> None:
    """All that was said, in its order."""
    for message in speaker.outbox:
        listener.hear(0, message)
    speaker.outbox.clear()


@pytest.mark.parametrize("busy", URLS)
def test_the_other_workers_load_counts(
    workers: tuple[JoinedWorker, JoinedWorker], busy: str
) -> None:
    """Where the one has sent something, the other sends nothing."""
    one, other = workers
    one.send(build_request(1), busy)
    deliver(one, other)

    for number in range(20):
        assert other.choose(build_request(10 + number)).instance.url != busy


def test_an_end_is_told() -> None:
    """After first token and end there is nothing left, and what was learned stays."""
    one, other = JoinedWorker("ttft"), JoinedWorker("ttft")
    request = build_request(1)
    attempt = one.send(request)
    deliver(one, other)
    assert len(other.state.pending) == 1
    assert other.pool.get(LEG)[URLS.index(attempt.instance.url)].all_in_flight == 1

    one.state.record_first_token(request, clock.now_us(), 0.25, 0)
    deliver(one, other)
    assert not len(other.state.pending)
    assert other.count_elsewhere() == 1, "its answer goes on"
    assert other.pool.get(LEG)[URLS.index(attempt.instance.url)].all_in_flight == 1
    assert other.state.index.match_blocks(request.block_keys, [attempt.instance.url]) == [4]
    fits = {url: fit.samples for (_, url), fit in other.state.models.list_fits().items() if url}
    assert fits == {attempt.instance.url: 1}

    one.pool.record_ended(attempt)
    deliver(one, other)
    assert not other.count_elsewhere()


def test_round_robin_says_nothing() -> None:
    """It decides by no load: the messages would cost and change nothing."""
    one = JoinedWorker("round_robin")
    one.pool.record_ended(one.send(build_request(1)))

    assert not one.outbox


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", ["least_requests", "ttft"])
def test_lost_messages(policy: str, seed: int) -> None:
    """A third of the messages is lost: totals say so, and after everything anew both agree again.

    Where no work is compared, the totals alone have the numbers.
    """
    chance = random.Random(seed)
    one, other = JoinedWorker(policy), JoinedWorker(policy)
    open_attempts: list[Attempt] = []
    for number in range(200):
        if open_attempts and chance.random() < 0.5:
            one.pool.record_ended(open_attempts.pop(chance.randrange(len(open_attempts))))
        else:
            open_attempts.append(one.send(build_request(number)))
        for message in one.outbox:
            if chance.random() < 0.67:
                other.hear(0, message)
        one.outbox.clear()

    assert other.hear_all(0, one) == (policy == "least_requests")
    assert len(other.state.pending) == len(one.state.pending)
    for ours, theirs in zip(other.pool, one.pool, strict=True):
        assert (ours.in_flight, ours.all_in_flight) == (0, theirs.in_flight)

    for attempt in open_attempts:
        one.pool.record_ended(attempt)
    deliver(one, other)
    assert not other.count_elsewhere() and not len(other.state.pending)


def test_instances_come_and_go() -> None:
    """What is under way at one that is not here, yet or any more, is nobody's load, and counts once it is."""
    one, other = JoinedWorker("least_requests"), JoinedWorker("least_requests")
    left, late = other.pool.get(LEG)
    other.pool.remove_instance(late)
    attempts = [one.send(build_request(number), url) for number, url in enumerate(URLS)]
    deliver(one, other)
    assert left.all_in_flight == other.count_elsewhere() == 1
    other.pool.add_instance(late)
    other.remote.sync_instances()
    assert late.all_in_flight == 1
    other.pool.remove_instance(left)
    other.remote.sync_instances()
    assert other.count_elsewhere() == 1
    one.pool.record_ended(attempts[1])
    deliver(one, other)
    other.pool.add_instance(types.parse_instance_url(left.url, LEG))
    other.remote.sync_instances()

    assert {each.url: each.all_in_flight for each in other.pool} == {left.url: 1, late.url: 0}


def test_results_are_told_with_totals() -> None:
    """GET /instances of any worker shows the results of all."""
    one, other = JoinedWorker("least_requests"), JoinedWorker("least_requests")
    attempt = one.send(build_request(1), URLS[0])
    attempt.record_head(200)
    one.pool.record_ended(attempt)
    deliver(one, other)

    assert other.remote.agrees_with(0, one.own.build_totals())

    assert other.pool.get(LEG)[0].results_elsewhere == {0: {"2xx": 1}}


def test_all_anew_is_bounded() -> None:
    """Who asks for everything gets no more than it can keep: blocks of the latest are left out."""
    one = JoinedWorker("ttft")
    for number in range(60):
        one.send(build_request(number, 16 * 2 * messages.MAX_BLOCK_KEYS))

    told = list(one.own.list_pending())

    assert len(told) == 60 and all(sent.pairs for sent in told)
    # Of a very long prompt only the first blocks are told, so that a message fits into a datagram.
    assert [len(sent.block_keys) for sent in told[:2]] == [messages.MAX_BLOCK_KEYS] * 2
    assert sum(len(sent.block_keys) for sent in told) == messages.MAX_RESENT_KEYS
    assert len(messages.encode_frame(0, told[:1])) < messages.MAX_JOINED_BYTES


async def test_a_burst_is_one_datagram(monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens in a moment is told together, by the latest numbers; after a pause at once."""
    monkeypatch.setattr(messages, "TELL_INTERVAL_S", 0.05)
    one, other = JoinedWorker("least_requests"), JoinedWorker("ttft")
    told: list[list[messages.Message]] = []
    for each in (one, other):
        link = LoadLink(each.pool, each.routing, [1], lambda sent, _: told.append(list(sent)))
        link.start()
    told.clear()
    for number in range(20):
        one.send(build_request(number), URLS[number % 2])
    assert not told, "the turn of the loop is not over"
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert told == [[messages.InFlight(LEG, url, 10) for url in URLS]]
    one.send(build_request(20), URLS[0])
    await wait_until(lambda: len(told) == 2)
    assert told.pop() == [messages.InFlight(LEG, URLS[0], 11)], "only what has changed"
    for number in range(20):
        other.send(build_request(number), URLS[0])
        await asyncio.sleep(0)
    await wait_until(lambda: len(told) == 3)
    sent = [each for frame in told[1:] for each in frame if isinstance(each, messages.Sent)]
    assert len(sent) == 20 and messages.InFlight(LEG, URLS[0], 20) in told[2]


async def test_who_has_missed_something_asks_for_all() -> None:
    """By the totals of the other one, which tells it everything; who ends or falls silent is forgotten."""
    one, other = JoinedWorker("ttft"), JoinedWorker("ttft")
    sent: list[messages.Message] = []
    asked: list[messages.Message] = []
    speaker = LoadLink(one.pool, one.routing, [1], lambda said, _: sent.extend(said))
    listener = LoadLink(other.pool, other.routing, [0], lambda said, _: asked.extend(said))

    def deliver_sent() -> None:
        for message in sent:
            listener.handlers[type(message)](0, message)
        sent.clear()

    speaker.own.start()
    one.send(build_request(1), URLS[0])
    speaker.tell_totals()
    sent.pop(1)  # that it was sent; the first is the number in flight, the last the totals
    for _ in range(2):
        deliver_sent()
        speaker.tell_totals()
    assert asked == [messages.Question(0, "load")], "once in a while is enough"
    sent.clear()
    speaker.tell_all(1)
    deliver_sent()
    assert len(other.state.pending) == other.count_elsewhere() == len(asked) == 1

    speaker.close()
    deliver_sent()
    assert not len(other.state.pending) and not other.count_elsewhere()
    speaker.tell_all(1)
    deliver_sent()
    listener.forget_worker(0)
    assert not len(other.state.pending) and not other.count_elsewhere()
