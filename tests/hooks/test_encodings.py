# SPDX-License-Identifier: Apache-2.0
"""Encodings between instances, by vLLM's own connectors: where items came from, how long they are kept.

Fetched, cached, or encoded again; against its ProducerSession; and the worker's side of ECCPUConnector.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tracing_fakes import FakeClock

from hooks.fakes import FakeEngineCore, decode_headers, import_from_vllm, make_request, media_item
from hooks.process import CORE, PATCHER, WORKER, put_back_classes, wrap_ec_connector
from lab.vllm_plugins import join_plugin_paths
from ttft_otel.hooks import vllm_fields
from ttft_otel.hooks.engine_core import transfers
from ttft_otel.hooks.worker import model_runners
from ttft_otel.hooks.worker.device import StepClock
from ttft_otel.model.breakdown import CODE_EC_TRANSFER, LOST_ENCODER, LOST_SAVE
from ttft_otel.tracing import carrier
from ttft_otel.tracing.carrier import (
    KEPT_ITEMS_BIT,
    EngineTimeline,
    ItemCounts,
    KeptItems,
    decode_answer,
)
from ttft_otel.tracing.clock import CLOCK_HOST

if TYPE_CHECKING:
    from hooks.ec_cpu import InstancePair

WITHOUT_VLLM = importlib.util.find_spec("vllm") is None
pytestmark = pytest.mark.skipif(WITHOUT_VLLM, reason="no vLLM in this environment")


@pytest.fixture(scope="module")
def connectors() -> None:
    """vLLM's encoder-cache connectors, imported once."""
    folder = "vllm.distributed.ec_transfer.ec_connector"
    names = ("example_connector", "mooncake_ec_connector", "cpu.scheduler", "cpu.worker")
    import_from_vllm(
        *(f"{folder}.{name}" for name in names),
        f"{folder}.cpu.session",
        "vllm.v1.worker.gpu.ec_connector",
    )


@pytest.fixture
def pair(connectors: None, nothing_patched: None, clock: FakeClock) -> Iterator[InstancePair]:
    """An encoder and a consumer with vLLM's ECCPUConnector; its classes are put back afterwards."""
    from hooks.ec_cpu import InstancePair  # imports vLLM

    made = InstancePair(clock)
    yield made
    made.close()
    put_back_classes()


def count_items_of(timeline: EngineTimeline, encoded_before: bool = False) -> ItemCounts:
    """The sources of a timeline's media items."""
    return carrier.count_items(timeline.read_details().media, timeline.complete, encoded_before)


@pytest.mark.parametrize(
    ("encoded", "wanted", "computed", "counts", "fetched"),
    [
        pytest.param(("cat",), ("cat",), 0, (1, 1, 1, 0, 0), 1, id="fetched"),
        # Its second place finds it in a cache.
        pytest.param(
            ("cat", "cat", "dog"), ("cat", "cat", "dog"), 0, (3, 3, 2, 1, 0), 2, id="equal images"
        ),
        # Nobody needs one whose tokens are all cached: it is in no count but the items'.
        pytest.param(("cat", "dog"), ("cat", "dog"), 3, (2, 2, 1, 0, 0), 1, id="in the prefix"),
        # Encoder and consumer compute different hashes: each miss counts as encoded again.
        pytest.param(("cat",), ("tac",), 0, (1, 0, 0, 0, 1), 0, id="named otherwise"),
    ],
)
def test_sources(
    pair: InstancePair,
    encoded: tuple[str, ...],
    wanted: tuple[str, ...],
    computed: int,
    counts: tuple[int, ...],
    fetched: int,
) -> None:
    """Items that an encoder has announced, on the instance that wants them."""
    params = {**pair.encode_items("a", *encoded), "scalar": 1}
    timeline = pair.consume_items("b", wanted, params, computed=computed)

    assert count_items_of(timeline) == (*counts, fetched * pair.size)


def test_wait(pair: InstancePair) -> None:
    """An item that is read from the encoder is waited for: that is ec.transfer."""
    timeline = pair.consume_items("b", ("cat",), pair.encode_items("a", "cat"))

    (stage, start, end) = timeline.read_details().waits
    assert (stage, end - start) == (8, 1000)


