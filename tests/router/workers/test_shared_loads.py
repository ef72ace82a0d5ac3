# SPDX-License-Identifier: Apache-2.0
"""Two workers decide on the load of both, whatever gets lost between them."""

from __future__ import annotations

import random

import pytest

from router.workers.joined_workers import LEG, URLS, JoinedWorker, build_request
from ttft_otel.router import types
from ttft_otel.router.timeline import Attempt
from ttft_otel.router.workers import messages, own_loads, shared_memory
from ttft_otel.tracing import clock


@pytest.fixture(params=["least_requests", "ttft"])
def workers(request: pytest.FixtureRequest) -> tuple[JoinedWorker, JoinedWorker]:
    """Two workers with one of the policies that compare load."""
    return JoinedWorker(request.param), JoinedWorker(request.param)


def deliver(speaker: JoinedWorker, listener: JoinedWorker) -> None:
    """All that was said, in its order."""
    for message in speaker.outbox:
        listener.hear(0, message)
    speaker.outbox.clear()
    listener.see(0, speaker)


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

    one.state.record_first_token(
        request, clock.now_us(), 0.25, 0, (LEG, attempt.span_id), is_measured=True
    )
    deliver(one, other)
    assert not len(other.state.pending)
    assert other.remote.count_attempts() == 1, "its answer goes on"
    assert other.pool.get(LEG)[URLS.index(attempt.instance.url)].all_in_flight == 1
    assert other.state.index.match_blocks(request.block_keys, [attempt.instance.url]) == [4]
    fits = {url: fit.samples for (_, url), fit in other.state.models.list_fits().items() if url}
    assert fits == {attempt.instance.url: 1}

    one.pool.record_ended(attempt)
    deliver(one, other)
    assert not other.remote.count_attempts()
    assert [each.all_in_flight for each in other.pool] == [0, 0]


def test_round_robin_says_nothing() -> None:
    """It decides by no load: the messages would cost and change nothing."""
    one = JoinedWorker("round_robin")
    one.pool.record_ended(one.send(build_request(1)))

    assert not one.outbox


def test_a_worker_that_is_gone() -> None:
    """With it goes all that it had under way."""
    one, other = JoinedWorker("ttft"), JoinedWorker("ttft")
    for number in range(5):
        one.send(build_request(number))
    deliver(one, other)

    other.remote.forget_process(0, clock.now_us())

    assert not other.remote.count_attempts() and not len(other.state.pending)
    assert [each.all_in_flight for each in other.pool] == [0, 0]


def test_an_instance_that_came_later_has_its_load() -> None:
    """One worker hears of an instance sooner than the other."""
    one, other = JoinedWorker("least_requests"), JoinedWorker("least_requests")
    late = other.pool.get(LEG)[1]
    other.pool.remove_instance(late)
    one.send(build_request(1), URLS[1])
    deliver(one, other)

    other.pool.add_instance(late)
    other.remote.sync_instances()

    assert late.all_in_flight == 1


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("policy", ["least_requests", "ttft"])
def test_lost_messages(policy: str, seed: int) -> None:
    """A third of the messages is lost: totals say so, and after everything anew both agree again.

    Where no work is compared, the only message is what the numbers mean: they themselves cannot be lost.
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
        other.see(0, one)

    has_lost = not other.remote.agrees_with(0, one.own.build_totals())
    assert has_lost or policy == "least_requests"
    if has_lost:
        other.resync(0, one)
    assert other.remote.agrees_with(0, one.own.build_totals())
    assert len(other.state.pending) == len(one.state.pending)
    for ours, theirs in zip(other.pool, one.pool, strict=True):
        assert (ours.in_flight, ours.all_in_flight) == (0, theirs.in_flight)

    for attempt in open_attempts:
        one.pool.record_ended(attempt)
    deliver(one, other)
    assert not other.remote.count_attempts() and not len(other.state.pending)


def test_instances_come_and_go() -> None:
    """The numbers of one that has left serve another, once nothing is under way there any more."""
    one, other = JoinedWorker("least_requests"), JoinedWorker("least_requests")
    attempts = [one.send(build_request(1), URLS[0]), one.send(build_request(2), URLS[1])]
    deliver(one, other)
    for worker in (one, other):
        worker.pool.remove_instance(worker.pool.get(LEG)[0])
        worker.remote.sync_instances()
    for number in range(3):
        url = f"http://127.0.0.1:{10 + number}"
        for worker in (one, other):
            worker.pool.add_instance(types.parse_instance_url(url, LEG))
            worker.remote.sync_instances()
        one.send(build_request(3 + number), url)
        deliver(one, other)
        assert [each.all_in_flight for each in other.pool] == [1] * (2 + number)
        # At first its own request is under way; from the second one on its index is taken again.
        assert len(one.own.describe_places().rows) == (3, 3, 4)[number]
        if not number:
            one.pool.record_ended(attempts[0])
    for attempt in attempts:
        one.pool.record_ended(attempt)
    deliver(one, other)
    assert [each.all_in_flight for each in other.pool] == [0, 1, 1, 1]


def test_results_are_told_with_totals() -> None:
    """GET /instances of any worker shows the results of all."""
    one, other = JoinedWorker("least_requests"), JoinedWorker("least_requests")
    attempt = one.send(build_request(1), URLS[0])
    attempt.record_head(200)
    one.pool.record_ended(attempt)
    deliver(one, other)

    assert other.remote.agrees_with(0, one.own.build_totals())

    elsewhere = other.pool.get(LEG)[0].elsewhere
    assert elsewhere is not None and elsewhere.results_by_owner == {0: {"2xx": 1}}


def test_all_anew_is_bounded() -> None:
    """What a worker tells anew does not overwrite itself in the ring: blocks of the latest are left out."""
    one = JoinedWorker("ttft")
    for number in range(60):
        one.send(build_request(number, 16 * messages.MAX_BLOCK_KEYS))

    told = list(one.own.list_pending())

    assert len(told) == 60 and all(sent.pairs for sent in told)
    assert [len(sent.block_keys) for sent in told[:2]] == [messages.MAX_BLOCK_KEYS] * 2
    assert sum(len(sent.block_keys) for sent in told) == own_loads.MAX_RESENT_KEYS
    assert sum(len(messages.encode_load(sent)) for sent in told) < shared_memory.RING_BYTES // 2


def test_long_prompts_fit() -> None:
    """Of a very long prompt only the first blocks are told, so that a message fits into a datagram."""
    one = JoinedWorker("ttft")
    one.send(build_request(1, 16 * 2 * messages.MAX_BLOCK_KEYS))

    _, sent = one.outbox

    assert isinstance(sent, messages.Sent)
    assert len(sent.block_keys) == messages.MAX_BLOCK_KEYS
    assert len(messages.encode_load(sent)) < 64 * 1024
