# SPDX-License-Identifier: Apache-2.0
"""Targets in encoder-cache and KV connectors; for hooks/install.py.

Connectors can be third-party classes: their methods are wrapped on the class that vLLM's factory makes, and
checked on vLLM's base classes. The session that serves an encoder's fetches has only one class.
"""

from __future__ import annotations

from typing import Final

from ttft_otel.hooks.targets.patch_target import COMPUTE_STAGES, PatchTarget, TargetPlace
from ttft_otel.model.stages import QUEUE_STAGES

_EC: Final = "vllm.distributed.ec_transfer.ec_connector.base"
_SESSION: Final = "vllm.distributed.ec_transfer.ec_connector.cpu.session"
_KV: Final = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_CONNECTORS_REPORT_IT: Final = "connectors report per-request timings"

TRANSFER_TARGETS: Final[tuple[PatchTarget, ...]] = (
    PatchTarget(
        # In both processes: the scheduler's half waits for encodings, the worker's half moves them.
        name="transfer.create",
        process="core+worker",
        places=(
            TargetPlace(
                "vllm.distributed.ec_transfer.ec_connector.factory",
                "ECConnectorFactory.create_connector",
            ),
        ),
        marks="finds the encoder-cache connector's class",
        lost=(*QUEUE_STAGES, "dispatch", "ec.transfer", "encoder.compute"),
        why="connectors are third-party classes: only vLLM's factory has the instance's class",
        drop_when=_CONNECTORS_REPORT_IT,
        lost_encode=(*QUEUE_STAGES, "dispatch", "ec.transfer", "encoder.compute", "output"),
    ),
    PatchTarget(
        # An encoder waits for nobody's encodings, hence nothing is lost on one.
        name="transfer.wait",
        process="core",
        methods=(
            # Before 0.24 an encoder-cache connector could not make a request wait.
            TargetPlace(_EC, "ECConnectorBase.ensure_cache_available", since="0.24"),
        ),
        marks="ec.transfer: waiting for an item",
        lost=(*QUEUE_STAGES, "ec.transfer"),
        why="connectors have no timings per request",
        drop_when=_CONNECTORS_REPORT_IT,
        reads=("request",),
        lost_encode=(),
    ),
    PatchTarget(
        name="transfer.load",
        process="worker",
        methods=(TargetPlace(_EC, "ECConnectorBase.start_load_caches"),),
        marks="ec.transfer: load",
        lost=("dispatch", "ec.transfer"),
        why="connectors have no timings per request",
        drop_when=_CONNECTORS_REPORT_IT,
        lost_encode=(),
    ),
    PatchTarget(
        # V1 saves inside of the encoder's call, whose length would have the save in it.
        name="transfer.save",
        process="worker",
        methods=(
            TargetPlace(_EC, "ECConnectorBase.save_caches"),
            # Publishes what an earlier step has encoded: save_caches() is never called for that.
            TargetPlace(_EC, "ECConnectorBase.start_save_caches", since="0.32"),
        ),
        marks="ec.transfer: save",
        lost=("ec.transfer", "encoder.compute", "dispatch"),
        why="connectors have no timings per request",
        drop_when=_CONNECTORS_REPORT_IT,
        lost_encode=("ec.transfer", "encoder.compute", "output"),
    ),
    PatchTarget(
        # vLLM calls it after each step, also of connectors that do nothing in it.
        name="transfer.flush",
        process="worker",
        methods=(TargetPlace(_EC, "ECConnectorBase.get_finished"),),
        marks="ec.transfer: get_finished(), where ECCPUConnector starts the copies of what a step encoded",
        lost=("ec.transfer", "encoder.compute", "dispatch"),
        why="ECCPUConnector's save_caches only writes descriptors",
        drop_when=_CONNECTORS_REPORT_IT,
        lost_encode=("ec.transfer", "encoder.compute", "output"),
    ),
    PatchTarget(
        name="transfer.place",
        process="core",
        methods=(TargetPlace(_EC, "ECConnectorBase.update_state_after_alloc"),),
        marks="whether a media item was fetched, found in a cache or encoded here",
        why="vLLM does not report per request which of its items it encoded",
        drop_when="outputs say per item where its encoding came from",
        reads=("request", "index"),
    ),
    PatchTarget(
        name="transfer.keep",
        process="core",
        methods=(TargetPlace(_EC, "ECConnectorBase.request_finished"),),
        marks="how long encodings are kept for another instance after the answer",
        why="request_finished is the only place that has the request and what it announces",
        drop_when=_CONNECTORS_REPORT_IT,
        reads=("request",),
    ),
    PatchTarget(
        name="transfer.ready",
        process="core",
        methods=(TargetPlace(_EC, "ECConnectorBase.update_connector_output"),),
        marks="since when kept encodings can be read: the worker's copies are over",
        why="a consumer that asks earlier has to ask again, and no event is emitted",
        drop_when=_CONNECTORS_REPORT_IT,
    ),
    PatchTarget(
        # A fetch that is gone after _drain_notifs() was read; after _sweep_timeouts() it was not.
        name="transfer.fetched",
        process="core",
        methods=(TargetPlace(_SESSION, "ProducerSession._drain_notifs", since="0.32"),),
        marks="kept encodings were read (ECCPUConnector's ProducerSession._drain_notifs)",
        why="only that session is notified; ECMooncakeConnector's scheduler never is",
        drop_when=_CONNECTORS_REPORT_IT,
    ),
    PatchTarget(
        name="transfer.lease",
        process="core",
        methods=(TargetPlace(_SESSION, "ProducerSession._sweep_timeouts", since="0.32"),),
        marks="kept encodings were not read in time, or evicted (ProducerSession._sweep_timeouts)",
        why="vLLM only logs it",
        drop_when=_CONNECTORS_REPORT_IT,
    ),
    PatchTarget(
        name="kv.create",
        process="core+worker",
        places=(
            TargetPlace(
                "vllm.distributed.kv_transfer.kv_connector.factory",
                "KVConnectorFactory.create_connector",
            ),
        ),
        marks="finds the KV connector's class",
        lost=(*QUEUE_STAGES, *COMPUTE_STAGES, "kv.transfer", "sample", "output"),
        why="connectors are third-party classes: only vLLM's factory has the instance's class",
        drop_when=_CONNECTORS_REPORT_IT,
    ),
    PatchTarget(
        # Called again until blocks are allocated; only the last answer before that counts.
        name="kv.match",
        process="core",
        methods=(TargetPlace(_KV, "KVConnectorBase_V1.get_num_new_matched_tokens"),),
        marks="kv.transfer: how much comes from elsewhere, and since when it is on its way",
        lost=(*QUEUE_STAGES, "kv.transfer"),
        why="a connector that looks for blocks, or loads them, has no event per request",
        drop_when=_CONNECTORS_REPORT_IT,
        reads=("request",),
    ),
    PatchTarget(
        # On the scheduler, not on connectors: one address, whatever the connector's class is.
        name="kv.arrive",
        process="core",
        places=(
            TargetPlace("vllm.v1.core.sched.scheduler", "Scheduler._update_from_kv_xfer_finished"),
        ),
        marks="kv.transfer: the blocks are there; those kept for another instance are freed",
        lost=(*QUEUE_STAGES, "kv.transfer"),
        why="the only place that every connector notifies",
        drop_when=_CONNECTORS_REPORT_IT,
        reads=("kv_connector_output",),
    ),
    PatchTarget(
        name="kv.keep",
        process="core",
        methods=(
            TargetPlace(_KV, "KVConnectorBase_V1.request_finished"),
            # The scheduler calls it instead for all SupportsHMA connectors (hybrid KV caches).
            TargetPlace(_KV, "SupportsHMA.request_finished_all_groups"),
        ),
        marks="how long blocks are kept for another instance after the answer",
        why="vLLM only counts the leases that ran out",
        drop_when=_CONNECTORS_REPORT_IT,
        reads=("request",),
    ),
    PatchTarget(
        # V1 and V2 call it inside the step, before the forward or (async loads, newer V2) after it.
        name="kv.load",
        process="worker",
        methods=(TargetPlace(_KV, "KVConnectorBase_V1.start_load_kv"),),
        marks="kv.transfer: a load inside a step",
        lost=("dispatch", "prefill.compute", "prefill.stall", "kv.transfer", "sample", "output"),
        why="connectors have no timings per request",
        drop_when=_CONNECTORS_REPORT_IT,
    ),
    PatchTarget(
        # wait_for_save() returns when all is saved: its length is time that the step spends in it.
        name="kv.save",
        process="worker",
        methods=(TargetPlace(_KV, "KVConnectorBase_V1.wait_for_save"),),
        marks="kv.transfer: a save that its step waits for",
        lost=("kv.transfer", "prefill.stall", "sample", "output"),
        why="connectors have no timings per request",
        drop_when=_CONNECTORS_REPORT_IT,
    ),
)