def test_fetched_before(pair: InstancePair) -> None:
    """An item that an earlier request fetched is local: in the connector's cache, or the device's."""
    params = pair.encode_items("a", "cat")
    pair.consume_items("b", ("cat",), params)
    on_device = pair.consume_items("c", ("cat",), params)
    pair.consumer.resident.clear()
    in_region = pair.consume_items("d", ("cat",), params)

    for timeline in (on_device, in_region):
        assert count_items_of(timeline) == ItemCounts(1, 1, 0, 1, 0, 0)
        assert not timeline.read_details().waits


def test_fetched_for_another(pair: InstancePair) -> None:
    """Two requests that wait for the same read: both waited, and both have it from the encoder."""
    params = pair.encode_items("a", "cat")
    pair.consumer.add_request("b", ("cat",), params)
    first = pair.consume_items("c", ("cat",), params)

    assert count_items_of(first) == ItemCounts(1, 1, 1, 0, 0, 0)
    assert len(first.read_details().waits) == 3


def test_lost_on_the_way(pair: InstancePair) -> None:
    """An item that was announced and can no longer be fetched is encoded again, and counted as that."""
    params = pair.encode_items("a", "cat")
    pair.encoder.connector.connector_scheduler._cache._entries.clear()
    pair.encoder.connector.connector_scheduler._cache._entries_free_list.clear()
    timeline = pair.consume_items("b", ("cat",), params)

    assert count_items_of(timeline) == ItemCounts(1, 0, 0, 0, 1, 0)
    assert timeline.read_details().waits


@pytest.mark.parametrize("is_encoded", [False, True])
def test_preempted(pair: InstancePair, is_encoded: bool) -> None:
    """Loaded again from the cache after a preemption: the first way counts; encoded after all: again."""
    consumer, core = pair.consumer, pair.consumer.core
    consumer.add_request("b", ("cat",), pair.encode_items("a", "cat"))
    pair.wait_for("b")
    consumer.allocate_items("b")
    core.update(core.schedule(("b",), {"b": 10}))
    core.update(core.schedule(preempted=("b",)))
    if not is_encoded:
        consumer.resident.clear()
        pair.wait_for("b")
        consumer.allocate_items("b")
    step = core.schedule(tokens={"b": 20}, encode={"b": [0]} if is_encoded else {})
    out = core.update(step, finish=("b",))

    counts = (1, 0, 0, 0, 1) if is_encoded else (1, 1, 1, 0, 0)
    assert count_items_of(decode_headers(out["b"])[1]) == (*counts, pair.size)


def test_encoder(pair: InstancePair) -> None:
    """On the encoder itself: what it found in its own cache is local."""
    pair.encode_items("a", "cat")
    pair.encoder.add_request("b", ("cat", "dog"))
    timeline = pair.encoder.finish_request("b")

    assert count_items_of(timeline)[:4] == (2, 1, 0, 1)
    assert timeline.read_details().media[carrier.INDEX_OWN] == 1


def test_aborted(pair: InstancePair) -> None:
    """A request that dies while it waits says that it waited, and claims nothing for its items."""
    pair.consumer.add_request("b", ("cat",), {"cat": {"peer_host": "gone", "peer_port": 1}})
    params = pair.encode_items("a", "dog")
    pair.consumer.add_request("c", ("dog",), params)
    pair.consumer.run_step()
    pair.consumer.core.free("c")

    marks, timeline = decode_headers({"ttft-otel": CORE.aborted.pop("c")})
    CORE.aborted.clear()
    CORE.awaiting.clear()
    assert marks.asking and not marks.scheduled
    assert count_items_of(timeline) == ItemCounts(1, 1, 0, 0, 0, 0)


