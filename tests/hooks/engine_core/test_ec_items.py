# SPDX-License-Identifier: Apache-2.0
"""Where media items came from, as told by vLLM's own connectors: fetched, cached, or encoded again."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import tracing_fakes

from hooks.fakes import FakeEngineCore, decode_headers, make_request, media_item
from hooks.process import CORE, wrap_ec_connector
from ttft_otel.hooks import ec_fields
from ttft_otel.hooks.engine_core import ec_items
from ttft_otel.tracing import media_items
from ttft_otel.tracing.engine_timeline import EngineTimeline
from ttft_otel.tracing.media_items import ItemCounts

if TYPE_CHECKING:
    from hooks.ec_cpu import InstancePair

WITHOUT_VLLM = importlib.util.find_spec("vllm") is None
pytestmark = [
    pytest.mark.skipif(WITHOUT_VLLM, reason="no vLLM in this environment"),
    pytest.mark.usefixtures("connectors"),
]


def count_items_of(timeline: EngineTimeline, encoded_before: bool = False) -> ItemCounts:
    """The sources of a timeline's media items."""
    return media_items.count_items(timeline.read_details().media, timeline.complete, encoded_before)


def test_fetched(pair: InstancePair) -> None:
    """An item that was announced and read from the encoder is remote, and the wait is ec.transfer."""
    timeline = pair.consume_items("b", ("cat",), pair.encode_items("a", "cat"))

    assert count_items_of(timeline) == ItemCounts(1, 1, 1, 0, 0, pair.size)
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


def test_equal_items(pair: InstancePair) -> None:
    """The same image twice is fetched once; its second place finds it in a cache."""
    timeline = pair.consume_items(
        "b", ("cat", "cat", "dog"), pair.encode_items("a", "cat", "cat", "dog")
    )

    assert count_items_of(timeline) == ItemCounts(3, 3, 2, 1, 0, 2 * pair.size)


def test_lost_on_the_way(pair: InstancePair) -> None:
    """An item that was announced and can no longer be fetched is encoded again, and counted as that."""
    params = pair.encode_items("a", "cat")
    pair.encoder.connector.connector_scheduler._cache._entries.clear()
    pair.encoder.connector.connector_scheduler._cache._entries_free_list.clear()
    timeline = pair.consume_items("b", ("cat",), params)

    assert count_items_of(timeline) == ItemCounts(1, 0, 0, 0, 1, 0)
    assert timeline.read_details().waits


def test_unusable(pair: InstancePair) -> None:
    """An announcement that the connector refuses at once still names its item."""
    params = pair.encode_items("a", "cat")
    timeline = pair.consume_items("b", ("cat",), {"cat": {**params["cat"], "size_bytes": 7}})

    assert count_items_of(timeline).recomputed == 1


def test_named_otherwise(pair: InstancePair) -> None:
    """When encoder and consumer compute different hashes of an image, each miss counts as encoded again."""
    params = {**pair.encode_items("a", "cat"), "scalar": 1}
    one = pair.consume_items("b", ("tac",), params)
    two = pair.consume_items("c", ("act", "tca"), params)

    assert count_items_of(one) == ItemCounts(1, 0, 0, 0, 1, 0)
    assert count_items_of(two).recomputed == 1


def test_covered_by_the_prefix(pair: InstancePair) -> None:
    """An item whose tokens are all cached is needed by nobody: in no count but the items'."""
    params = pair.encode_items("a", "cat", "dog")
    timeline = pair.consume_items("b", ("cat", "dog"), params, computed=3)

    assert count_items_of(timeline) == ItemCounts(2, 2, 1, 0, 0, pair.size)


def preempt_after_fetch(pair: InstancePair) -> None:
    """Request "b" fetches the item "cat" that "a" had encoded, computes ten tokens and is preempted."""
    consumer = pair.consumer
    consumer.add_request("b", ("cat",), pair.encode_items("a", "cat"))
    pair.wait_for("b")
    consumer.allocate_items("b")
    consumer.core.update(consumer.core.schedule(("b",), {"b": 10}))
    consumer.core.update(consumer.core.schedule(preempted=("b",)))


def test_preempted(pair: InstancePair) -> None:
    """After a preemption an item is loaded again from the cache: the first way counts."""
    preempt_after_fetch(pair)
    core = pair.consumer.core
    pair.consumer.resident.clear()
    pair.wait_for("b")
    pair.consumer.allocate_items("b")
    out = core.update(core.schedule(tokens={"b": 20}), finish=("b",))

    assert count_items_of(decode_headers(out["b"])[1]) == ItemCounts(1, 1, 1, 0, 0, pair.size)


def test_preempted_and_encoded(pair: InstancePair) -> None:
    """Fetched, evicted and then encoded after all: encoded again."""
    preempt_after_fetch(pair)
    core = pair.consumer.core
    out = core.update(core.schedule(tokens={"b": 20}, encode={"b": [0]}), finish=("b",))

    assert count_items_of(decode_headers(out["b"])[1]) == ItemCounts(1, 0, 0, 0, 1, pair.size)


