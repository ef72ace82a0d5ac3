# SPDX-License-Identifier: Apache-2.0
"""Targets in encoder-cache and KV connectors; for hooks/{ec_connectors,ec_items,ec_kept,kv}.py."""

from __future__ import annotations

from typing import Final

from ttft_otel.hooks.targets.patch_target import (
    COMPUTE_STAGES,
    PatchTarget,
    TargetPlace,
)
from ttft_otel.model.stages import QUEUE_STAGES

_CONNECTORS_REPORT_IT: Final = "connectors report per-request timings"

TRANSFER_TARGETS: Final[tuple[PatchTarget, ...]] = (
    PatchTarget(
        # In both processes: the scheduler's half waits for encodings, the worker's half moves them.
        "transfer.create",
        "core+worker",
        (
            TargetPlace(
                "vllm.distributed.ec_transfer.ec_connector.factory",
                "ECConnectorFactory.create_connector",
            ),
        ),
        "finds the encoder-cache connector's class",
        (*QUEUE_STAGES, "dispatch", "ec.transfer", "encoder.compute"),
        "connectors are third-party classes: only vLLM's factory has the instance's class",
        _CONNECTORS_REPORT_IT,
        lost_encode=(*QUEUE_STAGES, "dispatch", "ec.transfer", "encoder.compute", "output"),
    ),
    PatchTarget(
        # An encoder waits for nobody's encodings, hence nothing is lost on one.
        "transfer.wait",
        "core",
        (),
        "ec.transfer: waiting for an item",
        (*QUEUE_STAGES, "ec.transfer"),
        "connectors have no timings per request",
        _CONNECTORS_REPORT_IT,
        reads=("request",),
        lost_encode=(),
    ),
    PatchTarget(
        "transfer.load",
        "worker",
        (),
        "ec.transfer: load",
        ("dispatch", "ec.transfer"),
        "connectors have no timings per request",
        _CONNECTORS_REPORT_IT,
        lost_encode=(),
    ),
    PatchTarget(
        # V1 saves inside of the encoder's call, whose length would have the save in it.
        "transfer.save",
        "worker",
        (),
        "ec.transfer: save",
        ("ec.transfer", "encoder.compute", "dispatch"),
        "connectors have no timings per request",
        _CONNECTORS_REPORT_IT,
        lost_encode=("ec.transfer", "encoder.compute", "output"),
    ),
    PatchTarget(
        # vLLM calls it after each step, also of connectors that do nothing in it.
        "transfer.flush",
        "worker",
        (),
        "ec.transfer: get_finished(), where ECCPUConnector starts the copies of what a step encoded",
        ("ec.transfer", "encoder.compute", "dispatch"),
        "ECCPUConnector's save_caches only writes descriptors",
        _CONNECTORS_REPORT_IT,
        lost_encode=("ec.transfer", "encoder.compute", "output"),
    ),
    PatchTarget(
        "transfer.place",
        "core",
        (),
        "whether a media item was fetched, found in a cache or encoded here",
        (),
        "vLLM does not report per request which of its items it encoded",
        "outputs tell per item where its encoding came from",
        reads=("request", "index"),
        part=True,
    ),
    PatchTarget(
        "transfer.keep",
        "core",
        (),
        "how long encodings are kept for another instance after the answer",
        (),
        "request_finished is the only place that has the request and what it announces",
        _CONNECTORS_REPORT_IT,
        reads=("request",),
        part=True,
    ),
    PatchTarget(
        "transfer.ready",
        "core",
        (),
        "since when kept encodings can be read: the worker's copies are over",
        (),
        "a consumer that asks earlier is told to ask again, and no event is emitted",
        _CONNECTORS_REPORT_IT,
        part=True,
    ),
    PatchTarget(
        # A fetch that is gone after _drain_notifs() was read; after _sweep_timeouts() it was not.
        "transfer.fetched",
        "core",
        (),
        "kept encodings were read (ECCPUConnector's ProducerSession._drain_notifs)",
        (),
        "only that session is notified; ECMooncakeConnector's scheduler never is",
        _CONNECTORS_REPORT_IT,
        part=True,
    ),
    PatchTarget(
        "transfer.lease",
        "core",
        (),
        "kept encodings were not read in time, or evicted (ProducerSession._sweep_timeouts)",
        (),
        "vLLM only logs it",
        _CONNECTORS_REPORT_IT,
        part=True,
    ),
    PatchTarget(
        "kv.create",
        "core+worker",
        (
            TargetPlace(
                "vllm.distributed.kv_transfer.kv_connector.factory",
                "KVConnectorFactory.create_connector",
            ),
        ),
        "finds the KV connector's class",
        (*QUEUE_STAGES, *COMPUTE_STAGES, "kv.transfer", "sample", "output"),
        "connectors are third-party classes: only vLLM's factory has the instance's class",
        _CONNECTORS_REPORT_IT,
    ),
    PatchTarget(
        # Called again until blocks are allocated; only the last answer before that counts.
        "kv.match",
        "core",
        (),
        "kv.transfer: how much comes from elsewhere, and since when it is on its way",
        (*QUEUE_STAGES, "kv.transfer"),
        "a connector that looks for blocks, or loads them, has no event per request",
        _CONNECTORS_REPORT_IT,
        reads=("request",),
    ),
    PatchTarget(
        # On the scheduler, not on connectors: one address, whatever the connector's class is.
        "kv.arrive",
        "core",
        (TargetPlace("vllm.v1.core.sched.scheduler", "Scheduler._update_from_kv_xfer_finished"),),
        "kv.transfer: the blocks are there; those kept for another instance are freed",
        (*QUEUE_STAGES, "kv.transfer"),
        "the only place that every connector notifies",
        _CONNECTORS_REPORT_IT,
        reads=("kv_connector_output",),
    ),
    PatchTarget(
        "kv.keep",
        "core",
        (),
        "how long blocks are kept for another instance after the answer",
        (),
        "vLLM only counts the leases that ran out",
        _CONNECTORS_REPORT_IT,
        reads=("request",),
        part=True,
    ),
    PatchTarget(
        # V1 and V2 call it inside the step, before the forward or (async loads, newer V2) after it.
        "kv.load",
        "worker",
        (),
        "kv.transfer: a load inside a step",
        ("dispatch", "prefill.compute", "prefill.stall", "kv.transfer", "sample", "output"),
        "connectors have no timings per request",
        _CONNECTORS_REPORT_IT,
    ),
    PatchTarget(
        # wait_for_save() returns when all is saved: its length is time that the step spends in it.
        "kv.save",
        "worker",
        (),
        "kv.transfer: a save that its step waits for",
        ("kv.transfer", "prefill.stall", "sample", "output"),
        "connectors have no timings per request",
        _CONNECTORS_REPORT_IT,
    ),
)