def test_example_connector(connectors: None, core: Any, tmp_path: Any) -> None:
    """What lies in the folder that both instances see comes from elsewhere; what does not is encoded here."""
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
    from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnector

    transfer_config = SimpleNamespace(
        is_ec_producer=False,
        is_ec_consumer=True,
        get_from_extra_config=lambda key, default: str(tmp_path),
    )
    config = SimpleNamespace(ec_transfer_config=transfer_config, model_config=None)
    kind: Any = type("Example", (ECExampleConnector,), {})
    core.ec_connector = connector = kind(config, ECConnectorRole.SCHEDULER)
    wrap_ec_connector(connector)
    (tmp_path / "item-0").mkdir()
    (tmp_path / "item-0" / "encoder_cache.safetensors").touch()
    vllm_request = make_request("a", 20, items=2)
    core.add(vllm_request)
    assert connector.ensure_cache_available(vllm_request, 0)
    for index in (0, 1):
        connector.update_state_after_alloc(vllm_request, index)
    out = core.update(core.schedule(("a",), {"a": 20}, encode={"a": [1]}), finish=("a",))

    found = count_items_of(decode_headers(out["a"])[1], encoded_before=True)
    assert connector.has_cache_item("item-0") and not connector.has_cache_item("item-1")
    assert found == ItemCounts(2, 1, 1, 0, 1, 0)


class PushedItems:
    """ECMooncakeConnector's scheduler of vLLM 0.32; its control plane is a list of events."""

    def __init__(self) -> None:
        from vllm.distributed.ec_transfer.ec_connector import mooncake_ec_connector
        from vllm.distributed.ec_transfer.ec_connector.mooncake import scheduler, state

        delegate = object.__new__(scheduler.ECMooncakeScheduler)
        self.events: list[Any] = []
        vars(delegate).update(
            _is_producer=False,
            _is_consumer=True,
            _control_addr="here",
            _push_wait_timeout=30.0,
            _drain_pending=True,
            _drained_at=0.0,
            _pending_cancels={},
            _store_candidates=[],
            _pushes_to_prepare={},
            _prepared_push_transfer_ids=set(),
            _unresolved_transfer_ids=0,
            _scheduler_pending_work=False,
            _cross_encoder_cache=False,
            _failed_saves=set(),
            _local_cache=set(),
            _transfers=state.SchedulerTransferTable(1 << 20, 60.0),
            _event_inbox=SimpleNamespace(shard_count=1, drain=self._drain_events),
            _control_executor=SimpleNamespace(submit=self._submit_call),
        )
        kind = type("Mooncake", (mooncake_ec_connector.ECMooncakeConnector,), {})
        self.connector = object.__new__(kind)
        self.connector._is_producer, self.connector._is_consumer = False, True
        self.connector._scheduler, self.connector._worker = delegate, None

    def _drain_events(self, address: str) -> list[Any]:
        found, self.events = self.events, []
        return found

    def _submit_call(self, *call: Any) -> Any:
        return SimpleNamespace(done=lambda: True, result=lambda: True)

    def push_item(self, transfer_id: str, name: str) -> None:
        tensor = {"nbytes": 64, "shape": [2, 16], "dtype": "float16"}
        self.events.append({"ready": True, "transfer_id": transfer_id, "mm_hash": name, **tensor})
        self.connector._scheduler._drain_pending = True


def ask_mooncake(core: FakeEngineCore, pushed: PushedItems, name: str) -> EngineTimeline:
    """Ask until the request may start, its worker loading what it is told to; then run it."""
    from vllm.distributed.ec_transfer.ec_connector.mooncake.metadata import ECMooncakeWorkerMetadata
    from vllm.v1.outputs import ECConnectorOutput

    vllm_request, connector = core.requests[name], pushed.connector
    for _ in range(5):
        if connector.ensure_cache_available(vllm_request, 0):
            break
        core.clock.tick(1000)
        plan = SimpleNamespace(free_encoder_mm_hashes=[], preempted_req_ids=None)
        meta = connector.build_connector_meta(plan)
        told_of = ECMooncakeWorkerMetadata(loaded={spec.mm_hash for spec in meta.loads})
        output = ECConnectorOutput(ec_connector_worker_meta=told_of)
        connector.update_connector_output(output)
        pushed.push_item("t-1", "cat")
    connector.update_state_after_alloc(vllm_request, 0)
    out = core.update(core.schedule((name,), {name: 20}), finish=(name,))
    return decode_headers(out[name])[1]