def test_encoder(pair: InstancePair) -> None:
    """On the encoder itself: what it found in its own cache is local."""
    pair.encode_items("a", "cat")
    pair.encoder.add_request("b", ("cat", "dog"))
    timeline = pair.encoder.finish_request("b")

    assert count_items_of(timeline)[:4] == (2, 1, 0, 1)
    assert timeline.read_details().media[media_items.INDEX_OWN] == 1


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


class SharedFolder:
    """The example connector, as vLLM has it: a folder that both instances see."""

    def __init__(self, folder: Any) -> None:
        from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
        from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnector

        transfer_config = SimpleNamespace(
            is_ec_producer=False,
            is_ec_consumer=True,
            get_from_extra_config=lambda key, default: str(folder),
        )
        config = SimpleNamespace(ec_transfer_config=transfer_config, model_config=None)
        kind = type("Example", (ECExampleConnector,), {})
        self.connector = kind(config, ECConnectorRole.SCHEDULER)


def test_example_connector(core: FakeEngineCore, tmp_path: Any) -> None:
    """What lies in the shared folder comes from elsewhere; what does not is encoded here."""
    connector = SharedFolder(tmp_path).connector
    wrap_ec_connector(connector)
    core.ec_connector = connector  # type: ignore[attr-defined]
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
        """An encoder has pushed an item into this instance's memory."""
        self.events.append(
            {
                "ready": True,
                "transfer_id": transfer_id,
                "mm_hash": name,
                "nbytes": 64,
                "shape": [2, 16],
                "dtype": "float16",
            }
        )
        self.connector._scheduler._drain_pending = True


def ask_mooncake(
    core: FakeEngineCore, pushed: PushedItems, name: str, clock: tracing_fakes.FakeClock
) -> EngineTimeline:
    """Ask until the request may start, its worker loading what it is told to; then run it."""
    from vllm.distributed.ec_transfer.ec_connector.mooncake.metadata import ECMooncakeWorkerMetadata
    from vllm.v1.outputs import ECConnectorOutput

    vllm_request, connector = core.requests[name], pushed.connector
    for _ in range(5):
        if connector.ensure_cache_available(vllm_request, 0):
            break
        clock.tick(1000)
        plan = SimpleNamespace(free_encoder_mm_hashes=[], preempted_req_ids=None)
        meta = connector.build_connector_meta(plan)
        told_of = ECMooncakeWorkerMetadata(loaded={spec.mm_hash for spec in meta.loads})
        output = ECConnectorOutput(ec_connector_worker_meta=told_of)
        connector.update_connector_output(output)
        pushed.push_item("t-1", "cat")
    connector.update_state_after_alloc(vllm_request, 0)
    out = core.update(core.schedule((name,), {name: 20}), finish=(name,))
    return decode_headers(out[name])[1]


def test_mooncake(core: FakeEngineCore, clock: tracing_fakes.FakeClock) -> None:
    """What an encoder pushes is remote, whether it comes before or after its request; then local."""
    pushed = PushedItems()
    wrap_ec_connector(pushed.connector)
    core.ec_connector = pushed.connector  # type: ignore[attr-defined]
    params = {"ec_items": [{"mm_hash": "cat", "transfer_id": "t-1"}]}
    for name in ("late", "again"):
        vllm_request = make_request(name, 20, items=0)
        vllm_request.mm_features = [media_item(0, "cat")]
        vllm_request.ec_transfer_params = params
        vllm_request.sampling_params = SimpleNamespace(extra_args={"ec_transfer_params": params})
        core.add(vllm_request)
    late = ask_mooncake(core, pushed, "late", clock)
    again = ask_mooncake(core, pushed, "again", clock)

    assert count_items_of(late) == ItemCounts(1, 1, 1, 0, 0, 64)
    assert late.read_details().waits and not again.read_details().waits
    assert count_items_of(again) == ItemCounts(1, 1, 0, 1, 0, 0)


def test_nobody_saw(core: FakeEngineCore) -> None:
    """Without the hook, or without a connector, no origin of items is reported."""
    core.add(make_request("a", 20, items=2))
    out = core.update(core.schedule(("a",), {"a": 20}, encode={"a": [1]}), finish=("a",))

    assert count_items_of(decode_headers(out["a"])[1]) == ItemCounts(2, 1, None, None, None, 0)


def test_hostile_params() -> None:
    """However many names they have, or of whatever form, few are looked at and none raises."""
    many = {str(number): {} for number in range(5000)}
    odd = {"ec_items": [1, None, {}, {"mm_hash": 3}, {"mm_hash": "x"}], "a": 1, "b": {}}

    assert len(ec_fields.list_announced_names(many)[0]) == ec_fields.MAX_ANNOUNCED
    assert (
        len(ec_fields.list_announced_names({"ec_items": [{}] * 5000})[1]) == ec_fields.MAX_ANNOUNCED
    )
    assert ec_fields.list_announced_names(odd) == ({"3", "x", "b"}, [2])
    timeline, vllm_request = EngineTimeline(added=1), make_request("a", items=1)
    vllm_request.sampling_params = SimpleNamespace(extra_args={"ec_transfer_params": odd})
    assert ec_fields.find_item_bytes(None, vllm_request, "b") == 0
    ec_items.open_items(timeline, vllm_request, None, is_seen=True, available=True)
    assert timeline.read_details().media == [0, 0, 0, media_items.SOURCES_UNKNOWN, 0]
