# SPDX-License-Identifier: Apache-2.0
"""How long an encoder keeps encodings after its answer, against vLLM's own ProducerSession."""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING, Any

import pytest
import tracing_fakes

from hooks.fakes import decode_headers
from hooks.process import CORE, PATCHER
from ttft_otel.hooks.engine_core import ec_kept, kv
from ttft_otel.tracing import carrier
from ttft_otel.tracing.carrier import KEPT_ITEMS_BIT, KeptItems, decode_answer

if TYPE_CHECKING:
    from hooks.ec_cpu import InstancePair

WITHOUT_VLLM = importlib.util.find_spec("vllm") is None
pytestmark = pytest.mark.skipif(WITHOUT_VLLM, reason="no vLLM in this environment")


def query_kept(pair: InstancePair, name: str) -> Any:
    """The API server's question, over vLLM's utility channel."""
    return getattr(pair.encoder.core, carrier.KEPT_ITEMS_QUERY)(name)


def read_kept(pair: InstancePair, name: str) -> KeptItems | None:
    """What the engine core answers at once."""
    found = query_kept(pair, name)
    return decode_answer(KeptItems, found if isinstance(found, str) else found.result(0))


def encode_and_keep(pair: InstancePair, name: str, *items: str) -> Any:
    """A request on the encoder, whose answer says that its encodings are kept."""
    pair.encoder.add_request(name, items)
    timeline = pair.encoder.finish_request(name)
    assert timeline.read_details().kept == KEPT_ITEMS_BIT
    return pair.encoder.core.announced[name]


def test_fetched(pair: InstancePair, clock: tracing_fakes.FakeClock) -> None:
    """From the answer until the last encoding was read; a waiting status request is answered then."""
    params = encode_and_keep(pair, "a", "cat", "dog")
    began = clock.at
    answer_future = query_kept(pair, "a")
    clock.tick(5000)
    assert not answer_future.done()
    pair.consume_items("b", ("cat", "dog"), params)
    pair.encoder.run_step()

    kept = decode_answer(KeptItems, answer_future.result(0))
    assert kept is not None
    assert (kept.since, kept.items, kept.bytes) == (began, 2, 2 * pair.size)
    assert kept.until - began >= 5000 and kept.ready_at == began and not kept.end_reason
    assert query_kept(pair, "a") == "" and not CORE.encodings.leases_by_hash


def test_ready_later(pair: InstancePair, clock: tracing_fakes.FakeClock) -> None:
    """A copy that is over after the answer: consumers are put off until then, and it is told."""
    pair.encoder.copied = False
    params = encode_and_keep(pair, "a", "cat")
    began = clock.at
    pair.consumer.add_request("b", ("cat",), params)
    for _ in range(4):
        assert "b" not in pair.consumer.run_step()
        pair.encoder.run_step()
        clock.tick(1000)
    pair.encoder.copied = True
    pair.encoder.run_step()
    ready = clock.at
    clock.tick(1000)
    pair.consume_items("c", ("cat",), params)
    pair.encoder.run_step()
    kept = read_kept(pair, "a")

    assert kept is not None and (kept.since, kept.ready_at) == (began, ready)
    assert kept.until > ready