def test_mooncake(connectors: None, core: Any) -> None:
    """What an encoder pushes is remote, whether it comes before or after its request; then local."""
    pushed = PushedItems()
    wrap_ec_connector(pushed.connector)
    core.ec_connector = pushed.connector
    params = {"ec_items": [{"mm_hash": "cat", "transfer_id": "t-1"}]}
    for name in ("late", "again"):
        vllm_request = make_request(name, 20, items=0)
        vllm_request.mm_features = [media_item(0, "cat")]
        vllm_request.ec_transfer_params = params
        vllm_request.sampling_params = SimpleNamespace(extra_args={"ec_transfer_params": params})
        core.add(vllm_request)
    late = ask_mooncake(core, pushed, "late")
    again = ask_mooncake(core, pushed, "again")

    assert count_items_of(late) == ItemCounts(1, 1, 1, 0, 0, 64)
    assert late.read_details().waits and not again.read_details().waits
    assert count_items_of(again) == ItemCounts(1, 1, 0, 1, 0, 0)


def test_hostile_params() -> None:
    """However many names they have, or of whatever form, few are looked at and none raises."""
    many = {str(number): {} for number in range(5000)}
    odd = {"ec_items": [1, None, {}, {"mm_hash": 3}, {"mm_hash": "x"}], "a": 1, "b": {}}

    assert len(vllm_fields.list_announced_names(many)[0]) == vllm_fields.MAX_ANNOUNCED
    assert (
        len(vllm_fields.list_announced_names({"ec_items": [{}] * 5000})[1])
        == vllm_fields.MAX_ANNOUNCED
    )
    assert vllm_fields.list_announced_names(odd) == ({"3", "x", "b"}, [2])
    timeline, vllm_request = EngineTimeline(added=1), make_request("a", items=1)
    vllm_request.sampling_params = SimpleNamespace(extra_args={"ec_transfer_params": odd})
    assert vllm_fields.find_item_bytes(None, vllm_request, "b") == 0
    transfers.open_items(timeline, vllm_request, None, is_seen=True, available=True)
    assert timeline.read_details().media == [0, 0, 0, carrier.SOURCES_UNKNOWN, 0]


# How long an encoder keeps encodings after its answer.


def query_kept(pair: InstancePair, name: str) -> Any:
    """The API server's question, over vLLM's utility channel."""
    return getattr(pair.encoder.core, carrier.KEPT_ITEMS_QUERY)(name)


def read_kept(answer: Any) -> KeptItems:
    """What the engine core has answered to query_kept()."""
    kept = decode_answer(KeptItems, answer if isinstance(answer, str) else answer.result(0))
    assert kept is not None
    return kept


def encode_and_keep(pair: InstancePair, name: str, *items: str) -> Any:
    """A request on the encoder, whose answer says that its encodings are kept."""
    pair.encoder.add_request(name, items)
    timeline = pair.encoder.finish_request(name)
    assert timeline.read_details().kept == KEPT_ITEMS_BIT
    return pair.encoder.core.announced[name]


def test_kept_until_fetched(pair: InstancePair) -> None:
    """From the answer until the last encoding was read; a waiting status request is answered then."""
    params = encode_and_keep(pair, "a", "cat", "dog")
    began = pair.clock.at
    answer_future = query_kept(pair, "a")
    pair.clock.tick(5000)
    assert not answer_future.done()
    pair.consume_items("b", ("cat", "dog"), params)
    pair.encoder.run_step()
    kept = read_kept(answer_future)

    assert (kept.since, kept.items, kept.bytes) == (began, 2, 2 * pair.size)
    assert kept.until - began >= 5000 and kept.ready_at == began and not kept.end_reason
    assert query_kept(pair, "a") == "" and not CORE.encodings.leases_by_hash


def test_ready_later(pair: InstancePair) -> None:
    """A copy that is over after the answer: consumers are put off until then, and it is told."""
    pair.encoder.copied = False
    params = encode_and_keep(pair, "a", "cat")
    began = pair.clock.at
    pair.consumer.add_request("b", ("cat",), params)
    for _ in range(4):
        assert "b" not in pair.consumer.run_step()
        pair.encoder.run_step()
        pair.clock.tick(1000)
    pair.encoder.copied = True
    pair.encoder.run_step()
    ready = pair.clock.at
    pair.clock.tick(1000)
    pair.consume_items("c", ("cat",), params)
    pair.encoder.run_step()
    kept = read_kept(query_kept(pair, "a"))

    assert (kept.since, kept.ready_at) == (began, ready)
    assert kept.until > ready


