# SPDX-License-Identifier: Apache-2.0
"""Two instances with the scheduler's side of vLLM's ECCPUConnector, in one process without a GPU.

The connector, its cache, its sessions and its protocol are vLLM's; only its two wires are replaced by
memory (ZMQ's sockets, NIXL's reads). `Instance.step` asks them in the order of vLLM 0.32's
Scheduler.schedule() and update_from_output().
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import torch
from tracing_fakes import FakeClock
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.cpu.common import ECCPUWorkerMetadata
from vllm.distributed.ec_transfer.ec_connector.cpu.connector import ECCPUConnector
from vllm.distributed.ec_transfer.ec_connector.cpu.session import ProducerSession
from vllm.v1.outputs import ECConnectorOutput

from hooks.fakes import (
    WRAPPED_METHODS,
    FakeEngineCore,
    decode_headers,
    make_request,
    media_item,
)
from hooks.process import wrap_copy, wrap_ec_connector
from ttft_otel.tracing.carrier import EngineTimeline

WIDTH = 8  # of an encoding; float16: 16 bytes a row, one row a block
ROWS = 2
BYTES = ROWS * WIDTH * 2
BLOCKS = 32
PRODUCER = ("encoder.local", 7000)


class FakeWires:
    """In-memory transports between a producer and a consumer: messages, and reads with notifications."""

    def __init__(self) -> None:
        self.requests: deque[tuple[bytes, bytes]] = deque()
        self.acks: deque[bytes] = deque()
        self.notes: deque[bytes] = deque()
        self.reading = False  # reads stay under way while this is set

    def make_client(self) -> Any:
        """In ZmqClientTransport's place."""
        connection = SimpleNamespace(send=lambda data: self.requests.append((b"me", data)))
        return SimpleNamespace(
            connect=lambda addr: connection,
            poll=lambda: {PRODUCER: drain_queue(self.acks)},
            poll_dead=list,
            remove=lambda addr: None,
            close=lambda: None,
        )

    def make_server(self) -> Any:
        """In ZmqServerTransport's place."""
        return SimpleNamespace(
            poll=lambda timeout_ms: drain_queue(self.requests),
            send=lambda identity, data: self.acks.append(data),
            close=lambda: None,
        )

    def make_data_transport(self) -> Any:
        """In NixlDataTransport's place."""
        return SimpleNamespace(
            get_agent_metadata=lambda: b"agent",
            get_mem_descriptor=lambda: b"memory",
            add_remote_peer=lambda metadata, descriptor: "agent",
            remove_remote_peer=lambda name: None,
            post_read=lambda local, agent, remote, notif_msg: notif_msg,
            check_xfer_state=self._check_transfer,
            release_xfer_handle=lambda handle: None,
            get_new_notifs=lambda: {"agent": drain_queue(self.notes)},
            deregister=lambda: None,
        )

    def _check_transfer(self, handle: bytes) -> str:
        if self.reading:
            return "PROC"
        self.notes.append(handle)
        return "DONE"


def drain_queue(queue: deque[Any]) -> list[Any]:
    """All that is in it."""
    found = list(queue)
    queue.clear()
    return found


def make_vllm_config(role: str, name: str) -> Any:
    """A VllmConfig with the fields that the connector reads."""
    extra = {"ec_cpu_bytes": BLOCKS * WIDTH * 2}
    transfer_config = SimpleNamespace(
        is_ec_producer=role in ("ec_producer", "ec_both"),
        is_ec_consumer=role in ("ec_consumer", "ec_both"),
        ec_connector_extra_config=extra,
        get_from_extra_config=extra.get,
        engine_id=name,
        mm_encoder_output_widths={"image": WIDTH},
    )
    model = SimpleNamespace(dtype=torch.float16, get_inputs_embeds_size=lambda: WIDTH)
    parallel = SimpleNamespace(
        data_parallel_index=0,
        data_parallel_rank=0,
        tensor_parallel_size=1,
        prefill_context_parallel_size=1,
        distributed_executor_backend="mp",
    )
    return SimpleNamespace(
        ec_transfer_config=transfer_config,
        model_config=model,
        parallel_config=parallel,
        instance_id=name,
        use_v2_model_runner=True,
    )


def connect_cpu(role: str, name: str, wire: FakeWires) -> Any:
    """The scheduler's side of an ECCPUConnector, over these wires."""
    connector = ECCPUConnector(make_vllm_config(role, name), ECConnectorRole.SCHEDULER)
    delegate = connector.connector_scheduler
    delegate._nixl_enabled, delegate._compat_hash, delegate._ack_timeout_s = True, "same", 30.0
    delegate._metadata_resolver = SimpleNamespace(fields_for=lambda modality: set())
    delegate._data = wire.make_data_transport()
    if delegate._is_producer:
        delegate._peer_host, delegate._peer_port = PRODUCER
        delegate._producer_session = ProducerSession(
            wire.make_server(), delegate._data, delegate._cache, "same"
        )
    if delegate._is_consumer:
        delegate._transport = wire.make_client()
    return connector


class EcCore(FakeEngineCore):
    """An engine core whose scheduler has an encoder-cache connector."""

    ec_connector: Any = None
    meta: Any = None  # what the worker tells with the step that is updated
    announced: dict[str, Any]

    def _free_request(self, request: Any) -> None:
        _, items = self.ec_connector.request_finished(request)
        self.announced[request.request_id] = items
        super()._free_request(request)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """As vLLM: first the requests, then the worker's output for the connector."""
        found = super().update_from_output(scheduler_output, model_runner_output)
        self.ec_connector.update_connector_output(
            ECConnectorOutput(ec_connector_worker_meta=self.meta)
        )
        return found