def test_read_by_half(
    pair: InstancePair, clock: tracing_fakes.FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer that starts a read and does not end it within vLLM's lease counts as expired."""
    params = encode_and_keep(pair, "a", "cat")
    pair.wire.reading = True
    pair.consumer.add_request("b", ("cat",), params)
    pair.consumer.run_step()
    pair.encoder.run_step()
    assert CORE.encodings.leases
    later = time.monotonic() + 60
    monkeypatch.setattr(time, "monotonic", lambda: later)
    pair.encoder.run_step()

    kept = read_kept(pair, "a")
    assert kept is not None and kept.end_reason == "expired"


def test_evicted(pair: InstancePair, clock: tracing_fakes.FakeClock) -> None:
    """Encodings that had to make room for others before anybody came: evicted."""
    encode_and_keep(pair, "a", "cat")
    for number in range(pair.max_items):
        encode_and_keep(pair, f"r{number}", f"item-{number}")
    pair.encoder.run_step()

    kept = read_kept(pair, "a")
    assert kept is not None and kept.end_reason == "evicted"
    assert f"r{number}" in CORE.encodings.leases


def test_nobody_came(pair: InstancePair, clock: tracing_fakes.FakeClock) -> None:
    """Encodings that are not read within two minutes count as expired."""
    encode_and_keep(pair, "a", "cat")
    clock.tick(ec_kept.MAX_KEPT_US)
    pair.encoder.run_step()
    assert "a" in CORE.encodings.leases
    clock.tick(1)
    pair.encoder.run_step()

    kept = read_kept(pair, "a")
    assert kept is not None and kept.end_reason == "expired"
    assert kept.until - kept.since == ec_kept.MAX_KEPT_US + 1


def test_fetched_before(pair: InstancePair) -> None:
    """What a consumer has had is not waited for again, until it is saved anew."""
    pair.consume_items("b", ("cat",), encode_and_keep(pair, "a", "cat"))
    pair.encoder.run_step()
    pair.encoder.add_request("again", ("cat",))
    assert not pair.encoder.finish_request("again").read_details().kept
    cache = pair.encoder.connector.connector_scheduler._cache
    cache._entries_free_list.pop("cat")
    cache._free_blocks.extend(cache._entries.pop("cat").block_ids)
    pair.encoder.resident.clear()

    encode_and_keep(pair, "anew", "cat")


def test_equal_images(pair: InstancePair) -> None:
    """One read ends the waiting of every request that announced it."""
    params = encode_and_keep(pair, "a", "cat")
    encode_and_keep(pair, "b", "cat", "dog")
    pair.consume_items("c", ("cat",), params)
    pair.encoder.run_step()

    assert read_kept(pair, "a") is not None
    assert CORE.encodings.leases["b"].waiting == {"dog"}


def test_aborted_or_untraced(pair: InstancePair) -> None:
    """Nothing is kept for the telling of a request that has no answer, or no trace."""
    pair.encoder.add_request("a", ("cat",))
    pair.encoder.core.free("a")
    CORE.aborted.clear()
    pair.encoder.waiting.clear()
    mine = pair.encoder.add_request("b", ("cat",))
    del mine._ttft_timeline
    mine.trace_headers = None
    CORE.queue.arrived.clear()  # where only traced requests are noted
    pair.encoder.run_step()

    assert not CORE.encodings.leases


def test_no_encoder(pair: InstancePair, clock: tracing_fakes.FakeClock) -> None:
    """An ec_both instance that prefills announces what it has, too; nobody will come for that."""
    from hooks.ec_cpu import EcInstance, connect_cpu

    both = EcInstance(clock, connect_cpu("ec_both", "both", pair.wire))
    both.add_request("a", ("cat",), {"cat": {"item_indices": [0], "metadata": {}}})
    both.add_request("b", ("dog",)).kv_transfer_params = {"do_remote_decode": True}
    headers = both.run_step()

    assert {name: decode_headers(headers[name])[1].read_details().kept for name in headers} == {
        "a": 0,
        "b": 0,
    }
    assert both.core.announced["a"]["cat"]["peer_host"]
    both.connector.shutdown()


def test_unseen(pair: InstancePair) -> None:
    """Where the read itself cannot be observed, the time until then is not measured."""
    PATCHER.switch(off=["transfer.fetched"])
    pair.encoder.add_request("a", ("cat",))
    timeline = pair.encoder.finish_request("a")
    PATCHER.switch()

    assert not timeline.read_details().kept and not CORE.encodings.leases


def test_bounded(pair: InstancePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are kept, fetched or never asked for, the state has a bound, and drops are counted."""
    for name in ("MAX_LEASES", "MAX_FETCHED_HASHES", "MAX_WAITING_ENCODINGS"):
        monkeypatch.setattr(ec_kept, name, 4)
    monkeypatch.setattr(kv, "MAX_UNASKED_ANSWERS", 4)
    encode_and_keep(pair, "asked", "item")
    answer_future = query_kept(pair, "asked")
    params = {}
    for number in range(9):
        params[number] = encode_and_keep(pair, f"r{number}", f"item-{number}")
    assert len(CORE.encodings.leases) == len(CORE.encodings.leases_by_hash) == 4
    assert CORE.encodings.dropped_leases == 6 and answer_future.result(0) == ""
    assert len(CORE.encodings.answers.unasked) == 4
    for number in range(9):
        pair.consume_items(f"c{number}", (f"item-{number}",), params[number])
        pair.encoder.run_step()

    assert not CORE.encodings.leases and not CORE.encodings.leases_by_hash
    assert len(CORE.encodings.fetched_hashes) == 4 and len(CORE.encodings.answers.unasked) == 4


def test_bounded_items(pair: InstancePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of many items pushes out as many requests as that takes."""
    monkeypatch.setattr(ec_kept, "MAX_WAITING_ENCODINGS", 4)
    encode_and_keep(pair, "a", "cat")
    encode_and_keep(pair, "b", "dog", "cow")
    encode_and_keep(pair, "c", "ant", "bee", "fly")

    assert list(CORE.encodings.leases) == ["c"] and len(CORE.encodings.leases_by_hash) == 3