def test_read_by_half(pair: InstancePair, monkeypatch: pytest.MonkeyPatch) -> None:
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

    assert read_kept(query_kept(pair, "a")).end_reason == "expired"


def test_evicted(pair: InstancePair) -> None:
    """Encodings that had to make room for others before anybody came: evicted."""
    encode_and_keep(pair, "a", "cat")
    for number in range(pair.max_items):
        encode_and_keep(pair, f"r{number}", f"item-{number}")
    pair.encoder.run_step()

    assert read_kept(query_kept(pair, "a")).end_reason == "evicted"
    assert f"r{number}" in CORE.encodings.leases


def test_nobody_came(pair: InstancePair) -> None:
    """Encodings that are not read within two minutes count as expired."""
    encode_and_keep(pair, "a", "cat")
    pair.clock.tick(transfers.MAX_KEPT_US)
    pair.encoder.run_step()
    assert "a" in CORE.encodings.leases
    pair.clock.tick(1)
    pair.encoder.run_step()
    kept = read_kept(query_kept(pair, "a"))

    assert kept.end_reason == "expired"
    assert kept.until - kept.since == transfers.MAX_KEPT_US + 1


def test_not_waited_for_again(pair: InstancePair) -> None:
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

    read_kept(query_kept(pair, "a"))
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


def test_no_encoder(pair: InstancePair) -> None:
    """An ec_both instance that prefills announces what it has, too; nobody will come for that."""
    from hooks.ec_cpu import EcInstance, connect_cpu

    both = EcInstance(pair.clock, connect_cpu("ec_both", "both", pair.wire))
    both.add_request("a", ("cat",), {"cat": {"item_indices": [0], "metadata": {}}})
    both.add_request("b", ("dog",)).kv_transfer_params = {"do_remote_decode": True}
    headers = both.run_step()

    assert sorted(headers) == ["a", "b"]
    assert not any(decode_headers(each)[1].read_details().kept for each in headers.values())
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
        monkeypatch.setattr(transfers, name, 4)
    monkeypatch.setattr(transfers, "MAX_UNASKED_ANSWERS", 4)
    encode_and_keep(pair, "asked", "item")
    answer_future = query_kept(pair, "asked")
    params = [encode_and_keep(pair, f"r{number}", f"item-{number}") for number in range(9)]
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
    monkeypatch.setattr(transfers, "MAX_WAITING_ENCODINGS", 4)
    encode_and_keep(pair, "a", "cat")
    encode_and_keep(pair, "b", "dog", "cow")
    encode_and_keep(pair, "c", "ant", "bee", "fly")

    assert list(CORE.encodings.leases) == ["c"] and len(CORE.encodings.leases_by_hash) == 3


# Connectors of any class.


def wrap_new_class(**methods: Any) -> Any:
    """A connector of a class of its own below vLLM's empty base, as its factory hands it out."""

    def do_nothing(self: Any, *args: Any) -> Any:
        return None

    names = ("get_finished", "ensure_cache_available", "start_save_caches")
    base = type("ECConnectorBase", (), dict.fromkeys(names, do_nothing))
    connector = type("Mine", (base,), methods)()
    wrap_ec_connector(connector)
    return connector


def test_empty_methods(nothing_patched: None) -> None:
    """vLLM's empty methods of the scheduler's side, and the empty flush, are left alone; wrapped is once."""
    connector = wrap_new_class(save_caches=lambda self: "saved")
    wrap_ec_connector(connector)  # both sides of one class in one process
    wrap_ec_connector(type(connector)())

    assert {name: len(patches) for name, patches in PATCHER.installed.items()} == {
        "transfer.save": 2  # one of them is empty: the worker was there all the same
    }
    assert connector.save_caches() == "saved"


def test_scheduled_already(nothing_patched: None) -> None:
    """Once a request is scheduled nothing is noted: vLLM asks on every decode step, too."""
    connector = wrap_new_class(ensure_cache_available=lambda self, request, computed: False)
    timeline = EngineTimeline(scheduled=5)
    connector.ensure_cache_available(SimpleNamespace(_ttft_timeline=timeline), 0)

    assert PATCHER.is_active("transfer.wait") and timeline.details is None