class EcInstance:
    """One instance: its engine core, its connector, and its worker as far as the two hear of it."""

    def __init__(self, clock: FakeClock, connector: Any) -> None:
        wrap_ec_connector(connector)
        self.clock = clock
        self.connector = connector
        self.core: Any = wrap_copy(EcCore, WRAPPED_METHODS)(clock)
        self.core.ec_connector, self.core.announced = connector, {}
        self.resident: set[str] = set()  # in the device's encoder cache
        self.waiting: list[str] = []
        self.copied = True  # whether a worker's copy is over with its step, as without a GPU
        self.saving: list[str] = []

    def add_request(
        self, name: str, items: tuple[str, ...], params: Any = None, **fields: Any
    ) -> Any:
        request = make_ec_request(name, items, params, **fields)
        self.core.add(request)
        self.waiting.append(name)
        return request

    def run_step(self, record: Any = None) -> dict[str, Any]:
        """Run one step: schedule and finish all requests that may start; trace headers of their outputs."""
        new = tuple(name for name in self.waiting if self.may_start(name))
        encode = {name: outputs for name in new if (outputs := self.allocate_items(name))}
        tokens = {name: self._count_tokens_left(name) for name in new}
        meta = self.build_meta()
        scheduled = self.core.schedule(new, tokens, encode)
        self.saving += getattr(meta, "saves", {})
        done = self.saving if self.copied else []
        self.saving = [] if self.copied else self.saving
        loaded = [transfer_id for transfer_id, *_ in getattr(meta, "loads", {}).values()]
        self.core.meta = ECCPUWorkerMetadata(completed_saves=list(done), completed_loads=loaded)
        self.waiting = [name for name in self.waiting if name not in new]
        outputs: dict[str, Any] = self.core.update(scheduled, finish=new, record=record)
        return outputs

    def finish_request(self, name: str) -> EngineTimeline:
        """Run one step in which a request ends; the timeline on its output."""
        return decode_headers(self.run_step()[name])[1]

    def _count_tokens_left(self, name: str) -> int:
        request = self.core.requests[name]
        return int(request.num_tokens - request.num_computed_tokens)

    def build_meta(self) -> Any:
        plan = SimpleNamespace(free_encoder_mm_hashes=[], preempted_req_ids=None)
        return self.connector.build_connector_meta(plan)

    def may_start(self, name: str) -> bool:
        request = self.core.requests[name]
        return bool(self.connector.ensure_cache_available(request, request.num_computed_tokens))

    def allocate_items(self, name: str) -> list[int]:
        """As _try_schedule_encoder_inputs() and _allocate_encoder_inputs(): what has to be encoded."""
        request = self.core.requests[name]
        encode, load, seen = [], [], set()
        for index, feature in enumerate(request.mm_features):
            position = feature.mm_position
            if position.offset + position.length <= request.num_computed_tokens:
                continue
            if feature.identifier in seen | self.resident:
                continue
            seen.add(feature.identifier)
            is_cached = self.connector.has_cache_item(feature.identifier)
            (load if is_cached else encode).append(index)
        for index in encode + load:
            self.connector.update_state_after_alloc(request, index)
        self.resident |= seen
        return encode


class FakeKwargsItem(dict[str, Any]):
    """A MultiModalKwargsItem with the fields that the connector reads."""

    def get_data(self) -> dict[str, Any]:
        return {}


def make_ec_request(
    name: str, items: tuple[str, ...], params: Any = None, computed: int = 0, tokens: int = 20
) -> Any:
    """A vLLM Request with these media items."""
    features = [media_item(number, item, ROWS) for number, item in enumerate(items)]
    for feature in features:
        feature.mm_position.get_num_embeds = lambda: ROWS
        feature.modality, feature.data = "image", FakeKwargsItem(pixels=SimpleNamespace(data=1))
    sampling = SimpleNamespace(extra_args={"ec_transfer_params": params})
    fields = {"ec_transfer_params": params, "sampling_params": sampling}
    return make_request(name, tokens, mm_features=features, computed=computed, **fields)


class InstancePair:
    """An encoder and a consumer over one wire."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.size = BYTES  # of one encoding
        self.max_items = BLOCKS // ROWS  # so many of them
        self.wire = FakeWires()
        self.encoder = self._start_instance("ec_producer", f"encoder-{id(self)}")
        self.consumer = self._start_instance("ec_consumer", f"consumer-{id(self)}")

    def _start_instance(self, role: str, name: str) -> EcInstance:
        return EcInstance(self.clock, connect_cpu(role, name, self.wire))

    def encode_items(self, name: str, *items: str) -> Any:
        """Run a request on the encoder; the ec_transfer_params of its answer."""
        self.encoder.add_request(name, items)
        self.encoder.run_step()
        return self.encoder.core.announced[name]

    def consume_items(
        self, name: str, items: tuple[str, ...], params: Any, **fields: Any
    ) -> EngineTimeline:
        """A request on the consumer, with the encoder stepping beside it until it is scheduled."""
        self.consumer.add_request(name, items, params, **fields)
        for _ in range(10):
            outputs = self.consumer.run_step()
            if name in outputs:
                return decode_headers(outputs[name])[1]
            self.clock.tick(1000)
            self.encoder.run_step()
        raise AssertionError(f"{name} was never scheduled")

    def wait_for(self, name: str) -> None:
        """Until the consumer's connector lets a request start, which stays unscheduled."""
        for _ in range(10):
            if self.consumer.may_start(name):
                return
            self.consumer.build_meta()
            self.encoder.run_step()
        raise AssertionError(f"{name} may not start")

    def close(self) -> None:
        for instance in (self.encoder, self.consumer):
            instance.connector.shutdown()