COPY_US, ENCODE_US = 70, 300  # microseconds


@pytest.fixture
def runner(
    connectors: None,
    nothing_patched: None,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Any]:
    """vLLM's ActiveECConnector around a worker's ECCPUConnector; the copy is the host's, and slow."""
    import torch
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
    from vllm.distributed.ec_transfer.ec_connector.cpu import worker as module
    from vllm.distributed.ec_transfer.ec_connector.cpu.connector import ECCPUConnector
    from vllm.v1.worker.gpu.ec_connector import ActiveECConnector

    from hooks.ec_cpu import make_vllm_config

    monkeypatch.syspath_prepend(join_plugin_paths("ec_cpu"))
    plugin: Any = importlib.import_module("ttft_ec_cpu")

    def copy_slowly(*args: Any, **kwargs: Any) -> None:
        clock.tick(COPY_US)
        plugin.copy_blocks(*args, **kwargs)

    monkeypatch.setattr(module, "swap_blocks_batch", copy_slowly)
    monkeypatch.setattr(module.ECCPUWorker, "_acquire_event", plugin.acquire_event)
    monkeypatch.setattr(torch.Tensor, "record_stream", plugin.ignore_stream)
    monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(module, "get_pcp_group", lambda: SimpleNamespace(rank_in_group=0))
    active_connector: Any = object.__new__(ActiveECConnector)
    active_connector.ec_connector = ECCPUConnector(
        make_vllm_config("ec_both", "w"), ECConnectorRole.WORKER
    )
    active_connector.encoder_cache, active_connector.save_new_caches = {}, True
    wrap_ec_connector(active_connector.ec_connector)
    yield active_connector
    active_connector.ec_connector.shutdown()
    put_back_classes()
    del sys.modules["ttft_ec_cpu"]


def run_step(runner: Any, clock: FakeClock, encodes: bool, **meta: Any) -> tuple[int, list[int]]:
    """A marked step: what it lost, and the lengths of its `ec.transfer` pieces that took any time."""
    import torch
    from vllm.distributed.ec_transfer.ec_connector.cpu.common import ECCPUConnectorMetadata

    from hooks.ec_cpu import ROWS, WIDTH

    step = model_runners.StepStamps(StepClock(CLOCK_HOST), encodes, True, 0)
    WORKER.open_steps.append(step)
    plan = SimpleNamespace(
        ec_connector_metadata=ECCPUConnectorMetadata(**meta), finished_req_ids=set()
    )
    with runner.maybe_get_output(plan) as output:
        if encodes:
            clock.tick(ENCODE_US)
            runner.encoder_cache["cat"] = torch.full((ROWS, WIDTH), 3.0, dtype=torch.float16)
    WORKER.open_steps.clear()
    run_of = output.ec_connector_worker_meta
    assert run_of is not None and bool(run_of.completed_saves) == encodes
    _, _, lost, *flat = WORKER.resolve_step(step)
    pairs = zip(flat[::3], flat[1::3], flat[2::3], strict=True)
    return lost, [
        end - start for code, start, end in pairs if code == CODE_EC_TRANSFER and end > start
    ]


def test_save_and_load(runner: Any, clock: FakeClock) -> None:
    """A copy out of the device, started at the step's end, and one into it: both are ec.transfer."""
    from hooks.ec_cpu import ROWS, WIDTH

    saved = run_step(runner, clock, True, saves={"cat": [0, 1]})
    before = runner.encoder_cache.pop("cat")
    loaded = run_step(runner, clock, False, loads={"cat": (7, [0, 1], (ROWS, WIDTH))})

    assert saved == (LOST_ENCODER, [COPY_US])  # nothing tells here when the encoder ran
    assert loaded == (0, [COPY_US])
    assert runner.encoder_cache["cat"].equal(before)


def test_cpu_flush_unseen(runner: Any, clock: FakeClock) -> None:
    """Without the hook of its start the copy is a known gap, not somebody else's time."""
    PATCHER.switch(off=["transfer.flush"])
    lost, pieces = run_step(runner, clock, True, saves={"cat": [0, 1]})
    PATCHER.switch()

    assert lost & LOST_SAVE and not pieces
